"""The boxes of the loop, each a function of the state and the batch; `loop.py` joins them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Fraction, Loss, Signal, needs_of
from funrl.batch import Batch, select
from funrl.data.prompts import prompt_batch
from funrl.mesh.reshard import reshard
from funrl.models import value
from funrl.models.config import Config
from funrl.models.scores import Rows, likely_tokens, token_scores
from funrl.optim import Transformation, global_norm
from funrl.rewards.load import score as call_reward
from funrl.rollout.completions import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.ensemble import OF_OLD_POLICY, Models, State, first_state, first_weights
from funrl.trainer.job import Job
from funrl.trainer.rollout import Example, Rollout, completion_texts, rollout, to_batch
from funrl.trainer.spmd import Clock
from funrl.trainer.step import (
    Learner,
    Objective,
    check_finite,
    engine_gap,
    gathered,
    gradient,
    policy_objective,
    score,
    update,
    value_objective,
)

EVAL_SEED = 1 << 40  # of evaluations; no training step has it


class Samples(Protocol):
    """Where a phase shows completions and remarks."""

    def samples(
        self, step: int, examples: Sequence[Example], texts: Sequence[str], scores: Sequence[float]
    ) -> None: ...

    def note(self, text: str) -> None: ...


def start(job: Job, models: Models, weights: trees.Tree) -> State:
    """The state before the first step; the engine has the weights.

    Args:
      weights: the policy's, which the state takes over.
    """
    state = first_state(job, models, first_weights(job, models, weights))
    sync(job, models, state, Clock())
    return state


def sync(job: Job, models: Models, state: State, clock: Clock) -> None:
    """Gives the engine the policy's weights in the layout to generate in."""

    def weights() -> Iterator[tuple[str, Tensor]]:  # made when they are asked for: the engine's old ones are gone then
        yield from trees.named(reshard(state.policy.params, models.to_generate, models.mesh))

    with clock.phase("reshard"):
        models.engine.load(weights())


def evaluate(job: Job, models: Models, step: int, clock: Clock, show: Samples) -> dict[str, float]:
    """Mean reward and share of full rewards on held-out prompts."""
    examples = job.task.heldout[: job.settings.eval_prompts]
    with clock.phase("eval"):
        done = _roll(job, models, examples, job.eval_sampling, EVAL_SEED)
    _show(job, examples[:8], done, 1, step, show)
    full = sum(max(weight, 0.0) for weight in job.task.weights) - 1e-9
    return {"eval/reward": done.score.mean().item(), "eval/accuracy": (done.score >= full).double().mean().item()}


def collect(
    job: Job, models: Models, state: State, step: int, clock: Clock, show: Samples
) -> tuple[Batch, State, dict[str, float]]:
    """A batch of rewarded completions. Prompts of which the filter keeps no row are replaced, within bounds.

    What is sampled and not used is counted: prompts that the filter dropped, prompts that it kept and the batch had no
    room for, and rows that it dropped of the prompts that are used.
    """
    settings, keep = job.settings, job.algorithm.keep
    examples: list[Example] = []
    parts: list[Rollout] = []
    kept: list[Tensor] = []
    position, sampled, passed = state.position, 0, 0
    for refill in range(settings.max_refills if keep is not None else 1):
        drawn = prompt_batch(job.task.prompts, settings.batch_prompts, settings.seed, position)
        with clock.phase("generate"):
            done = _roll(job, models, drawn, job.sampling, derived_seed(settings.seed, position))
        position, sampled = position + len(drawn), sampled + len(drawn)
        if refill == 0 and (step == 1 or step % settings.sample_every == 0 or step == settings.steps):
            _show(job, drawn[:8], done, job.sampling.samples, step, show)
        kept_PS = _kept(job, drawn, done)
        found = kept_PS.any(1).nonzero().squeeze(1).tolist()
        wanted, passed = found[: settings.batch_prompts - len(examples)], passed + len(found)
        examples += [drawn[i] for i in wanted]
        kept.append(kept_PS[wanted].flatten())
        parts.append(_prompts_of(done, wanted, job.sampling.samples))
        if len(examples) == settings.batch_prompts:
            break
    metrics = {
        "filter_groups/kept_share": passed / sampled,
        "filter_groups/sampled_prompts": sampled,
        "filter_groups/dropped_prompts": sampled - passed,
        "filter_groups/surplus_prompts": passed - len(examples),
        "filter_groups/dropped_rows": sum(int((~rows).sum()) for rows in kept),
    }
    if 0 < len(examples) < settings.batch_prompts and keep is not None:
        show.note(
            f"step {step}: the filter kept {passed} of {sampled} prompts; the batch has {len(examples)} and not "
            f"{settings.batch_prompts}; a --max_refills above {settings.max_refills} may fill it"
        )
    if not examples:
        show.note(f"step {step}: the filter dropped all of {sampled} prompts; the last batch is used as it is")
        examples, parts = list(drawn), [done]
    whole = trees.map(lambda *xs: torch.cat(xs), parts[0], *parts[1:])
    batch = to_batch(examples, whole, job.sampling, job.pad, position)
    if "greedy_score" in needs_of(job.algorithm):
        with clock.phase("generate"):
            greedy = _roll(job, models, examples, dataclasses.replace(job.sampling, greedy=True, samples=1), 0)
        batch = batch._replace(greedy_score=greedy.score.to(batch.score).repeat_interleave(job.sampling.samples))
    if keep is not None and any(map(len, kept)):  # a filter may also drop single rows of a prompt
        batch = select(batch, torch.cat(kept))
    return batch, state._replace(position=position), metrics if keep is not None else {}


def score_batch(
    job: Job, models: Models, state: State, batch: Batch, clock: Clock
) -> tuple[Batch, State, dict[str, float]]:
    """Log-probabilities and values by the trainer, then advantages; and what there is to say of the batch."""
    settings, needed = job.settings, needs_of(job.algorithm)

    def judge(
        phase: str, params: trees.Tree, lies: trees.Tree, fields: dict[str, str], config: Config = job.config
    ) -> Batch:
        """The batch with what a model says of its tokens: fields are {what `token_scores` calls it: field}."""

        def forward(params: trees.Tree, rows: Batch) -> list[Tensor]:
            weights = gathered(params, lies, models.mesh, job.dtype)
            scores = token_scores(
                config, weights, rows.tokens, rows.positions, rows.segments, models.mesh,
                settings.temperature, tuple(fields), rows.mask, models.layer,
            )  # fmt: skip
            return [getattr(scores, name) for name in fields]

        with clock.phase(phase):
            found = score(forward, params, batch, models.mesh, settings.token_budget)
        return batch._replace(**dict(zip(fields.values(), found, strict=True)))

    asked = {want: field for want, field in OF_OLD_POLICY.items() if field in needed}
    if models.score_old:
        batch = judge("old_logp", state.policy.params, models.policy_layouts, {"logp": "old_logp"} | asked)
    if state.reference is not None:
        batch = judge("ref", state.reference, models.reference_layouts, {"logp": "ref_logp"})
    if job.teacher is not None and "teacher_logp" in needed:
        batch = judge("teacher", state.teacher, models.teacher_layouts, {"logp": "teacher_logp"}, job.teacher)
    if job.teacher is not None and "teacher_top_logp" in needed:
        with clock.phase("teacher"):
            likely = functools.partial(_likely, job, models, job.teacher)
            top, top_logp = score(likely, state.teacher, batch, models.mesh, settings.token_budget)
        batch = batch._replace(teacher_top=top, teacher_top_logp=top_logp)
    if state.reward_model is not None:
        batch = judge("reward_model", state.reward_model.params, models.reward_layouts, {"logp": "reward_logp"})
    if state.critic is not None:
        with clock.phase("value"):
            (values,) = score(
                lambda p, r: [_values(job, models, p, r)],
                state.critic.params,
                batch,
                models.mesh,
                settings.token_budget,
            )
            batch = batch._replace(value=values)
    with clock.phase("advantage"):
        here = _on_cpu(batch)
        assert here.score is not None
        signal = Signal(here.score, here.mask)
        signal, advantage_state = job.algorithm.advantage.update(signal, state.advantage, here)
        metrics = _describe(here, signal) | {k: f.value.item() for k, f in signal.metrics.items()}
        signal = trees.map(lambda x: x.to(batch.tokens.device), signal)
    made = {"advantage": signal.x, "mask": signal.mask, "returns": signal.returns, "weight": signal.weight}
    if state.reward_model is not None:
        made["sampled"] = batch.mask
    batch = batch._replace(**made, **signal.extra)
    if signal.rows is not None:
        batch = select(batch, signal.rows)
    return batch, state._replace(advantage=advantage_state), metrics


def learn(
    job: Job, models: Models, state: State, batch: Batch, step: int, clock: Clock
) -> tuple[State, dict[str, float]]:
    """Several passes over the batch in mini-batches, the policy last; the same rows in each whatever the mesh."""
    settings, parts = job.settings, _parts(job, models, step)
    learners: dict[str, Learner] = {part.field: getattr(state, part.field) for part in parts}
    totals: dict[str, list[float]] = {}
    for epoch in range(settings.epochs):
        for rows in _mini_batches(job, batch, step, epoch):
            for part in parts:
                with clock.phase(part.phase):
                    learner, old = learners[part.field], getattr(rows, part.old)
                    own = rows._replace(mask=getattr(rows, part.mask))
                    old = rows.rollout_logp if old is None else old
                    assert old is not None
                    grads, metrics, loss = gradient(
                        part.objective, part.loss, learner.params, own, old, models.mesh, settings.token_budget,
                        part.layouts,
                    )  # fmt: skip
                    norm = global_norm(grads, part.layouts, models.mesh)
                    check_finite(loss, norm, f"step {step}, {part.phase}")
                    if own.mask.any():  # where every token was rejected, not even the optimizer's momentum moves
                        learners[part.field] = update(part.optimizer, learner, grads)
                for key, x in (metrics | {part.name: loss, f"{part.name.split('/')[0]}/grad_norm": norm}).items():
                    totals.setdefault(key, []).append(float(x))
    return state._replace(**learners), {k: sum(v) / len(v) for k, v in totals.items()}


class Part(NamedTuple):
    """One model's share of an update: which field of the state it is, and how it learns."""

    field: str
    phase: str
    name: str  # of the loss among the metrics
    old: str  # field of the batch that may stand for what the model says
    loss: Loss
    objective: Objective
    optimizer: Transformation
    layouts: trees.Tree
    mask: str = "mask"  # field of the batch that says which tokens it learns from


def _parts(job: Job, models: Models, step: int) -> list[Part]:
    """What learns in this step, in order."""
    algorithm, mesh = job.algorithm, models.mesh

    def of_logp(loss: Loss, lies: trees.Tree, watch_entropy: bool = False) -> Objective:
        return policy_objective(
            job.config, loss, mesh, job.settings.temperature, models.layer, job.dtype, lies, watch_entropy
        )

    parts = []
    if (loss := algorithm.value_loss) is not None:
        objective = value_objective(job.config, loss, mesh, models.layer, job.dtype, models.critic_layouts)
        names = ("critic", "update_critic", "critic/vf_loss", "value")
        parts.append(Part(*names, loss, objective, models.critic_optimizer, models.critic_layouts))
    if (loss := algorithm.reward_loss) is not None:
        names = ("reward_model", "update_reward", "reward_model/loss", "reward_logp")
        objective = of_logp(loss, models.reward_layouts)
        parts.append(Part(*names, loss, objective, models.reward_optimizer, models.reward_layouts, "sampled"))
    if step > job.settings.critic_warmup_steps:
        names, loss = ("policy", "update_actor", "actor/pg_loss", "old_logp"), algorithm.policy_loss
        objective = of_logp(loss, models.policy_layouts, True)
        parts.append(Part(*names, loss, objective, models.policy_optimizer, models.policy_layouts))
    return parts


def _roll(job: Job, models: Models, examples: Sequence[Example], sampling: Sampling, seed: int) -> Rollout:
    def rewards(rows: Sequence[Example], texts: Sequence[str]) -> list[list[float]]:
        prompts, fields = [r.text for r in rows], [r.fields for r in rows]
        columns = [call_reward(reward, prompts, texts, fields) for reward in job.task.rewards]
        return [list(row) for row in zip(*columns, strict=True)]

    return rollout(
        models.engine, examples, sampling, seed, rewards, decoder_of(job.tokenizer), models.generate_mesh,
        job.task.weights,
    )  # fmt: skip


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def _likely(job: Job, models: Models, config: Config, params: trees.Tree, batch: Batch) -> tuple[Tensor, Tensor]:
    """The teacher's likeliest tokens and their log-probabilities."""
    weights = gathered(params, models.teacher_layouts, models.mesh, job.dtype)
    rows = Rows(batch.tokens, batch.positions, batch.segments, batch.mask)
    k = min(job.settings.teacher_top_k, config.vocab)
    return likely_tokens(config, weights, rows, k, models.mesh, job.settings.temperature, models.layer)


def _values(job: Job, models: Models, params: trees.Tree, rows: Batch) -> Tensor:
    weights = gathered(params, models.critic_layouts, models.mesh, job.dtype)
    return value.apply(job.config, weights, rows.tokens, rows.positions, rows.segments, models.mesh, models.layer)


def _kept(job: Job, examples: Sequence[Example], done: Rollout) -> Tensor:
    """[prompts, samples] bool, the rows that the algorithm's filter keeps."""
    if job.algorithm.keep is None:
        return torch.ones(len(examples), job.sampling.samples, dtype=torch.bool, device=done.score.device)
    kept = job.algorithm.keep(_on_cpu(to_batch(examples, done, job.sampling, job.pad, 0)))
    return kept.view(len(examples), -1).to(done.score.device)


def _on_cpu(batch: Batch) -> Batch:
    """The batch where every sum has one order. A GPU may add the rows of a group in another order on every rank, and
    ranks that differ in a last bit may keep other rows."""
    return trees.map(lambda x: x.cpu(), batch)


def _prompts_of(done: Rollout, prompts: list[int], samples: int) -> Rollout:
    at = torch.tensor(prompts, dtype=torch.int64, device=done.score.device)
    rows = (at[:, None] * samples + torch.arange(samples, device=at.device)).flatten()
    return trees.map(lambda x: x[rows], done)


def _mini_batches(job: Job, batch: Batch, step: int, epoch: int) -> list[Batch]:
    """All rows in a random order, in as many parts as there are updates in the schedule, and about as large."""
    seed = derived_seed(job.settings.seed, step, epoch)
    order = torch.randperm(len(batch.tokens), generator=torch.Generator().manual_seed(seed)).to(batch.tokens.device)
    parts = order.tensor_split(job.settings.minibatches)
    return [select(batch, rows) for rows in parts if len(rows)]  # a filter may leave fewer rows than parts


def _describe(batch: Batch, signal: Signal) -> dict[str, float]:
    """Metrics of a scored batch; what no token has is left out."""
    mask, score_B = batch.mask, batch.score
    assert batch.rollout_logp is not None and batch.length is not None
    assert score_B is not None and batch.truncated is not None
    response = mask.sum(1).double()
    advantages = signal.x[signal.mask]
    out = {
        "reward/mean": score_B.mean(), "reward/max": score_B.max(), "reward/min": score_B.min(),
        "response_length/mean": response.mean(), "response_length/max": response.max(),
        "response_length/min": response.min(), "response_length/clip_ratio": batch.truncated.double().mean(),
        "rollout/logp_mean": batch.rollout_logp[mask].mean(),
        "perf/total_num_tokens": batch.length.sum(),
    }  # fmt: skip
    if len(advantages):
        out |= {"critic/advantages/mean": advantages.mean(), "critic/advantages/max": advantages.max()}
        out |= {"critic/advantages/min": advantages.min()}
    if batch.old_logp is not None:
        out |= {k: x.value if isinstance(x, Fraction) else x for k, x in engine_gap(batch).items()}
    if batch.scores is not None and batch.scores.shape[1] > 1:
        out |= {f"reward/{i}/mean": mean for i, mean in enumerate(batch.scores.mean(0), 1)}
    if batch.value is not None and signal.returns is not None and len(advantages):
        returns, values = signal.returns[signal.mask], batch.value[signal.mask]
        out |= {"critic/values/mean": values.mean(), "critic/returns/mean": returns.mean()}
        if len(returns) > 1:
            unexplained = (returns - values).var() / returns.var().clamp_min(1e-12)
            out |= {"critic/vf_explained_var": 1 - unexplained}
    return {k: float(v) for k, v in out.items()}


def _show(job: Job, examples: Sequence[Example], done: Rollout, samples: int, step: int, show: Samples) -> None:
    """The first sample of each of the first prompts."""
    first = trees.map(lambda x: x[: len(examples) * samples : samples], done)
    texts = completion_texts(first.completions, decoder_of(job.tokenizer), [e.tokens[-1] for e in examples])
    show.samples(step, examples, texts, first.score.tolist())
