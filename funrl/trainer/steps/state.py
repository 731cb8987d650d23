"""The state of a run: everything that changes from step to step, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from funrl import trees
from funrl.trainer.steps.roles import RoleState


class EarlierSelf(NamedTuple):
    """An earlier self of the policy, with which agents play.

    Attributes:
      params: this rank's shards of its own weights, in the layouts of the policy's.
      step: after which it was the policy.
    """

    params: trees.Tree
    step: int


class State(NamedTuple):
    """A tree: every leaf has a name, such as "roles/policy/params/layers/0/attn/q".

    Attributes:
      roles: of every role that learns, its weights and its optimizer's state.
      advantage: state of the advantage chain, such as a KL controller's coefficient.
      source: where the source is in its data.
      step: steps that are done.
      version: of the weights that the engine has; each load makes it one more.
      earlier: of each frozen model that is renewed from time to time, what it is now.
    """

    roles: Mapping[str, RoleState]
    advantage: Any = ()
    source: trees.Tree = ()
    step: int = 0
    version: int = 0
    earlier: Mapping[str, EarlierSelf] = {}
