"""Arguments of `funrl.train`, `funrl.evaluate` and `funrl.generate`, checked before anything is started."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from funrl.algos.core import Algorithm
from funrl.data.prompts import Example, Prompt, check_prompts, encode
from funrl.environments.environment import Environment
from funrl.flags.arguments import arguments_of, find_recipe
from funrl.flags.config_file import flag_text
from funrl.flags.foreign.answers import check_names
from funrl.flags.foreign.meaning import NameContext
from funrl.models import Model
from funrl.rewards.call import Reward, describe_function
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.settings.declaration import Flag, SettingsError, kinds_of, refusing
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import settings_flags

# "FILE.py:NAME", or what `environment_from` takes
GivenEnvironment = str | Path | Environment | Callable[..., Any] | Sequence[Callable[..., Any]]
GivenPrompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]  # text, messages or a record


def checked_settings(given: Mapping[str, Any], known: Mapping[str, Flag], context: NameContext) -> dict[str, Any]:
    """Keyword arguments as values of flags.

    Args:
      given: values by name, such as {"lr": 1e-4}.
      known: all flags.
      context: context for the meaning of another library's names.

    Raises:
      SettingsError: a name is not a flag; the message suggests one.
    """
    check_names({name: flag_text(value) for name, value in given.items()}, known, context, python=True)
    return {name: python_value(known[name], value) for name, value in given.items()}


def plain_number(value: Any) -> Any:
    """Convert a NumPy scalar to Python's; return other values unchanged."""
    for kind, convert in ((np.bool_, bool), (np.integer, int), (np.floating, float)):
        if isinstance(value, kind):
            return convert(value)
    return value


def python_value(flag: Flag, value: Any) -> Any:
    """Convert a value from Python to the type of its flag.

    NumPy's scalars become Python's; paths and numbers become text if the flag is a text. Other values are returned
    unchanged.
    """
    value = plain_number(value)
    if flag.type is str and isinstance(value, (Path, bool, int, float)):
        return flag_text(value)
    return value


def checked_value(flag: Flag, value: Any) -> Any:
    """Convert a value to the type of its flag. Raises: SettingsError, the flag refuses it."""
    value = python_value(flag, value)
    flag.check(value, f"{flag.name}={value!r}")
    return value


def sampling_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Sampling`. Raises: SettingsError, a name is not a field."""
    fields = {field.name for field in dataclasses.fields(Sampling)}
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(name, sorted(fields), 1)
            hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(sorted(fields))}"
            raise SettingsError(f"{name}={value!r}: sampling has no such field; {hint}")
    return {name: plain_number(value) for name, value in given.items()}


def settings_and_arguments(recipe: str | Algorithm, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values into flags of `Settings` and arguments that only the recipe has. Raises: SettingsError."""
    arguments = {} if isinstance(recipe, Algorithm) else recipe_flags(recipe)
    known = {**arguments, **settings_flags()}
    ours = {name: given.get(name, flag.default) for name, flag in settings_flags().items()}
    values = checked_settings(given, known, NameContext({}, ours, frozenset(arguments), _name_of(recipe)))
    own = {name: values.pop(name) for name in arguments if name in values and name not in settings_flags()}
    return values, own


def _name_of(recipe: str | Algorithm) -> str:
    """The name of a recipe in messages."""
    if isinstance(recipe, str):
        return recipe.rpartition(":")[2]
    return "sft" if kinds_of(recipe) == ("supervised",) else "this algorithm"


def recipe_flags(recipe: str) -> Mapping[str, Flag]:
    """The arguments of a named recipe. Raises: LoadError, SettingsError."""
    return arguments_of(find_recipe(recipe), recipe).flags


def check_recipe(recipe: Any) -> None:
    """Check the type of a recipe. Raises: SettingsError."""
    if isinstance(recipe, (str, Algorithm)):
        return
    name = getattr(recipe, "__name__", repr(recipe))
    hint = "; call the recipe to get an Algorithm" * callable(recipe)
    wanted = "a recipe's name such as 'grpo', 'FILE.py:function', or an Algorithm is needed"
    raise SettingsError(f"recipe={name}: {wanted}{hint}")


def check_callable(name: str, function: Any, example: Mapping[str, Any]) -> None:
    """Check that an argument is None, or a function with the right parameters.

    Args:
      name: name of the argument.
      function: its value.
      example: positional arguments of a call; the names are for the message.

    Raises:
      SettingsError: it is not a function, or does not take these arguments.
    """
    if function is None:
        return
    called = getattr(function, "__name__", repr(function))
    wanted = f"{name}={called}: a function of ({', '.join(example)}) is needed"
    with refusing(f"{wanted}: ", TypeError):
        try:
            signature = inspect.signature(function)
        except ValueError:  # a built-in function without one
            return
    with refusing(f"{wanted}, but it takes {signature}: ", TypeError):
        signature.bind(*example.values())


def mesh_text(mesh: Any) -> str:
    """The text of a mesh. Raises: SettingsError, it is not a text; the message suggests one."""
    if isinstance(mesh, str):
        return mesh
    if isinstance(mesh, Mapping):
        meant = ",".join(f"{axis}{size}" for axis, size in mesh.items())
    else:
        meant = f"dp{mesh}" if isinstance(mesh, int) else "dp2"
    raise SettingsError(f"mesh={mesh!r}: a mesh is text; write mesh={meant or 'dp1'!r}")


def check_place(name: str, model: Any) -> None:
    """Check that an argument names a model. Raises: SettingsError."""
    if isinstance(model, (str, Path)):
        return
    place = getattr(model, "run_dir", None) or getattr(model, "directory", None)
    hint = f", here {str(place)!r}" if place is not None else ", or the name of a model in the local cache"
    raise SettingsError(f"{name}={model!r}: a directory is needed{hint}")


def split_arguments(**arguments: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Split arguments into texts, which are values of flags, and objects; None is neither.

    Raises:
      SettingsError: `env_args` is a mapping with values that JSON does not have.
    """
    if isinstance(env_args := arguments.get("env_args"), Mapping):
        way_out = "; give other objects by functools.partial"
        with refusing(f"env_args={env_args!r:.200}: ", TypeError, ValueError, ending=way_out):
            arguments["env_args"] = json.dumps(dict(env_args))
    texts = {name: str(value) for name, value in arguments.items() if isinstance(value, (str, Path))}
    return texts, {name: x for name, x in arguments.items() if x is not None and name not in texts}


def given_of(objects: Mapping[str, Any]) -> Given:
    """Objects by argument, checked. Raises: SettingsError."""
    records = (Iterable, "a file, or a list of dicts")
    kinds: dict[str, tuple[Any, str]] = {
        "model": (Model, "a directory, a name, or a Model"),
        "prompts": records,
        "eval_data": records,
        "curriculum": (Callable, "a function, or 'FILE.py:function'"),
    }
    for name, (kind, wanted) in kinds.items():
        if name in objects and not isinstance(objects[name], kind):
            raise SettingsError(f"{name}={objects[name]!r}: {wanted} is needed")
    if "tokenizer" in objects and "model" not in objects:
        tokenizer = objects["tokenizer"]
        raise SettingsError(f"tokenizer={tokenizer!r:.80} does nothing without a Model; a directory has its own")
    return Given(
        model=objects.get("model"),
        tokenizer=objects.get("tokenizer"),
        records=objects.get("prompts"),
        rewards=functions_of(objects["reward"]) if "reward" in objects else None,
        eval_records=objects.get("eval_data"),
        curriculum=objects.get("curriculum"),
        environment=objects.get("env"),
    )


def functions_of(reward: Reward | Sequence[Reward] | Mapping[str, Reward]) -> tuple[Reward, ...]:
    """The functions in an argument, with names if it is a mapping.

    Raises:
      SettingsError: there are none, or one of them is not a function.
    """
    if callable(reward):
        return (reward,)
    given = reward.values() if isinstance(reward, Mapping) else reward if isinstance(reward, Iterable) else ()
    functions = tuple(given)
    if not functions or not all(map(callable, functions)):
        raise SettingsError(f"reward={reward!r}: functions are needed, or a text such as 'FILE.py:function,format@0.1'")
    if isinstance(reward, Mapping):
        return tuple(describe_function(function, name) for name, function in reward.items())
    return functions


def check_source(source: object, place: str | None) -> None:
    """Check a source of rows.

    Args:
      source: of the user; None: there is none.
      place: of the flag.

    Raises:
      SettingsError: it cannot be called, or other ranks write the rows.
    """
    check_callable("source", source, dict.fromkeys(("job", "parts", "frozen", "clock", "observer")))
    if source is not None and place is not None:
        raise SettingsError(f"source=... with --place={place}: other ranks write the rows; leave one out")


def given_example(tokenizer: Any, given: GivenPrompt) -> Example:
    """A prompt in tokens, with its pictures. Raises: SettingsError."""
    with refusing():
        if isinstance(given, Mapping):
            (prompt,) = check_prompts([dict(given)])
        else:
            prompt = Prompt(given if isinstance(given, str) else list(map(dict, given)), {}, source=f"{given!r:.100}")
        return encode(prompt, tokenizer)
