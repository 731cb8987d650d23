"""Checkpoints by name: a run that is resumed is the run that never stopped."""

import json

import pytest
import torch
from small_runs import GRPO, PPO, Quiet, gap, small_job, whole_weights

from funrl import trees
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer import checkpoint, loop
from funrl.trainer.checkpoint import CheckpointError
from funrl.trainer.loop import train_loop

SETTINGS = {"steps": 4, "minibatches": 2, "eval_every": 2, "lr_schedule": "linear", "lr_warmup_steps": 1}


def run(folder, mesh="dp1", compose=PPO, stop_after=None, **settings):
    """Metrics by step, and the whole weights at the end, as rank 0 has them."""
    job = small_job(compose, mesh=mesh, **SETTINGS | settings)

    def program(mesh):
        observer = Stopping(folder, stop_after)
        outcome = train_loop(job, mesh, observer)
        return outcome, observer.steps, observer.notes, [x.clone() for x in trees.leaves(observer.params)]

    return launch(program, job.sizes, "cpu")


class Stopping(Quiet):
    """An observer that ends the run after a step, as a crash would: before the step's checkpoint is written."""

    def __init__(self, folder, stop_after):
        super().__init__(str(folder))
        self.stop_after = stop_after

    def step(self, step, metrics, seconds):
        super().step(step, metrics, seconds)
        if step == self.stop_after:
            raise FloatingPointError("the machine is gone")


def crash(folder, mesh="dp1", **settings):
    with pytest.raises((FloatingPointError, RuntimeError), match="the machine is gone"):
        run(folder, mesh, stop_after=3, save_every=1, **settings)


def measured(name):
    return name.startswith(("memory/", "time_s/"))


def assert_equal_steps(steps, expected):
    assert [step for step, _ in steps] == [step for step, _ in expected]
    for (_, a), (_, b) in zip(steps, expected, strict=True):
        assert {k: v for k, v in a.items() if not measured(k)} == {k: v for k, v in b.items() if not measured(k)}


@pytest.mark.parametrize("compose", [PPO, GRPO], ids=["ppo", "grpo"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_resumed_run_has_the_same_bits_as_one_that_never_stopped(tmp_path, compose, dtype):
    _, steps, _, weights = run(tmp_path / "whole", compose=compose, dtype=dtype)
    crash(tmp_path / "run", compose=compose, dtype=dtype)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-2"]  # the one before went when it was there
    _, resumed, notes, ends = run(tmp_path / "run", compose=compose, dtype=dtype, resume=True, run_dir="x")
    assert any("resumed after step 2" in note for note in notes)
    assert_equal_steps(resumed, [pair for pair in steps if pair[0] > 2])
    assert all(map(torch.equal, ends, weights))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("before", "after"),
    [({"mesh": "dp2"}, {"mesh": "dp1"}), ({"mesh": "dp2,tp2"}, {"mesh": "dp2", "fsdp": True}), ({}, {"mesh": "tp2"})],
    ids=["dp2 to dp1", "dp2,tp2 to fully sharded dp2", "dp1 to tp2"],
)
def test_a_run_goes_on_on_another_mesh(tmp_path, before, after):
    _, steps, _, _ = run(tmp_path / "whole")
    crash(tmp_path / "run", **before)
    _, resumed, _, _ = run(tmp_path / "run", resume=True, run_dir="x", **after)
    for (a, metrics), (b, expected) in zip(resumed, [pair for pair in steps if pair[0] > 2], strict=True):
        kept = [name for name in expected if not measured(name)]
        assert a == b
        assert [metrics[k] for k in kept] == pytest.approx([expected[k] for k in kept], rel=1e-9, abs=1e-9)


def test_without_a_checkpoint_the_run_begins(tmp_path):
    _, steps, notes, _ = run(tmp_path / "none", resume=True, run_dir="x", steps=2)
    assert [step for step, _ in steps] == [1, 2]
    assert any("there is no checkpoint in" in note for note in notes)


def saved(folder, **settings):
    """A state with its layouts and parts, and its checkpoint."""
    job = small_job(**settings)
    run, state = loop.begin_run(job, single(), Quiet())
    layouts = checkpoint.state_layouts(run.parts, state)
    return run, state, layouts, checkpoint.save(folder, state._replace(step=7), layouts, single())


def test_every_leaf_comes_back_by_name(tmp_path):
    run, state, layouts, path = saved(tmp_path)
    assert path.name == "step-7"
    blank = trees.map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, state)
    loaded = checkpoint.load(path, blank, layouts, single())
    assert loaded.step == 7 and loaded.source == state.source
    assert gap(whole_weights(run, loaded), whole_weights(run, state)) == 0


def test_what_cannot_be_read_is_named(tmp_path):
    _, state, layouts, path = saved(tmp_path)
    other = small_job(GRPO)
    trainer, wrong = loop.begin_run(other, single(), Quiet())
    with pytest.raises(CheckpointError, match=r"state of another run: missing .*, unknown .*critic"):
        checkpoint.load(path, wrong, checkpoint.state_layouts(trainer.parts, wrong), single())
    (path / checkpoint.NUMBERS).write_text(json.dumps({"step": 7})[:-1])
    with pytest.raises(CheckpointError, match="it cannot be read"):
        checkpoint.load(path, state, layouts, single())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the checkpoint of step 0 cannot be written"):
        checkpoint.save(tmp_path / "file", state, layouts, single())
