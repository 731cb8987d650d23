"""Calls of reward functions, with care: what a function is given, what it may give, and what it raises.

| form | called with | gives |
|---|---|---|
| plain | prompt, completion, and the record's other fields by name | a number or None |
| batched | lists of prompts, completions and fields, those that it takes by name | a list of them |
| `async def`, plain or batched | the same, many calls at once in one event loop | the same |

A function that has an argument `completions`, `prompts` or `completion_ids` is a batched one, as TRL's are: where the
records' prompts are chats, its prompts and completions are lists of messages. A plain one is always given texts. One
that has an argument `solution_str` is called as verl's are: the completion by this name, and the fields that it takes.
Instead of a number a dict may be given that has it as "score"; its other numbers are metrics. None, or NaN, says that
a function does not apply to a completion, whose score is then the sum of the others.
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

Reward = Callable[..., Any]  # (prompt, completion, **fields), or (completions, **columns)
LARGEST = torch.finfo(torch.float32).max  # which the trainer computes in
BY_NAME = "solution_str"  # an argument that is the completion, of a function that takes all by name
BATCH_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
)  # an argument of such a name makes a function a batched one


class RewardError(ValueError):
    """A reward function that does not fit the prompts' fields, or that failed on a completion.

    Attributes:
      prompt, completion, value: what it failed on and what it gave; None where that is not the trouble.
    """

    def __init__(self, message: str, prompt: str | None = None, completion: str | None = None, value: Any = None):
        super().__init__(message)
        self.prompt = prompt
        self.completion = completion
        self.value = value


class Completed(NamedTuple):
    """A row to be rewarded.

    Attributes:
      prompt, completion: what the reward functions are given.
      fields: the other fields of the prompt's record, given by name.
      completion_ids: tokens of the completion, for batched functions that take them.
      messages: of a chat, which the prompt is made of; None: the prompt is a text. A batched function is given lists of
        messages instead of texts then, as TRL's are.
    """

    prompt: str
    completion: str
    fields: Mapping[str, Any] = {}
    completion_ids: Sequence[int] = ()
    messages: Sequence[Mapping[str, Any]] | None = None


class TooSlow(Exception):
    """A call that took longer than its timeout, in seconds."""


class Failure(NamedTuple):
    """The arguments of a `RewardError` of one row, on their way between processes."""

    message: str
    prompt: str | None = None
    completion: str | None = None
    value: Any = None


class Score(float):
    """A number that came with others, which are metrics.

    Attributes:
      entries: the others by name.
    """

    def __new__(cls, value: float, entries: Mapping[str, float] | None = None) -> Score:
        score = super().__new__(cls, value)
        score.entries = dict(entries or {})
        return score

    entries: dict[str, float]


RewardOutcome = float | Failure  # of one function for one row; NaN: it does not apply


class RewardFunction(NamedTuple):
    """A reward function, and how it is called.

    Attributes:
      name: in metrics, samples, the report and errors.
      function: the user's, or a verifier.
      batched: it takes lists.
      awaited: it is an `async def`.
      takes: names of its arguments; of a batched one, the columns that it is given.
      keywords: it takes any further field by name.
      needs: of each tuple, a prompt's record has at least one field.
      check: raises ValueError where a record's fields cannot be used; None: nothing is checked.
      alone: there is no other function, so it has to apply to every completion.
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

    def __call__(self, *args: Any, **fields: Any) -> Any:
        return self.function(*args, **fields)


def reward_functions(rewards: Sequence[Reward]) -> tuple[RewardFunction, ...]:
    """Descriptions of functions that run together; those of one name are numbered."""
    described = [
        reward if isinstance(reward, RewardFunction) else described_function(reward, function_name(reward))
        for reward in rewards
    ]
    names = unique_names([reward.name for reward in described])
    return tuple(
        reward._replace(name=name, alone=len(described) == 1) for reward, name in zip(described, names, strict=True)
    )


def described_function(function: Reward, name: str, needs: tuple[tuple[str, ...], ...] = ()) -> RewardFunction:
    """A function with what its signature says about how it is called."""
    awaited = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one written in C has none
        return RewardFunction(name, function, awaited=awaited, needs=needs)
    takes = frozenset(
        argument.name for argument in arguments if argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
    )
    keywords = any(argument.kind == argument.VAR_KEYWORD for argument in arguments)
    return RewardFunction(
        name, function, bool(takes & set(BATCH_ARGUMENTS)), awaited=awaited, takes=takes, keywords=keywords, needs=needs
    )


def function_name(function: Reward) -> str:
    """The name of a function, or of the class of an object that is called."""
    inner = getattr(function, "func", function)  # of a partial
    return getattr(inner, "__name__", type(inner).__name__).strip("<>")


@contextlib.contextmanager
def torch_state_kept() -> Iterator[None]:
    """Put torch's grad mode, default dtype and default device back at the end: a reward's changes are not the run's."""
    grad = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)  # it is the CPU where none is set


def outcomes(reward: RewardFunction, rows: Sequence[Completed]) -> list[RewardOutcome]:
    """Numbers of rows by a function that is not awaited, in their order. Nothing is raised."""
    if reward.batched:
        return _batch_outcomes(reward, rows, lambda: reward.function(**columns_of(reward, rows)))
    return [_row_outcome(reward, row, lambda row=row: _called(reward, row)) for row in rows]


async def awaited_outcomes(
    reward: RewardFunction, rows: Sequence[Completed], timeout_s: float | None = None
) -> list[RewardOutcome]:
    """The same by an awaited function; of a plain one, all rows are under way at once.

    Args:
      timeout_s: that a call may take.
    """
    if reward.batched:
        return _batch_outcomes(
            reward, rows, await _awaited(lambda: reward.function(**columns_of(reward, rows)), timeout_s)
        )

    async def row_outcome(row: Completed) -> RewardOutcome:
        return _row_outcome(reward, row, await _awaited(lambda: _called(reward, row), timeout_s))

    return list(await asyncio.gather(*map(row_outcome, rows)))


def named_fields(reward: RewardFunction, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a function takes by name, and no other."""
    return {name: x for name, x in fields.items() if reward.keywords or name in reward.takes}


def _called(reward: RewardFunction, row: Completed) -> Any:
    """The value that a plain function gives for a row."""
    if BY_NAME in reward.takes:
        return reward.function(**{BY_NAME: row.completion, **named_fields(reward, row.fields)})
    return reward.function(row.prompt, row.completion, **row.fields)


def columns_of(reward: RewardFunction, rows: Sequence[Completed]) -> dict[str, list[Any]]:
    """The arguments of a batched function: a list of one item a row for each column that it takes; None where a row
    has no such field."""
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
    fields: Sequence[Mapping[str, Any]],
    one_of_several: bool = False,
) -> list[float]:
    """The reward of every completion.

    Args:
      reward: a function of any form.
      prompts, completions, fields: one of each a row.
      one_of_several: None and NaN say that this reward does not apply to the row, which counts in the others only.

    Returns: a number a row, NaN where the reward does not apply.

    Raises:
      RewardError: it raised, or gave something that is no finite number, for a row; the message shows that row, and
        the function's own traceback.
    """
    rows = [Completed(*row) for row in zip(prompts, completions, fields, strict=True)]
    (described,) = reward_functions([reward])
    described = described._replace(alone=not one_of_several)
    results = asyncio.run(awaited_outcomes(described, rows)) if described.awaited else outcomes(described, rows)
    for outcome in results:
        if isinstance(outcome, Failure):
            raise RewardError(*outcome)
    return [outcome for outcome in results if not isinstance(outcome, Failure)]


def row_text(row: Completed) -> str:
    """Lines that show a row, for the end of an error's first line."""
    return f"\n  prompt: {row.prompt!r}\n  completion: {row.completion!r}\n  fields: {dict(row.fields)!r}"


def failure_of(reward: RewardFunction, row: Completed, what: str, rest: str = "", value: Any = None) -> Failure:
    """A failure on a row: "the reward function" or its name, what it did, the row, and what else there is to say."""
    name = "" if reward.alone else f" {reward.name}"
    return Failure(f"the reward function{name} {what}{row_text(row)}{rest}", row.prompt, row.completion, value=value)


def picklable(outcome: RewardOutcome) -> RewardOutcome:
    """The outcome with a value that another process can have: a number, a text, or how it is written."""
    if not isinstance(outcome, Failure) or isinstance(outcome.value, (bool, int, float, str, type(None))):
        return outcome
    return outcome._replace(value=repr(outcome.value))


def too_slow(timeout_s: float) -> str:
    return f"took longer than {timeout_s:g} s"


def _row_outcome(reward: RewardFunction, row: Completed, call: Callable[[], Any]) -> RewardOutcome:
    try:
        with torch_state_kept():
            value = call()
    except TooSlow as error:
        return failure_of(reward, row, too_slow(error.args[0]))
    except (Exception, SystemExit) as error:
        return failure_of(reward, row, f"raised {error!r}", rest=f"\n{_own_trace(error)}")
    return _checked(reward, row, value)


def _batch_outcomes(reward: RewardFunction, rows: Sequence[Completed], call: Callable[[], Any]) -> list[RewardOutcome]:
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


def _checked(reward: RewardFunction, row: Completed, value: Any) -> RewardOutcome:
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
        return failure_of(
            reward, row, f"gave {value!r}, a finite number is needed (of float32: up to 3.4e38)", rest="", value=value
        )
    return Score(number, entries) if entries else number


async def _awaited(call: Callable[[], Awaitable[Any]], timeout_s: float | None) -> Callable[[], Any]:
    """A function that gives what the awaited call gives, or raises what it raises."""
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
