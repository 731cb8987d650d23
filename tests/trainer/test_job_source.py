"""The source of a job: given texts are read once, by the trainer ranks on them; what counts as solved."""

import collections
import collections.abc
import dataclasses

import pytest
import torch
from small_runs import begin, small_job

from funrl.algos.recipes import recipe
from funrl.algos.recipes.sft import sft
from funrl.data.supervised import DataError, Text, TextExample
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer.jobs.row_source import remarks_on_groups
from funrl.trainer.sources.evaluation import verdicts


class Counted(collections.abc.Sequence):
    """Examples that count how often each is read."""

    def __init__(self, examples):
        self.examples, self.reads = examples, collections.Counter()

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        self.reads[index] += 1
        return self.examples[index]


def texts(**settings):
    return small_job(sft, reward=None, batch_prompts=6, **settings)


def reads_of_a_step(mesh):
    """The texts that each rank reads to draw a step, and the lengths of its rows."""
    job = texts(mesh=str(mesh))
    examples = Counted(job.task.examples)
    run, state = begin(dataclasses.replace(job, task=job.task._replace(examples=examples)), mesh)
    examples.reads.clear()
    rows, _, _ = run.source.next_rows(state.source, 1)
    return gather_objects((examples.reads, rows.lengths[rows.own].tolist()), mesh)


@pytest.mark.gloo
def test_a_rank_reads_its_own_texts_once_and_no_other():
    ((whole, lengths),) = reads_of_a_step(single())
    assert len(whole) == 6 and set(whole.values()) == {1}
    shares = launch(reads_of_a_step, texts(mesh="dp2").sizes, "cpu")
    (first, begin_lengths), (second, end_lengths) = shares
    assert len(first) == len(second) == 3 and first + second == whole
    assert begin_lengths + end_lengths == lengths


def test_a_text_that_turns_out_too_long_when_it_is_drawn_is_named():
    job = texts()
    positions = job.model.config.max_positions
    long = TextExample((Text([2] * (positions + 1), [False] + [True] * positions),), source="texts.jsonl, line 7")
    run, state = begin(
        dataclasses.replace(job, task=job.task._replace(examples=[*job.task.examples[:3], long])), single()
    )
    with pytest.raises(DataError, match=f"texts.jsonl, line 7: the text has {positions + 1} tokens, but the model has"):
        run.source.next_rows(state.source, 1)


def test_accuracy_is_of_verdicts_alone_and_not_of_chance_ones_later():
    nan = float("nan")
    solved = verdicts([2.0, -1.0])
    scores = torch.tensor([[1.0, 0.0, 0.3], [1.0, 1.0, 0.3], [nan, 0.0, 0.3], [1.0, nan, 0.3]])  # the last: a model's
    assert solved(scores).tolist() == [True, False, False, True]
    assert solved(torch.tensor([[1.0, 0.5, 0.0]])) is None
    assert solved(scores) is None  # what gave 0.5 once gives numbers


@pytest.mark.parametrize("name", ["grpo", "rloo", "online_dpo", "ppo", "remax"])
def test_a_completion_that_has_no_other_to_be_compared_with_is_said(name):
    compares = name not in ("ppo", "remax")
    assert remarks_on_groups(2, recipe(name)()) == []
    assert [text[:22] for text in remarks_on_groups(1, recipe(name)())] == ["--samples_per_prompt=1"] * compares
