"""An engine over transformers' own `generate`: a plain and slow peer to compare with.

Its samples differ from the native engine's: transformers samples with a stateful generator, so they depend on how
prompts are split into calls. Log-probabilities are recomputed from the scores that `generate` returns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import SINGLE, Mesh, MeshError
from funrl.mesh.rules import GENERATE, layouts
from funrl.models.errors import ModelError
from funrl.models.huggingface.config import config_to_hf
from funrl.models.huggingface.names import fused, names_of, stored_in
from funrl.models.model import Model, ModelConfig
from funrl.rollout.engine import EngineCost, WeightSpec
from funrl.rollout.load_digest import LoadDigest
from funrl.rollout.requests import Completion, LogitsError, Request, check_requests
from funrl.rollout.sampling_parameters import Sampling

NOT_FINITE = "the model's logits are not finite: its weights are damaged, or it has diverged"
MOST_ROWS = 512  # bound on the requests completed together


class HFEngine:
    """An `Engine` over a transformers model; made by `hf_engine`.

    Attributes:
      weights, version, paused: as in `Engine`; names and shapes are those of transformers.
      record_digests: whether completions have the digests of the weights that sampled their tokens.
    """

    def __init__(self, config: ModelConfig, weights: WeightSpec):
        self.weights = weights
        self.version = None
        self.paused = False
        self.record_digests = False
        self._loaded = LoadDigest(weights, self.held_weights)
        self._config = config
        self._stored = stored_in(config.source.family, weights.names)
        self._waiting: list[Request] = []
        self._passes = self._decoded = 0

    @functools.cached_property
    def model(self) -> Any:
        """The transformers model, created on first use."""
        from transformers import AutoConfig, AutoModelForCausalLM

        raw = config_to_hf(self._config)
        with torch.random.fork_rng(devices=[]):
            peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw.pop("model_type"), **raw))
        return peer.to(self.weights.mesh.device, self.weights.dtype).eval()

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Copy whole weights into the transformers model; see `Engine`.

        Raises:
          KeyError: a name is missing, unknown, or given twice.
          RuntimeError: a shape does not fit.
        """
        self.version = None
        expected = {name: torch.empty(shape, device="meta") for name, shape in self.weights.names.values()}
        state = trees.from_named(expected, named_weights)
        tensors = dict(fused(self._config.source.family, self.weights.names, state.items()))
        result = self.model.load_state_dict(tensors, strict=False)  # a tied unembedding is loaded with the embedding
        lacking = set(result.missing_keys) - set(self.model.all_tied_weights_keys)
        if lacking or result.unexpected_keys:
            raise KeyError(f"unexpected weights: {result.unexpected_keys}; missing weights: {sorted(lacking)}")
        self._loaded = LoadDigest(self.weights, self.held_weights)
        self.version = version

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights of the transformers model; see `Engine`."""
        held = self.model.state_dict()
        names = self.weights.names
        return (
            (there, held[stored.name][slice(*stored.rows)] if shape else held[stored.name])
            for (there, shape), stored in zip(names.values(), (self._stored[name] for name in names), strict=True)
        )

    def take_digests(self, digests: Mapping[str, Tensor]) -> None:
        """Take digests of the weights; see `Engine`."""
        self._loaded.take(digests)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if this engine cannot complete one of the requests."""
        check_requests(self._config, requests, {request.number for request in self._waiting})
        for request in requests:
            if request.begun is not None or request.most is not None:
                raise ValueError(f"request {request.number}: the hf engine completes whole requests only")
        for sampling in {request.sampling for request in requests}:
            together = [request for request in [*self._waiting, *requests] if request.sampling == sampling]
            _check_options([request.prompt for request in together], sampling)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; see `Engine`."""
        self.check(requests)
        self._waiting += requests

    def step(self) -> list[Completion]:
        """Complete requests with the sampling parameters of the first, in one left-padded batch; see `Engine`."""
        if self.paused or not self._waiting:
            return []
        if self.version is None:
            raise RuntimeError("the engine has no weights: call load first")
        sampling = self._waiting[0].sampling
        together = [request for request in self._waiting if request.sampling == sampling][:MOST_ROWS]
        numbers = {request.number for request in together}
        self._waiting = [request for request in self._waiting if request.number not in numbers]
        self._passes += 1
        try:
            return self._complete(together, sampling)
        except LogitsError as error:
            self._waiting += [request for request in together if request.number not in error.numbers]
            raise

    def unfinished(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def sampled(self, number: int, begin: int = 0) -> list[int]:
        """Nothing: requests are completed whole."""
        return []

    def room(self) -> int:
        """Number of further requests that fit into the next batch."""
        return max(0, MOST_ROWS - len(self._waiting))

    def reserve(self, tokens: int) -> None:
        """Do nothing: a batch has a cache of its own."""

    def cancel(self, numbers: Iterable[int]) -> list[Completion]:
        """Cancel requests; see `Engine`."""
        wanted = set(numbers)
        gone = [request for request in self._waiting if request.number in wanted]
        self._waiting = [request for request in self._waiting if request.number not in wanted]
        none = torch.zeros(0, dtype=torch.promote_types(self.weights.dtype, torch.float32))
        return [
            Completion(r.number, none.long(), none, raw_logp=none, versions=none.long(), finish="cancelled")
            for r in gone
        ]

    def pause(self) -> None:
        """Make `step` do nothing until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """Allow `step` again after `pause`."""
        self.paused = False

    def cost(self) -> EngineCost:
        """Counts of its work. transformers creates a new cache for each batch."""
        return EngineCost(
            0,
            0,
            0,
            used_pages=0,
            peak_pages=0,
            rows=len(self._waiting),
            passes=self._passes,
            prefilled=0,
            cached=0,
            decoded=self._decoded,
            preempted=0,
        )

    @torch.no_grad()
    def _complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        from transformers import GenerationConfig

        pad = self._config.special_tokens.pad or 0
        width = max(len(request.prompt) for request in requests)
        device = self.model.device
        prompts = [list(request.prompt) for request in requests]
        tokens_BT = torch.tensor([[*[pad] * (width - len(p)), *p] for p in prompts], device=device)
        mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        options = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        self.model.generation_config = GenerationConfig(
            do_sample=not sampling.greedy,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop) or None,
            pad_token_id=pad,
            repetition_penalty=float(sampling.repetition_penalty),
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
            **({} if sampling.greedy else options),
        )
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(hash(tuple(request.seed for request in requests)))
                out = self.model.generate(inputs=tokens_BT, attention_mask=mask_BT)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            if len(requests) == 1:
                raise LogitsError(NOT_FINITE, [requests[0].number]) from error
            return [done for request in requests for done in self._complete([request], sampling)]  # which one it is
        tokens_RT = out.sequences[:, width:]

        def chosen(logits: tuple[Tensor, ...]) -> Tensor:
            return torch.stack(logits, 1).log_softmax(-1).gather(2, tokens_RT.unsqueeze(2)).squeeze(2).cpu()

        raw_RT = chosen(out.logits)
        sampling_RT = raw_RT if sampling.greedy else chosen(out.scores)
        digest = self._loaded.number if self.record_digests else None
        done = []
        failed = []
        for row, request in enumerate(requests):
            stops = [place for place, token in enumerate(tokens_RT[row].tolist()) if token in sampling.stop]
            count = stops[0] + 1 if stops else tokens_RT.shape[1]
            if not raw_RT[row, :count].isfinite().all():
                failed.append(request.number)
            self._decoded += count
            done.append(
                Completion(
                    request.number,
                    tokens_RT[row, :count].cpu(),
                    sampling_RT[row, :count],
                    raw_logp=raw_RT[row, :count],
                    versions=torch.full((count,), self.version or 0),
                    finish="stop" if stops else "length",
                    digests=None if digest is None else torch.full((count,), digest),
                )
            )
        if failed:
            raise LogitsError(NOT_FINITE, failed)
        return done


def _check_options(prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    if sampling.stop_strings:
        raise ValueError(f"stop_strings is {sampling.stop_strings}: the hf engine knows no texts; use stop")
    if sampling.repetition_penalty != 1 and len({len(p) for p in prompts}) > 1:
        raise ValueError(
            f"repetition_penalty is {sampling.repetition_penalty}: transformers would penalise the padding of shorter "
            "prompts too; give the hf engine prompts of one length"
        )


def hf_engine(model: Model, mesh: Mesh = SINGLE, dtype: torch.dtype = torch.float32) -> HFEngine:
    """An engine without weights yet (they are random until `load`).

    Args:
      model: a decoder, or transformers' own code.
      mesh: with "tensor" of size 1; every rank holds the whole weights.
      dtype: of the weights.

    Raises:
      MeshError: the mesh has tensor ranks.
      ModelError: the model has experts.
    """
    if model.abilities.routers is not None and not model.abilities.code:
        family = model.config.source.family
        raise ModelError(f"transformers' engine takes no experts, which a {family} has: use native_engine")
    if mesh.size("tensor") > 1:
        raise MeshError(f"the hf engine holds whole weights; generate on a mesh without tp instead of {mesh}")
    return HFEngine(model.config, hf_weights(model, mesh, dtype))


def hf_weights(model: Model, mesh: Mesh, dtype: torch.dtype) -> WeightSpec:
    """The form in which transformers takes weights: whole, by Hugging Face names; also outside `mesh`."""
    placed = layouts(model.shapes, model.axes, GENERATE, sizes=mesh.sizes)
    return WeightSpec(names_of(model), placed, mesh, dtype=dtype)
