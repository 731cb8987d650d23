"""The engine of a run: its maker by the value of `--engine`, checks, and how weights come to it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from funrl import trees
from funrl.mesh.launch import ranks_per_node, submesh, view
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan, plan
from funrl.mesh.pools.channel import Requests
from funrl.models import Model, Placed
from funrl.models.errors import ModelError
from funrl.models.float8_weights import float8_model_problem
from funrl.models.lora import added_adapters, trained_part
from funrl.models.model import Layer, Lora
from funrl.models.weight_dtypes import TORCH_DTYPES, weight_dtypes
from funrl.rollout.adapter_engine import AdapterEngine, AdaptingEngine
from funrl.rollout.engine import Engine, WeightSpec
from funrl.rollout.engine_abilities import ENGINES
from funrl.rollout.hf_engine import hf_engine, hf_weights
from funrl.rollout.ledger import LedgerRule
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine
from funrl.rollout.native.loading import native_weights, spec_of_adapter
from funrl.rollout.native.static_decode import drafts_problem
from funrl.rollout.ray.engine import RayEngine
from funrl.rollout.remote.engine import RemoteEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.sync_proof import SyncProof
from funrl.rollout.vllm.adapters import vllm_adapter_problem, vllm_adapter_weights
from funrl.rollout.vllm.client import RemoteCore, vllm_client
from funrl.rollout.vllm.contract import VLLMOptions
from funrl.rollout.vllm.core import check_vllm
from funrl.rollout.vllm.engine import vllm_engine, vllm_weights
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.sharding import driven_generate_sizes, replica_sizes
from funrl.trainer.lowered.backend import decodes_in_jax, make_engine_backend
from funrl.trainer.settings.declaration import SettingsError, parts, refusing
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings, given_flag
from funrl.trainer.steps.parts import AdaptedBase, FrozenAgent, Generator

CONTROL_EVERY = 64  # completions, one of which is scored by unrounded weights too
ENGINE_TIMEOUT_S = 600.0  # where no flag says


class EnginePlace(NamedTuple):
    """Model and devices of an engine.

    Attributes:
      model: that it generates with.
      mesh: that it generates on.
      layer: that the model is computed with.
      note: receives remarks.
    """

    model: Model
    mesh: Mesh
    layer: Layer
    note: Callable[[str], None]


class EngineMaker(NamedTuple):
    """Maker of an engine without weights.

    Attributes:
      make: (job, place) -> the engine.
      weights: (model, mesh, dtype) -> the form in which it takes weights, also where the engine is on other ranks.
      check: (settings, model, mesh): raises ValueError or ImportError where the engine cannot generate here.
      adapter_problem: (model, adapters, device, dtype) -> reason why it gets merged weights, where it adds adapters.
      adapter_weights: (model, form of its weights, adapters) -> the form in which it takes adapters.
    """

    make: Callable[[Job, EnginePlace], Engine]
    weights: Callable[[Model, Mesh, torch.dtype], WeightSpec]
    check: Callable[[Settings, Model, Mesh], None] = lambda settings, model, mesh: None
    adapter_problem: Callable[[Model, Lora, str, torch.dtype], str | None] = lambda model, lora, device, dtype: None
    adapter_weights: Callable[[Model, WeightSpec, Lora], WeightSpec] = spec_of_adapter


def native_options(job: Job) -> NativeOptions:
    """Options of the native engines of a job."""
    engines = job.settings.engines
    make_backend = make_engine_backend(job.settings, driven_generate_sizes(job.settings, job.model))
    return NativeOptions(
        engines.decode_rows,
        cache_bytes(job.settings),
        job.tokenizer and functools.partial(job.tokenizer.decode, skip_special_tokens=True),
        speculate=engines.speculate,
        record_routes=job.settings.routers.router_replay,
        record_kept=job.settings.sampling.mask_replay,
        record_digests=engines.verify_sync,
        snapshot_tokens=engines.state_snapshot_tokens,
        engines=1 + len(job.agents.frozen) + len(job.agents.policies),
        static=None if make_backend is None else True,
        float8=engines.float8,
        control_every=CONTROL_EVERY * has_control_rows(job.settings),
        make_backend=make_backend,
    )


def has_control_rows(settings: Settings) -> bool:
    """True if completions in 8 bits are scored by unrounded weights too; those of other ranks are not reported."""
    return settings.engines.float8 and settings.devices.place is None


def cache_bytes(settings: Settings) -> int:
    """Bytes of a rank's keys and values; 0: the engine chooses."""
    return round((settings.engines.kv_cache_gb or 0) * 1e9)


def _vllm_options(job: Job, mesh: Mesh) -> VLLMOptions:
    mode = job.settings.models.compile
    compiled = mode == "on" or (mode == "auto" and mesh.device.type == "cuda")
    decode = job.tokenizer and functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    settings = job.settings
    rule = LedgerRule(settings.run.batch_prompts, settings.asynchrony.staleness, settings.asynchrony.window)
    lora = adapters_apart(job, job.models[job.main_role], mesh.device.type)
    return VLLMOptions(
        settings.engines.decode_rows,
        cache_bytes(settings),
        compiled,
        decode=decode,
        lora=lora,
        record_kept=settings.sampling.mask_replay,
        adapters=1 if lora is None else rule.most_age + 1,  # completions of so many versions run at once
    )


def _make_native(job: Job, place: EnginePlace) -> Engine:
    model, mesh, layer, note = place
    return native_engine(model, mesh, job.dtype, options=native_options(job), layer=layer, note=note)


def _make_vllm(job: Job, place: EnginePlace) -> Engine:
    engine = vllm_engine(place.model, place.mesh, job.dtype, options=_vllm_options(job, place.mesh))
    engine.record_digests = job.settings.engines.verify_sync
    return engine


def _make_vllm_client(job: Job, place: EnginePlace) -> Engine:
    engines = job.settings.engines
    mesh = place.mesh
    url = parts(engines.engine_url)[int(mesh.index(mesh.row_axes))]
    timeout_s = engines.engine_timeout or ENGINE_TIMEOUT_S
    engine = vllm_client(url, place.model, mesh, job.dtype, options=_vllm_options(job, mesh), timeout_s=timeout_s)
    cast(RemoteCore, engine.core).note = place.note
    engine.record_digests = job.settings.engines.verify_sync
    return engine


def _make_hf(job: Job, place: EnginePlace) -> Engine:
    engine = hf_engine(place.model, place.mesh, job.dtype)
    engine.record_digests = job.settings.engines.verify_sync
    return engine


def _check_native(settings: Settings, model: Model, mesh: Mesh) -> None:
    engines = settings.engines
    problem = drafts_problem(mesh.device.type, engines.decode_rows)
    if engines.speculate and problem is not None:
        raise settings.refusal(
            "{speculate} with {decode_rows}: {problem}; leave it out, or give --decode_rows=1", problem=problem
        )
    _check_float8(settings, model, mesh)


def _check_float8(settings: Settings, model: Model, mesh: Mesh) -> None:
    if not settings.engines.float8:
        return
    problem = float8_model_problem(model, mesh, TORCH_DTYPES[settings.models.dtype])
    if decodes_in_jax(settings):
        problem = "--compile=on decodes in JAX"
    if problem is not None:
        raise settings.refusal("{rollout_dtype}: {problem}; leave it out", problem=problem)


def _check_vllm(settings: Settings, model: Model, mesh: Mesh) -> None:
    dtype = TORCH_DTYPES[settings.models.dtype]
    check_vllm(model, mesh.device.type, dtype, mesh.size("tensor"), cache_bytes(settings))


def _check_hf(settings: Settings, model: Model, mesh: Mesh) -> None:
    if settings.models.dtype == "float64":
        raise ModelError("transformers' generate gives float32 at most; use --dtype=float32")


MAKERS = {  # by the value of --engine; their abilities are in `engine_abilities.ENGINES`
    "native": EngineMaker(_make_native, native_weights, _check_native),
    "vllm": EngineMaker(
        _make_vllm,
        vllm_weights,
        _check_vllm,
        adapter_problem=vllm_adapter_problem,
        adapter_weights=vllm_adapter_weights,
    ),
    "vllm_server": EngineMaker(  # a server says what it cannot do on its own device
        _make_vllm_client,
        vllm_weights,
        adapter_problem=vllm_adapter_problem,
        adapter_weights=vllm_adapter_weights,
    ),
    "hf": EngineMaker(_make_hf, hf_weights, _check_hf),
}


def check_engine(settings: Settings, model: Model, mesh: Mesh, sampling: Sampling, eval_sampling: Sampling) -> None:
    """Check that the engine of a flag can generate with the model.

    Args:
      mesh: the generate mesh.
      sampling, eval_sampling: of the completions to train on, and of those to evaluate.

    Raises:
      SettingsError: it cannot, or is not installed.
    """
    engine = given_flag(settings, "engine")
    abilities = settings.engines.abilities
    if abilities.servers:
        given = len(parts(settings.engines.engine_url))
        replicas = mesh.size(mesh.row_axes)
        if given != replicas or mesh.size("tensor") > 1:
            raise settings.refusal(
                "{engine_url}: {given} servers, which hold whole models, for the generate mesh {mesh}; give one for "
                "each of its {replicas} data ranks, and a --generate_mesh without tp",
                given=given,
                mesh=mesh,
                replicas=replicas,
            )
    elif mesh.size("tensor") > 1 and not abilities.tensor:
        raise SettingsError(f"{engine} holds whole weights; generate on a mesh without tp instead of {mesh}")
    if abilities.whole_only and settings.sampling.new_tokens_per_step is not None:
        raise settings.refusal("{new_tokens_per_step}: {engine} writes whole completions only", engine=engine)
    penalties = {sampling.repetition_penalty, eval_sampling.repetition_penalty} - {1.0}
    if penalties and not abilities.penalties:
        raise SettingsError(
            f"{engine}: a repetition_penalty of {penalties.pop()} would count the padding of shorter prompts; leave it "
            "out (--repetition_penalty, --eval_repetition_penalty), or use --engine=native"
        )
    with refusing(f"{engine}: ", ModelError, ImportError):
        MAKERS[settings.engines.engine].check(settings, model, mesh)


def adapters_apart(job: Job, policy: Model, device: str, note: Callable[[str], None] = lambda _: None) -> Lora | None:
    """The adapters of a policy that the engine adds to its base; None: it has none, or the engine gets merged weights.

    Args:
      note: receives the reason why an engine that adds adapters gets merged weights.
    """
    lora = added_adapters(policy)
    name = _engine_name(job, policy)
    if lora is None or policy.adapters is None or not ENGINES[name].adapters:
        return None
    problem = MAKERS[name].adapter_problem(policy.adapters.plain, lora, device, job.dtype)
    if problem is not None:
        note(f"{given_flag(job.settings, 'engine')} gets weights with merged adapters: {problem}")
    return lora if problem is None else None


def engine_base(job: Job, begin: Placed, stored: Placed, policy: Placed) -> Placed:
    """The model whose weights the policy's engine gets: whole ones, or the base in the form in which it is stored.

    Args:
      begin: the model that the run begins with.
      stored: the same as the trainer stores it, in 4 bits with --base_format=nf4; an engine that computes as the
        trainer does, and adds adapters to it, shares it.
      policy: as in `policy_generator`.
    """
    apart = adapters_apart(job, policy.model, policy.mesh.device.type) is not None
    return stored if apart and ENGINES[_engine_name(job, begin.model)].own_steps else begin


def policy_generator(job: Job, placed: Placed, policy: Placed, layer: Layer, note: Callable[[str], None]) -> Generator:
    """Make an engine for the policy, without weights yet. Every rank calls it.

    Args:
      placed: by `engine_base`.
      policy: the same with adapters, where the policy has some: the engine adds `adapters_apart` to the base, and
        gets others merged.
    """
    if (generators := job.settings.devices.generators) is not None:
        return _ray_generator(job, placed, generators.sizes)
    mesh = generating_mesh(job, placed.mesh)
    replicas = _replica_mesh(job, mesh)
    if not mesh.here:
        return _remote_generator(job, mesh, placed, policy)._replace(mesh=replicas)
    engine = MAKERS[_engine_name(job, placed.model)].make(job, EnginePlace(placed.model, mesh, layer, note))
    if lora := adapters_apart(job, policy.model, mesh.device.type, note):
        engine = cast(AdaptingEngine, engine)
        base = AdaptedBase(engine, placed, _plan_to(engine.weights, placed.stored, placed.mesh, job))
        adapted = AdapterEngine(engine, job.main_role, lora)
        to_engine = _plan_to(adapted.weights, trained_part(policy.model, policy.stored), placed.mesh, job)
        return Generator(adapted, replicas, to_engine, proof=SyncProof(), base=base)
    return Generator(engine, replicas, _plan_to(engine.weights, placed.stored, placed.mesh, job), proof=SyncProof())


def _engine_name(job: Job, model: Model) -> str:
    """The engine of a flag; one without pages for a model that has none, which is built but gets no weights."""
    name = job.settings.engines.engine
    if model.pages or ENGINES[name].unpaged:
        return name
    return next(other for other, abilities in ENGINES.items() if abilities.unpaged)


def with_agents(job: RLJob, generator: Generator, layer_of: Callable[[Model], Layer]) -> Generator:
    """The generator with engines of the other models of a job's agents, without weights yet.

    The trainer ranks see those of other ranks, but for models of directories, which are never sent.

    Args:
      layer_of: gives the layer that a model is computed with.
    """
    if generator.mesh.here:
        options = native_options(job)

        def make(model: Model) -> NativeEngine:
            layer = layer_of(model)
            return native_engine(
                model, generator.whole.weights.mesh, job.dtype, options=options, layer=layer, note=lambda _: None
            )

        frozen = {
            name: FrozenAgent(declared, make(job.agent_models.get(name, job.model)))
            for name, declared in job.agents.frozen.items()
        }
        return generator._replace(frozen=frozen, policies={name: make(job.model) for name in job.agents.policies})
    engine = cast(RemoteEngine, generator.whole)
    sent = {name: declared for name, declared in job.agents.frozen.items() if declared.directory is None}
    return generator._replace(
        frozen={name: FrozenAgent(declared, engine.of_model(name)) for name, declared in sent.items()},
        policies={name: engine.of_model(name) for name in job.agents.policies},
    )


def generating_mesh(job: Job, mesh: Mesh) -> Mesh:
    """The mesh to generate on: a view of that to train on, or one of other ranks. Every rank of the run calls it."""
    if job.placement is None:
        return view(mesh, job.generate_sizes)
    return submesh(mesh, job.placement.generate.sizes, job.placement.generate.ranks)


def _replica_mesh(job: Job, mesh: Mesh) -> Mesh:
    """The mesh to generate on as its replicas see it; see `replica_sizes`. Every rank of the run calls it."""
    sizes = replica_sizes(job.settings, mesh.sizes)
    return mesh if sizes == mesh.sizes else submesh(mesh, sizes, mesh.ranks)


def judging_mesh(job: RLJob, sizes: dict[str, int], mesh: Mesh, only: str | None) -> Mesh | None:
    """The mesh that the judge writes on; None: this rank is not in it. Called by every rank.

    Args:
      sizes: of that mesh.
      mesh: to train on, or that of the ranks of `only`.
      only: as of `build`.
    """
    placement = job.placement
    if placement is None:
        meshes = (mesh, generating_mesh(job, mesh))
        return next((own for own in meshes if own.sizes == sizes), None) or view(mesh, sizes)
    if JUDGE in placement.scoring:
        return mesh if only == JUDGE else None
    own = submesh(mesh, sizes, placement.train.ranks)
    return own if own.here else None


def _remote_generator(job: Job, mesh: Mesh, placed: Placed, policy: Placed) -> Generator:
    """The generator of other ranks, as a rank that trains sees it."""
    requests = Requests(placed.mesh)
    maker = MAKERS[_engine_name(job, placed.model)]
    lora = adapters_apart(job, policy.model, mesh.device.type)
    spec = _sent_form(job, placed.model, mesh)
    engine = RemoteEngine(spec, requests, base=lora is not None)
    to_engine = _plan_to(spec, placed.stored, placed.mesh, job)
    if lora is None:
        return Generator(cast(Engine, engine), mesh, to_engine, proof=SyncProof())
    factors = dataclasses.replace(maker.adapter_weights(placed.model, spec, lora), streamed=False)
    to_factors = _plan_to(factors, trained_part(policy.model, policy.stored), placed.mesh, job)
    adapter = RemoteEngine(factors, requests)
    base = AdaptedBase(cast(Engine, engine), placed, to_engine)
    return Generator(cast(Engine, adapter), mesh, to_factors, proof=SyncProof(), base=base)


def _ray_generator(job: Job, placed: Placed, sizes: dict[str, int]) -> Generator:
    """The generator of actors on Ray, which take weights as they are stored, adapters merged.

    Args:
      sizes: of the mesh of each.
    """
    outside = Mesh(sizes, rank=-1, device=placed.mesh.device, timeout=placed.mesh.timeout)
    form = _sent_form(job, placed.model, outside)
    engine = RayEngine(form, placed.stored, placed.mesh, patches=job.settings.engines.abilities.patches)
    dtypes = weight_dtypes(placed.stored, job.dtype)
    make_plan = functools.cache(functools.partial(plan, placed.stored, placed.stored, dtypes, ranks_per_node()))
    return Generator(cast(Engine, engine), outside, make_plan, proof=SyncProof())


def _sent_form(job: Job, model: Model, mesh: Mesh) -> WeightSpec:
    """The form in which an engine of other processes takes weights, whose parts are sent."""
    weights = MAKERS[_engine_name(job, model)].weights(model, mesh, job.dtype)
    return dataclasses.replace(weights, streamed=False, float8=job.settings.engines.float8)


def _plan_to(weights: WeightSpec, stored: trees.Tree, mesh: Mesh, job: Job) -> Callable[[], Plan]:
    """Maker of the plan from layouts on a mesh to those of an engine; thousands of ranks take seconds."""
    wanted = weights.layouts
    dtypes = weight_dtypes(wanted, job.dtype)
    ranks = {} if job.placement is None else {"src_ranks": mesh.ranks, "dst_ranks": weights.mesh.ranks}
    return functools.cache(functools.partial(plan, stored, wanted, dtypes, ranks_per_node(), **ranks))
