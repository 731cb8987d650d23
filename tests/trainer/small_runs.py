"""A very small job, and what the tests of the trainer run of it."""

import dataclasses
import shutil
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from funrl import trees
from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.ppo import ppo
from funrl.batch import Batch, as_dict, kind_of, schema_of
from funrl.data.supervised import Text
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.reshard import unshard
from funrl.mesh.rules import STORED, layouts
from funrl.models import decoder_model, with_fields, with_value_head
from funrl.models.lora import with_lora
from funrl.models.nf4_base import with_nf4
from funrl.trainer import phases, startup
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.steps.learn import denominators
from funrl.trainer.steps.micro import own_micro_batches
from funrl.trainer.steps.roles import row_fields_of
from funrl.trainer.steps.step import gradient
from funrl.trainer.steps.sync import sync

SIZES: dict[str, Any] = {"embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 32}
SMALL: dict[str, Any] = {
    "batch_prompts": 4,
    "samples_per_prompt": 2,
    "max_new_tokens": 4,
    "warmstart_steps": 0,
    "eval_prompts": 6,
    "dtype": "float64",
    "compile": "off",
    "steps": 3,
    "device": "cpu",
    "lr": 1e-2,
}
GRPO, PPO = grpo, ppo


class Quiet:
    """An observer that keeps what it receives."""

    def __init__(self, folder=None):
        self.notes, self.shown, self.parts, self.steps, self.folder = [], [], [], [], folder
        self.table = []
        self.conversations = []
        self.explained = []

    def note(self, text):
        self.notes.append(text)

    def samples(self, step, samples):
        prompts, texts, scores, parts, conversations, _ = map(list, zip(*samples, strict=True))
        self.shown.append((step, prompts, texts, scores))
        self.parts.append(parts)
        self.conversations.append(conversations)

    def evaluated(self, rows):
        self.table += rows

    def groups(self, step, groups):
        self.explained.append((step, groups))

    def step(self, step, metrics, seconds):
        self.steps.append((step, metrics))

    def resumed(self, step, metrics=None):
        self.steps = [pair for pair in self.steps if pair[0] <= step]

    def began(self, step, inputs):
        self.inputs = inputs

    def checkpoint_folder(self):
        return self.folder

    def finish(self, placed, params, error):
        self.params, self.error = params, error


def remove_later_checkpoints(folder, step):
    """Take away the checkpoints after a step: the run is as one that was killed before it wrote them."""
    for number, path in complete_checkpoints(folder).items():
        if number > step:
            shutil.rmtree(path)


def digits_reward(prompt, completion, **fields):
    """A reward that differs between the completions of an untrained model: how far down the digits."""
    return sum(map(completion.count, "12345")) / 4 - 0.25 * completion.count("+")


def small_job(compose=PPO, sizes=SIZES, reward=digits_reward, **settings):
    """A checked job of tiny sizes. Fields of `Settings` may be given by name; `reward` may be a function."""
    if isinstance(reward, str):
        settings, reward = settings | {"reward": reward}, None
    job = prepare(settings_of(**SMALL | settings), compose)
    if sizes:
        job = resized(job, sizes)
    return job if reward is None else dataclasses.replace(job, task=job.task._replace(rewards=(reward,)))


def resized(job, sizes):
    """The job with models of other sizes, but for those from directories."""
    model = decoder_model(with_fields(job.model.config, **sizes))
    layouts(model.shapes, model.axes, STORED, job.sizes)
    valued = with_value_head(model)
    own = {name: valued if item.unembed is None else model for name, item in job.models.items()}
    adapted = {name: element for name, element in job.models.items() if element.adapters is not None}
    own |= {name: with_lora(own[name], entry.adapters.lora) for name, entry in adapted.items()}
    if job.settings.adapters.nf4:
        own = {name: with_nf4(item) for name, item in own.items()}
    return dataclasses.replace(job, model=model, models=own | {name: job.models[name] for name in job.directories})


def uneven(job):
    """The job with prompts of 1 to 40 tokens, half of them up to 5, or texts several times as long as others."""
    if isinstance(job, RLJob):
        lengths = [1 + 37 * i % (40 if i % 2 else 5) for i in range(40)]
        prompts = [e._replace(tokens=(e.tokens * 10)[:n]) for e, n in zip(job.task.prompts, lengths, strict=False)]
        return dataclasses.replace(job, task=job.task._replace(prompts=prompts))

    def longer(text, times):
        return Text(text.tokens * times, text.trained * times)

    def repeated(e, i):
        times = [1 + (3 * i + j) % 4 for j in range(len(e.texts))]
        labels = e.labels * times[0] if len(e.labels) > 1 else e.labels  # of steps
        return e._replace(texts=tuple(map(longer, e.texts, times)), labels=labels)

    examples = [repeated(e, i) for i, e in enumerate(job.task.examples[:40])]
    return dataclasses.replace(job, task=job.task._replace(examples=examples))


def begin(job, mesh, show=None):
    """A run and its first state on one rank, with weights in the engine."""
    run, state = startup.begin_run(job, mesh, show or Quiet())
    return run, sync(run.parts, state, frozen=run.frozen)


def scored_batch(run, state):
    """The scored rows of the next step; the state after it; all metrics."""
    batch, state, drawn = phases.draw_batch(run, state)
    batch, state, scored = phases.score_batch(run, state, batch)
    return batch, state, drawn | scored


def one_step(run, state):
    """The state after a step, and its metrics."""
    batch, state, reported = scored_batch(run, state)
    state, learned = phases.learn_batch(run, state, batch)
    return sync(run.parts, state, frozen=run.frozen), reported | learned


class Gradient(NamedTuple):
    """A role's whole gradient and loss on one mini-batch, and the metrics of its loss."""

    tree: Any
    loss: torch.Tensor
    metrics: dict[str, float]


def gradients(run, state, rows, token_budget=None):
    """The gradients of every role that learns, over all rows."""
    results = {}
    for name, role in run.parts.roles.items():
        if role.loss is not None:
            budget = token_budget or run.job.settings.updates.token_budget
            ((dens, _),) = (total[name] for total in denominators({name: role}, rows, [np.arange(len(rows.owner))]))
            read = row_fields_of(role.loss)
            given = {"mask": role.mask, "row_fields": read}
            rows_of_rank = [p.batch for p in own_micro_batches(rows, budget, **given)]
            grads, metrics, loss, *_ = gradient(role, state.roles[name].params, rows_of_rank, dens, run.frozen)
            whole = unshard(grads, role.stored, run.parts.mesh)
            results[name] = Gradient(whole, loss, {k: float(v) for k, v in metrics.items()})
    return results


def whole_batch(rows):
    """The rows of all ranks as one batch, in the order of their numbers; its fields as wide as the longest row."""
    width = -(-int(rows.lengths.max()) // 8) * 8
    fields = as_dict(rows.batch)
    kinds = {name: kind_of(rows.batch, name) for name in fields}
    own_fields = {name: x for name, x in fields.items() if not kinds[name].everywhere}
    own = [
        {name: kinds[name].fit(kinds[name].select(x, torch.tensor([i])), width) for name, x in own_fields.items()}
        for i in range(len(rows.own))
    ]
    parts = gather_objects(dict(zip(rows.own.tolist(), own, strict=True)), rows.mesh)
    known = {number: row for part in parts for number, row in part.items()}
    whole = {n: kinds[n].concatenate([known[i][n] for i in range(len(rows.owner))]) for n in own_fields}
    return Batch(schema_of(rows.batch), **{name: whole.get(name, x) for name, x in fields.items()})


def whole_weights(run, state):
    """The own weights of every role that learns."""
    mesh = run.parts.mesh
    return {n: unshard(r.params, run.parts.roles[n].stored, mesh) for n, r in state.roles.items()}


def steps_program(job, steps, with_gradients=True):
    """A program of one rank: some steps; batches, gradients and metrics of each, and whole weights at the end."""

    return lambda mesh: steps_of(*begin(job, mesh), steps, with_gradients)


def steps_of(run, state, steps, with_gradients=True):
    """What `steps_program` gives, of a run that has begun."""
    batches, grads, metrics = [], [], []
    for _ in range(steps):
        batch, state, reported = scored_batch(run, state)
        batches.append(whole_batch(batch))
        grads.append(gradients(run, state, batch) if with_gradients else {})
        state, learned = phases.learn_batch(run, state, batch)
        state = sync(run.parts, state, frozen=run.frozen)
        metrics.append(reported | learned)
    return {"batches": batches, "grads": grads, "metrics": metrics, "weights": whole_weights(run, state)}


def run_steps(steps=3, with_gradients=False, **settings):
    """`steps_program` on the ranks of the mesh that the settings name.

    A fault of a gradient shows in the norms among the metrics and in the weights that follow; with gradients it shows
    in the leaf that has it.
    """
    job = small_job(**settings)
    return launch(steps_program(job, steps, with_gradients), job.sizes, "cpu")


def gap(a, b):
    """The largest difference between two trees of equal structure, relative to the largest number of a leaf where
    that is above 1."""
    pairs = list(zip(trees.named(a), trees.named(b), strict=True))
    assert [x[0] for x, _ in pairs] == [y[0] for _, y in pairs]
    return max(((x - y).abs().max() / y.abs().max().clamp_min(1)).item() for (_, x), (_, y) in pairs if x.numel())


def relative(a, b):
    """The norm of the difference of two trees over the norm of the second."""
    flat = [torch.cat([x.reshape(-1).double() for x in trees.leaves(t)]) for t in (a, b)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


def assert_same_gradients(first, other, tolerance, metrics=False):
    assert first.keys() == other.keys()
    for name in other:
        assert gap(first[name].tree, other[name].tree) < tolerance, name
        assert abs(first[name].loss - other[name].loss) < tolerance, name
        if metrics:
            assert first[name].metrics == pytest.approx(other[name].metrics, abs=tolerance)


MEASURED = ("/environment_s", "/recomputed_tokens")  # how long, and what was evicted meanwhile


def assert_same(first, other, tolerance):
    """Every step's samples, log-probabilities, advantages, losses and gradients, and the parameters at the end."""
    for a, b in zip(first["batches"], other["batches"], strict=True):
        assert a.names() == b.names()
        for name in a.names():
            pair = [batch.get(name) for batch in (a, b)]
            if name == "digests":  # of weights whose last bits may differ
                pair = [(lines.values[:, :2], lines.offsets) for lines in pair]
            for x, y in zip(*map(trees.leaves, pair), strict=True):
                if x.is_floating_point():
                    assert torch.equal(x.isnan(), y.isnan()) and (x - y).nan_to_num(0).abs().max() < tolerance, name
                else:
                    assert torch.equal(x, y), name
    for a, b in zip(first["grads"], other["grads"], strict=True):
        assert_same_gradients(a, b, tolerance)
    for a, b in zip(first["metrics"], other["metrics"], strict=True):
        assert a.keys() - {"router/peak_rows"} == b.keys() - {"router/peak_rows"}  # where experts are on several ranks
        a = {name: number for name, number in a.items() if name in b and not name.endswith(MEASURED)}
        assert {k: a[k] for k in a} == pytest.approx({k: b[k] for k in a}, rel=tolerance, abs=tolerance)
    assert gap(first["weights"], other["weights"]) < tolerance
