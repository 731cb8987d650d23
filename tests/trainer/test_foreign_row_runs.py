"""Runs some of whose rows were sampled by other weights than the published ones: they stop, or leave these rows out."""

import json
import re
import shutil

import pytest
import torch
from small_runs import GRPO, Quiet, begin, small_job

from funrl import trees
from funrl.kinds import Ragged
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse, single
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.sync_proof import SyncProof
from funrl.trainer import loop, phases
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints, recorded
from funrl.trainer.checkpoints.saved_rows import open_rows, read_rows
from funrl.trainer.jobs.row_source import make_source
from funrl.trainer.placement.generate import GroupWriter
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.replay import replay, replay_source
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.foreign_rows import FOREIGN, ForeignRowError

FOREIGN_ROW = (
    r"row 0, token \d+: the engine sampled it by weights with the digest [0-9a-f]{16}, as version 2 of policy; "
    r"that of the run is [0-9a-f]{16}; \d of 8 rows are foreign"
)


def other_weights(engine, change=1e-3):
    """The weights that an engine holds, one number of them changed."""
    held = {name: x.clone() for name, x in engine.held_weights()}
    next(iter(held.values())).view(-1)[3] += change
    return held.items()


def exchanged(monkeypatch, version, ranks=(0,), after=0):
    """Let the engine of some ranks take other weights under the version that has just been proved."""
    prove = phases.prove_sync

    def prove_and_exchange(trainer, state, *, first=False):
        metrics = prove(trainer, state, first=first)
        generator = trainer.parts.generator
        if state.version == version:
            generator.proof.settle()
        if state.version == version and trainer.parts.mesh.rank in ranks:
            engine = generator.whole
            engine.load(other_weights(engine), engine.version)
        return metrics

    monkeypatch.setattr(phases, "prove_sync", prove_and_exchange)


def train(on=None, compose=GRPO, folder=None, source=None, **settings):
    job = small_job(compose, **{"steps": 3, "eval_every": 4} | settings)
    observer = Quiet(None if folder is None else str(folder / "checkpoints"))
    how = {} if source is None else {"source": source}
    return observer, loop.train_loop(job, on or single(), observer, **how)


@pytest.mark.parametrize("how", [{}, {"lora_rank": 2}, {"engine": "hf", "dtype": "float32"}])
def test_a_row_of_other_weights_ends_the_run_and_what_it_learned_is_saved(how, monkeypatch):
    observer, outcome = train(**how)
    assert outcome.error is None and len(observer.steps) == 3
    exchanged(monkeypatch, 2)
    observer, outcome = train(**how)
    assert isinstance(outcome.cause, ForeignRowError) and re.match(FOREIGN_ROW, str(outcome.error))
    assert len(observer.steps) == 1 and observer.error == outcome.error and observer.params is not None


def test_digests_change_no_bit_of_a_run():
    plain, _ = train(verify_sync=False, probe_sync_every=0)
    proved, _ = train()
    own = lambda metrics: {n: x for n, x in metrics.items() if not n.startswith(("sync/", "memory/"))}  # noqa: E731
    for (_, ours), (_, theirs) in zip(plain.steps, proved.steps, strict=True):
        assert own(ours) == own(theirs)
    assert all(map(torch.equal, trees.leaves(plain.params), trees.leaves(proved.params)))


@pytest.mark.gloo
def test_the_rows_of_one_rank_are_dropped_with_their_groups(monkeypatch):
    """Rank 1 of two samples half of the rows by other weights in the second step, and all rows are right again then."""
    exchanged(monkeypatch, 2, ranks=(1,))

    def program(mesh):
        observer, outcome = train(mesh, foreign_rows="drop", mesh="dp2", queue="fixed")
        stopped = train(mesh, mesh="dp2", queue="fixed")[1].error
        return [metrics for _, metrics in observer.steps], outcome.error, stopped

    steps, error, stopped = launch(program, parse("dp2"), "cpu")
    assert error is None
    assert [metrics[FOREIGN] for metrics in steps] == [0.0, 4.0, 0.0]
    assert "4 of 8 rows are foreign; --foreign_rows=drop leaves such rows out" in stopped


def test_what_is_dropped_is_in_no_denominator(monkeypatch):
    """The step on the rows that are left is the step on these rows alone, in loss and weights."""
    job = small_job(GRPO, foreign_rows="drop", minibatches=1)
    run, state = begin(job, single())
    rows, state, metrics = phases.draw_batch(run, state)
    assert metrics[FOREIGN] == 0
    digests = rows.batch.digests
    values = digests.values.clone()
    values[digests.offsets[2], 2] += 1  # of the third row
    spoiled = rows.with_fields(digests=Ragged(values, digests.offsets))
    left, metrics = phases.published_rows(run, state, spoiled)
    group = rows.batch.group[2]
    alone = rows.batch.group != group
    assert metrics == {FOREIGN: 2.0} and len(left.owner) == 6
    assert torch.equal(left.batch.tokens, rows.batch.tokens[alone]) and not (left.batch.group == group).any()
    scored, state, _ = phases.score_batch(run, state, left)
    _, learned = phases.learn_batch(run, state, scored)
    assert learned["actor/pg_loss"] == learned["actor/pg_loss"]
    values[:, 2] += 1
    with pytest.raises(ForeignRowError, match="8 of 8 rows are foreign; no other row is left"):
        phases.published_rows(run, state, rows.with_fields(digests=Ragged(values, digests.offsets)))


def test_a_row_of_an_earlier_run_is_foreign_although_its_version_is_known(tmp_path):
    """Also if it is of the same prompts: rows of a run with another seed of weights."""
    train(folder=tmp_path, save_rollouts=1, save_every="3", seed=5)
    saved = open_rows(tmp_path / "rollouts", 2)
    job = small_job(GRPO)
    run, state = begin(job, single())
    _, state, _ = phases.draw_batch(run, state)
    earlier = read_rows(saved, single())
    assert set(earlier.batch.digests.values[:, 1].tolist()) == {2}
    with pytest.raises(ForeignRowError, match="as version 2 of policy; that of the run was not published; 8 of 8"):
        phases.published_rows(run, state, earlier)
    again = earlier.batch.digests
    as_first = torch.stack([again.values[:, 0], torch.ones_like(again.values[:, 1]), again.values[:, 2]], 1)
    with pytest.raises(ForeignRowError, match=r"as version 1 of policy; that of the run is [0-9a-f]{16}; 8 of 8"):
        phases.published_rows(run, state, earlier.with_fields(digests=Ragged(as_first, again.offsets)))


def test_saved_rows_are_replayed_if_they_are_the_saved_runs(tmp_path):
    train(folder=tmp_path, save_rollouts=1, save_every="3")
    folder = tmp_path / "rollouts"
    _, outcome = train(source=replay_source(folder), lr=1e-3)  # other weights from the second step on
    assert outcome.error is None
    (done,) = replay(small_job(GRPO, steps=3, eval_every=4), tmp_path, 2, single(), Quiet())[1:]
    assert all(part.agrees(0.0) for part in done.differences)
    path = next(path for path in (folder / "step-2").rglob("*.json") if '"published"' in path.read_text())
    record = json.loads(path.read_text())
    record["published"]["policy"] = record["published"]["policy"][:1]
    path.write_text(json.dumps(record))
    _, outcome = train(source=replay_source(folder))
    assert "row 0, token" in str(outcome.error) and "that of the run was not published" in str(outcome.error)


@pytest.mark.parametrize("how", [{}, {"lora_rank": 2}])
def test_rows_of_several_versions_have_the_digest_of_each(how, tmp_path, monkeypatch):
    """Partial rollouts: also after a resume, whose rows that waited are of weights that the earlier part published."""
    checked = []
    check = phases.without_foreign_rows

    def watched(rows, *args, **options):
        checked.append(rows.batch.digests)
        return check(rows, *args, **options)

    monkeypatch.setattr(phases, "without_foreign_rows", watched)

    def continued(steps, folder=tmp_path, **settings):
        own = {"steps": steps, "eval_every": 4, "save_every": "2", "new_tokens_per_step": 1, "run_dir": "x"}
        observer = Quiet(str(folder / "checkpoints"))
        return loop.train_loop(small_job(GRPO, **own | settings | how), single(), observer).error

    assert continued(4) is None
    published = recorded(complete_checkpoints(tmp_path / "checkpoints")[4]).facts["published"]["policy"]
    assert [version for _, version in published][:4] == [1, 2, 3, 4]
    versions = [set(digests.values[:, 1].tolist()) for digests in checked]
    assert max(map(len, versions)) > 1 and checked[-1].offsets.diff().max() > 1
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert continued(6, resume=True) is None
    monkeypatch.setattr(SyncProof, "restore", lambda self, lists: None)
    assert "of policy; that of the run was not published" in str(continued(6, tmp_path / "copy", resume=True))


def test_rows_of_two_versions_with_equal_bits_are_the_runs(tmp_path):
    """The first update of a warm-up changes nothing, and some tokens of the next rows are of the version before it."""
    observer, outcome = train(folder=tmp_path, new_tokens_per_step=1, lr_warmup_steps=3, minibatches=1, save_every="3")
    assert outcome.error is None and len(observer.steps) == 3
    published = recorded(complete_checkpoints(tmp_path / "checkpoints")[3]).facts["published"]["policy"]
    (first, one), (second, two) = published[:2]
    assert (first, one, two) == (second, 1, 2)


@pytest.mark.gloo
def test_rows_of_generator_ranks_are_found_though_the_proof_of_the_sync_is_right(monkeypatch):
    """The engine samples by other weights, and has the right ones again when its digests are asked for."""
    load, serve = NativeEngine.load, GroupWriter.serve
    right = {}

    def load_others(self, named_weights, version=0):
        load(self, named_weights, version)
        if version == 2:
            right.update((name, x.clone()) for name, x in self.held_weights())
            load(self, other_weights(self), 2)

    def serve_rightly(self, request, answers):
        if request.method == "digests" and request.arguments[0] == 2:
            load(self.engine, right.items(), 2)
        return serve(self, request, answers)

    def program(mesh):
        observer = Quiet()
        outcome = run_rank(job, mesh, observer)
        return len(observer.steps), outcome.error

    job = small_job(GRPO, dtype="float32", place="train:dp1 generate:dp1", steps=3, eval_every=4)
    assert launch(program, job.launched, "cpu") == (3, None)
    monkeypatch.setattr(NativeEngine, "load", load_others)
    monkeypatch.setattr(GroupWriter, "serve", serve_rightly)
    steps, error = launch(program, job.launched, "cpu")
    assert steps == 1 and re.match(FOREIGN_ROW, str(error))


def test_rows_without_digests_are_an_error_where_the_proof_is_on():
    def source(*given):
        inner = make_source(*given)

        def next_rows(state, step):
            rows, state, metrics = inner.next_rows(state, step)
            return rows.with_fields(digests=None), state, metrics

        return inner._replace(next_rows=next_rows)

    _, outcome = train(source=source)
    assert isinstance(outcome.cause, ForeignRowError) and "--noverify_sync trains on them" in str(outcome.error)
    assert train(source=source, verify_sync=False)[1].error is None


def test_the_flag_needs_the_proof():
    with pytest.raises(SettingsError, match="foreign_rows"):
        small_job(GRPO, foreign_rows="drop", verify_sync=False)
