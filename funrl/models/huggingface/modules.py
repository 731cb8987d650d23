"""Any causal language model of transformers as a `Model`: its own code, as a function of its weights.

The weights are a tree: `base` has what is outside of the layers, by the names of transformers, `layers` a dict for each
of them, and `unembed` the unembedding where it is not tied. Packed rows go through transformers' attention interface
with the variable-length operator of this project. Where a family cannot do that (its attention is its own, or not all
that mixes tokens is attention), the sequences of a packed row are laid out as padded rows for it, and packed again.

The modules are in evaluation mode: there is no dropout. Hidden states leave the model, not logits; a model that does
more to its logits than multiplying by the unembedding is refused.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from funrl import trees
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.errors import ModelError
from funrl.models.fsdp import regathering
from funrl.models.huggingface.config import DTYPES, ModuleConfig, architecture, token_ids
from funrl.models.huggingface.configs.hf_family import transformers_config
from funrl.models.huggingface.names import names_of
from funrl.models.huggingface.skeletons import (
    CPU,
    Skeleton,
    attending,
    may_pack,
    named_weights,
    persistent_buffers,
    running,
    skeleton,
    tracing,
    windows_expected,
    windows_of_calls,
)
from funrl.models.model import Abilities, Inputs, Layer, Model, ModelFiles, Output, SpecialTokens
from funrl.models.token_costs import LayerCost, ModelCost


class ModuleContext(NamedTuple):
    """Inputs of a layer besides its weights and hidden states.

    Attributes:
      block: the layer's module.
      args, kwargs: further arguments; where `args` is None the hidden states are named too.
      offsets: of the packed row; None: rows are padded.
      kv_cache: None, as there is none.
    """

    block: nn.Module
    args: tuple | None
    kwargs: dict[str, Any]
    offsets: Tensor | None
    kv_cache: None = None


def module_config(raw: Mapping[str, Any]) -> ModuleConfig:
    """The record of a parsed config.json of any causal language model that transformers knows.

    Raises:
      ModelError: transformers does not know it.
    """
    theirs: Any = transformers_config(raw)
    name = theirs.model_type
    try:
        embed = theirs.hidden_size
        layers = theirs.num_hidden_layers
        vocab = theirs.vocab_size
        heads = getattr(theirs, "num_attention_heads", None) or 1
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"transformers' config of {name!r} is not that of a causal language model: {error}") from error
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}, supported are {list(DTYPES)}")
    return ModuleConfig(
        vocab=vocab,
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=getattr(theirs, "num_key_value_heads", None) or heads,
        head=getattr(theirs, "head_dim", None) or embed // heads,
        mlp=getattr(theirs, "intermediate_size", None) or 4 * embed,
        tied=bool(getattr(theirs, "tie_word_embeddings", True)),
        max_positions=getattr(theirs, "max_position_embeddings", None) or 2048,
        source=ModelFiles(dtype, name),
        special_tokens=SpecialTokens(
            bos=getattr(theirs, "bos_token_id", None),
            eos=token_ids(getattr(theirs, "eos_token_id", None)),
            pad=getattr(theirs, "pad_token_id", None),
        ),
        raw=json.dumps(dict(raw)),
    )


def module_model(config: ModuleConfig) -> Model:
    """The model that a `module_config` describes.

    Raises:
      ModelError: it cannot be computed like this; the message says what is in the way.
    """
    bones = skeleton(config, CPU, False)
    shapes = _shapes(bones)
    head = bones.head.removeprefix(bones.prefix) if bones.tied else None
    return Model(
        config=config,
        shapes=shapes,
        axes=trees.map(functools.partial(_axes, config), shapes),
        init=functools.partial(_init, config, shapes),
        apply=functools.partial(_apply, config),
        unembed=functools.partial(_unembed, head),
        value=None,
        layer=module_layer,
        init_cache=None,
        rebuild=module_model,
        abilities=_abilities(config, tuple(_buffers(bones))),
    )


def _abilities(config: ModuleConfig, constant: tuple[str, ...]) -> Abilities:
    """Abilities of a module of transformers; costs follow the summary of its sizes."""
    queries = config.heads * config.head
    keys = config.kv_heads * config.head
    layer = LayerCost(
        queries=queries,
        keys=keys,
        projected=queries + keys,
        cached=2 * keys,
        cached_heads=config.kv_heads,
        inner=config.mlp,
    )
    return Abilities(
        cost=ModelCost(config.embed, (layer,) * config.layers),
        code=architecture(config),
        compiled_step="its layers are transformers' own code",
        heads=config.heads,
        constant=constant,
    )


def check_module(model: Model, config: ModuleConfig) -> None:
    """Trace the model once, without computing, and see that its logits are hidden states times the unembedding.

    Raises:
      ModelError: they are not, or the model cannot be traced.
    """
    bones = skeleton(config, CPU, False)
    seen: list[Any] = []
    name = type(bones.model).__name__
    head = bones.model.get_output_embeddings()
    if tuple(head.weight.shape) != (config.vocab, config.embed):
        raise ModelError(f"the unembedding of {name} has shape {list(head.weight.shape)}")
    hooks = [
        bones.base.register_forward_hook(lambda _, args, out: seen.append(out[0])),
        head.register_forward_hook(lambda _, args, out: seen.extend((args[0], out))),
    ]
    try:
        with tracing():
            params = trees.map(lambda x: torch.empty(x.shape), model.shapes)
            names = names_of(model)
            weights = {names[n][0]: x for n, x in trees.named(params) if not n.startswith("layers/")}
            layers = iter(params["layers"])

            def run(number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
                return functional_call(bones.blocks[number], next(layers), args, kwargs)

            with running(run):
                out = functional_call(
                    bones.model, weights, (torch.zeros(1, 4, dtype=torch.int64),), {"use_cache": False}
                )
    except ModelError:
        raise
    except Exception as error:  # a module may do whatever it likes
        raise ModelError(f"{name} cannot be traced: {str(error).splitlines()[0]}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != 3:
        raise ModelError(f"{name} does not call its base model once and its unembedding once")
    hidden, read, logits = seen
    if read.untyped_storage()._cdata != hidden.untyped_storage()._cdata or out.logits is not logits:
        raise ModelError(f"{name} does more for its logits than multiplying hidden states by its unembedding")


@functools.lru_cache(maxsize=16)
def packs(config: ModuleConfig) -> bool:
    """True if packed rows go through the model's attention; False: they are padded for it. Found by tracing it once."""
    if not may_pack(config):
        return False
    expected = windows_expected(config)
    try:
        bones = skeleton(config, CPU, True)
        with tracing(), windows_of_calls() as windows:
            params = trees.map(lambda x: torch.empty(x.shape), _shapes(bones))
            tokens = torch.zeros(1, 4, dtype=torch.int64)
            offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
            _packed(
                bones,
                config,
                params,
                mesh=SINGLE,
                layer=module_layer,
                tokens_1N=tokens,
                positions_1N=torch.tensor([[0, 0, 1, 2]]),
                offsets=offsets,
            )
            seen = list(windows)
    except Exception:  # a module may do whatever it likes: then it gets rows as it knows them
        return False
    return len(seen) == config.layers and all(
        window is not None for window, wanted in zip(seen, expected, strict=False) if wanted
    )


def module_layer(config: ModuleConfig, mesh: Mesh, params: trees.Tree, x_BTD: Tensor, context: ModuleContext) -> Any:
    """One layer.

    Args:
      config, mesh: as in `Model.apply`.
      params: the weights of this layer, by the names of its module.
      x_BTD: output of the layer before.
      context: the module, and its other arguments.
    """
    args = context.args
    kwargs = context.kwargs
    if args is None:
        args = ()
        kwargs = {"hidden_states": x_BTD, **kwargs}
    else:
        args = (x_BTD, *args)
    with attending(context.offsets):
        return functional_call(context.block, dict(params), args, kwargs)


def _apply(
    config: ModuleConfig,
    params: trees.Tree,
    inputs: Inputs,
    mesh: Mesh = SINGLE,
    cache: trees.Tree = None,
    layer: Layer | None = None,
) -> Output:
    """A forward pass, as `Model.apply` says."""
    if cache is not None or inputs.paging is not None:
        raise ModelError(f"{architecture(config)} is transformers' own code, without pages: use the hf engine")
    layer = layer or module_layer
    shape = inputs.tokens.shape
    tokens_1N, positions_1N, offsets = _one_row(inputs)
    packed = packs(config)
    bones = skeleton(config, tokens_1N.device, packed)
    if packed:
        hidden_1ND = _packed(
            bones,
            config,
            params,
            mesh=mesh,
            layer=layer,
            tokens_1N=tokens_1N,
            positions_1N=positions_1N,
            offsets=offsets,
        )
    else:
        hidden_1ND = _padded(bones, config, params, mesh=mesh, layer=layer, tokens_1N=tokens_1N, offsets=offsets)
    return Output(hidden_1ND.view(*shape, -1), None, {})


def _packed(one, config, params, mesh, layer, tokens_1N, positions_1N, offsets) -> Tensor:
    return _hidden(
        one, config, params, mesh=mesh, layer=layer, offsets=offsets, input_ids=tokens_1N, position_ids=positions_1N
    )


def _padded(one, config, params, mesh, layer, tokens_1N, offsets) -> Tensor:
    """Hidden states of the sequences of a packed row, computed as rows that are padded on the right."""
    begins_S = offsets[:-1].long()
    counts_S = offsets.diff().long()
    if not counts_S.any():  # a micro-batch that only keeps pace with other ranks'
        counts_S = torch.ones_like(counts_S[:1])
        begins_S = begins_S[:1]
    some_S = counts_S > 0
    begins_S = begins_S[some_S]
    counts_S = counts_S[some_S]
    at_L = torch.arange(int(counts_S.max()), device=tokens_1N.device)
    used_SL = at_L < counts_S[:, None]
    index_SL = torch.where(used_SL, begins_S[:, None] + at_L, 0)
    tokens_SL = tokens_1N[0][index_SL]
    hidden_SLD = _hidden(
        one, config, params, mesh=mesh, layer=layer, offsets=None, input_ids=tokens_SL, attention_mask=used_SL.long()
    )
    hidden_MD = hidden_SLD[used_SL]
    padding = hidden_MD.new_zeros(tokens_1N.shape[1] - len(hidden_MD), hidden_MD.shape[1])
    return torch.cat([hidden_MD, padding]).unsqueeze(0)


def _hidden(one, config, params, mesh, layer, offsets, **inputs: Tensor) -> Tensor:
    """Hidden states behind the last norm."""
    layers = params["layers"]
    with regathering(layers):
        weights = iter(layers)

        def run(number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
            kwargs = dict(kwargs)
            x = args[0] if args else kwargs.pop("hidden_states")
            context = ModuleContext(one.blocks[number], args[1:] if args else None, kwargs, offsets=offsets)
            # No name holds a layer's weights longer than the layer takes: they may be gathered for it.
            return layer(config, mesh, next(weights), x, context)

        with running(run):
            return functional_call(one.base, dict(params["base"]), (), {"use_cache": False, **inputs})[0]


def _one_row(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens as one packed row, their positions and the offsets of its sequences."""
    tokens_BT = inputs.tokens
    positions = inputs.positions
    segments = inputs.segments
    offsets = inputs.offsets
    B, T = tokens_BT.shape
    device = tokens_BT.device
    positions = torch.arange(T, device=device) if positions is None else positions
    positions_1N = positions.expand(B, T).reshape(1, -1)
    if offsets is None:
        ends_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        ends_BT[:, -1] = True
        if segments is not None:  # padding is a sequence like others: its output is never used
            ends_BT[:, :-1] = segments[:, 1:] != segments[:, :-1]
        ends = ends_BT.flatten().nonzero().squeeze(-1) + 1
        offsets = torch.cat([ends.new_zeros(1), ends])
    return tokens_BT.reshape(1, -1), positions_1N, offsets.int()


def _shapes(one: Skeleton) -> trees.Tree:
    """The tree of whole weights, as tensors without memory."""
    return trees.map(lambda x: x.detach().to("meta"), _in_tree(one, named_weights))


def _buffers(one: Skeleton) -> dict[str, Tensor]:
    """Weights that do not learn, with their values in a new model, by their names in the tree."""
    return dict(trees.named(_in_tree(one, persistent_buffers)))


def _in_tree(one: Skeleton, tensors_of: Callable[[nn.Module], dict[str, Tensor]]) -> trees.Tree:
    """Tensors of modules in their places in the tree of weights."""
    rest = tensors_of(one.model)
    unembed = {"unembed": rest.pop(one.head)} if one.head in rest and not one.tied else {}
    base = {name.removeprefix(one.prefix): x for name, x in rest.items()}
    return {"base": base, "layers": tuple(tensors_of(block) for block in one.blocks), **unembed}


def _axes(config: ModuleConfig, x: Tensor) -> tuple[str, ...]:
    """Logical axes of a weight: of a matrix, the dim of the hidden states is what full sharding splits."""
    if x.ndim < 2:
        return ("norm",) * x.ndim
    sizes = list(x.shape)
    embed_dim = sizes.index(config.embed) if config.embed in sizes else None
    if sizes == [config.vocab, config.embed]:
        return ("vocab", "embed")
    return tuple("embed" if dim == embed_dim else "norm" for dim in range(x.ndim))


def _init(
    config: ModuleConfig, shapes: trees.Tree, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> trees.Tree:
    """Random weights, whole: normal with variance 1 / D and embeddings 0.02, vectors the weights of norms or 0.

    Buffers have the numbers of a new module. The others are drawn in float32: every dtype begins with the same model.
    """
    buffers = _buffers(skeleton(config, CPU, False))

    def draw(name: str, x: Tensor) -> Tensor:
        if name in buffers:
            return buffers[name].to(generator.device, dtype, copy=True)
        if x.ndim < 2:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(x.shape, fill, dtype=dtype, device=generator.device)
        std = 1 / math.sqrt(config.embed) if name.startswith("layers/") else 0.02
        return (torch.randn(x.shape, generator=generator, device=generator.device) * std).to(dtype)

    return trees.map_named(draw, shapes)


def _unembed(embedding: str | None, params: trees.Tree) -> Any:
    """The matrix from hidden states to logits, [V, D]."""
    return params["unembed"] if embedding is None else params["base"][embedding]
