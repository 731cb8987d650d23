"""Weights from the trainer to the engines after each step, and the proof that the engines hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.collectives import psum
from funrl.mesh.pools.transfer import SentWeights
from funrl.mesh.reshard import reshard
from funrl.models.deployed import DeviceWeights, deployed
from funrl.models.lora import on_base
from funrl.models.weight_dtypes import narrow_weights, weight_dtype
from funrl.role_kinds import BASE
from funrl.rollout.certificate import probed, sync_digests
from funrl.rollout.engine import Engine
from funrl.rollout.load_digest import tree_digest
from funrl.rollout.native.control_rows import ControlTotals
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.remote.engine import RemoteEngine
from funrl.rollout.sync_proof import PolicyProof
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import AdaptedBase, GeneratingParts, Parts
from funrl.trainer.steps.roles import EarlierSelf, Role, State

BASE_VERSION = 0  # of the weights that adapters stand on


def sync(
    parts: Parts, state: State, clock: Clock | None = None, frozen: Mapping[str, trees.Tree] | None = None
) -> State:
    """Give the engine the policy's weights in the layout to generate in; a run that generates nothing does nothing.

    An engine that adds adapters to a base gets the base once.

    Args:
      frozen: weights of the roles that do not learn.
    """
    if not isinstance(parts, GeneratingParts):
        return state
    generator = parts.generator
    base = generator.base
    frozen = frozen or {}
    version = state.version + 1
    with (clock or Clock()).phase("reshard"):
        if base is not None and base.engine.version is None:
            base.engine.load(_base_for_engine(parts, base, frozen), BASE_VERSION)
        if isinstance(generator.engine, RemoteEngine) and generator.engine.in_background:
            generator.proof.settle()  # the update has left the generators time to take the weights before it
            _send_in_background(parts, state, frozen, generator.engine)
            return state._replace(version=version)
        for name, engine in {parts.main_role: generator.engine, **generator.policies}.items():
            merge = base is None or name != parts.main_role
            weights = policy_weights(parts, parts.roles[name], state.roles[name].params, frozen, merge=merge)
            engine.load(weights, version)
        _load_earlier_selves(parts, state, frozen)
    return state._replace(version=version)


def _send_in_background(
    parts: GeneratingParts, state: State, frozen: Mapping[str, trees.Tree], engine: RemoteEngine
) -> None:
    """Start sending policy weights, and earlier selves whose version is stale in the engine."""
    generator = parts.generator

    def sent(name: str, own: trees.Tree, version: int, merge: bool = True) -> SentWeights:
        role = parts.roles[name]
        policy = _for_engine(role, own, frozen, merge)
        return SentWeights(policy.tree(), generator.to_whole if merge else generator.to_engine, version)

    version = state.version + 1
    own = state.roles[parts.main_role].params
    models = {"": sent(parts.main_role, own, version, merge=generator.base is None)}
    models |= {name: sent(name, state.roles[name].params, version) for name in generator.policies}
    for name, earlier in state.earlier.items():
        if generator.further[name].version != earlier.step:
            models[name] = sent(parts.main_role, earlier.params, earlier.step)
    engine.send(models)
    for name, weights in models.items():
        if name:
            cast(RemoteEngine, generator.further[name]).version = weights.version


def _base_for_engine(
    parts: GeneratingParts, base: AdaptedBase, frozen: Mapping[str, trees.Tree]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base of adapters as its engine takes it, made when it is asked for."""
    weights = base_weights(base, frozen)
    form = base.engine.weights
    if form.streamed:
        yield from weights.exported(form.names)
    else:
        yield from form.named(reshard(weights.tree(), base.to_engine, parts.mesh))


def base_weights(base: AdaptedBase, frozen: Mapping[str, trees.Tree]) -> DeviceWeights:
    """The weights that the policy's adapters stand on, as the engine has them.

    Args:
      frozen: weights of the roles that do not learn.
    """
    return deployed(base.placed, on_base(base.placed.model, frozen[BASE], None))


def policy_weights(
    parts: GeneratingParts, role: Role, own: trees.Tree, frozen: Mapping[str, trees.Tree], *, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of a policy as an engine takes them, made when they are asked for, after the old ones are gone.

    Args:
      role: of the policy.
      own: its own weights, or those of an earlier self.
      frozen: weights of the roles that do not learn.
      merge: whether the engine takes adapters merged into what they adapt; else it takes them alone.
    """
    generator = parts.generator
    engine = generator.whole if merge else generator.engine
    to_engine = generator.to_whole if merge else generator.to_engine
    if engine.weights.streamed:
        yield from deployed(role.placed, role.whole(own, frozen), merge=merge).exported(engine.weights.names)
    else:
        policy = _for_engine(role, own, frozen, merge)
        donate = bool(policy.merged)
        yield from engine.weights.named(reshard(policy.tree(), to_engine, parts.mesh, donate=donate))


def _for_engine(role: Role, own: trees.Tree, frozen: Mapping[str, trees.Tree], merge: bool) -> DeviceWeights:
    """Weights of a policy as they are sent to an engine: in the dtype to compute in where they are already.

    Adapters are merged as they learn.
    """
    if role.base is None or not merge:
        own = narrow_weights(own, role.placed.dtype)
    return deployed(role.placed, role.whole(own, frozen), merge=merge)


def refresh_earlier_selves(parts: Parts, state: State, frozen: Mapping[str, trees.Tree]) -> State:
    """Make each earlier self that is due after a step the policy of now, and give its engine these weights."""
    if not (isinstance(parts, GeneratingParts) and state.earlier):
        return state
    own = state.roles[parts.main_role].params
    role = parts.roles[parts.main_role]
    every = {name: parts.generator.frozen[name].declared.every for name in state.earlier}
    due = {name: earlier_self(role, own, state.step) for name, steps in every.items() if state.step % steps == 0}
    state = state._replace(earlier={**state.earlier, **due})
    engine = parts.generator.engine
    with_sync = isinstance(engine, RemoteEngine) and engine.ahead
    if engine.version is not None and not with_sync:
        _load_earlier_selves(parts, state, frozen)
    return state


def _load_earlier_selves(parts: GeneratingParts, state: State, frozen: Mapping[str, trees.Tree]) -> None:
    """Load the weights of earlier selves into the engines that have others."""
    for name, earlier in state.earlier.items():
        engine = parts.generator.frozen[name].engine
        if engine.version != earlier.step:
            role = parts.roles[parts.main_role]
            engine.load(policy_weights(parts, role, earlier.params, frozen), earlier.step)


def earlier_self(role: Role, params: trees.Tree, step: int) -> EarlierSelf:
    """A copy of the policy's own weights: of adapters as they are, and of all others in the dtype to compute in.

    So an engine has the same bits of it as of the policy.

    Args:
      role: the policy's.
      params: its own weights.
      step: after which it is taken.
    """
    if role.base is not None:
        return EarlierSelf(trees.clone(params), step)
    dtype = role.placed.dtype
    copy = trees.map_named(lambda name, x: x.detach().to(weight_dtype(name, dtype), copy=True), params)
    return EarlierSelf(copy, step)


def begin_proof(
    parts: Parts,
    state: State,
    frozen: Mapping[str, trees.Tree],
    settings: Settings,
    clock: Clock,
    *,
    first: bool = False,
) -> dict[str, float]:
    """Begin to prove, after a sync, that the engine holds the policy's weights; `wait_for_proof` ends it.

    Where a probe is due, which generates, the proof is complete at once; so it is where the weights may move meanwhile:
    those of an engine that keeps copies, and the factors of merged adapters. A base of adapters is compared once.

    Args:
      frozen: weights of the roles that do not learn.
      first: this is the first sync of the run.

    Returns: metrics of the complete proof; none where it has begun, or none is due.

    Raises:
      SyncError: the engine does not hold the weights, as a complete proof finds.
    """
    every = settings.engines.probe_sync_every
    probes = every > 0 and (first or state.step % every == 0)
    verifies = settings.engines.verify_sync
    if not isinstance(parts, GeneratingParts) or not (verifies or probes):
        return {}
    proof = parts.generator.proof
    engine = parts.generator.engine
    with clock.phase("verify"):
        moves = verifies and publish(parts, state, frozen)
        if not (probes or moves):
            return {}
        whole = verifies and proof.complete()
        if not probes:
            return proof.take()
        proof.take()
        role = parts.roles[parts.main_role]
        params = role.whole(state.roles[parts.main_role].params, frozen)
        return probed(role.placed, params, engine, state.version, whole=whole)


def publish(parts: GeneratingParts, state: State, frozen: Mapping[str, trees.Tree]) -> bool:
    """Begin to compare the weights of each policy with its engine's; its digest is published when that has ended.

    Args:
      frozen: weights of the roles that do not learn.

    Returns: whether the comparison has to end at once, as weights may move meanwhile.
    """
    generator = parts.generator
    if generator.base is not None and generator.proof.base is None:
        compare_base(parts, frozen)
    engines = {parts.main_role: generator.engine} | cast(dict[str, Engine], dict(generator.policies))
    proofs: dict[str, PolicyProof] = {}
    moves = False
    for name, engine in engines.items():
        role = parts.roles[name]
        params = role.whole(state.roles[name].params, frozen)
        source = deployed(role.placed, params, merge=not engine.weights.adapters)
        moves |= bool(source.merged) or engine.weights.streamed
        proofs[name] = PolicyProof(sync_digests(source, engine, state.version), engine.weights, state.version)
    generator.proof.begin(proofs)
    return moves


def compare_base(parts: GeneratingParts, frozen: Mapping[str, trees.Tree]) -> None:
    """Compare the base that the engine adds adapters to, if it has one, with the trainer's. Collective.

    Raises:
      SyncError: they differ.
    """
    base = parts.generator.base
    if base is not None:
        compared = sync_digests(base_weights(base, frozen), base.engine, BASE_VERSION).compare()
        parts.generator.proof.base = tree_digest(compared.digests, base.engine.weights)


def resumed_proof(settings: Settings, step: int, proof: dict[str, float]) -> dict[str, float]:
    """Metrics of the first sync of a resumed run, as the run that never stopped has them in its next step.

    That run has reported them already where it evaluated or probed after `step`.
    """
    every = settings.engines.probe_sync_every
    reported = step % settings.evaluation.eval_every == 0 or (every > 0 and step % every == 0)
    return {} if reported else {name: value for name, value in proof.items() if name == "sync/verified"}


def wait_for_proof(parts: Parts) -> None:
    """End the proof of the newest sync, unless generation has ended it.

    Raises:
      SyncError: the engine does not hold the policy's weights.
    """
    if isinstance(parts, GeneratingParts):
        parts.generator.proof.settle()


def control_metrics(parts: Parts) -> dict[str, float]:
    """Metrics of the engines' control rows since the last call; none where engines have none. Collective.

    "rollout/control_gap_mean" is the distance in nats of the log-probabilities in 8 bits from those of the weights as
    they were loaded; "rollout/control_kept" the share of a row's tokens before the first that the same noise samples
    otherwise by these.
    """
    engine = parts.generator.whole if isinstance(parts, GeneratingParts) else None
    if not isinstance(parts, GeneratingParts) or not isinstance(engine, NativeEngine) or engine.control is None:
        return {}
    mesh = parts.generator.mesh
    own = torch.tensor(engine.control.take(), dtype=torch.float64, device=mesh.device)
    totals = ControlTotals(*psum(own, mesh, mesh.row_axes).tolist())
    if not totals.tokens:
        return {}
    means = totals.distance / totals.tokens, totals.kept / totals.rows
    return dict(zip(("rollout/control_gap_mean", "rollout/control_kept"), means, strict=True))


def proof_metrics(parts: Parts) -> dict[str, float]:
    """Metrics of the proofs that have ended since the last call, and counts of this rank's engine."""
    if not isinstance(parts, GeneratingParts):
        return {}
    generator = parts.generator
    metrics = {"sync/bytes": float(generator.sync_bytes), **generator.proof.take()}
    uncaptured = generator.whole.cost().uncaptured if isinstance(generator.whole, NativeEngine) else 0
    return metrics | ({"rollout/uncaptured_passes": float(uncaptured)} if uncaptured else {})
