"""Offloading of optimizer states, frozen weights and the policy's weights while a phase does not need them.

The base of adapters goes with the policy's weights. Copies go through pinned memory on a stream of their own.
Offloading costs no time, for the phase that follows computes beside the copy; what is onloaded is waited for by the
device, not by the program. Pinned buffers are kept from step to step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.plan import Plan
from funrl.models.lora import merged_weights
from funrl.processes.device_memory import copy_stream
from funrl.role_kinds import SCORING_ROLES
from funrl.trainer.phases import Trainer
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.roles import Role, RoleState, State, bases, keep_copies

PARTS = ("optimizer", "reference", "params")
NEEDS = {  # of the stages of a step, and of the end; of frozen weights see `frozen_stages`
    "generate": (),
    "score": ("params",),
    "update": ("params", "optimizer"),
    "save": ("params",),
}
Mover = Callable[[Trainer, State, str], tuple[Trainer, State]]
HostBuffers = dict[int, Tensor]  # pinned, of the leaves of one tree by their numbers


def offloaded_parts(text: str | None) -> frozenset[str]:
    """The parts of "optimizer,params", each one of `PARTS`."""
    return frozenset(text.split(",")) if text else frozenset()


def mover(text: str | None, parts: Parts, note: Callable[[str], None]) -> Mover:
    """Make a function (trainer, state, stage) -> both, with what the stage needs on the device and the rest off it.

    Its arguments are donated. On a CPU everything stays where it is.

    Args:
      text: which of `PARTS` are offloaded, with commas between.
    """
    away = offloaded_parts(text)
    if away and parts.mesh.device.type == "cuda":
        move = _moving(away, parts)
        return _with_copies(move, parts.roles) if "params" in away else move
    if away:
        note(f"--offload={text} does nothing here: on a CPU there is no other memory to use")
    return lambda trainer, state, stage: (trainer, state)


def _with_copies(move: Mover, roles: Mapping[str, Role]) -> Mover:
    """A mover that gives weights new copies to compute with: those before were of the memory that the weights left."""

    def move_with_copies(trainer: Trainer, state: State, stage: str) -> tuple[Trainer, State]:
        trainer, state = move(trainer, state, stage)
        if stage in ("score", "update"):
            keep_copies(roles, state.roles)
        return trainer, state

    return move_with_copies


def _moving(away: Collection[str], parts: Parts) -> Mover:
    """`mover` on an accelerator, for some of `PARTS`."""
    device = parts.mesh.device
    generator = parts.generator if isinstance(parts, GeneratingParts) else None
    keeps = generator is not None and not generator.engine.weights.streamed
    to_engine = generator.to_whole if generator is not None and keeps else None
    stages = frozen_stages(parts.roles)
    main = parts.roles[parts.main_role]
    merged = made_weights(parts)
    source = main.base or parts.main_role  # whose weights may be the engine's too
    buffers: defaultdict[tuple[str, str], HostBuffers] = defaultdict(dict)  # by part and role

    def kept_by_engine(name: str, tree: trees.Tree) -> Collection[bool]:
        return shared(tree, to_engine, merged) if name == source and to_engine is not None else ()

    def moved(part: str, name: str, tree: trees.Tree, stage: str) -> trees.Tree:
        if part not in away:
            return tree
        if part in NEEDS[stage]:
            return onload(tree, device)
        return offload(tree, kept_by_engine(name, tree) if part == "params" else (), buffers[part, name])

    def moved_frozen(name: str, tree: trees.Tree, stage: str) -> trees.Tree:
        if name == source:  # the policy's weights but for its adapters
            return moved("params", name, tree, stage)
        if "reference" not in away or name not in stages:
            return tree
        return onload(tree, device) if stage in stages[name] else offload(tree, buffers=buffers["reference", name])

    def move(trainer: Trainer, state: State, stage: str) -> tuple[Trainer, State]:
        roles = {}
        for name, role in state.roles.items():
            params = moved("params", name, role.params, stage)
            roles[name] = RoleState(params, moved("optimizer", name, role.opt_state, stage))
        frozen = {name: moved_frozen(name, tree, stage) for name, tree in trainer.frozen.items()}
        following = {name: moved_frozen(name, tree, stage) for name, tree in state.following.items()}
        return trainer._replace(frozen=frozen), state._replace(roles=roles, following=following)

    return move


def made_weights(parts: Parts) -> frozenset[str]:
    """Names of the weights that are made for the engine: the ones with merged adapters."""
    if not isinstance(parts, GeneratingParts) or parts.generator.base is not None:
        return frozenset()
    return merged_weights(parts.roles[parts.main_role].placed.model)


def frozen_stages(roles: Mapping[str, Role]) -> dict[str, set[str]]:
    """Stages that need the weights of each frozen role that has its own.

    Reward models, which the source holds, are not among the roles: they stay on the device.
    """
    beside = {role.companion.name for role in roles.values() if role.companion is not None}
    return {
        name: {
            stage
            for stage, needed in (("score", role.writes or role.follow), ("update", name in beside or role.follow))
            if needed
        }
        for name, role in roles.items()
        if role.loss is None and name not in SCORING_ROLES and role.base is None and name not in bases(roles)
    }


def shared(params: trees.Tree, plan: Plan, made: Collection[str] = ()) -> list[bool]:
    """Mask of the policy's weights that are the engine's too, as they keep box and dtype in the plan to it.

    Args:
      made: names of weights that are made for the engine.
    """
    return [
        plan.route(leaf).way == "alias" and plan.dtypes[leaf] == x.dtype and name not in made
        for leaf, (name, x) in enumerate(trees.named(params))
    ]


def offload(tree: trees.Tree, stays: Collection[bool] = (), buffers: HostBuffers | None = None) -> trees.Tree:
    """The tree in pinned memory; its device memory is free when the copies, which this does not wait for, are done.

    Args:
      tree: floating point leaves move; counters and leaves that are off the device already do not.
      stays: one bool a leaf, true if it stays; none given: all leave.
      buffers: of earlier calls for this tree, whose results are donated: they are written again.
    """
    buffers = {} if buffers is None else buffers

    def out(leaf: int, x: object, stay: bool) -> object:
        if stay or not isinstance(x, Tensor) or not x.is_cuda or not x.is_floating_point():
            return x
        host = buffers.get(leaf)
        if host is None or (host.shape, host.dtype, host.stride()) != (x.shape, x.dtype, x.stride()):
            host = torch.empty_like(x, device="cpu", pin_memory=True)
            buffers[leaf] = host
        side = copy_stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):  # where the buffer was last read, so that it is written after that
            host.copy_(x, non_blocking=True)
        x.record_stream(side)  # its memory is not given to others before the copy is done
        return host

    leaves = trees.leaves(tree)
    kept = stays or [False] * len(leaves)
    return trees.fill(tree, [out(leaf, x, stay) for leaf, (x, stay) in enumerate(zip(leaves, kept, strict=True))])


def onload(tree: trees.Tree, device: torch.device) -> trees.Tree:
    """The tree on the device again: what is computed with it after this call runs after the copies."""
    here = torch.cuda.current_stream(device)
    side = copy_stream(device)

    def back(x: object) -> object:
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
