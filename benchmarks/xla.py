"""The gradient of a model's log-probabilities in torch and in JAX: CPU-seconds, and the time to make the program.

    OMP_NUM_THREADS=1 JAX_PLATFORMS=cpu python benchmarks/xla.py [--layers=2,8] [--embed=128] [--tokens=512] [--turns=3]

One packed row in float32, forward and backward, by the functions that the trainer calls. The programs of deeper models
show whether depth costs time to trace and compile. torch and JAX take turns in one process; medians are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from absl import app, flags

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.varlen_attention import segment_offsets
from funrl.models import Model, decoder_config, decoder_model, place
from funrl.models.model import Layer
from funrl.xla.compiled import Compiled
from funrl.xla.layers import as_one_operator

LAYERS = flags.DEFINE_list("layers", ["2", "8"], "depths of the models")
EMBED = flags.DEFINE_integer("embed", 128, "model width; heads have 32", lower_bound=32)
TOKENS = flags.DEFINE_integer("tokens", 512, "tokens of the row, in four sequences", lower_bound=8)
VOCAB = flags.DEFINE_integer("vocab", 2048, "vocabulary", lower_bound=2)
TURNS = flags.DEFINE_integer("turns", 3, "timed turns of each, after one that is not timed", lower_bound=1)


def row() -> dict[str, torch.Tensor]:
    """The fields of a packed row of four sequences."""
    tokens = TOKENS.value
    generator = torch.Generator().manual_seed(0)
    segments = (1 + torch.arange(tokens) * 4 // tokens).unsqueeze(0)
    return {
        "tokens": torch.randint(0, VOCAB.value, (1, tokens), generator=generator),
        "positions": (torch.arange(tokens) % -(-tokens // 4)).unsqueeze(0),
        "segments": segments,
        "mask": torch.ones_like(segments, dtype=torch.bool),
        "trained": torch.arange(tokens - 1),
        "offsets": segment_offsets(segments, 4),
    }


def gradient_of(model: Model, layer: Layer | None) -> Callable[..., trees.Tree]:
    """The gradient of the mean log-probability, by weights and fields."""
    placed = place(model, layer=layer)

    def loss(params: trees.Tree, fields: dict[str, torch.Tensor]):
        logp_BT = placed.token_scores(params, Batch(**fields)).logp
        assert logp_BT is not None
        return logp_BT.mean(), ()

    return lambda params, fields: trees.value_and_grad(loss)(params, fields)


def seconds(run: Callable[[], object]) -> float:
    """CPU-seconds of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main(_: list[str]) -> None:
    print(f"{'layers':>6} {'torch s':>9} {'JAX s':>9} {'operators':>9} {'trace s':>9} {'compile s':>9}")
    fields = row()
    for depth in map(int, LAYERS.value):
        heads = EMBED.value // 32
        sizes = {"embed": EMBED.value, "heads": heads, "kv_heads": heads, "head": 32, "mlp": 3 * EMBED.value}
        model = decoder_model(decoder_config(vocab=VOCAB.value, layers=depth, **sizes))
        params = model.init(torch.Generator().manual_seed(0))
        program = Compiled(gradient_of(model, as_one_operator(model.layer)), "gradient")
        runs = [lambda fn=fn, params=params: fn(params, fields) for fn in (gradient_of(model, None), program)]
        for run in runs:
            run()
        times = [[seconds(run) for run in runs] for _ in range(TURNS.value)]
        torch_s, jax_s = (statistics.median(column) for column in zip(*times, strict=True))
        (cost,) = program.made
        print(f"{depth:6} {torch_s:9.3f} {jax_s:9.3f} {cost.nodes:9} {cost.trace:9.1f} {cost.compile:9.1f}")


if __name__ == "__main__":
    app.run(main)
