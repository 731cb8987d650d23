"""Checks of what may break first on two GPUs: captured sums, groups, hooks, objects and weights beside."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_parts.decoding import DTYPE, Generation, timed_completions, work_of
from gpu_parts.models import Training, model_of, random_weights
from gpu_parts.rows import Bench, Row, Rows, now
from gpu_parts.training import measured_step

from funrl.cost.tracing.hardware import hardware_of
from funrl.mesh import collectives
from funrl.mesh.launch import _group_name, launch, submesh
from funrl.mesh.mesh import AXES, Mesh, parse
from funrl.mesh.own_world import as_whole_world
from funrl.mesh.pools.transfer import SentWeights, WeightForm, WeightReceiver, WeightSender, transfer_group
from funrl.mesh.reshard import plan
from funrl.mesh.rules import Layout, shard
from funrl.models import compile_layer
from funrl.rollout.native.device.captured import CapturedFunctions
from funrl.rollout.native.engine import NativeOptions, native_engine

REPLAYS = 20
GATHERS = 50  # of objects
VERSIONS = 3  # of weights that are sent
WAIT_S = 30.0  # for weights
MOST_HELD = 1.15  # bytes of a compiled step over those of an eager one
Check = Callable[[Bench, Mesh], Rows]


def on_two_ranks(mesh: str, check: Check, bench: Bench) -> Rows:
    """Rows of a check that runs on both ranks of a mesh, as the first one has them."""
    yield from launch(functools.partial(_rows_of, check, bench.small), parse(mesh), bench.device.type)


def _rows_of(check: Check, small: bool, mesh: Mesh) -> list[Row]:
    return list(check(Bench(mesh.device, hardware_of(mesh.device.type), small), mesh))


def captured_sums(bench: Bench, mesh: Mesh) -> Rows:
    """A sum over tensor ranks inside of a graph, and the engine with and without graphs."""
    size = 64 if bench.small else 4096
    x = torch.randn(size, size, device=mesh.device, dtype=DTYPE, generator=_generator(mesh.device)) + mesh.rank

    def compute() -> tuple[torch.Tensor]:
        return (collectives.psum(x @ x, mesh, "tensor"),)

    functions = CapturedFunctions(mesh)
    expected = compute()[0].clone()
    begin = now(mesh.device)
    equal = all(torch.equal(functions.run("sum", compute)[0], expected) for _ in range(REPLAYS))
    seconds = (now(mesh.device) - begin) / REPLAYS
    captured = functions.captured == 1 or mesh.device.type == "cpu"
    note = f"{functions.captured} graphs, replays {'equal' if equal else 'DIFFER from'} the eager result"
    yield Row("captured product and sum over tp2", 1e3 * seconds, "ms", note=note, failed=not (equal and captured))
    work = work_of(bench)
    completed = [_completions(bench, mesh, work, static) for static in (True, False)]
    for name, (seconds, uncaptured) in zip(("with graphs", "without"), completed, strict=True):
        rate = work.rows[-1] * work.new / seconds
        label = f"native engine on tp2 {name}, {work.model}, {work.rows[-1]} rows"
        yield Row(label, rate, "tokens/s", note=f"{uncaptured} passes not captured", failed=uncaptured > 0)


def _completions(bench: Bench, mesh: Mesh, work: Generation, static: bool) -> tuple[float, int]:
    """Seconds of completions after turns that compile and capture, and passes that could not be captured."""
    model = model_of(work.model)
    layer = compile_layer(model, "auto", bench.device.type)
    options = NativeOptions(work.rows[-1], 0, packed=False, static=static)
    engine = native_engine(model, mesh, DTYPE, options=options, layer=layer)
    whole = random_weights(model, mesh.device, DTYPE)
    engine.load(engine.weights.named(shard(whole, engine.weights.layouts, mesh)))
    prompts = [[3 + n % 5] * work.prompt for n in range(work.rows[-1])]
    spans = [timed_completions(engine, prompts, [work.new] * len(prompts), seed) for seed in range(3)]
    return spans[-1], engine.cost().uncaptured


def groups_without_ranks(bench: Bench, mesh: Mesh) -> Rows:
    """Groups that leave one of the ranks out, between sums of both; and one rank as the whole world of a library."""
    for left_out in range(mesh.world):
        begin = time.perf_counter()
        name = _group_name(((1 - left_out,),), f"a mesh without rank {left_out}", mesh.timeout)
        x = torch.ones(4, device=mesh.device)
        if name is not None:
            dist.all_reduce(x, group=Mesh({**mesh.sizes}, mesh.rank, groups={("data",): name}).group("data"))
        both = float(collectives.psum(x, mesh, AXES)[0])
        outside = (name is None) == (mesh.rank == left_out)
        seconds = time.perf_counter() - begin
        yield Row(f"group without rank {left_out}", 1e3 * seconds, "ms", failed=both != mesh.world or not outside)
    meshes = [submesh(mesh, {**mesh.sizes, "data": 1}, [rank]) for rank in range(mesh.world)]
    with as_whole_world(next(own for own in meshes if own.here)):
        x = torch.ones(4, device=mesh.device)
        dist.all_reduce(x)
        alone = dist.get_world_size() == 1 and float(x[0]) == 1
    both = float(collectives.psum(x, mesh, AXES)[0])
    yield Row("each rank as a whole world", both, "ranks", note="of the sum after it", failed=both != 2 or not alone)


def saved_by_hooks(bench: Bench, mesh: Mesh) -> Rows:
    """Memory and time of a fully sharded step, eager and with compiled layers: weights that hooks miss stay whole."""
    sizes = ("0.2M", 128, 64) if bench.small else ("1.7B", 4096, 1024)
    flags = {"mesh": str(mesh), "generate_mesh": str(mesh), "fsdp": True}
    held = {}
    for mode in ("off", "auto"):  # on a CPU a short run is eager either way
        training = Training(*sizes, flags | {"compile": mode})
        seconds, held[mode] = measured_step(bench, training, mesh=mesh)
        name = f"{sizes[0]} on {mesh}, fully sharded, --compile={mode}"
        yield Row(f"{name}: update", 1e3 * seconds["update_policy"], "ms")
        more = held[mode] / held["off"]
        failed = more > MOST_HELD and not bench.small
        yield Row(f"{name}: memory", held[mode] / 1e9, "GB", note=f"{more:.2f} of eager", failed=failed)


def objects_beside_captures(bench: Bench, mesh: Mesh) -> Rows:
    """Gathers of objects while another thread captures graphs of its own."""
    x = torch.randn(64, 64, device=mesh.device)
    ended = threading.Event()
    captures: list[int] = []
    problems: list[str] = []

    def capture() -> None:
        try:
            stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
            with torch.cuda.stream(stream):
                while not ended.is_set():
                    functions = CapturedFunctions(Mesh(device=mesh.device))
                    for _ in range(3):
                        functions.run("product", lambda: (x @ x,))
                    captures.append(functions.captured)
        except Exception as error:  # told by the row
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=capture)
    thread.start()
    begin = time.perf_counter()
    right = all(
        collectives.gather_objects((n, mesh.rank), mesh) == [(n, rank) for rank in range(mesh.world)]
        for n in range(GATHERS)
    )
    seconds = (time.perf_counter() - begin) / GATHERS
    ended.set()
    thread.join()
    if mesh.device.type == "cuda" and 0 in captures:
        problems.append(f"{captures.count(0)} of {len(captures)} were not captured")
    everywhere = [problem for own in collectives.gather_objects(problems, mesh) for problem in own]
    note = "; ".join([f"beside {len(captures)} captures", *everywhere])
    yield Row("gather of objects", 1e3 * seconds, "ms", note=note, failed=bool(everywhere) or not right)


def weights_beside(bench: Bench, mesh: Mesh) -> Rows:
    """Weights from one rank to the other while both compute, on streams and a communicator of their own."""
    training, generating = (submesh(mesh, {**mesh.sizes, "data": 1}, [rank]) for rank in (0, 1))
    size, count = (64, 2) if bench.small else (4096, 32)
    whole = {str(n): Layout((size, size), ((), ()), (1, 1, 1, 1)) for n in range(count)}
    way = plan(whole, whole, DTYPE, 2, src_ranks=training.ranks, dst_ranks=generating.ranks)
    group = transfer_group(mesh)
    products = torch.randn(size, size, device=mesh.device, dtype=DTYPE)
    note = ""
    seconds = 0.0
    problem = None
    if training.here:
        sender = WeightSender(training, 1, group)
        weights = {name: torch.zeros(size, size, device=mesh.device, dtype=DTYPE) for name in whole}
        for version in range(VERSIONS):
            sender.begin({"": SentWeights(weights, way, version)})
            for x in weights.values():
                x += 1  # a copy is what is sent
            _compute(products)
        sender.wait()
        seconds = sender.sent_s
        note = f"hidden: {sender.hidden_share:.0%}"
    else:
        form = WeightForm(way, lambda tree: tree)
        receiver = WeightReceiver(generating, form, form, group)
        with receiver.receiving():
            arrived = [_arrived(receiver, products) for _ in range(VERSIONS)]
        if arrived != [(version, float(version)) for version in range(VERSIONS)]:
            problem = f"versions and values {arrived}"
    problems = [text for text in collectives.gather_objects(problem, mesh) if text]
    rate = sum(x.shape[0] * x.shape[1] for x in whole.values()) * DTYPE.itemsize / max(seconds, 1e-9) / 1e9
    yield Row("weights beside products", rate, "GB/s", note="; ".join([note, *problems]), failed=bool(problems))


def _arrived(receiver: WeightReceiver, products: torch.Tensor) -> tuple[int, float]:
    """Version and value of the next weights, beside products."""
    end = time.monotonic() + WAIT_S
    while (newest := receiver.arrived()) is None:
        _compute(products)
        if time.monotonic() > end:
            raise TimeoutError(f"no weights have come in {WAIT_S:g} s")
    values: Any = newest.trees[""]
    value = max(float(x.float().amax()) for x in values.values())
    lowest = min(float(x.float().amin()) for x in values.values())
    receiver.release()
    return newest.versions[""], value if value == lowest else float("nan")


def _compute(x: torch.Tensor) -> None:
    for _ in range(8):
        torch.mm(x, x)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


TWO_GPUS: dict[str, tuple[str, Check]] = {  # part: mesh and check, what breaks first is first
    "captured-tp2": ("tp2", captured_sums),
    "groups-without-ranks": ("dp2", groups_without_ranks),
    "hooks-compiled": ("dp2", saved_by_hooks),
    "objects-beside-captures": ("dp2", objects_beside_captures),
    "weights-beside": ("dp2", weights_beside),
}
