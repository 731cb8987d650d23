"""Users' reward functions: found by name, called with care."""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from funrl import loading

Reward = Callable[..., float]  # (prompt, completion, **fields)
LARGEST = torch.finfo(torch.float32).max  # which the trainer computes in


class RewardError(ValueError):
    """A reward function that does not fit the prompts' fields, or that failed on a completion.

    Attributes:
      prompt, completion, value: what it failed on and what it gave; None where that is not the trouble.
    """

    def __init__(self, message: str, prompt: str | None = None, completion: str | None = None, value: Any = None):
        super().__init__(message)
        self.prompt, self.completion, self.value = prompt, completion, value


def load_rewards(text: str) -> tuple[Reward, ...]:
    """The functions that "FILE.py:f,FILE.py:g" names, at least one. Raises: LoadError, as `loading.load_function`."""
    with torch_state_kept():
        return tuple(loading.load_function("reward", part.strip()) for part in text.split(","))


@contextlib.contextmanager
def torch_state_kept() -> Iterator[None]:
    """Put torch's grad mode, default dtype and default device back at the end: a reward's changes are not the run's."""
    grad, dtype, device = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)  # it is the CPU where none is set


def check_fields(text: str, reward: Reward, fields: Sequence[Mapping[str, Any]]) -> None:
    """Raise RewardError where a function has no place for a field that a prompt brings, or wants one that it lacks."""
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # one written in C has none
        return
    for names in dict.fromkeys(tuple(sorted(f)) for f in fields):
        try:
            signature.bind("", "", **dict.fromkeys(names))
        except TypeError as error:
            call = ", ".join(("prompt", "completion", *(f"{n}=..." for n in names)))
            raise RewardError(
                f"--reward={text}: the prompts' fields make the call ({call}), but it has {error}"
            ) from error


def score_all(
    reward: Reward,
    prompts: Sequence[str],
    completions: Sequence[str],
    fields: Sequence[Mapping[str, Any]],
    one_of_several: bool = False,
) -> list[float]:
    """The reward of every completion.

    Args:
      reward: function(prompt, completion, **fields) -> number that is finite in float32.
      prompts, completions, fields: one of each a row.
      one_of_several: None and NaN say that this reward does not apply to the row, which counts in the others only.

    Returns: a number a row, NaN where the reward does not apply.

    Raises:
      RewardError: it raised, or gave something that is no finite number, for a row; the message shows that row, and
        the function's own traceback.
    """
    return [score_one(reward, p, c, f, one_of_several) for p, c, f in zip(prompts, completions, fields, strict=True)]


def score_one(
    reward: Reward, prompt: str, completion: str, fields: Mapping[str, Any], one_of_several: bool = False
) -> float:
    """The reward of one completion; `score_all` says of what kind, and what is raised."""
    try:
        with torch_state_kept():
            value = reward(prompt, completion, **fields)
    except (Exception, SystemExit) as error:
        own = error.__traceback__.tb_next if error.__traceback__ else None  # without this file's frame
        trace = "".join(traceback.format_exception(type(error), error, own))
        where = row_text(prompt, completion, fields)
        raise RewardError(f"the reward function raised {error!r}{where}\n{trace}", prompt, completion) from error
    number = _number(value)
    if one_of_several and (value is None or (number is not None and math.isnan(number))):
        return math.nan
    if number is None or not abs(number) <= LARGEST:  # nor is nan
        message = f"the reward function gave {value!r}, a finite number is needed (of float32: up to 3.4e38)"
        raise RewardError(message + row_text(prompt, completion, fields), prompt, completion, value)
    return number


def score_row(rewards: Sequence[Reward], prompt: str, completion: str, fields: Mapping[str, Any]) -> list[float]:
    """Rewards of one completion by each function; of several functions, NaN where one does not apply.

    Raises:
      RewardError: as `score_all`; or no function applies.
    """
    found = [score_one(reward, prompt, completion, fields, len(rewards) > 1) for reward in rewards]
    if all(map(math.isnan, found)):
        message = f"none of the {len(rewards)} reward functions applies, one of them must"
        raise RewardError(message + row_text(prompt, completion, fields), prompt, completion)
    return found


def row_text(prompt: str, completion: str, fields: Mapping[str, Any]) -> str:
    """Lines that show a row, for the end of an error's first line."""
    return f"\n  prompt: {prompt!r}\n  completion: {completion!r}\n  fields: {dict(fields)!r}"


def _number(value: Any) -> float | None:
    """A number of Python, NumPy or torch as a float; None for anything else, text included."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
