"""A step is made again from a checkpoint and saved rows, bit by bit; what differs is named."""

import shutil
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import GRPO, PPO, Quiet, small_job
from test_checkpoint import SETTINGS, measured

from funrl.algos.recipes.dpo import dpo
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer.checkpoints.saved_rows import keep_newest, open_rows, read_rows, saved_steps
from funrl.trainer.loop import train_loop
from funrl.trainer.phases import learn_batch
from funrl.trainer.replay import replay, replay_source
from funrl.trainer.storage.shard_server import CheckpointError, DamagedError

TEXTS = {"reward": None, "batch_prompts": 4, "eval_prompts": 4}
RUNS = {"ppo": (PPO, {}), "grpo": (GRPO, {}), "dpo": (dpo, TEXTS | {"minibatches": 1, "epochs": 1})}


def job_of(name, **settings):
    compose, own = RUNS[name]
    return small_job(compose, **SETTINGS | {"steps": 4, "save_rollouts": 1, "save_every": "2"} | own | settings)


def trained(folder, job):
    """Train; metrics by step."""

    def program(mesh):
        observer = Quiet(str(folder / "checkpoints"))
        train_loop(job, mesh, observer)
        return observer.steps

    return launch(program, job.sizes, "cpu")


def replayed(folder, job, step):
    return launch(lambda mesh: replay(job, folder, step, mesh, Quiet()), job.sizes, "cpu")


def unlike(done, tolerance=0.0):
    return [
        (step_again.step, part.name)
        for step_again in done
        for part in step_again.differences
        if not part.agrees(tolerance)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_a_step_made_again_has_the_same_bits(name, tmp_path):
    job = job_of(name, dtype="float32")
    trained(tmp_path, job)
    done = replayed(tmp_path, job, 4)
    assert [item.step for item in done] == [3, 4] and unlike(done) == []
    compared = {part.name for part in done[1].differences}
    lead = job.main_role
    assert {f"weights of {lead} by their digests", "state of the checkpoint"} <= compared
    fields = {"ppo": ("old_logp", "ref_logp", "value", "returns", "advantage", "actor/pg_loss")}
    assert compared >= set(fields.get(name, ("ref_logp", "train/loss")))


@pytest.mark.slow
def test_a_step_is_made_again_with_the_threads_of_the_run(tmp_path):
    """Products have other last bits with other numbers of threads, on some processors."""
    job = job_of("grpo", steps=2)
    threads = torch.get_num_threads()
    taken = []

    def learn(*args, **kwargs):
        taken.append(torch.get_num_threads())
        return learn_batch(*args, **kwargs)

    try:
        torch.set_num_threads(2)
        trained(tmp_path, job)
        torch.set_num_threads(1)
        with mock.patch("funrl.trainer.replay.learn_batch", learn):
            done = replayed(tmp_path, job, None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert taken == [2, 2] and [item.step for item in done] == [1, 2] and unlike(done) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run on two ranks, its job and its metrics."""
    folder, job = tmp_path_factory.mktemp("saved"), job_of("ppo", mesh="dp2", steps=2)
    return folder, job, trained(folder, job)


@pytest.mark.gloo
@pytest.mark.slow
def test_rows_of_two_ranks_are_replayed_on_two_and_on_one(saved):
    folder, job, _ = saved
    assert sorted(path.name for path in (folder / "rollouts/step-2").iterdir()) == [
        "record.json",
        "rows-0.safetensors",
        "rows-1.safetensors",
        "table.safetensors",
    ]
    assert unlike(replayed(folder, job, 2)) == []
    alone = replayed(folder, job_of("ppo", steps=2), 2)
    assert [part.name for part in alone[1].differences if part.kind == "weights" and part.count], "other roundings"
    sizes = [part.largest for step_again in alone for part in step_again.differences if part.kind != "digests"]
    assert 0 < max(sizes) < 1e-9


@pytest.mark.gloo
def test_saved_rows_are_a_source_like_any_other(saved):
    folder, _, steps = saved
    observer = Quiet()
    train_loop(job_of("ppo", steps=2, save_rollouts=0), single(), observer, replay_source(folder / "rollouts"))
    for (step, metrics), (number, expected) in zip(observer.steps, steps, strict=True):
        names = [name for name in expected if not measured(name) and not name.startswith(("eval/", "sync/"))]
        assert step == number
        assert [metrics[name] for name in names] == pytest.approx([expected[n] for n in names], rel=1e-9, abs=1e-9)


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.gloo
def test_what_differs_is_named(saved):
    folder, _, _ = saved
    first = open_rows(folder / "rollouts", 1)
    rows = read_rows(first, single())
    number, token = int(rows.batch.length.argmax()), 2
    owner, job = int(first.owner("scored")[number]), job_of("ppo")
    own = [n for n in range(8) if first.owner("scored")[n] == owner]
    place = sum(int(rows.lengths[n]) for n in own if n < number) + token

    def change(tensors):
        tensors["scored/old_logp"][place] += 0.5

    rewrite(first.path / f"rows-{owner}.safetensors", change)
    try:
        results = [
            part for part in replayed(folder, job, 1)[0].differences if not part.agrees(1e-6) and part.kind != "digests"
        ]
    finally:
        rewrite(first.path / f"rows-{owner}.safetensors", lambda tensors: tensors["scored/old_logp"][place].sub_(0.5))
    assert [(part.name, part.phase) for part in results] == [("old_logp", "score_policy")]
    assert abs(results[0].largest - 0.5) < 1e-6 and results[0].where.startswith(f"row {number}, token {token}: ")


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda path: (path / "record.json").unlink(), DamagedError, "step-2: it cannot be read: "),
        (lambda path: (path / "record.json").write_text('{"format": 2}'), DamagedError, "its format is 2, this"),
        (lambda path: (path / "rows-1.safetensors").write_bytes(b"x" * 99), DamagedError, "rows-1.safetensors: it can"),
        (lambda path: path.rename(path.with_name("gone")), CheckpointError, "no rows of step 2, which --save_rollouts"),
    ],
    ids=["no record", "later format", "damaged rows", "not there"],
)
def test_rows_that_cannot_be_read(damage, error, message, saved, tmp_path):
    shutil.copytree(saved[0] / "rollouts", tmp_path / "rollouts")
    damage(tmp_path / "rollouts/step-2")
    with pytest.raises(error, match=message):
        read_rows(open_rows(tmp_path / "rollouts", 2), single())


@pytest.mark.slow
def test_which_steps_are_kept(tmp_path):
    job = job_of("grpo", save_rollouts=2, keep_rollouts=1, save_every="1")
    trained(tmp_path, job)
    assert list(saved_steps(tmp_path / "rollouts")) == [4]
    (tmp_path / "rollouts/.step-9").mkdir()
    (tmp_path / "rollouts/step-9").mkdir()
    trained(tmp_path, job_of("grpo", save_rollouts=2, steps=6, resume=True, run_dir="x"))
    assert list(saved_steps(tmp_path / "rollouts")) == [4, 6]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step-4", "step-6"]
    keep_newest(tmp_path / "rollouts", 1)
    assert list(saved_steps(tmp_path / "rollouts")) == [6]
    with pytest.raises(CheckpointError, match=r"no rows of step 5, .*there are: 6"):
        replayed(tmp_path, job, 6)
