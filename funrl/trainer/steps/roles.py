"""Roles, what each model does in a run, and their state. Scoring and learning are two loops over them.

| role | its model gives | field of the batch | learns |
|---|---|---|---|
| policy | log-probability, entropy, collision probability | old_logp, old_entropy, sum_pi_squared | yes |
| critic | values | value | yes |
| implicit_reward | log-probability | implicit_logp | yes |
| reference | log-probability | ref_logp | no |
| teacher | log-probability, its most probable tokens | teacher_logp, teacher_topk, teacher_topk_logp | no |
| teacher, reference | hidden states, beside the policy in the step | divergence | no |
| reward_model | a value at the end of a completion | part of score | only by `reward_model` runs |
| process_reward_model | a value at the end of every step | token_reward, or part of score | only by runs of its name |

What they write, start from and report is declared in `funrl.role_kinds`; an algorithm may bring roles of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from funrl import trees
from funrl.algos.core import Algorithm, Divergence, Loss
from funrl.algos.reading import reads, run_advantage
from funrl.batch import Batch
from funrl.fields import FIELDS
from funrl.models.lora import on_base, trained_part
from funrl.models.model import Model
from funrl.models.placed import Placed, Teacher
from funrl.models.weight_dtypes import renew_copies
from funrl.optim import Transformation
from funrl.role_kinds import ROLES
from funrl.trainer.settings.follow_rule import FollowRule
from funrl.trainer.steps.optimizer import with_frozen
from funrl.trainer.steps.router_losses import Choices, RouterLosses

TOPK = 64


class Companion(NamedTuple):
    """A frozen role whose model runs beside one that learns, in the same micro-batches.

    Attributes:
      name: of the frozen role.
      placed: its model on its devices.
      divergence: of the role that learns from it.
      base: as in `Role`.
    """

    name: str
    placed: Placed
    divergence: Divergence
    base: str | None = None

    def teacher(self, frozen: Mapping[str, trees.Tree]) -> Teacher:
        """The role as `token_scores` takes it; `frozen` are this rank's weights that do not learn, by role."""
        params = whole_weights(self.placed.model, self.base, frozen.get(self.name), frozen)
        return Teacher(self.placed, params, self.divergence.beta, self.divergence.temperature)


class StepPrograms(Protocol):
    """Programs of another backend that compute what the steps of a role do in torch, on torch's tensors.

    Attributes:
      lanes: number of micro-batches that are computed at a time, by the devices that have rows of their own.
    """

    @property
    def lanes(self) -> int: ...

    def value_and_grad(
        self,
        params: trees.Tree,
        role: Role,
        group: Sequence[Batch],
        denominators: Sequence[Tensor],
        frozen: Mapping[str, trees.Tree] | None,
        chosen: Choices | None,
    ) -> tuple[Any, trees.Tree]:
        """`trees.value_and_grad` of `step.objective` on `lanes` micro-batches: values [lanes], and sums of the rest."""
        ...

    def update(self, role: Role, grads: trees.Tree, state: RoleState, norm: Tensor) -> RoleState:
        """`step.updated`."""
        ...

    def outputs(self, role: Role, params: trees.Tree, group: Sequence[Batch]) -> Sequence[Sequence[Tensor]]:
        """`score.outputs` of `lanes` micro-batches."""
        ...


class Role(NamedTuple):
    """The part of one model in a run.

    Attributes:
      placed: the model on its devices.
      writes: field of the batch -> what the model calls it ("logp", "entropy", "sum_pi_squared", "topk", "topk_logp",
        "values"); computed once for every batch, before the advantages. Empty: it scores nothing.
      loss: what it minimises; None: it is frozen.
      optimizer: how.
      mask: field of the batch that says which tokens it learns from.
      first_step: the first step in which it learns.
      updates: how often each mini-batch updates it.
      temperature: its log-probabilities are those of logits divided by this.
      topk: how many of its most probable tokens it writes.
      metric: name of its loss among the metrics, such as "actor/pg_loss"; its gradient's norm is "actor/grad_norm".
      watch_entropy: whether its mean entropy is among the metrics of an update.
      companion: what its loss reads the `divergence` from; None: it reads none.
      router: coefficients of the losses of its routers, where its model has experts and gives probabilities.
      programs: compute its gradients, updates and scores instead of torch; None: torch computes them.
      base: the frozen role whose weights it has, with adapters of its own beside them where it learns; None: all its
        weights are its own.
      frozen: how the names of those of its weights begin that do not learn.
      follow: how its weights move towards the policy's, which it does not learn by itself; None: they stay.
      context: ragged field of the batch with the prompts or tokens that it sees instead of the policy's, one of
        `contexts.VIEWS`; "": it sees these.
      sources: numbers in the field `data_source` of the rows that it scores; (): all rows.
    """

    placed: Placed
    writes: Mapping[str, str] = {}
    loss: Loss | None = None
    optimizer: Transformation | None = None
    mask: str = "mask"
    first_step: int = 1
    updates: int = 1
    temperature: float = 1.0
    topk: int = TOPK
    metric: str = ROLES["policy"].metric
    watch_entropy: bool = False
    companion: Companion | None = None
    base: str | None = None
    router: RouterLosses = RouterLosses()
    programs: StepPrograms | None = None
    frozen: tuple[str, ...] = ()
    follow: FollowRule | None = None
    context: str = ""
    sources: tuple[int, ...] = ()

    @property
    def prefix(self) -> str:
        """First part of the names of its metrics, such as "actor"."""
        return self.metric.split("/")[0]

    @property
    def training_loss(self) -> Loss:
        """Its loss. Raises: TypeError, it is frozen."""
        if self.loss is None:
            raise TypeError("a frozen role has no loss")
        return self.loss

    @property
    def stored(self) -> trees.Tree:
        """Layouts of its own weights, which are those in `RoleState`, between steps."""
        return trained_part(self.placed.model, self.placed.stored)

    @property
    def compute(self) -> trees.Tree:
        """Layouts of its own weights while their layer runs."""
        return trained_part(self.placed.model, self.placed.compute)

    @property
    def partial(self) -> trees.Tree:
        """`Placed.partial` of its own weights."""
        return trained_part(self.placed.model, self.placed.partial)

    def whole(self, own: trees.Tree, frozen: Mapping[str, trees.Tree]) -> trees.Tree:
        """Weights as `placed` takes them.

        Args:
          own: its own weights; None where all of them are the base's.
          frozen: weights of the roles that do not learn.
        """
        return with_frozen(whole_weights(self.placed.model, self.base, own, frozen), self.frozen)


class RoleState(NamedTuple):
    """State of a role that learns: this rank's shards of its own weights, and its optimizer's state."""

    params: trees.Tree
    opt_state: trees.Tree


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
      following: weights of each role that follows the policy, in the dtype of master weights.
    """

    roles: Mapping[str, RoleState]
    advantage: trees.Tree = ()
    source: trees.Tree = ()
    step: int = 0
    version: int = 0
    earlier: Mapping[str, EarlierSelf] = {}
    following: Mapping[str, trees.Tree] = {}


def whole_weights(model: Model, base: str | None, own: trees.Tree, frozen: Mapping[str, trees.Tree]) -> trees.Tree:
    """The tree of a model's weights; the arguments are those of `Role` and of its `whole`."""
    return own if base is None else on_base(model, frozen[base], own)


def bases(roles: Mapping[str, Role]) -> frozenset[str]:
    """Names of the frozen roles that others stand on."""
    return frozenset(role.base for role in roles.values() if role.base is not None)


def weights_of(
    roles: Mapping[str, Role], states: Mapping[str, RoleState], frozen: Mapping[str, trees.Tree]
) -> dict[str, trees.Tree]:
    """Weights of every role as its model takes them.

    Args:
      states: of the roles that learn.
      frozen: weights of the run that do not learn, by name.
    """
    own = {**frozen, **{name: state.params for name, state in states.items()}}
    return {name: role.whole(own.get(name), frozen) for name, role in roles.items()}


def keep_copies(roles: Mapping[str, Role], states: Mapping[str, RoleState]) -> None:
    """Make the copies that the first passes read of the weights of the roles that learn; updates renew them."""
    for name, state in states.items():
        if roles[name].programs is None:
            renew_copies(state.params, roles[name].placed.dtype)


def row_fields_of(loss: Loss) -> tuple[str, ...]:
    """The fields per row that a loss reads, which its micro-batches are to have."""
    read = reads(loss)
    return tuple(name for name in FIELDS.extended(loss.fields).rows() if name in read.required | read.optional)


def sums_over_episodes(losses: Collection[Loss]) -> bool:
    """True if a loss has sums over whole episodes, whose rows must be in one micro-batch."""
    return any("unit" in reads(loss).required | reads(loss).optional for loss in losses)


def fields_read(algorithm: Algorithm) -> frozenset[str]:
    """Fields that must be written for an algorithm: the fields that it reads, and their sources in the step."""
    required = reads(algorithm).required
    return required.union(*(algorithm.schema[name].made_of for name in required))


def role_names(algorithm: Algorithm) -> tuple[str, ...]:
    """Names of the roles of a run: roles with a loss, and roles that write a field that the algorithm reads.

    Where roles for sources of prompts are like one of them, they take its place.
    """
    kinds = algorithm.role_kinds
    fields = fields_read(algorithm)
    needed = {algorithm.schema[field].writer for field in fields} | set(algorithm.losses)
    if algorithm.divergence is not None:  # which the step computes with that role beside the policy
        needed.add(algorithm.divergence.role)
    replaced = {kind.like for kind in kinds.values() if kind.sources}
    needed |= {name for name, kind in kinds.items() if kind.like in needed}
    return tuple(name for name in dict.fromkeys((*kinds, *algorithm.losses)) if name in needed - replaced)


def main_role_of(names: Collection[str], algorithm: Algorithm) -> str:
    """The role that takes over the weights that a run begins with, and is saved.

    It is the one that generates, or else the first that learns.

    Args:
      names: of the run's roles.
    """
    return algorithm.role_kinds.generating(names) or next(iter(algorithm.losses))


def writes_of(name: str, algorithm: Algorithm) -> dict[str, str]:
    """The fields that a role writes for an algorithm, with what its model calls them."""
    read = fields_read(algorithm) | reads(algorithm).optional
    kinds = algorithm.role_kinds
    return {field: output for field, output in kinds[kinds[name].like or name].writes.items() if field in read}


def reads_scores(algorithm: Algorithm) -> bool:
    """True if an algorithm reads rewards; the others take prompts without any.

    What an advantage chain reads counts where a loss reads what the chain makes.
    """
    read = reads(*algorithm.losses.values(), algorithm.filter, fields=algorithm.fields)
    chain = algorithm.advantage
    if chain is not None and (read.required | read.optional) & run_advantage(chain).makes:
        read |= reads(chain)
    return bool({"score", "scores", "greedy_score"} & (read.required | read.optional))
