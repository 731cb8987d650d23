"""The source that reads rows from given texts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from funrl import trees
from funrl.algos.core import Advantage
from funrl.data.order import ReorderedItems, order_digest, places_in_order
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.source import Source, StoredState, same_order
from funrl.trainer.steps.advantage_phase import advantages
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.learn import denominators
from funrl.trainer.steps.micro import own_micro_batches, row_cost
from funrl.trainer.steps.roles import Role, RoleState, row_fields_of, weights_of
from funrl.trainer.steps.score import score
from funrl.trainer.steps.step import NotFiniteError, loss_value
from funrl.trainer.steps.step_rows import Rows


class TextData(NamedTuple):
    """Texts to learn from.

    Attributes:
      examples: to train on.
      heldout: to evaluate on.
      to_rows: examples -> rows.
      batch: examples of a batch.
      seed: of their order.
    """

    examples: Sequence[Any]
    heldout: Sequence[Any]
    to_rows: Callable[[Sequence[Any]], Rows]
    batch: int
    seed: int


class LossEvaluation(NamedTuple):
    """Evaluation of the one role that learns, by its loss.

    Attributes:
      roles: of the run.
      frozen: weights of the roles that do not learn.
      token_budget: of a micro-batch.
      chain: advantage pieces that run before the loss; None: none.
      sample: called at every evaluation with the states of the roles and the step.
    """

    roles: Mapping[str, Role]
    frozen: Mapping[str, trees.Tree]
    token_budget: int
    chain: Advantage | None = None
    sample: Callable[[Mapping[str, RoleState], int], None] = lambda states, step: None


def text_source(data: TextData, evaluation: LossEvaluation, clock: Clock, show: Show) -> Source:
    """Rows of given texts, in a shuffled order; evaluated by the loss of the one role that learns."""
    examples, heldout, to_rows, batch, seed = data
    roles, frozen, token_budget, chain, sample = evaluation
    (name, role), *_ = [(n, r) for n, r in roles.items() if r.loss is not None]
    scoring = {n: r for n, r in roles.items() if r.loss is None}
    held = score(scoring, weights_of(scoring, {}, frozen), to_rows(heldout), token_budget=token_budget)

    def next_rows(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        consumed = state["examples_consumed"]
        rows = to_rows(ReorderedItems(examples, places_in_order(examples, batch, seed, position=consumed).tolist()))
        tokens = {"perf/total_num_tokens": float(rows.batch.length.sum())}
        return rows, {**state, "examples_consumed": consumed + batch}, tokens

    def evaluate(states: Mapping[str, RoleState], step: int) -> dict[str, float]:
        with clock.phase("eval"):
            rows = held
            if chain is not None:
                scored = score({name: role}, weights_of({name: role}, states, frozen), held, token_budget=token_budget)
                rows, _, _ = advantages(chain, chain.init(), scored)
            cost = row_cost(role.placed)
            fields = row_fields_of(role.training_loss)
            ((dens, _),) = (total[name] for total in denominators({name: role}, rows, [np.arange(len(rows.owner))]))

            def held_loss():
                pieces = own_micro_batches(rows, token_budget, cost, row_fields=fields)
                batches = (piece.batch for piece in pieces)
                return loss_value(role, states[name].params, batches, denominators=dens, frozen=frozen)

            metrics, value = role.placed.expert_rows.repeat(held_loss)
        if not math.isfinite(value):
            when = f"after step {step}; a lower --lr may prevent it" if step else "before the first step"
            raise NotFiniteError(f"the held-out loss is {value.item()} {when}")
        with clock.phase("eval"):
            sample(states, step)
        terms = {f"eval/{key.rsplit('/', 1)[-1]}": metric.item() for key, metric in metrics.items()}
        loss = {"eval/loss": value.item(), "eval/examples": float(len(heldout))}
        return loss | terms | loss  # a term's own metrics may not replace these

    order = order_digest(examples, seed)
    first = {"examples_consumed": 0, "order": order}
    stored = StoredState(restored=functools.partial(same_order, order, show))
    return Source(lambda: dict(first), next_rows, evaluate, stored=stored)
