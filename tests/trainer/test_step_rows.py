"""Rows as a rank holds them from phase to phase."""

import dataclasses

import numpy as np
import torch
from small_runs import SIZES, begin, scored_batch, small_job

from funrl.algos.recipes.dpo import dpo
from funrl.batch import TOKEN_INT, Batch, as_dict
from funrl.fields import FIELDS
from funrl.mesh.mesh import single
from funrl.models import decoder_model, place, with_fields
from funrl.tasks import arithmetic
from funrl.trainer import phases
from funrl.trainer.steps import learn as learning
from funrl.trainer.steps.micro import own_micro_batches, plan_epoch
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.score import score
from funrl.trainer.steps.step_rows import rows_of, take


def whole_numbers(batch):
    """Dtypes of the whole numbers per token."""
    fields = as_dict(batch).items()
    kinds = {n: x.dtype for n, x in fields if FIELDS[n].kind.per_token and FIELDS[n].dtype == "int"}
    assert "tokens" in kinds
    return kinds


def test_ids_take_four_bytes_wherever_a_rank_holds_rows():
    for given in ({}, {"compose": dpo, "reward": None}):
        run, state = begin(small_job(**given), single())
        drawn, _, _ = run.source.next_rows(state.source, 1)
        rows, _, _ = scored_batch(run, state)
        for batch in (drawn.batch, rows.batch, *(piece.batch for piece in own_micro_batches(rows, 64))):
            assert set(whole_numbers(batch).values()) == {TOKEN_INT}, given


def test_so_do_those_that_are_given_wide_or_added():
    tokens = torch.arange(16).reshape(2, 8)
    rows = rows_of(Batch(tokens=tokens, mask=tokens > 3, length=torch.tensor([8, 8]), positions=tokens))
    more = rows.with_fields(teacher_topk=tokens[..., None], segments=tokens)
    assert set(whole_numbers(more.batch).values()) == {TOKEN_INT} and len(whole_numbers(more.batch)) == 4
    assert more.batch.length.dtype == torch.int64  # of the row table
    assert torch.equal(more.batch.teacher_topk[..., 0].long(), tokens)


def test_a_model_is_given_int64_and_its_most_likely_tokens_are_held_in_four_bytes():
    given = []
    plain = decoder_model(with_fields(arithmetic.model_config(), **SIZES))

    def watched(params, inputs, *rest, **more):
        given.append(inputs)
        return plain.apply(params, inputs, *rest, **more)

    writes = {"teacher_logp": "logp", "teacher_topk": "topk"}
    role = Role(place(dataclasses.replace(plain, apply=watched)), writes, topk=3)
    tokens = torch.arange(16).reshape(2, 8) % plain.config.vocab
    beside = {"positions": tokens % 8, "segments": tokens * 0 + 1}
    batch = Batch(tokens=tokens, mask=tokens > 3, length=torch.tensor([8, 8]), **beside)
    rows = score({"teacher": role}, {"teacher": plain.init(torch.Generator().manual_seed(0))}, rows_of(batch))
    assert rows.batch.teacher_topk.dtype == TOKEN_INT and rows.batch.teacher_topk.max() < plain.config.vocab
    assert {
        x.dtype for completion in given for x in (completion.tokens, completion.positions, completion.segments)
    } == {torch.int64}


def test_a_pass_is_planned_once_and_never_taken_from_another_division(monkeypatch):
    run, state = begin(small_job(epochs=2, minibatches=2), single())
    rows, state, _ = phases.draw_batch(run, state)
    plans = []
    monkeypatch.setattr(learning, "plan_epoch", lambda *plan, **kw: plans.append(plan[-1]) or plan_epoch(*plan, **kw))
    plan = phases.update_plan(run.job, run.parts, state.step + 1)
    assert learning.epoch_of(rows, plan, 0) is rows.epoch and plans == []
    assert learning.epoch_of(rows, plan, 1).number == 1
    other = learning.epoch_of(rows, plan._replace(minibatches=4), 0)
    assert len(other.parts) == 4 and plans == [1, 0]
    assert take(rows, np.arange(2)).epoch is None  # the assignment is of all rows
