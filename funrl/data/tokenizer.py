"""Hugging Face tokenizers: load one, create one of single characters, and encode prompts.

transformers takes seconds to import, so it is imported where it is used.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.data.processors.square_pictures import framed

PAD = "<pad>"
END = "</s>"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TRUSTED = ("system", "developer", "assistant")  # roles whose text may contain markers; that of others stays text
STAND_INS = "\U000f0000-\U000ffffd"  # private characters, each instead of a marker that is text
_PLACE = re.compile(f"[{STAND_INS}]")


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or lacks a feature; the message says which."""


def character_tokenizer(alphabet: str, unknown: str | None = None) -> Any:
    """A fast tokenizer whose tokens are the characters of `alphabet`, from id 2 on; 0 is padding and 1 end of text.

    It adds no special tokens, and `save_pretrained` writes what `AutoTokenizer` reads. A character outside of the
    alphabet is an error when it is encoded.

    Args:
      alphabet: distinct characters.
      unknown: character of it that stands for all others; None: they are errors.

    Raises:
      TokenizerError: a character occurs twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if twice or not alphabet:
        raise TokenizerError(f"alphabet {alphabet!r}: " + (f"{twice} occur twice" if twice else "it is empty"))
    vocabulary = character_vocabulary(alphabet)
    tokenizer = Tokenizer(WordLevel(vocabulary) if unknown is None else WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def chat_character_tokenizer(alphabet: str, words: Sequence[str], template: str, unknown: str) -> Any:
    """A `character_tokenizer` in which each of some words is one token too, with a chat template.

    Args:
      alphabet: distinct characters.
      words: such as marks of roles; they are part of decoded text. Their ids follow those of the characters.
      template: jinja source.
      unknown: as in `character_tokenizer`.
    """
    from tokenizers import AddedToken

    tokenizer = character_tokenizer(alphabet, unknown)
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    tokenizer.chat_template = template
    return tokenizer


def character_vocabulary(alphabet: str) -> dict[str, int]:
    """Ids of the tokens of a `character_tokenizer`."""
    return {token: i for i, token in enumerate((PAD, END, *alphabet))}


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a Hugging Face model directory. Nothing is downloaded.

    Raises:
      TokenizerError: the directory or its tokenizer files are missing, or transformers rejects them.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TokenizerError(f"{folder}: no such directory; a Hugging Face directory with a tokenizer is needed")
    if not any((folder / name).is_file() for name in FILES):
        raise TokenizerError(f"{folder}: it holds no tokenizer; one of {', '.join(FILES)} is needed")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many kinds for a broken file
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{folder}: transformers cannot load its tokenizer: {reason}") from error


def encode_text(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Token ids of a text; `special`: with the special tokens that the tokenizer adds.

    The library of a fast tokenizer is asked directly: for a short text transformers takes twenty times as long.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if issubclass(kind, Fast) and kind.encode is Fast.encode and kind._encode_plus is Fast._encode_plus:
        library = tokenizer.backend_tokenizer
        settings = library.truncation, library.padding, library.encode_special_tokens
        if settings == (None, None, tokenizer.split_special_tokens):  # transformers would change others
            return library.encode(text, add_special_tokens=special).ids
    return tokenizer.encode(text, add_special_tokens=special)


def encode_prompt(
    tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), arguments: Any = None
) -> tuple[list[int], str]:
    """Tokenize a prompt so that a completion can follow.

    Args:
      tokenizer: of Hugging Face.
      prompt: text, which gets the tokenizer's special tokens; or chat messages with "role" and "content", which go
        through its chat template with the opening of the assistant's turn.
      tools: JSON schemas of tools, for the chat template.
      arguments: further arguments of the chat template, by name.

    Returns: the ids without a closing end-of-sequence token, and the text (of chat messages: the templated text).

    Raises:
      TokenizerError: the prompt is a chat and the tokenizer has no chat template, or the template rejects it.
    """
    if isinstance(prompt, str):
        return _without_end(tokenizer, encode_text(tokenizer, prompt, special=True), prompt), prompt
    if tokenizer.chat_template is None:
        raise TokenizerError(
            "a prompt is a list of chat messages, but this tokenizer has no chat template; "
            "give --chat_template=FILE.jinja, or prompts as text"
        )
    try:
        rendered = render_chat(tokenizer, prompt, tools, arguments=arguments, add_generation_prompt=True)
    except Exception as error:  # templates may raise anything
        raise TokenizerError(f"the chat template refuses the messages {list(prompt)!r:.2000}: {error}") from error
    return encode_rendered(tokenizer, rendered), rendered.text


class RenderedChat(NamedTuple):
    """Text of a chat, in which markers that others than the policy and the system wrote are still text.

    Attributes:
      text: the text as it reads.
      cuts: ascending places in it, each inside of such a marker: a tokenizer that sees what is before and what is after
        on its own finds no marker.
    """

    text: str
    cuts: Sequence[int] = ()


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), arguments: Any = None, **more: Any
) -> RenderedChat:
    """Render messages by a tokenizer's chat template, which may raise anything.

    Markers are the special tokens, and further added tokens that the template has in its text, such as `<tool_call>`.
    Where a user or a tool writes one, the template does not see it, and its tokens are those of ordinary text.
    Characters that UTF-8 has not are replaced.
    """
    words: dict[str, str] = {}
    markers = _markers(tokenizer)

    def hide(match: re.Match[str]) -> str:
        return words.setdefault(match[0], chr(0xF0000 + len(words)))

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            text = value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
            return markers.sub(hide, text)
        if isinstance(value, Mapping):
            return {key: hidden(inner) for key, inner in value.items()}
        return [hidden(inner) for inner in value] if isinstance(value, list | tuple) else value

    shown = [message if message.get("role") in TRUSTED else hidden(message) for message in messages]
    rendered = framed(chat_text(tokenizer, shown, tools, arguments=arguments, **more), tokenizer)
    if not words:
        return RenderedChat(rendered)
    texts = {place: word for word, place in words.items()}
    parts: list[str] = []
    cuts: list[int] = []
    begin = length = 0
    for match in _PLACE.finditer(rendered):
        word = texts.get(match[0], match[0])
        parts += [rendered[begin : match.start()], word]
        length += match.start() - begin
        cuts += [length + 1] if len(word) > 1 else []
        length += len(word)
        begin = match.end()
    return RenderedChat("".join((*parts, rendered[begin:])), cuts)


def encode_rendered(tokenizer: Any, rendered: RenderedChat, begin: int = 0, before: str = "") -> list[int]:
    """Tokens of a rendered chat from a place in its text on.

    Args:
      begin: the place.
      before: a special token that they follow; "": they are the begin of a text.
    """
    text, cuts = rendered
    bounds = [begin, *(cut for cut in cuts if cut > begin), len(text)]
    ids: list[int] = []
    for first, last in itertools.pairwise(bounds):
        ids += encode_after(tokenizer, before if first == begin else tokenizer.eos_token or "", text[first:last])
    return ids


def encode_as_text(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text in which no marker is a special token."""
    cuts = [match.start() + 1 for match in _markers(tokenizer).finditer(text) if len(match[0]) > 1]
    return encode_rendered(tokenizer, RenderedChat(text, cuts))


def encode_after(tokenizer: Any, mark: str, text: str) -> list[int]:
    """Tokens of a text as it follows a special token, since some tokenizers begin every text with a space."""
    if not mark:
        return tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode(mark + text, add_special_tokens=False)
    marked = tokenizer.encode(mark, add_special_tokens=False)
    if ids[: len(marked)] == marked:
        return ids[len(marked) :]
    return tokenizer.encode(text, add_special_tokens=False)


def chat_text(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), arguments: Any = None, **more: Any
) -> str:
    """Render messages by a tokenizer's chat template as they are; the template may raise anything."""
    return tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=False, **{**(arguments or {}), **more}
    )


_PATTERNS: weakref.WeakKeyDictionary[Any, tuple[Any, re.Pattern[str]]] = weakref.WeakKeyDictionary()


def _markers(tokenizer: Any) -> re.Pattern[str]:
    """Pattern of the markers of a tokenizer and its template, and of characters that stand for them."""
    template = tokenizer.chat_template
    key, pattern = _PATTERNS.get(tokenizer, (None, None))
    if pattern is None or key != template:
        words = tuple(str(word) for word in tokenizer.all_special_tokens)
        added = (str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values())
        words += tuple(word for word in added if word.strip() and word in str(template))
        pattern = _pattern(tuple(sorted({word for word in words if len(word) > 1}, key=len, reverse=True)))
        _PATTERNS[tokenizer] = (template, pattern)
    return pattern


@functools.cache
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join((*map(re.escape, words), f"[{STAND_INS}]")))


def _without_end(tokenizer: Any, ids: list[int], text: str) -> list[int]:
    """Remove the end-of-text token that some tokenizers append to every text."""
    added = bool(ids) and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token))
    return ids[:-1] if added else ids
