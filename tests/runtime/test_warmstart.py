"""The supervised warm start: what it learns, its cache, and weights from a directory."""

import dataclasses

import pytest
import torch
from small_runs import SIZES, Quiet, begin, gap, small_job

from funrl import trees
from funrl.data import arithmetic
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.mesh.reshard import unshard
from funrl.models import hf
from funrl.runtime import ensemble, warmstart


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of its own for every test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "funrl" / "warmstart"


def start(job):
    """Whole weights after `initial_weights` on the job's mesh, as rank 0 ends with them, and what was shown."""

    def program(mesh):
        models, show = ensemble.build(job, mesh, print), Quiet()
        weights = warmstart.initial_weights(job, mesh, models.policy_layouts, models.layer, show)
        return unshard(weights, models.policy_layouts, mesh), show

    return launch(program, job.sizes, "cpu")


def taken(show):
    return any("taken from the cache" in note for note in show.notes)


def test_demonstrations_are_masked_to_their_answers_and_stop_tokens():
    job = small_job(seed=3)
    rows = warmstart.demonstration_batch(job, 7, torch.device("cpu"))
    pairs = arithmetic.demonstrations(3 * 1_000_003 + 7, warmstart.BATCH)
    assert len(rows.tokens) == len(pairs)
    for i, (prompt, answer) in enumerate(pairs):
        tokens, mask = rows.tokens[i], rows.mask[i]
        assert int(rows.length[i]) == len(prompt) + len(answer) + 1
        assert job.tokenizer.decode(tokens[: len(prompt)].tolist()) == prompt
        assert job.tokenizer.decode(tokens[mask].tolist()) == answer + job.tokenizer.eos_token
    assert not torch.equal(rows.tokens, warmstart.demonstration_batch(job, 8, torch.device("cpu")).tokens)


def test_the_loss_falls_from_that_of_guessing():
    _, show = start(small_job(warmstart_steps=60, dtype="float32"))
    steps, losses = zip(*show.losses, strict=True)
    assert steps == (10, 20, 30, 40, 50, 60)
    assert 2.0 < losses[0] < 2.8  # ln 16 = 2.77 nats is a guess among all tokens
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp2,tp2", "dp4"])
def test_the_same_weights_on_every_mesh_and_without_the_cache(mesh, cache, monkeypatch):
    one, _ = start(small_job(warmstart_steps=12))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "another"))
    other, show = start(small_job(warmstart_steps=12, mesh=mesh))
    assert not taken(show)
    assert gap(other, one) < 1e-9


@pytest.mark.gloo
def test_a_second_run_takes_the_cache_on_any_mesh():
    one, first = start(small_job(warmstart_steps=5))
    assert not taken(first)
    for mesh in ("dp1", "dp2,tp2", "tp2"):
        other, show = start(small_job(warmstart_steps=5, mesh=mesh))
        assert taken(show) and not show.losses
        for a, b in zip(trees.leaves(other), trees.leaves(one), strict=True):
            assert torch.equal(a, b)


def test_the_cache_is_of_one_model_seed_length_and_dtype():
    start(small_job(warmstart_steps=3))
    for other in ({"seed": 1}, {"warmstart_steps": 4}, {"dtype": "float32"}, {"sizes": SIZES | {"mlp": 24}}):
        assert not taken(start(small_job(**{"warmstart_steps": 3} | other))[1]), other
    for same in ({}, {"lr": 0.5}, {"max_new_tokens": 5}, {"batch_prompts": 6}):
        assert taken(start(small_job(**{"warmstart_steps": 3} | same))[1]), same


def test_what_another_run_left_half_written_is_not_taken(cache):
    job = small_job(warmstart_steps=3)
    one, _ = start(job)
    (stored,) = cache.iterdir()
    (stored / "config.json").unlink()
    again, show = start(job)
    assert not taken(show)
    assert gap(again, one) == 0


def test_a_cache_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    weights, show = start(small_job(warmstart_steps=2))
    assert any("could not be cached" in note for note in show.notes)
    assert all(torch.isfinite(x).all() for x in trees.leaves(weights))


def test_no_steps_leave_the_weights_of_the_seed(cache):
    a, b, c = (start(small_job(seed=seed))[0] for seed in (0, 0, 1))
    assert gap(a, b) == 0 and gap(a, c) > 0.01
    assert not cache.exists()


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp1", "dp2,tp2"])
def test_weights_from_a_directory(mesh, tmp_path):
    job = small_job(mesh=mesh)
    one, _ = start(small_job(seed=5))
    hf.save(tmp_path / "model", job.config, one, job.tokenizer)
    job = job._replace(settings=dataclasses.replace(job.settings, model=str(tmp_path / "model")))
    loaded, _ = start(job)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(loaded), trees.leaves(one), strict=True))


def test_bfloat16_keeps_float32_weights():
    job = small_job(dtype="bfloat16", warmstart_steps=2)
    models, state = begin(job, single())
    for tree in (state.policy.params, state.critic.params):
        assert {x.dtype for x in trees.leaves(tree)} == {torch.float32}
    assert models.engine._model.params["norm"].dtype == torch.bfloat16
