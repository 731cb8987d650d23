"""Arguments of `funrl.train`, `funrl.evaluate` and `funrl.generate`, checked before anything is started."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from funrl.algos.core import Algorithm
from funrl.data.prompts import Example, Prompt, check_prompts, encode
from funrl.environments.environment import Environment
from funrl.flags.arguments import arguments_of, find_recipe
from funrl.flags.config_file import flag_text
from funrl.flags.foreign.answers import check_names
from funrl.flags.foreign.meaning import NameContext
from funrl.models import Model
from funrl.models.huggingface import directories as hf
from funrl.rewards.call import Reward, describe_function
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.provenance import Given
from funrl.trainer.settings.declaration import Flag, SettingsError, kinds_of
from funrl.trainer.settings.settings import settings_flags

# "FILE.py:NAME", or what `environment_from` takes
GivenEnvironment = str | Path | Environment | Callable[..., Any] | Sequence[Callable[..., Any]]
GivenPrompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]  # text, messages or a record
Function = TypeVar("Function", bound=Callable[..., Any])


def with_keywords(keywords: str, flags: Iterable[Flag] = ()) -> Callable[[Function], Function]:
    """Put every keyword into a function's signature, where notebooks look for completions.

    Args:
      keywords: the typed dict of the function's **keywords, in keywords.pyi.
      flags: flags whose defaults the signature shows; other defaults depend on the recipe or the model.
    """
    defaults = {flag.name: flag.default for flag in flags}

    def named(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, ...), annotation=kind)
            for name, kind in _keyword_types()[keywords].items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return named


@functools.cache
def _keyword_types() -> dict[str, dict[str, str]]:
    """The typed dicts of keywords.pyi, which type checkers read: the text of each keyword's type."""
    tables: dict[str, dict[str, str]] = {"TypedDict": {}}
    for table in ast.parse(Path(__file__).with_name("keywords.pyi").read_text()).body:
        if isinstance(table, ast.ClassDef):
            entries = (entry for entry in table.body if isinstance(entry, ast.AnnAssign))
            own = {ast.unparse(entry.target): ast.unparse(entry.annotation) for entry in entries}
            tables[table.name] = tables[ast.unparse(table.bases[0])] | own
    return tables


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
    if problem := flag.problem(value):
        raise SettingsError(f"{flag.name}={value!r}: {problem}")
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
    wanted = "a recipe's name such as 'grpo', 'FILE.py:function', or an Algorithm is needed"
    if callable(recipe):
        name = getattr(recipe, "__name__", repr(recipe))
        raise SettingsError(f"recipe={name}: this is a function; {wanted}; call the recipe to get an Algorithm")
    raise SettingsError(f"recipe={recipe!r}: {wanted}")


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
    wanted = f"a function of ({', '.join(example)}) is needed"
    if not callable(function):
        raise SettingsError(f"{name}={function!r}: {wanted}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in function without a signature
        return
    try:
        signature.bind(*example.values())
    except TypeError as error:
        called = getattr(function, "__name__", repr(function))
        raise SettingsError(f"{name}={called}: {wanted}, but it takes {signature}: {error}") from None


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


def objects_given(model: Any, tokenizer: Any, prompts: Any, reward: Any, eval_data: Any, curriculum: Any) -> Given:
    """Arguments of `train` that are objects, which flags cannot express. Raises: SettingsError."""
    if not (model is None or isinstance(model, (str, Path, Model))):
        raise SettingsError(f"model={model!r}: a directory, a name, or a Model is needed")
    if tokenizer is not None and not isinstance(model, Model):
        raise SettingsError(f"tokenizer={tokenizer!r:.80} does nothing without a Model; a directory has its own")
    for name, given in (("prompts", prompts), ("eval_data", eval_data)):
        if not (given is None or isinstance(given, (str, Path, Iterable))):
            raise SettingsError(f"{name}={given!r}: a file, or a list of dicts is needed")
    if not (curriculum is None or isinstance(curriculum, str) or callable(curriculum)):
        raise SettingsError(f"curriculum={curriculum!r}: a function, or 'FILE.py:function' is needed")
    return Given(
        model if isinstance(model, Model) else None,
        tokenizer,
        None if prompts is None or isinstance(prompts, (str, Path)) else prompts,
        None if reward is None or isinstance(reward, str) else functions_of(reward),
        None if eval_data is None or isinstance(eval_data, (str, Path)) else eval_data,
        curriculum if callable(curriculum) else None,
    )


def functions_of(reward: Reward | Sequence[Reward] | Mapping[str, Reward]) -> tuple[Reward, ...]:
    """The functions in an argument, with names if it is a mapping.

    Raises:
      SettingsError: there are none, or one of them is not a function.
    """
    if callable(reward):
        return (reward,)
    if not isinstance(reward, Iterable):
        raise SettingsError(f"reward={reward!r}: a function, several, or FILE.py:function is needed")
    functions = tuple(reward.values() if isinstance(reward, Mapping) else reward)
    if not functions:
        raise SettingsError(f"reward={reward!r}: at least one function is needed")
    for function in functions:
        if not callable(function):
            hint = "; put named rewards into one text, reward='math,format@0.1'" * isinstance(function, str)
            raise SettingsError(f"reward: {function!r} is not a function{hint}")
    if isinstance(reward, Mapping):
        return tuple(describe_function(function, name) for name, function in reward.items())
    return functions


def texts_given(mesh: str, model: Any, reward: Any, eval_data: Any, curriculum: Any) -> dict[str, Any]:
    """Arguments of `train` that are texts, by flag; the flag of prompts depends on the kind of the run."""
    named = {"mesh": mesh, "reward": reward if isinstance(reward, str) else None}
    named["eval_data"] = str(eval_data) if isinstance(eval_data, (str, Path)) else None
    named["curriculum"] = curriculum if isinstance(curriculum, str) else None
    if isinstance(model, (str, Path)):
        named["model"] = str(find_model(model))
    return named


def environment_given(
    env: GivenEnvironment | None, env_args: str | Mapping[str, Any] | None
) -> tuple[Any, dict[str, str]]:
    """An environment in an argument, None where it is a text; and the flags of texts, its arguments included.

    Raises:
      SettingsError: the arguments are not of JSON.
    """
    named = {}
    if isinstance(env_args, Mapping):
        try:
            env_args = json.dumps(dict(env_args))
        except (TypeError, ValueError) as error:
            way_out = "give other objects by functools.partial"
            raise SettingsError(f"env_args={env_args!r:.200}: {error}; {way_out}") from error
    if env_args is not None:
        named["env_args"] = env_args
    return (None, {"env": str(env), **named}) if isinstance(env, (str, Path)) else (env, named)


def find_model(model: str | Path) -> Path:
    """Return a directory unchanged, or find a model in the local Hugging Face cache; nothing is downloaded.

    Raises:
      SettingsError: neither exists.
    """
    directory = hf.find_directory(model)
    if not directory.exists():
        raise SettingsError(f"model={str(model)!r}: no such directory, and no such model in the local cache")
    return directory


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


def given_in_python(**objects: object) -> dict[str, str]:
    """The entry of a run's configuration that names the objects which no flag can give."""
    given = [name for name, x in objects.items() if x is not None and not isinstance(x, (str, Path))]
    names = [name if name == "prompts" else f"the {name}" for name in given]
    return {"given_in_python": ", ".join(names)} if names else {}


def given_example(tokenizer: Any, given: GivenPrompt) -> Example:
    """A prompt in tokens, with its pictures. Raises: SettingsError."""
    try:
        if isinstance(given, Mapping):
            (prompt,) = check_prompts([dict(given)])
        else:
            prompt = Prompt(given if isinstance(given, str) else list(map(dict, given)), {}, source=f"{given!r:.100}")
        return encode(prompt, tokenizer)
    except ValueError as error:
        raise SettingsError(str(error)) from error
