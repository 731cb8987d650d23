"""A run that fails on one rank: the ranks that still hold the whole state save it, and the run goes on from there."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from small_runs import GRPO, Quiet, small_job

from funrl import trees
from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import Mesh, parse, single
from funrl.mesh.rules import Layout
from funrl.trainer import loop, rescue
from funrl.trainer.checkpoint import complete_checkpoints
from funrl.trainer.loop import train_loop
from funrl.trainer.rescue import replica_of

pytestmark = pytest.mark.gloo
SETTINGS = {"steps": 3, "eval_every": 5, "queue": "fixed", "compose": GRPO}


def run(folder, mesh, fail=None, **settings):
    """Metrics and weights of a run whose rank `fail` comes to a bad end in its third step."""
    job, score = small_job(mesh=mesh, **SETTINGS | settings), loop.score_batch

    def program(mesh):
        def failing(trainer, state, rows):
            if fail is not None and state.step == 2:
                fail(mesh.rank)
            return score(trainer, state, rows)

        loop.score_batch = failing
        observer = Quiet(folder)
        try:
            train_loop(job, mesh, observer)
        finally:
            loop.score_batch = score
        return observer.steps, [x.clone() for x in trees.leaves(observer.params)]

    return launch(program, job.sizes, "cpu")


def killed(rank):
    return lambda mine: os.kill(os.getpid(), signal.SIGKILL) if mine == rank else None


def raises(*ranks):
    def fail(mine):
        if mine in ranks:
            raise MemoryError("no room for the scores")

    return fail


@pytest.mark.parametrize(
    ("mesh", "settings", "fail", "said"),
    [
        ("dp2", {}, killed(1), "rank 1 was killed by SIGKILL"),
        ("dp2,tp2", {}, killed(0), "rank 0 was killed by SIGKILL"),
        ("tp2", {}, raises(1), "rank 1 failed:"),
        ("dp2", {"fsdp": True}, raises(0, 1), "failed:"),
        ("dp2", {"new_tokens_per_step": 2}, raises(1), "rank 1 failed:"),
    ],
    ids=["dp2, killed", "dp2,tp2, killed", "tp2, one raises", "fsdp, both raise", "rows that are begun, one raises"],
)
@pytest.mark.timed
def test_the_state_before_the_failure_is_saved_and_the_run_goes_on_with_the_same_bits(
    mesh, settings, fail, said, tmp_path
):
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=said):
        run(str(tmp_path), mesh, fail, **settings)
    assert time.monotonic() - begin < 20
    assert list(complete_checkpoints(tmp_path)) == [2]
    if mesh == "dp2":
        resumed, weights = run(str(tmp_path), mesh, resume=True, run_dir="x", **settings)
        steps, expected = run(None, mesh, **settings)
        assert [step for step, _ in resumed] == [3]
        assert resumed[0][1]["actor/pg_loss"] == steps[2][1]["actor/pg_loss"]
        assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize(
    ("mesh", "settings"), [("tp2", {}), ("dp2", {"new_tokens_per_step": 2})], ids=["tp2", "rows that are begun"]
)
def test_what_no_rank_holds_any_more_is_not_saved(mesh, settings, tmp_path):
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        run(str(tmp_path), mesh, killed(1), save_every="1", **settings)
    assert list(complete_checkpoints(tmp_path)) in ([1], [1, 2])  # the second may have been under way
    assert not list(Path(tmp_path).glob(".step-*.last"))


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
    assert f"the state after step 2 is saved in {there}; move it to" in note and "--resume continues" in note
    assert list(complete_checkpoints(there)) == [2]


def test_an_interrupt_ends_a_run_at_once(tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(str(tmp_path), "dp1", interrupt, save_every="0")
    assert not complete_checkpoints(tmp_path)


def test_replicas_are_over_the_axes_that_split_nothing():
    sizes = parse("dp2,ep2,tp2")
    split = {"w": Layout((8, 8), (("tensor",), ("expert",)), tuple(sizes.values()))}
    found = [replica_of(Mesh(sizes, rank), split) for rank in range(8)]
    assert [one.number for one in found] == [0] * 4 + [1] * 4
    assert [one.mesh.rank for one in found] == [*range(4)] * 2
    assert [one.layouts["w"].box(one.mesh.rank) for one in found[:4]] == [
        split["w"].box(rank) for rank in range(4)
    ]  # fmt: skip
    alone = replica_of(single(), {})
    assert (alone.number, alone.mesh.world) == (0, 1)
