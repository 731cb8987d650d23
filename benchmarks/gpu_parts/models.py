"""The models that are measured, as the config.json of their makers, and the jobs that train them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from gpu_parts.rows import Bench

from funrl import trees
from funrl.algos import grpo
from funrl.cost import dry_run
from funrl.cost.tracing.estimate import Estimate
from funrl.cost.tracing.hardware import USABLE
from funrl.models import Model
from funrl.trainer.jobs.job import Job
from funrl.trainer.settings.settings import settings_of

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
SIZES = {  # layers, embed, heads, key-value heads, head, mlp, vocabulary
    "1.7B": (28, 2048, 16, 8, 128, 6144, 151936),
    "0.2M": (2, 64, 4, 2, 16, 192, 1024),
    "0.2M, head 32": (2, 64, 2, 1, 32, 192, 1024),  # vLLM has no smaller heads on a CPU
}
QWEN25_7B = Path(__file__).parents[2] / "recipes/models/qwen2.5_7b.json"
ADAPTER_RANK = 16  # where all weights do not fit
REMATS = ("none", "selective", "full")
UPDATES, PIECES = 2, 2  # updates of a step, and micro-batches of each
PROMPT_SHARE = 4  # of a row a prompt is one in so many tokens


@contextmanager
def config_file(name: str) -> Iterator[str]:
    """Path of the config.json of a model."""
    if name == "7B":
        yield str(QWEN25_7B)
        return
    names = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(QWEN3 | dict(zip(names, SIZES[name], strict=True))))
        yield str(path)


def model_of(name: str) -> Model:
    """A model by its name in the table."""
    with config_file(name) as path:
        return dry_run.read_model(path)


def random_weights(model: Model, device: torch.device, dtype: torch.dtype) -> trees.Tree:
    """Weights of a model, made on the device."""
    generator = torch.Generator(device).manual_seed(0)
    return trees.map(
        lambda x: torch.randn(x.shape, generator=generator, device=device, dtype=dtype).mul_(0.02), model.shapes
    )


class Training(NamedTuple):
    """A step of GRPO without a reference: `UPDATES` updates of `PIECES` micro-batches.

    Attributes:
      model: its name in the table.
      tokens: of a micro-batch.
      row: tokens of a row.
      flags: that make it fit.
    """

    model: str
    tokens: int
    row: int
    flags: dict[str, Any]

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return UPDATES * PIECES * self.tokens // self.row

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.row // PROMPT_SHARE

    def job(self, bench: Bench, **flags: Any) -> Job:
        """The job, as the dry run makes it."""
        with config_file(self.model) as path:
            settings = settings_of(
                **{
                    "model": path,
                    "mesh": "dp1",
                    "generate_mesh": "dp1",
                    "dtype": "bfloat16",
                    "batch_prompts": self.rows // 2,
                    "samples_per_prompt": 2,
                    "max_new_tokens": self.row - self.prompt,
                    "token_budget": self.tokens,
                    "score_token_budget": self.tokens,
                    "minibatches": UPDATES,
                }
                | self.flags
                | flags
            )
            return dry_run.plain_job(settings, grpo(kl_coef=0.0), bench.hardware.memory)

    def estimate(self, bench: Bench, **flags: Any) -> Estimate:
        """The dry run of the job on this device."""
        return dry_run.estimate(self.job(bench, **flags), self.prompt, bench.hardware)


def peak_bytes(estimate: Estimate) -> float:
    """The most that a rank holds outside of generation, whose cache takes what is left."""
    return max(costs.total for name, costs in estimate.phases.items() if name != "generate")


def fitting(bench: Bench, model: str, tokens: int, row: int) -> tuple[Training | None, Estimate, str]:
    """The training with the least recomputation that fits the device, of all weights if possible, else of adapters.

    Returns: the training, or None where it does not fit; the last estimate; and a remark.
    """
    too_large = ""
    for rank in (None, ADAPTER_RANK):
        for remat in REMATS:
            training = Training(model, tokens, row, {"remat": remat, "lora_rank": rank})
            estimate = training.estimate(bench)
            held = peak_bytes(estimate)
            if held <= bench.hardware.memory * USABLE:
                return training, estimate, f"remat={remat}" + (f", adapters of rank {rank}{too_large}" if rank else "")
        too_large = f"; all weights would hold {held / 1e9:.0f} GB of {bench.hardware.memory / 1e9:.0f} GB"
    return None, estimate, f"adapters would hold {held / 1e9:.0f} GB{too_large}"
