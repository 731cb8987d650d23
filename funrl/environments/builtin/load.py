"""Environments that a command line names, or that a caller in Python gives, with arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from funrl.data.json_lines import DataError
from funrl.data.prompt_format import template_arguments
from funrl.environments.adapters import GYM, function_environment, message_environment, tool_environment
from funrl.environments.answer_rewards import answer_reward
from funrl.environments.environment import Environment
from funrl.loading import LoadError, load_object, user_frames
from funrl.rewards.call import Reward

FLAG = "env"
ARGUMENTS = "env_args"
NO_ARGUMENTS: Mapping[str, Any] = {}


def load_environment(text: str, arguments: Mapping[str, Any] = NO_ARGUMENTS) -> Environment:
    """The environment that "FILE.py:NAME" names, see `environment_from`.

    Raises:
      LoadError: it cannot be loaded, is no environment, or does not take the arguments.
    """
    named = load_object(FLAG, text)
    try:
        return environment_from(named, arguments)
    except (TypeError, ValueError) as error:
        raise LoadError(f"--{FLAG}={text}: {error}") from error


def environment_arguments(text: str | None) -> dict[str, Any]:
    """Arguments of an environment: a JSON object, or NAME:VALUE pairs as of --template_arguments.

    >>> environment_arguments("attempts:3,reward:math")
    {'attempts': 3, 'reward': 'math'}
    >>> environment_arguments('{"attempts": 3}')
    {'attempts': 3}

    Raises:
      LoadError: the text has neither form.
    """
    if text is None:
        return {}
    try:
        if not text.lstrip().startswith("{"):
            return template_arguments(text)
        return json.loads(text)
    except (DataError, ValueError) as error:
        raise LoadError(
            f"--{ARGUMENTS}={text}: write NAME:VALUE, separated by commas, or a JSON object ({error})"
        ) from error


def environment_from(
    given: Environment | Callable[..., Any] | Sequence[Callable[..., Any]],
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> Environment:
    """An environment of an object, a class, a function or a list of tools.

    | given | environment | what gets the arguments |
    |---|---|---|
    | an object with `run` | itself | nothing |
    | a class with `run` | an object of it | the class |
    | a class with `reset`, `step` and `close` | `message_environment` | the class, for each episode |
    | a list of functions | `rewarded_tools` | that function |
    | a function whose required arguments are all given | what it returns, an object with `run` | the function |
    | another function | `function_environment` | the function, at each call |

    Raises:
      TypeError: it has another form, or does not take the arguments.
    """
    if isinstance(given, (list, tuple)):
        return bound(rewarded_tools, arguments, "a list of tools", first=1)(given)
    if isinstance(given, type):
        return _of_class(given, arguments)
    if hasattr(given, "run"):
        if arguments:
            names = ", ".join(arguments)
            raise TypeError(f"{type(given).__name__} is an object, which takes no {ARGUMENTS}: {names}; give its class")
        return cast(Environment, given)
    if not callable(given):
        advice = "an object with run, a class, a function or a list of functions is needed"
        if hasattr(given, "reset"):
            advice = f"each episode has its own; give the class {type(given).__name__}, or message_environment(make)"
        raise TypeError(advice)
    name = getattr(given, "__name__", repr(given))
    parameters = inspect.signature(given).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if any(parameter.name not in arguments for parameter in required):
        return function_environment(bound(given, arguments, f"{name}()", first=1))
    environment = made(bound(given, arguments, f"{name}()"), f"{name}()")
    if not hasattr(environment, "run"):
        raise TypeError(f"{name}() gave {environment!r:.100}, which has no run")
    return environment


def _of_class(kind: Any, arguments: Mapping[str, Any]) -> Environment:
    what = f"class {kind.__name__}"
    missing = [name for name in ("reset", "step", "close") if not hasattr(kind, name)]
    if missing and not hasattr(kind, "run"):
        gym = GYM if hasattr(kind, "reset") else ""
        raise TypeError(f"{what} lacks {', '.join(missing)}; it needs run, or reset, step and close{gym}")
    make = bound(kind, arguments, what)
    return made(make, what) if hasattr(kind, "run") else message_environment(make)


def made(make: Callable[[], Any], what: str) -> Any:
    """The result of a user's function or class. Raises ValueError that names it where it raises."""
    try:
        return make()
    except (TypeError, ValueError):  # whose text says what is wrong
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(user_frames(error))
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise ValueError(f"{what} raised {type(error).__name__}: {error}{where}") from error


def bound(function: Callable[..., Any], arguments: Mapping[str, Any], what: str, first: int = 0) -> Callable[..., Any]:
    """A function with its arguments by name.

    Args:
      what: the function, for messages.
      first: positional arguments that a caller gives.

    Raises:
      TypeError: it takes no argument of a name, or needs a further one.
    """
    parameters = list(inspect.signature(function).parameters.values())
    taken = [p.name for p in parameters[first:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in arguments:
        if name not in taken and not more:
            near = difflib.get_close_matches(name, taken, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            others = f"only {', '.join(taken)}" if taken else "nor any other"
            raise TypeError(f"{what} takes no argument {name!r}, {others}{hint}")
    needed = [p.name for p in parameters[first:] if p.name in taken and p.default is p.empty]
    missing = [name for name in needed if name not in arguments]
    if missing and not first:
        raise TypeError(f"{what} needs {', '.join(missing)}; give --{ARGUMENTS}={missing[0]}:VALUE")
    return functools.partial(function, **arguments) if arguments else function


def rewarded_tools(
    tools: Sequence[Callable[..., Any]], reward: str | Reward = "exact", system: str | None = None
) -> Environment:
    """An environment in which the policy calls tools until it replies without a call; that reply is rewarded.

    Args:
      tools: as in `tool_environment`.
      reward: a reward function, or what --reward names: "exact", "math", "FILE.py:function". An episode that a limit
        ends at a call has the reward of an empty reply.
      system: a system message, before the messages of the example.

    Raises:
      ValueError: a tool has no docstring or types, or several rewards are named.
      LoadError: the reward cannot be loaded.
    """
    of_answer = answer_reward(reward)

    def score(messages: Sequence[Mapping[str, Any]], **fields: Any) -> float:
        question = list(itertools.takewhile(lambda message: message["role"] != "assistant", messages))
        last = messages[-1]
        answered = last["role"] == "assistant" and not last.get("tool_calls")
        return of_answer(str(question[-1]["content"]), last["content"] if answered else "", fields, question)

    return tool_environment(tools, score, system)
