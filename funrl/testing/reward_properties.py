"""Properties of a reward function of one's own."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from funrl.algos.guarding import defined_at
from funrl.rewards.call import CompletedRow, Reward, RewardError, RewardFunction, reward_functions, score_all
from funrl.rewards.load import check_fields
from funrl.testing.subjects import assert_all

ODD_COMPLETIONS = (
    "",
    " ",
    "\n\n",
    "0",
    "-1",
    "1e999",
    "nan",
    "yes",
    "{",
    "```python\nprint(1)\n```",
    "<answer></answer>",
    "\\boxed{}",
    "\\boxed{\\frac{1}{0}}",
    "a\x00b",
    "\u0663\u2212\u00bd \U0001f431",
    "42 " * 3000,
)


class RewardSubject(NamedTuple):
    """A reward function and the rows that it is checked on."""

    function: RewardFunction
    rows: Sequence[CompletedRow]

    def scores(self, rows: Sequence[CompletedRow] | None = None) -> list[float]:
        """Its numbers for some rows, by default all; NaN where it does not apply. It is given copies of the fields."""
        rows = self.rows if rows is None else rows
        return self.scores_of([row._replace(fields=copy.deepcopy(row.fields)) for row in rows])

    def scores_of(self, rows: Sequence[CompletedRow]) -> list[float]:
        """The same on the very rows.

        Raises:
          AssertionError: it fails on one.
        """
        prompts, completions, fields = ([getattr(row, name) for row in rows] for name in CompletedRow._fields[:3])
        try:
            return score_all(self.function, prompts, completions, fields, one_of_several=True)
        except RewardError as error:
            raise AssertionError(str(error)) from error


def check_reward(
    reward: Reward,
    examples: Sequence[tuple[str, str] | tuple[str, str, Mapping[str, object]]] = (("What is 6 * 7?", "42"),),
    without: Sequence[str] = (),
) -> None:
    """Check a reward function, on examples and on odd completions of the first example's prompt.

    Args:
      reward: of any form that `--reward` takes.
      examples: (prompt, completion, fields of the prompt's record), as those of a run are; the fields may be left out.
      without: properties that it is not to have: of numbers, determinism, rows_alone, arguments.

    Raises:
      AssertionError: the first property that it lacks, with the function, its file and line, and the completion.
    """
    (function,) = reward_functions([reward])
    known = [CompletedRow(row[0], row[1], dict(row[2]) if len(row) > 2 else {}) for row in examples]
    odd = [known[0]._replace(completion=text) for text in ODD_COMPLETIONS]
    what = f"reward {function.name}{defined_at(reward)}"
    try:
        check_fields(function.name, reward, [row.fields for row in known])
    except RewardError as error:
        raise AssertionError(f"{what}: {error}") from error
    assert_all(REWARD_PROPERTIES, RewardSubject(function, [*known, *odd]), what, without)


def finite_numbers(one: RewardSubject) -> None:
    """It gives a finite number, or None where it does not apply, for any completion."""
    one.scores()


def same_again(one: RewardSubject) -> None:
    """It gives the same number for the same completion, whatever the global random state."""
    state = random.getstate()
    torch_state = torch.random.get_rng_state()
    try:
        runs = []
        for seed in (0, 1):
            random.seed(seed)
            torch.manual_seed(seed)
            runs.append(one.scores())
    finally:
        random.setstate(state)
        torch.random.set_rng_state(torch_state)
    _demand_same(one.rows, runs[0], runs[1], "when it is called again")


def rows_alone(one: RewardSubject) -> None:
    """The number of a completion depends neither on the others of its call nor on their order."""
    together = one.scores()
    backwards = one.scores(one.rows[::-1])[::-1]
    _demand_same(one.rows, together, backwards, "in another order")
    alone = [number for row in one.rows for number in one.scores([row])]
    _demand_same(one.rows, together, alone, "when it is called for this completion alone")


def arguments_kept(one: RewardSubject) -> None:
    """It leaves its arguments as they were: other rewards, and later steps, get the same objects."""
    rows = [row._replace(fields=copy.deepcopy(row.fields)) for row in one.rows]
    one.scores_of(rows)
    for row, before in zip(rows, one.rows, strict=True):
        changed = [name for name, x in before.fields.items() if name not in row.fields or row.fields[name] != x]
        if changed:
            raise AssertionError(
                f"it changes the field {changed[0]!r} from {before.fields[changed[0]]!r} to "
                f"{row.fields.get(changed[0])!r}"
            )


def _demand_same(rows: Sequence[CompletedRow], want: Sequence[float], got: Sequence[float], when: str) -> None:
    for row, x, y in zip(rows, want, got, strict=True):
        if x != y and not (math.isnan(x) and math.isnan(y)):
            raise AssertionError(f"it gives {y:g} instead of {x:g} {when}, for the completion {row.completion[:80]!r}")


REWARD_PROPERTIES: dict[str, Callable[[RewardSubject], None]] = {
    "numbers": finite_numbers,
    "determinism": same_again,
    "rows_alone": rows_alone,
    "arguments": arguments_kept,
}
