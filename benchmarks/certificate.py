"""The proof of a sync on CPU ranks: its seconds beside those of the reshard that it proves.

    OMP_NUM_THREADS=1 python benchmarks/certificate.py

A decoder of random weights goes from the layouts to train in to those of the engine; then the digests of all weights
are compared, and the probe. Printed are medians over the rounds after the first: wall seconds of each part, and
CPU-nanoseconds of a rank for each number that it digests (what trainer and engine share is digested once).
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time

import torch
import torch.distributed as dist
from absl import app, flags

from funrl import trees
from funrl.mesh import rules
from funrl.mesh.launch import launch, view
from funrl.mesh.mesh import Mesh, parse
from funrl.mesh.plan import plan
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import Rules
from funrl.models import Model, decoder_model, place
from funrl.models.decoder.config import decoder_config
from funrl.models.deployed import deployed
from funrl.rollout.certificate import compare_weights, probe_gap
from funrl.rollout.native.engine import native_engine

ROUNDS = flags.DEFINE_integer("rounds", 7, "rounds; the first is not counted", lower_bound=2)
EMBED = flags.DEFINE_integer("embed", 512, "model width", lower_bound=64)
LAYERS = flags.DEFINE_integer("layers", 5, "of the model", lower_bound=1)
LINES = flags.DEFINE_integer("lines", 6, "of the table, from its first", lower_bound=1, upper_bound=6)
FULLY = rules.fully_sharded(rules.STORED)
ROWS = [
    ("dp1", "dp1", rules.STORED, torch.float32),
    ("dp1", "dp1", rules.STORED, torch.bfloat16),
    ("dp4,tp2", "dp4,tp2", FULLY, torch.float32),
    ("dp4,tp2", "dp2,tp4", FULLY, torch.float32),
    ("dp4,tp2", "dp2,tp4", FULLY, torch.bfloat16),
    ("dp4,tp2", "dp8", FULLY, torch.bfloat16),
]


def make_model() -> Model:
    """A decoder; 22 M numbers by default."""
    sizes = {"embed": EMBED.value, "layers": LAYERS.value, "mlp": 3 * EMBED.value}
    return decoder_model(
        decoder_config(vocab=20 * EMBED.value, heads=8, kv_heads=8, head=EMBED.value // 8, tied=True, **sizes)
    )


def measure(sizes: str, stored: Rules, dtype: torch.dtype, mesh: Mesh) -> list[float]:
    """Milliseconds of the reshard, the digests and the probe, and CPU-nanoseconds for each number."""
    placed = place(make_model(), mesh, stored, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    params = trees.map(
        lambda x, layout: rules.shard(torch.randn(x.shape, generator=generator) * 0.02, layout, mesh),
        placed.model.shapes,
        placed.stored,
    )
    engine = native_engine(placed.model, view(mesh, parse(sizes)), dtype)
    to_engine = plan(placed.stored, engine.weights.layouts, dtype)
    found = []
    for turn in range(1, ROUNDS.value + 1):
        at, cpu = [clock(mesh)], []
        engine.load(engine.weights.named(reshard(params, to_engine, mesh)), turn)
        at.append(clock(mesh))
        cpu.append(time.process_time())
        assert compare_weights(deployed(placed, params), engine, turn)
        cpu.append(time.process_time())
        at.append(clock(mesh))
        held = {id(x): x for x in (*trees.leaves(params), *(x for _, x in engine.held_weights()))}
        numbers = sum(x.numel() for x in held.values())
        probe_gap(placed, params, engine)
        at.append(clock(mesh))
        found.append([1e3 * (b - a) for a, b in itertools.pairwise(at)] + [1e9 * (cpu[1] - cpu[0]) / numbers])
    return [statistics.median(of) for of in zip(*found[1:], strict=True)]


def clock(mesh: Mesh) -> float:
    if mesh.world > 1:
        dist.barrier()
    return time.perf_counter()


def main(_: list[str]) -> None:
    print(f"{trees.count(make_model().shapes) / 1e6:.1f} M weights, medians of {ROUNDS.value - 1} rounds\n")
    print("| train -> generate | engine | reshard, ms | digests, ms | probe, ms | ns a number |")
    print("|---|---|---|---|---|---|", flush=True)
    for train, generate, stored, dtype in ROWS[: LINES.value]:
        cells = launch(functools.partial(measure, generate, stored, dtype), parse(train), "cpu")
        title = f"{'FSDP ' * (stored is FULLY)}{train} -> {generate} | {str(dtype).removeprefix('torch.')}"
        print(f"| {title} | {' | '.join(f'{x:.0f}' for x in cells[:3])} | {cells[3]:.2f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
