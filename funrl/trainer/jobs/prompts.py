"""Prompts of files as a run takes them: their format, what is held out, and those that are too long."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from typing import Any

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
    read_shots,
    read_tools,
    template_arguments,
    text_of_flag,
)
from funrl.data.prompts import Example, check_prompts, encode_prompts, load_prompts
from funrl.data.supervised import TextExample, TextFile
from funrl.data.text_lengths import pick
from funrl.data.tokenizer import chat_text
from funrl.foreign.load import FRAMEWORKS
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings, flag_value, settings_flags

LEAST_TO_SPLIT = 10  # examples, of which one is held out
MOST_COMPARED = 5000  # texts to train on that are compared with those held out
PLACE = re.compile(r"(?<![\\\w{]){([a-zA-Z_]\w*)}(?!})")  # not the argument of a command of LaTeX
SPLIT = 0x5917  # sets the numbers that hold prompts out apart from those that shuffle


def check_text_prompts(env: str | None, examples: Sequence[Example]) -> None:
    """Refuse prompts with pictures for an environment of another framework. Raises: SettingsError.

    Args:
      env: value of --env; None: it is not given.
    """
    framework = (env or "").partition(":")[0]
    seeing = next((example for example in examples if example.opening is not None), None)
    if framework in FRAMEWORKS and seeing is not None:
        raise SettingsError(
            f"--env={env}: environments of {framework} get text, and {seeing.source or 'a prompt'} has pictures; leave "
            "these out, or give an environment of FILE.py:NAME"
        )


def format_of(settings: Settings, fields: Fields) -> PromptFormat:
    """The format of all prompts that the flags give.

    Raises:
      SettingsError: naming the flag.
    """

    def read(name: str, parse: Any, otherwise: Any) -> Any:
        value = flag_value(settings, name)
        try:
            return otherwise if value is None else parse(value)
        except DataError as error:
            raise SettingsError(f"--{name}: {error}") from error

    chat = (
        settings.formatting.system_prompt,
        settings.formatting.chat_template,
        settings.formatting.tools,
        settings.formatting.template_arguments,
    )
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
    if settings.formatting.step_separator is not None:
        return settings.formatting.step_separator.replace("\\n", "\n").replace("\\t", "\t")
    return "" if embedded else SEPARATOR


def with_chat_template(tokenizer: Any, settings: Settings) -> Any:
    """The tokenizer with the chat template of a flag, which is saved with the model.

    Raises:
      SettingsError: the file cannot be read, or there is no template where one is needed.
    """
    given = settings.formatting.chat_template
    if given is None and tokenizer.chat_template is None:
        chats = [name for name in ("system_prompt", "tools", "template_arguments") if flag_value(settings, name)]
        for name in chats:
            raise SettingsError(
                f"--{name}={flag_value(settings, name)}: it makes chat messages of prompts, and "
                "the model's tokenizer has "
                "no chat template; give --chat_template=FILE.jinja"
            )
    if given is not None and given != OWN:
        tokenizer = copy.copy(tokenizer)
        try:
            tokenizer.chat_template = text_of_flag(given)
        except DataError as error:
            raise SettingsError(f"--chat_template: {error}") from error
    if given == OWN and tokenizer.chat_template is None:
        raise SettingsError("--chat_template=own: the model's tokenizer has none; give a FILE.jinja")
    if settings.formatting.tools is not None:
        _check_tools_shown(tokenizer, settings.formatting.tools)
    return tokenizer


def _check_tools_shown(tokenizer: Any, file: str) -> None:
    """Raise SettingsError where the tools of a file cannot be read, or the chat template shows none of them."""
    try:
        tools = read_tools(file)
    except DataError as error:
        raise SettingsError(f"--tools: {error}") from error
    conversation = [{"role": "user", "content": "?"}]
    try:
        shown = chat_text(tokenizer, conversation, tools) != chat_text(tokenizer, conversation)
    except Exception:  # templates may raise anything, and are asked again with the prompts
        return
    if not shown:
        raise SettingsError(f"--tools={file} does nothing: the chat template shows no tools; leave it out")


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
        loaded = [encode_prompts(load_prompts(file.path, fields), tokenizer, form) for file in files]
    except ValueError as error:
        raise SettingsError(f"--{flag}: {error}") from error
    weights = [file.weight for file in files if file.weight is not None]
    return Mixture(loaded, shares_of(weights)) if weights else [example for part in loaded for example in part]


def given_prompts(records: Sequence[Any], fields: Fields, form: PromptFormat, tokenizer: Any) -> list[Example]:
    """Prompts of records in memory as token ids. Raises: SettingsError."""
    try:
        return encode_prompts(check_prompts(records, fields), tokenizer, form)
    except ValueError as error:
        raise SettingsError(f"--prompts: {error}") from error


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
    count = min(heldout, len(examples) // LEAST_TO_SPLIT)
    if not count:
        few = examples if heldout >= len(examples) else pick(examples, np.arange(heldout))
        return examples, few
    held = chosen_examples(examples, count, seed)
    return pick(examples, np.setdiff1d(np.arange(len(examples)), held)), pick(examples, held)


def remarks_on_heldout(train: Sequence[Any], heldout: Sequence[Any], wanted: int) -> list[str]:
    """Remarks on held-out examples: fewer than a flag asks for, or the same as examples that are trained on.

    Of texts only the first 5,000 are compared, for they are read from their files.

    Args:
      wanted: --eval_prompts.
    """
    remarks = []
    if wanted not in (settings_flags()["eval_prompts"].default, len(heldout)) and wanted > len(heldout):
        remarks.append(f"--eval_prompts={wanted}: there {_are(len(heldout), 'example')} to evaluate on")
    compared = train if isinstance(train[0], Example) else itertools.islice(train, MOST_COMPARED)
    keys = {_key(example) for example in compared}
    same = sum(_key(example) in keys for example in heldout)
    if same:
        few = f" ({len(train)} examples are too few to hold a tenth out)" if len(train) < LEAST_TO_SPLIT else ""
        remarks.append(
            f"{same} of the {len(heldout)} held-out prompts are trained on too, word for word{few}; --eval_data=FILE "
            "gives others"
        )
    return remarks


def remarks_on_template(settings: Settings) -> list[str]:
    """A remark on what looks like a place of --prompt_template and is not filled."""
    text = None if settings.formatting.prompt_template is None else text_of_flag(settings.formatting.prompt_template)
    names = [name for name in dict.fromkeys(PLACE.findall(text or "")) if name != "prompt"]
    if not names:
        return []
    return [f"--prompt_template: {{{names[0]}}} stays in every prompt as it is written; only {{prompt}} is replaced"]


def _are(count: int, noun: str) -> str:
    return f"is 1 {noun}" if count == 1 else f"are {count} {noun}s"


def _key(example: Any) -> tuple[int, ...]:
    """Tokens of the prompt of an example, and the digest of what it owns."""
    if isinstance(example, Example):
        return (*(() if example.owned is None else (example.owned.digest,)), *example.tokens)
    owned = [value.digest for value in example.owned]
    text = example.texts[0]
    first = next((place for place, trained in enumerate(text.trained) if trained), len(text.tokens))
    return (*owned, *text.tokens[:first])


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
    if isinstance(examples, TextFile) and isinstance(examples.records.table, PairHalves):
        return examples.records.places // 2
    if isinstance(examples, list):  # in memory
        sources = [x.source for x in examples if isinstance(x, TextExample) and x.source]
        paired = len(set(sources)) < len(sources) == len(examples)
        return np.unique(sources, return_inverse=True)[1] if paired else None
    if not isinstance(examples, Mixture):
        return None
    parts = [pairs_of(part) for part in examples.parts]
    if all(part is None for part in parts):
        return None
    numbers = []
    begin = 0
    for part, pairs in zip(examples.parts, parts, strict=True):
        numbers.append(begin + (np.arange(len(part)) if pairs is None else pairs))
        begin = 1 + int(numbers[-1].max(initial=begin))
    return np.concatenate(numbers)
