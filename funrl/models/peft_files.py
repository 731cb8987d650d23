"""Directories of adapters as PEFT reads them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from funrl import trees
from funrl.models.families import FAMILIES
from funrl.models.lora import FIRST, SECOND, trained_part
from funrl.models.model import Model
from funrl.models.value_head import HEADS, is_token_classifier

BEGIN = "base_model.model."  # of every name in the file
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_peft(
    path: str | Path, model: Model, own: Mapping[str, Tensor], base: str | Path, tokenizer: Any = None
) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` loads beside its base.

    Where files of a family hold several projections as one tensor, its adapters are one: their factors A one below the
    other, and their factors B in blocks.

    Args:
      path: made where it is absent.
      model: with adapters.
      own: what learns, whole, by the names of `trained_part`.
      base: directory or name of the model that they stand on.
      tokenizer: anything with `save_pretrained`.
    """
    assert model.adapters is not None
    folder, lora = Path(path), model.adapters.lora
    folder.mkdir(parents=True, exist_ok=True)
    factors, tensors = _factors(model, own), {}
    for name, (a, b) in factors.items():
        tensors |= {f"{BEGIN}{name}.lora_A.weight": a, f"{BEGIN}{name}.lora_B.weight": b}
    tensors |= {BEGIN + there: own[name] for name, there in HEADS.items() if name in own}
    tensors = {name: x.detach().to("cpu").contiguous() for name, x in tensors.items()}
    partial = folder / f".{WEIGHTS}.partial"
    partial.write_bytes(b"")
    mode = partial.stat().st_mode  # the umask's; safetensors makes files that only their owner reads
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(mode)
    os.replace(partial, folder / WEIGHTS)
    ranks = {name.rpartition(".")[2]: len(a) for name, (a, _) in factors.items()}
    others = {name: rank for name, rank in sorted(ranks.items()) if rank != lora.rank}
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.value is None else "TOKEN_CLS" if is_token_classifier(model) else "SEQ_CLS",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {name: rank * lora.alpha / lora.rank for name, rank in others.items()},
        "modules_to_save": None if model.value is None else ["score"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _factors(model: Model, own: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The two factors of each adapted module of transformers, A [rank, in] and B [out, rank], by its name."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, _ in trees.named(trained_part(model, model.shapes)):
        if name.endswith(FIRST):
            first, second = (own[name.removesuffix(FIRST) + end] for end in (FIRST, SECOND))
            there = model.names[name][0].removesuffix(".lora_A.weight")
            found[there] = first.flatten(1), second.flatten(0, -2)
    family = FAMILIES.get(model.config.family)
    for whole, parts in (family.fused if family is not None else {}).items():
        ends = [part.removesuffix(".weight") for part in parts]
        whole = whole.removesuffix(".weight")
        rows = {end: _rows(model, end) for end in ends}
        for layer in {name.removesuffix(end) for name in found for end in ends if name.endswith(end)}:
            pairs = [(found.pop(layer + end, None), rows[end]) for end in ends]
            found[layer + whole] = _one(pairs)
    return found


def _rows(model: Model, end: str) -> int:
    """Rows of the matrices of a projection, such as "self_attn.q_proj"."""
    return next(shape[0] for there, shape in model.names.values() if there.endswith(f"{end}.weight"))


def _one(pairs: list[tuple[tuple[Tensor, Tensor] | None, int]]) -> tuple[Tensor, Tensor]:
    """The factors of one matrix made of several, one below the other, of which some have factors."""
    there = [pair for pair, _ in pairs if pair is not None]
    a = torch.cat([first for first, _ in there])
    empty = there[0][1].new_zeros
    return a, torch.block_diag(*(empty(rows, 0) if pair is None else pair[1] for pair, rows in pairs))
