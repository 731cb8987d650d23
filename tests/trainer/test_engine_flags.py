"""Flags of the engine: its cache, its rows, and how prompts come to it."""

import dataclasses
import time

import numpy as np
import pytest
import torch
from scripted_engine import ScriptedEngine
from small_runs import GRPO, begin, gap, run_steps, small_job

from funrl import trees
from funrl.compiled_kernels.decode_step import page_bytes
from funrl.data.prompts import Example
from funrl.mesh.launch import launch
from funrl.mesh.mesh import Mesh, parse, single
from funrl.rewards.pool import Pool
from funrl.rollout.native.backends import packed_problem
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks import arithmetic
from funrl.trainer.jobs.engines import check_engine, native_options
from funrl.trainer.phases import draw_batch
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import with_flags
from funrl.trainer.sources.generation import RewardedEngine, rollout

PAGE = 16  # tokens


def drawn(**settings):
    """The rows of the first step, and what the engine did."""
    job = small_job(GRPO)
    run, state = begin(dataclasses.replace(job, settings=with_flags(job.settings, **settings)), single())
    rows, _, _ = draw_batch(run, state)
    return rows.batch, run.parts.generator.engine.cost()


def test_flags_bound_the_engine_and_change_no_number():
    whole, cost = drawn()
    assert cost.rows == 512 and cost.peak_pages > 3 and cost.cache_bytes == 0  # it is the trainer's between steps
    job = small_job(GRPO)
    page = trees.nbytes(job.model.init_cache(single(), 1, PAGE, job.dtype))
    if packed_problem(job.model, single(), job.dtype) is None:
        page = page_bytes(job.model.abilities.compiled_step, job.dtype)
    for settings, rows, pages in (({"decode_rows": 2}, 2, 4), ({"kv_cache_gb": 3.9 * page / 1e9}, 512, 3)):
        batch, bound = drawn(**settings)
        assert bound.rows == rows and bound.peak_pages <= pages and bound.passes > cost.passes
        assert bound.decoded == cost.decoded and batch.tokens.equal(whole.tokens)
        assert (batch.rollout_logp - whole.rollout_logp).abs().max() < 1e-12


def test_drafts_take_fewer_passes_and_change_no_number():
    texts = {"max_new_tokens": 40, "batch_prompts": 1, "samples_per_prompt": 2, "minibatches": 1}
    job = small_job(GRPO, **texts)
    job = dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, stop=(), top_k=1))  # which ends in a loop
    results = []
    for speculate in (0, 5):
        settings = with_flags(job.settings, speculate=speculate)
        run, state = begin(dataclasses.replace(job, settings=settings), single())
        rows, _, _ = draw_batch(run, state)
        results.append((rows.batch, run.parts.generator.engine.cost()))
    (whole, cost), (batch, fewer) = results
    assert batch.tokens.equal(whole.tokens) and (batch.rollout_logp - whole.rollout_logp).abs().max() < 1e-12
    assert fewer.passes < cost.passes and cost.drafted == 0 < fewer.accepted <= fewer.drafted


def test_drafts_on_a_gpu_are_refused_above_one_row():
    job = small_job(GRPO)
    gpu = Mesh(parse("dp1"), device=torch.device("cuda"))
    settings = with_flags(job.settings, speculate=3, decode_rows=8)
    with pytest.raises(SettingsError, match=r"^--speculate=3 with --decode_rows=8: drafts are made on the host, "):
        check_engine(settings, job.model, gpu, job.sampling, job.eval_sampling)
    for allowed, mesh in ((settings, single()), (with_flags(settings, decode_rows=1), gpu)):
        check_engine(allowed, job.model, mesh, job.sampling, job.eval_sampling)


def test_states_are_kept_as_often_as_a_flag_says():
    """What snapshots do is in `rollout/test_states.py`."""
    assert native_options(small_job(GRPO, state_snapshot_tokens=48)).snapshot_tokens == 48
    assert native_options(small_job(GRPO)).snapshot_tokens == 4096


def test_a_cache_that_the_longest_prompt_does_not_fit_into_is_refused_before_the_run():
    job = small_job(GRPO, max_new_tokens=40)
    longest = max(len(e.tokens) for e in (*job.task.prompts, *job.task.heldout)) + 40
    config = arithmetic.model_config()
    page = (
        2 * config.layers * PAGE * config.attention.kv_heads * config.attention.head * 8 / 1e9
    )  # keys and values in float64
    needed = page * -(-longest // PAGE)
    assert small_job(GRPO, max_new_tokens=40, kv_cache_gb=1.01 * needed)
    with pytest.raises(SettingsError, match=rf"--kv_cache_gb=.*: the longest prompt .* {longest} tokens"):
        small_job(GRPO, max_new_tokens=40, kv_cache_gb=0.99 * needed)


@pytest.mark.gloo
@pytest.mark.parametrize("queue", ["tickets", "fixed"])
def test_ranks_take_prompts_as_they_have_room_or_by_their_numbers(queue, tmp_path):
    """From a queue, the second rank has written 16 rows of 24 before the first one has written one."""
    examples = [Example([i], str(i), {}) for i in range(12)]

    def rows_of(rank):
        return len((tmp_path / str(rank)).read_bytes()) if (tmp_path / str(rank)).exists() else 0

    def program(mesh):
        def write(request):
            with (tmp_path / str(mesh.rank)).open("ab") as rows:
                rows.write(b".")
            end = time.monotonic() + 120
            while queue == "tickets" and rows_of(1 - mesh.rank) < (16 if mesh.rank == 0 else 1):
                assert time.monotonic() < end, "one rank takes no prompts while the other one writes"
                time.sleep(0.002)
            return [request.number]

        engine = RewardedEngine(ScriptedEngine(write), mesh, str, Pool([]), (), queue)
        return rollout(engine, examples, Sampling(samples=2), 0).owner

    owner = launch(program, parse("dp2"), "cpu")
    if queue == "fixed":
        assert owner.tolist() == [0] * 12 + [1] * 12
    else:
        assert 2 <= np.sum(owner == 0) <= 8 and (owner[::2] == owner[1::2]).all()


@pytest.mark.slow
@pytest.mark.gloo
def test_the_queue_changes_no_number():
    tickets, fixed = (run_steps(2, compose=GRPO, mesh="dp2", batch_prompts=5, queue=q) for q in ("tickets", "fixed"))
    for ticket, other in zip(tickets["batches"], fixed["batches"], strict=True):
        assert torch.equal(ticket.tokens, other.tokens) and torch.equal(ticket.score, other.score)
        assert (ticket.old_logp - other.old_logp).abs().max() < 1e-9
    assert gap(tickets["weights"], fixed["weights"]) < 1e-9
