"""Messages between a generator of another job and the trainer ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from funrl.mesh.plan import Box
from funrl.mesh.rules import Layout
from funrl.rollout.remote.digests import EngineDigests
from funrl.rollout.requests import Completion, Request

WORK, BEATS, WEIGHTS = "work", "beats", "weights"  # what a connection is for
PROTOCOL = 1  # of these messages; it grows with each change of them


class Hello(NamedTuple):
    """The first message of a connection. Its answer is a text where the protocol is another one.

    Attributes:
      generator: name of the caller.
      purpose: `WORK`, `BEATS` or `WEIGHTS`.
      protocol: `PROTOCOL` of the caller; 0 of one that has none yet.
    """

    generator: str
    purpose: str
    protocol: int = 0


class TrainerFacts(NamedTuple):
    """Answer to the `Hello` of a connection for weights.

    Attributes:
      stored: layout of each weight on the trainer ranks, by name.
      dtype: of the weights, except `weight_dtypes.WIDE`.
      lease_servers: numbers of the ranks that give work.
      digests: whether each load is proved.
    """

    stored: Mapping[str, Layout]
    dtype: torch.dtype
    lease_servers: Sequence[int]
    digests: bool


class PullRequest(NamedTuple):
    """Send parts of weights. Its answer is the version that this rank has, and where it is `version`, their bytes.

    Attributes:
      version: of the weights.
      pieces: names and boxes, each inside the box that the asked rank holds.
    """

    version: int
    pieces: Sequence[tuple[str, Box]]


class Report(NamedTuple):
    """State of a generator. Its answer is `Orders`.

    Attributes:
      progress: iterations of its engine so far.
      version: of its weights; None: it has none yet.
      room: requests that it could begin at once.
      delivered: completed leases: number and completions.
      held: numbers of the leases that it works on.
      digests: of the weights of `version`, once; None: they are sent already, or are not asked for.
      leaving: whether it goes, and gives back what it holds.
      wait_s: seconds that the answer may wait for news.
    """

    progress: int
    version: int | None = None
    room: int = 0
    delivered: Sequence[tuple[int, Sequence[Completion]]] = ()
    held: Sequence[int] = ()
    digests: EngineDigests | None = None
    leaving: bool = False
    wait_s: float = 0.0


class Orders(NamedTuple):
    """Orders for a generator.

    Attributes:
      version: newest weights that there are; None: none yet.
      work: number and requests of each new lease.
      drop: numbers of leases that have ended; their requests are to be cancelled.
      end: whether the run is complete.
    """

    version: int | None = None
    work: Sequence[tuple[int, Sequence[Request]]] = ()
    drop: Sequence[int] = ()
    end: bool = False
