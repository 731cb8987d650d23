"""Declarations of flags: type, default, text and bounds; validation, help and tables derive from them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypedDict, Unpack

from funrl.role_kinds import ROLES
from funrl.rollout.engine_abilities import engines_that
from funrl.trainer.settings.successors import successor_of_value

# kinds of runs
RL = ("rl",)
SUPERVISED = ("supervised",)
RUN_KINDS = RL + SUPERVISED
START_FLAGS = ("run_dir", "resume", "overwrite")  # of where and how a run starts; the last is of earlier versions
RECORD_TOKENS = (
    "tokens of the records"  # name of the digest of the first examples' tokens, next to those of a run's files
)
HELD_OUT_SET = "held-out set"  # name of the digest of held-out examples, next to those of a run's files
GIVEN_EXAMPLES = ("labelled", "steps")  # examples that no policy can sample
NONE = "none"  # text that means None, for optional flags
PARTS_NEEDED = {  # parts of a run without which some flags do nothing; {mesh} stands for --mesh with its value
    **{name: kind.messages.missing for name, kind in ROLES.items() if kind.messages.missing},
    "teacher_topk": "an algorithm that reads probable tokens of the teacher, as distillation --kind=forward does",
    "advantage": "an algorithm that turns rewards into advantages, as grpo does",
    "filter": "a filter of rows, which dapo has",
    "data": "--prompts or --data",
    "env": "--env=FILE.py:NAME",
    "environment": "an environment (--env=FILE.py:NAME)",
    "reward": "a reward function (--reward)",
    "reward_worker": "workers that run --reward (--reward_workers=1)",
    "step_scores": "--process_reward_model=DIR, or labelled steps to learn from",
    "demonstrations": "the embedded task, which alone has demonstrations",
    "chat_template": "a chat template (--chat_template=FILE.jinja gives one)",
    "tool_texts": "a chat template that shows tools (--chat_template=FILE.jinja gives one)",
    "pictures": "a model that sees pictures",
    "picture_rows": "prompts or demonstrations, which may have pictures",
    "unnamed_tokens": "tokens that only the tokenizer has",
    "generator_ranks": "ranks that only generate (--place), or --dry_run to simulate them",
    "experts": "a model with experts",
    "expert_biases": "a model that chooses experts by biases (--router_aux_coef balances others)",
    "checkpoints": "checkpoints ({save_every})",
    "sampled_evaluation": "evaluation by samples (--eval_temperature above 0)",
    "sp": "sp ({mesh})",
    "tp": "tp ({mesh})",
    "shards": "several devices to shard over ({mesh}) by --fsdp_axes",
    "trained_shards": "a model that learns ({fsdp_models})",
    "own_steps": f"--engine={engines_that('own_steps')}",
    "float8": f"--engine={engines_that('float8')}",
    "servers": f"--engine={engines_that('servers')}",
}
WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def kinds_of(algorithm: Any) -> tuple[str, ...]:
    """The kinds of runs that an algorithm can make, the default first.

    With an advantage or a filter the policy samples rows; without them, or with labelled texts, rows are given texts. A
    divergence from a teacher over the whole vocabulary works with both.
    """
    if getattr(algorithm, "example", "row") in GIVEN_EXAMPLES:
        return SUPERVISED
    if getattr(algorithm, "example", "row") == "demonstrated":
        return RL
    if getattr(algorithm, "advantage", None) is not None or getattr(algorithm, "filter", None) is not None:
        return RL
    divergence = getattr(algorithm, "divergence", None)
    return RUN_KINDS if divergence is not None and algorithm.role_kinds[divergence.role].flag else SUPERVISED


def run_kind(algorithm: object, data: str | None) -> str:
    """The kind of a run; `data` is the flag that names texts."""
    kinds = kinds_of(algorithm)
    return "supervised" if data is not None and "supervised" in kinds else kinds[0]


class SettingsError(ValueError):
    """A flag has a value that cannot work; the message names the flag, its value and a valid choice."""


@contextlib.contextmanager
def blaming(flag: str) -> Iterator[None]:
    """Prefix an error message with the flag that caused it."""
    with refusing(f"--{flag}: "):
        yield


@contextlib.contextmanager
def refusing(prefix: str = "", *kinds: type[Exception], ending: str = "") -> Iterator[None]:
    """Refuse a setting by the message of an error, with a prefix and an ending.

    Args:
      prefix, ending: of the message; they name the setting and the way out.
      *kinds: types of errors, by default `ValueError` alone.
    """
    refused = kinds or (ValueError,)
    try:
        yield
    except refused as error:
        raise SettingsError(f"{prefix}{error}{ending}") from error


class Bound(NamedTuple):
    """A condition on one value.

    Attributes:
      text: continues "it must be ...".
      holds: whether a value fulfils it.
    """

    text: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Bound:
    """Bound: a number must be at least `low`."""
    return Bound(f"at least {low}", lambda x: x >= low)


def at_most(high: float) -> Bound:
    """Bound: a number must be at most `high`."""
    return Bound(f"at most {high}", lambda x: x <= high)


def above(low: float) -> Bound:
    """Bound: a number must be above `low`."""
    return Bound(f"above {low}", lambda x: x > low)


def below(high: float, text: str = "") -> Bound:
    """Bound: a number must be below `high`, shown as `text` if given."""
    return Bound(f"below {text or high}", lambda x: x < high)


def one_of(*choices: str) -> Bound:
    """Bound: a text must be one of some choices."""
    return Bound(f"one of {', '.join(choices)}", lambda x: x in choices)


def some_of(*choices: str) -> Bound:
    """Bound: a comma-separated list of one or more distinct choices."""
    return Bound(f"some of {','.join(choices)}", lambda x: are_distinct(parts(x)) and set(parts(x)) <= set(choices))


def names_like(*examples: str) -> Bound:
    """Bound: a comma-separated list of distinct names such as the examples."""
    text = f"names such as {','.join(examples)}"
    return Bound(text, lambda x: are_distinct(parts(x)) and all(map(str.isidentifier, parts(x))))


def are_distinct(names: tuple[str, ...]) -> bool:
    """True of one or more names that all differ."""
    return 0 < len(set(names)) == len(names)


class Flag(NamedTuple):
    """One flag.

    Attributes:
      name, default: name and default value; a default of None means that the run chooses.
      type: bool, int, float or str.
      optional: whether None is a valid value.
      text: meaning, for the help.
      chosen: what the run chooses if the default is None; "" if `text` says it.
      group: the record of `Settings` that holds it, or "algorithm" for an argument of a recipe.
      bounds: conditions on its value; all must hold.
      kinds: kinds of runs that the flag applies to.
      without: its value in the other kinds of runs.
      requires: name of the flag without which this one does nothing.
      unless: flags that this one cannot be given with, each with the reason; "": it does nothing beside them.
      needs: keys of `PARTS_NEEDED`; it does nothing if the run lacks one of these parts.
      keeps_none: "none" is one of its texts, and does not mean None.
    """

    name: str
    default: Any
    type: type
    optional: bool
    text: str
    chosen: str = ""
    group: str = "algorithm"
    bounds: tuple[Bound, ...] = ()
    kinds: tuple[str, ...] = RUN_KINDS
    without: object = None
    requires: str = ""
    unless: Mapping[str, str] = types.MappingProxyType({})
    needs: tuple[str, ...] = ()
    keeps_none: bool = False

    def parse(self, text: str) -> Any:
        """Parse the text of a command line; "none" means None.

        Raises:
          ValueError: the value has the wrong type or violates a bound; the message is that of `problem`.
        """
        value: object = text
        if text == "":
            none = f", or write --{self.name}={NONE}" if self.optional else ""
            raise ValueError(f"{WANTED[self.type]} is needed; leave --{self.name} out for its default{none}")
        if text == NONE and self.optional and not self.keeps_none:
            value = None
        elif self.type is bool:
            value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
        elif self.type in (int, float):
            try:
                value = self.type(text)
            except ValueError:
                value = text
        if problem := self.problem(value):
            raise ValueError(problem)
        return value

    def problem(self, value: object) -> str:
        """Reason to refuse a value of this flag, such as "it must be at least 1"; "" if it is valid."""
        if value is None:
            return "" if self.optional else f"{WANTED[self.type]} is needed"
        good = (int, float) if self.type is float else self.type
        if not isinstance(value, good) or (isinstance(value, bool) and self.type is not bool):
            return f"{WANTED[self.type]} is needed"
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number is needed"
        if successor := successor_of_value(self.name, str(value)):
            return f"not a value any more; {successor}"
        if all(bound.holds(value) for bound in self.bounds):
            return ""
        return "it must be " + " and ".join(bound.text for bound in self.bounds)

    def check(self, value: object, written: str) -> None:
        """Check a value; `written` shows it in the message. Raises: SettingsError, naming the reason."""
        if problem := self.problem(value):
            raise SettingsError(f"{written}: {problem}")

    def help(self) -> str:
        """Meaning, bounds and the run's choice, in one line."""
        sentences = [self.text, *(bound.text for bound in self.bounds)]
        return "; ".join(sentences + ([f"default: {self.chosen}"] if self.chosen else []))

    def conditions(self) -> list[str]:
        """Flags and parts of a run that it needs, and flags that it does not go with."""
        needed = [re.sub(r"{(\w+)}", r"--\1", PARTS_NEEDED[need]) for need in self.needs]
        planned = " or funrl plan" if self.requires == "dry_run" and self.name != "json" else ""
        needed += [f"--{self.requires}{planned}"] if self.requires else []
        return [*(f"needs {text}" for text in needed), *(f"not with --{other}" for other in self.unless)]


class FlagOptions(TypedDict, total=False):
    """Attributes of a `Flag` that a field of `Settings` may set; defaults are those of `Flag`.

    `SHARED` of a record has those of all its fields, which a field may set otherwise.
    """

    chosen: str
    kinds: tuple[str, ...]
    without: object
    requires: str
    unless: Mapping[str, str]
    needs: tuple[str, ...]
    keeps_none: bool


def flag(default: object, text: str, *bounds: Bound, **options: Unpack[FlagOptions]) -> Any:
    """Declare a field of `Settings`.

    Args:
      default, text: as in `Flag`.
      *bounds: conditions on its value.
      **options: further attributes of `Flag`; `without` is by default the flag's default.
    """
    return dataclasses.field(default=default, metadata={"without": default, **options, "text": text, "bounds": bounds})


class ValueType(NamedTuple):
    """Values that an annotation allows.

    Attributes:
      type: bool, int, float or str.
      optional: whether None is a valid value.
      choices: choices of a `Literal`, all of one type; () if any value of the type is allowed.
    """

    type: type
    optional: bool
    choices: tuple[Any, ...] = ()


def value_type(hint: object) -> ValueType:
    """The values that an annotation such as `int`, `float | None` or `Literal["k1", "k3"]` allows.

    Raises:
      TypeError: a flag cannot have values of this type.
    """
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    rest = [option for option in options if option is not type(None)]
    kind: Any = rest[0] if len(rest) == 1 else None
    choices: tuple[Any, ...] = ()
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        kind = type(choices[0]) if len({type(choice) for choice in choices}) == 1 else None
    if kind not in WANTED:
        raise TypeError(f"a flag must be a bool, an int, a float or a str, not {hint}")
    return ValueType(kind, len(rest) < len(options), choices)


def parts(text: str | None) -> tuple[str, ...]:
    """The items of a comma-separated list; none for None or ""."""
    return tuple(part.strip() for part in text.split(",")) if text else ()
