"""Real gloo ranks: what they compute, and how a run ends when one of them does not."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch

from funrl.mesh import collectives, mesh
from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import MeshError, parse

pytestmark = pytest.mark.gloo


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


def test_a_rank_that_raises_ends_the_run_with_its_traceback():
    def program(m):
        if m.rank == 2:
            raise ValueError("the cause")
        collectives.psum(torch.ones(1), m, "data")

    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 2 failed:(.|\n)*the cause"):
        launch(program, parse("dp4"), "cpu")
    assert time.monotonic() - start < 10
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
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "rank 1 was ended by SIGTERM"),
        (lambda: os._exit(3), "rank 1 ended with status 3 and left no traceback"),
    ],
)
def test_a_rank_that_ends_is_named_and_not_the_one_that_waits_for_it(end, said):
    def program(m):
        if m.rank == 1:
            end()
            time.sleep(5)
        time.sleep(0.1)

    with pytest.raises(WorkerError, match=said):
        launch(program, parse("dp2"), "cpu")


def test_a_first_rank_that_leaves_no_result_is_an_error():
    with pytest.raises(WorkerError, match=r"rank 0 ended before the program did, as os\._exit does"):
        launch(lambda m: os._exit(0) if m.rank == 0 else None, parse("dp2"), "cpu")


def test_a_rank_that_waits_in_vain_says_so_in_time():
    def program(m):
        if m.rank == 0:
            time.sleep(4)
        collectives.psum(torch.ones(1), m, "data")

    with pytest.raises(WorkerError, match=r"rank 1 failed:(.|\n)*[Tt]imed out"):
        launch(program, parse("dp2"), "cpu", patience=timedelta(seconds=1))


INTERRUPTED = """
import time, torch
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
def program(m):
    print("ready", flush=True)
    time.sleep(60)
launch(program, parse("dp2"), "cpu")
"""


def test_an_interrupt_leaves_no_process():
    run = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert run.stdout is not None
    assert run.stdout.read(5) == b"ready"
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(10) != 0
    left = subprocess.run(["ps", "-o", "pid=", "-g", str(run.pid)], capture_output=True, text=True).stdout.split()
    assert left == []


def test_under_torchrun_the_ranks_come_from_the_environment(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import torch\nfrom funrl.mesh import collectives\nfrom funrl.mesh.launch import launch\n"
        "from funrl.mesh.mesh import parse\n"
        "print('sum', launch(lambda m: collectives.psum(torch.ones(1), m, 'data').item(), parse('dp2'), 'cpu'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2.0") == 2


def test_a_mesh_of_another_size_than_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(MeshError, match="dp2 has 2 devices, torchrun started 4"):
        launch(lambda m: None, parse("dp2"), "cpu")


@pytest.mark.parametrize(
    "text,message",
    [
        ("dp3,xx2", "'xx2' is not an axis"),
        ("dp2,dp2", "given twice"),
        ("dp0", "at least 1"),
        ("4", "'4' is not an axis"),
    ],
)
def test_a_mesh_that_cannot_be_read(text, message):
    with pytest.raises(MeshError, match=message):
        parse(text)


def test_the_order_of_axes_is_free():
    assert parse("tp2,dp4") == parse("dp4,tp2")
    assert mesh.text(parse("tp2,dp4")) == "dp4,tp2"
    assert mesh.text(parse("")) == "dp1"
