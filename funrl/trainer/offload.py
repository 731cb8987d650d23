"""What a phase does not need leaves the accelerator: optimizer states, frozen models, weights while the engine writes.

Copies go through pinned memory on a stream of their own. A leaving tree costs no time, for the phase that follows
computes beside the copy; what comes back is waited for by the device, not by the program.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.plan import Plan
from funrl.trainer.step import Learner

if TYPE_CHECKING:
    from funrl.trainer.ensemble import State

PARTS = ("optimizer", "reference", "params")
NEEDS = {"generate": (), "score": ("params", "reference"), "update": ("params", "optimizer")}  # stages of a step


def parse(text: str | None) -> frozenset[str]:
    """The parts of "optimizer,params".

    Raises:
      ValueError: one that is not in `PARTS`.
    """
    parts = [] if text is None else text.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"{unknown[0]!r} cannot leave the accelerator; {', '.join(PARTS)} can")
    return frozenset(parts)


def place(state: State, here: Collection[str], away: frozenset[str], plan: Plan, device: torch.device) -> State:
    """The state with some parts on the device; it is given up. On a CPU it stays as it is.

    Args:
      here: which of `PARTS` the next stage needs.
      away: which of them are kept off the device otherwise.
      plan: from the policy's layouts to the engine's. Weights whose memory the engine shares stay.
      device: of the mesh.
    """
    if device.type != "cuda" or not away:
        return state

    def moved(part: str, tree: trees.Tree, stays: Collection[bool] = ()) -> trees.Tree:
        if part not in away:
            return tree
        return come(tree, device) if part in here else leave(tree, stays)

    def learner(one: Learner | None, stays: Collection[bool] = ()) -> Any:
        if one is None:
            return None
        return Learner(moved("params", one.params, stays), moved("optimizer", one.opt_state))

    return state._replace(
        policy=learner(state.policy, shared(state.policy.params, plan)),
        critic=learner(state.critic),
        reward_model=learner(state.reward_model),
        reference=moved("reference", state.reference),
        teacher=moved("reference", state.teacher),
    )


def shared(params: trees.Tree, plan: Plan) -> list[bool]:
    """Which of the policy's weights are the engine's too, by the plan to it: those that keep their box and dtype."""
    return [
        plan.route(leaf).way == "alias" and plan.dtypes[leaf] == x.dtype for leaf, x in enumerate(trees.leaves(params))
    ]


def leave(tree: trees.Tree, stays: Collection[bool] = ()) -> trees.Tree:
    """The tree in pinned memory; its device memory is free when the copies, which this does not wait for, are done.

    Args:
      tree: floating point leaves move; counters and leaves that are away already do not.
      stays: one bool a leaf, true for those that stay; none given: all leave.
    """

    def out(x: Any, stay: bool) -> Any:
        if stay or not isinstance(x, Tensor) or not x.is_cuda or not x.is_floating_point():
            return x
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        side = _stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            host.copy_(x, non_blocking=True)
        x.record_stream(side)  # its memory is not given to others before the copy is done
        return host

    leaves = trees.leaves(tree)
    return trees.fill(tree, [out(x, stay) for x, stay in zip(leaves, stays or [False] * len(leaves), strict=True)])


def come(tree: trees.Tree, device: torch.device) -> trees.Tree:
    """The tree on the device again: what is computed with it after this call runs after the copies."""
    here, side = torch.cuda.current_stream(device), _stream(device)

    def back(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_cuda or not x.is_pinned():
            return x
        copy = torch.empty_like(x, device=device)
        side.wait_stream(here)
        with torch.cuda.stream(side):  # where the copy to the host was made, so that this one comes after it
            copy.copy_(x, non_blocking=True)
        copy.record_stream(side)
        return copy

    values = [back(x) for x in trees.leaves(tree)]
    here.wait_stream(side)
    return trees.fill(tree, values)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
