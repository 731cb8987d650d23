"""The arguments of a recipe as flags, and the names of recipes on a command line.

`FILE.py:function` and `module:function` name any function that returns an `Algorithm`; a bare name such as `dr_grpo` is
one of funrl's recipes. A recipe's module imports torch, so where possible this module reads its source text instead of
running it.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import funrl
from funrl.loading import LoadError, load_function, locate, parts_by_source
from funrl.trainer.settings.declaration import Bound, Flag, SettingsError, above, at_least, at_most, one_of, value_type
from funrl.trainer.settings.settings import settings_flags

RECIPES = "funrl.algos.recipes"  # the package with one file per recipe, each with a function of the file's name


class Arguments(NamedTuple):
    """Arguments of a recipe.

    Attributes:
      flags: arguments that a command line can give, by name.
      unsayable: annotations of all others, such as functions, which keep their defaults.
    """

    flags: Mapping[str, Flag]
    unsayable: Mapping[str, str]


def arguments_of(recipe: Callable[..., Any], source: str) -> Arguments:
    """The arguments of a recipe. One with the name of a flag of `Settings` is that flag, whatever its annotation.

    Args:
      recipe: its annotations give the types, its docstring's Args the help.
      source: its name, for error messages.

    Raises:
      SettingsError: an argument has no default.
    """
    hints = typing.get_type_hints(recipe)
    texts = argument_texts(inspect.getdoc(recipe) or "")
    flags: dict[str, Flag] = {}
    unsayable: dict[str, str] = {}
    for name, parameter in inspect.signature(recipe).parameters.items():
        if name in settings_flags():
            flags[name] = settings_flags()[name]
            continue
        default = parameter.default
        if default is inspect.Parameter.empty:
            raise SettingsError(f"{source}: its argument {name!r} needs a default, which becomes the flag's")
        try:
            kind = value_type(hints.get(name, type(default)))
        except TypeError:
            unsayable[name] = inspect.formatannotation(parameter.annotation).removeprefix("'").removesuffix("'")
            continue
        bounds = (one_of(*kind.choices),) if kind.choices else bounds_of(name) if kind.type is float else ()
        flags[name] = Flag(
            name, default, kind.type, kind.optional or default is None, texts.get(name, ""), bounds=bounds
        )
    return Arguments(flags, unsayable)


def bounds_of(name: str) -> tuple[Bound, ...]:
    """Bounds of a numeric argument of a recipe, by its name, which means the same in all recipes.

    A negative coefficient would reward what it should penalise. The entropy coefficient is a bonus and may be negative.
    """
    if name in ("gamma", "gae_lambda"):
        return (at_least(0), at_most(1))
    if name.endswith("_target"):
        return (above(0),)
    penalty = name.endswith("_coef") and name != "entropy_coef"
    return (at_least(0),) if penalty or name in ("clip_low", "clip_high") else ()


def argument_texts(doc: str) -> dict[str, str]:
    """The text of each argument in the Args section of a docstring, as `inspect.getdoc` gives it.

    An item is `name: text` or `name, name: text`; lines with more indentation continue it. The section ends with the
    next line that is not indented.

    >>> argument_texts("One line.\\n\\nArgs:\\n  low, high: how far\\n    it goes.\\n  seed: of it.\\nReturns: x.")
    {'low': 'how far it goes', 'high': 'how far it goes', 'seed': 'of it'}
    """
    lines = doc.splitlines()
    title = next((number for number, line in enumerate(lines) if line.rstrip() == "Args:"), len(lines))
    items: list[tuple[list[str], list[str]]] = []
    first = None
    for line in lines[title + 1 :]:
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            break
        first = indent if first is None else first
        item = re.fullmatch(r"(\w+(?:, \w+)*): *(.*)", line.strip()) if indent == first else None
        if item:
            items.append((item[1].split(", "), [item[2]]))
        elif items:
            items[-1][1].append(line.strip())
    return {name: " ".join(text).strip().removesuffix(".") for names, text in items for name in names}


def recipes_by_source(text: str) -> dict[str, str]:
    """Source of prompts -> its recipe, of a text such as "grpo@math,FILE.py:f@chat"; empty for one recipe.

    Raises:
      LoadError: a part has no source, or two have the same.
    """
    return parts_by_source("algorithm", text, "RECIPE")


def find_recipe(text: str) -> Callable[..., Any]:
    """The recipe that "dr_grpo", "module:function", "FILE.py:function" or several with sources name.

    Raises:
      LoadError: there is no such function.
    """
    parts = recipes_by_source(text)
    if not parts:
        return load_function("algorithm", full_source(text))
    recipes = {source: find_recipe(recipe) for source, recipe in parts.items()}

    def mixed() -> Any:
        """An algorithm for each source of prompts."""
        from funrl.algos import by_source

        return by_source({source: recipe() for source, recipe in recipes.items()})

    return mixed


def check_recipe_names(text: str) -> None:
    """Check that the files and modules of recipes are there, and name their functions. Raises: LoadError."""
    for recipe in recipes_by_source(text).values() or (text,):
        locate("algorithm", full_source(recipe))


def full_source(text: str) -> str:
    """The "module:function" of a bare recipe name such as "dr_grpo"; any other text is returned unchanged.

    Raises:
      LoadError: there is no recipe of that name.
    """
    if parts := recipes_by_source(text):
        return ",".join(f"{full_source(recipe)}@{source}" for source, recipe in parts.items())
    if not re.fullmatch(r"\w+", text):
        return text
    if text not in recipe_names():
        near = difflib.get_close_matches(text, recipe_names(), 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise LoadError(
            f"--algorithm={text}: no recipe has this name; {hint}`funrl --help` lists them, or write FILE.py:function"
        )
    return f"{RECIPES}.{text}:{text}"


def recipe_name(source: str) -> str:
    """The name of a recipe, wherever its file is: a bare name, FILE.py:function, or the source unchanged."""
    if parts := recipes_by_source(source):
        return ",".join(f"{recipe_name(recipe)}@{name}" for name, recipe in parts.items())
    name, _, function = source.rpartition(":")
    if name == f"{RECIPES}.{function}":
        return function
    return f"{Path(name).name}:{function}" if name.endswith(".py") else source


@functools.cache
def recipe_names() -> tuple[str, ...]:
    """Names of the recipes of funrl, in alphabetical order."""
    folder = Path(funrl.__file__).parent.joinpath(*RECIPES.split(".")[1:])
    return tuple(sorted(file.stem for file in folder.glob("*.py") if _function(_parsed(file), file.stem)))


def names_of_arguments(source: str) -> frozenset[str] | None:
    """Names of the arguments of "FILE.py:function" or "module:function"; None if its text does not give them."""
    if recipes_by_source(source):
        return frozenset()
    name, _, function = source.rpartition(":")
    definition = _function(_parsed(_file(name)), function)
    if definition is None or definition.args.kwarg or definition.decorator_list:
        return None
    return frozenset(argument.arg for argument in definition.args.args + definition.args.kwonlyargs)


def recipes_with(name: str) -> tuple[str, ...]:
    """Names of the recipes that have an argument of this name."""
    return tuple(recipe for recipe in recipe_names() if name in (names_of_arguments(full_source(recipe)) or ()))


def docstring(source: str) -> str:
    """The docstring of a "module:function", or of a module as "module:"; "" if there is none."""
    name, _, function = source.rpartition(":")
    tree = _parsed(_file(name))
    node = _function(tree, function) if function else tree
    return (ast.get_docstring(node) if node else "") or ""


def first_line(source: str) -> str:
    """The first line of a `docstring`."""
    return docstring(source).partition("\n")[0]


def _file(name: str) -> Path | None:
    """The file of FILE.py or of a module."""
    if name.endswith(".py"):
        return Path(name)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _parsed(file: Path | None) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes()) if file else None
    except (OSError, SyntaxError, ValueError):
        return None


def _function(tree: ast.Module | None, name: str) -> ast.FunctionDef | None:
    return next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None) if tree else None
