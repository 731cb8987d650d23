"""Checkpoints by name: a run that is resumed is the run that never stopped."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from small_runs import GRPO, PPO, SIZES, Quiet, gap, remove_later_checkpoints, small_job, whole_weights

from funrl import trees
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.mesh.rules import Outermost, Uneven, fully_sharded, layout
from funrl.trainer import startup
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.checkpoints.export import checkpoint_of, export_checkpoint
from funrl.trainer.checkpoints.saver import Evaluations, Saver, kept_steps, score_of
from funrl.trainer.jobs import sharding
from funrl.trainer.loop import train_loop
from funrl.trainer.settings.records import save_interval
from funrl.trainer.settings.settings import with_flags
from funrl.trainer.storage.shard_server import CheckpointError, DamagedError, record_digest

SETTINGS = {"steps": 3, "minibatches": 2, "eval_every": 2, "lr_schedule": "linear", "lr_warmup_steps": 1}
ODD = SIZES | {"embed": 24, "heads": 3, "kv_heads": 1, "mlp": 13}  # two ranks do not divide them


def run(folder, mesh="dp1", compose=PPO, **settings):
    """Metrics by step, and the whole weights at the end, as rank 0 has them."""
    job = small_job(compose, mesh=mesh, **SETTINGS | settings)

    def program(mesh):
        observer = Quiet(str(folder))
        outcome = train_loop(job, mesh, observer)
        return outcome, observer.steps, observer.notes, [x.clone() for x in trees.leaves(observer.params)]

    return launch(program, job.sizes, "cpu")


def run_to_resume(folder, mesh="dp1", **settings):
    """`run` to its end; only the checkpoint after the first step is left."""
    ended = run(folder, mesh, save_every="1", keep_checkpoints=3, **settings)
    remove_later_checkpoints(folder, 1)
    return ended


def measured(name):
    return name.startswith(("memory/", "time_s/")) or name.endswith(("/environment_s", "/recomputed_tokens"))


def assert_equal_steps(steps, expected):
    assert [step for step, _ in steps] == [step for step, _ in expected]
    for (_, a), (_, b) in zip(steps, expected, strict=True):
        assert {k: v for k, v in a.items() if not measured(k)} == {k: v for k, v in b.items() if not measured(k)}


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_as_one_that_never_stopped(tmp_path):
    _, steps, _, weights = run_to_resume(tmp_path, dtype="float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "step-1"]
    _, resumed, notes, ends = run(tmp_path, dtype="float32", resume=True, run_dir="x")
    assert any("resumed after step 1" in note for note in notes)
    assert_equal_steps(resumed, steps[1:])
    assert all(map(torch.equal, ends, weights))


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    settings = {"sizes": ODD, "steps": 2, "eval_every": 9}
    _, steps, _, _ = run_to_resume(tmp_path, "tp2", **settings)
    _, resumed, _, _ = run(tmp_path, "dp2", fsdp=True, resume=True, run_dir="x", **settings)
    for (a, metrics), (b, expected) in zip(resumed, steps[1:], strict=True):
        kept = [name for name in expected if not measured(name)]
        assert a == b
        assert [metrics[k] for k in kept] == pytest.approx([expected[k] for k in kept], rel=1e-9, abs=1e-9)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kind", "before", "after"),
    [("dp2", Uneven, ("", "", "data"), ("data", "", "")), ("dp8", Outermost, ("", "", "data"), ("data", "data", ""))],
)
def test_weights_that_were_saved_in_other_shards_are_read(mesh, kind, before, after, tmp_path, monkeypatch):
    """Runs of before split the dim of hidden states, or one dim."""
    settings = {"steps": 2, "eval_every": 9, "fsdp": True}
    job = small_job(PPO, mesh=mesh, **SETTINGS | settings)

    def layout_of_q():
        return layout(
            "q", (4, 4, 16), ("heads", "head", "embed"), sharding.stored_rules(job.settings, "policy"), job.sizes
        )

    with monkeypatch.context() as patched:
        patched.setattr(sharding, "fully_sharded", lambda rules, over, _: fully_sharded(rules, over, kind))
        assert layout_of_q().spec == tuple(tuple(axes.split()) for axes in before)
        _, steps, _, _ = run_to_resume(tmp_path, mesh, **settings)
    assert layout_of_q().spec == tuple(tuple(axes.split()) for axes in after)
    _, resumed, _, _ = run(tmp_path, mesh, resume=True, run_dir="x", **settings)
    for (a, metrics), (b, expected) in zip(resumed, steps[1:], strict=True):
        kept = [name for name in expected if not measured(name)]
        assert a == b
        assert [metrics[k] for k in kept] == pytest.approx([expected[k] for k in kept], rel=1e-9, abs=1e-9)


def test_without_a_checkpoint_the_run_begins(tmp_path):
    _, steps, notes, _ = run(tmp_path / "none", resume=True, run_dir="x", steps=2)
    assert [step for step, _ in steps] == [1, 2]
    assert any("there is no checkpoint in" in note for note in notes)


def begun(compose=PPO, **settings):
    return startup.begin_run(small_job(compose, **settings), single(), Quiet())


def saver_of(run, state, folder, **settings):
    job = dataclasses.replace(run.job, settings=with_flags(run.job.settings, **settings))
    return Saver(job, run.parts, run.source, state, str(folder), Quiet())


def saved(folder, steps=(7,), scores=None, **settings):
    """A run and its state before the first step, saved as that of some steps."""
    run, state = begun()
    with saver_of(run, state, folder, **settings) as saver:
        for step in steps:
            saver.save(state._replace(step=step), Evaluations({}, {"eval/reward": 0.5}), (scores or {}).get(step))
    return run, state


@pytest.mark.slow
def test_every_leaf_comes_back_by_name(tmp_path):
    run, state = saved(tmp_path)
    blank = trees.map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else type(x)(0), state)
    with saver_of(run, blank, tmp_path, resume=True) as saver:
        loaded, evaluations = saver.resumed(blank)
    assert loaded.step == 7 and loaded.source == state.source and type(loaded.version) is int
    assert evaluations == Evaluations({}, {"eval/reward": 0.5})
    assert trees.named(loaded._replace(step=0)) and gap(whole_weights(run, loaded), whole_weights(run, state)) == 0
    for (name, x), (_, y) in zip(trees.named(loaded.roles), trees.named(state.roles), strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype, name


@pytest.mark.slow
def test_the_newest_are_kept_and_the_best(tmp_path):
    saved(tmp_path, range(1, 6), {1: 0.1, 2: 0.9, 3: 0.2}, keep_checkpoints=2)
    assert list(complete_checkpoints(tmp_path)) == [2, 4, 5]
    assert kept_steps({1: None, 2: None}, 1) == {2}
    assert kept_steps({1: 0.5, 2: 0.5, 3: 0.1}, 1) == {2, 3}
    assert score_of({"eval/loss": 2.0}) == -2.0 and score_of({"eval/reward": 2.0}) == 2.0 and score_of({}) is None


def test_what_an_interrupted_save_left_is_removed(tmp_path):
    (tmp_path / ".step-3.1" / "arrived").mkdir(parents=True)
    saved(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "step-7"]


def test_the_state_of_another_run_is_refused(tmp_path):
    _, state = saved(tmp_path)
    run, wrong = begun(GRPO)
    with saver_of(run, wrong, tmp_path, resume=True) as saver, pytest.raises(CheckpointError) as caught:
        saver.resumed(wrong)
    assert "step-7 is of a run with losses of critic, policy, this one has policy; give the flags" in str(caught.value)
    run, other = begun()
    other = other._replace(advantage=(*state.advantage, 0.5))
    with saver_of(run, other, tmp_path, resume=True) as saver, pytest.raises(CheckpointError) as caught:
        saver.resumed(other)
    assert re.search(
        r"state of another run: missing \['advantage/\d'\], unknown \[\]; --resume needs the flags", str(caught.value)
    )


def test_weights_that_do_not_learn_must_be_those_of_the_beginning(tmp_path):
    """A reference is not in a checkpoint: it is read again, and compared."""
    run(tmp_path, compose=PPO, steps=1, save_every="1")
    with pytest.raises(CheckpointError, match=r"other weights of its reference: --seed or the warm start has"):
        run(tmp_path, compose=PPO, resume=True, run_dir="x", seed=1)


def damage(path, how):
    """Damage a file of a checkpoint."""
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The directory of two checkpoints, of steps 6 and 7, and their run and state."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    return folder, *saved(folder, (6, 7))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(two, tmp_path, how):
    folder, run, state = two
    tmp_path = shutil.copytree(folder, tmp_path / "checkpoints")
    newest = complete_checkpoints(tmp_path)[7]
    largest = max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    files = {
        "missing": ["complete.json", "manifest.ocdbt"],
        "truncated": [largest],
        "flipped": [largest, "complete.json", "manifest.ocdbt"],
    }
    for file in (newest / name for name in files[how]):
        before = file.read_bytes()
        damage(file, how)
        with saver_of(run, state, tmp_path, resume=True) as saver:
            loaded, _ = saver.resumed(state)
        assert loaded.step == 6, file
        assert any(str(newest) in note for note in saver.observer.notes), file
        file.write_bytes(before)


def test_a_run_without_a_checkpoint_that_can_be_read_is_an_error(two, tmp_path):
    folder, run, state = two
    shutil.copytree(folder / "step-7", tmp_path / "step-7")
    (tmp_path / "step-7" / "manifest.ocdbt").unlink()
    with saver_of(run, state, tmp_path, resume=True) as saver, pytest.raises(CheckpointError) as caught:
        saver.resumed(state)
    assert "manifest.ocdbt: it is missing; no other checkpoint is left" in str(caught.value)


def test_what_cannot_be_written_ends_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: the checkpoint cannot be written: .*[Nn]ot a directory"):
        saved(tmp_path / "file")


def test_times_between_checkpoints(tmp_path):
    assert [save_interval(text) for text in ("0", "50", "90s", "10m", "2h")] == [
        (0, 0),
        (50, 0),
        (0, 90),
        (0, 600),
        (0, 7200),
    ]
    run, state = begun()
    with saver_of(run, state, tmp_path, save_every="1s") as saver:
        assert not saver.after_step(state._replace(step=1), lambda: ({}, Evaluations({}, {})))
        saver.began -= 1
        assert not saver.after_step(state._replace(step=2), lambda: ({}, Evaluations({}, {})))
    assert list(complete_checkpoints(tmp_path)) == [2]


def test_a_leaf_that_no_checkpoint_holds_is_refused_before_the_first_step(tmp_path):
    run, state = begun()
    with pytest.raises(CheckpointError, match="source/at of the state is a str"):
        saver_of(run, state._replace(source={"at": "here"}), tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The checkpoints after two of three steps."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, save_every="1", keep_checkpoints=3)
    remove_later_checkpoints(folder, 2)
    return folder


@pytest.mark.slow
def test_a_rescued_state_is_found_however_it_was_moved(whole, tmp_path):
    """As a whole folder, beside the steps, and by the command of the message."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    moved = folder / "funrl-saved-x"
    moved.mkdir()
    (folder / "step-2").rename(moved / "step-2")
    shutil.copytree(folder / "model", moved / "model")
    _, steps, notes, _ = run(folder, resume=True, run_dir="x")
    assert f"{moved / 'step-2'} is now {folder / 'step-2'}" in notes
    assert any(note.startswith("resumed after step 2") for note in notes) and [step for step, _ in steps] == [3]
    shutil.copytree(folder / "step-2", moved / "step-2")
    _, _, notes, _ = run(folder, resume=True, run_dir="x")
    assert f"{moved / 'step-2'} is not read, as {folder / 'step-2'} is there too" in notes


@pytest.mark.slow
def test_a_checkpoint_without_its_record_is_named(whole, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(whole, folder)
    (folder / "step-2" / "complete.json").unlink()
    message = f"{folder / 'step-2' / 'complete.json'}: it is missing"
    for step in (None, 2):
        with pytest.raises(DamagedError, match=re.escape(message)):
            checkpoint_of(folder.parent, step)
    assert checkpoint_of(folder.parent, 1).facts["step"] == 1
    _, steps, notes, _ = run(folder, resume=True, run_dir="x")
    assert f"{message}; the checkpoint before it is taken" in notes and [step for step, _ in steps] == [2, 3]
    for name in ("step-1", "step-3"):
        shutil.rmtree(folder / name)
    with pytest.raises(CheckpointError, match=re.escape(f"--resume: {message}; no other checkpoint is left")):
        run(folder, resume=True, run_dir="x")


@pytest.mark.slow
def test_the_outline_beside_checkpoints_has_checksums(whole, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(whole, folder)
    file = folder / "model" / "config.json"
    before = file.read_text()
    assert checkpoint_of(folder.parent).facts["outline"].keys() >= {"config.json", "tokenizer.json"}
    (folder / "model" / ".DS_Store").write_text("x")  # of nobody's concern
    export_checkpoint(folder.parent)
    changes = {
        "config.json: its checksum is wrong": lambda: file.write_text(before.replace("1e-06", "0.5")),
        "tokenizer.json: it is missing": (folder / "model" / "tokenizer.json").unlink,
        "generation_config.json: it is new": lambda: (folder / "model" / "generation_config.json").write_text("{}"),
    }
    for says, change in changes.items():
        shutil.rmtree(folder / "model")
        shutil.copytree(whole / "model", folder / "model")
        change()
        with pytest.raises(DamagedError, match=f"{folder}/model/{says}; --resume of the run writes it anew"):
            export_checkpoint(folder.parent, to=tmp_path / "out")
        assert not (tmp_path / "out").exists()
    _, _, notes, _ = run(folder, resume=True, run_dir="x", save_every="1")
    assert any("generation_config.json: it is new; it is written anew" in note for note in notes)
    assert file.read_text() == before
    export_checkpoint(folder.parent, 2, to=tmp_path / "out")  # the one before is whole again, too


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_has_no_checksums_of_the_outline(whole, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(whole, folder)
    for path in complete_checkpoints(folder).values():
        record = json.loads((path / "complete.json").read_text())
        del record["digest"], record["outline"]
        (path / "complete.json").write_text(json.dumps(record | {"digest": record_digest(record)}))
    (folder / "model" / "config.json").write_text((folder / "model" / "config.json").read_text() + " ")
    assert export_checkpoint(folder.parent).step == 2
    _, steps, _, _ = run(folder, resume=True, run_dir="x")
    assert [step for step, _ in steps] == [3]
