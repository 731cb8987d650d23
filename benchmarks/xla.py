"""A training step of a model in torch, in JAX by the trainer's functions, and in JAX by hand: CPU-seconds.

    OMP_NUM_THREADS=1 JAX_PLATFORMS=cpu python benchmarks/xla.py [--layers=2,8] [--embed=128] [--tokens=512] [--turns=3]

One packed row in float32: the gradient of its mean log-probability, and AdamW. What is written by hand is in
handwritten_jax.py, with optax. The programs of deeper models show whether depth costs time to trace and compile. The
three take turns in one process; medians are shown.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import handwritten_jax
import torch
from absl import app, flags

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.varlen_attention import segment_offsets
from funrl.mesh.mesh import single
from funrl.models import Model, decoder_config, decoder_model, place
from funrl.models.model import Layer
from funrl.optim import adamw, apply_updates
from funrl.xla.layers import as_one_operator
from funrl.xla.meshes import DeviceCopies, MeshProgram, ShardedFunction, devices_of_mesh, to_jax

RATE = 1e-3
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


def step_of(model: Model, layer: Layer | None) -> Callable[..., trees.Tree]:
    """A step, by weights, state of the optimizer, and fields: both after it, and the loss."""
    placed = place(model, layer=layer)
    optimizer = adamw(RATE)

    def loss(params: trees.Tree, fields: dict[str, torch.Tensor]):
        logp_BT = placed.token_scores(params, Batch(**fields)).logp
        assert logp_BT is not None
        return logp_BT.mean(), ()

    def step(params: trees.Tree, state: trees.Tree, fields: dict[str, torch.Tensor]):
        (value, _), grads = trees.value_and_grad(loss)(params, fields)
        with torch.no_grad():
            updates, state = optimizer.update(grads, state, params)
            return apply_updates(params, updates), state, value

    return step


def seconds(run: Callable[[], object]) -> float:
    """CPU-seconds of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def by_hand(params: trees.Tree, fields: dict[str, torch.Tensor]) -> Callable[[], float]:
    """A call of the step that is written by hand; it returns the loss."""
    arrays = handwritten_jax.stacked(trees.map(to_jax, params))
    rows = trees.map(to_jax, fields)
    init, step = handwritten_jax.training_step(RATE)
    state = init(arrays)
    return lambda: float(step(arrays, state, rows)[2])


def main(_: list[str]) -> None:
    print(f"{'layers':>6} {'torch s':>9} {'JAX s':>9} {'by hand':>9}")
    fields = row()
    for depth in map(int, LAYERS.value):
        heads = EMBED.value // 32
        sizes = {"embed": EMBED.value, "heads": heads, "kv_heads": heads, "head": 32, "mlp": 3 * EMBED.value}
        model = decoder_model(decoder_config(vocab=VOCAB.value, layers=depth, **sizes))
        params = model.init(torch.Generator().manual_seed(0))
        state = adamw(RATE).init(params)
        plain = step_of(model, None)
        step = step_of(model, as_one_operator(model.layer))
        notes: list[str] = []
        devices = DeviceCopies(devices_of_mesh(single().sizes))
        program = MeshProgram(ShardedFunction("step", lambda mesh, step=step: step), devices, notes.append)
        lowered = functools.partial(program, params, state, fields)
        runs = [functools.partial(plain, params, state, fields), lowered, by_hand(params, fields)]
        losses = [run() for run in runs]
        assert abs(losses[0][2] - losses[1][2]) < 1e-4 and abs(losses[0][2] - losses[2]) < 1e-4, losses
        times = [[seconds(run) for run in runs] for _ in range(TURNS.value)]
        torch_s, jax_s, hand_s = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{depth:6} {torch_s:9.3f} {jax_s:9.3f} {hand_s:9.3f}")
        print("\n".join(notes))


if __name__ == "__main__":
    app.run(main)
