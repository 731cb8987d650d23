"""Names of TRL and verl given instead of this library's flags: the error gives our flag with its value.

One error answers all names of a command line, or of a call of `funrl.train`.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from funrl.flags.arguments import recipes_with
from funrl.flags.foreign.meaning import Meaning, NameContext
from funrl.flags.foreign.trl import TRL
from funrl.flags.foreign.verl import VERL
from funrl.trainer.settings.declaration import Flag, SettingsError
from funrl.trainer.settings.successors import REMOVED_FLAGS

DOTTED = re.compile(r"-{0,2}[+~]*((?:\w+\.)+\w+)=(.*)", re.DOTALL)
TOO_GENERAL = ("path", "name", "type", "n", "lr")  # last parts of verl's names that are ambiguous alone
REFUSED_VALUES = "its value is none of ours"
MOST_RECIPES = 4  # limit of recipes named in a message


class NameAnswer(NamedTuple):
    """The answer to a name of another library.

    Attributes:
      name: their name.
      value: text of its value.
      library: library that has the name; "" if none has.
      meaning: its meaning here.
    """

    name: str
    value: str
    library: str
    meaning: Meaning

    @property
    def flags(self) -> dict[str, str]:
        """Flags to write instead, texts by name; `experiment` is a recipe."""
        return {} if self.meaning.differs else dict(self.meaning.flags)


def flag_in(text: str) -> str:
    """The name in --name=value, "" in a value."""
    return text[2:].split("=", 1)[0] if text.startswith("--") else ""


def names_given(words: Sequence[str]) -> dict[str, str]:
    """Names and values in the words of a command line; names with dots need no dashes.

    >>> names_given(["--beta=0.1", "--bf16", "--epsilon", "0.2", "data.seed=3"])
    {'beta': '0.1', 'bf16': 'true', 'epsilon': '0.2', 'data.seed': '3'}
    """
    given: dict[str, str] = {}
    before = ""
    for word in words:
        name, has_value, value = word.removeprefix("--").partition("=")
        if dotted := DOTTED.fullmatch(word):
            given[dotted[1]] = dotted[2]
            before = ""
        elif word.startswith("--"):
            given[name] = value if has_value else "true"
            before = "" if has_value else name
        elif before:
            given[before] = word
            before = ""
    return given


def check_names(
    given: Mapping[str, str], known: Mapping[str, Flag | None], context: NameContext, python: bool = False
) -> None:
    """Refuse names of other libraries, suggesting ours, and misspelt names.

    Args:
      given: names and texts of their values, which may include flags.
      known: all flags.
      context: what a meaning may depend on; `theirs` is ignored.
      python: whether the names are keywords of a function; then every unknown name is refused.

    Raises:
      SettingsError: there is such a name.
    """
    negated = () if python else tuple(f"no{name}" for name in known)
    unknown = {name: text for name, text in given.items() if name not in known and name not in negated}
    for name in unknown:
        if removed := REMOVED_FLAGS.get(name) or REMOVED_FLAGS.get(name.removeprefix("no")):
            dashes = "" if python else "--"
            raise SettingsError(f"{dashes}{name} is not a flag any more; {removed.successor}")
    answers = [answer for answer in answers_to(unknown, context, known) if _is_of_use(answer, known)]
    if answers:
        lines = [_line(answer, known, python) for answer in answers]
        if len(answers) > 1 and not any(answer.meaning.differs for answer in answers):
            together = {name: text for answer in answers for name, text in answer.flags.items()}
            lines += [f"together: {_written(together, known, python)}"] if together else []
        raise SettingsError("\n".join(lines))
    for name, text in unknown.items():
        hint = _hint(name, text, known, context, python)
        if python or hint:
            program = context.recipe if context.recipe.isidentifier() else "rl"
            problem = f"{name}={text}: there is no such setting" if python else f"--{name} is not a flag"
            raise SettingsError(problem + (hint or f"; `funrl {program} --help` lists all"))


def answers_to(
    unknown: Mapping[str, str], context: NameContext, known: Mapping[str, Flag | None]
) -> Iterator[NameAnswer]:
    """Answers to the names of other libraries."""
    ours = context.ours
    sizes = {"num_generations": str(ours["samples_per_prompt"]), "num_iterations": str(ours["epochs"])}
    of_trl = context._replace(theirs=sizes | dict(unknown))
    given = {full: text for name, text in unknown.items() if (full := _name_of_verl(name))}
    of_verl = context._replace(theirs={"data.train_batch_size": str(ours["batch_prompts"])} | given)
    for name, text in unknown.items():
        if name in TRL.rows:
            yield NameAnswer(name, text, "TRL", _accepted(TRL.meaning(name, text, of_trl), known))
        elif full := _name_of_verl(name):
            yield NameAnswer(name, text, "verl", _accepted(VERL.meaning(full, text, of_verl), known))
        elif "." in name:
            reason = "flags have no dots; `funrl import FILE` reads a configuration of verl"
            yield NameAnswer(name, text, "", Meaning({}, reason, differs=True))


def _accepted(meaning: Meaning, known: Mapping[str, Flag | None]) -> Meaning:
    """The meaning, without flags if one of them does not take its text."""
    for name, text in meaning.flags.items():
        flag = known.get(name)
        try:
            if flag is not None:
                flag.parse(text)
        except ValueError as error:
            return Meaning({}, f"{REFUSED_VALUES}: --{name}={text}: {error}", differs=True)
    return meaning


def _name_of_verl(name: str) -> str:
    """verl's full name for a name or its last part; "" if there is none, or a recipe has an argument of this name."""
    if name in VERL.rows or "." in name:
        return name if name in VERL.rows else ""
    full = next((full for full in VERL.rows if full.rpartition(".")[2] == name and name not in TOO_GENERAL), "")
    return "" if full and recipes_with(name) else full


def _is_of_use(answer: NameAnswer, known: Mapping[str, Flag | None]) -> bool:
    """True if an answer names known flags. Commands other than runs answer only with their own flags."""
    flags = set(answer.flags) - {"experiment"}
    return flags <= set(known) and ("steps" in known or bool(flags) or not answer.library)


def _line(answer: NameAnswer, known: Mapping[str, Flag | None], python: bool) -> str:
    """An answer as a line."""
    given = f"{answer.name}={answer.value}"
    shown = answer.name if python else given if "." in answer.name else f"--{given}"
    whose = f" is {answer.library}'s name" if answer.library else ""
    reason = answer.meaning.reason
    if answer.flags:
        text = f"write {_written(answer.flags, known, python)}{f' ({reason})' if reason else ''}"
    elif answer.meaning.differs or "leave it out" in reason:
        text = reason
    else:
        text = f"leave it out{f' ({reason})' if reason else ''}"
    return f"{shown}{whose}: {re.sub(r'--(?=[a-z])', '', text) if python else text}"


def _written(flags: Mapping[str, str], known: Mapping[str, Flag | None], python: bool) -> str:
    """Flags as written on a command line or in a Python call, after the recipe."""
    recipe = flags.get("experiment")
    own = {name: text for name, text in flags.items() if name != "experiment"}
    if python:
        parsed = {name: flag.parse(text) if (flag := known[name]) is not None else text for name, text in own.items()}
        parts = [f"the recipe {recipe!r}"] * bool(recipe) + [f"{name}={value!r}" for name, value in parsed.items()]
        return ", ".join(parts)
    return " ".join(
        [f"`funrl {recipe}`"] * bool(recipe) + [f"--{name}={shlex.quote(text)}" for name, text in own.items()]
    )


def _hint(name: str, text: str, known: Mapping[str, Flag | None], context: NameContext, python: bool) -> str:
    """A hint at the flag meant by an unknown name, after "; "; "" if none is near."""
    dashes = "" if python else "--"
    if name.lower() in known:
        return f"; did you mean {dashes}{name.lower()}?"
    if "steps" in known and (recipes := recipes_with(name)):
        more = ", ..." * (len(recipes) > MOST_RECIPES)
        return f"; it is an argument of {', '.join(recipes[:MOST_RECIPES])}{more}, and {context.recipe} has none"
    near = difflib.get_close_matches(name.lower(), [*known, *TRL.rows] if "steps" in known else list(known), 1)
    if not near or near[0] in known:
        return f"; did you mean {near[0]}?" if near and python else ""  # a command line has `flags.refuse_unknown`
    (answer,) = answers_to({near[0]: text}, context, known)
    if answer.meaning.reason.startswith(REFUSED_VALUES):
        return ""
    ours = f" Here it is {_written(answer.flags, known, python)}" if answer.flags else ""
    return f"; did you mean TRL's {near[0]}?{ours}"
