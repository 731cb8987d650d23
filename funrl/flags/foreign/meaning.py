"""Rules for the meaning of another library's names; the tables of names consist of them.

A rule is a function of a value's text and its context. `first_of` joins rules into a decision table:

    first_of((recipe_is("sapo"), no_effect("sapo has a gate and no clip")), same("clip_low"))

A rule's text may contain `{text}`, the value, and `{recipe}`; a function of value and context may compute it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from typing import Any, NamedTuple

from funrl.flags.foreign.values import DifferentError, is_none, is_same, is_true
from funrl.mesh.text import ROW_AXES, SHORT, MeshError, devices, parse

# Recipes that do not sample.
TEXT_RECIPES = frozenset(
    {
        *("sft", "eaft", "asft", "dpo", "simpo", "cpo", "orpo", "alphapo", "tpo", "kto"),
        *("reward_model", "process_reward_model"),
    }
)


class Effect(Enum):
    """Effect of replacing their value by the flags of its meaning.

    SAME: the run is the same; NO_EFFECT: the same, since the value does not affect training; DIFFERENT: no flags give
      the same run.
    """

    SAME = "same"
    NO_EFFECT = "no effect"
    DIFFERENT = "different"


class Meaning(NamedTuple):
    """Meaning of a name of another library.

    Attributes:
      flags: names and texts of flags; empty if a run behaves so anyway; the nearest ones if it is different.
      difference: small differences, or how a number was computed; "" if there is nothing to say.
      effect: whether a run with these flags equals theirs.
    """

    flags: Mapping[str, str]
    difference: str = ""
    effect: Effect = Effect.SAME


class NameContext(NamedTuple):
    """Everything that a meaning may depend on.

    Attributes:
      theirs: all given names, with their texts.
      ours: values of this library's flags.
      arguments: names of the recipe's arguments.
      recipe: name of the recipe.
      records: prompts, pairs or demonstrations of the training data; None: not known.
      complete: whether `theirs` is a complete configuration, with the other library's defaults.
    """

    theirs: Mapping[str, str]
    ours: Mapping[str, Any]
    arguments: frozenset[str]
    recipe: str
    records: int | None = None
    complete: bool = False

    def given(self, name: str) -> bool:
        """True if their name has a value other than none."""
        return not is_none(self.theirs.get(name, "none"))

    def is_on(self, name: str, default: str = "false") -> bool:
        """The value of their name as a bool. Raises: DifferentError."""
        return is_true(self.theirs[name] if self.given(name) else default)

    @property
    def texts(self) -> bool:
        """True if the run learns from given texts."""
        return self.recipe in TEXT_RECIPES

    @property
    def ranks(self) -> int:
        """Number of ranks with separate rows, on the mesh of the flags."""
        try:
            return devices(parse(str(self.ours["mesh"])), [SHORT[s] for s, axis in SHORT.items() if axis in ROW_AXES])
        except MeshError as error:
            raise DifferentError(str(error)) from error

    def number(self, name: str, default: str) -> Fraction:
        """The value of their name as a number. Raises: DifferentError."""
        text = self.theirs.get(name, default)
        try:
            return Fraction(text)
        except (ValueError, ZeroDivisionError):
            raise DifferentError(f"{name}={text}: a number is needed") from None


NameRule = Callable[[str, NameContext], Meaning]
Test = Callable[[str, NameContext], bool]
Template = str | Callable[[str, NameContext], str]


def meaning_of(rule: NameRule, text: str, context: NameContext) -> Meaning:
    """The meaning of a value; a value that cannot be parsed is DIFFERENT."""
    try:
        return rule(text, context)
    except DifferentError as error:
        return Meaning({}, str(error), Effect.DIFFERENT)


def text_of(template: Template, text: str, context: NameContext) -> str:
    """The text of a rule, with the value and the recipe filled in."""
    return template(text, context) if callable(template) else template.format(text=text, recipe=context.recipe)


def _rule(effect: Effect, difference: Template, flags: Mapping[str, Template]) -> NameRule:
    def rule(text: str, context: NameContext) -> Meaning:
        texts = {name: text_of(template, text, context) for name, template in flags.items()}
        return Meaning(texts, text_of(difference, text, context), effect)

    return rule


def becomes(difference: Template = "", /, **texts: Template) -> NameRule:
    """The same meaning by these flags; without flags, a run behaves so anyway."""
    return _rule(Effect.SAME, difference, texts)


def same(*ours: str, difference: str = "") -> NameRule:
    """The same value under other names."""
    return becomes(difference, **dict.fromkeys(ours, "{text}"))


def no_effect(reason: Template) -> NameRule:
    """The name has no effect on results.

    Args:
      reason: why, or what controls the same here.
    """
    return _rule(Effect.NO_EFFECT, reason, {})


def different(reason: Template, /, **nearest: Template) -> NameRule:
    """No flag has the meaning.

    Args:
      reason: the difference.
      nearest: flags that come closest to it.
    """
    return _rule(Effect.DIFFERENT, reason, nearest)


def first_of(*rules: Any) -> NameRule:
    """A decision table.

    Args:
      rules: tuples of tests and a rule, which applies if all tests hold, or a rule alone. The first that applies
        counts; if none does, a run behaves so anyway.
    """

    def rule(text: str, context: NameContext) -> Meaning:
        for case in rules:
            *tests, answer = case if isinstance(case, tuple) else (case,)
            if all(test(text, context) for test in tests):
                return answer(text, context)
        return Meaning({})

    return rule


def equal(*values: str) -> Test:
    """Test: the value is one of these numbers or words."""
    return lambda text, context: any(is_same(text, value) for value in values)


def among(*values: str) -> Test:
    """Test: the text is exactly one of these."""
    return lambda text, context: text in values


def negated(test: Test) -> Test:
    """Test: another test does not hold."""
    return lambda text, context: not test(text, context)


def is_unset(text: str, context: NameContext) -> bool:
    """Test: the value means none."""
    return is_none(text)


def is_on(text: str, context: NameContext) -> bool:
    """Test: the value is true. Raises: DifferentError."""
    return is_true(text)


def recipe_is(*recipes: str) -> Test:
    """Test: the run has one of these recipes."""
    return lambda text, context: context.recipe in recipes


def takes(argument: str) -> Test:
    """Test: the recipe has this argument."""
    return lambda text, context: argument in context.arguments


def turned_on(name: str, default: str = "false") -> Test:
    """Test: another name of theirs is on. Raises: DifferentError."""
    return lambda text, context: context.is_on(name, default)


def text_given(name: str, default: str) -> Callable[[str, NameContext], str]:
    """The text of another name of theirs."""
    return lambda text, context: context.theirs.get(name, default)


def argument(ours: str, reason: str) -> NameRule:
    """An argument of the recipe.

    Args:
      reason: why a recipe may lack it.
    """
    return first_of((takes(ours), same(ours)), different(f"{{recipe}} has no --{ours}: {reason}"))


def optional(rule: NameRule | str) -> NameRule:
    """A rule, or the name of a flag, for values other than none."""
    return first_of((negated(is_unset), same(rule) if isinstance(rule, str) else rule))


def switch(ours: str, yes: str, no: str) -> NameRule:
    """A flag with one text if theirs is on and another if it is off."""
    return first_of((is_on, becomes(**{ours: yes})), becomes(**{ours: no}))


def choice(ours: str, values: Mapping[str, str], reason: str, difference: str = "") -> NameRule:
    """A flag whose values have other names.

    Args:
      values: theirs to ours.
      reason: the message for any other value.
    """
    return first_of(
        (
            lambda text, context: text.lower() in values,
            becomes(difference, **{ours: lambda text, _: values[text.lower()]}),
        ),
        different(f"{{text}} is not one of {', '.join(values)}: {reason}"),
    )


def default_only(value: str, reason: str) -> NameRule:
    """One value is a run's normal behaviour; others have no equivalent."""
    return first_of((is_unset, becomes(reason)), (equal(value), becomes(reason)), different(reason))


def default_shown(value: str, reason: str) -> NameRule:
    """One value is a run's normal behaviour; others would only write or show something else."""
    return first_of((is_unset, becomes(reason)), (equal(value), becomes(reason)), no_effect(reason))


def in_file(rule: NameRule, beside_flags: NameRule) -> NameRule:
    """A name with one rule in a complete configuration and another one next to flags."""
    return first_of((lambda text, context: context.complete, rule), beside_flags)
