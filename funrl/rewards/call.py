"""Calls of reward functions: their arguments, their return values, and their errors.

| form | called with | returns |
|---|---|---|
| plain | prompt, completion, and the record's other fields by name | a number or None |
| batched | those of the lists of prompts, completions and fields that it has arguments for | a list of them |
| `async def`, plain or batched | the same, with many concurrent calls in one event loop | the same |

A function with an argument `completions`, `prompts` or `completion_ids` is batched, as TRL's are: if the records'
prompts are chats, its prompts and completions are lists of messages. A plain function always receives texts. A function
with an argument `solution_str` is called as verl's are: with the completion by this name, and the fields that it has
arguments for. Instead of a number a function may return a dict with the number as "score"; its other numbers are
metrics. None or NaN means that the function does not apply to a completion, whose score is then the sum of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from funrl.rewards.named import unique_names
from funrl.rewards.views import TEXT, TextView, view_of

Reward = Callable[..., Any]  # (prompt, completion, **fields), or (completions, **columns)
LARGEST = torch.finfo(torch.float32).max  # the trainer computes in float32
BY_NAME = "solution_str"  # name of the completion for a function that takes all arguments by name
BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids")  # arguments of batched functions


class RewardError(ValueError):
    """A reward function does not fit the prompts' fields, or failed on a completion.

    Attributes:
      prompt, completion, value: what it failed on and what it returned; None if the error is another.
    """

    def __init__(self, message: str, prompt: str | None = None, completion: str | None = None, value: Any = None):
        super().__init__(message)
        self.prompt = prompt
        self.completion = completion
        self.value = value


class CompletedRow(NamedTuple):
    """A row to be rewarded.

    Attributes:
      prompt, completion: texts for the reward functions.
      fields: the other fields of the prompt's record, passed by name.
      completion_ids: tokens of the completion, for batched functions that take them.
      messages: messages of a prompt that is a chat; None for a text. Batched functions then receive lists of messages
        instead of texts, as TRL's do.
      views: the completion as functions read it that read something else than its text, by name of `TEXT_VIEWS`.
    """

    prompt: str
    completion: str
    fields: Mapping[str, Any] = {}
    completion_ids: Sequence[int] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    views: Mapping[str, str] = {}

    def seen_by(self, reward: RewardFunction) -> CompletedRow:
        """The row as a function reads it."""
        return self._replace(completion=self.views.get(reward.view.name, self.completion), views={})


class TooSlow(Exception):
    """A call took longer than its timeout, in seconds."""


class Failure(NamedTuple):
    """Arguments of a `RewardError` of one row, which can be sent between processes."""

    message: str
    prompt: str | None = None
    completion: str | None = None
    value: Any = None


class Score(float):
    """A score returned together with further numbers, which are metrics.

    Attributes:
      entries: the further numbers by name.
    """

    def __new__(cls, value: float, entries: Mapping[str, float] | None = None) -> Score:
        score = super().__new__(cls, value)
        score.entries = dict(entries or {})
        return score

    entries: dict[str, float]


RewardOutcome = float | Failure  # of one function for one row; NaN: it does not apply


class RewardFunction(NamedTuple):
    """A reward function, and how to call it.

    Attributes:
      name: in metrics, samples, the report and errors.
      function: the user's function, or a verifier.
      batched: whether it takes lists.
      awaited: whether it is an `async def`.
      takes: names of its arguments; for a batched function, the columns that it receives.
      keywords: whether it takes any further field by name.
      needs: tuples of fields; a prompt's record must have at least one field of each.
      check: raises ValueError if a record's fields cannot be used; None: no check.
      alone: whether it is the only function, so that it must apply to every completion.
      view: what it reads of a completion.
    """

    name: str
    function: Reward
    batched: bool = False
    awaited: bool = False
    takes: frozenset[str] = frozenset()
    keywords: bool = True
    needs: tuple[tuple[str, ...], ...] = ()
    check: Callable[[Mapping[str, Any]], None] | None = None
    alone: bool = True
    view: TextView = TextView(TEXT)

    def __call__(self, *args: Any, **fields: Any) -> Any:
        return self.function(*args, **fields)


def reward_functions(rewards: Sequence[Reward]) -> tuple[RewardFunction, ...]:
    """Describe functions that run together; equal names are numbered."""
    described = [
        reward if isinstance(reward, RewardFunction) else describe_function(reward, function_name(reward))
        for reward in rewards
    ]
    names = unique_names([reward.name for reward in described])
    return tuple(
        reward._replace(name=name, alone=len(described) == 1) for reward, name in zip(described, names, strict=True)
    )


def describe_function(function: Reward, name: str, needs: tuple[tuple[str, ...], ...] = ()) -> RewardFunction:
    """Describe a function by its signature. Raises: RewardError, it is a generator function."""
    both = (function, getattr(function, "__call__", None))  # noqa: B004
    if any(inspect.isgeneratorfunction(x) or inspect.isasyncgenfunction(x) for x in both):
        raise RewardError(f"the reward function {name} is a generator, as it has a yield: it must return its number")
    awaited = any(map(inspect.iscoroutinefunction, both))
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C has no signature
        return RewardFunction(name, function, awaited=awaited, needs=needs, view=view_of(function))
    takes = frozenset(
        argument.name for argument in arguments if argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
    )
    keywords = any(argument.kind == argument.VAR_KEYWORD for argument in arguments)
    return RewardFunction(
        name,
        function,
        bool(takes & set(BATCH_ARGUMENTS)),
        awaited=awaited,
        takes=takes,
        keywords=keywords,
        needs=needs,
        view=view_of(function),
    )


def function_name(function: Reward) -> str:
    """The name of a function, or of the class of an object that is called."""
    inner = getattr(function, "func", function)  # of a partial
    return getattr(inner, "__name__", type(inner).__name__).strip("<>")


@contextlib.contextmanager
def torch_state_kept() -> Iterator[None]:
    """Restore torch's grad mode, default dtype and default device after a reward function that may change them."""
    grad = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)  # without a default device it is the CPU


def outcomes(reward: RewardFunction, rows: Sequence[CompletedRow]) -> list[RewardOutcome]:
    """Outcomes of a function that is not awaited, in the order of the rows. Raises nothing."""
    rows = [row.seen_by(reward) for row in rows]
    if reward.batched:
        return _batch_outcomes(reward, rows, lambda: reward.function(**columns_of(reward, rows)))
    return [_row_outcome(reward, row, lambda row=row: _called(reward, row)) for row in rows]


async def awaited_outcomes(
    reward: RewardFunction, rows: Sequence[CompletedRow], timeout_s: float | None = None
) -> list[RewardOutcome]:
    """Outcomes of an awaited function, in the order of the rows. A plain one has all its calls concurrently.

    Args:
      reward: the function.
      rows: what to reward.
      timeout_s: timeout of a call.
    """
    rows = [row.seen_by(reward) for row in rows]
    if reward.batched:
        return _batch_outcomes(
            reward, rows, await _awaited(lambda: reward.function(**columns_of(reward, rows)), timeout_s)
        )

    async def row_outcome(row: CompletedRow) -> RewardOutcome:
        return _row_outcome(reward, row, await _awaited(lambda: _called(reward, row), timeout_s))

    return list(await asyncio.gather(*map(row_outcome, rows)))


def named_fields(reward: RewardFunction, fields: Mapping[str, object]) -> dict[str, Any]:
    """The fields that a function takes by name."""
    return {name: x for name, x in fields.items() if reward.keywords or name in reward.takes}


def _called(reward: RewardFunction, row: CompletedRow) -> Any:
    """Call a plain function on a row."""
    if BY_NAME in reward.takes:
        return reward.function(**{BY_NAME: row.completion, **named_fields(reward, row.fields)})
    return reward.function(row.prompt, row.completion, **row.fields)


def columns_of(reward: RewardFunction, rows: Sequence[CompletedRow]) -> dict[str, list[Any]]:
    """Arguments of a batched function: for each column that it takes, a list with one item per row.

    The item is None if the row lacks the field.
    """
    own: dict[str, list[Any]] = {
        "prompts": [row.prompt if row.messages is None else list(row.messages) for row in rows],
        "completions": [
            row.completion if row.messages is None else [{"role": "assistant", "content": row.completion}]
            for row in rows
        ],
    }
    fields = dict.fromkeys(name for row in rows for name in row.fields)
    columns = own | {name: [row.fields.get(name) for row in rows] for name in fields if name not in BATCH_ARGUMENTS}
    if "completion_ids" in reward.takes:
        columns["completion_ids"] = [list(row.completion_ids) for row in rows]
    return named_fields(reward, columns)


def score_all(
    reward: Reward,
    prompts: Sequence[str],
    completions: Sequence[str],
    fields: Sequence[Mapping[str, object]],
    one_of_several: bool = False,
) -> list[float]:
    """Reward every completion.

    Args:
      reward: a function of any form.
      prompts, completions, fields: one of each per row.
      one_of_several: whether the function may return None or NaN for rows to which it does not apply.

    Returns: one number per row, NaN where the reward does not apply.

    Raises:
      RewardError: the function raised, or returned something other than a finite number; the message shows the row and
        the function's own traceback.
    """
    rows = [CompletedRow(*row) for row in zip(prompts, completions, fields, strict=True)]
    (described,) = reward_functions([reward])
    described = described._replace(alone=not one_of_several)
    results = asyncio.run(awaited_outcomes(described, rows)) if described.awaited else outcomes(described, rows)
    for outcome in results:
        if isinstance(outcome, Failure):
            raise RewardError(*outcome)
    return [outcome for outcome in results if not isinstance(outcome, Failure)]


def row_text(row: CompletedRow) -> str:
    """Lines that show a row, to append to the first line of an error."""
    return f"\n  prompt: {row.prompt!r}\n  completion: {row.completion!r}\n  fields: {dict(row.fields)!r}"


def failure_of(reward: RewardFunction, row: CompletedRow, what: str, rest: str = "", value: object = None) -> Failure:
    """Describe a failure on a row: the function, what it did, the row, and `rest`."""
    name = "" if reward.alone else f" {reward.name}"
    return Failure(f"the reward function{name} {what}{row_text(row)}{rest}", row.prompt, row.completion, value=value)


def picklable(outcome: RewardOutcome) -> RewardOutcome:
    """The outcome with a value that can be sent to another process; other values become their repr."""
    if not isinstance(outcome, Failure) or isinstance(outcome.value, (bool, int, float, str, type(None))):
        return outcome
    return outcome._replace(value=repr(outcome.value))


def too_slow(timeout_s: float) -> str:
    """Describe a call that exceeded its timeout."""
    return f"took longer than {timeout_s:g} s"


def _row_outcome(reward: RewardFunction, row: CompletedRow, call: Callable[[], object]) -> RewardOutcome:
    try:
        with torch_state_kept():
            value = call()
    except TooSlow as error:
        return failure_of(reward, row, too_slow(error.args[0]))
    except (Exception, SystemExit) as error:
        return failure_of(reward, row, f"raised {error!r}", rest=f"\n{_own_trace(error)}")
    return _checked(reward, row, value)


def _batch_outcomes(
    reward: RewardFunction, rows: Sequence[CompletedRow], call: Callable[[], Any]
) -> list[RewardOutcome]:
    among = f" for {len(rows)} completions, the first of which is" if len(rows) > 1 else ""
    try:
        with torch_state_kept():
            given = call()
    except TooSlow as error:
        return [failure_of(reward, rows[0], too_slow(error.args[0]) + among)] * len(rows)
    except (Exception, SystemExit) as error:
        return [failure_of(reward, rows[0], f"raised {error!r}{among}", rest=f"\n{_own_trace(error)}")] * len(rows)
    values = given.tolist() if hasattr(given, "tolist") else given  # an array or a tensor
    if not isinstance(values, (list, tuple)) or len(values) != len(rows):
        what = f"gave {len(values)} numbers" if isinstance(values, (list, tuple)) else f"gave {given!r}"
        wanted = f"{what}; a list of a number for each of {len(rows)} completions is needed"
        return [failure_of(reward, rows[0], wanted)] * len(rows)
    return [_checked(reward, row, value) for row, value in zip(rows, values, strict=True)]


def _checked(reward: RewardFunction, row: CompletedRow, value: object) -> RewardOutcome:
    """The number of a row; NaN where the function does not apply."""
    entries: dict[str, float] = {}
    if isinstance(value, Mapping) and "score" in value:
        others = {str(name): _number(x) for name, x in value.items() if name != "score"}
        entries = {name: x for name, x in others.items() if x is not None and math.isfinite(x)}
        value = value["score"]
    number = _number(value)
    if not reward.alone and (value is None or (number is not None and math.isnan(number))):
        return math.nan
    if number is None or not abs(number) <= LARGEST:  # nor is nan
        where = "in a dict under the name 'score'" if isinstance(value, Mapping) else "of float32: up to 3.4e38"
        return failure_of(reward, row, f"gave {value!r}, a finite number is needed ({where})", rest="", value=value)
    return Score(number, entries) if entries else number


async def _awaited(call: Callable[[], Awaitable[object]], timeout_s: float | None) -> Callable[[], Any]:
    """Await a call; returns a function that returns its value or raises its error."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            value = await call()
    except (Exception, SystemExit) as error:
        return functools.partial(_raise, TooSlow(timeout_s) if limit.expired() else error)
    return lambda: value


def _raise(error: BaseException) -> NoReturn:
    raise error


def _own_trace(error: BaseException) -> str:
    """The traceback of an error without this file's frames."""
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    return "".join(traceback.format_exception(type(error), error, own))


def _number(value: Any) -> float | None:
    """A number of Python, NumPy or torch as a float; None for anything else, text included."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
