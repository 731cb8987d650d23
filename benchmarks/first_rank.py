"""CPU-seconds that the first rank of a large run spends on rows of all ranks in a step, without their tokens.

    OMP_NUM_THREADS=1 python benchmarks/first_rank.py [--ranks=4096] [--prompts=4096] [--samples=16] [--calls]

The ranks are not there: a fake process group stands for them, and another process keeps the run's store and delivers
groups as replicas do. Rows have lognormal lengths (median 4,096, at most 33,280). With --calls each line has the calls
of functions too, which do not depend on the machine.

- `groups`: ask replicas for the groups of a step, read their deliveries from the store, give all trainer ranks their
  rows, filter them and take the batch, by the trainer's own source.
- `score`: micro-batches of rows where they are; `plan`: ranks and micro-batches of the update, of 1 and 4 mini-batches.
- `move`: the request for the rows, and messages from replicas; `exchange`: the same between meshes of one run.
- `advantages`: GRPO's and the metrics of rows, with the tokens of this rank's own rows alone.

Then what a rank or the watch does once or beside the steps, which the sum leaves out:

- `signs of life`: the watch reads the records of all ranks, once a second.
- `process groups`: of all combinations of four axes; each is one call of NCCL, which is not made.
- `checkpoint`: the chunks that a rank writes of a Llama 70B, fully sharded, and its optimizer, and how many arrays have
  chunks below a mebibyte. `reshard.py` measures the plan of its weights.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from data_plane import COST, SEGMENTS, fake_mesh

from funrl import trees
from funrl.algos.recipes.grpo import grpo
from funrl.batch import as_dict
from funrl.data.packing import pack, packed_sizes
from funrl.data.prompts import Example
from funrl.mesh import launch as launching
from funrl.mesh import rules
from funrl.mesh.mesh import Mesh, parse, single
from funrl.mesh.pools import channel
from funrl.mesh.pools.channel import MethodCall
from funrl.mesh.pools.handover import Handover, messages_from
from funrl.mesh.rows import move_rows
from funrl.models import decoder_config
from funrl.models.decoder import weights
from funrl.processes.heartbeat import Heartbeat, Link
from funrl.processes.store import SIGNS
from funrl.processes.watch import WaitLimits
from funrl.processes.watch import Watch as RunWatch
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.placement import board
from funrl.trainer.placement.board import GroupBoard
from funrl.trainer.placement.groups import GroupGenerators
from funrl.trainer.placement.messages import WrittenGroup, written_rows
from funrl.trainer.settings.settings import SCORE_BUDGETS, settings_of
from funrl.trainer.sources.curriculum import PromptSchedule
from funrl.trainer.sources.evaluation import PromptEvaluation
from funrl.trainer.sources.generation import Rollout, to_rows
from funrl.trainer.sources.prompts import prompt_source
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.advantage_phase import advantages
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.micro import pack_in_place
from funrl.trainer.steps.step_rows import Rows, rows_of
from funrl.trainer.storage.shards import own_shards

T = TypeVar("T")
BUDGET = 65536
TOKENS = 8  # of a completion that is really there
SPAWN = multiprocessing.get_context("spawn")  # a fork would share pages with the process that is measured
LLAMA_70B = decoder_config(
    vocab=128256, embed=8192, layers=80, heads=64, kv_heads=8, head=128, mlp=28672, max_positions=512, eos=(1,), pad=0
)
EXAMPLE = Example([1, 2, 3, 4], "1+1=", {})


@contextmanager
def stored_in(store: dist.Store) -> Iterator[None]:
    """Use a store as that of the run."""
    with mock.patch.object(channel, "run_store", lambda: store), mock.patch.object(board, "run_store", lambda: store):
        yield


def written_group(samples: int, generator: np.random.Generator) -> tuple[Rollout, Rows]:
    """Completions of a prompt with the lengths of a long run, of whose tokens only the first are there."""
    logp = torch.zeros(TOKENS)
    tokens = torch.ones(TOKENS, dtype=torch.int64)
    done = [Completion(n, tokens, logp, logp, tokens, "stop") for n in range(samples)]
    lengths = np.clip(np.rint(4096 * np.exp(generator.standard_normal(samples))), 1, 33280).astype(np.int64)
    score_R1 = torch.from_numpy(generator.integers(0, 2, (samples, 1))).float()
    owner = np.zeros(samples, dtype=np.int64)
    ended = torch.ones(samples, dtype=torch.bool)
    known = Rollout(done, torch.from_numpy(lengths), ended, score_R1[:, 0], score_R1, owner=owner, mesh=single())
    rows = to_rows([EXAMPLE], known, Sampling(samples=samples, max_new_tokens=33280))
    return known, rows


def replicas(options: argparse.Namespace, port: Any) -> None:
    """Keep the store, and write every group that is asked for."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generator = np.random.default_rng(0)
    facts = [written_rows(*written_group(options.samples, generator)) for _ in range(64)]
    port.send(store.port)
    with stored_in(store):
        writer = GroupBoard(1)
        writer.hold(1)
        for number in itertools.count():
            while (work := writer.next_group()) is None:
                time.sleep(0.002)
            group = WrittenGroup(number % options.ranks, work, facts[number % len(facts)], {}, (), 0.1)
            writer.deliver(group)


def generators_of(options: argparse.Namespace, mesh: Mesh) -> tuple[Generation, GroupGenerators]:
    """The trainer's client of replicas, and its prompts."""
    generating = Mesh(mesh.sizes, -1, over=range(options.ranks, 2 * options.ranks), process=0)
    engine: Any = SimpleNamespace(
        requests=SimpleNamespace(mesh=mesh), weights=SimpleNamespace(mesh=generating), version=1, sender=None
    )
    rewarded: Any = SimpleNamespace(queue="tickets", on_error="stop")
    sampling = Sampling(samples=options.samples, max_new_tokens=33280)
    schedule = PromptSchedule([EXAMPLE] * options.prompts, options.prompts)
    generation = Generation(rewarded, schedule, sampling, PromptEvaluation((), sampling))
    job: Any = SimpleNamespace(settings=settings_of(batch_prompts=options.prompts), algorithm=grpo())
    show: Any = SimpleNamespace(note=print)
    return generation, GroupGenerators(job, engine, generation, show)


class Watch:
    """Prints what calls take."""

    def __init__(self, calls: bool) -> None:
        self.calls = calls
        self.seconds = 0.0

    def line(self, name: str, run: Callable[[], T], counts: bool = True) -> T:
        """Run and print a line; what does not count is not in the sum."""
        called = [0]

        def count(frame: object, event: str, argument: object) -> None:
            called[0] += event in ("call", "c_call")

        begin = time.process_time()
        if self.calls:
            sys.setprofile(count)
        try:
            result = run()
        finally:
            sys.setprofile(None)
        seconds = time.process_time() - begin
        self.seconds += seconds * counts
        print(f"{name:34} {seconds:8.3f} s" + f" {called[0]:10,} calls" * self.calls, flush=True)
        return result


def own_tokens(rows: Rows, to: np.ndarray, mesh: Mesh) -> Rows:
    """The rows of all ranks on these ranks of a mesh, with short ones in place of this rank's tokens."""
    known = as_dict(rows.batch)
    shape = (int((to == 0).sum()), TOKENS)
    batch = type(rows.batch)(
        tokens=torch.ones(shape, dtype=torch.int32),
        mask=torch.ones(shape, dtype=torch.bool),
        rollout_logp=torch.zeros(shape),
        **{name: known[name] for name in ("length", "group", "score", "scores", "truncated")},
    )
    return rows_of(batch, to, mesh)


def measure(options: argparse.Namespace, port: int) -> None:
    gc.freeze()  # as `launch` does
    mesh = fake_mesh(options.ranks)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    watch = Watch(options.calls)
    with stored_in(store):
        generation, generators = generators_of(options, mesh)
        source = prompt_source(generation._replace(remote=generators), Clock(), generators.show)
        steps = lambda: generators.take_step(source.next_rows, generators.saved(source.init()), 1, 2)  # noqa: E731
        rows, _, _ = watch.line("groups", steps)
    lengths = rows.lengths
    sizes = packed_sizes(BUDGET, int(lengths.max()))
    parts = np.array_split(np.random.default_rng(1).permutation(len(lengths)), 4)
    pack(lengths[:1], 1, sizes, SEGMENTS, cost=COST)  # the table of work, once a run
    watch.line(
        "plan, 4 mini-batches",
        lambda: [pack(lengths[x], options.ranks, sizes, SEGMENTS, cost=COST) for x in parts],
        False,
    )
    to = watch.line("plan", lambda: pack(lengths, options.ranks, sizes, SEGMENTS, cost=COST)).rank
    watch.line("score", lambda: pack_in_place(lengths, to, options.ranks, SCORE_BUDGETS * BUDGET, COST))

    def move() -> int:
        origins = rows.batch.origin.numpy()
        way = Handover(lengths, rows.owner, to, source=mesh, target=mesh)
        request = MethodCall("send_groups", (origins, tuple(way[:3]), list(range(options.prompts)), []))
        return len(pickle.dumps(request)) + len(list(messages_from(way)))

    watch.line("move", move)
    own = np.flatnonzero(to == 0)
    scored = own_tokens(rows, to, mesh)
    fields: dict[str, Any] = {"tokens": torch.ones(len(own), TOKENS, dtype=torch.int32)}
    short = np.minimum(lengths, TOKENS)
    watch.line("exchange", lambda: move_rows(fields, short, to, rows.owner, mesh), False)
    chain = grpo().advantage
    assert chain is not None
    watch.line("advantages", lambda: advantages(chain, chain.init(), scored))
    print(f"{'in all':34} {watch.seconds:8.3f} s, {len(lengths):,} rows on {options.ranks:,} ranks", flush=True)
    measure_run(options, watch)


def group_stub(names: Iterator[int]) -> SimpleNamespace:
    """A process group that was not made."""
    return SimpleNamespace(group_name=f"group {next(names)}")


def measure_run(options: argparse.Namespace, watch: Watch) -> None:
    """Lines of what does not belong to a step."""
    store = dist.HashStore()
    record = Heartbeat(Link()).record()
    for rank in range(options.ranks):
        store.set(f"{SIGNS}/{rank}", record.decode())
    ranks = RunWatch(store, options.ranks, WaitLimits())
    ranks.in_steps()  # from now on all have begun
    watch.line("signs of life", ranks.poll, False)
    inner = 64 if options.ranks % 64 == 0 else 1
    sizes = parse(f"dp{options.ranks // inner}" + ",ep2,sp4,tp8" * (inner > 1))
    names = itertools.count()
    calls = [mock.patch.object(dist, name, lambda *_, **__: group_stub(names)) for name in ("new_group", "split_group")]
    splits = mock.patch.object(launching, "_splits", lambda everyone: True, create=True)
    with calls[0], calls[1], splits:
        watch.line("process groups", lambda: launching.groups(sizes), False)
    shapes, axes = weights.shapes(LLAMA_70B), weights.axes(LLAMA_70B)
    training = parse(f"dp{options.ranks}")
    stored = rules.layouts(shapes, axes, rules.fully_sharded(rules.STORED), training)
    layouts = {f"{part}/{name}": item for part in ("params", "m", "v") for name, item in trees.named(stored)}
    tensors = {name: torch.empty(item.local_shape(), device="meta") for name, item in layouts.items()}
    own = watch.line("checkpoint", lambda: own_shards(tensors, layouts, Mesh(training), join=True), False)
    small = sum(math.prod(x.chunk) * 4 < min(1 << 20, math.prod(x.shape) * 4) for x in own.arrays.values())
    print(f"{len(own.parts):,} chunks of a rank; {small} of {len(own.arrays):,} arrays have chunks below a mebibyte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096, help="that train, and as many that generate")
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--calls", action="store_true", help="count calls, which takes longer")
    options = parser.parse_args()
    receiver, sender = SPAWN.Pipe(duplex=False)
    keeper = SPAWN.Process(target=replicas, args=(options, sender), daemon=True)
    keeper.start()
    try:
        measure(options, receiver.recv())
    finally:
        keeper.kill()
        keeper.join()


if __name__ == "__main__":
    main()
