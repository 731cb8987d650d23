"""The gap between engine and trainer: 0 where it is promised, found where it is not."""

import pytest
import torch
from selection import quick
from small_runs import GRPO, PPO, Quiet, begin, scored_batch, small_job

from funrl import trees
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh.mesh import single
from funrl.models.decoder import dense
from funrl.trainer.gap import GAP_METRIC, GapError, gap_problem
from funrl.trainer.phases import draw_batch, learn_batch, score_batch, update_batch
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.sync import sync

pytestmark = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))


CASES = [
    {"dtype": dtype, **more}
    for dtype in ("float32", "float64", "bfloat16")
    for more in ({}, {"temperature": 0.7}, {"top_p": 0.8}, {"lora_rank": 2})
]
QUICK = (
    {"dtype": "bfloat16", "temperature": 0.7},
    {"dtype": "float64", "top_p": 0.8},
    {"dtype": "float32", "lora_rank": 2},
)


@pytest.mark.parametrize("settings", quick(CASES, QUICK), ids=str)
def test_the_gap_is_0(settings):
    job = small_job(PPO, on_gap="stop", max_new_tokens=12, token_budget=64, **settings)
    trainer, state = begin(job, single())
    assert gap_problem(trainer.job, trainer.parts) is None and trainer.gap_check is not None
    rows, _, metrics = scored_batch(trainer, state)
    assert rows.batch.mask.sum() > 20 and metrics[GAP_METRIC] == metrics["rollout/logprob_gap_mean"] == 0
    trainer.gap_check.scored(rows, metrics)


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}], ids=str)
def test_a_gap_where_there_should_be_none_stops_the_run_or_is_said(settings, stop):
    show = Quiet()
    trainer, state = begin(small_job(PPO, on_gap="stop" if stop else "say", **settings), single(), show)
    rows, _, _ = scored_batch(trainer, state)
    row, position = rows.batch.mask.nonzero()[7].tolist()
    off = torch.zeros_like(rows.batch.rollout_logp)
    off[row, position] = 1e-9
    rows = rows.with_fields(rollout_logp=rows.batch.rollout_logp + off)
    show.notes.clear()
    if stop:
        with pytest.raises(GapError) as stopped:
            trainer.gap_check.scored(rows, {GAP_METRIC: 1e-9})
        show.notes.append(str(stopped.value))
    else:
        trainer.gap_check.scored(rows, {GAP_METRIC: 1e-9})
    engine, trained = (x[row, position].item() for x in (rows.batch.rollout_logp, rows.batch.old_logp))
    assert show.notes == [
        "engine and trainer differ by 1e-09 nats where they should have the same bits, most at row "
        f"{row}, position {position} (token {int(rows.batch.tokens[row, position])}): "
        f"engine {engine}, trainer {trained} nats"
    ]
    trainer.gap_check.scored(rows, {GAP_METRIC: 0.0})
    assert len(show.notes) == 1


def test_a_gap_of_an_update_is_said(monkeypatch):
    """Where the update's forward pass is the scoring, nothing else scores the rows."""
    show = Quiet()
    trainer, state = begin(small_job(GRPO, dtype="float32", minibatches=1), single(), show)
    right = dense.gated
    off = lambda *args: right(*args) * (1 if torch.is_inference_mode_enabled() else 1 + 1e-6)  # noqa: E731
    monkeypatch.setattr(dense, "gated", off)
    rows, state, metrics = scored_batch(trainer, state)
    assert GAP_METRIC not in metrics and rows.batch.get("old_logp") is None
    _, learned, _ = update_batch(trainer, state, rows)
    assert learned[GAP_METRIC] > 0
    assert show.notes[-1].startswith(f"engine and trainer differ by {learned[GAP_METRIC]:.3g} nats")
    assert "--on_gap=stop names the token" in show.notes[-1]


@pytest.mark.parametrize("name, bound", [("logprob_gap_p99", ">1e-9"), ("effective_share", "<1.5")])
def test_a_metric_beyond_its_bound_stops_a_run_of_any_engine(name, bound):
    job = small_job(GRPO, engine="hf", dtype="float32", on_gap=f"stop:{name}{bound}", max_new_tokens=12)
    trainer, state = begin(job, single())
    rows, _, metrics = scored_batch(trainer, state)
    assert trainer.gap_check is not None and not trainer.gap_check.promised
    with pytest.raises(GapError, match=rf"rollout/{name} is .* of --on_gap, most at row"):
        trainer.gap_check.scored(rows, metrics)


def test_a_bound_that_holds_leaves_the_promise_of_equal_bits_to_a_remark():
    show = Quiet()
    trainer, state = begin(small_job(GRPO, on_gap="stop:logprob_gap_max>0.1"), single(), show)
    rows, _, metrics = scored_batch(trainer, state)
    show.notes.clear()
    trainer.gap_check.scored(rows, metrics)
    assert show.notes == []
    trainer.gap_check.scored(rows, {GAP_METRIC: 0.05})
    assert show.notes[-1].startswith("engine and trainer differ by 0.05 nats")
    for value in (0.2, float("nan")):
        with pytest.raises(GapError, match=r"above the 0\.1 of --on_gap"):
            trainer.gap_check.scored(rows, {GAP_METRIC: value})


@pytest.mark.parametrize(
    "text", ["stop:p99>0.1", "halt", "stop:logprob_gap_p99", "say:ratio_mean=1", "stop:", "stop:ratio_mean>1e400"]
)
def test_a_rule_that_means_nothing_is_refused(text):
    with pytest.raises(SettingsError, match=r"on_gap.*stop:logprob_gap_p99>0"):
        small_job(GRPO, on_gap=text)


def test_tokens_of_other_weights_are_counted_apart():
    job = small_job(GRPO, new_tokens_per_step=2, max_new_tokens=6, batch_prompts=4, lr=0.05, minibatches=2)
    trainer, state = begin(job, single())
    seen = []
    for _ in range(4):
        rows, state, _ = draw_batch(trainer, state)
        rows, state, metrics = score_batch(trainer, state, rows)
        state, _ = learn_batch(trainer, state, rows)
        state = sync(trainer.parts, state)
        assert metrics[GAP_METRIC] == 0
        seen.append(metrics["rollout/stale_gap_max"])
    assert max(seen) > 1e-6


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"engine": "hf", "dtype": "float32"}, "--engine=hf"),
        ({"engine": "hf", "dtype": "float32", "lora_rank": 2}, "--engine=hf"),
    ],
)
def test_the_reason_why_there_is_no_promise(settings, words):
    trainer, _ = begin(small_job(GRPO, **settings), single())
    assert words in gap_problem(trainer.job, trainer.parts) and trainer.gap_check is None


def test_later_updates_of_a_step_count_no_gap_as_their_weights_sampled_nothing():
    """An algorithm that does not read old_logp has that of its first update."""
    job = small_job(rollout_is, minibatches=2, lr=0.1)
    trainer, state = begin(job, single())
    rows, state, _ = scored_batch(trainer, state)
    before = [x.clone() for x in trees.leaves(state.roles["policy"].params)]
    state, metrics = learn_batch(trainer, state, rows)
    assert metrics[GAP_METRIC] == metrics["rollout/logprob_gap_mean"] == 0
    assert any(not torch.equal(x, y) for x, y in zip(before, trees.leaves(state.roles["policy"].params), strict=True))
