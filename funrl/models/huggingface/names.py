"""Names and shapes of weights in Hugging Face files."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.models.errors import ModelError
from funrl.models.huggingface.config import ModuleConfig
from funrl.models.huggingface.configs.delta_nets import NESTED_PREFIX, TEXT_PARTS
from funrl.models.huggingface.configs.hf_family import UNEMBED
from funrl.models.huggingface.families import family_of
from funrl.models.lora import BY_EXPERT, FIRST, SECOND, plain_name
from funrl.models.model import Model
from funrl.models.value_head import HEAD, HEAD_BIAS
from funrl.models.vision.model import VISION

Names = Mapping[str, tuple[str, tuple[int, ...]]]  # of a weight here -> name and shape of the same weight elsewhere
_OF_HEADS = (
    *("q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "q_b", "kv_b"),
    *("qkvz", "ba", "conv_q", "conv_k", "conv_v", "in_q", "in_k", "in_v", "in_z", "in_b", "in_a"),
)

_LAYER = {
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "attn_out_norm": "post_attention_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.gate_proj.weight",
    "expert_up": "mlp.experts.up_proj.weight",
    "expert_down": "mlp.experts.down_proj.weight",
}
HEAD_NAMES = {HEAD: "score.weight", HEAD_BIAS: "score.bias"}  # in ForSequence- and ForTokenClassification
_EXPERTS = ".experts."  # in the name of all experts' tensor; the file has one a number, ".experts.7."
_NAMES_IN_TRANSFORMERS = {".block_sparse_moe.": ".mlp.", ".mlp.moe_statics.": ".mlp.gate.moe_statics."}
_TOP = {
    "embed": "embed_tokens.weight",
    "norm": "norm.weight",
    "embed_per_layer": "embed_tokens_per_layer.weight",
    "embed_projection": "per_layer_model_projection.weight",
    "embed_projection_norm": "per_layer_projection_norm.weight",
}
_MLP_NORM_OF_FOUR = "pre_feedforward_layernorm.weight"


def names_of(model: Model) -> Names:
    """For each weight of a model its name and shape in transformers; some neighbouring dims may be merged there.

    A tensor here may be the one there with the heads as a dim of their own. The experts of a layer are one tensor here;
    a file has one each, by the names of `expert_names`. A file may hold several weights as one tensor: `stored_in`. The
    factors of adapters have the names of PEFT's files, less what these begin with; those of experts, which PEFT has as
    one, have names like them.

    Example: {"layers/0/attn/q": ("model.layers.0.self_attn.q_proj.weight", (H * N, D)), ...}
    """
    shapes = {name: tuple(x.shape) for name, x in trees.named((model.whole or model).shapes)}
    config = model.config
    names: dict[str, tuple[str, tuple[int, ...]]] = {}
    own = isinstance(config, ModuleConfig)
    theirs = _module_names(config) if own else _decoder_names(shapes, config.source.family)
    in_rows = family_of(config.source.family).in_rows

    def merged(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if own:
            return shape
        return (1, *shape) if name.rsplit("/", 1)[-1] in in_rows else _hf_shape(name, shape)

    for name, shape in shapes.items():
        weight = name.removesuffix(FIRST).removesuffix(SECOND)
        if name in HEAD_NAMES:
            names[name] = HEAD_NAMES[name], shape
        elif weight == name:
            names[name] = theirs(plain_name(name)), merged(name, shape)
        else:
            file = module_name(config.source.family, theirs(plain_name(weight)).removesuffix(".weight"))
            if weight.rsplit("/", 1)[-1] in BY_EXPERT:
                end = ".lora_A.weight" if name.endswith(FIRST) else ".lora_B.weight"
                names[name] = file + end, shape
                continue
            rows, columns = _hf_shape(weight, shapes[weight])
            if name.endswith(FIRST):
                names[name] = f"{file}.lora_A.weight", (shape[0], columns)
            else:
                names[name] = f"{file}.lora_B.weight", (rows, shape[-1])
    return names


def module_name(family: str, name: str) -> str:
    """The name in transformers of a module of a family, by the beginning of the names of its weights in files."""
    vision = family_of(family).vision
    modules = {} if vision is None else vision.modules
    begin = next((x for x in modules if name.startswith(x)), "")
    return modules.get(begin, begin) + name.removeprefix(begin)


def _module_names(config: ModuleConfig) -> Callable[[str], str]:
    """The name in transformers of each weight of a model that transformers' own code computes."""
    from funrl.models.huggingface.skeletons import CPU, skeleton

    module = skeleton(config, CPU, False)

    def theirs(name: str) -> str:
        part, *rest = name.split("/")
        if part == "unembed":
            return module.head
        return module.prefix + (rest[0] if part == "base" else f"{module.layers_at}{rest[0]}.{rest[1]}")

    return theirs


def _decoder_names(shapes: Iterable[str], family: str) -> Callable[[str], str]:
    """The name in transformers of each weight of a decoder."""
    layer = {**_LAYER, **family_of(family).names}
    if any(name.endswith("mlp_out_norm") for name in shapes):  # else norms before and behind would have one name
        layer["mlp_norm"] = _MLP_NORM_OF_FOUR

    vision = family_of(family).vision
    prefix, unembed = ("model.", UNEMBED) if vision is None else (vision.prefix, vision.unembed)

    def theirs(name: str) -> str:
        parts = name.split("/")
        if parts[0] == VISION:
            if vision is None:
                raise ModelError(f"a {family} directory has no place for a vision tower")
            return vision.name("/".join(parts[1:]))
        if name == "unembed":
            return unembed
        return prefix + (_TOP[name] if len(parts) == 1 else f"layers.{parts[1]}.{layer[parts[-1]]}")

    return theirs


class Stored(NamedTuple):
    """Place of a weight in a file.

    Attributes:
      name, shape: of the file's tensor.
      rows: range of its first dim that is the weight: first, and one past the last.
      experts: names of the file's tensors, each of the shape of one of the weight's first dim; (): it is `name`.
      turn: of tensors whose numbers along the last dim are those of several weights in turn, matrices transposed: the
        number of this one, and how many there are; None: it is no such tensor.
      columns: of tensors that hold transposed matrices side by side, range of the last dim that is the weight: first
        and last but one; None: it is no such tensor. A file may hold the transpose of such a tensor, as
        transformers saves it.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    experts: tuple[str, ...] = ()
    turn: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the file's tensors."""
        return dict.fromkeys(self.experts, self.shape[1:]) if self.experts else {self.name: self.shape}

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True of the shape of a file's tensor, if it is one."""
        wanted = self.shape[1:] if self.experts else self.shape
        return shape == wanted or (self.columns is not None and shape == (wanted[0], *wanted[:0:-1]))


def expert_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Names in a file of the parts of a tensor of all experts; () of any other tensor.

    Example: ("layers.0.mlp.experts.up_proj.weight", (2, 8, 4)) -> ("layers.0.mlp.experts.0.up_proj.weight", ...)
    """
    one_each = _EXPERTS in name and name.endswith(".weight")
    return tuple(name.replace(_EXPERTS, f"{_EXPERTS}{i}.") for i in range(shape[0])) if one_each else ()


def by_expert(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of `names_of`, with one tensor for each expert."""
    for name, x in named:
        names = expert_names(name, tuple(x.shape))
        yield from zip(names, x.unbind(), strict=True) if names else [(name, x)]


def stored_in(family: str, names: Names) -> Mapping[str, Stored]:
    """For each weight of `names_of`, where a file has it: some families' files hold several as one tensor.

    Example: {"layers/0/attn/k": Stored("model.layers.0.self_attn.qkv_proj.weight", (3 * H * N, D), (H * N, 2 * H * N))}
    """
    shapes = dict(names.values())
    places = {}
    for whole, (kind, parts) in _joint_tensors(family, shapes).items():
        first = shapes[parts[0]]
        if kind == "woven":
            shape = tuple(weave([torch.empty(shapes[part], device="meta") for part in parts]).shape)
            turns = [Stored(whole, shape, (0, shape[0]), turn=(i, len(parts))) for i in range(len(parts))]
            places |= zip(parts, turns, strict=True)
            continue
        dim = 0 if kind == "fused" else 1
        edges = list(itertools.accumulate((shapes[part][dim] for part in parts), initial=0))
        for part, edge in zip(parts, itertools.pairwise(edges), strict=True):
            if kind == "fused":
                places[part] = Stored(whole, (edges[-1], *first[1:]), edge)
            else:
                places[part] = Stored(whole, (first[0], first[2], edges[-1]), (0, first[0]), columns=edge)
    return {
        ours: places.get(theirs)
        or Stored(theirs, shape, (0, math.prod(shape[:1])), experts=expert_names(theirs, shape))
        for ours, (theirs, shape) in names.items()
    }


def places_in_files(model: Model, found: Collection[str]) -> Mapping[str, Stored]:
    """Place of each weight in files with tensors of the names `found`.

    Files for transformers' own code may have older names than it has now. Files of a model with a vision tower have the
    text part under names of its own. The experts of a layer may be one tensor or one each.
    """
    config = model.config
    names = names_of(model)
    places = stored_in(config.source.family, names)
    if isinstance(config, ModuleConfig):
        from funrl.models.huggingface.skeletons import CPU, names_in_files, skeleton

        there = names_in_files(skeleton(config, CPU, False), [place.name for place in places.values()], found)
        return {name: place._replace(name=there.get(place.name, place.name)) for name, place in places.items()}
    vision = family_of(config.source.family).vision
    if vision is not None:
        others = vision.other_prefixes
        places = {name: place._replace(name=_other_name(place.name, others, found)) for name, place in places.items()}
    elif config.source.family in TEXT_PARTS.values() and any(name.startswith(NESTED_PREFIX) for name in found):
        places = {name: _nested(place) for name, place in places.items()}
    shapes = {name: shape for name, (_, shape) in names.items()}
    return {name: _other_experts(name, shapes[name], place, found=found) for name, place in places.items()}


def _other_name(name: str, others: Mapping[str, Sequence[str]], found: Collection[str]) -> str:
    """The name in files of a tensor whose name may begin otherwise."""
    if name in found:
        return name
    prefix = next((x for x in others if name.startswith(x)), "")
    names = [other + name.removeprefix(prefix) for other in others.get(prefix, ())]
    return next((x for x in names if x in found), name)


def _nested(place: Stored) -> Stored:
    """The place of a weight of a text part in the files of a model with a vision tower."""

    def theirs(name: str) -> str:
        return NESTED_PREFIX + name.removeprefix("model.") if name.startswith("model.") else name

    return place._replace(name=theirs(place.name), experts=tuple(map(theirs, place.experts)))


def _other_experts(name: str, shape: tuple[int, ...], place: Stored, *, found: Collection[str]) -> Stored:
    """The place of a weight in files that have the experts of a layer in the other form, joint or one by one.

    Joint ones are as transformers 5 has them in memory, gates and ups above one another, beside names of its own.
    """
    if any(x in found for x in place.tensors):
        return place
    theirs = place.name
    for of_files, of_transformers in _NAMES_IN_TRANSFORMERS.items():
        theirs = theirs.replace(of_files, of_transformers)
    expert = re.fullmatch(r".*/expert_(gate|up|down)(_bias)?", name)
    if expert is None:
        return place._replace(name=theirs) if theirs in found else place
    layer = theirs.partition(_EXPERTS)[0] + _EXPERTS
    kind, bias = expert.groups()
    end = "bias" if bias else "weight"
    one_each = tuple(f"{layer}{i}.{kind}_proj.{end}" for i in range(shape[0]))
    if one_each[0] in found:
        return Stored(place.name, shape, (0, shape[0]), experts=one_each)
    joint = f"{layer}{'down' if kind == 'down' else 'gate_up'}_proj"
    if bias or joint not in found:
        return place
    experts, rows, inner = shape
    begin = rows if kind == "up" else 0
    width = rows if kind == "down" else 2 * rows
    return Stored(joint, (experts, inner, width), (0, experts), columns=(begin, begin + rows))


def fused(family: str, names: Names, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of `names_of` as the tensors of a file; parts wait for one another."""
    tensors = _joint_tensors(family, dict(names.values()))
    whole_of = {part: whole for whole, (_, parts) in tensors.items() for part in parts}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, x in named:
        whole = whole_of.get(name)
        if whole is None:
            yield name, x
            continue
        there = waiting.setdefault(whole, {})
        there[name] = x
        kind, parts = tensors[whole]
        if len(there) == len(parts):
            joined = [there[part] for part in parts]
            if kind == "woven":
                yield whole, weave(joined)
            else:
                x = torch.cat(joined, 0 if kind == "fused" else 1)
                # Square matrices that are abreast are not transposed, as transformers reads them.
                yield whole, x.mT if kind == "abreast" and x.shape[1] != x.shape[2] else x
            del waiting[whole]


def weave(parts: list[Tensor]) -> Tensor:
    """Tensors number by number along the last dim of their transposes, [E, N, K] each, or of themselves, [E, N].

    Example: weave([tensor([[1, 2]]), tensor([[3, 4]])]) is [[1, 3, 2, 4]].
    """
    return torch.stack([x.mT if x.ndim == 3 else x for x in parts], -1).flatten(-2)


def _joint_tensors(family: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, list[str]]]:
    """The tensors of a file that hold several weights: which field of `HFFamily` they are in, and these in order."""
    tensors = {}
    for kind in ("fused", "woven", "abreast", "stacked"):
        for whole, parts in getattr(family_of(family), kind).items():
            for name in (name for name in shapes if name.endswith(parts[0])):
                layer = name.removesuffix(parts[0])
                tensors[layer + whole] = kind, [layer + part for part in parts]
    return tensors


def _hf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    last = name.rsplit("/", 1)[-1]
    if last in _OF_HEADS and len(shape) > 1:
        return (math.prod(shape[:2]), *shape[2:])
    return (*shape[:1], math.prod(shape[1:])) if last in ("o", "out") else shape
