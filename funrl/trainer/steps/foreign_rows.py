"""Rows whose tokens other weights sampled than those that the run has published: found before they are scored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from funrl.mesh.collectives import gather_objects, pmax
from funrl.rollout.certificate import SyncError
from funrl.rollout.load_digest import shown_digest
from funrl.trainer.steps.step_rows import Rows, take

FOREIGN = "rollout/foreign_rows"  # metric: rows that were dropped, with those that they are compared with

Published = Mapping[str, Collection[tuple[int, int]]]  # by policy: (digest, version) pairs


class ForeignRowError(SyncError):
    """A row was sampled by other weights than those that the run has published."""


class ForeignRun(NamedTuple):
    """Tokens of a row that foreign weights sampled.

    Attributes:
      row: its number in the step.
      token: the first of them.
      version: that the engine gave the weights.
      digest: of the weights.
      policy: name of the policy whose row it is.
    """

    row: int
    token: int
    version: int
    digest: int
    policy: str

    def message(self, published: Published) -> str:
        """A foreign token, with the published digest of its version."""
        known = [digest for digest, version in published.get(self.policy, ()) if version == self.version]
        ours = f"is {shown_digest(known[-1])}" if known else "was not published"
        return (
            f"row {self.row}, token {self.token}: the engine sampled it by weights with the digest "
            f"{shown_digest(self.digest)}, as version {self.version} of {self.policy}; that of the run {ours}"
        )


def foreign_runs(rows: Rows, published: Published, policy_of: Mapping[int, str], policy: str) -> list[ForeignRun]:
    """Tokens of this rank's rows that weights sampled which were not published.

    Args:
      rows: some rows; without digests none is foreign.
      published: digests and versions of the weights of each policy, as `SyncProof.published`.
      policy_of: by the number of an agent, the policy that it is, if it is not `policy`.
      policy: name of the main policy.
    """
    digests = rows.batch.get("digests")
    if digests is None:
        return []
    row_L = np.repeat(rows.own, digests.offsets.diff().cpu().numpy())
    agent_B = rows.batch.get("agent")
    agents = None if agent_B is None or not policy_of else agent_B.tolist()
    runs = []
    for row, (token, version, digest) in zip(row_L.tolist(), digests.values.tolist(), strict=True):
        name = policy if agents is None else policy_of.get(agents[row], policy)
        if (digest, version) not in published.get(name, ()):
            runs.append(ForeignRun(row, token, version, digest, name))
    return runs


def without_foreign_rows(
    rows: Rows, published: Published, agents: Mapping[str, Collection[int]], policy: str, *, drop: bool
) -> tuple[Rows, dict[str, float]]:
    """The rows that published weights sampled, and metrics. Collective: one number over the ranks.

    Args:
      rows: on the trainer ranks.
      published: as of `foreign_runs`.
      agents: numbers of the agents of each further policy.
      policy: name of the main policy.
      drop: whether to leave out foreign rows, with all rows of their groups; else they are an error.

    Raises:
      ForeignRowError: a row is foreign, on every rank; with `drop`, no other row is left.
    """
    policy_of = {number: name for name, numbers in agents.items() if name in published for number in numbers}
    runs = foreign_runs(rows, published, policy_of, policy)
    metrics = {FOREIGN: 0.0} if drop else {}
    count = torch.tensor(float(len(runs)), device=rows.mesh.device)
    if not pmax(count, rows.mesh, tuple(rows.mesh.sizes)).item():
        return rows, metrics
    everywhere = sorted({run for part in gather_objects(runs, rows.mesh) for run in part})
    numbers = np.unique([run.row for run in everywhere])
    group_B = rows.batch.get("group")
    group = np.arange(len(rows.owner)) if group_B is None else group_B.cpu().numpy()
    kept = np.flatnonzero(~np.isin(group, group[numbers]))
    if not drop or not len(kept):
        advice = "no other row is left" if drop else "--foreign_rows=drop leaves such rows out"
        raise ForeignRowError(
            f"{everywhere[0].message(published)}; {len(numbers)} of {len(rows.owner)} rows are foreign; {advice}"
        )
    return take(rows, kept)._replace(epoch=None), {FOREIGN: float(len(rows.owner) - len(kept))}
