"""Proof after a sync that the engine holds the trainer's weights: a digest of the bits of each weight, and a probe.

The digest of a weight w of d dims is

    sum over i of  bits(w[i]) * key_1[i_1] * ... * key_d[i_d]   modulo 2^64

where `bits` is the number in the engine's dtype read as an integer, i its index in the whole weight, and a key an odd
random number that belongs to a dim and a coordinate. The parts of a weight add up to its digest in any layout and
order, so each rank sums its own part, cast as the sync casts it, and one small collective adds the parts of the trainer
and those of the engine. A single wrong number is always found, since an odd factor has an inverse. Any other change,
such as exchanged weights or a part that has not arrived, is missed with a probability below 64^(d-1) * 2^(t-62), where
2^t divides the differences of all bits: t is 0 unless few numbers have changed, and 31 if only signs of float32 have.
If several ranks hold the same part, all copies are compared.

The digest covers the weights that the engine can show. The probe covers what the engine computes with them, including
what it derives from them (packed copies, cached prefixes): it compares log-probabilities of greedy completions.

References:
  Carter and Wegman, 1979, https://doi.org/10.1016/0022-0000(79)90044-8
  Lemire and Kaser, 2014, https://arxiv.org/abs/1202.4961
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.float8 import FLOAT8
from funrl.mesh.collectives import gather_objects, pmax, psum
from funrl.mesh.mesh import AXES, Mesh, Ranks, coordinates
from funrl.mesh.plan import Box
from funrl.mesh.rules import Layout
from funrl.models.deployed import DeviceWeights, deployed
from funrl.models.placed import Placed
from funrl.models.weight_dtypes import weight_dtype
from funrl.processes.device_memory import copy_to_device
from funrl.rollout.elsewhere import Compared, Digests, Greedy, OfOtherRanks
from funrl.rollout.engine import Engine, WeightSpec, complete
from funrl.rollout.requests import Completion, Request, requests_of
from funrl.rollout.sampling_parameters import Sampling

# Numbers digested at a time, in 8 bytes each. On a CPU they fit a core's cache; on a GPU they are so many that the host
# has launched the kernels of 8 G weights in a twentieth of a second (estimated), before generation begins.
PIECE = {"cpu": 1 << 17}
GPU_PIECE = 1 << 23
DIGEST_PASSES = 2  # over 8 bytes of every number: written as it is multiplied, and summed
# By size of a number in bytes: the integer type that its bits are read as.
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
PROBE_PROMPTS = 2
PROBE_TOKENS = 32
PROBE_NEW_TOKENS = 8
# Largest gap in nats that rounding explains between two programs with equal weights; see benchmarks/README.md.
PROBE_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5, FLOAT8: 1.0}


class SyncError(RuntimeError):
    """The engine does not hold the trainer's weights."""


class WeightShare(NamedTuple):
    """A rank's parts of a weight in the layouts of trainer and engine, and the digests of these parts."""

    stored: Box
    trainer: int
    placed: Box
    engine: int


def certify(
    placed: Placed, params: trees.Tree, engine: Engine, version: int, digests: bool = True, probes: bool = False
) -> dict[str, float]:
    """Compare the engine's weights with the trainer's. Collective over the trainer's mesh.

    Args:
      placed, params: the model that was synced, and this rank's shards of its weights. With adapters, the engine holds
        the merged weights, or where its weights are `adapters` these, and the base is not compared.
      engine: on the devices of `placed.mesh`.
      version: version that the engine should have.
      digests, probes: which of the two to compare.

    Returns: metrics. "sync/verified": 1 if the digests of all weights agree; 0.5 if not all weights could be
      compared, but a probe agrees; 0 if not all could be compared and there was no probe. "sync/probe_gap", with a
      probe: the largest difference of log-probabilities in nats.

    Raises:
      SyncError: they differ; raised on every rank. The message names the weight.
    """
    source = deployed(placed, params, merge=not engine.weights.adapters)
    whole = digests and compare_weights(source, engine, version)
    return probed(placed, params, engine, version, whole=whole) if probes else {"sync/verified": float(whole)}


def probed(placed: Placed, params: trees.Tree, engine: Engine, version: int, *, whole: bool) -> dict[str, float]:
    """Probe the engine; the metrics of `certify`.

    Args:
      placed, params, engine, version: as in `certify`.
      whole: whether all weights have been compared.
    """
    gap = probe_gap(placed, params, engine)
    rounded = FLOAT8 if engine.weights.float8 else placed.dtype
    bound = PROBE_BOUNDS[rounded]
    if not gap <= bound:
        shown = "Its weights are the trainer's" if whole else "Not all of its weights were compared"
        raise SyncError(
            f"after the sync of version {version} the engine's log-probabilities of a fixed text are up to {gap:.3g} "
            f"nats from the trainer's; rounding in {rounded} explains {bound:g}. {shown}, so what it derives from "
            "them is wrong or stale, such as packed weights or cached prefixes"
        )
    return {"sync/verified": 1.0 if whole else 0.5, "sync/probe_gap": gap}


def compare_weights(source: DeviceWeights, engine: Engine, version: int) -> bool:
    """Compare the digests of every weight that the engine can show, and the versions.

    Args:
      source: the trainer's weights, by the names of `engine.weights.layouts`, created one at a time.
      engine: on a mesh over the same processes.
      version: version that the engine should have.

    Returns: whether all weights could be read.

    Raises:
      SyncError: on some rank a weight differs, is missing, or has another shape or dtype. Raised on every rank.
    """
    return sync_digests(source, engine, version).compare().whole


class SyncDigests(NamedTuple):
    """Digests of this rank's parts after a sync, which a GPU may still be computing.

    Attributes:
      version: of the sync.
      mesh: of the trainer.
      rank: of this process in the engine's mesh.
      trained, placed: layout of each weight in the trainer and in the engine, by name.
      own_N5: a row for each name of `placed`: the digests of the trainer's first copies and of all its copies, the same
        two of the engine, and whether the weight is unread. In the last row, the number of faults.
      faults: found before the comparison.
    """

    version: int
    mesh: Mesh
    rank: int
    trained: Mapping[str, Layout]
    placed: Mapping[str, Layout]
    own_N5: Tensor
    faults: Sequence[str]

    def ready(self) -> bool:
        """True: the engine takes weights at once."""
        return True

    def whole_digests(self) -> dict[str, int]:
        """Digests of the trainer's whole weights, by name. Collective."""
        wait_for_digests(self.mesh.device)
        return dict(zip(self.placed, psum(self.own_N5, self.mesh, AXES)[:, 0].tolist(), strict=False))

    def compare(self) -> Compared:
        """Wait for the digests and compare them. Collective; raises as `compare_weights`."""
        mesh = self.mesh
        placed = self.placed
        wait_for_digests(mesh.device)
        *rows, (*_, faulty) = psum(self.own_N5, mesh, AXES).tolist()
        before = f"after the sync of version {self.version} the engine does not hold the trainer's weights: "
        if faulty:
            raise SyncError(before + first_fault(faults_everywhere(self.faults, mesh)))
        wrong = differing_weights(self.trained, placed, {name: x[:4] for name, x in zip(placed, rows, strict=True)})
        if wrong:
            name = wrong[0]
            _, trainer, _, held, _ = self.own_N5[list(placed).index(name)].tolist()
            share = WeightShare(self.trained[name].box(mesh.rank), trainer, placed[name].box(self.rank), engine=held)
            where = _where(gather_objects(share, mesh), mesh.ranks)
            raise SyncError(f"{before}{name} differs{where}; {len(wrong)} of {len(rows)} weights differ")
        read = {name: row[0] for name, row in zip(placed, rows, strict=True) if not row[4]}
        return Compared(len(read) == len(placed), read)


def faults_everywhere(faults: Sequence[str], mesh: Mesh) -> list[str]:
    """Faults of all ranks, with the ranks. Collective."""
    everywhere = zip(mesh.ranks, gather_objects(faults, mesh), strict=True)
    return [f"{fault} on rank {rank}" for rank, its in everywhere for fault in its]


def first_fault(faults: Sequence[str]) -> str:
    """The first of some faults, and the count of the others."""
    return faults[0] + (f", and {len(faults) - 1} further faults" if faults[1:] else "")


def differing_weights(
    trained: Mapping[str, Layout], placed: Mapping[str, Layout], digests: Mapping[str, Sequence[int]]
) -> list[str]:
    """Names of weights whose copies are not all the same.

    Args:
      trained, placed: layout of each weight in the trainer and in the engine.
      digests: of each weight: of the trainer's first copies, of all its copies, and the same two of the engine.
    """
    return [
        name
        for name, (once, trainer, engine_once, held) in digests.items()
        if once != engine_once
        or (trainer - copies(trained[name]) * once) % (1 << 64)
        or (held - copies(placed[name]) * once) % (1 << 64)
    ]


def readable_weights(
    spec: WeightSpec, held_weights: Iterable[tuple[str, Tensor | int | None]], faults: list[str]
) -> Iterator[tuple[str, Tensor | int | None]]:
    """Yield the name and this rank's part of each weight that an engine computes with; None: it cannot be read.

    An int is the digest of a whole weight that another process holds, which has checked its form.

    Args:
      spec: the form in which the engine takes weights.
      held_weights: of the engine.
      faults: receives a missing or unknown name, or a wrong shape or dtype.
    """
    placed = spec.held_layouts
    awaited = {there: name for name, (there, _) in spec.names.items() if name in placed}
    for there, held in held_weights:
        name = awaited.pop(there, None)
        if name is None:
            faults.append(f"{there} is unknown or given twice")
            continue
        shape = placed[name].local_shape(spec.mesh.rank)
        dtype = weight_dtype(name, spec.dtype)
        if not isinstance(held, Tensor):
            yield name, held
        elif held.numel() != math.prod(shape) or held.dtype != dtype:
            faults.append(f"{name} is {held.dtype} {list(held.shape)} instead of {dtype} {list(shape)}")
        else:
            yield name, held.reshape(shape)
    faults += [f"{name} is missing" for name in awaited.values()]


def digest_parts(
    spec: WeightSpec, held_weights: Iterable[tuple[str, Tensor | int | None]], faults: list[str]
) -> dict[str, Tensor]:
    """Digests by name of this rank's parts of the weights that can be read; the arguments are those of the above."""
    placed = spec.held_layouts
    return {
        name: held_digest(held, placed[name], spec)
        for name, held in readable_weights(spec, held_weights, faults)
        if held is not None
    }


def held_digest(held: Tensor | int, layout: Layout, spec: WeightSpec) -> Tensor:
    """Digest of this rank's part of a weight that an engine holds in a layout."""
    if isinstance(held, int):
        return torch.tensor(held)
    return digest(held, layout, spec.mesh.rank, held.dtype, signed_zeros=spec.signed_zeros)


def held_shards(engine: Engine) -> trees.Tree:
    """Shards of this rank of the weights as an engine takes them; None: some are unread, or it splits them itself."""
    if engine.version is None or engine.weights.held is not None:
        return None
    faults: list[str] = []
    held = readable_weights(engine.weights, engine.held_weights(), faults)
    shards = {name: x for name, x in held if isinstance(x, Tensor)}
    if faults or len(shards) < len(trees.leaves(engine.weights.layouts)):
        return None
    return trees.from_named(engine.weights.layouts, iter(shards.items()))


def sync_digests(source: DeviceWeights, engine: Engine, version: int) -> Digests:
    """Digests of this rank's parts of all weights; a GPU computes them beside other work, and nothing waits for them.

    Neither the trainer's nor the engine's weights may change until they are compared.

    Args: as in `compare_weights`.
    """
    if isinstance(engine, OfOtherRanks):
        return engine.sync_digests(source, version)
    mesh = source.mesh
    placed = engine.weights.held_layouts
    with beside(mesh.device):
        digests, faults = _own_digests(source, engine)
        if engine.version != version:
            faults.insert(0, f"the version is {engine.version}")
        last = torch.zeros(5, dtype=torch.int64, device=mesh.device)
        unread = last.clone()
        last[4] = len(faults)
        unread[4] = 1
        own_N5 = torch.stack([*(digests.get(name, unread) for name in placed), last])
    return SyncDigests(version, mesh, engine.weights.mesh.rank, source.stored, placed, own_N5=own_N5, faults=faults)


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run the context's work on a side stream of a GPU; on other devices it runs at once."""
    if device.type != "cuda":
        yield
        return
    side = _digest_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def wait_for_digests(device: torch.device) -> None:
    """Make later work on a GPU wait for that of `beside`, without blocking the host."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_digest_stream(device))


@functools.cache
def _digest_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def digest(x: Tensor, layout: Layout, rank: int, dtype: torch.dtype, *, signed_zeros: bool = True) -> Tensor:
    """Digest of a rank's part of a weight: an int64 scalar, the same on every device.

    Extra memory: a few times `PIECE` numbers of 8 bytes, and 8 bytes for each coordinate of the longest dim.

    Args:
      x: the part, in any floating point dtype.
      layout: of the weight; `x` has the shape of its box.
      rank: in the layout's mesh.
      dtype: dtype that `x` is cast to before its bits are read.
      signed_zeros: whether -0 counts as another number than 0.
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.int64, device=x.device)
    wait_for_digests(x.device)  # which may be making the keys
    *intervals, (low, high) = layout.box(rank) or ((0, 1),)
    words = dtype.itemsize // WORDS[dtype.itemsize].itemsize
    intervals.append((low * words, high * words))
    keys = [_keys(dim, *interval, x.device) for dim, interval in enumerate(intervals)]
    return _digest(x.detach().reshape(x.shape or (1,)), keys, dtype, signed_zeros)


def copies(layout: Layout) -> int:
    """Number of ranks that hold each element."""
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    return layout.world // math.prod(sizes[axis] for axis in layout.axes)


def probe_gap(placed: Placed, params: trees.Tree, engine: Engine) -> float:
    """Largest difference in nats between the engine's and the trainer's log-probabilities of greedy completions.

    Each replica of the engine completes a fixed text. The trainer scores the tokens of the first replica. If another
    replica has a different token, which rounding explains if two are about equally probable, the tokens after it are
    not compared.

    Args: as in `certify`.
    """
    mesh = placed.mesh
    config = placed.model.config
    prompts, new_tokens = probe_prompts(config.vocab, config.max_positions)
    tokens_BS, logp_BS, spread = greedy(engine, prompts, new_tokens)
    here = mesh.rank == 0
    first_BS = psum(tokens_BS if here else torch.zeros_like(tokens_BS), mesh, AXES)
    tokens_BT = torch.cat([torch.tensor(prompts, device=mesh.device), first_BS], 1)
    mask_BT = torch.arange(tokens_BT.shape[1], device=mesh.device).expand(tokens_BT.shape) >= len(prompts[0])
    plain = dataclasses.replace(
        placed, layer=placed.model.layer
    )  # a compiled layer would be compiled again for this shape
    with torch.no_grad():
        scores = plain.token_scores(params, _packed(tokens_BT, mask_BT, placed.multiple)).read("logp")
    scores = scores.flatten()[: tokens_BT.numel()].view(tokens_BT.shape)
    gap = largest_gap(scores[:, len(prompts[0]) :], logp_BS, tokens_BS != first_BS)
    return max(spread, pmax(gap, mesh, AXES).item())


def largest_gap(a_BS: Tensor, b_BS: Tensor, differs_BS: Tensor) -> Tensor:
    """Largest difference of log-probabilities in nats, a float64 scalar; after the first token that differs none."""
    after_BS = (differs_BS.cumsum(1) - differs_BS.long()) > 0  # the first difference is still compared
    gap_BS = (a_BS.double() - b_BS.double()).abs().masked_fill(after_BS, 0)
    return gap_BS.nan_to_num(torch.inf).max()


def _packed(tokens_BT: Tensor, mask_BT: Tensor, multiple: int) -> Batch:
    """Concatenate and pad the rows if ranks share the tokens of a row; else keep them as they are."""
    if multiple == 1:
        return Batch(tokens=tokens_BT, mask=mask_BT)
    (B, T) = tokens_BT.shape
    device = tokens_BT.device
    rows = tokens_BT, mask_BT, torch.arange(1, B + 1, device=device)[:, None].expand(B, T)
    tokens, mask, segments = (F.pad(x.flatten(), (0, -B * T % multiple)).unsqueeze(0) for x in rows)
    positions = F.pad(torch.arange(T, device=device).repeat(B), (0, -B * T % multiple)).unsqueeze(0)
    offsets = torch.arange(0, B * T + 1, T, device=device, dtype=torch.int32)
    return Batch(tokens=tokens, mask=mask, segments=segments.int(), positions=positions, offsets=offsets)


def probe_prompts(vocab: int, positions: int) -> tuple[list[list[int]], int]:
    """Random token ids of the fixed text, and the number of tokens to add; together they fit into `positions`."""
    length = min(PROBE_TOKENS, max(1, positions - PROBE_NEW_TOKENS))
    ids_PT = np.random.default_rng(0).integers(vocab, size=(PROBE_PROMPTS, length))
    return ids_PT.tolist(), min(PROBE_NEW_TOKENS, positions - length)


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
    """Greedy completions by this rank's replica, or by the first one of an engine on other ranks."""
    if isinstance(engine, OfOtherRanks):
        return engine.greedy(prompts, new_tokens)
    paused = engine.paused
    engine.resume()
    done = complete(engine, greedy_requests(prompts, new_tokens))
    if paused:
        engine.pause()
    return greedy_of(done, engine.weights.mesh.device)


def greedy_requests(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Request]:
    """Requests for one greedy completion of each prompt."""
    return requests_of(prompts, Sampling(greedy=True, max_new_tokens=new_tokens), 0)


def greedy_of(done: Sequence[Completion], device: torch.device) -> Greedy:
    """Greedy completions, all of one length, on a device."""
    tokens_BS = torch.stack([completion.tokens for completion in done])
    logp_BS = torch.stack([completion.raw_logp for completion in done])
    return Greedy(tokens_BS.to(device), logp_BS.to(device))


def _own_digests(source: DeviceWeights, engine: Engine) -> tuple[dict[str, Tensor], list[str]]:
    """This rank's row of each readable weight, as `compare_weights` adds them, and faults found before the comparison.

    A fault is a missing or unknown name, or a wrong shape or dtype.
    """
    spec = engine.weights
    placed = engine.weights.held_layouts
    trained = source.stored
    mesh = source.mesh
    faults = []
    parts: dict[str, Tensor] = {}
    digests = {}
    none = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for name, held in readable_weights(spec, engine.held_weights(), faults):
        if held is None:
            continue
        dtype = weight_dtype(name, spec.dtype)
        own = source.weight(name)
        for read in (own, held):
            if isinstance(read, Tensor) and read.is_cuda:  # its memory is not given to others before it has been read
                read.record_stream(_digest_stream(read.device))
        ours = digest(own, trained[name], mesh.rank, dtype=dtype, signed_zeros=spec.signed_zeros).to(mesh.device)
        same = trained[name].box(mesh.rank) == placed[name].box(spec.mesh.rank)
        shared = same and isinstance(held, Tensor) and _same_memory(own, held)
        theirs = parts[name] = ours if shared else held_digest(held, placed[name], spec).to(mesh.device)
        first = first_copy(trained[name], mesh)
        engine_first = first_copy(placed[name], spec.mesh)
        digests[name] = torch.stack([ours * first, ours, theirs * engine_first, theirs, none])
    engine.take_digests(parts)
    return digests, faults


def first_copy(layout: Layout, mesh: Mesh) -> bool:
    """True on exactly one of the ranks that hold the same part."""
    index = coordinates(mesh.sizes, mesh.rank)
    return all(index[axis] == 0 for axis in AXES if axis not in layout.axes)


def _same_memory(x: Tensor, y: Tensor) -> bool:
    comparable = x.dtype == y.dtype and x.device == y.device and x.stride() == y.stride()
    return comparable and x.data_ptr() == y.data_ptr()


def _where(shares: Sequence[WeightShare], ranks: Ranks) -> str:
    """Describe the ranks whose part differs from other copies of it; "" if every part is on one rank only.

    Args:
      shares: parts and digests of every rank of the mesh.
      ranks: numbers of these ranks in the run.
    """
    stored: dict[Box, tuple[int, int]] = {}
    for rank, share in zip(ranks, shares, strict=True):
        first, number = stored.setdefault(share.stored, (rank, share.trainer))
        if number != share.trainer:
            return f" before the sync: the trainer's ranks {first} and {rank} have the same part with other numbers"
    placed: dict[Box, tuple[int, int]] = {}
    for rank, share in zip(ranks, shares, strict=True):
        if share.placed in stored and stored[share.placed][1] != share.engine:
            return f" on rank {rank}"
        first, number = placed.setdefault(share.placed, (rank, share.engine))
        if number != share.engine:
            return f" between ranks {first} and {rank}, which ought to hold the same part"
    return ""


@functools.lru_cache(maxsize=256)
def _keys(dim: int, low: int, high: int, device: torch.device) -> Tensor:
    """Odd random int64 numbers for the coordinates from `low` to `high` of a dim."""
    numbers = np.random.PCG64(dim).random_raw(high)[low:] | 1
    return copy_to_device(torch.from_numpy(numbers.view(np.int64)), device)


def _digest(x: Tensor, keys: Sequence[Tensor], dtype: torch.dtype, signed_zeros: bool) -> Tensor:
    """Digest of a part with at least one dim and one number.

    Args:
      x: the part.
      keys: for each dim the keys of the part's coordinates; for the last dim, of its words.
      dtype, signed_zeros: as in `digest`.
    """
    piece = PIECE.get(x.device.type, GPU_PIECE)
    row = x[0].numel()
    if row > piece:
        return (torch.stack([_digest(entry, keys[1:], dtype, signed_zeros) for entry in x]) * keys[0]).sum()
    total = keys[0].new_zeros(())
    rows = piece // row
    words = len(keys[0]) // len(x)
    for part, first in zip(x.split(rows), keys[0].split(rows * words), strict=True):
        narrow = part.to(dtype) if signed_zeros else part.to(dtype) + 0
        words_of_rows = narrow.contiguous().reshape(-1).view(WORDS[dtype.itemsize])
        numbers = words_of_rows.view(*narrow.shape[:-1], -1)
        for key in (*keys[:0:-1], first):
            numbers = (numbers * key).sum(-1)  # a GPU widens the bits to int64 as it reads them
        total += numbers
    return total
