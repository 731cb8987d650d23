"""One layer eager and compiled, and log-probabilities from hidden states: CPU-seconds, and what passes over memory.

    OMP_NUM_THREADS=1 python benchmarks/layer.py [--tokens=1024] [--embed=256] [--vocab=8192] [--turns=5]

A layer of a Llama with norms of queries and keys goes forward and backward over a packed row: eager, compiled, and
compiled with `--remat=selective`. "Passes" are operators that read or write activations, matrix products, attention and
views apart, of eager mode; compiled, the loops that inductor makes of them. Log-probabilities go forward and backward
with and without the entropy, beside whole logits. What is compared takes turns in one process; medians are shown.

The host's part is measured by calls of a layer of width 64 over 16 tokens, beside torch.compile's own: as it is, and
with graphs that return what they have computed first, so that only the way to the graph and back is left.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from absl import app, flags
from functorch.compile import min_cut_rematerialization_partition
from instruction_set import limit_instructions
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.compiled_kernels.linear_logprob import linear_logprob
from funrl.compiled_kernels.rotary import frequencies, rotary
from funrl.mesh.mesh import SINGLE
from funrl.models import compile_layer, decoder_config, decoder_model
from funrl.models.decoder.config import layers_of
from funrl.models.decoder.layers import Context
from funrl.models.model import Layer, Model

TOKENS = flags.DEFINE_integer("tokens", 1024, "tokens of the row", lower_bound=4)
EMBED = flags.DEFINE_integer("embed", 256, "model width; heads have 64", lower_bound=64)
VOCAB = flags.DEFINE_integer("vocab", 8192, "vocabulary", lower_bound=2)
TURNS = flags.DEFINE_integer("turns", 5, "timed turns of each, after one that is not timed", lower_bound=1)
CALLS = flags.DEFINE_integer("calls", 200, "calls of the small layer in a turn", lower_bound=1)
REMAT = flags.DEFINE_list("remat", ["none", "selective"], "of the compiled layers")

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "mkldnn::_linear_pointwise", "funrl::")
VIEWS = (
    "aten::view",
    "aten::_unsafe_view",
    "aten::t",
    "aten::transpose",
    "aten::expand",
    "aten::slice",
    "aten::select",
    "aten::unsqueeze",
    "aten::detach",
    "aten::alias",
    "aten::empty",
    "aten::new_empty",
    "aten::as_strided",
    "aten::_reshape_alias",
    "aten::permute",
    "aten::split",
    "aten::squeeze",
)


class Passes(TorchDispatchMode):
    """Counts operators that are neither products nor views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        self.count += not name.startswith(PRODUCTS) and name not in VIEWS
        return func(*args, **(kwargs or {}))


class LayerInputs(NamedTuple):
    """A layer over one packed row of two sequences."""

    model: Model
    params: trees.Tree
    x_BTD: Tensor
    context: Context

    def forward(self, layer: Layer) -> Tensor:
        """The layer's result."""
        return layer(self.model.config, SINGLE, self.params, self.x_BTD, self.context)

    def both(self, layer: Layer) -> Sequence[Tensor]:
        """Gradients of the sum of the result."""
        return torch.autograd.grad(self.forward(layer).sum(), [self.x_BTD, *trees.leaves(self.params)])


def layer_inputs(embed: int, tokens: int) -> LayerInputs:
    """Random weights and hidden states, which learn."""
    heads, half = max(1, embed // 64), tokens // 2
    sizes = {"embed": embed, "heads": heads, "kv_heads": max(1, heads // 2), "mlp": 3 * embed}
    model = decoder_model(decoder_config(vocab=2, layers=1, head=64, family="qwen3", qk_norm=True, **sizes))
    params = trees.map(Tensor.requires_grad_, model.init(torch.Generator().manual_seed(0))["layers"][0])
    x_BTD = torch.randn(1, 2 * half, embed, generator=torch.Generator().manual_seed(1)).requires_grad_()
    turns = rotary(torch.arange(2 * half)[None] % half, frequencies(64, 1e4), torch.float32)
    context = Context(layers_of(model.config)[0], turns, offsets=torch.tensor([0, half, 2 * half], dtype=torch.int32))
    return LayerInputs(model, params, x_BTD, context)


def layer_runs() -> dict[str, Callable[[], object]]:
    """Forward and backward of a layer, by how it is computed."""
    inputs = layer_inputs(EMBED.value, TOKENS.value)
    layers = {"eager": inputs.model.layer}
    for mode in REMAT.value:
        layers["compiled" + f", {mode}" * (mode != "none")] = compile_layer(inputs.model, "on", remat=mode)
    return {name: functools.partial(inputs.both, layer) for name, layer in layers.items()}


def first_results() -> Callable[..., Any]:
    """A backend of torch.compile whose graphs return the results of their first run again."""

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[[list], object]:
        results: list[object] = []

        def run(arguments: list) -> object:
            if not results:
                results.append(graph(*arguments))
            arguments.clear()
            return results[0]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)


def show_calls() -> None:
    """Print microseconds of the calls of a small layer, torch.compile's own and funrl's."""
    inputs = layer_inputs(64, 16)
    forward = torch.no_grad()(inputs.forward)
    print(f"{'calls of a small layer':34s} torch.compile   funrl   ratio")
    for graphs, backend in (("", "inductor"), (", no computing", first_results())):
        peer = torch.compile(inputs.model.layer, fullgraph=True, backend=backend)
        own = compile_layer(inputs.model, "on", backend=backend)
        for name, call in (("forward", forward), ("forward and backward", inputs.both)):
            medians = turns_of([functools.partial(call, layer) for layer in (peer, own)])
            theirs, ours = (1e6 * seconds for seconds in medians)
            print(f"{name + graphs:34s} {theirs:13.1f} {ours:7.1f} {ours / theirs:7.2f}", flush=True)


def turns_of(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median CPU-seconds of each call, of turns of `--calls`."""
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(3):  # the first compiles, the second finds what the first has dispatched
            call()
    for _ in range(TURNS.value):
        for times, call in zip(seconds, calls, strict=True):
            start = time.process_time()
            for _ in range(CALLS.value):
                call()
            times.append((time.process_time() - start) / CALLS.value)
    return [statistics.median(times) for times in seconds]


def logprob_runs() -> dict[str, Callable[[], object]]:
    """Forward and backward from hidden states to log-probabilities."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS.value, EMBED.value, generator=draw).requires_grad_()
    unembed = torch.randn(VOCAB.value, EMBED.value, generator=draw).div_(EMBED.value**0.5).requires_grad_()
    ids = torch.randint(0, VOCAB.value, (TOKENS.value,), generator=draw)

    def run(*want: str) -> Callable[[], object]:
        def both():
            logp = linear_logprob(hidden, unembed, ids, want=want).logp
            assert logp is not None
            return torch.autograd.grad(logp.sum(), (hidden, unembed))

        return both

    def whole():
        logp = (hidden @ unembed.T).log_softmax(-1).gather(1, ids[:, None])
        return torch.autograd.grad(logp.sum(), (hidden, unembed))

    return {"log-probability": run("logp"), "and entropy": run("logp", "entropy"), "whole logits": whole}


def passes_of(name: str, run: Callable[[], object]) -> int:
    """Passes over activations of the first call, which compiles what is compiled."""
    metrics.reset()
    if name.startswith("compiled"):
        run()
        return metrics.generated_kernel_count
    with Passes() as seen:
        run()
    return seen.count


def show(title: str, runs: dict[str, Callable[[], object]], more: dict[str, int]) -> None:
    """Print CPU-seconds of each, its ratio to the first, and a number more."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(TURNS.value + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                times[name].append(time.process_time() - start)
    medians = {name: statistics.median(x) for name, x in times.items()}
    first = next(iter(medians.values()))
    print(f"{title:28s} CPU-ms   ratio   passes")
    for name, seconds in medians.items():
        print(f"{name:28s} {1e3 * seconds:6.1f}   {seconds / first:5.2f}   {more.get(name, ''):6}", flush=True)


def main(_: list[str]) -> None:
    limit_instructions()
    show_calls()
    runs = layer_runs()
    show("a layer", runs, {name: passes_of(name, run) for name, run in runs.items()})
    show("log-probabilities", logprob_runs(), {})


if __name__ == "__main__":
    app.run(main)
