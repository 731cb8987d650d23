"""Compilation before the first step of every variant of the layers that a run needs.

Each role runs on rows of the form that it scores and learns from, and each engine completes a few prompts. A compiled
layer serves all sizes, so the rows are fewer than those of a step: half of a micro-batch, and then a quarter. Nothing
of it is kept: the state, random numbers and the engine's weights and pages stay what they are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import TOKEN_INT, Batch
from funrl.mesh.mesh import Mesh
from funrl.models.compiling.compile import is_compiled
from funrl.models.compiling.compile_cache import CompileCache
from funrl.models.flat import saved_fields
from funrl.rollout.engine import complete, onload_engine
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.job import Job, RLJob, TextJob
from funrl.trainer.phases import Trainer
from funrl.trainer.settings.settings import TOKEN_MULTIPLE
from funrl.trainer.steps.micro import own_micro_batches, row_cost
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.roles import Role, RoleState, State, weights_of
from funrl.trainer.steps.step import present_scores, weights_to_learn
from funrl.trainer.steps.step_rows import Rows, rows_of

EXAMPLES = 8  # whose length is taken for that of all
ENGINE_PROMPT_TOKENS = 16  # of a prompt that an engine completes
ENGINE_ROWS = 64  # prompts that an engine completes together, at most


def compile_ahead(
    trainer: Trainer, state: State, enter: Callable[[Trainer, State, str], tuple[Trainer, State]]
) -> tuple[Trainer, State, dict[str, float]]:
    """Compile what the steps need, so that they compile nothing; a run without compiled layers does nothing here.

    The code of an equal run is loaded from the user's cache, and new code is kept there.

    Args:
      trainer: of the run, whose layers may be compiled.
      state: before the first of the steps.
      enter: called as `enter(trainer, state, stage)` before a stage; returns both with tensors where the stage
        needs them.

    Returns: trainer and state, with the tensors where an update needs them, and metrics.
    """
    job = trainer.job
    parts = trainer.parts
    compilations = parts.compilations
    if compilations is None or state.step >= job.settings.run.steps:
        return trainer, state, {}
    with trainer.clock.phase("compile"), compilations.ahead():
        trainer, state = enter(trainer, state, "generate")
        compile_generation(job, parts)
        trainer, state = enter(trainer, state, "score")
        compile_scoring(job, parts, state.roles, trainer.frozen_in(state))
        trainer, state = enter(trainer, state, "update")
        compile_updates(job, parts, state.roles, trainer.frozen_in(state))
        if trainer.compile_cache is not None and int(os.environ.get("LOCAL_RANK", parts.mesh.rank)) == 0:
            trainer.compile_cache.save()  # by the first rank of each machine
    return trainer, state, {"compile/variants": float(compilations.variants)}


def loaded_cache(job: Job, mesh: Mesh, note: Callable[[str], None]) -> CompileCache:
    """The file of the compiled code of a run on a mesh, loaded; `note` receives the reason why it cannot be used."""
    settings = job.settings
    facts = {
        "models": {name: saved_fields(model.config) for name, model in job.models.items()},
        "dtype": str(job.dtype),
        "meshes": [job.sizes, job.generate_sizes],
        "remat": settings.devices.remat,
        "sequence_parallel": settings.devices.sequence_parallel,
    }
    cache = CompileCache(facts, mesh.device, note)
    cache.load()
    return cache


def compile_generation(job: Job, parts: Parts) -> None:
    """Compile prefill and decoding of the engines, of the policy and of a judge.

    Each completes several prompts together, and one alone, whose sizes are cases of their own.
    """
    engines = []  # each with the one that has its model: the policy's may be an adapter of that
    if isinstance(parts, GeneratingParts):
        engines.append((parts.generator.engine, parts.generator.whole))
    if parts.judge is not None:
        engines.append((parts.judge.engine, parts.judge.engine))
    for engine, whole in engines:
        if not isinstance(whole, NativeEngine):
            continue
        if not is_compiled(whole.model, job.settings.models.compile, job.device):
            continue
        config = whole.model.config
        length = max(1, min(ENGINE_PROMPT_TOKENS, config.max_positions - 2))
        rows = max(2, min(ENGINE_ROWS, job.settings.engines.decode_rows))
        sampling = Sampling(greedy=True, max_new_tokens=min(2, config.max_positions - length))
        *prompts, alone = ([(row + place) % config.vocab for place in range(length)] for row in range(rows + 1))
        with onload_engine(engine):
            complete(engine, requests_of(prompts, sampling, seed=0))
            complete(engine, requests_of([alone], sampling, seed=0))


def compile_scoring(job: Job, parts: Parts, states: Mapping[str, RoleState], frozen: Mapping[str, trees.Tree]) -> None:
    """Compile the forward passes that learn nothing: of roles that write fields, and of evaluations.

    Args:
      states, frozen: weights of the roles.
    """
    weights = weights_of(parts.roles, states, frozen)
    for name, role in parts.roles.items():
        rewards = job.kind_of_role(name).scores_completions if name in job.models else False
        evaluated = isinstance(job, TextJob) and role.loss is not None
        if not (role.writes or rewards or evaluated or role.router.balance):
            continue
        for batch in _micro_batches(job, role):
            with_grad = rewards and role.loss is None  # as the source asks a reward model
            with role.placed.expert_rows.bounded(), torch.set_grad_enabled(with_grad):
                if role.placed.model.unembed is None:
                    role.placed.values(weights[name], batch)
                else:
                    role.placed.token_scores(weights[name], batch)


def compile_updates(job: Job, parts: Parts, states: Mapping[str, RoleState], frozen: Mapping[str, trees.Tree]) -> None:
    """Compile the forward and backward passes of the roles that learn.

    Args:
      states, frozen: weights of the roles.
    """
    for name, role in parts.roles.items():
        if role.loss is None:
            continue
        for batch in _micro_batches(job, role):
            weights = weights_to_learn(role, states[name].params)
            with role.placed.expert_rows.bounded():
                trees.value_and_grad(_sum_of_scores)(weights, role, batch, frozen)


def _sum_of_scores(
    params: trees.Tree, role: Role, batch: Batch, frozen: Mapping[str, trees.Tree]
) -> tuple[Tensor, tuple[()]]:
    return present_scores(params, role, batch, frozen).x.sum(), ()


def _micro_batches(job: Job, role: Role) -> Iterator[Batch]:
    """This rank's packed rows for a role: a micro-batch of two sizes, each with several rows."""
    budget = job.settings.updates.token_budget
    for share in (2, 4):
        rows = _rows(job, role, budget // share)
        for piece in own_micro_batches(rows, budget, row_cost(role.placed)):
            yield piece.batch


def _rows(job: Job, role: Role, most: int) -> Rows:
    """Rows of equal length on every rank, with no more tokens than those of a step.

    Args:
      most: bound on a rank's tokens, beyond two of the shortest rows.
    """
    mesh = role.placed.mesh
    config = role.placed.model.config
    ranks = mesh.size(mesh.row_axes)
    length, count = _examples(job)
    length = max(2, min(length, config.max_positions, max(most // 2, TOKEN_MULTIPLE)))
    own = max(2, min(-(-count // ranks), most // length))
    tokens_bT = (torch.arange(own * length, device=mesh.device) % config.vocab).view(own, length).to(TOKEN_INT)
    mask_bT = torch.arange(length, device=mesh.device).expand(own, length) > 0
    owner = np.arange(own * ranks) // own
    lengths_B = torch.full((own * ranks,), length, device=mesh.device)
    routes_bTC = None
    routers = role.placed.model.abilities.routers
    if role.placed.replay and routers is not None:
        choices = torch.arange(role.placed.model.abilities.choices, device=mesh.device) % routers.per_token
        routes_bTC = choices.to(TOKEN_INT).expand(own, length, -1)
    return rows_of(Batch(tokens=tokens_bT, mask=mask_bT, length=lengths_B, routes=routes_bTC), owner, mesh)


def _examples(job: Job) -> tuple[int, int]:
    """Mean length of the first examples, each completion being one token, and the number of rows of a step."""
    batch = job.settings.run.batch_prompts
    if isinstance(job, RLJob):
        lengths = [len(example.tokens) + 1 for example in islice(job.task.prompts, EXAMPLES)]
        return math.ceil(sum(lengths) / len(lengths)), batch * job.sampling.samples
    count = min(EXAMPLES, len(job.task.examples))
    lengths = [len(text.tokens) for place in range(count) for text in job.task.examples[place].texts]
    return math.ceil(sum(lengths) / len(lengths)), batch * len(lengths) // count
