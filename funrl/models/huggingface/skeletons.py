"""Modules of transformers without weights of their own, and the attention that packed rows take in them.

The parameters are on the meta device; `torch.func.functional_call` gives them for a call. Each layer is
replaced by a `_Slot`, which leaves the call to whoever runs the model: its weights can be gathered for it, and computed
again behind it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from funrl.compiled_kernels.varlen_attention import varlen_attention
from funrl.models.errors import ModelError
from funrl.models.huggingface.config import ModuleConfig
from funrl.models.huggingface.family_fields import FULL, SLIDING

CPU = torch.device("cpu")
INTERFACE = "funrl_varlen"  # name of our attention in transformers
RunLayer = Callable[[int, tuple, dict[str, Any]], Any]  # (number, arguments, named arguments) -> what the layer returns


class Skeleton(NamedTuple):
    """A causal language model of transformers without weights.

    Attributes:
      model: all of it; its parameters are on the meta device, its buffers are real.
      base: the part that makes hidden states.
      prefix: what names of weights of `base` begin with in `model`.
      layers_at: the same of its list of layers, in `base`.
      blocks: the layers.
      head: name of the unembedding; that of the embedding where they are tied.
      tied: whether they are.
    """

    model: Any
    base: nn.Module
    prefix: str
    layers_at: str
    blocks: tuple[nn.Module, ...]
    head: str
    tied: bool


class _Slot(nn.Module):
    """A layer's place: calling it calls the innermost `running`."""

    def __init__(self, number: int, block: nn.Module):
        super().__init__()
        self.number = number
        self.__dict__["block"] = block  # not a part of this module: its weights are given by who runs it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)  # some models ask their layers what they are

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _running[-1](self.number, args, kwargs)


_running: list[RunLayer] = []  # who runs layers now
_attending: list[Tensor] = []  # offsets of the packed row that attention is computed of now
_windows: list[int | None] = []  # of the calls of our attention, while somebody looks at them


@contextlib.contextmanager
def running(run: RunLayer) -> Iterator[None]:
    """Inside, `run` is called instead of every layer."""
    _running.append(run)
    try:
        yield
    finally:
        _running.pop()


@contextlib.contextmanager
def attending(offsets: Tensor | None) -> Iterator[None]:
    """Inside, attention is of a packed row; None: of whole rows, which is transformers' own."""
    if offsets is not None:
        _attending.append(offsets)
    try:
        yield
    finally:
        if offsets is not None:
            _attending.pop()


@contextlib.contextmanager
def tracing() -> Iterator[FakeTensorMode]:
    """Inside, modules are traced without computing; torch's log of untraceable ones is dropped."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            yield fakes
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def windows_of_calls() -> Iterator[list[int | None]]:
    """The window of each call of our attention inside."""
    _windows.clear()
    yield _windows


def module_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Variable-length attention in the form of transformers' `AttentionInterface`.

    Args:
      query, key, value: [1, heads, T, N] of the packed row of `attending`.

    Returns: [1, T, H, N], and no weights.

    Raises:
      ModelError: the module's attention is more than that.
    """
    extras = [name for name in ("s_aux", "position_bias", "head_mask") if more.get(name) is not None]
    if attention_mask is not None or extras or not getattr(module, "is_causal", True):
        what = extras[0] if extras else "a mask of its own"
        raise ModelError(f"the attention of {type(module).__name__} has {what}, which variable-length attention lacks")
    if query.shape[-1] != value.shape[-1]:
        raise ModelError(f"the attention of {type(module).__name__} has values of another size than keys")
    _windows.append(sliding_window)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return varlen_attention(
        q, k, v, offsets=_attending[-1], window=sliding_window, longest=None, scale=scaling, cap=softcap or None
    ), None


def their_config(config: ModuleConfig) -> Any:
    """The config of transformers of a model, of as many layers as `config` says."""
    from transformers import AutoConfig

    raw = json.loads(config.raw)
    theirs = AutoConfig.for_model(raw.pop("model_type"), **raw)
    if theirs.num_hidden_layers != config.layers:
        theirs.num_hidden_layers = config.layers
        if getattr(theirs, "layer_types", None):
            theirs.layer_types = theirs.layer_types[: config.layers]
    return theirs


def skeleton(config: ModuleConfig, device: torch.device, packed: bool) -> Skeleton:
    """The modules of a model.

    Args:
      device: of its buffers.
      packed: its attention is `module_attention`; otherwise transformers' own.

    Raises:
      ModelError: transformers has no such causal language model, or it is not made of layers and an unembedding.
    """
    return _skeleton(config.raw, config.layers, config, device=str(device), packed=packed)


@functools.lru_cache(maxsize=16)
def _skeleton(module: str, layers: int, config: ModuleConfig, device: str, packed: bool) -> Skeleton:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(INTERFACE, module_attention)
    theirs = their_config(config)
    theirs.pad_token_id = None  # else the gradient of its embedding is dropped
    options = {"attn_implementation": INTERFACE} if packed else {}
    try:
        with _parameters_on_meta(), torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float32, **options)
    except (ValueError, ImportError) as error:
        raise ModelError(f"transformers cannot make a causal language model of it: {error}") from error
    model.eval().requires_grad_(False)
    for part in model.modules():
        for name, x in part._buffers.items():
            if x is not None:
                part._buffers[name] = x.to(device)
    name = type(model).__name__
    base = model.get_decoder()
    head = model.get_output_embeddings()
    lists = [(path, x) for path, x in base.named_modules() if isinstance(x, nn.ModuleList) and len(x) == layers]
    if base is model or head is None or not lists:
        raise ModelError(f"{name} is not a list of layers behind an unembedding; it cannot be trained here")
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"the unembedding of {name} has a bias, which is not supported")
    whole = next((x for x, buffer in persistent_buffers(model).items() if not buffer.is_floating_point()), None)
    if whole is not None:
        raise ModelError(f"{name} has whole numbers among its weights, in {whole}; they are not supported")
    path = lists[0][0]
    blocks = tuple(lists[0][1])
    for number, block in enumerate(blocks):
        lists[0][1][number] = _Slot(number, block)
    names = {id(x): parameter for parameter, x in model.named_parameters()}
    own = {id(x) for x in base.parameters()}
    outside = set(names) - own - {id(head.weight)}
    if outside:
        raise ModelError(f"{name} has weights outside of its base model and its unembedding: {names[outside.pop()]}")
    prefix = next(f"{path}." for path, x in model.named_modules() if x is base)
    return Skeleton(
        model,
        base,
        prefix,
        layers_at=f"{path}.",
        blocks=blocks,
        head=names[id(head.weight)],
        tied=id(head.weight) in own,
    )


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, parameters of modules have no memory once they are registered; buffers are what they are."""
    plain = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # else it is the same one again, as weights are tied
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        plain(self, name, param)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = plain


def may_pack(config: ModuleConfig) -> bool:
    """True where transformers says that the attention of these models goes through its interface, without more."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    theirs = their_config(config)
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(theirs), None)
    kinds = set(getattr(theirs, "layer_types", None) or ()) - {FULL, SLIDING}
    return known is not None and bool(getattr(known, "_supports_attention_backend", False)) and not kinds


def windows_expected(config: ModuleConfig) -> list[bool]:
    """For each layer, whether it ought to have a window."""
    kinds = getattr(their_config(config), "layer_types", None)
    return [kind == SLIDING for kind in kinds] if kinds else []


def names_in_files(one: Skeleton, wanted: Collection[str], found: Collection[str]) -> dict[str, str]:
    """For names of weights in transformers, those in files: old files have other ones, as transformers knows.

    Args:
      wanted: names of all weights of the model.
      found: names in its files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [x for x in get_model_conversion_mapping(one.model) if isinstance(x, WeightRenaming)]
    prefix = one.model.base_model_prefix
    known = dict.fromkeys(wanted, True)
    return {rename_source_key(name, renamings, [], prefix, known)[0]: name for name in found}


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of the files of a module, by its names: parameters, and buffers that are saved with them.

    Args:
      module: a layer; or a model, whose layers are left out.
    """
    return dict(module.named_parameters()) | persistent_buffers(module)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a module that are saved and do not learn, such as the bias by which experts are chosen."""
    return {
        f"{path}{'.' * bool(path)}{name}": x
        for path, part in module.named_modules()
        for name, x in part._buffers.items()
        if x is not None and name not in part._non_persistent_buffers_set
    }


def check_classifier(config: ModuleConfig, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a class of transformers has exactly these weights.

    Args:
      name: of the class.
      shapes: of the weights, by their names there.

    Raises:
      ModelError: it has others.
    """
    import transformers

    theirs = their_config(config)
    theirs.num_labels = next(shape[0] for there, shape in shapes.items() if there == "score.weight")
    with _parameters_on_meta(), torch.random.fork_rng(devices=[]):
        model = getattr(transformers, name)(theirs)
    expected = {there: tuple(x.shape) for there, x in named_weights(model).items()}
    if expected != dict(shapes):
        wrong = sorted(set(expected.items()) ^ set(shapes.items()))[0][0]
        raise ModelError(f"{name} is not a head of one matrix on the language model: they differ in {wrong}")
