"""The engine that is transformers' own `generate`: a peer to compare with, slow and plain.

Its samples are not those of the native engine: transformers draws from a generator with a state, so they depend on how
prompts are split into calls. Its log-probabilities are computed again from the scores that `generate` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import SINGLE, Mesh, MeshError
from funrl.mesh.rules import GENERATE, layouts
from funrl.models.config import Config, config_to_hf
from funrl.models.model import Model
from funrl.models.names import EMBED, UNEMBED
from funrl.rollout.completions import Completions, Sampling, WeightSpec
from funrl.rollout.native import check_token_prompts, cut_completions


class HFEngine:
    """An `Engine` over a transformers model; made by `hf_engine`.

    Attributes:
      weights, version: as in `Engine`; names and shapes are those of transformers.
      model: the transformers model.
    """

    def __init__(self, config: Config, weights: WeightSpec, model: Any):
        self.weights, self.model = weights, model
        self.version: int | None = None
        self._config = config

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Copy whole weights into the transformers model; see `Engine`.

        Raises:
          KeyError: a name is missing, unknown, or given twice.
          RuntimeError: a shape does not fit.
        """
        self.version = None
        expected = {name: torch.empty(shape, device="meta") for name, shape in self.weights.names.values()}
        state = trees.from_named(expected, named_weights)
        if self._config.tied:
            state[UNEMBED] = state[EMBED]
        self.model.load_state_dict(state, strict=True)
        self.version = version

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights of the transformers model; see `Engine`."""
        held = self.model.state_dict()
        return ((name, held[name]) for name, _ in self.weights.names.values())

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, first_prompt: int = 0
    ) -> Completions:
        """Complete every prompt in one batch, padded on the left; see `Engine`.

        Raises:
          ValueError: a prompt is empty, too long, or has ids that are not in the vocabulary.
        """
        from transformers import GenerationConfig

        check_token_prompts(self._config, prompts, sampling)
        pad, width = self._config.pad or 0, max(len(p) for p in prompts)
        device = self.model.device
        # Repeated here, because transformers refuses to return several greedy sequences of a prompt.
        rows = [p for p in prompts for _ in range(sampling.samples)]
        tokens_BT = torch.tensor([[*[pad] * (width - len(p)), *p] for p in rows], device=device)
        mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in rows], device=device)
        how: dict[str, Any] = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        self.model.generation_config = GenerationConfig(
            do_sample=not sampling.greedy,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop) or None,
            pad_token_id=pad,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
            **({} if sampling.greedy else how),
        )
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(hash((seed, first_prompt)))
            out = self.model.generate(inputs=tokens_BT, attention_mask=mask_BT)
        tokens_RT = out.sequences[:, width:]

        def chosen(logits: tuple[Tensor, ...]) -> Tensor:
            return torch.stack(logits, 1).log_softmax(-1).gather(2, tokens_RT.unsqueeze(2)).squeeze(2)

        model_logp_RT = chosen(out.logits)
        logp_RT = model_logp_RT if sampling.greedy else chosen(out.scores)
        return cut_completions(sampling, pad, tokens_RT, logp_RT, model_logp_RT)


def hf_engine(model: Model, mesh: Mesh = SINGLE, dtype: torch.dtype = torch.float32) -> HFEngine:
    """An engine without weights yet (they are random until `load`).

    Args:
      model: a decoder.
      mesh: "tensor" has size 1; the weights are whole on every rank.
      dtype: of the weights.
    """
    if mesh.size("tensor") > 1:
        raise MeshError(f"the hf engine holds whole weights; generate on a mesh without tp instead of {mesh}")
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = config_to_hf(model.config)
    peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw.pop("model_type"), **raw))
    placed = layouts(model.shapes, model.axes, GENERATE, mesh.sizes)
    weights = WeightSpec(model.names, placed, mesh, dtype)
    return HFEngine(model.config, weights, peer.to(mesh.device, dtype).eval())
