"""Names of environments: --env=FRAMEWORK:NAME or FILE.py:NAME."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from funrl.environments.builtin.load import FLAG, NO_ARGUMENTS, bound, load_environment
from funrl.environments.environment import Environment
from funrl.foreign.gym_text import load_gymnasium
from funrl.foreign.openenv import load_openenv
from funrl.foreign.program import load_program
from funrl.foreign.verifiers import load_verifiers
from funrl.loading import LoadError

# Prefix of --env -> (what follows it, **arguments) -> environment.
FRAMEWORKS: Mapping[str, Callable[..., Environment]] = {
    "gymnasium": load_gymnasium,
    "openenv": load_openenv,
    "program": load_program,
    "verifiers": load_verifiers,
}


def named_environment(text: str, arguments: Mapping[str, object] = NO_ARGUMENTS) -> Environment:
    """The environment that "FRAMEWORK:NAME" names, see `FRAMEWORKS`, or else as in `load_environment`.

    Raises:
      LoadError: it cannot be loaded, is no environment, does not take the arguments, or its framework is not known.
    """
    framework, colon, name = text.partition(":")
    if framework not in FRAMEWORKS or not colon:
        return _of_file(text, arguments)
    if not name:
        raise LoadError(f"--{FLAG}={text}: nothing follows {framework}:")
    try:
        return bound(FRAMEWORKS[framework], arguments, text, first=1)(name)
    except (ImportError, TypeError, ValueError) as error:
        if str(error).startswith("--"):  # it names its flag
            raise LoadError(str(error)) from error
        raise LoadError(f"--{FLAG}={text}: {error}") from error


def _of_file(text: str, arguments: Mapping[str, object]) -> Environment:
    try:
        return load_environment(text, arguments)
    except LoadError as error:
        cause = error.__cause__
        prefix = text.partition(":")[0]
        if not isinstance(cause, ModuleNotFoundError) or cause.name != prefix:
            raise
        known = sorted(FRAMEWORKS)
        near = difflib.get_close_matches(prefix, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise LoadError(
            f"--{FLAG}={text}: there is neither a module nor a framework {prefix!r}; {hint}"
            f"the frameworks are {', '.join(known)}"
        ) from error
