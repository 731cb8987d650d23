"""The roles of a run as one rank sees them: what is made once, and the weights and the state that it begins with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.flash_kernel import attention_by
from funrl.mesh.launch import submesh
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.transfer import SentWeights
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import COMPUTE
from funrl.models import Model, Placed, compile_layer, place
from funrl.models.compiling.compile import Compilations, is_compiled
from funrl.models.decoder.sequence_parallel import with_form
from funrl.models.deployed import DeviceWeights, deployed
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.peft_files import read_adapter
from funrl.models.lora import decoder_of, first_trained, on_base
from funrl.models.model import Layer
from funrl.models.value_head import HEAD, HEAD_BIAS
from funrl.models.weight_dtypes import cast_weights
from funrl.optim import Transformation
from funrl.rewards.pool import Pool
from funrl.rollout.certificate import compare_weights
from funrl.rollout.remote.engine import FurtherWeights, RemoteEngine
from funrl.seeds import derived_seed
from funrl.trainer.jobs.agents import earlier_self, first_selves, load_first
from funrl.trainer.jobs.generator import (
    BASE_VERSION,
    AdaptedBase,
    Generator,
    judging_mesh,
    policy_generator,
    with_agents,
)
from funrl.trainer.jobs.job import Job, RLJob, needs_old_scores, rewards_completions, scoring_pools
from funrl.trainer.jobs.learning_rates import optimizer_of
from funrl.trainer.jobs.models import asked_models, base_role, companion_of
from funrl.trainer.jobs.sharding import relaid, splits_residual, stored_rules
from funrl.trainer.lowered.backend import computes_in_torch, with_backend, with_devices
from funrl.trainer.lowered.on_mesh import OnMesh
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.sources.judging import Judge, open_judge
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.optimizer import frozen_beginnings
from funrl.trainer.steps.remote_scores import RemoteRewards, RemoteScorer
from funrl.trainer.steps.roles import Role, RoleState, bases, writes_of
from funrl.trainer.steps.router_losses import router_losses
from funrl.trainer.steps.state import State


class Parts(NamedTuple):
    """Meshes, roles and functions that are made once.

    Attributes:
      mesh: to train on.
      begin: the model that the run begins with.
      main_role: name of the role that takes over the weights of `begin`, and generates if anything is generated.
      roles: by name; those that learn in the order of the algorithm's losses.
      generator: None where nothing is generated.
      pool: this rank's reward workers; None: it has none.
      judge: None where no model writes verdicts.
      compilations: of the layers of all models; None where no layer is compiled.
      agents: of each role that sees only some agents' rows, the numbers of these agents.
      elsewhere: roles on ranks of their own, by name; they are not among `roles`.
      rewarding: models on other ranks that reward completions, by name, which this rank asks.
    """

    mesh: Mesh
    begin: Placed
    main_role: str
    roles: Mapping[str, Role]
    generator: Generator | None
    pool: Pool | None = None
    judge: Judge | None = None
    compilations: Compilations | None = None
    agents: Mapping[str, Collection[int]] = {}
    elsewhere: Mapping[str, RemoteScorer] = {}
    rewarding: Mapping[str, RemoteRewards] = {}


def build(job: Job, mesh: Mesh, note: Callable[[str], None], only: str | None = None) -> Parts:
    """Meshes, layouts and functions. Called by every rank.

    Args:
      only: the one role of these ranks, which neither train nor generate; None: they have all but those with ranks of
        their own.
    """
    settings = job.settings
    if mesh.device.type == "cuda":
        note(f"computing in {settings.models.dtype}; attention by {attention_by(job.dtype)}")
    compiled: dict[Layer, Layer] = {}
    compilations = Compilations(note)
    mode = settings.models.compile if computes_in_torch(settings) else "off"

    def layer_of(model: Model) -> Layer:
        if model.layer not in compiled:
            layer = compile_layer(model, mode, mesh.device.type, compilations.add, remat=settings.devices.remat)
            compiled[model.layer] = layer
        return compiled[model.layer]

    def placed(name: str, model: Model, mesh: Mesh = mesh) -> Placed:
        layer = with_form(layer_of(model), settings.devices.sequence_parallel)
        replay = settings.routers.router_replay and name in (job.main_role, *job.agents.policies)
        split = splits_residual(settings, mesh.sizes, mesh.device.type != "cpu")
        return place(
            model,
            mesh,
            stored_rules(settings, name),
            COMPUTE,
            dtype=job.dtype,
            layer=layer,
            replay=replay,
            splits=split,
            reduce_dtype=job.reduce_dtype,
        )

    begin = placed(job.main_role, job.model)
    places = {name: placed(name, model) for name, model in job.models.items()}
    apart = {} if job.placement is None else job.placement.scoring
    roles = {name: _role(job, name, places) for name in places if (name not in apart if only is None else name == only)}
    roles = {name: base_role(begin, roles) for name in bases(roles)} | roles
    learning = {name: roles[name] for name in job.algorithm.losses if name in roles}
    ordered = {name: role for name, role in roles.items() if name not in learning} | learning
    generator = None
    judge = None
    if isinstance(job, RLJob) and only is None:
        generator = policy_generator(job, begin, places[job.main_role], compiled[job.model.layer], note)
        generator = with_agents(job, generator, layer_of)
    if isinstance(job, RLJob) and job.judge is not None and (judging := judging_mesh(job, mesh, only)) is not None:
        judge = open_judge(job.judge, judging, job.dtype, settings.engines.decode_rows, layer_of(job.judge.model), note)
    elsewhere = {} if generator is None else _on_own_ranks(job, mesh, placed)
    rewarding = {} if generator is None else asked_models(job, mesh, generator.mesh)
    agents = {}
    if job.agents.policies:
        agents = {name or job.main_role: job.agents.trained_by(name) for name in ("", *job.agents.policies)}
    models = [job.model, *job.models.values(), *([] if judge is None else [judge.job.model])]
    some = any(is_compiled(model, mode, mesh.device.type) for model in models)
    return Parts(
        mesh,
        begin,
        job.main_role,
        ordered,
        generator,
        judge=judge,
        compilations=compilations if some else None,
        agents=agents,
        elsewhere=elsewhere,
        rewarding=rewarding,
    )


def _on_own_ranks(job: Job, training: Mesh, placed: Callable[[str, Model, Mesh], Placed]) -> dict[str, RemoteScorer]:
    """The roles on ranks of their own that the ranks that train ask for fields of tokens.

    Args:
      training: mesh of the ranks that ask.
      placed: (name, model, mesh) -> the model of a role on that mesh.
    """
    elsewhere = {}
    for number, (name, pool) in enumerate(scoring_pools(job).items()):
        own = submesh(training, pool.sizes, pool.ranks)
        if training.here and not rewards_completions(job, name):
            role = _role(job, name, {name: placed(name, job.models[name], own)})
            elsewhere[name] = RemoteScorer(name, role, training, number, scoring_budget(job.settings))
    return elsewhere


def build_run(job: Job, mesh: Mesh, note: Callable[[str], None], pool: Pool | None = None) -> Parts:
    """`build` for a run that trains: with its pool, and with roles whose steps its backend computes."""
    parts = build(job, with_devices(mesh, job.settings), note)._replace(pool=pool)
    return parts._replace(roles=with_backend(parts.roles, job.settings, note, on_mesh(job, parts.roles)))


def on_mesh(job: Job, roles: Mapping[str, Role]) -> OnMesh:
    """The roles of a run, which has them on one process, as they are on a mesh of devices that it drives."""

    def place_role(name: str, mesh: Mesh) -> Placed:
        shared = name not in job.models  # stored as the weights that the run begins with
        return relaid(job.settings, roles[name].placed, job.main_role if shared else name, mesh, part=shared)

    def optimize(name: str, placed: Placed) -> Transformation:
        return optimizer_of(job, name, placed, roles[name].first_step)

    return OnMesh(place_role, optimize, job.settings.devices.remat)


def _role(job: Job, name: str, places: Mapping[str, Placed]) -> Role:
    """A role without its weights."""
    settings = job.settings
    placed = places[name]
    like = job.main_role if name in job.agents.policies else name
    kind = job.kind_of_role(like)
    samples = isinstance(job, RLJob)
    writes = writes_of(like, job.algorithm)
    if kind.generates and not needs_old_scores(job):
        writes = {}
    role = Role(
        placed,
        writes,
        temperature=settings.sampling.temperature if samples else 1.0,
        topk=min(settings.models.teacher_top_k, placed.model.config.vocab),
        base=job.base_of(name),
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
        metric=job.kind_of_role(name).loss_metric(name) if samples else "train/loss",
        watch_entropy=kind.generates and samples,
        companion=companion_of(job, loss, places),
        router=router_losses(settings, placed),
        frozen=frozen_beginnings(settings, placed.model),
    )


def first_weights(job: Job, parts: Parts, begin: trees.Tree) -> dict[str, trees.Tree]:
    """This rank's own weights of every role. Those that begin as the policy are copies, for it is updated in place.

    Args:
      begin: the weights that the run begins with, in the layouts of `parts.begin`; `job.initial_role` takes them over.
    """
    if parts.generator is not None:
        load_first(parts.generator.frozen, parts.begin, begin, parts.generator.to_whole)
    for name, scorer in parts.elsewhere.items():
        if name not in job.directories:
            scorer.send_first(begin, parts.begin.stored, job.dtype)
    weights = {}
    shared = bases(parts.roles)
    for name, role in parts.roles.items():
        placed = role.placed
        dtype = job.dtype if role.loss is None else job.master
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


def _first_adapters(job: Job, name: str, role: Role, begin: trees.Tree) -> dict[str, trees.Tree]:
    """This rank's adapters of a role, by its name; none where it does not learn.

    A value head that the run begins with is taken over, and the main role goes on with the run's --adapter.
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
    """Of a rank's `first_weights` those that do not learn."""
    return {name: tree for name, tree in weights.items() if parts.roles[name].loss is None}


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
    advantage = job.algorithm.advantage.init() if job.algorithm.advantage is not None else ()
    state = State(states, advantage, source)
    if parts.generator is None:
        return state
    earlier = first_selves(parts.generator.frozen, parts.roles[parts.main_role], weights[parts.main_role])
    return state._replace(earlier=earlier)


def sync(
    parts: Parts, state: State, clock: Clock | None = None, frozen: Mapping[str, trees.Tree] | None = None
) -> State:
    """Give the engine the policy's weights in the layout to generate in; nothing where nothing is generated.

    An engine that adds adapters to a base gets the base once.

    Args:
      frozen: weights of the roles that do not learn.
    """
    if parts.generator is None:
        return state
    generator = parts.generator
    base = generator.base
    engines = {parts.main_role: generator.engine, **generator.policies}
    with (clock or Clock()).phase("reshard"):
        if base is not None and base.engine.version is None:
            base.engine.load(_base_for_engine(parts, base, frozen or {}), BASE_VERSION)
        if isinstance(generator.engine, RemoteEngine) and generator.engine.in_background:
            generator.proof.settle()  # the update has left the generators time to take the weights before it
            _send_in_background(parts, state, frozen or {}, generator.engine)
            return state._replace(version=state.version + 1)
        for name, engine in engines.items():
            own = state.roles[name].params
            merge = base is None or name != parts.main_role
            engine.load(policy_weights(parts, parts.roles[name], own, frozen, merge=merge), state.version + 1)
        _load_earlier(parts, state, frozen)
    return state._replace(version=state.version + 1)


def _send_in_background(parts: Parts, state: State, frozen: Mapping[str, trees.Tree], engine: RemoteEngine) -> None:
    """Begin to send the policies' weights, and those of earlier selves of which the engines have others."""
    generator = parts.generator
    assert generator is not None

    def sent(name: str, own: trees.Tree, merge: bool = True) -> SentWeights:
        role = parts.roles[name]
        policy = deployed(role.placed, role.whole(own, frozen), merge=merge)
        return SentWeights(policy.tree(), generator.to_whole if merge else generator.to_engine)

    version = state.version + 1
    others = [(name, sent(name, state.roles[name].params), version) for name in generator.policies]
    for name, earlier in state.earlier.items():
        if generator.further[name].version != earlier.step:
            others.append((name, sent(parts.main_role, earlier.params), earlier.step))
    further = [FurtherWeights(cast(RemoteEngine, generator.further[name]), v, own) for name, own, v in others]
    own = state.roles[parts.main_role].params
    engine.send(sent(parts.main_role, own, merge=generator.base is None), version, further)


def _base_for_engine(parts: Parts, base: AdaptedBase, frozen: Mapping[str, trees.Tree]) -> Iterator[tuple[str, Tensor]]:
    """The weights that adapters stand on as their engine takes them, made when they are asked for."""
    yield from base.engine.weights.named(reshard(base_weights(parts, frozen).tree(), base.to_engine, parts.mesh))


def base_weights(parts: Parts, frozen: Mapping[str, trees.Tree]) -> DeviceWeights:
    """The weights that the policy's adapters stand on.

    Args:
      frozen: weights of the roles that do not learn.
    """
    base = parts.roles[parts.main_role].base
    assert base is not None
    return deployed(parts.begin, on_base(parts.begin.model, frozen[base], None))


def verify_base(parts: Parts, frozen: Mapping[str, trees.Tree]) -> None:
    """Compare the base that the engine adds adapters to with the trainer's, where it has one. Collective.

    Raises:
      SyncError: they differ.
    """
    base = None if parts.generator is None else parts.generator.base
    if base is not None:
        compare_weights(base_weights(parts, frozen), base.engine, BASE_VERSION)


def policy_weights(
    parts: Parts, role: Role, own: trees.Tree, frozen: Mapping[str, trees.Tree] | None, *, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Weights of a policy as an engine takes them. They are made when they are asked for, when old ones are gone.

    Args:
      role: of the policy.
      own: its own weights, or those of an earlier self.
      frozen: weights of the roles that do not learn.
      merge: whether the engine takes adapters merged into what they adapt; else it takes them alone.
    """
    generator = parts.generator
    assert generator is not None
    engine = generator.whole if merge else generator.engine
    to_engine = generator.to_whole if merge else generator.to_engine
    policy = deployed(role.placed, role.whole(own, frozen or {}), merge=merge)
    if engine.weights.streamed:
        yield from policy.exported(engine.weights.names)
    else:
        donate = bool(policy.merged)
        yield from engine.weights.named(reshard(policy.tree(), to_engine, parts.mesh, donate=donate))


def sync_earlier(parts: Parts, state: State, frozen: Mapping[str, trees.Tree] | None) -> None:
    """Give the engines of earlier selves the weights of the state, unless they come with the policy's next ones."""
    generator = parts.generator
    if generator is None or generator.engine.version is None:
        return  # nothing is generated
    if not (isinstance(generator.engine, RemoteEngine) and generator.engine.in_background):
        _load_earlier(parts, state, frozen)


def _load_earlier(parts: Parts, state: State, frozen: Mapping[str, trees.Tree] | None) -> None:
    """Load the weights of earlier selves into the engines that have others."""
    generator = parts.generator
    assert generator is not None
    for name, earlier in state.earlier.items():
        engine = generator.frozen[name].engine
        if engine.version != earlier.step:
            role = parts.roles[parts.main_role]
            engine.load(policy_weights(parts, role, earlier.params, frozen), earlier.step)


def renewed(parts: Parts, state: State, frozen: Mapping[str, trees.Tree]) -> State:
    """The state after a step, in which earlier selves that are due are the policy, and their engines have them."""
    if parts.generator is None or not state.earlier:
        return state
    own = state.roles[parts.main_role].params
    role = parts.roles[parts.main_role]
    every = {name: parts.generator.frozen[name].declared.every for name in state.earlier}
    due = {name: earlier_self(role, own, state.step) for name, steps in every.items() if state.step % steps == 0}
    state = state._replace(earlier={**state.earlier, **due})
    sync_earlier(parts, state, frozen)
    return state


def settle_proof(parts: Parts) -> None:
    """End the proof of the newest sync, unless generation has ended it.

    Raises:
      SyncError: the engine does not hold the policy's weights.
    """
    if parts.generator is not None:
        parts.generator.proof.settle()


def proof_metrics(parts: Parts) -> dict[str, float]:
    """Metrics of the proofs that have ended since the last call, and the bytes that a sync gives to a rank's engine."""
    generator = parts.generator
    return {} if generator is None else {"sync/bytes": float(generator.sync_bytes), **generator.proof.take()}
