"""Conversations whose chat template renders earlier turns otherwise: several rows, counted as one sequence."""

import functools
import json

import pytest
import torch
from small_runs import assert_same, begin, gap, gradients, scored_batch, small_job, steps_program

from funrl import trees
from funrl.algos.recipes.sft import sft
from funrl.batch import Batch
from funrl.data.supervised import DataError
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single

# It renders thoughts in the last message alone, so that a turn with thoughts is rendered otherwise later.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}={% else %}"
    "{% if loop.last and m.reasoning_content %}{{ m.reasoning_content }}*{% endif %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
PER_SEQUENCE = functools.partial(sft, per_sequence=True)


def conversation(thoughts, number=1):
    """A conversation with a turn for each thought; "": it has none."""
    messages = []
    for turn, thought in enumerate(thoughts):
        messages.append({"role": "user", "content": f"{number}+{turn}"})
        messages.append({"role": "assistant", "content": str(number + turn), "reasoning_content": thought})
    return {"messages": messages}


# Of 3, 1, 2, 1, 4 and 1 rows: a turn stays in the row of the one before where that has no thoughts.
THOUGHTS = [("11", "2", "345"), ("", ""), ("67", "8"), ("9",), ("1", "2", "34", ""), ("", "", "")]
RECORDS = [conversation(thoughts, 7 + number) for number, thoughts in enumerate(THOUGHTS)]
ROWS = (3, 1, 2, 1, 4, 1)


@pytest.fixture
def job_of(tmp_path):
    """A function that makes a job of conversations."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)

    def make(compose=sft, records=RECORDS, heldout=RECORDS[:3], **settings):
        for name, rows in (("data", records), ("eval_data", heldout)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"data": str(tmp_path / "data.jsonl"), "eval_data": str(tmp_path / "eval_data.jsonl")}
        given = {**files, "chat_template": str(template), "reward": None, "batch_prompts": 6, "minibatches": 1}
        return small_job(compose, **given | settings)

    return make


def losses_by_hand(run, params, examples):
    """The mean over tokens, and the mean over conversations of the mean over their tokens."""
    placed = run.parts.roles["policy"].placed
    sums, counts = [], []
    for example in examples:
        rows = [(torch.tensor([text.tokens]), torch.tensor([text.trained])) for text in example.texts]
        logps = [placed.token_scores(params, Batch(tokens=tokens, mask=mask)).logp for tokens, mask in rows]
        sums.append(-sum((logp * mask).sum() for logp, (_, mask) in zip(logps, rows, strict=True)))
        counts.append(sum(int(mask.sum()) for _, mask in rows))
    means = torch.stack([total / count for total, count in zip(sums, counts, strict=True)])
    return torch.stack(sums).sum() / sum(counts), means.mean()


@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_conversation_is_a_sequence_and_each_token_counts_once(job_of, per_sequence):
    job = job_of(PER_SEQUENCE if per_sequence else sft)
    examples = list(job.task.examples)
    assert [len(example.texts) for example in examples] == list(ROWS)
    run, state = begin(job, single())
    rows, _, _ = scored_batch(run, state)
    assert len(rows.owner) == sum(ROWS)
    result = gradients(run, state, rows)["policy"]
    params = trees.map(lambda x: x.detach().clone().requires_grad_(), state.roles["policy"].params)
    loss = losses_by_hand(run, params, examples)[per_sequence]
    assert result.loss.item() == pytest.approx(loss.item(), abs=1e-12)
    wanted = torch.autograd.grad(loss, trees.leaves(params))
    by_leaf = zip(trees.leaves(result.tree), wanted, strict=True)
    assert max((got - by_hand).abs().max() for got, by_hand in by_leaf) < 1e-12
    packed = gradients(run, state, rows, token_budget=24)["policy"]  # several micro-batches
    assert gap(packed.tree, result.tree) < 1e-12 and abs(packed.loss - result.loss) < 1e-12


def test_held_out_conversations_are_evaluated_as_they_are_trained(job_of):
    for compose in (sft, PER_SEQUENCE):
        job = job_of(compose)
        run, state = begin(job, single())
        by_hand = losses_by_hand(run, state.roles["policy"].params, job.task.heldout)[compose is PER_SEQUENCE]
        assert run.source.evaluate(state.roles, 1)["eval/loss"] == pytest.approx(by_hand.item(), abs=1e-12)


@pytest.mark.gloo
@pytest.mark.parametrize("compose", [sft, PER_SEQUENCE])
def test_a_mesh_does_not_change_it(job_of, compose):
    job = job_of(compose, minibatches=2)
    whole = launch(steps_program(job, 2), job.sizes, "cpu")
    two = job_of(compose, minibatches=2, mesh="dp2")
    assert_same(launch(steps_program(two, 2), two.sizes, "cpu"), whole, 1e-9)


@pytest.mark.gloo
def test_a_rank_may_have_no_conversation_of_several_rows(job_of):
    """Nor a step: the rows of the next one are episodes again."""
    records = [conversation(("",), 2), conversation(("1", "2", "3"), 3), conversation(("",), 4), conversation(("",), 5)]
    given = {"records": records, "heldout": records[1:3], "batch_prompts": 2}
    job = job_of(PER_SEQUENCE, **given)
    whole = launch(steps_program(job, 4), job.sizes, "cpu")
    names = [batch.names() for batch in whole["batches"]]
    assert {"episode_tokens" in fields for fields in names} == {False, True}
    two = job_of(PER_SEQUENCE, **given, mesh="dp2")
    assert_same(launch(steps_program(two, 4), two.sizes, "cpu"), whole, 1e-9)


def test_rows_that_are_too_long_are_cut_each_by_itself(job_of):
    lengths = [len(text.tokens) for text in job_of().task.examples[0].texts]
    most = sorted(lengths)[1]
    with pytest.raises(DataError, match=r"line 1: the conversation's row 3 has 22 tokens, but --max"):
        job_of(max_text_tokens=most)
    job = job_of(max_text_tokens=most, long_prompts="truncate")
    whole, cut = job_of().task.examples[0], job.task.examples[0]
    for before, after in zip(whole.texts, cut.texts, strict=True):
        assert after.tokens == before.tokens[-most:] and after.trained == before.trained[-most:]
    run, state = begin(job, single())
    rows, _, _ = scored_batch(run, state)
    assert int(rows.lengths.max()) == most
    by_hand = losses_by_hand(run, state.roles["policy"].params, job.task.examples)[0]
    assert gradients(run, state, rows)["policy"].loss.item() == pytest.approx(by_hand.item(), abs=1e-12)
