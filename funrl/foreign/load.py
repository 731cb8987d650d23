"""Names of environments: --env=FRAMEWORK:NAME or FILE.py:NAME."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from funrl.environments.builtin.load import FLAG, NO_ARGUMENTS, bound, load_environment
from funrl.environments.environment import Environment
from funrl.foreign.gym_text import load_gymnasium, load_skyrl
from funrl.foreign.nemo_gym import load_nemo_gym
from funrl.foreign.openenv import load_openenv
from funrl.foreign.program import load_program
from funrl.foreign.tinker import load_tinker
from funrl.foreign.trl import load_trl
from funrl.foreign.verifiers import load_verifiers
from funrl.foreign.verl import load_verl
from funrl.loading import LoadError

# Prefix of --env -> (what follows it, **arguments) -> environment.
FRAMEWORKS: Mapping[str, Callable[..., Environment]] = {
    "gymnasium": load_gymnasium,
    "nemo_gym": load_nemo_gym,
    "openenv": load_openenv,
    "program": load_program,
    "skyrl": load_skyrl,
    "tinker": load_tinker,
    "trl": load_trl,
    "verifiers": load_verifiers,
    "verl": load_verl,
}


def named_environment(text: str, arguments: Mapping[str, Any] = NO_ARGUMENTS) -> Environment:
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


def _of_file(text: str, arguments: Mapping[str, Any]) -> Environment:
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
