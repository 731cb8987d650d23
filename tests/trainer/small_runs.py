"""A very small job, and what the tests of the trainer run of it."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from funrl import trees
from funrl.experiments import grpo, ppo
from funrl.mesh.launch import launch
from funrl.mesh.reshard import unshard
from funrl.mesh.rules import STORED, layouts
from funrl.models import decoder
from funrl.trainer import ensemble, phases, warmstart
from funrl.trainer.job import prepare
from funrl.trainer.settings import Settings
from funrl.trainer.spmd import Clock
from funrl.trainer.step import gradient, policy_objective, value_objective

SIZES: dict[str, Any] = {"embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 32}
SMALL: dict[str, Any] = {
    "batch_prompts": 4, "samples_per_prompt": 2, "max_new_tokens": 4, "warmstart_steps": 0, "eval_prompts": 6,
    "dtype": "float64", "compile": "off", "steps": 3, "device": "cpu", "lr": 1e-2,
}  # fmt: skip


class Quiet:
    """Where phases and stages show things: kept, not shown."""

    def __init__(self):
        self.notes, self.shown, self.losses = [], [], []

    def note(self, text):
        self.notes.append(text)

    def samples(self, step, examples, texts, scores):
        self.shown.append((step, [e.text for e in examples], list(texts), list(scores)))

    def supervised(self, step, steps, metrics):
        self.losses.append((step, metrics["train/loss"]))


class Gradients(NamedTuple):
    """Whole gradients and losses of one mini-batch."""

    policy: Any
    policy_loss: torch.Tensor
    critic: Any
    critic_loss: torch.Tensor | None
    metrics: dict[str, float]


def digits_reward(prompt, completion, **fields):
    """A reward that differs between the completions of a model that has learnt nothing: how far down the digits."""
    return sum(map(completion.count, "12345")) / 4 - 0.25 * completion.count("+")


def small_job(compose=ppo.algorithm, sizes=SIZES, reward=digits_reward, **settings):
    """A checked job of tiny sizes. Fields of `Settings` may be given by name."""
    job = prepare(Settings(**SMALL | settings), compose)
    config = dataclasses.replace(job.config, **sizes)
    layouts(decoder.shapes(config), decoder.axes(config), STORED, job.sizes)
    rewards = job.task.rewards if reward is None else (reward,)
    return job._replace(config=config, task=job.task._replace(rewards=rewards))


def begin(job, mesh, show=None):
    """Models and first state on one rank; rank dependent only in its shards."""
    show = show or Quiet()
    models = ensemble.build(job, mesh, show.note)
    weights = warmstart.initial_weights(job, mesh, models.policy_layouts, models.layer, show)
    return models, phases.start(job, models, weights)


def scored_batch(job, models, state, step=1):
    """One rollout, scored; the state after it; all metrics."""
    batch, state, collected = phases.collect(job, models, state, step, Clock(), Quiet())
    batch, state, scored = phases.score_batch(job, models, state, batch, Clock())
    return batch, state, collected | scored


def gradients(job, models, state, batch, token_budget=None):
    """Whole gradients of policy and critic over all rows of a batch."""
    budget, mesh = token_budget or job.settings.token_budget, models.mesh
    algorithm, temperature = job.algorithm, job.settings.temperature
    objective = policy_objective(
        job.config, algorithm.policy_loss, mesh, temperature, models.layer, job.dtype, models.policy_layouts
    )
    grads, metrics, loss = gradient(
        objective,
        algorithm.policy_loss,
        state.policy.params,
        batch,
        batch.rollout_logp if batch.old_logp is None else batch.old_logp,
        mesh,
        budget,
        models.policy_layouts,
    )
    policy, critic, critic_loss = unshard(grads, models.policy_layouts, mesh), None, None
    if state.critic is not None:
        objective = value_objective(
            job.config, algorithm.value_loss, mesh, models.layer, job.dtype, models.critic_layouts
        )
        grads, more, critic_loss = gradient(
            objective,
            algorithm.value_loss,
            state.critic.params,
            batch,
            batch.value,
            mesh,
            budget,
            models.critic_layouts,
        )
        critic, metrics = unshard(grads, models.critic_layouts, mesh), metrics | more
    return Gradients(policy, loss, critic, critic_loss, {k: float(v) for k, v in metrics.items()})


def steps_program(job, steps):
    """A program of one rank: `steps` RL steps; batches, gradients and metrics of each, and whole weights at the end."""

    def program(mesh):
        models, state = begin(job, mesh)
        batches, grads, metrics = [], [], []
        for step in range(1, steps + 1):
            batch, state, said = scored_batch(job, models, state, step)
            batches.append(batch)
            grads.append(gradients(job, models, state, batch))
            state, learned = phases.learn(job, models, state, batch, step, Clock())
            phases.sync(job, models, state, Clock())
            metrics.append(said | learned)
        policy = unshard(state.policy.params, models.policy_layouts, mesh)
        critic = None if state.critic is None else unshard(state.critic.params, models.critic_layouts, mesh)
        return {"batches": batches, "grads": grads, "metrics": metrics, "policy": policy, "critic": critic}

    return program


def run_steps(steps=3, **settings):
    """`steps_program` on the ranks of the mesh that the settings name."""
    job = small_job(**settings)
    return launch(steps_program(job, steps), job.sizes, "cpu")


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


def assert_same(one, other, tolerance):
    """Every step's samples, log-probabilities, advantages, losses and gradients, and the parameters at the end."""
    for a, b in zip(one["batches"], other["batches"], strict=True):
        for name in ("tokens", "mask", "length", "group", "truncated"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        for name in ("rollout_logp", "old_logp", "ref_logp", "value", "advantage", "returns", "score"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None)
            assert x is None or (x - y).abs().max() < tolerance, name
    for a, b in zip(one["grads"], other["grads"], strict=True):
        assert gap(a.policy, b.policy) < tolerance
        assert abs(a.policy_loss - b.policy_loss) < tolerance
        if b.critic is not None:
            assert gap(a.critic, b.critic) < tolerance
            assert abs(a.critic_loss - b.critic_loss) < tolerance
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        assert a.keys() == b.keys()
        assert {k: a[k] for k in a} == pytest.approx({k: b[k] for k in a}, rel=tolerance, abs=tolerance)
    assert gap(one["policy"], other["policy"]) < tolerance
    if other["critic"] is not None:
        assert gap(one["critic"], other["critic"]) < tolerance


GRPO, PPO = grpo.algorithm, ppo.algorithm
