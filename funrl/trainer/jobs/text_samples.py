"""Samples of a model that learns from given texts: its greedy continuations of held-out prompts.

An engine writes them. It exists only while it writes: its weights are gone before the next update. There are none where
the weights in the layout to generate in would take more than a quarter of a rank's memory.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funrl import trees
from funrl.data.pictures import picture_form_of
from funrl.data.prompts import Example
from funrl.data.supervised import TextExample
from funrl.mesh.launch import view
from funrl.mesh.rules import GENERATE, layouts
from funrl.rewards.pool import Pool
from funrl.rollout.engine import onload_engine
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.engines import engine_base, policy_generator
from funrl.trainer.jobs.job import TextJob
from funrl.trainer.jobs.sharding import rank_memory
from funrl.trainer.sources.generation import RewardedEngine, first_texts, rollout
from funrl.trainer.sources.observing import Show, ShownSample
from funrl.trainer.steps.parts import Parts, with_generator
from funrl.trainer.steps.roles import RoleState, State
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
    form = picture_form_of(tokenizer)
    for example in (examples[i] for i in range(min(len(examples), CONTINUED))):
        tokens, trained = example.texts[0]
        prompt = tokens[: trained.index(True)] if True in trained else []
        mark = None if form is None else form.tower.placeholder
        later = mark is not None and mark in tokens[len(prompt) :]  # a picture after the prompt
        if 0 < len(prompt) <= min(most, LONGEST_PROMPT) and not later:
            text = tokenizer.decode(prompt, skip_special_tokens=True)
            prompts.append(Example(prompt, text, {}, example.source, owned=next(iter(example.owned), None)))
    return prompts


def text_samples(job: TextJob, parts: Parts, frozen: Mapping[str, trees.Tree], show: Show) -> ShowSamples:
    """Make a function that shows how the policy continues held-out prompts. Every rank calls it.

    It does so at the first and the last evaluation, and at evaluations of steps that --sample_every divides. It does
    nothing where no policy learns, and says so where no engine can be made for it.
    """
    settings = job.settings
    task = job.task
    count = TOKENS if task.readable is None else embedded_task(settings.examples.task).max_new_tokens
    prompts = held_out_prompts(task.heldout, job.tokenizer, job.model.config.max_positions - count)
    if not job.kind_of_role(job.main_role).generates or not prompts:
        return lambda states, step: None
    if not job.model.pages and (not job.model.abilities.code or job.model.owned is not None):
        show.note("no samples: no engine can generate with this model")
        return lambda states, step: None
    mesh = view(parts.mesh, job.generate_sizes)
    own_layouts = layouts(job.model.shapes, job.model.axes, GENERATE, mesh.sizes)
    numbers = sum(math.prod(layout.local_shape(mesh.rank)) for layout in trees.leaves(own_layouts))
    if numbers * job.dtype.itemsize > ENGINE_SHARE * rank_memory(job.device, mesh.world):
        show.note(f"no samples: an engine's weights would take more than {ENGINE_SHARE:.0%} of a rank's memory")
        return lambda states, step: None
    sampling = Sampling(greedy=True, max_new_tokens=count, stop=job.stop)
    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    placed = parts.roles[job.main_role].placed
    log = logging.getLogger(__name__).info

    def sample(states: Mapping[str, RoleState], step: int) -> None:
        if step % settings.outputs.sample_every and step != settings.run.steps:
            return
        base = engine_base(job, parts.begin, parts.roles[job.initial_role].placed, placed)
        generator = policy_generator(job, base, placed, base.model.layer, log)
        sync(with_generator(parts, generator), State({job.main_role: states[job.main_role]}), frozen=frozen)
        engine = RewardedEngine(generator.engine, generator.mesh, decode, Pool(()), weights=())
        with onload_engine(generator.engine):
            done = rollout(engine, prompts, sampling, 0)
        texts = first_texts(done, range(len(prompts)), decode, [prompt.tokens[-1] for prompt in prompts])
        show.samples(step, [ShownSample(e.text, text, example=e) for e, text in zip(prompts, texts, strict=True)])

    return sample
