"""A vision tower as pure functions of a tree of weights: patches of pictures to hidden states of a decoder.

The weights have the shapes of the files, each matrix with one dim `embed`, so that data ranks can share them. Every
tensor rank computes the whole tower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.norm import rms_norm
from funrl.compiled_kernels.rotary import Rotary, frequencies, rotate
from funrl.models.fsdp import regathering
from funrl.models.low_rank import multiply
from funrl.models.model import Adapt
from funrl.models.vision.config import CHANNELS, TowerConfig, TowerForm
from funrl.models.vision.grids import Grid, arranged_states, table_shares, tower_indices
from funrl.models.vision.inputs import Pictures

WINDOWED = TowerForm()
_PARTS = ("query", "key", "value")
_OUT = ("embed/patch", "/proj", "/down_proj")  # matrices whose out dim is the hidden size of the tower


def tower_shapes(tower: TowerConfig, out: int) -> trees.Tree:
    """The tree of whole weights, as tensors without memory, of a tower for hidden states of size `out`."""
    D = tower.embed
    inner = tower.inner
    form = tower.form
    layer = {
        **_norm_shapes(form, "norm1", D),
        **_norm_shapes(form, "norm2", D),
        **_projection_shapes(form, D),
        **{"up_proj": (inner, D), "down_proj": (D, inner), "up_proj_bias": (inner,), "down_proj_bias": (D,)},
        **({"gate_proj": (inner, D), "gate_proj_bias": (inner,)} if form.gated else {}),
    }
    frames = (form.frames,) if form.frames > 1 else ()
    embed: dict[str, tuple[int, ...]] = {"patch": (D, CHANNELS, *frames, tower.patch, tower.patch)}
    if form.patch_bias:
        embed["patch_bias"] = (D,)
    if form.table:
        embed["table"] = (form.table**2, D)
    if form.idle_norm:
        embed |= _norm_shapes(form, "idle_norm", D)
    merger = _merger_shapes(tower, out)
    first = {} if form.merger == "plain" else _norm_shapes(form, "norm", D)
    newline = {} if tower.layout.tiles is None else {"newline": (out,)}
    sizes: dict[str, Any] = {
        "embed": embed,
        "layers": (layer,) * tower.layers,
        "merger": {**first, **merger, **newline},
    }
    if form.deep_layers:
        merged = D * tower.merge**2
        sizes["deep_mergers"] = ({**_norm_shapes(form, "norm", merged), **merger},) * len(form.deep_layers)
    return _map_shapes(lambda shape: torch.empty(shape, device="meta"), sizes)


def _projection_shapes(form: TowerForm, size: int) -> dict[str, tuple[int, ...]]:
    rows = {"qkv": 3 * size, "proj": size} if form.joined else dict.fromkeys((*_PARTS, "proj"), size)
    return {name: (x, size) for name, x in rows.items()} | {f"{name}_bias": (x,) for name, x in rows.items()}


def _merger_shapes(tower: TowerConfig, out: int) -> dict[str, tuple[int, ...]]:
    if tower.form.merger == "mean":
        return {"mean_norm": (tower.embed,), "project": (tower.embed, out)}
    merged = tower.embed * tower.merge**2
    inner = out if tower.form.merger == "plain" else merged
    return {"first": (inner, merged), "first_bias": (inner,), "second": (out, inner), "second_bias": (out,)}


def _norm_shapes(form: TowerForm, name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {name: (size,)} | ({f"{name}_bias": (size,)} if form.norm == "layer" else {})


def tower_axes(tower: TowerConfig, out: int) -> trees.Tree:
    """The logical axes of every weight: `embed` is one dim of each matrix."""

    def axes(name: str, x: Tensor) -> tuple[str, ...]:
        embed = 0 if name.endswith(_OUT) else 1
        return tuple("embed" if x.ndim > 1 and dim == embed else "head" for dim in range(x.ndim))

    return trees.map_named(axes, tower_shapes(tower, out))


def init_tower(tower: TowerConfig, out: int, generator: torch.Generator, dtype: torch.dtype) -> trees.Tree:
    """Random weights: normal with variance 1 / fan-in, norms the identity, biases 0."""

    def draw(name: str, x: Tensor) -> Tensor:
        if x.ndim == 1 and not name.endswith("newline"):
            fill = 0.0 if name.endswith(("bias", "mean_norm")) else 1.0
            return torch.full(x.shape, fill, dtype=dtype, device=generator.device)
        inputs = x.shape[:1] if name.endswith(("/project", "newline")) else x.shape[1:]
        std = math.prod(inputs) ** -0.5
        return (torch.randn(x.shape, generator=generator, device=generator.device) * std).to(dtype)

    return trees.map_named(draw, tower_shapes(tower, out))


def apply_tower(tower: TowerConfig, params: trees.Tree, pictures: Pictures, adapt: Adapt | None = None) -> Tensor:
    """Hidden states [1 + L, M, D] of the tokens of some pictures, end to end: as `Inputs.inserted` has them.

    Args:
      tower: sizes.
      params: this rank's weights, or what `fsdp.gathered` makes of them.
      pictures: at least one.
      adapt: as `Inputs.adapt`.
    """
    adapt = adapt or _unadapted
    patches_PCHW = pictures.patches_PCHW
    device = patches_PCHW.device
    form = tower.form
    indices = tower_indices(pictures.grids, tower)
    embed = params["embed"]
    dtype = embed["patch"].dtype
    x_PD = _embed(tower, embed, patches_PCHW)[torch.from_numpy(indices.order_P).to(device)]
    if form.table:
        x_PD = x_PD + _stretched_table(tower, embed["table"], pictures.grids)
    rope = _rope(tower, torch.from_numpy(indices.places_P2).to(device), dtype) if form.rotates else None
    back_M = torch.from_numpy(indices.back_M).to(device)
    pictured, windowed = (sorted_segments(x, device) for x in (indices.pictures, indices.windows))
    layers = params["layers"]
    deep: list[Tensor] = []
    with regathering(layers):
        for i, layer in enumerate(layers):
            segments = pictured if i in tower.whole_layers else windowed
            x_PD = _layer(tower, adapt(layer), x_PD, rope=rope, segments=segments)
            if i in form.deep_layers:
                deep.append(x_PD)
    merger = params["merger"]  # once: what is sharded is gathered where it is looked up
    hidden = [_merge(tower, adapt(merger), x_PD)]
    if deep:
        mergers = params["deep_mergers"]
        with regathering(mergers):
            hidden += [_merge(tower, adapt(other), x, deep=True) for other, x in zip(mergers, deep, strict=True)]
    hidden_LMD = torch.stack([x_MD[back_M] for x_MD in hidden])
    return hidden_LMD if tower.layout.tiles is None else _arranged(tower, merger, hidden_LMD, pictures.grids)


def _arranged(tower: TowerConfig, params: trees.Tree, hidden_LND: Tensor, grids: tuple[Grid, ...]) -> Tensor:
    """Hidden states [L, M, D] of tokens, of the states of all tiles and of the newline."""
    states_LND = torch.cat([hidden_LND, params["newline"].expand(len(hidden_LND), 1, -1)], 1)
    of_tokens = arranged_states(grids, tower)
    interpolated = of_tokens[1][:, 1:].any()
    entries_M4, shares_M4 = (torch.from_numpy(x).to(hidden_LND.device) for x in of_tokens)
    if not interpolated:
        return states_LND[:, entries_M4[:, 0]]  # -1 is the newline
    return (states_LND[:, entries_M4] * shares_M4.to(hidden_LND.dtype).unsqueeze(-1)).sum(2)


def _unadapted(params: Mapping[str, object]) -> Mapping[str, Any]:
    return params


def normalized(patches_PCHW: Tensor, dtype: torch.dtype, form: TowerForm = WINDOWED) -> Tensor:
    """Pixels 0 to 255 as the tower takes them, normalized by channel; computed in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    mean, std = (torch.tensor(x, dtype=wide, device=patches_PCHW.device).view(-1, 1, 1) for x in (form.mean, form.std))
    return ((patches_PCHW.to(wide) / 255 - mean) / std).to(dtype)


def _embed(tower: TowerConfig, params: trees.Tree, patches_PCHW: Tensor) -> Tensor:
    """Products of the patches; a patch covers all frames."""
    patch = params["patch"]
    pixels_PCHW = normalized(patches_PCHW, patch.dtype, tower.form)
    frames_PCFHW = pixels_PCHW.unsqueeze(2).expand(-1, -1, tower.form.frames, -1, -1)
    return F.linear(frames_PCFHW.flatten(1), patch.flatten(1), params.get("patch_bias"))


def _stretched_table(tower: TowerConfig, table_SD: Tensor, grids: tuple[Grid, ...]) -> Tensor:
    """Learned positions [P, D] of patches in the order of their windows, interpolated between four entries."""
    entries_P4, shares_P4 = (torch.from_numpy(x).to(table_SD.device) for x in table_shares(grids, tower))
    return (F.embedding(entries_P4, table_SD) * shares_P4.to(table_SD.dtype).unsqueeze(-1)).sum(1)


def _rope(tower: TowerConfig, places_P2: Tensor, dtype: torch.dtype) -> Rotary:
    """Turns by rows of the first half of the frequencies, and by columns of the second."""
    head = tower.embed // tower.heads
    wide = torch.promote_types(dtype, torch.float32)
    frequency = frequencies(head // 2, tower.theta, dtype=wide, device=places_P2.device)
    angle = (places_P2.unsqueeze(-1).to(wide) * frequency).flatten(1)
    cos = angle.cos()
    sin = angle.sin()
    both = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    return Rotary(*(x.unsqueeze(-2).to(dtype) for x in both))


def _layer(tower: TowerConfig, params: trees.Tree, x_PD: Tensor, rope: Rotary | None, segments: Segments) -> Tensor:
    h_PD = _norm(tower, params, "norm1", x_PD)
    if tower.form.joined:
        qkv = _linear(params, "qkv", h_PD).chunk(3, -1)
    else:
        qkv = [_linear(params, name, h_PD) for name in _PARTS]
    q, k, v = (x.unflatten(-1, (tower.heads, -1)) for x in qkv)
    if rope is not None:
        q = rotate(q, rope)
        k = rotate(k, rope)
    out_PHN = segment_attention(q, k, v, segments)
    x_PD = x_PD + _linear(params, "proj", out_PHN.flatten(1))
    h_PD = _norm(tower, params, "norm2", x_PD)
    inner = _linear(params, "up_proj", h_PD)
    if tower.form.gated:
        inner = F.silu(_linear(params, "gate_proj", h_PD)) * inner
    else:
        inner = F.gelu(inner, approximate="tanh")
    return x_PD + _linear(params, "down_proj", inner)


def _linear(params: Mapping[str, Any], name: str, x: Tensor) -> Tensor:
    return multiply(x, params[name], params.get(f"{name}_bias"))


def _norm(tower: TowerConfig, params: trees.Tree, name: str, x: Tensor) -> Tensor:
    weight = params[name]
    if tower.form.norm == "rms":
        return rms_norm(x, weight, tower.form.eps)
    return F.layer_norm(x, weight.shape, weight, params[f"{name}_bias"], tower.form.eps)


def _merge(tower: TowerConfig, params: trees.Tree, x_PD: Tensor, deep: bool = False) -> Tensor:
    """Hidden states of the decoder, of the patches of each block side by side.

    Args:
      deep: norm all patches of a block as one; else each by itself.
    """
    if tower.form.merger == "mean":
        x_MD = _norm(tower, params, "norm", x_PD).unflatten(0, (-1, tower.merge**2)).mean(1)
        return rms_norm(x_MD, params["mean_norm"], tower.form.eps, offset=1.0) @ params["project"]
    size = tower.embed * tower.merge**2
    if tower.form.merger == "plain":
        x_MD = x_PD.view(-1, size)
    else:
        x_MD = _norm(tower, params, "norm", x_PD.view(-1, size) if deep else x_PD).view(-1, size)
    return _linear(params, "second", F.gelu(_linear(params, "first", x_MD)))


class Segments(NamedTuple):
    """Segments of patches that see one another, sorted such that those of one length are computed together.

    Attributes:
      runs: number of segments and their length, for each length.
      order_P, back_P: the patches in this order, and the places to which they return; None: they have it already.
    """

    runs: tuple[tuple[int, int], ...]
    order_P: Tensor | None
    back_P: Tensor | None


def sorted_segments(lengths: np.ndarray, device: torch.device) -> Segments:
    """Sort segments by their lengths; those of few pictures with windows at their edges alternate otherwise."""
    runs = tuple((len(list(run)), length) for length, run in itertools.groupby(lengths.tolist()))
    if len(runs) == len({length for _, length in runs}):
        return Segments(runs, None, None)
    of_patch_P = lengths.repeat(lengths)
    order_P = np.argsort(-of_patch_P, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    runs = tuple(zip(counts[::-1].tolist(), values[::-1].tolist(), strict=True))
    return Segments(runs, *(torch.from_numpy(x).to(device) for x in (order_P, np.argsort(order_P))))


def segment_attention(q_PHN: Tensor, k_PHN: Tensor, v_PHN: Tensor, segments: Segments) -> Tensor:
    """softmax(q k^T / sqrt(N)) v, where a patch sees all patches of its own segment.

    Args:
      q_PHN, k_PHN, v_PHN: of segments end to end.
      segments: by `sorted_segments`.
    """
    if segments.order_P is not None:
        q_PHN, k_PHN, v_PHN = (x.index_select(0, segments.order_P) for x in (q_PHN, k_PHN, v_PHN))
    outs = []
    begin = 0
    for count, length in segments.runs:
        part = slice(begin, begin + count * length)
        q, k, v = (x[part].unflatten(0, (count, length)).transpose(1, 2) for x in (q_PHN, k_PHN, v_PHN))
        outs.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
        begin += count * length
    out_PHN = torch.cat(outs)
    return out_PHN if segments.back_P is None else out_PHN.index_select(0, segments.back_P)


def _map_shapes(fn: Callable[[tuple[int, ...]], Tensor], sizes: Any) -> Any:
    """`fn` of every shape in a tree of dicts and tuples of layers."""
    if isinstance(sizes, dict):
        return {name: _map_shapes(fn, x) for name, x in sizes.items()}
    if all(isinstance(x, dict) for x in sizes):
        return tuple(_map_shapes(fn, x) for x in sizes)
    return fn(sizes)
