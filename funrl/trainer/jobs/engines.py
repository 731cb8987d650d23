"""Makers of engines by the value of `--engine`, and checks that the engine of a run can generate with its model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from funrl.mesh.mesh import Mesh
from funrl.models import Model
from funrl.models.errors import ModelError
from funrl.models.model import Layer
from funrl.models.weight_dtypes import TORCH_DTYPES
from funrl.rollout.engine import Engine, WeightSpec
from funrl.rollout.hf_engine import hf_engine, hf_weights
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.native.loading import native_weights
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm.client import vllm_client
from funrl.rollout.vllm.core import check_vllm
from funrl.rollout.vllm.engine import VLLMOptions, vllm_engine, vllm_weights
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.sharding import driven_generate_sizes
from funrl.trainer.lowered.backend import make_engine_backend
from funrl.trainer.settings.declaration import SettingsError, parts
from funrl.trainer.settings.settings import Settings, given_flag

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
    """

    make: Callable[[Job, EnginePlace], Engine]
    weights: Callable[[Model, Mesh, torch.dtype], WeightSpec]
    check: Callable[[Settings, Model, Mesh], None] = lambda settings, model, mesh: None


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
        snapshot_tokens=engines.state_snapshot_tokens,
        engines=1 + len(job.agents.frozen) + len(job.agents.policies),
        static=None if make_backend is None else True,
        make_backend=make_backend,
    )


def cache_bytes(settings: Settings) -> int:
    """Bytes of a rank's keys and values; 0: the engine chooses."""
    return round((settings.engines.kv_cache_gb or 0) * 1e9)


def _vllm_options(job: Job, mesh: Mesh) -> VLLMOptions:
    mode = job.settings.models.compile
    compiled = mode == "on" or (mode == "auto" and mesh.device.type == "cuda")
    decode = job.tokenizer and functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    return VLLMOptions(job.settings.engines.decode_rows, cache_bytes(job.settings), compiled, decode=decode)


def _make_native(job: Job, place: EnginePlace) -> Engine:
    model, mesh, layer, note = place
    return native_engine(model, mesh, job.dtype, options=native_options(job), layer=layer, note=note)


def _make_vllm(job: Job, place: EnginePlace) -> Engine:
    return vllm_engine(place.model, place.mesh, job.dtype, options=_vllm_options(job, place.mesh))


def _make_vllm_client(job: Job, place: EnginePlace) -> Engine:
    engines = job.settings.engines
    mesh = place.mesh
    url = parts(engines.engine_url)[int(mesh.index(mesh.row_axes))]
    timeout_s = engines.engine_timeout or ENGINE_TIMEOUT_S
    return vllm_client(url, place.model, mesh, job.dtype, options=_vllm_options(job, mesh), timeout_s=timeout_s)


def _make_hf(job: Job, place: EnginePlace) -> Engine:
    return hf_engine(place.model, place.mesh, job.dtype)


def _check_vllm(settings: Settings, model: Model, mesh: Mesh) -> None:
    dtype = TORCH_DTYPES[settings.models.dtype]
    check_vllm(model, mesh.device.type, dtype, mesh.size("tensor"), cache_bytes(settings))


def _check_hf(settings: Settings, model: Model, mesh: Mesh) -> None:
    if settings.models.dtype == "float64":
        raise ModelError("transformers' generate gives float32 at most; use --dtype=float32")


MAKERS = {  # by the value of --engine; their abilities are in `engine_abilities.ENGINES`
    "native": EngineMaker(_make_native, native_weights),
    "vllm": EngineMaker(_make_vllm, vllm_weights, _check_vllm),
    "vllm_server": EngineMaker(_make_vllm_client, vllm_weights),  # a server says what it cannot do on its own device
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
    try:
        MAKERS[settings.engines.engine].check(settings, model, mesh)
    except (ModelError, ImportError) as error:
        raise SettingsError(f"{engine}: {error}") from error
