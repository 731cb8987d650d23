"""The models of a run as one rank sees them: what is made once, and the state that goes from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funrl import trees
from funrl.algos.core import needs_of
from funrl.mesh.launch import ranks_per_node, view
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan, plan
from funrl.mesh.reshard import copied
from funrl.mesh.rules import GENERATE, layouts
from funrl.models import decoder, hf, value
from funrl.models.compile import compile_layer
from funrl.models.remat import rematerialized
from funrl.optim import Transformation
from funrl.rollout.completions import Engine
from funrl.rollout.native import native_engine
from funrl.trainer.job import Job
from funrl.trainer.optimizer import make_optimizer
from funrl.trainer.sharding import models_of, train_rules
from funrl.trainer.step import Learner

OF_OLD_POLICY = {"entropy": "old_entropy", "sum_pi_squared": "sum_pi_squared"}  # of `token_scores`: field of the batch


class Models(NamedTuple):
    """What is made once: meshes, layouts, functions and the engine, as this rank sees them."""

    mesh: Mesh
    generate_mesh: Mesh
    policy_layouts: trees.Tree
    critic_layouts: trees.Tree
    reference_layouts: trees.Tree
    reward_layouts: trees.Tree
    teacher_layouts: trees.Tree
    to_generate: Plan
    engine: Engine
    policy_optimizer: Transformation
    critic_optimizer: Transformation
    reward_optimizer: Transformation
    layer: Callable | None
    score_old: bool  # old log-probabilities take a pass of their own


class Weights(NamedTuple):
    """What this rank holds of each of `sharding.MODELS`; None where the run has no such model."""

    policy: trees.Tree
    critic: trees.Tree = None
    reference: trees.Tree = None
    reward_model: trees.Tree = None
    teacher: trees.Tree = None


class State(NamedTuple):
    """What changes from step to step; and the reference and the teacher, which never do."""

    policy: Learner
    critic: Learner | None
    reference: trees.Tree
    advantage: Any
    position: int  # prompts taken so far
    reward_model: Learner | None = None  # an implicit process reward model, of the policy's shapes
    teacher: trees.Tree = None


def build(job: Job, mesh: Mesh, note: Callable[[str], None]) -> Models:
    """Meshes, layouts and functions. Called by every rank."""
    generate_mesh = view(mesh, job.generate_sizes)
    shapes, axes = decoder.shapes(job.config), decoder.axes(job.config)
    generate_layouts = layouts(shapes, axes, GENERATE, job.generate_sizes)

    def lies(model: str, shapes: trees.Tree = shapes, axes: trees.Tree = axes) -> trees.Tree:
        return layouts(shapes, axes, train_rules(job.settings, model), job.sizes)

    policy_layouts, reward_layouts = lies("policy"), lies("implicit_reward")
    critic_layouts = lies("critic", value.shapes(job.config), value.axes(job.config))
    teacher_layouts = None
    if job.teacher is not None:
        teacher_layouts = lies("teacher", decoder.shapes(job.teacher), decoder.axes(job.teacher))
    updates = job.settings.steps * job.settings.epochs * job.settings.minibatches
    idle = job.settings.critic_warmup_steps * job.settings.epochs * job.settings.minibatches
    compiles = "off" if job.settings.remat == "selective" else job.settings.compile
    layer = compile_layer(job.config, compiles, mesh.device.type, note)
    return Models(
        mesh=mesh,
        generate_mesh=generate_mesh,
        policy_layouts=policy_layouts,
        critic_layouts=critic_layouts,
        reference_layouts=lies("reference"),
        reward_layouts=reward_layouts,
        teacher_layouts=teacher_layouts,
        to_generate=plan(policy_layouts, generate_layouts, job.dtype, ranks_per_node()),
        engine=native_engine(job.config, generate_mesh, job.dtype, layer=layer),
        policy_optimizer=make_optimizer(job.settings, job.lr, updates - idle, policy_layouts, mesh),
        critic_optimizer=make_optimizer(job.settings, job.critic_lr, updates, critic_layouts, mesh),
        reward_optimizer=make_optimizer(job.settings, job.reward_lr, updates, reward_layouts, mesh),
        layer=rematerialized(layer, job.settings.remat),
        score_old=needs_old_scores(job),
    )


def first_weights(job: Job, models: Models, policy: trees.Tree) -> Weights:
    """All models, each in its own layouts. Those that begin as the policy are copies, for it is updated in place."""
    has = models_of(job.algorithm, job.settings)

    def copy(lies: trees.Tree, dtype: torch.dtype = job.master) -> trees.Tree:
        parts, src = ({name: tree[name] for name in lies} for tree in (policy, models.policy_layouts))
        return copied(parts, src, lies, models.mesh, dtype)

    return Weights(
        policy=policy,
        critic=value.init(job.config, copy(models.critic_layouts["decoder"])) if "critic" in has else None,
        reference=copy(models.reference_layouts, job.dtype) if "reference" in has else None,
        reward_model=copy(models.reward_layouts) if "implicit_reward" in has else None,
        teacher=hf.load(str(job.settings.teacher), job.dtype, models.mesh, models.teacher_layouts)[1]
        if "teacher" in has
        else None,
    )


def first_state(job: Job, models: Models, weights: Weights) -> State:
    """The state before the first step, of weights that it takes over."""

    def learner(params: trees.Tree, optimizer: Transformation) -> Any:
        return None if params is None else Learner(params, optimizer.init(params))

    return State(
        policy=learner(weights.policy, models.policy_optimizer),
        critic=learner(weights.critic, models.critic_optimizer),
        reference=weights.reference,
        advantage=job.algorithm.advantage.init(),
        position=0,
        reward_model=learner(weights.reward_model, models.reward_optimizer),
        teacher=weights.teacher,
    )


def needs_old_scores(job: Job) -> bool:
    """Whether the old log-probabilities take a pass of their own. Where each batch has a single update, they are those
    of its forward pass, unless something before or beside the policy's loss reads them."""
    algorithm, settings = job.algorithm, job.settings
    before = needs_of(algorithm.advantage, algorithm.value_loss, algorithm.reward_loss, algorithm.keep)
    single = settings.epochs * settings.minibatches == 1 and settings.critic_warmup_steps == 0
    asked = {"old_logp"} & before or set(OF_OLD_POLICY.values()) & needs_of(algorithm)
    return bool(asked) or not single or algorithm.reward_loss is not None
