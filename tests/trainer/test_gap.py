"""The gap between engine and trainer: 0 where it is promised, found where it is not."""

import pytest
import torch
from small_runs import GRPO, PPO, begin, scored_batch, small_job

from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh.mesh import single
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder import attention
from funrl.trainer.gap import GAP_METRIC, GapError, check_gap, first_differing_layer, gap_problem
from funrl.trainer.jobs.build import sync
from funrl.trainer.loop import draw_batch, learn_batch, score_batch

pytestmark = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
SIZES = {"vocab": 40, "embed": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 48}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_p": 0.8}])
def test_the_gap_is_0(dtype, settings):
    job = small_job(PPO, dtype=dtype, on_gap="stop", max_new_tokens=12, token_budget=64, **settings)
    trainer, state = begin(job, single())
    assert gap_problem(trainer.job, trainer.parts) is None and trainer.check_gap is not None
    rows, _, metrics = scored_batch(trainer, state)
    assert rows.batch.mask.sum() > 20 and metrics[GAP_METRIC] == metrics["rollout/logprob_gap_mean"] == 0
    trainer.check_gap(rows, metrics)


@pytest.mark.parametrize("stop", [True, False])
def test_a_gap_where_there_should_be_none_stops_the_run_or_is_said(stop):
    job = small_job(PPO, on_gap="stop" if stop else "say")
    trainer, state = begin(job, single())
    rows, _, _ = scored_batch(trainer, state)
    row, position = rows.batch.mask.nonzero()[7].tolist()
    off = torch.zeros_like(rows.batch.rollout_logp)
    off[row, position] = 1e-9
    rows = rows.with_fields(rollout_logp=rows.batch.rollout_logp + off)
    token = int(rows.batch.tokens[row, position])
    place = f"same bits, most at row {row}, position {position} \\(token {token}\\)"
    notes = []
    if stop:
        with pytest.raises(GapError, match=place):
            check_gap(rows, {GAP_METRIC: 1e-9}, stop=True, note=notes.append)
    else:
        check_gap(rows, {GAP_METRIC: 1e-9}, stop=False, note=notes.append)
    assert len(notes) == (not stop) and all("differ by 1e-09 nats" in note for note in notes)
    check_gap(rows, {GAP_METRIC: 0.0}, stop=True, note=notes.append)


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


@pytest.mark.parametrize("settings, words", [
    ({"lora_rank": 2}, "merged adapters"),
    ({"engine": "hf", "dtype": "float32"}, "--engine=hf"),
])  # fmt: skip
def test_the_reason_why_there_is_no_promise(settings, words):
    trainer, _ = begin(small_job(GRPO, **settings), single())
    assert words in gap_problem(trainer.job, trainer.parts) and trainer.check_gap is None


@pytest.mark.parametrize("more", [
    {}, {"qk_norm": True, "tied": True}, {"windows": (None, 5, None), "activation": "gelu", "attention_cap": 5.0},
])  # fmt: skip
def test_the_first_layer_that_differs_is_named(more, monkeypatch):
    model = decoder_model(decoder_config(**(SIZES | more)))
    params = model.init(torch.Generator().manual_seed(0))
    tokens = torch.randint(40, (37,), generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        assert first_differing_layer(model, params, tokens, dtype) is None
    attend = attention.split_attention
    calls = []

    def faulty(q, k, v, *rest, **how):  # the last layer of three is off
        calls.append(1)
        return attend(q, k, v, *rest, **how) * (1 + 1e-6 * (len(calls) == 1 + 2 + 3))

    monkeypatch.setattr(attention, "split_attention", faulty)
    assert first_differing_layer(model, params, tokens) == 2
