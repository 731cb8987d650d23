"""Prompts of files as a run takes them: their format, what is held out, and those that are too long."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from funrl.data.columns import Fields
from funrl.data.json_lines import DataError
from funrl.data.mixture import Mixture, WeightedFile, shares_of
from funrl.data.pair_halves import PairHalves
from funrl.data.prompt_format import (
    OWN,
    PLAIN_PROMPTS,
    SEPARATOR,
    PromptFormat,
    encoded,
    formatted,
    read_shots,
    read_tools,
    template_arguments,
    text_of_flag,
)
from funrl.data.prompts import Prompt, check_prompts, load_prompts
from funrl.data.supervised import TextExample, TextFile
from funrl.data.text_lengths import MOST_SOURCES, named_lines
from funrl.data.tokenizer import TokenizerError
from funrl.trainer.declaration import SettingsError
from funrl.trainer.generation import Example
from funrl.trainer.settings import Settings

SPLIT = 0x5917  # sets the numbers that hold prompts out apart from those that shuffle


class Fitting(NamedTuple):
    """Prompts that are short enough, and a remark on the others; "" where there are none."""

    prompts: Sequence[Example]
    remark: str


def format_of(settings: Settings, fields: Fields) -> PromptFormat:
    """The format of all prompts that the flags give.

    Raises:
      SettingsError: naming the flag.
    """

    def read(name: str, parse: Any, otherwise: Any) -> Any:
        value = getattr(settings, name)
        try:
            return otherwise if value is None else parse(value)
        except DataError as error:
            raise SettingsError(f"--{name}: {error}") from error

    chat = (settings.system_prompt, settings.chat_template, settings.tools, settings.template_arguments)
    return PromptFormat(
        chat=any(x is not None for x in chat),
        system=read("system_prompt", text_of_flag, None),
        text=read("prompt_template", text_of_flag, PLAIN_PROMPTS.text),
        shots=read("few_shot", lambda text: read_shots(text, fields), ()),
        tools=read("tools", read_tools, ()),
        arguments=read("template_arguments", template_arguments, {}),
        step_separator=step_separator(settings, embedded=False),
    )


def step_separator(settings: Settings, embedded: bool) -> str:
    r"""The text between two steps: that of the flag, in which \n is a line end; of the embedded task there is none."""
    if settings.step_separator is not None:
        return settings.step_separator.replace("\\n", "\n").replace("\\t", "\t")
    return "" if embedded else SEPARATOR


def with_chat_template(tokenizer: Any, settings: Settings) -> Any:
    """The tokenizer with the chat template of a flag, which is saved with the model.

    Raises:
      SettingsError: the file cannot be read, or there is no template where one is needed.
    """
    given = settings.chat_template
    if given is not None and given != OWN:
        tokenizer = copy.copy(tokenizer)
        try:
            tokenizer.chat_template = text_of_flag(given)
        except DataError as error:
            raise SettingsError(f"--chat_template: {error}") from error
    if given == OWN and tokenizer.chat_template is None:
        raise SettingsError("--chat_template=own: the model's tokenizer has none; give a FILE.jinja")
    return tokenizer


def read_prompts(
    files: Sequence[WeightedFile], flag: str, fields: Fields, form: PromptFormat, tokenizer: Any
) -> Sequence[Example]:
    """The prompts of all files as token ids; a mixture where files have weights.

    Args:
      flag: that names the files.

    Raises:
      SettingsError: naming the flag, the file, and the line or row.
    """
    try:
        loaded = [_examples(load_prompts(one.path, fields), form, tokenizer) for one in files]
    except ValueError as error:
        raise SettingsError(f"--{flag}: {error}") from error
    weights = [one.weight for one in files if one.weight is not None]
    return Mixture(loaded, shares_of(weights)) if weights else [example for part in loaded for example in part]


def given_prompts(records: Sequence[Any], fields: Fields, form: PromptFormat, tokenizer: Any) -> list[Example]:
    """Prompts of records in memory as token ids. Raises: SettingsError."""
    try:
        return _examples(check_prompts(records, fields), form, tokenizer)
    except ValueError as error:
        raise SettingsError(f"--prompts: {error}") from error


def _examples(prompts: Sequence[Prompt], form: PromptFormat, tokenizer: Any) -> list[Example]:
    """Prompts as token ids, but for those that are among the solved examples."""
    shown = [shot.prompt for shot in form.shots]
    found = [to_example(one, tokenizer, form) for one in prompts if one.prompt not in shown]
    if not found:
        raise DataError(f"{prompts[0].source}: all of its prompts are examples of --few_shot; give another file")
    return found


def to_example(prompt: Prompt, tokenizer: Any, form: PromptFormat = PLAIN_PROMPTS) -> Example:
    """A prompt as token ids, in its format. Raises: SettingsError."""
    where = f"{prompt.source}: " if prompt.source else ""
    try:
        tokens, text = encoded(tokenizer, prompt.prompt, form, prompt.fields.get("tools"))
        made = formatted(prompt.prompt, form)
    except (TokenizerError, DataError) as error:
        raise SettingsError(f"{where}{error}") from error
    except Exception as error:  # tokenizers raise plain ones
        raise SettingsError(f"{where}the tokenizer refuses it: {error}") from error
    if not tokens:
        raise SettingsError(f"{where}prompt {prompt.prompt!r} has no tokens")
    return Example(tokens, text, prompt.fields, prompt.source, None if isinstance(made, str) else made)


def split(examples: Sequence[Any], heldout: int, seed: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Examples to train on, and at most a tenth of them to evaluate on, which the seed chooses; both keep their order.

    Of a mixture with shares a tenth of each part is held out, by its share. With fewer than ten examples there is none
    to spare: evaluation uses the first of those to train on.
    """
    if isinstance(examples, Mixture) and examples.shares is not None:
        counts = [max(1, heldout * share // sum(examples.shares)) for share in examples.shares]
        pairs = [split(part, count, seed) for part, count in zip(examples.parts, counts, strict=True)]
        held_out = [example for _, held in pairs for example in held]
        return Mixture([train for train, _ in pairs], examples.shares), held_out
    count = min(heldout, len(examples) // 10)
    if not count:
        few = examples if heldout >= len(examples) else examples_at(examples, np.arange(heldout))
        return examples, few
    held = chosen_examples(examples, count, seed)
    return examples_at(examples, np.setdiff1d(np.arange(len(examples)), held)), examples_at(examples, held)


def chosen_places(total: int, count: int, seed: int) -> np.ndarray:
    """`count` places of `total`, ascending, that the seed chooses."""
    return np.sort(np.random.default_rng((seed, SPLIT)).permutation(total)[:count])


def chosen_examples(examples: Sequence[Any], count: int, seed: int) -> np.ndarray:
    """`chosen_places` of at most `count` examples, but one pair at least; the two texts of a pair stay together."""
    pairs = pairs_of(examples)
    if pairs is None:
        return chosen_places(len(examples), count, seed)
    order = pairs[np.random.default_rng((seed, SPLIT)).permutation(len(examples))]
    _, first = np.unique(order, return_index=True)
    drawn = order[np.sort(first)]
    sizes = np.bincount(pairs)[drawn].cumsum()
    return np.flatnonzero(np.isin(pairs, drawn[sizes <= max(count, sizes[0])]))


def pairs_of(examples: Sequence[Any]) -> np.ndarray | None:
    """[examples] a number of the pair that each text is from, or of its own; None: all are their own."""
    if isinstance(examples, TextFile) and isinstance(examples.records, PairHalves):
        return examples.records.places // 2
    if isinstance(examples, list):  # in memory
        sources = [one.source for one in examples if isinstance(one, TextExample) and one.source]
        paired = len(set(sources)) < len(sources) == len(examples)
        return np.unique(sources, return_inverse=True)[1] if paired else None
    if not isinstance(examples, Mixture):
        return None
    parts = [pairs_of(part) for part in examples.parts]
    if all(part is None for part in parts):
        return None
    numbers, begin = [], 0
    for part, pairs in zip(examples.parts, parts, strict=True):
        numbers.append(begin + (np.arange(len(part)) if pairs is None else pairs))
        begin = 1 + int(numbers[-1].max(initial=begin))
    return np.concatenate(numbers)


def examples_at(examples: Sequence[Any], places: np.ndarray) -> Sequence[Any]:
    """Some examples, by their places in ascending order; those of files are read when they are asked for."""
    if isinstance(examples, TextFile):
        return examples[places]
    if not isinstance(examples, Mixture):
        return [examples[place] for place in places.tolist()]
    ends = np.searchsorted(places, examples.starts)
    parts = [
        examples_at(part, places[ends[n] : ends[n + 1]] - examples.starts[n]) for n, part in enumerate(examples.parts)
    ]
    return Mixture([part for part in parts if len(part)], None)


def fit(prompts: Sequence[Example], most: int, how: str, reason: str) -> Fitting:
    """Prompts of at most so many tokens.

    Args:
      most: tokens that a prompt may have.
      how: with a longer one: "error", "drop", or "truncate", which keeps its last tokens; the reward is given its whole
        text all the same.
      reason: of the limit, for the message.

    Raises:
      SettingsError: one is longer and `how` is "error", or none is left; the first ones are named with their lines.
    """
    long = [one for one in prompts if len(one.tokens) > most]
    if not long:
        return Fitting(prompts, "")
    named, count = _named(long), f"{len(long)} of {len(prompts)}"
    if how == "error":
        first = max(long, key=lambda one: len(one.tokens))
        where = f"{first.source}: " if first.source else ""
        raise SettingsError(
            f"{where}the longest prompt has {len(first.tokens)} tokens, but {reason}; --long_prompts=drop leaves such "
            f"prompts out, truncate keeps their ends (it begins {first.text[:60]!r}; too long are {count}: {named})"
        )
    if how == "truncate":
        shorter = _each(prompts, lambda part: [one._replace(tokens=one.tokens[-most:]) for one in part])
        return Fitting(shorter, f"{count} are cut to their last {most} tokens, as {reason}: {named}")
    if any(all(len(one.tokens) > most for one in part) for part in _parts(prompts)):
        raise SettingsError(f"--long_prompts=drop: no prompt is left of a file, as {reason}: {named}")
    left = _each(prompts, lambda part: [one for one in part if len(one.tokens) <= most])
    return Fitting(left, f"{count} are left out, as {reason}: {named}")


def _named(prompts: Sequence[Example]) -> str:
    """The first ones by file and line, or by their texts."""
    return named_lines([one.source or repr(one.text[:60]) for one in prompts[:MOST_SOURCES]], len(prompts))


def _parts(prompts: Sequence[Example]) -> Sequence[Sequence[Example]]:
    return prompts.parts if isinstance(prompts, Mixture) else [prompts]


def _each(prompts: Sequence[Example], change: Any) -> Sequence[Example]:
    """The prompts with a change of each part."""
    if isinstance(prompts, Mixture):
        return Mixture([change(part) for part in prompts.parts], prompts.shares)
    return change(prompts)
