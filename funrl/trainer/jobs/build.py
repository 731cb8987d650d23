"""Meshes, roles and engines of a run on one rank, with its first weights and its first state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import overload

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.exact.dispatch import align_gpu_kernels
from funrl.compiled_kernels.flash_kernel import attention_by
from funrl.fields import TEACHER_PROMPT, TEACHER_TOKENS
from funrl.mesh.launch import submesh
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import COMPUTE
from funrl.models import Model, Placed, compile_layer, place
from funrl.models.compiling.compile import Compilations, is_compiled
from funrl.models.decoder.sequence_parallel import with_form
from funrl.models.expert_rows import ExpertRows
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.peft_files import read_adapter
from funrl.models.lora import decoder_of, first_trained
from funrl.models.model import Layer
from funrl.models.value_head import HEAD, HEAD_BIAS
from funrl.models.weight_dtypes import cast_weights
from funrl.optim import Transformation
from funrl.rewards.pool import Pool
from funrl.rollout.engine import WeightSpec
from funrl.rollout.native.engine import NativeEngine
from funrl.seeds import derived_seed
from funrl.trainer.jobs.engines import engine_base, judging_mesh, policy_generator, with_agents
from funrl.trainer.jobs.job import Job, RLJob, needs_old_scores, rewards_completions
from funrl.trainer.jobs.learning_rates import optimizer_of, updates_of
from funrl.trainer.jobs.models import base_role, companion_of, has_context
from funrl.trainer.jobs.numerics import check_kernels
from funrl.trainer.jobs.sharding import replace_layouts, splits_residual, stored_rules
from funrl.trainer.lowered.backend import computes_in_torch, with_backend, with_devices
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.sources.judging import open_judge
from funrl.trainer.steps.optimizer import frozen_beginnings
from funrl.trainer.steps.parts import FrozenAgent, GeneratingParts, Judge, Parts, with_generator
from funrl.trainer.steps.remote_scores import RemoteRewards, RemoteScorer
from funrl.trainer.steps.roles import Role, RoleState, State, bases, keep_copies, writes_of
from funrl.trainer.steps.router_losses import router_losses
from funrl.trainer.steps.sync import earlier_self


def _choose_kernels(job: Job, device: torch.device, note: Callable[[str], None]) -> None:
    """Let this process compute on a GPU by the kernels of --numerics, after a trial of these, and say which.

    Raises:
      SettingsError: they fail.
    """
    if device.type != "cuda":
        return
    aligned = job.settings.models.numerics == "aligned"
    align_gpu_kernels(aligned)
    attention = "kernels of a fixed order" if aligned else attention_by(job.dtype)
    note(f"computing in {job.settings.models.dtype}; attention by {attention}")
    if aligned and isinstance(job, RLJob):
        check_kernels(job, device)


@overload
def build(job: RLJob, mesh: Mesh, note: Callable[[str], None]) -> GeneratingParts: ...


@overload
def build(job: Job, mesh: Mesh, note: Callable[[str], None], only: str | None = None) -> Parts: ...


def build(job: Job, mesh: Mesh, note: Callable[[str], None], only: str | None = None) -> Parts:
    """Meshes, layouts and functions. Called by every rank.

    Args:
      only: the one role of these ranks, which neither train nor generate; None: they have all but those with ranks of
        their own.
    """
    settings = job.settings
    _choose_kernels(job, mesh.device, note)
    compiled: dict[Layer, Layer] = {}
    compilations = Compilations(note)
    in_torch = computes_in_torch(settings)
    mode = settings.models.compile if in_torch else "off"
    own_rows = ExpertRows(mesh, in_torch)

    def layer_of(model: Model) -> Layer:
        if model.layer not in compiled:
            layer = compile_layer(model, mode, mesh.device.type, compilations.add, remat=settings.devices.remat)
            compiled[model.layer] = layer
        return compiled[model.layer]

    # Completions of one prompt share it. Supervised runs keep the order of sums that the packaged warm start has.
    grouped = isinstance(job, RLJob) and job.sampling.samples > 1

    def placed(name: str, model: Model, mesh: Mesh = mesh, expert_rows: ExpertRows = own_rows) -> Placed:
        layer = with_form(layer_of(model), settings.devices.sequence_parallel)
        replay = settings.routers.router_replay and name in (job.main_role, *job.agents.policies)
        return place(
            model,
            mesh,
            stored_rules(settings, name),
            COMPUTE,
            dtype=job.dtype,
            layer=layer,
            replay=replay,
            splits=splits_residual(settings, mesh.sizes, mesh.device.type != "cpu"),
            reduce_dtype=job.reduce_dtype,
            shares_prefixes=grouped and not is_compiled(model, mode, mesh.device.type),
            expert_rows=expert_rows,
        )

    begin = placed(job.main_role, job.model)
    places = {name: placed(name, model) for name, model in job.models.items()}
    apart = job.settings.devices.scoring
    roles = {name: _role(job, name, places) for name in places if (name not in apart if only is None else name == only)}
    stored = begin if job.initial_model is job.model else placed(job.main_role, job.initial_model)
    roles = {name: base_role(stored, roles) for name in bases(roles)} | roles
    learning = {name: roles[name] for name in job.algorithm.losses if name in roles}
    ordered = {name: role for name, role in roles.items() if name not in learning} | learning
    generator = None
    if isinstance(job, RLJob) and only is None:
        policy = places[job.main_role]
        base = engine_base(job, begin, stored, policy)
        generator = policy_generator(job, base, policy, layer_of(base.model), note)
        generator = with_agents(job, generator, layer_of)
    judge = _own_judge(job, mesh, only, layer_of, note)
    names = ("", *job.agents.policies) if job.agents.policies else ()
    models = [job.model, *job.models.values(), *([] if judge is None else [judge.job.model])]
    some = any(is_compiled(model, mode, mesh.device.type) for model in models)
    scorers, rewards = ({}, {}) if generator is None else _models_on_other_ranks(job, mesh, placed)
    parts = Parts(
        mesh=mesh,
        begin=begin,
        main_role=job.main_role,
        roles=ordered,
        compilations=compilations if some else None,
        agents={name or job.main_role: job.agents.trained_by(name) for name in names},
        judge=judge,
        remote_scorers=scorers,
    )
    return parts if generator is None else with_generator(parts, generator, remote_rewards=rewards)


def _own_judge(
    job: Job, mesh: Mesh, only: str | None, layer_of: Callable[[Model], Layer], note: Callable[[str], None]
) -> Judge | None:
    """The judge, if the job has one and it writes on this rank; arguments as of `build`."""
    if not isinstance(job, RLJob) or job.judge is None:
        return None
    own = judging_mesh(job, job.judge.sizes, mesh, only)
    rows = job.settings.engines.decode_rows
    return None if own is None else open_judge(job.judge, own, job.dtype, rows, layer_of(job.judge.model), note)


def _models_on_other_ranks(
    job: Job, training: Mesh, placed: Callable[[str, Model, Mesh, ExpertRows], Placed]
) -> tuple[dict[str, RemoteScorer], dict[str, RemoteRewards]]:
    """Roles that trainer ranks ask for fields of tokens, and models that they ask for rewards, by name.

    Trainer and generator ranks call it.

    Args:
      training: mesh of the trainer ranks.
      placed: (name, model, mesh, rows of experts) -> the model of a role on that mesh.
    """
    scorers = {}
    rewarding = {}
    for name, pool in (job.placement.scoring if job.placement else {}).items():
        own = submesh(training, pool.sizes, pool.ranks)
        if training.here and rewards_completions(job, name):
            rewarding[name] = RemoteRewards(name, own, training)
        elif training.here:
            role = _role(job, name, {name: placed(name, job.models[name], own, ExpertRows(own))})
            scorers[name] = RemoteScorer(name, role, training, scoring_budget(job.settings))
    return scorers, rewarding


def build_run(job: Job, mesh: Mesh, note: Callable[[str], None], pool: Pool | None = None) -> Parts:
    """`build` for a run that trains: with its pool, and with roles whose steps its backend computes."""
    parts = build(job, with_devices(mesh, job.settings), note)
    if isinstance(parts, GeneratingParts):
        parts = dataclasses.replace(parts, pool=pool)
    return dataclasses.replace(parts, roles=with_backend(parts.roles, job.settings, note, *on_mesh(job, parts.roles)))


def on_mesh(
    job: Job, roles: Mapping[str, Role]
) -> tuple[Callable[[str, Mesh], Placed], Callable[[str, Placed], Transformation]]:
    """Functions that give the roles of one process on a mesh of devices that it drives.

    Returns: (name of a role, mesh) -> its model; and (name of a role that learns, its model) -> its optimizer.
    """

    def place_role(name: str, mesh: Mesh) -> Placed:
        shared = name not in job.models  # stored as the weights that the run begins with
        return replace_layouts(job.settings, roles[name].placed, job.main_role if shared else name, mesh, part=shared)

    def optimize(name: str, placed: Placed) -> Transformation:
        return optimizer_of(job, name, placed, roles[name].first_step)

    return place_role, optimize


def _role(job: Job, name: str, places: Mapping[str, Placed]) -> Role:
    """A role without its weights."""
    settings = job.settings
    placed = places[name]
    kind = job.kind_of_role(job.kind_of_role(name).like or name)
    samples = isinstance(job, RLJob)
    writes = writes_of(name, job.algorithm)
    if kind.generates and not needs_old_scores(job):
        writes = {}
    role = Role(
        placed,
        writes,
        temperature=settings.sampling.temperature if samples and not settings.sampling.raw_logp else 1.0,
        topk=min(settings.models.teacher_top_k, placed.model.config.vocab),
        base=job.base_of(name),
        follow=settings.optimization.follow_rules.get(name),
        context=TEACHER_TOKENS if name in job.tokenizers else TEACHER_PROMPT if has_context(kind, settings) else "",
        sources=tuple(map(job.role_sources.index, job.kind_of_role(name).sources)),
    )
    loss = job.algorithm.losses.get(name)
    if loss is None:
        return role
    first_step = settings.optimization.critic_warmup_steps + 1 if kind.generates else 1
    return role._replace(
        loss=loss,
        optimizer=optimizer_of(job, name, placed, first_step),
        mask=kind.mask,
        first_step=first_step,
        updates=updates_of(settings, name),
        metric=job.kind_of_role(name).loss_metric(name) if samples else "train/loss",
        watch_entropy=kind.generates and samples,
        companion=companion_of(job, loss, places),
        router=router_losses(settings, placed),
        frozen=frozen_beginnings(settings, placed.model, name),
    )


def first_weights(job: Job, parts: Parts, begin: trees.Tree) -> dict[str, trees.Tree]:
    """This rank's own weights of every role. Those that begin as the policy are copies, for it is updated in place.

    Args:
      begin: the weights that the run begins with, in the layouts of `parts.begin`; `job.initial_role` takes them over.
    """
    if isinstance(parts, GeneratingParts):
        load_first(parts.generator.frozen, parts.begin, begin, parts.generator.to_whole)
    for name, scorer in parts.remote_scorers.items():
        if name not in job.directories:
            reshard(begin, scorer.first_plan(parts.begin.stored, job.dtype), parts.mesh)
    weights = {}
    shared = bases(parts.roles)
    for name, role in parts.roles.items():
        placed = role.placed
        dtype = weights_dtype(job, role)
        if name in job.directories:
            weights[name] = hf.load(
                job.directories[name], dtype, placed.mesh, layouts=placed.stored, model=placed.model
            )[1]
        elif name in shared:
            decoder = decoder_of(begin)
            weights[name] = cast_weights({part: decoder[part] for part in role.stored}, dtype)
        elif role.base is not None:
            weights |= _first_adapters(job, name, role, begin)
        elif placed.model is parts.begin.model and name == job.main_role:
            weights[name] = begin
        else:
            weights[name] = placed.copy_from(parts.begin, begin, dtype)
    return weights


def weights_dtype(job: Job, role: Role) -> torch.dtype:
    """Dtype of a role's own weights between steps: that of master weights if they change."""
    return job.dtype if role.loss is None and role.follow is None else job.master


def _first_adapters(job: Job, name: str, role: Role, begin: trees.Tree) -> dict[str, trees.Tree]:
    """This rank's adapters of a role, by its name; none where it does not learn.

    They take over a value head of the run's first weights, and the main role continues the run's --adapter.
    """
    if role.loss is None:
        return {}
    placed = role.placed
    given = {part: begin[part] for part in (HEAD, HEAD_BIAS) if part in begin}
    if job.settings.adapters.adapter is not None and name == job.main_role:
        boxes = {leaf: layout.box(placed.mesh.rank) for leaf, layout in trees.named(role.stored)}
        for leaf, whole in read_adapter(job.settings.adapters.adapter, placed.model).items():
            given[leaf] = whole[tuple(slice(*edge) for edge in boxes[leaf])]
    generator = torch.Generator()
    generator.manual_seed(derived_seed(job.settings.run.seed, list(job.algorithm.role_kinds).index(name)))
    return {name: first_trained(placed.model, role.stored, placed.mesh, generator, job.master, given)}


def frozen_weights(parts: Parts, weights: Mapping[str, trees.Tree]) -> dict[str, trees.Tree]:
    """The entries of `first_weights` of roles whose weights stay what they are."""
    return {n: tree for n, tree in weights.items() if parts.roles[n].loss is None and parts.roles[n].follow is None}


def first_state(job: Job, parts: Parts, weights: Mapping[str, trees.Tree], source: trees.Tree) -> State:
    """The state before the first step, of weights that it takes over.

    Args:
      source: the source's state.
    """
    states = {
        name: RoleState(weights[name], role.optimizer.init(weights[name]))
        for name, role in parts.roles.items()
        if role.optimizer is not None
    }
    keep_copies(parts.roles, states)
    advantage = job.algorithm.advantage.init() if job.algorithm.advantage is not None else ()
    following = {name: weights[name] for name, role in parts.roles.items() if role.follow is not None}
    state = State(states, advantage, source, following=following)
    if not isinstance(parts, GeneratingParts):
        return state
    agents = parts.generator.frozen.items()
    role = parts.roles[parts.main_role]
    own = weights[parts.main_role]
    earlier = {name: earlier_self(role, own, step=0) for name, agent in agents if agent.declared.every}
    return state._replace(earlier=earlier)


def load_first(
    agents: Mapping[str, FrozenAgent], begin: Placed, params: trees.Tree, to_engine: Plan, *, trains: bool = True
) -> None:
    """Give the engines the weights that never change. Collective.

    Args:
      begin: the model that the run begins with.
      params: its weights, which are copied: the policy takes them over.
      to_engine: the plan from its layouts to an engine's.
      trains: whether the policy learns; if not, each earlier self is what it is.
    """
    load_directories(agents)
    for agent in agents.values():
        if agent.declared.directory is None and not (trains and agent.declared.every):
            agent.engine.load(_copied(agent.engine.weights, begin.mesh, params, to_engine))


def _copied(weights: WeightSpec, mesh: Mesh, params: trees.Tree, to_engine: Plan) -> Iterator[tuple[str, Tensor]]:
    """A copy of weights as an engine takes them; they move when they are asked for."""
    own = reshard(params, to_engine, mesh)
    yield from weights.named(trees.clone(own) if weights.mesh.here else own)


def load_directories(agents: Mapping[str, FrozenAgent]) -> None:
    """Give the engines of this rank the weights of their directories. Collective."""
    for agent in agents.values():
        engine = agent.engine
        if agent.declared.directory is not None and isinstance(engine, NativeEngine):
            spec = engine.weights
            _, own = hf.load(agent.declared.directory, spec.dtype, spec.mesh, layouts=spec.layouts, model=engine.model)
            engine.load(spec.named(own))
