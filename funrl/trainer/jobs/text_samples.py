"""Samples of a model that learns from given texts: its greedy continuations of held-out prompts.

An engine writes them. It exists only while it writes: its weights are gone before the next update. Where the weights in
the layout to generate in would take more than a quarter of a rank's memory, or the model has no cache of pages, the
trainer's forward pass writes them with the weights where they are, at the cost of a pass a token.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.batch import TOKEN_INT, Batch
from funrl.data.pictures import picture_form_of
from funrl.data.prompts import Example
from funrl.data.supervised import TextExample
from funrl.mesh import collectives
from funrl.mesh.launch import view
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import GENERATE, layouts
from funrl.models import Placed
from funrl.rewards.pool import Pool
from funrl.rollout.engine import onload_engine
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.generator import policy_generator
from funrl.trainer.jobs.job import TextJob
from funrl.trainer.jobs.sharding import rank_memory
from funrl.trainer.sources.generation import RewardedEngine, first_texts, rollout
from funrl.trainer.sources.observing import Show, ShownSample
from funrl.trainer.sources.own_texts import text_after
from funrl.trainer.steps.parts import Parts, with_generator
from funrl.trainer.steps.roles import RoleState
from funrl.trainer.steps.state import State
from funrl.trainer.steps.sync import sync

ENGINE_SHARE = 0.25  # of a rank's memory that the engine's copy of the weights may take
ShowSamples = Callable[[Mapping[str, RoleState], int], None]
CONTINUED = 8  # prompts that are continued
TOKENS = 64  # of a continuation
LONGEST_PROMPT = 1024  # tokens; those of longer ones are left out


def held_out_prompts(examples: Sequence[TextExample], tokenizer: Any, most: int) -> list[Example]:
    """The beginnings of the first held-out texts, up to what is trained.

    Args:
      most: tokens of a prompt.
    """
    prompts = []
    for example in (examples[i] for i in range(min(len(examples), CONTINUED))):
        tokens, trained = example.texts[0]
        prompt = tokens[: trained.index(True)] if True in trained else []
        if 0 < len(prompt) <= min(most, LONGEST_PROMPT) and _has_all_pictures(prompt, tokens, tokenizer):
            text = tokenizer.decode(prompt, skip_special_tokens=True)
            prompts.append(Example(prompt, text, {}, example.source, owned=next(iter(example.owned), None)))
    return prompts


def _has_all_pictures(prompt: Sequence[int], tokens: Sequence[int], tokenizer: Any) -> bool:
    """True if a text has no picture after its prompt."""
    form = picture_form_of(tokenizer)
    return form is None or prompt.count(form.tower.placeholder) == tokens.count(form.tower.placeholder)


class TextSampler(NamedTuple):
    """Everything that continuations of held-out prompts need beside the weights.

    Attributes:
      frozen: weights of the roles that do not learn.
      decode: token ids -> text.
    """

    job: TextJob
    parts: Parts
    frozen: Mapping[str, trees.Tree]
    prompts: Sequence[Example]
    sampling: Sampling
    decode: Callable[[list[int]], str]


def text_samples(job: TextJob, parts: Parts, frozen: Mapping[str, trees.Tree], show: Show) -> ShowSamples:
    """Make a function that shows how the policy continues held-out prompts.

    It does so at the first and the last evaluation, and at evaluations of steps that --sample_every divides. It does
    nothing where no policy learns.
    """
    settings = job.settings
    task = job.task
    count = TOKENS if task.readable is None else embedded_task(settings.examples.task).max_new_tokens
    prompts = held_out_prompts(task.heldout, job.tokenizer, job.model.config.max_positions - count)
    if not job.kind_of_role(job.main_role).generates or not prompts:
        return lambda states, step: None
    sampling = Sampling(greedy=True, max_new_tokens=count, stop=job.stop)
    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    sampler = TextSampler(job, parts, frozen, prompts, sampling, decode)
    by_engine = job.model.pages and engine_fits(job, view(parts.mesh, job.generate_sizes))
    if job.model.owned is not None and not by_engine:  # the trainer's forward passes here have no pictures
        return lambda states, step: None
    texts_of = engine_texts if by_engine else forward_texts

    def sample(states: Mapping[str, RoleState], step: int) -> None:
        if step % settings.outputs.sample_every and step != settings.run.steps:
            return
        texts = texts_of(sampler, states[job.main_role])
        show.samples(step, [ShownSample(e.text, text, example=e) for e, text in zip(prompts, texts, strict=True)])

    return sample


def engine_fits(job: TextJob, mesh: Mesh) -> bool:
    """True if a rank can hold its weights a second time, in the layout to generate in.

    Args:
      mesh: to generate on.
    """
    placed = layouts(job.model.shapes, job.model.axes, GENERATE, mesh.sizes)
    numbers = sum(math.prod(layout.local_shape(mesh.rank)) for layout in trees.leaves(placed))
    return numbers * job.dtype.itemsize <= ENGINE_SHARE * rank_memory(job.device, mesh.world)


def engine_texts(sampler: TextSampler, policy: RoleState) -> list[str]:
    """Continuations by an engine that is made for them. Every rank calls it and gets the same texts."""
    job = sampler.job
    parts = sampler.parts
    prompts = sampler.prompts
    placed = parts.roles[job.main_role].placed
    generator = policy_generator(job, parts.begin, placed, parts.begin.model.layer, logging.getLogger(__name__).info)
    sync(with_generator(parts, generator), State({job.main_role: policy}), frozen=sampler.frozen)
    engine = RewardedEngine(generator.engine, generator.mesh, sampler.decode, Pool(()), weights=())
    with onload_engine(generator.engine):
        done = rollout(engine, prompts, sampler.sampling, 0)
    return first_texts(done, range(len(prompts)), sampler.decode, [prompt.tokens[-1] for prompt in prompts])


def forward_texts(sampler: TextSampler, policy: RoleState) -> list[str]:
    """The same continuations by forward passes of the trainer."""
    role = sampler.parts.roles[sampler.job.main_role]
    sampling = sampler.sampling
    decode = sampler.decode
    ids = [prompt.tokens for prompt in sampler.prompts]
    params = role.whole(policy.params, sampler.frozen)
    rows = greedy_continuations(role.placed, params, ids, sampling.max_new_tokens, sampling.stop, sampler.job.pad)
    return [text_after(decode([prompt[-1]]), prompt[-1], row, decode) for prompt, row in zip(ids, rows, strict=True)]


@torch.no_grad()
def greedy_continuations(
    placed: Placed, params: trees.Tree, prompts: Sequence[Sequence[int]], count: int, stop: Collection[int], pad: int
) -> list[list[int]]:
    """The most probable token after each prompt, and so on. Every rank calls it and gets the same rows.

    Args:
      prompts: token ids, at least one each.
      count: tokens at most.
      stop: tokens that end a row; they are left out.
      pad: id of the padding token.
    """
    device = placed.mesh.device
    everyone = tuple(placed.mesh.sizes)
    placed = dataclasses.replace(placed, layer=placed.model.layer)  # rows of this form are not worth a compilation
    length_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    multiple = math.lcm(8, placed.multiple)
    width = -(-(int(length_B.max()) + count) // multiple) * multiple
    tokens_BT = torch.full((len(prompts), width), pad, dtype=TOKEN_INT, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = torch.tensor(prompt, dtype=TOKEN_INT)
    rows_B = torch.arange(len(prompts), device=device)
    at_B = length_B.clone()
    ended_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    stops = torch.tensor(sorted(stop), dtype=TOKEN_INT, device=device)
    for _ in range(count):
        mask_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        mask_BT[rows_B, at_B] = True
        best_1N, _ = placed.topk(params, _end_to_end(tokens_BT, mask_BT), 1)
        next_B = best_1N.view(tokens_BT.shape)[rows_B, at_B].to(TOKEN_INT)
        tokens_BT[rows_B, at_B] = next_B
        ended_B |= torch.isin(next_B, stops)
        at_B = at_B + 1
        if not collectives.pmax((~ended_B).any().double(), placed.mesh, everyone).item():
            break
    continuations = []
    for row, (begin, end) in enumerate(zip(length_B.tolist(), at_B.tolist(), strict=True)):
        written = tokens_BT[row, begin:end].tolist()
        first = next((i for i, token in enumerate(written) if token in stop), len(written))
        continuations.append(written[:first])
    return continuations


def _end_to_end(tokens_BT: Tensor, mask_BT: Tensor) -> Batch:
    """Rows as sequences of one packed row [1, B T], each with its padding behind it, which it does not see."""
    (B, T) = tokens_BT.shape
    device = tokens_BT.device
    positions_BT = torch.arange(T, device=device).expand(B, T)
    segments_BT = torch.arange(1, B + 1, device=device)[:, None].expand(B, T)
    fields = {"tokens": tokens_BT, "mask": mask_BT, "positions": positions_BT, "segments": segments_BT}
    offsets = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)
    return Batch(**{name: x.reshape(1, B * T) for name, x in fields.items()}, offsets=offsets)
