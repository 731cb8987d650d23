"""Adapters as PEFT has them: names of projections, and directories with adapter_config.json and their weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from funrl import trees
from funrl.models.errors import ModelError
from funrl.models.huggingface.families import family_of
from funrl.models.huggingface.names import HEAD_NAMES, module_name, names_of
from funrl.models.huggingface.weight_files import read_json, read_table, save_tensors
from funrl.models.lora import (
    BY_EXPERT,
    FIRST,
    OF_SOME,
    OF_TOWERS,
    PROJECTIONS,
    ROUTED,
    SECOND,
    plain_name,
    trained_part,
)
from funrl.models.model import Model
from funrl.models.value_head import is_token_classifier
from funrl.models.vision.model import VISION

ALL_LINEAR = "all-linear"  # every projection of the layers
BEGIN = "base_model.model."  # of every name in the file
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
FACTOR_ENDS = (".lora_A.weight", ".lora_B.weight")
# Fields of adapter_config.json that change what adapters compute, with their values in plain LoRA.
PLAIN_LORA: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias"), (False, None)),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "layer_replication"), (None, [])),
}
# Names of weights that PEFT adapts as parameters, by the ends of their names there.
PARAMETERS: Mapping[str, str] = {
    "experts.gate_up_proj": "experts.gate_up_proj",
    "experts.down_proj": "experts.down_proj",
    "gate.weight": "router",
}
ROUTED_MODULES: Mapping[str, tuple[str, ...]] = {
    "router": ("router",),
    "experts": BY_EXPERT,
    "experts.gate_up_proj": ("expert_gate", "expert_up"),
    "experts.down_proj": ("expert_down",),
}
JOINT = ".base_layer"  # behind the name of the module of experts, where gates and ups are not its only adapters
MERGE_ADVICE = "merge it with peft's merge_and_unload() and give the saved model"


class PeftAdapter(NamedTuple):
    """Description of the adapters of a directory.

    Attributes:
      base: directory or name of the model that they stand on; "" if it is not said.
      rank, alpha: as in `Lora`.
      modules: last parts of the names of adapted modules, such as "q_proj".
      dropout: of the run that made them.
    """

    base: str
    rank: int
    alpha: float
    modules: tuple[str, ...]
    dropout: float


def projections(model: Model) -> dict[str, tuple[str, ...]]:
    """Names of the projections of a model as PEFT has them -> those of the weights here.

    A tensor that some family's files hold several weights in has a name too, such as "qkv_proj". In a vision tower they
    begin with "vision.", and "vision" is all of these.
    """
    names = {plain_name(name): weight for name, (weight, _) in names_of(model).items() if "/" in name}
    there = {name.rsplit("/", 1)[-1]: weight.rpartition(".")[0].rpartition(".")[2] for name, weight in names.items()}
    weights: dict[str, tuple[str, ...]] = {}
    for name in (*PROJECTIONS, *OF_SOME):
        if name in there:
            weights[there[name]] = (*weights.get(there[name], ()), name)
    for whole, parts in family_of(model.config.source.family).fused.items():
        own = [part.split(".")[-2] for part in parts]
        if set(own) <= weights.keys():
            weights[whole.split(".")[-2]] = tuple(weights[name][0] for name in own)
    towers: dict[str, dict[str, None]] = {}
    for name, weight in names.items():
        leaf = name.rsplit("/", 1)[-1]
        if name.startswith(f"{VISION}/") and leaf in OF_TOWERS:
            parts = weight.split(".")[:-1]
            last = ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])
            for module in (VISION, f"{VISION}.{last}"):
                towers.setdefault(module, {})[leaf] = None
    routed = ROUTED_MODULES if _joint_experts(names) else {}
    return {**weights, **{module: tuple(leaves) for module, leaves in towers.items()}, **routed}


def _joint_experts(names: Mapping[str, str]) -> bool:
    """True if PEFT can adapt a model's routers and experts in transformers: they are gated, without biases.

    Args:
      names: of the weights here -> those in files.
    """
    last = {name.rsplit("/", 1)[-1]: _of_transformers(there) for name, there in names.items()}
    files = last.get("router", ""), last.get("expert_gate", "")
    named = all(map(re.fullmatch, (r".*\.mlp\.gate\.weight", r".*\.mlp\.experts\.\w+\.weight"), files))
    return named and "expert_gate_bias" not in last


def targets_of(text: str, model: Model) -> tuple[str, ...]:
    """The weights that a list such as "q_proj,v_proj" or "all-linear" names.

    The latter has none of a vision tower, of routers and of routed experts; a shared expert is a dense mlp.

    Raises:
      ModelError: a name is not one of the model's projections, or is there twice.
    """
    there = projections(model)
    wanted = [part.strip() for part in text.split(",")]
    known = [weight for weights in there.values() for weight in weights]
    there[ALL_LINEAR] = (*PROJECTIONS, *(name for name in OF_SOME if name in known))
    for name in wanted:
        if name not in there:
            names = ", ".join(other for other in there if other != ALL_LINEAR)
            raise ModelError(f"{name!r} is not one of its projections: {ALL_LINEAR}, or some of {names}")
    weights = [weight for name in wanted for weight in there[name]]
    if len(set(weights)) < len(weights):
        raise ModelError("a projection is named twice")
    return tuple(name for name in (*PROJECTIONS, *OF_SOME, *OF_TOWERS, *ROUTED) if name in weights)


def write_peft(
    path: str | Path, model: Model, own: Mapping[str, Tensor], base: str | Path, tokenizer: Any = None
) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` loads beside its base.

    Where files of a family hold several projections as one tensor, its adapters are one: their factors A one below the
    other, and their factors B in blocks. So are those of gates and ups of experts, whose matrices transformers joins.

    Args:
      path: made where it is absent.
      model: with adapters.
      own: what learns, whole, by the names of `trained_part`.
      base: directory or name of the model that they stand on.
      tokenizer: anything with `save_pretrained`.
    """
    folder = Path(path)
    lora = model.lora
    folder.mkdir(parents=True, exist_ok=True)
    factors = _factors(model, own)
    tensors = {}
    for name, (a, b) in factors.items():
        tensors |= {f"{BEGIN}{name}.lora_A.weight": a, f"{BEGIN}{name}.lora_B.weight": b}
    tensors |= {BEGIN + there: own[name] for name, there in HEAD_NAMES.items() if name in own}
    tensors = {name: x.detach().to("cpu").contiguous() for name, x in tensors.items()}
    partial = folder / f".{ADAPTER_WEIGHTS}.partial"
    save_tensors(partial, tensors)
    os.replace(partial, folder / ADAPTER_WEIGHTS)
    parameters = _parameters(model)
    dense = {name: pair for name, pair in factors.items() if not name.removesuffix(JOINT).endswith(_ROUTED_ENDS)}
    ranks = {name.rpartition(".")[2]: len(a) for name, (a, _) in dense.items()}
    ranks |= {name: 2 * lora.rank for name in parameters if name.endswith("gate_up_proj")}
    others = {name: rank for name, rank in sorted(ranks.items()) if rank != lora.rank}
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.value is None else "TOKEN_CLS" if is_token_classifier(model) else "SEQ_CLS",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _target_modules(model, dense),
        "target_parameters": parameters,
        "rank_pattern": others,
        "alpha_pattern": {name: rank * lora.alpha / lora.rank for name, rank in others.items()},
        "modules_to_save": None if model.value is None else ["score"],
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _factors(model: Model, own: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The two factors of each adapted module of transformers, A [rank, in] and B [out, rank], by its name."""
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    names = names_of(model)
    for name, _ in trees.named(trained_part(model, model.shapes)):
        if name.endswith(FIRST):
            first, second = (own[name.removesuffix(FIRST) + end] for end in (FIRST, SECOND))
            there = _of_transformers(names[name][0].removesuffix(".lora_A.weight"))
            factors[there] = (
                (first, second) if first.ndim == second.ndim == 3 else (first.flatten(1), second.flatten(0, -2))
            )
    _join_experts(model, factors)
    for whole, parts in family_of(model.config.source.family).fused.items():
        ends = [part.removesuffix(".weight") for part in parts]
        whole = whole.removesuffix(".weight")
        rows = {end: _rows(model, end) for end in ends}
        for layer in {name.removesuffix(end) for name in factors for end in ends if name.endswith(end)}:
            pairs = [(factors.pop(layer + end, None), rows[end]) for end in ends]
            factors[layer + whole] = _one(pairs)
    return factors


_ROUTED_ENDS = (".mlp.gate", ".mlp.experts")


def _of_transformers(name: str) -> str:
    """The name of a module in transformers, from the one in files."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for of_files, kind in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = name.replace(f".experts.{of_files}", f".experts.{kind}")
    return name


def _parameters(model: Model) -> list[str]:
    """PEFT's `target_parameters` of a model's adapters."""
    targets = model.lora.targets
    return [f"mlp.{name}" for name, module in PARAMETERS.items() if set(ROUTED_MODULES[module]) <= set(targets)]


def _join_experts(model: Model, factors: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Replace the adapters of experts by those of PEFT's modules, in place; [E, r, in] and [E, out, r] by matrices."""
    down = "expert_down" in model.lora.targets
    for gate in [name for name in factors if name.endswith(".experts.gate_proj")]:
        experts = gate.removesuffix(".gate_proj")
        (a, b), (up_a, up_b) = factors.pop(gate), factors.pop(f"{experts}.up_proj")
        rank = a.shape[1]
        joined = torch.cat([F.pad(b, (0, rank)), F.pad(up_b, (rank, 0))], 1)
        factors[experts + JOINT * down] = _as_matrices(torch.cat([a, up_a], 1), joined)
    for name in [name for name in factors if name.endswith(".experts.down_proj")]:
        factors[name.removesuffix(".down_proj")] = _as_matrices(*factors.pop(name))


def _as_matrices(a_ERK: Tensor, b_ENR: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of experts as PEFT has them: [E r, in], expert by expert, and [out, r E], rank by rank."""
    return a_ERK.flatten(0, 1), b_ENR.permute(1, 2, 0).flatten(1)


def _split_experts(model: Model, tensors: dict[str, Tensor], file: Path) -> None:
    """Replace PEFT's adapters of experts by those of each kind of matrix, in place.

    Gates and ups may share one A, as PEFT makes them, or have one each.

    Raises:
      ModelError: the shapes are those of another model or rank.
    """
    lora = model.lora
    if not set(lora.targets).intersection(BY_EXPERT):
        return
    names = names_of(model)
    for name, (theirs, shape) in names.items():
        leaf = name.rsplit("/", 1)[-1]
        kind = leaf.removesuffix(FIRST)
        if kind not in ("expert_gate", "expert_down") or leaf == kind:
            continue
        theirs = _of_transformers(theirs)
        experts = theirs.partition(".experts.")[0] + ".experts"
        module = experts + JOINT * (kind == "expert_gate" and "expert_down" in lora.targets)
        first, second = (tensors.pop(module + end, None) for end in FACTOR_ENDS)
        if first is None or second is None:
            raise ModelError(f"{file}: {BEGIN}{module} has no adapters; those of some layers alone are not supported")
        (E, rank, K) = shape
        if first.shape[0] % E or second.shape[1] != first.shape[0] or first.shape[1] != K:
            raise ModelError(
                f"{file}: {BEGIN}{module} has shapes {[*first.shape]} and {[*second.shape]} for {E} experts"
            )
        a = first.view(E, -1, K)
        b = second.view(len(second), -1, E).permute(2, 0, 1)
        parts = [(theirs, a, b)]
        if kind == "expert_gate":
            up = theirs.replace("gate_proj", "up_proj")
            gate_b, up_b = b.chunk(2, 1)
            shared = a.shape[1] == rank
            low, high = (slice(rank), slice(rank)) if shared else (slice(rank), slice(rank, None))
            apart = shared or not (gate_b[..., rank:].any() or up_b[..., :rank].any())
            if not apart or a.shape[1] not in (rank, 2 * rank):
                raise ModelError(f"the adapter of {module} has rank {a.shape[1]}, supported is {rank}; {MERGE_ADVICE}")
            parts = [(theirs, a[:, low], gate_b[..., low]), (up, a[:, high], up_b[..., high])]
        for there, part_a, part_b in parts:
            tensors[there] = part_a.contiguous()
            tensors[there.replace(".lora_A.", ".lora_B.")] = part_b.contiguous()


def _target_modules(model: Model, adapted: Collection[str]) -> list[str]:
    """Last parts of the names of adapted modules; whole names where others end so too, or the part is a number."""
    weights = (module_name(model.config.source.family, there) for there, _ in names_of(model).values())
    others = {name.removesuffix(".weight") for name in weights} - set(adapted)
    shared = {name.rpartition(".")[2] for name in others}
    lasts = {name: name.rpartition(".")[2] for name in adapted}
    return sorted({name if last in shared or last.isdigit() else last for name, last in lasts.items()})


def _rows(model: Model, end: str) -> int:
    """Rows of the matrices of a projection, such as "self_attn.q_proj"."""
    return next(shape[0] for there, shape in names_of(model).values() if there.endswith(f"{end}.weight"))


def _one(pairs: list[tuple[tuple[Tensor, Tensor] | None, int]]) -> tuple[Tensor, Tensor]:
    """The factors of one matrix made of several, one below the other; some of them have factors."""
    there = [pair for pair, _ in pairs if pair is not None]
    a = torch.cat([first for first, _ in there])
    empty = there[0][1].new_zeros
    return a, torch.block_diag(*(empty(rows, 0) if pair is None else pair[1] for pair, rows in pairs))


def is_adapter(folder: Path) -> bool:
    """True of a directory that holds adapters alone."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def describe_adapter(path: str | Path) -> PeftAdapter:
    """Read adapter_config.json and the names of the tensors beside it.

    Raises:
      ModelError: a file is missing or broken, or these are not adapters as `lora.with_lora` has them.
    """
    folder = Path(path)
    raw = read_json(folder / ADAPTER_CONFIG)
    for name, values in PLAIN_LORA.items():
        if raw.get(name) not in values:
            wrong = f"{name} is {raw.get(name)!r}, supported is {values[0]!r}"
            raise ModelError(f"{folder / ADAPTER_CONFIG}: {wrong}; {MERGE_ADVICE}")
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    base = raw.get("base_model_name_or_path")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ModelError(f"{folder / ADAPTER_CONFIG}: r is {rank!r} and lora_alpha {alpha!r}, both must be above 0")
    _check_patterns(folder, raw)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{folder / ADAPTER_WEIGHTS} is missing; other formats of adapters are not read")
    names = [name.removeprefix(BEGIN) for name in read_table(folder / ADAPTER_WEIGHTS)]
    adapted = {name.removesuffix(end) for end in FACTOR_ENDS for name in names if name.endswith(end)}
    dense = {name for name in adapted if not name.removesuffix(JOINT).endswith(_ROUTED_ENDS)}
    modules = {name.rpartition(".")[2] for name in dense} | _routed_modules(folder, raw, adapted - dense)
    if not modules:
        raise ModelError(f"{folder / ADAPTER_WEIGHTS} holds no adapters")
    scale = rank**0.5 if raw.get("use_rslora") else 1.0
    dropout = float(raw.get("lora_dropout") or 0.0)
    return PeftAdapter(
        base if isinstance(base, str) else "", rank, float(alpha) * scale, tuple(sorted(modules)), dropout
    )


def _routed_modules(folder: Path, raw: Mapping[str, Any], adapted: Collection[str]) -> set[str]:
    """Names in `ROUTED_MODULES` of what an adapter adapts of routers and experts.

    Raises:
      ModelError: it adapts other parameters.
    """
    modules = {"router" for name in adapted if name.endswith(".gate")}
    for parameter in raw.get("target_parameters") or ():
        known = [module for end, module in PARAMETERS.items() if f".{parameter}".endswith(f".{end}")]
        if not known:
            wrong = f"target_parameters has {parameter!r}, supported are {', '.join(PARAMETERS)}"
            raise ModelError(f"{folder / ADAPTER_CONFIG}: {wrong}; {MERGE_ADVICE}")
        modules |= {*known}
    return modules


def _check_patterns(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError unless alpha / rank is the same in all modules."""
    ranks, alphas = ({**(raw.get(name) or {})} for name in ("rank_pattern", "alpha_pattern"))
    for module in {*ranks, *alphas}:
        rank, alpha = ranks.get(module, raw["r"]), alphas.get(module, raw["lora_alpha"])
        if alpha * raw["r"] != raw["lora_alpha"] * rank:
            raise ModelError(
                f"{folder / ADAPTER_CONFIG}: {module} has alpha {alpha} and rank {rank}, other modules have "
                f"{raw['lora_alpha']} and {raw['r']}; one ratio of them is supported; {MERGE_ADVICE}"
            )


def read_adapter(path: str | Path, model: Model) -> dict[str, Tensor]:
    """Whole tensors of what learns, by the names of `trained_part`; a value head that the file lacks is left out.

    Args:
      path: a directory that `describe_adapter` has read.
      model: with adapters.

    Raises:
      ModelError: a tensor is missing, unexpected, of another shape or not finite.
    """
    file = Path(path) / ADAPTER_WEIGHTS
    tensors = {name.removeprefix(BEGIN): x for name, x in load_file(file).items()}
    _split_fused(model, tensors)
    _split_experts(model, tensors, file)
    names = names_of(model)
    own: dict[str, Tensor] = {}
    for name, x in trees.named(trained_part(model, model.shapes)):
        there, shape = names[name]
        there = _of_transformers(there)
        if there not in tensors and name in HEAD_NAMES:
            continue
        if there not in tensors:
            raise ModelError(f"{file}: {BEGIN}{there} is missing; adapters of some layers alone are not supported")
        stored = tensors.pop(there)
        if tuple(stored.shape) != shape:
            raise ModelError(f"{file}: {BEGIN}{there} has shape {[*stored.shape]}, the model needs {[*shape]}")
        if not torch.isfinite(stored).all():
            raise ModelError(f"{file}: {BEGIN}{there} has numbers that are NaN or infinite")
        own[name] = stored.reshape(x.shape)
    if tensors:
        first = f"{BEGIN}{min(tensors)}"
        raise ModelError(f"{file}: {len(tensors)} tensors have no place in the model, the first is {first}")
    return own


def _split_fused(model: Model, tensors: dict[str, Tensor]) -> None:
    """Replace adapters of one matrix made of several by those of each, in place.

    They share one A, unless it has rows of each and B is in blocks, as `write_peft` makes them.
    """
    first, second = FACTOR_ENDS
    for whole, parts in family_of(model.config.source.family).fused.items():
        end = whole.removesuffix(".weight")
        ends = [part.removesuffix(".weight") for part in parts]
        for layer in [name.removesuffix(end + first) for name in tensors if name.endswith(end + first)]:
            a, b = tensors.pop(layer + end + first), tensors.pop(layer + end + second)
            rank = model.lora.rank
            groups = [slice(i, i + rank) for i in range(0, len(a), rank)]
            for number, (part, block) in enumerate(
                zip(ends, b.split([_rows(model, part) for part in ends]), strict=True)
            ):
                used = [i for i, group in enumerate(groups) if block[:, group].any()]
                own = number if len(groups) == len(ends) else (used or [0])[0]
                if set(used) - {own}:
                    raise ModelError(
                        f"the adapter of {layer + end} has rank {len(a)}, supported is {rank}; {MERGE_ADVICE}"
                    )
                tensors[layer + part + first] = a[groups[own]]
                tensors[layer + part + second] = block[:, groups[own]]
