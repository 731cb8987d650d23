"""Traces of steps: the file that --profile leaves, read back."""

import gzip
import json

import pytest
from small_runs import GRPO, Quiet, small_job

from funrl.mesh.mesh import Mesh, single
from funrl.processes import heartbeat
from funrl.trainer import loop, phases
from funrl.trainer.profiling import is_profiled
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.steps.step import NotFiniteError

BASE = {"batch_prompts": 2, "max_new_tokens": 2, "steps": 3, "eval_every": 9, "save_every": "0"}


def ranges(path):
    """(name, begin, end) of the trace's own ranges, and of its operators."""
    with gzip.open(path) as file:
        events = json.loads(file.read())["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X"]
    own = [event for event in timed if event.get("cat") == "user_annotation"]
    rest = [event for event in timed if event.get("cat") == "cpu_op"]
    return tuple([(row["name"], row["ts"], row["ts"] + row["dur"]) for row in some] for some in (own, rest))


@pytest.mark.slow
def test_a_trace_has_the_phases_of_its_steps(tmp_path):
    observer = Quiet(str(tmp_path / "checkpoints"))
    loop.train_loop(small_job(GRPO, **BASE, profile="1:2"), single(), observer)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank-0-steps-1-2.json.gz" and any(str(path) in note for note in observer.notes)
    own, operators = ranges(path)
    (first, begin, _), (last, _, end) = sorted(element for element in own if element[0].startswith("step "))
    assert (first, last) == ("step 1", "step 2")
    names = {name for name, *_ in own}
    assert {"generate", "reward", "score_policy", "advantage", "update_policy", "reshard", "verify"} <= names
    assert all(begin <= low and high <= end for name, low, high in own)
    ((_, low, high), *_) = [item for item in own if item[0] == "update_policy"]
    assert any("mm" in name and low <= at and to <= high for name, at, to in operators)


@pytest.mark.slow
def test_a_run_that_ends_early_leaves_what_it_has_and_one_without_the_flag_nothing(tmp_path, monkeypatch):
    def fails(*_):
        raise NotFiniteError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(phases, "learn_batch", fails)
        job = small_job(GRPO, **BASE, profile="1:1")
        outcome = loop.train_loop(job, single(), Quiet(str(tmp_path / "cut" / "checkpoints")))
    assert outcome.error == "no more" and heartbeat._mark is None
    (path,) = (tmp_path / "cut" / "profile").iterdir()
    assert path.name == "rank-0-step-1-cut.json.gz" and any(name == "step 1" for name, *_ in ranges(path)[0])
    loop.train_loop(small_job(GRPO, **BASE | {"steps": 1}), single(), Quiet(str(tmp_path / "off" / "checkpoints")))
    assert not (tmp_path / "off" / "profile").exists()


def test_ranks_that_are_named_write_a_trace():
    sizes = {"data": 4, "expert": 1, "sequence": 1, "tensor": 1}
    ranks = [Mesh(sizes, rank) for rank in range(4)]
    for flag, expected in (("0", [0]), ("1,3", [1, 3]), ("all", [0, 1, 2, 3])):
        chosen = settings_of(mesh="dp4", profile="1:1", profile_ranks=flag)
        assert [mesh.rank for mesh in ranks if is_profiled(chosen, mesh)] == expected


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"profile": "3:2"}, "--profile=3:2: the trace would end with step 4, but --steps=3"),
        ({"profile": "0:1"}, "--profile=0:1: it must be a step and a number of steps, such as 3:1"),
        ({"profile": "3"}, "--profile=3: it must be a step"),
        ({"profile": "1:1", "profile_ranks": "1"}, "--profile_ranks=1: the mesh dp1 has the ranks 0 to 0, not 1"),
        ({"profile_ranks": "all"}, "--profile_ranks=all does nothing without --profile"),
    ],
)
def test_what_cannot_be_profiled_is_refused(given, problem):
    with pytest.raises(SettingsError, match=problem.replace("?", r"\?")):
        small_job(GRPO, **BASE | given)
