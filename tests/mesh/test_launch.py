"""Real gloo ranks: what they compute, and how a run ends when one of them does not."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_python import run_with_python

from funrl.mesh import collectives
from funrl.mesh import launch as launching
from funrl.mesh.launch import WaitLimits, WorkerError, launch, submesh, view
from funrl.mesh.mesh import MeshError, parse
from funrl.processes import heartbeat
from funrl.processes import workers as processes
from funrl.processes.heartbeat import Heartbeat
from funrl.processes.store_link import Alone
from funrl.processes.workers import can_fork

pytestmark = pytest.mark.gloo


@pytest.mark.slow
def test_eight_ranks_agree_and_rank_zero_returns():
    def program(m):
        x = torch.full((3,), float(m.rank))
        gathered = collectives.all_gather(x[:1], m, ("data", "tensor"))
        return collectives.psum(x, m, "data").tolist(), collectives.psum(x, m, "tensor").tolist(), gathered.tolist()

    over_data, over_tensor, everyone = launch(program, parse("dp4,tp2"), "cpu")
    assert over_data == [0 + 2 + 4 + 6] * 3
    assert over_tensor == [0 + 1] * 3
    assert everyone == list(range(8))


def test_one_device_starts_no_process():
    assert launch(lambda m: (os.getpid(), m.groups), parse(""), "cpu") == (os.getpid(), {})


def test_gradients_through_func_grad_on_real_ranks():
    def program(m):
        def loss(x):
            return collectives.psum(collectives.pbroadcast(x, m, "tensor") * (m.rank + 1), m, "tensor").square().sum()

        return torch.func.grad(loss)(torch.tensor([2.0])).item()

    # y = (1 + 2) x, so d(y^2)/dx = 2 * 9 * x
    assert launch(program, parse("tp2"), "cpu") == pytest.approx(36.0)


@pytest.mark.slow
def test_the_pairs_compile_whole_on_real_ranks():
    def program(m):
        def loss(x):
            return collectives.psum(torch.tanh(collectives.pbroadcast(x, m, "tensor")), m, "tensor").square().sum()

        def gradient(fn):
            x = torch.tensor([0.5, -0.3], requires_grad=True)
            return torch.autograd.grad(fn(x), x)[0].tolist()

        return gradient(loss), gradient(torch.compile(loss, fullgraph=True, backend="aot_eager"))

    eager, compiled = launch(program, parse("tp2"), "cpu")
    assert eager == compiled


SOON_S = 60  # a rank that waits for one that has gone gives up after ten minutes


def test_a_rank_that_raises_ends_the_run_with_its_traceback():
    def program(m):
        if m.rank == 2:
            raise ValueError("the cause")
        collectives.psum(torch.ones(1), m, "data")

    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 2 failed:(.|\n)*the cause"):
        launch(program, parse("dp4"), "cpu")
    assert time.monotonic() - start < SOON_S
    with pytest.raises(ChildProcessError):  # every rank has been waited for
        os.waitpid(-1, os.WNOHANG)


def test_a_rank_that_is_killed_ends_the_run():
    def program(m):
        if m.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        collectives.psum(torch.ones(1), m, "data")

    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        launch(program, parse("dp2"), "cpu")
    assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "rank 1 was ended by SIGTERM"),
        (lambda: os._exit(3), "rank 1 ended with status 3 and left no traceback"),
    ],
)
def test_a_rank_that_ends_is_named_and_not_the_one_that_waits_for_it(end, message):
    def program(m):
        if m.rank == 1:
            end()
            time.sleep(5)
        time.sleep(0.1)

    with pytest.raises(WorkerError, match=message):
        launch(program, parse("dp2"), "cpu")


def test_a_rank_that_aborts_is_named_beside_the_one_that_waits_for_it():
    def program(m):
        if m.rank == 1:
            os.abort()
        collectives.psum(torch.ones(1), m, "data")

    with pytest.raises(WorkerError) as caught:
        launch(program, parse("dp2"), "cpu")
    assert str(caught.value).endswith("rank 1 aborted and left no traceback")


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def _closes():
    sys.stdout.close()
    raise ValueError("the cause")


def _raises(error):
    raise error


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (_closes, r"rank 1 failed:(.|\n)*the cause"),
        (lambda: _raises(asyncio.CancelledError()), r"rank 1 failed:(.|\n)*CancelledError"),
        (lambda: sys.exit(0), r"rank 1 failed:(.|\n)*SystemExit: 0"),
        (lambda: _raises(MemoryError("no room")), r"rank 1 failed:(.|\n)*MemoryError: no room"),
        (lambda: _raises(FloatingPointError("nan")), r"rank 1 failed:(.|\n)*FloatingPointError: nan"),
        (lambda: _raises(Unspeakable()), r"rank 1 failed:(.|\n)*Unspeakable"),
    ],
)
def test_a_failure_of_any_kind_ends_all_ranks_with_its_traceback(fail, message):
    """Nor does a forked rank run its parent's cleanup, which ends the others: rank 0 is not blamed."""

    def program(m):
        if m.rank == 1:
            fail()
        collectives.psum(torch.ones(1), m, "data")

    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        launch(program, parse("dp2"), "cpu")
    assert time.monotonic() - start < SOON_S


def test_a_first_rank_that_leaves_no_result_is_an_error():
    with pytest.raises(WorkerError, match=r"rank 0 ended before the program did, as os\._exit does"):
        launch(lambda m: os._exit(0) if m.rank == 0 else None, parse("dp2"), "cpu")


def launch_and_sleep(ready):
    """Be a program in a session of its own, which launches two ranks that sleep; they report by a pipe."""

    def program(m):
        os.write(ready, b"r")
        time.sleep(60)

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch(program, parse("dp2"), "cpu")
    except KeyboardInterrupt:
        os._exit(130)
    finally:
        os._exit(1)


def test_an_interrupt_leaves_no_process():
    """Interrupts of runs are in tests/cli/test_interrupts.py."""
    reports, ready = os.pipe()
    pid = os.fork()
    if not pid:
        launch_and_sleep(ready)
    assert os.read(reports, 1) == b"r" == os.read(reports, 1)
    os.killpg(pid, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    left = subprocess.run(["ps", "-o", "pid=", "-g", str(pid)], capture_output=True, text=True).stdout.split()
    assert left == []
    os.close(reports), os.close(ready)


def test_a_second_interrupt_ends_a_program_that_a_scheduler_has_asked_to_stop():
    with heartbeat.alive(Heartbeat(Alone(None))), processes.stops_when_asked():
        signal.raise_signal(signal.SIGTERM)
        assert processes.stop_asked() and not processes.interrupt_asked()
        heartbeat.at_step(1)
        signal.raise_signal(signal.SIGINT)
        assert not processes.interrupt_asked()  # which would be another exit status
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with processes.stops_when_asked():
        assert not processes.stop_asked()
        with pytest.raises(KeyboardInterrupt):  # before the first step
            signal.raise_signal(signal.SIGINT)


def test_a_mesh_of_another_size_than_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MeshError, match="dp2 has 2 devices, 4 ranks were started"):
        launch(lambda m: None, parse("dp2"), "cpu")


@pytest.mark.timed
def test_the_time_that_a_rank_waits_is_that_of_every_group():
    def program(m):
        generate = view(m, parse("tp2,sp2"))
        pair = submesh(m, parse("tp2"), [1, 2])
        if m.rank == 1:
            time.sleep(3)
        elif m.rank == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                collectives.psum(torch.ones(1), m, "tensor")
        elif m.rank == 2:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                collectives.psum(torch.ones(1), pair, "tensor")
        else:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                collectives.psum(torch.ones(1), generate, "sequence")
        os._exit(0)  # the groups are broken

    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 ended before the program did"):
        launch(program, parse("dp2,tp2"), "cpu", waiting=WaitLimits(timeout=timedelta(seconds=1)))
    assert time.monotonic() - start < 15


def threads(m):
    return collectives.gather_objects(torch.get_num_threads(), m)


def test_each_rank_computes_with_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(launching, "cores", lambda: 6)
    assert launch(threads, parse("dp2"), "cpu") == [3, 3]
    monkeypatch.setattr(launching, "cores", lambda: 1)
    assert launch(threads, parse("dp2"), "cpu") == [1] * 2


PARALLEL = """
import torch
from funrl.mesh import collectives, launch
from funrl.mesh.mesh import parse
torch.set_num_threads(4)
def work():
    x = torch.ones(600, 600, requires_grad=True)
    (x @ x).tanh().sum().backward()
    return x.grad.sum().item()
expected = work()
class Answer:
    def __init__(self, value):
        self.value = value
def program(m):
    torch.set_num_threads(2)
    return Answer(collectives.psum(torch.tensor(work()), m, "data").item())
for launch.can_fork in launch.can_fork, lambda: False:
    answer = launch.launch(program, parse("dp2"), "cpu")
    assert isinstance(answer, Answer) and answer.value == 2 * expected
    assert work() == expected
"""


@pytest.mark.slow
def test_a_process_that_has_computed_in_parallel_starts_ranks():
    """Forked and fresh ones, from the standard input, as a notebook: what is defined there is in no module."""
    done = subprocess.run([sys.executable, "-"], input=PARALLEL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_process_with_threads_of_torch_does_not_fork(monkeypatch):
    assert can_fork()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not can_fork()
    monkeypatch.undo()
    pr_set_name, begun, end = 15, threading.Event(), threading.Event()

    def named():
        ctypes.CDLL(None).prctl(pr_set_name, b"pt_autograd_0")
        begun.set()
        end.wait()

    thread = threading.Thread(target=named)
    thread.start()
    begun.wait()
    assert not can_fork()
    end.set()
    thread.join()  # it has gone for Python, and soon for the system
    deadline = time.monotonic() + 60
    while not can_fork() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert can_fork()


def test_a_program_that_cannot_be_sent_is_an_error_before_the_start(monkeypatch):
    monkeypatch.setattr(launching, "can_fork", lambda: False)
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"the program cannot be sent to other processes: .*lock"):
        launch(lambda m: lock.locked(), parse("dp2"), "cpu")


@pytest.mark.parametrize(("mesh", "total"), [("dp1", 1), ("dp2", 3)])
def test_what_comes_before_is_entered_without_groups_and_left_at_the_end(mesh, total, tmp_path):
    here = os.getpid()

    @contextlib.contextmanager
    def before(rank):
        began = os.getpid(), dist.is_initialized(), threading.active_count()
        yield rank, began
        (tmp_path / f"{rank} {dist.is_initialized()}").touch()

    def program(m, opened):
        rank, (pid, groups, threads) = opened
        assert (rank, pid, groups) == (m.rank, os.getpid(), False) and (threads == 1 or pid == here)
        return sum(collectives.gather_objects(rank + 1, m)), os.getpid() == here

    assert launch(program, parse(mesh), "cpu", before=before) == (total, mesh == "dp1")
    assert {path.name for path in tmp_path.iterdir()} == {f"{rank} False" for rank in range(int(mesh[2:]))}


BEFORE = """
import contextlib, os
import torch
import torch.distributed as dist
from funrl.mesh import collectives, launch
from funrl.mesh.mesh import parse
here = os.getpid()
@contextlib.contextmanager
def before(rank):
    yield rank, dist.is_initialized()
    print(f"left {rank} {dist.is_initialized()}\\n", end="")
def program(m, opened):
    assert opened == (m.rank, False)
    return sum(collectives.gather_objects(m.rank + 1, m)), os.getpid() == here, torch.get_num_threads()
launch.cores = lambda: 6
total, in_place, threads = launch.launch(program, parse("dp2"), "cpu", before=before)
print(f"sum {total} {in_place} {threads}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_under_torchrun_the_ranks_come_from_the_environment(tmp_path):
    """They are the processes that it started, each with its share of the cores."""
    script = tmp_path / "program.py"
    script.write_text(BEFORE)
    torchrun = "-m torch.distributed.run --nproc-per-node=2 --standalone --no-python"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = run_with_python(["sh", "-c", f"$PYTHON {torchrun} $PYTHON {script}"], environment)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line)
    assert lines == ["left 0 False", "left 1 False", "sum 3 True 3", "sum 3 True 3"]


def test_what_came_before_is_left_where_a_rank_fails(tmp_path):
    @contextlib.contextmanager
    def before(rank):
        try:
            yield
        finally:
            (tmp_path / f"{rank}").touch()

    def program(m, _):
        if m.rank == 1:
            raise ValueError("no luck")
        collectives.psum(torch.ones(1), m, "data")

    with pytest.raises(WorkerError, match="no luck"):
        launch(program, parse("dp2"), "cpu", before=before)
    assert (tmp_path / "1").exists()
