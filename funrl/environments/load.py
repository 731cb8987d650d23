"""Environments that a command line names, or that a caller in Python gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from funrl.environments.adapters import function_environment, message_environment
from funrl.environments.environment import Environment
from funrl.loading import LoadError, load_function

FLAG = "env"


def load_environment(text: str) -> Environment:
    """The environment that "FILE.py:NAME" names; see `environment_from`.

    Raises:
      LoadError: it cannot be loaded, or is no environment.
    """
    try:
        return environment_from(load_function(FLAG, text))
    except TypeError as error:
        raise LoadError(f"--{FLAG}={text}: {error}") from error


def environment_from(given: Environment | Callable[..., Any]) -> Environment:
    """An environment of an object, a class or a function.

    | given | environment |
    |---|---|
    | an object with `run` | itself |
    | a class with `run` | an object of it |
    | a class with `reset`, `step` and `close` | `message_environment` |
    | a function of no required argument | what it returns, an object with `run` |
    | another function | `function_environment` |

    Raises:
      TypeError: it has another form.
    """
    if isinstance(given, type):
        kind: Any = given
        if hasattr(kind, "run"):
            return kind()
        missing = [name for name in ("reset", "step", "close") if not hasattr(given, name)]
        if missing:
            raise TypeError(
                f"class {given.__name__} lacks {', '.join(missing)}; it needs run, or reset, step and close"
            )
        return message_environment(kind)
    if hasattr(given, "run"):
        return cast(Environment, given)
    if not callable(given):
        raise TypeError(_advice(given))
    required = [p for p in inspect.signature(given).parameters.values() if p.default is p.empty]
    if required:
        return function_environment(given)
    environment = given()
    if not hasattr(environment, "run"):
        name = getattr(given, "__name__", repr(given))
        raise TypeError(f"{name}() gave {environment!r:.100}, which has no run")
    return environment


def _advice(given: object) -> str:
    """Advice on what to write instead of an object that is no environment."""
    if isinstance(given, (list, tuple)):
        return "tools need a score of the messages; give tool_environment(tools, score)"
    if hasattr(given, "reset"):
        return f"each episode has its own; give the class {type(given).__name__}, or message_environment(make)"
    return "an object with run, a class or a function is needed"
