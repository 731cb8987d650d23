"""Teachers with prompts of their own, beside loops over rows, on several meshes."""

import dataclasses
from pathlib import Path

import pytest
import torch
from selection import quick
from small_runs import assert_same, begin, run_steps, scored_batch, small_job

from funrl.algos.recipes.distillation import distillation
from funrl.algos.recipes.gkd import gkd
from funrl.algos.recipes.grpo import grpo
from funrl.batch import Batch, declare
from funrl.data.prompts import Example
from funrl.fields import CONTEXT_FIELDS
from funrl.kinds import Ragged
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rewards.call import RewardError
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import teacher_prompts_of
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.teacher_prompts import ScoredCompletion, after_best_sibling, after_text
from funrl.trainer.steps.contexts import with_context
from funrl.trainer.steps.step_rows import rows_of

FUNCTIONS = Path(__file__).with_name("functions_of_flags.py")
EASIER = f"{FUNCTIONS}:easier"


def test_rows_with_other_prompts_are_those_of_a_loop():
    draw = torch.Generator().manual_seed(5)
    for _ in range(30):
        prompts, completions, others = (
            [int(x) for x in torch.randint(lo, 9, (6,), generator=draw)] for lo in (1, 0, 0)
        )
        length = torch.tensor([p + c for p, c in zip(prompts, completions, strict=True)])
        T = 8 * -(-int(length.max()) // 8)
        place = torch.arange(T)
        tokens = torch.randint(2, 90, (6, T), generator=draw) * (place < length[:, None])
        first = torch.tensor(prompts)[:, None]
        mask = (place >= first) & (place < length[:, None]) & ((place == first) | (place % 3 > 0))
        lines = [torch.randint(100, 190, (n,), generator=draw) for n in others]
        field = Ragged(torch.cat(lines), torch.tensor([0, *others]).cumsum(0))
        batch = declare(Batch(tokens=tokens, mask=mask, length=length), CONTEXT_FIELDS)._replace(teacher_prompt=field)
        seen = with_context(rows_of(batch), "teacher_prompt")
        numbers = torch.rand(6, seen.rows.batch.tokens.shape[1], 2, generator=draw)
        back = seen.back(numbers)
        for row in range(6):
            end = int(length[row])
            begin = lines[row].tolist() or tokens[row, : prompts[row]].tolist()
            whole = begin + tokens[row, prompts[row] : end].tolist()
            assert int(seen.rows.lengths[row]) == len(whole)
            assert seen.rows.batch.tokens[row, : len(whole)].tolist() == whole
            assert seen.rows.batch.mask[row].nonzero()[:, 0].tolist() == [
                t - prompts[row] + len(begin) for t in mask[row].nonzero()[:, 0].tolist()
            ]
            assert torch.equal(back[row, prompts[row] : end], numbers[row, len(begin) : len(whole)])
            assert not back[row, : prompts[row]].any() and not back[row, end:].any()


def test_the_teacher_scores_a_completion_after_its_own_prompt():
    """By one pass over each row alone, in float64."""
    run, state = begin(small_job(distillation, teacher_context=EASIER), single())
    rows, _, _ = scored_batch(run, state)
    role, params = run.parts.roles["teacher"], run.frozen["teacher"]
    batch = rows.batch
    tokenizer = run.job.tokenizer
    prompts = batch.teacher_prompt
    seen = 0
    for row in range(len(batch.tokens)):
        first = int(batch.mask[row].int().argmax())
        end = int(batch.length[row])
        own = prompts.values[prompts.offsets[row] : prompts.offsets[row + 1]]
        assert bool(len(own)) == (row % 2 == 0)
        if len(own):
            assert tokenizer.decode(own.tolist()).startswith("0+")
        begin_ids = own if len(own) else batch.tokens[row, :first]
        whole = torch.cat([begin_ids.long(), batch.tokens[row, first:end].long()])[None]
        alone = Batch(tokens=whole, mask=torch.arange(whole.shape[1])[None] >= len(begin_ids))
        logp = role.placed.token_scores(params, alone).read("logp")[0, len(begin_ids) :]
        assert torch.allclose(batch.teacher_logp[row, first:end], logp, atol=1e-12, rtol=0)
        same = torch.allclose(logp, batch.old_logp[row, first:end], atol=1e-12, rtol=0)
        assert same == (not len(own))  # the teacher is the first policy
        seen += len(logp)
    assert seen == int(batch.mask.sum())


@pytest.mark.parametrize("mesh", quick(["dp2", "tp2", "dp2,sp2", "dp2,tp2"], ["dp2"]))
def test_a_run_has_the_same_numbers_on_every_mesh(mesh):
    given = {"compose": distillation, "teacher_context": EASIER}
    assert_same(run_steps(2, **given), run_steps(2, mesh=mesh, **given), 1e-9)


def test_the_best_sibling_is_shown_to_those_below_it():
    texts = ["a", "b", "c"]
    assert [after_best_sibling("q", texts, [0.0, 1.0, 1.0], i) for i in range(3)] == ["b\n\nq", None, None]
    assert [after_best_sibling("q", texts, [1.0, 1.0, 1.0], i) for i in range(3)] == [None] * 3
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    shown = after_text("b", chat)
    assert not isinstance(shown, str)
    assert [message["content"] for message in shown] == ["q", "a", "b\n\nr"] and chat[2]["content"] == "r"


def test_a_function_that_fails_or_gives_no_text_is_named():
    example = Example([5, 6], "3+4=", {"answer": "7"}, source="p.jsonl, line 3")
    for name, text in (("numbered", "TypeError"), ("failing", "KeyError: 'demonstration'")):
        job = small_job(distillation, teacher_context=f"{FUNCTIONS}:{name}")
        assert isinstance(job, RLJob)
        made = teacher_prompts_of(job)
        assert made is not None
        with pytest.raises(RewardError, match=f"--teacher_context: p.jsonl, line 3: .*{text}"):
            made.lines([example], [ScoredCompletion(0, [3], 0.0)], 1)


@pytest.mark.parametrize(
    ("recipe", "given", "text"),
    [
        (grpo, {"teacher_context": "answer"}, "a teacher"),
        (distillation, {}, "--teacher"),
        (distillation, {"teacher_context": "solution"}, "no such field; its fields are answer"),
        (gkd, {"teacher_context": "answer"}, "divergence over the whole vocabulary"),
        (distillation, {"teacher_context": "answer", "env": "calculator"}, "an environment writes its own prompts"),
        (distillation, {"teacher_context": "missing.py:f"}, "missing.py"),
        (distillation, {"teacher_context": "sibling", "max_new_tokens": 40}, "exceeds the teacher's 64 positions"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(recipe, given, text):
    with pytest.raises((SettingsError, ValueError), match=text):
        small_job(recipe, **given)


def test_only_rows_that_are_trained_on_have_a_teacher():
    """A function that needs a field of training records does not see held-out ones."""
    run, state = begin(small_job(distillation, teacher_context=EASIER), single())
    held = [example._replace(fields={}) for example in run.job.task.heldout]
    job = dataclasses.replace(run.job, task=run.job.task._replace(heldout=held))
    run, state = begin(job, single())
    assert "eval/reward" in run.source.evaluate(state.roles, 0)


def test_a_function_that_fails_on_one_rank_ends_all():
    job = small_job(distillation, mesh="dp2", teacher_context=f"{FUNCTIONS}:failing_on_one_rank")

    def program(mesh):
        with pytest.raises(RewardError) as raised:
            scored_batch(*begin(job, mesh))
        return str(raised.value)

    assert "KeyError: 'demonstration'" in launch(program, job.sizes, "cpu")  # of the first rank, where none failed
