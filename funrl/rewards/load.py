"""A user's reward function: found by name, called with care."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

Reward = Callable[..., float]  # (prompt, completion, **fields)


class RewardError(ValueError):
    """A reward function that cannot be loaded, or that failed on a completion.

    Attributes:
      prompt, completion, value: what it failed on and what it gave; None where that is not the trouble.
    """

    def __init__(self, message: str, prompt: str | None = None, completion: str | None = None, value: Any = None):
        super().__init__(message)
        self.prompt, self.completion, self.value = prompt, completion, value


def load_reward(text: str) -> Reward:
    """The function that "FILE.py:function" or "package.module:function" names.

    A file is run as a module of its own, with its folder on the import path, as Python does with a script.

    Raises:
      RewardError: the file is missing or does not import, has no such function, or it cannot be called.
    """
    name, colon, function = text.rpartition(":")
    if not (name and colon and function):
        raise RewardError(f"--reward={text}: write FILE.py:function, such as reward.py:score")
    module = _from_file(text, Path(name)) if name.endswith(".py") else _from_package(text, name)
    if not hasattr(module, function):
        there = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise RewardError(f"--reward={text}: {name} has no {function!r}; its functions: {', '.join(there) or 'none'}")
    found = getattr(module, function)
    if not callable(found):
        raise RewardError(f"--reward={text}: {function!r} is {found!r}, which cannot be called; a function is needed")
    return cast(Reward, found)


def load_rewards(text: str) -> tuple[Reward, ...]:
    """The functions that "FILE.py:f,FILE.py:g" names, at least one. Raises: RewardError, as `load_reward`."""
    return tuple(load_reward(part.strip()) for part in text.split(","))


def check_fields(text: str, reward: Reward, fields: Sequence[Mapping[str, Any]]) -> None:
    """Raises RewardError where a function has no place for a field that a prompt brings, or wants one that it lacks."""
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


def score(
    reward: Reward, prompts: Sequence[str], completions: Sequence[str], fields: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The reward of every completion.

    Args:
      reward: function(prompt, completion, **fields) -> finite number.
      prompts, completions, fields: one of each a row.

    Raises:
      RewardError: it raised, or gave something that is no finite number, for a row; the message shows that row, and
        the function's own traceback.
    """
    return [_one(reward, p, c, f) for p, c, f in zip(prompts, completions, fields, strict=True)]


def _one(reward: Reward, prompt: str, completion: str, fields: Mapping[str, Any]) -> float:
    where = f"\n  prompt: {prompt!r}\n  completion: {completion!r}\n  fields: {dict(fields)!r}"
    try:
        value = reward(prompt, completion, **fields)
    except (Exception, SystemExit) as error:
        own = error.__traceback__.tb_next if error.__traceback__ else None  # without this file's frame
        trace = "".join(traceback.format_exception(type(error), error, own))
        raise RewardError(f"the reward function raised {error!r}{where}\n{trace}", prompt, completion) from error
    number = _number(value)
    if number is None or not math.isfinite(number):
        message = f"the reward function gave {value!r}, a finite number is needed{where}"
        raise RewardError(message, prompt, completion, value)
    return number


def _number(value: Any) -> float | None:
    """A number of Python, NumPy or torch as a float; None for anything else, text included."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _from_file(text: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"--reward={text}: {path}: no such file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"funrl_reward_{path.stem}"  # a name of its own: a file called json.py must not become json
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _no_import(text, str(path), error) from error
    return module


def _from_package(text: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _no_import(text, name, error) from error


def _no_import(text: str, name: str, error: BaseException) -> RewardError:
    if isinstance(error, SyntaxError):
        said, file, line = error.msg, error.filename, error.lineno
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said, file, line = str(error), last.filename, last.lineno
    return RewardError(
        f'--reward={text}: {name} does not import: {type(error).__name__}: {said} ("{file}", line {line})'
    )
