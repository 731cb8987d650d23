"""A run that fails on one rank: the ranks that still hold the whole state save it, and the run continues from there."""

import functools
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from forked_python import start_python
from small_runs import GRPO, Quiet, small_job

from funrl import trees
from funrl.mesh.launch import WaitLimits, WorkerError, launch
from funrl.mesh.mesh import Mesh, parse, single
from funrl.mesh.rules import Layout
from funrl.processes.store import keep_store, listen
from funrl.trainer import phases
from funrl.trainer.checkpoints import rescue
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.checkpoints.rescue import replica_of
from funrl.trainer.checkpoints.saver import Saver
from funrl.trainer.loop import train_loop
from funrl.trainer.storage import writer_watch
from funrl.trainer.storage.shard_server import CheckpointError, WriteShards
from funrl.trainer.storage.writer_watch import WriterLimits, WriterWatch

pytestmark = pytest.mark.gloo
SETTINGS = {"steps": 3, "eval_every": 5, "queue": "fixed", "compose": GRPO}


def run(folder, mesh, fail=None, stalled_s=None, **settings):
    """Metrics and weights of a run whose rank `fail` comes to a bad end in its third step."""
    job, score = small_job(mesh=mesh, **SETTINGS | settings), phases.score_batch

    def program(mesh):
        def failing(trainer, state, rows):
            if fail is not None and state.step == 2:
                fail(mesh.rank)
            return score(trainer, state, rows)

        phases.score_batch = failing
        observer = Quiet(folder)
        try:
            train_loop(job, mesh, observer)
        finally:
            phases.score_batch = score
        return observer.steps, [x.clone() for x in trees.leaves(observer.params)]

    return launch(program, job.sizes, "cpu", waiting=WaitLimits(stalled_s=stalled_s))


@functools.cache
def whole(**settings):
    """`run` to its end, on two ranks."""
    return run(None, "dp2", **settings)


def stopped(rank):
    return lambda mine: os.kill(os.getpid(), signal.SIGSTOP) if mine == rank else None


def killed(rank):
    return lambda mine: os.kill(os.getpid(), signal.SIGKILL) if mine == rank else None


def raises(*ranks):
    def fail(mine):
        if mine in ranks:
            raise MemoryError("no room for the scores")

    return fail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings", "fail", "message"),
    [
        ("dp2", {}, killed(1), "rank 1 was killed by SIGKILL"),
        ("dp2,tp2", {}, killed(0), "rank 0 was killed by SIGKILL"),
        pytest.param("tp2", {}, raises(1), "rank 1 failed:", marks=pytest.mark.slow),
        ("dp2", {"fsdp": True}, raises(0, 1), "failed:"),
        pytest.param("dp2", {"new_tokens_per_step": 2}, raises(1), "rank 1 failed:", marks=pytest.mark.slow),
        ("dp2", {}, stopped(1), r"no answer for 5 s \(--stalled_after\) from rank 1 on "),
    ],
    ids=[
        "dp2, killed",
        "dp2,tp2, killed",
        "tp2, one raises",
        "fsdp, both raise",
        "rows that are begun, one raises",
        "dp2, stopped",
    ],
)
def test_the_state_before_the_failure_is_saved_and_the_run_goes_on_with_the_same_bits(
    mesh, settings, fail, message, tmp_path
):
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        run(str(tmp_path), mesh, fail, stalled_s=5.0, **settings)
    assert time.monotonic() - begin < 120  # the timeout is ten minutes
    assert list(complete_checkpoints(tmp_path)) == [2]
    if mesh == "dp2":
        resumed, weights = run(str(tmp_path), mesh, resume=True, run_dir="x", **settings)
        steps, expected = whole(**settings)
        assert [step for step, _ in resumed] == [3]
        assert resumed[0][1]["actor/pg_loss"] == steps[2][1]["actor/pg_loss"]
        assert all(map(torch.equal, weights, expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [("tp2", {}), pytest.param("dp2", {"new_tokens_per_step": 2}, marks=pytest.mark.slow)],
    ids=["tp2", "rows that are begun"],
)
def test_what_no_rank_holds_any_more_is_not_saved(mesh, settings, tmp_path):
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        run(str(tmp_path), mesh, killed(1), save_every="1", **settings)
    assert list(complete_checkpoints(tmp_path)) in ([1], [1, 2])  # the second may have been under way
    assert not list(Path(tmp_path).glob(".step-*.last"))


OF_TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
OF_TORCHRUN |= {f"TORCHELASTIC_{name}": x for name, x in (("USE_AGENT_STORE", "True"), ("RUN_ID", "run"))}


@pytest.mark.slow
def test_the_state_of_a_run_of_torchrun_whose_first_rank_is_killed_is_saved(tmp_path):
    """Two ranks with the variables and the store of torchrun, which ends the other ranks by SIGTERM."""
    script = tmp_path / "program.py"
    script.write_text(f"import test_rescue\ntest_rescue.run({str(tmp_path)!r}, 'dp2', test_rescue.killed(0))\n")
    listener = listen()
    environment = os.environ | OF_TORCHRUN | {"MASTER_PORT": str(listener.getsockname()[1])}
    ranks = [start_python([str(script)], environment | {"RANK": x, "LOCAL_RANK": x}) for x in "01"]
    server = keep_store(listener)
    try:
        assert ranks[0].wait(timeout=300) == -signal.SIGKILL
        ranks[1].terminate()
        _, message = ranks[1].communicate(timeout=300)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        del server
    assert ranks[1].returncode != 0 and list(complete_checkpoints(tmp_path)) == [2], message


@pytest.mark.slow
def test_one_device_saves_itself_and_elsewhere_where_the_folder_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(rescue.tempfile, "tempdir", None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")  # a file: nothing can be written below it

    with pytest.raises(MemoryError) as caught:
        run(str(tmp_path / "run" / "checkpoints"), "dp1", raises(0), save_every="0")
    (note,) = caught.value.__notes__
    (there,) = tmp_path.glob("funrl-saved-*")
    assert "the state cannot be saved: " in note and "ot a directory" in note
    assert f"the state after step 2 is saved in {there}; `mkdir -p " in note and "--resume continues" in note
    assert list(complete_checkpoints(there)) == [2]


def stopped_writer(trainer_saver):
    """Stop the process that writes checkpoints of one rank, when it has been asked to write."""
    send = trainer_saver.server.send

    def stopping(request):
        send(request)
        if isinstance(request, WriteShards):
            os.kill(trainer_saver.server.process.pid, signal.SIGSTOP)

    trainer_saver.server.send = stopping


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="processes that are stopped are found in /proc")
@pytest.mark.parametrize("mesh", ["dp1", pytest.param("dp2", marks=pytest.mark.slow)])
def test_a_stopped_writer_of_checkpoints_is_named_and_the_state_is_saved_elsewhere(mesh, tmp_path, monkeypatch, capfd):
    """As after a full disk: it stops at the first save, and the run at the second."""
    monkeypatch.setattr(rescue.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()
    begin = Saver.__enter__

    def entering(saver):
        if saver.mesh.rank == 0:
            stopped_writer(saver)
        return begin(saver)

    monkeypatch.setattr(Saver, "__enter__", entering)
    with pytest.raises((WorkerError, CheckpointError)) as caught:
        run(str(tmp_path / "run"), mesh, save_every="1", heartbeat=1, stalled_after=2)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    folder = tmp_path / "run"
    assert re.search(
        rf"{folder}: the checkpoint cannot be written: process \d+, which writes {folder}/.step-1.1, has been stopped "
        r"for 2 s \(--stalled_after\)",
        text,
    )
    assert re.search(
        rf"no progress for 1 s: rank 0 waits for process \d+, which writes {folder}/.step-1.1 and is stopped; the run "
        r"ends after 2 s of that \(--stalled_after\)",
        capfd.readouterr().err,
    )
    (there,) = tmp_path.glob("funrl-*saved*")
    move = f"mkdir -p {folder} && mv {there}/step-2 {folder}"
    assert f"the state after step 2 is saved in {there}; `{move}` moves it to the run, and --resume continues" in text
    assert list(complete_checkpoints(there)) == [2] and not complete_checkpoints(folder)


def test_a_writer_that_is_slow_is_named_and_ends_the_run_at_the_timeout(monkeypatch):
    seconds = iter(range(0, 10_000, 5))
    monkeypatch.setattr(writer_watch.time, "monotonic", lambda: float(next(seconds)))
    watch, results = WriterWatch(3, "RUN/checkpoints/.step-7.2", WriterLimits(60.0, 300.0, 1200.0)), []
    while not (poll := watch.poll(os.getpid()))[1]:
        results += [poll[0]] if poll[0] else []
    assert [text.split(" s:")[0] for text in results] == [f"no progress for {n}" for n in (60, 120, 240, 480, 960)]
    assert results[0] == (
        f"no progress for 60 s: rank 3 waits for process {os.getpid()}, which writes RUN/checkpoints/.step-7.2, on a "
        "slow disk or a dead one; the run ends after 20 minutes of that (--timeout)"
    )
    assert poll[1] == (f"process {os.getpid()} has not written RUN/checkpoints/.step-7.2 within 20 minutes (--timeout)")


def test_an_interrupt_ends_a_run_at_once(tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(str(tmp_path), "dp1", interrupt, save_every="0")
    assert not complete_checkpoints(tmp_path)


def test_replicas_are_over_the_axes_that_split_nothing():
    sizes = parse("dp2,ep2,tp2")
    split = {"w": Layout((8, 8), (("tensor",), ("expert",)), tuple(sizes.values()))}
    replicas = [replica_of(Mesh(sizes, rank), split) for rank in range(8)]
    assert [request.number for request in replicas] == [0] * 4 + [1] * 4
    assert [item.mesh.rank for item in replicas] == [*range(4)] * 2
    assert [element.layouts["w"].box(element.mesh.rank) for element in replicas[:4]] == [
        split["w"].box(rank) for rank in range(4)
    ]
    alone = replica_of(single(), {})
    assert (alone.number, alone.mesh.world) == (0, 1)
