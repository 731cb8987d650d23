"""Cost of the data plane for one rank of 8, 64 or 512: bytes, seconds, and the balance of packed micro-batches.

    OMP_NUM_THREADS=1 python benchmarks/data_plane.py [--rows=16384] [--longest=33280] [--budget=65536] [--part=all]
        [--ranks 8 64 512]

`packing`: useful FLOPs times lockstep efficiency in percent, for lognormal lengths (median 4,096) that are independent
or correlated by 0.5 within groups of 16. Micro-batch i begins when all ranks have done i - 1; a micro-batch costs its
padding too, and attention as in a model of 7 billion parameters (28 layers of 28 heads of 128). Beside it: the rows
where they are, scored with the larger budget of passes that learn nothing; and the bound of rows that cannot be split:
the longest, or an equal share of each mini-batch.

`bytes`: one rank's own rows are real, the others' are known by their lengths alone, and a fake process group stands for
the world. Each line is a process of its own: bytes after the move, the peak over move and advantages, what the rank
sends, the CPU-seconds of its advantages. Rows have the fields that GRPO and PPO read.

`data`: memory and time of a file of lines of 200 tokens, by default 100,000.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from random_trainer import alone, resident

from funrl.algos.applying import apply_advantage
from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.ppo import ppo
from funrl.batch import Batch, with_across
from funrl.data.packing import RowCost, lockstep_work, pack, packed_sizes
from funrl.data.supervised import load_examples, text_batch
from funrl.data.text_lengths import check_lengths
from funrl.data.tokenizer import character_tokenizer
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.rows import across, gather_table, move_rows, own_rows
from funrl.trainer.settings.settings import SCORE_BUDGETS
from funrl.trainer.steps.micro import pack_in_place

COST = RowCost(pair=4 * 28 * 28 * 128 / (2 * 7.6e9))
MINIBATCHES, GROUP, SEGMENTS = (1, 4), 16, 1024
ROWS = ("data", "expert")
ALGORITHMS = {"grpo": grpo, "ppo": ppo}


def lengths_of(rows: int, longest: int, correlation: float = 0.0) -> np.ndarray:
    """Lognormal lengths of median 4,096; rows of a group of 16 are correlated."""
    draw = np.random.default_rng(0)
    shared = np.repeat(draw.standard_normal(-(-rows // GROUP)), GROUP)[:rows]
    normal = np.sqrt(1 - correlation) * draw.standard_normal(rows) + np.sqrt(correlation) * shared
    return np.clip(np.rint(4096 * np.exp(normal)), 1, longest).astype(np.int64)


def packing(options: argparse.Namespace) -> None:
    print("correlation ranks minibatches | packed  scored   bound | seconds a step, sizes used")
    for correlation in (0.0, 0.5):
        lengths = lengths_of(options.rows, options.longest, correlation)
        useful = int(COST.work(lengths).sum())
        sizes = packed_sizes(options.budget, int(lengths.max()))
        for ranks in options.ranks:
            for minibatches in MINIBATCHES:
                parts = np.array_split(np.random.default_rng(1).permutation(len(lengths)), minibatches)
                start, took, used, to = time.process_time(), 0, set(), np.zeros(len(lengths), dtype=np.int64)
                plans = [pack(lengths[part], ranks, sizes, SEGMENTS, cost=COST) for part in parts]
                seconds = time.process_time() - start
                for plan, part in zip(plans, parts, strict=True):
                    took += lockstep_work(plan, lengths[part], COST)
                    used |= set(plan.size.flat)
                    to[part] = plan.rank
                scored = lockstep_work(
                    pack_in_place(lengths, to, ranks, SCORE_BUDGETS * options.budget, COST), lengths, COST
                )
                works = [COST.work(lengths[part]) for part in parts]
                bound = sum(max(int(work.sum()) / ranks, int(work.max())) for work in works)
                shares = [100 * useful / ranks / x for x in (took, scored, bound)]
                print(
                    f"{correlation:11} {ranks:5} {minibatches:11} | "
                    + " ".join(f"{x:6.1f}%" for x in shares)
                    + f" | {seconds:.3f} s, {len(used)} of {len(sizes)}"
                )


def fake_mesh(ranks: int) -> Mesh:
    """Rank 0 of a mesh of data ranks that are not there: what it is sent are zeros."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    return Mesh(dict.fromkeys(AXES, 1) | {"data": ranks}, groups={("data",): name})


def own_fields(algorithm: str, lengths: np.ndarray) -> dict[str, torch.Tensor]:
    """Token fields of a rank's rows, a quarter of each row its prompt."""
    draw = torch.Generator().manual_seed(0)
    shape = (len(lengths), -(-int(lengths.max(initial=1)) // 8) * 8)
    length, at = torch.from_numpy(lengths)[:, None], torch.arange(shape[1])
    names = ("rollout_logp", "old_logp", "ref_logp") + (("value",) if algorithm == "ppo" else ())
    fields: dict[str, torch.Tensor] = {name: torch.randn(shape, generator=draw) for name in names}
    tokens = torch.randint(0, 1 << 15, shape, generator=draw, dtype=torch.int32)
    return fields | {"tokens": tokens, "mask": (at >= length // 4) & (at < length)}


def one_rank(algorithm: str, ranks: int, options: argparse.Namespace) -> None:
    """Rank 0's share of a step, from rows where they were generated to advantages where they are trained."""
    lengths = lengths_of(options.rows, options.longest)
    mesh = fake_mesh(ranks)
    generated = np.arange(len(lengths)) // GROUP % ranks
    trained = pack(lengths, ranks, packed_sizes(options.budget, int(lengths.max())), SEGMENTS, cost=COST).rank
    score = torch.randint(0, 2, (len(lengths),), generator=torch.Generator().manual_seed(1)).float()
    recipe = ALGORITHMS[algorithm]()
    mine = np.flatnonzero(generated == 0)
    before = resident("VmRSS")
    fields = own_fields(algorithm, lengths[mine])
    moved = move_rows(fields, lengths, generated, trained, mesh)
    del fields
    own = own_rows(trained, mesh, ROWS).numpy()
    fields = own_fields(algorithm, lengths[own])  # what the fake group sends is nothing
    del moved.fields[next(iter(moved.fields))]
    moved.fields.clear()
    columns = {"score": score[torch.from_numpy(own)], "length": torch.from_numpy(lengths[own])}
    table = gather_table(columns, trained, mesh, ROWS)
    held = resident("VmRSS") - before
    row_fields = {"score": score, "length": torch.from_numpy(lengths), "group": torch.arange(len(lengths)) // GROUP}
    assert table["score"].shape == score.shape
    batch = with_across(Batch(**fields, **row_fields), across(trained, mesh, ROWS))
    start = time.process_time()
    advantage = recipe.advantage
    assert advantage is not None
    apply_advantage(advantage, advantage.init(), batch)
    seconds = time.process_time() - start
    peak = resident("VmHWM") - before
    tokens = int(lengths[own].sum())
    print(
        f"{algorithm:5} {ranks:5} {len(own):6} {tokens:10,} | {held / 1e6:9,.0f} {peak / 1e6:9,.0f} "
        f"{moved.sent / 1e6:9,.1f} | {seconds:6.2f} s",
        flush=True,
    )


def planes(options: argparse.Namespace) -> None:
    print("         ranks   rows     tokens |   MB held   MB peak   MB sent | advantages")
    for algorithm in ALGORITHMS:
        for ranks in options.ranks:
            alone(functools.partial(one_rank, algorithm, ranks, options))


def data(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "large.jsonl")
        with open(path, "w") as file:
            for number in range(options.lines):
                record = {"prompt": "abc", "completion": "x" * 96 + " " + "y" * 99, "id": number}
                file.write(json.dumps(record) + "\n")
        alone(functools.partial(read_file, path))


def read_file(path: str) -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
    tokenizer.encode("ab")
    before, start = resident("VmRSS"), time.perf_counter()
    examples = load_examples(path, "demonstrations", tokenizer)
    opened = time.perf_counter()
    check_lengths(examples, 1024, tokenizer)
    checked = time.perf_counter()
    firsts = range(0, len(examples) - 64, 1000)
    for first in firsts:
        text_batch([examples[first + i] for i in range(64)], 0)
    read = time.perf_counter()
    print(
        f"{len(examples):,} lines: opened and every line checked in {opened - start:.2f} s, lengths in "
        f"{checked - opened:.2f} s, an example read in {(read - checked) / len(firsts) / 64 * 1e6:.0f} us, "
        f"{(resident('VmRSS') - before) / 1e6:.1f} MB more",
        flush=True,
    )


PARTS = {"packing": packing, "bytes": planes, "data": data}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--longest", type=int, default=33280, help="tokens of the longest row")
    parser.add_argument("--budget", type=int, default=65536, help="tokens of a micro-batch")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--lines", type=int, default=100_000, help="of the file, at least 65")
    parser.add_argument("--part", default="all", choices=("all", *PARTS))
    options = parser.parse_args()
    for name, part in PARTS.items():
        if options.part in ("all", name):
            part(options)


if __name__ == "__main__":
    main()
