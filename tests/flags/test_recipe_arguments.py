"""A recipe's arguments as flags, and recipes by name."""

import inspect
from typing import Literal

import pytest

from funrl.flags.arguments import (
    RECIPES,
    argument_texts,
    arguments_of,
    docstring,
    find_recipe,
    first_line,
    full_source,
    names_of_arguments,
    recipe_names,
)
from funrl.loading import LoadError
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_flags

RECIPE = '''"""A file of recipes."""
import functools
import math


def recipe(
    clip_low: float = 0.2,
    clip_high: float = 0.3,
    kind: str | None = None,
    *,
    steps: int = 3,
):
    """A recipe of my own.

    More of it: an indented
      Args:
    that is none.

    Args:
      clip_low, clip_high: how far the ratio may fall
        below and rise above 1: both.
      kind: of what; see
          note: deeper lines go on.

      steps:
        how many.
    Returns: an algorithm.
      seed: is no argument.
    """


@functools.cache
def cached(clip: float = 0.2):
    pass


def open_ended(**rest):
    pass
'''


def test_argument_texts():
    doc = inspect.cleandoc("""One line.

    Args:
      low, high: how far
        it goes: there.

      seed: of it.
      rest:
        on the next line
    Returns: a number.
      other: is not one.
    """)
    far = "how far it goes: there"
    assert argument_texts(doc) == {"low": far, "high": far, "seed": "of it", "rest": "on the next line"}
    assert argument_texts("Args:\n  one: of one.") == {"one": "of one"}
    assert argument_texts("No section.") == argument_texts("") == argument_texts("Args:") == {}
    with_more = "One.\n\nArgs:\n  a, b: text\nNeeds: c.\nRaises:\n  ValueError: never."
    assert argument_texts(with_more) == {"a": "text", "b": "text"}


def typed(
    clip: float = 0.2,
    kind: Literal["k1", "k3"] = "k3",
    limit: int | None = None,
    whole: bool = False,
    ratio: object = len,
    bare=3,
):
    """Of types.

    Args:
      clip: how far.
      kind: of estimate.
    """


def test_arguments_have_the_types_of_their_annotations():
    flags, unsayable = arguments_of(typed, "here")
    assert {name: (flag.type, flag.optional, flag.default) for name, flag in flags.items()} == {
        "clip": (float, False, 0.2),
        "kind": (str, False, "k3"),
        "limit": (int, True, None),
        "whole": (bool, False, False),
        "bare": (int, False, 3),
    }
    assert flags["clip"].text == "how far" and flags["limit"].text == ""
    assert flags["kind"].parse("k1") == "k1"
    with pytest.raises(ValueError, match="it must be one of k1, k3"):
        flags["kind"].parse("k2")
    assert unsayable == {"ratio": "object"}


def test_an_argument_with_the_name_of_a_common_flag_is_that_flag():
    def recipe(reward_weights: str | list[float], clip: float = 0.2):
        pass

    flags, unsayable = arguments_of(recipe, "here")
    assert flags["reward_weights"] is settings_flags()["reward_weights"]
    assert set(flags) == {"reward_weights", "clip"} and not unsayable


def test_an_argument_without_a_default_is_refused():
    def recipe(clip: float):
        pass

    with pytest.raises(SettingsError, match=r"own\.py:recipe: its argument 'clip' needs a default"):
        arguments_of(recipe, "own.py:recipe")


def test_what_the_text_of_a_file_tells_is_what_running_it_gives(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(RECIPE)
    recipe = find_recipe(f"{file}:recipe")
    assert names_of_arguments(f"{file}:recipe") == set(inspect.signature(recipe).parameters)
    assert docstring(f"{file}:recipe") == inspect.getdoc(recipe)
    assert first_line(f"{file}:recipe") == "A recipe of my own."
    assert first_line(f"{file}:") == "A file of recipes."
    texts = argument_texts(inspect.getdoc(recipe))
    assert set(texts) == {"clip_low", "clip_high", "kind", "steps"}
    assert texts["clip_low"] == "how far the ratio may fall below and rise above 1: both"
    assert texts["kind"] == "of what; see note: deeper lines go on"
    for unknowable in ("cached", "open_ended", "nothing"):
        assert names_of_arguments(f"{file}:{unknowable}") is None
    (tmp_path / "broken.py").write_text("def recipe(:\n")
    for source in (f"{tmp_path}/broken.py:recipe", f"{tmp_path}/not.py:recipe", "no_such_module:f", "math:sin"):
        assert names_of_arguments(source) is None and first_line(source) == ""


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_funrl_has_flags_with_texts(name):
    recipe, source = find_recipe(name), full_source(name)
    arguments = arguments_of(recipe, source)
    assert names_of_arguments(source) == {*arguments.flags, *arguments.unsayable}
    assert all(flag.text for flag in arguments.flags.values())
    assert first_line(source).endswith(".")


def test_names_of_recipes():
    assert {"ppo", "grpo", "dr_grpo", "sft", "dpo", "reward_model"} <= set(recipe_names())
    assert full_source("dr_grpo") == f"{RECIPES}.dr_grpo:dr_grpo"
    assert full_source("own.py:recipe") == "own.py:recipe" and full_source("a.b:c") == "a.b:c"
    with pytest.raises(LoadError, match=r"--algorithm=dr_grop: no recipe has this name; did you mean dr_grpo\?"):
        full_source("dr_grop")
    with pytest.raises(LoadError, match=r"--algorithm=xyz: no recipe has this name; `funrl --help` lists them"):
        full_source("xyz")
