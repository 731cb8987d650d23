"""Collectives by axis name on local shards, in forward/backward pairs. On an axis of size 1 each is the identity.

| forward | backward | use |
|---|---|---|
| `psum` sums | identity | partial results become a replicated one |
| `pbroadcast` is the identity | sums | a replicated value enters code whose results differ by rank |
| `all_gather` concatenates | `psum_scatter` | shards become whole, each rank uses the whole in its own way |
| `psum_scatter` sums and splits | `all_gather` | the transpose of the above |
| `psum_pairwise`, `psum_scatter_pairwise` | as without | the same sums in an order that does not depend on the ranks |
| `all_to_all` exchanges | `all_to_all` back | one dim whole, another split |
| `ragged_all_to_all` sends uneven parts | the same backwards | rows go to their ranks |
| `start_rows`, `wait_rows` are its halves | the same, the other way round | rows travel while others are computed |
| `own_shard` takes this rank's part | concatenates | a replicated value is split; its gradient is whole again |
| `gather_replicated` concatenates | takes this rank's part | shards become whole, all ranks use the whole |

They are `setup_context`-style autograd functions over functional collectives, so eager mode, `torch.func`,
`torch.compile(fullgraph=True)` and the rank simulator take them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.mesh.launch import local_ranks
from funrl.mesh.mesh import AXES, Axes, Mesh
from funrl.mesh.one_shot import (
    ONE_SHOT_DTYPES,
    has_buffer,
    map_buffer,
    one_shot_problem,
    one_shot_sum,
    sums_at_once,
    unmap_buffer,
)
from funrl.processes import gloo
from funrl.processes.heartbeat import entered, left

_c10d = torch.ops._c10d_functional
_KEY_DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64}


def psum(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """Sum over `axes`; the gradient passes unchanged."""
    if mesh.size(axes) == 1:
        return x
    group = mesh.group_name(axes)
    return one_shot_sum(x, group) if sums_at_once(x, group) else _PSum.apply(x, group)


def begin_one_shot_sums(mesh: Mesh, axes: Axes) -> str | None:
    """Let `psum` take small sums over `axes` in one kernel where nothing learns; see `one_shot`. Collective.

    Returns: the reason why it does not, the same on all ranks or that of another one; None: it does.
    """
    ranks = mesh.size(axes)
    if ranks == 1:
        return "there is one rank"
    group = mesh.group_name(axes)
    if has_buffer(group):  # of an engine that was made before, whose CUDA graphs read it
        return None
    node = local_ranks(mesh.world)
    members = dist.get_process_group_ranks(mesh.group(axes))
    problem = one_shot_problem(mesh.device, ranks, ranks if len({rank // node for rank in members}) == 1 else 1)
    if not _on_all_ranks(problem is None, mesh, axes):
        return problem or "another rank cannot"
    problem = map_buffer(group, mesh.device)
    if _on_all_ranks(problem is None, mesh, axes):  # in its kernel a rank waits for all others
        problem = _wrong_sums(mesh, axes)
        if _on_all_ranks(problem is None, mesh, axes):
            return None
    unmap_buffer(group)
    return problem or "another rank cannot"


def _on_all_ranks(holds: bool, mesh: Mesh, axes: Axes) -> bool:
    """True if something holds on all ranks of `axes`."""
    return not pmax(torch.tensor(float(not holds), device=mesh.device), mesh, axes).item()


@torch.inference_mode()
def _wrong_sums(mesh: Mesh, axes: Axes) -> str | None:
    """Reason why small sums in one kernel are not NCCL's; None: of each dtype they are."""
    group = mesh.group_name(axes)
    numbers = torch.arange(64, device=mesh.device) % 7 + int(mesh.index(axes))  # exact in 16 bits
    parts = [numbers.to(dtype) for dtype in ONE_SHOT_DTYPES]
    try:
        sums = [one_shot_sum(x, group) for x in parts]
    except (RuntimeError, AttributeError) as error:  # of a build without the kernel
        return str(error)
    right = [_all_reduce(x, "sum", group) for x in parts]
    return None if all(map(torch.equal, sums, right)) else "its sums are not NCCL's"


def pbroadcast(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """The identity; the gradient is summed over `axes`."""
    return x if mesh.size(axes) == 1 else _PBroadcast.apply(x, mesh.group_name(axes))


def pmax(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """Elementwise maximum over `axes`, NaN where a rank has it, which backends' maximum may lose; no gradient."""
    if mesh.size(axes) == 1:
        return x
    keys = ascending_keys(x.detach()) if x.is_floating_point() else x
    largest = _all_reduce(keys, "max", mesh.group_name(axes))
    return from_ascending_keys(largest, x.dtype) if x.is_floating_point() else largest


def all_gather(x: Tensor, mesh: Mesh, axes: Axes, dim: int = 0) -> Tensor:
    """Concatenate the shards of `axes` along `dim`; the gradient is summed and split."""
    return x if mesh.size(axes) == 1 else _AllGather.apply(x, mesh.size(axes), mesh.group_name(axes), dim)


def psum_scatter(x: Tensor, mesh: Mesh, axes: Axes, dim: int = 0) -> Tensor:
    """Sum over `axes` and keep this rank's part of `dim`; the gradient is concatenated."""
    return x if mesh.size(axes) == 1 else _PSumScatter.apply(x, mesh.size(axes), mesh.group_name(axes), dim)


def psum_pairwise(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """`psum` by a binary tree over the ranks: neighbours first, then neighbours of these. It sends as much.

    So ranks, a power of two of them, that hold neighbouring parts of a sum get the same bits however many they are.
    """
    ranks = mesh.size(axes)
    if ranks <= 2:
        return psum(x, mesh, axes)  # of two numbers there is one sum
    return _PSumPairwise.apply(x, ranks, mesh.group_name(axes))


def psum_scatter_pairwise(x: Tensor, mesh: Mesh, axes: Axes, dim: int = 0) -> Tensor:
    """`psum_scatter` by the tree of `psum_pairwise`."""
    ranks = mesh.size(axes)
    if ranks <= 2:
        return psum_scatter(x, mesh, axes, dim)
    return _PSumScatterPairwise.apply(x, ranks, mesh.group_name(axes), dim)


def own_shard(x: Tensor, mesh: Mesh, axes: Axes, dim: int = 0) -> Tensor:
    """This rank's part of `dim` of a replicated tensor; the gradient is concatenated."""
    if mesh.size(axes) == 1:
        return x
    return _OwnShard.apply(x, mesh.size(axes), mesh.group_name(axes), dim, mesh.index(axes))


def gather_replicated(x: Tensor, mesh: Mesh, axes: Axes, dim: int = 0) -> Tensor:
    """Concatenate the shards of `axes` along `dim` for a use that is the same on every rank."""
    if mesh.size(axes) == 1:
        return x
    return _GatherReplicated.apply(x, mesh.size(axes), mesh.group_name(axes), dim, mesh.index(axes))


def all_to_all(x: Tensor, mesh: Mesh, axes: Axes, split: int, concat: int) -> Tensor:
    """Split dim `split` over the ranks of `axes` and concatenate what arrives along dim `concat`."""
    return x if mesh.size(axes) == 1 else _AllToAll.apply(x, mesh.size(axes), mesh.group_name(axes), split, concat)


def ragged_all_to_all(x: Tensor, send: list[int], receive: list[int], mesh: Mesh, axes: Axes) -> Tensor:
    """Send rows to the ranks of `axes`, and concatenate the received rows in the order of the ranks.

    Args:
      x: rows, those for the first rank first.
      send, receive: how many go to each rank, and come from each.
    """
    return wait_rows(start_rows(x, send, receive, mesh, axes), send, receive, mesh, axes)


def start_rows(x: Tensor, send: list[int], receive: list[int], mesh: Mesh, axes: Axes) -> Tensor:
    """Begin a `ragged_all_to_all`; `wait_rows` for the result. The gradient is waited for here."""
    return x if mesh.size(axes) == 1 else _StartRows.apply(x, send, receive, mesh.group_name(axes))


def wait_rows(x: Tensor, send: list[int], receive: list[int], mesh: Mesh, axes: Axes) -> Tensor:
    """The result of `start_rows` with these arguments; the way of the gradient begins here."""
    return x if mesh.size(axes) == 1 else _WaitRows.apply(x, send, receive, mesh.group_name(axes))


def exchange_rows(x: Tensor, send: list[int], receive: list[int], mesh: Mesh, axes: Axes) -> Tensor:
    """`ragged_all_to_all` without a gradient."""
    if mesh.size(axes) == 1:
        return x
    return wait(_c10d.all_to_all_single(x.contiguous(), receive, send, mesh.group_name(axes)))


def start_all_gathers(xs: Sequence[Tensor], mesh: Mesh, axes: Axes) -> list[Tensor]:
    """Begin to concatenate the shards of `axes` of each tensor along dim 0, into new tensors. No gradient.

    Return at once; `wait` for each result before use. The tensors must be contiguous, of one dtype, and stay as they
    are until then. They are one group of the backend.
    """
    shards = [x.detach() for x in xs]
    if mesh.size(axes) == 1:
        return shards
    arguments = mesh.size(axes), mesh.group_name(axes)
    if len(shards) > 1 and groups_messages():
        return _c10d.all_gather_into_tensor_coalesced(shards, *arguments)
    return [_c10d.all_gather_into_tensor(x, *arguments) for x in shards]


def start_psum_scatters(xs: Sequence[Tensor], mesh: Mesh, axes: Axes) -> list[Tensor]:
    """Begin to sum each tensor over `axes` and keep this rank's part of dim 0, in its dtype. No gradient.

    Return at once; `wait` for each result before use. The tensors must be contiguous, of one dtype, and stay as they
    are until then. They are one group of the backend.
    """
    whole = [x.detach() for x in xs]
    if mesh.size(axes) == 1:
        return whole
    arguments = "sum", mesh.size(axes), mesh.group_name(axes)
    if len(whole) > 1 and groups_messages():
        return _c10d.reduce_scatter_tensor_coalesced(whole, *arguments)
    return [_c10d.reduce_scatter_tensor(x, *arguments) for x in whole]


def start_psum(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """Begin to sum a tensor over `axes`, into a new one. No gradient; `wait` for the result before use."""
    return x.detach() if mesh.size(axes) == 1 else _c10d.all_reduce(x.detach(), "sum", mesh.group_name(axes))


def start_shift(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """Begin to send to the next rank of `axes`, and to receive of the one before, round a ring; `wait` for it.

    No gradient. `x` must stay as it is until then; what comes is flat.
    """
    flat = x.detach().contiguous().view(-1)
    ranks = mesh.size(axes)
    own = int(mesh.index(axes))
    if ranks == 1:
        return flat

    def only(rank: int) -> list[int]:
        return [flat.numel() * (other == rank % ranks) for other in range(ranks)]

    return _c10d.all_to_all_single(flat, only(own - 1), only(own + 1), mesh.group_name(axes))


def wait(x: Tensor) -> Tensor:
    """The result of a started collective."""
    entered("a collective begun before")
    result = _c10d.wait_tensor(x)
    left()
    return result


def gather_objects(value: object, mesh: Mesh) -> list[Any]:
    """Any picklable value of every rank of the mesh, by rank. For the rare and the small: errors, names."""
    if mesh.world == 1:
        return [value]
    values: list[Any] = [None] * mesh.world
    entered("all_gather_object", mesh.group_name(AXES))
    dist.all_gather_object(values, value, group=mesh.group(AXES))
    left()
    return values


def from_first_rank(value: object, mesh: Mesh) -> Any:
    """Any picklable value of the first rank of the mesh, on every rank."""
    if mesh.world == 1:
        return value
    values = [value if mesh.rank == 0 else None]
    dist.broadcast_object_list(values, group=mesh.group(AXES), group_src=0)
    return values[0]


def groups_messages() -> bool:
    """True if several collectives are one group of the backend. Gloo would copy them to one buffer and back."""
    # Of a program that is traced for XLA there are no groups.
    return dist.is_initialized() and dist.get_backend() != gloo.NAME


def from_first(value: object, mesh: Mesh, axes: Axes) -> Any:
    """Any picklable value of the first rank of `axes`, on all of its ranks. None costs one small collective."""
    if mesh.size(axes) == 1:
        return value
    sends = int(mesh.index(axes)) == 0 and value is not None
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if sends else torch.zeros(0)
    size = int(psum(torch.tensor(len(data), device=mesh.device), mesh, axes))
    if not size:
        return None
    data = data.to(mesh.device) if sends else torch.zeros(size, dtype=torch.uint8, device=mesh.device)
    return pickle.loads(psum(data, mesh, axes).cpu().numpy().tobytes())


def _all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    entered("all_reduce", group)
    result = _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, group))
    left()
    return result


def ascending_keys(x: Tensor) -> Tensor:
    """Integers of at least 32 bits in the order of the numbers of x: a NaN is above all numbers, -0 is 0."""
    wide = x if x.dtype == torch.float64 else x.float()
    bits = torch.where(wide.isnan(), torch.nan, wide + 0.0).view(_KEY_DTYPES[wide.dtype])  # one NaN, one zero
    return _reverse_negatives(bits)


def from_ascending_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers, of a dtype, whose `ascending_keys` these are."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return _reverse_negatives(keys.to(_KEY_DTYPES[wide])).view(wide).to(dtype)


def _reverse_negatives(bits: Tensor) -> Tensor:
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _gather(x: Tensor, size: int, group: str, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    entered("all_gather", group)
    result = _c10d.wait_tensor(_c10d.all_gather_into_tensor(front, size, group)).movedim(0, dim)
    left()
    return result


def _scatter(x: Tensor, size: int, group: str, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    entered("reduce_scatter", group)
    result = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(front, "sum", size, group)).movedim(0, dim)
    left()
    return result


def _scatter_pairwise(x: Tensor, size: int, group: str, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    parts = _exchange(front.flatten(), size, group, split=0, concat=0).view(size, -1)
    while len(parts) > 1:
        paired = len(parts) // 2 * 2
        sums = parts[:paired:2] + parts[1:paired:2]
        parts = sums if paired == len(parts) else torch.cat([sums, parts[paired:]])
    return parts.view(front.shape[0] // size, *front.shape[1:]).movedim(0, dim)


def _sum_pairwise(x: Tensor, size: int, group: str) -> Tensor:
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % size))
    return _gather(_scatter_pairwise(flat, size, group, 0), size, group, 0)[: x.numel()].view(x.shape)


def _own(x: Tensor, size: int, dim: int, index) -> Tensor:
    if isinstance(index, int):
        return x.chunk(size, dim)[index]
    return x.unflatten(dim, (size, -1)).index_select(dim, index.reshape(1)).squeeze(dim)


def _exchange(x: Tensor, size: int, group: str, split: int, concat: int) -> Tensor:
    front = torch.stack(x.chunk(size, split))
    parts = [front.shape[1:].numel()] * size
    entered("all_to_all", group)
    flat = _c10d.wait_tensor(_c10d.all_to_all_single(front.reshape(-1), parts, parts, group))
    left()
    return torch.cat(list(flat.view(front.shape).unbind(0)), concat)


def _constant(backward):
    """Make the result of a backward a constant.

    The functional collectives have derivatives of their own, which are not these and which `torch.func` refuses.
    """

    def without_grad(ctx, grad):
        with torch.no_grad():
            return backward(ctx, grad)

    return without_grad


class _PSum(AutogradFunction):
    @staticmethod
    def forward(x, group):
        return _all_reduce(x, "sum", group)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return grad, None


class _PBroadcast(AutogradFunction):
    @staticmethod
    def forward(x, group):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.group = inputs[1]

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return _all_reduce(grad, "sum", ctx.group), None


class _AllGather(AutogradFunction):
    @staticmethod
    def forward(x, size, group, dim):
        return _gather(x, size, group, dim=dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.args = inputs[1:]

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return _scatter(grad, *ctx.args), None, None, None


class _PSumScatter(AutogradFunction):
    @staticmethod
    def forward(x, size, group, dim):
        return _scatter(x, size, group, dim=dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.args = inputs[1:]

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return _gather(grad, *ctx.args), None, None, None


class _PSumPairwise(AutogradFunction):
    @staticmethod
    def forward(x, size, group):
        return _sum_pairwise(x, size, group)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return grad, None, None


class _PSumScatterPairwise(AutogradFunction):
    @staticmethod
    def forward(x, size, group, dim):
        return _scatter_pairwise(x, size, group, dim=dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.args = inputs[1:]

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return _gather(grad, *ctx.args), None, None, None


class _OwnShard(AutogradFunction):
    @staticmethod
    def forward(x, size, group, dim, index):
        return _own(x, size, dim, index=index).contiguous()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.args = inputs[1:4]

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return _gather(grad, *ctx.args), None, None, None, None


class _GatherReplicated(AutogradFunction):
    @staticmethod
    def forward(x, size, group, dim, index):
        return _gather(x, size, group, dim=dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.size, _, ctx.dim, ctx.index = inputs

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return _own(grad, ctx.size, ctx.dim, index=ctx.index).contiguous(), None, None, None, None


class _AllToAll(AutogradFunction):
    @staticmethod
    def forward(x, size, group, split, concat):
        return _exchange(x, size, group, split=split, concat=concat)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.size, ctx.group, ctx.split, ctx.concat = inputs

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return _exchange(grad, ctx.size, ctx.group, split=ctx.concat, concat=ctx.split), None, None, None, None


class _StartRows(AutogradFunction):
    @staticmethod
    def forward(x, send, receive, group):
        return _c10d.all_to_all_single(x.contiguous(), receive, send, group)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return wait(grad), None, None, None


class _WaitRows(AutogradFunction):
    @staticmethod
    def forward(x, send, receive, group):
        return wait(x).view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.send, ctx.receive, ctx.group = inputs

    @staticmethod
    @_constant
    def backward(ctx, grad):
        return _c10d.all_to_all_single(grad.contiguous(), ctx.send, ctx.receive, ctx.group), None, None, None
