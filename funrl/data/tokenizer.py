"""Hugging Face tokenizers: load one, create one of single characters, and encode prompts.

transformers takes seconds to import, so it is imported where it is used.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from funrl.data.messages import END_THINK, THOUGHT_FIELDS, TRAIN_FIELD, mentions
from funrl.data.processors.form import framed

PAD = "<pad>"
END = "</s>"
THINK = "<think>"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TRUSTED = ("system", "developer", "assistant")  # roles whose text may contain markers; that of others stays text
STAND_INS = "\U000f0000-\U000ffffd"  # private characters, each instead of a marker that is text
LONGEST_MARKER = 200  # characters
_PLACE = re.compile(f"[{STAND_INS}]")


class TextTokenizer(Protocol):
    """The part of a tokenizer of Hugging Face that is used here; weak references to it are kept."""

    chat_template: str | None
    eos_token: str | None
    eos_token_id: int | None
    bos_token_id: int | None

    @property
    def all_special_tokens(self) -> list[str]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str: ...
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    def apply_chat_template(self, conversation: list[Any], **options: object) -> str: ...


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


def encode_text_prompt(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Token ids of a text with the tokenizer's special tokens, so that a completion can follow.

    A text that begins with the begin-of-text token gets no second one, and none gets the end-of-text token that some
    tokenizers append.
    """
    ids = encode_text(tokenizer, text, special=True)
    if has_own_begin(tokenizer, text) and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    return _without_end(tokenizer, ids, text)


def has_own_begin(tokenizer: TextTokenizer, text: str) -> bool:
    """True if a text begins with the begin-of-text token, as a rendered chat does."""
    begin = getattr(tokenizer, "bos_token", None)
    return bool(begin) and text.startswith(begin)


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
    tokenizer: Any, messages: Sequence[Any], tools: Sequence[object] = (), arguments: Any = None, **more: object
) -> RenderedChat:
    """Render messages in the normal form by a tokenizer's chat template, which may raise anything.

    Markers are special tokens, and further added tokens that the template has in its text, such as `<tool_call>`.
    Where a user or a tool writes one, the template does not see it, and its tokens are those of ordinary text.
    Characters that UTF-8 has not are replaced.
    """
    words: dict[str, str] = {}
    markers = markers_of(tokenizer)

    def hide(match: re.Match[str]) -> str:
        return words.setdefault(match[0], chr(0xF0000 + len(words)))

    def hidden(value: object) -> Any:
        if isinstance(value, str):
            text = value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
            return markers.sub(hide, text)
        if isinstance(value, Mapping):
            return {key: hidden(inner) for key, inner in value.items()}
        return [hidden(inner) for inner in value] if isinstance(value, list | tuple) else value

    template = str(tokenizer.chat_template)
    presented = [present(message, template) for message in messages]
    if _reads_parts_only(tokenizer):
        presented = [_in_parts(message) for message in presented]
    shown = [message if message.get("role") in TRUSTED else hidden(message) for message in presented]
    try:
        rendered = chat_text(tokenizer, shown, tools, arguments=arguments, **more)
    except TypeError:  # of a template that joins arguments to a text, as DeepSeek-R1's does
        rendered = chat_text(tokenizer, [_with_text_arguments(x) for x in shown], tools, arguments=arguments, **more)
    rendered = framed(rendered, tokenizer)
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


@functools.lru_cache(maxsize=8)
def _reads_thoughts(template: str) -> bool:
    """True of a template that reads a field of thoughts; others may have their names in other places."""
    fields = "|".join(THOUGHT_FIELDS)
    pattern = rf"\b(?:m|msg|message)(?:\.|\[['\"]|\.get\(['\"])(?:{fields})\b"
    return THOUGHT_FIELDS[0] in template or re.search(pattern, template) is not None


def present(message: Mapping[str, object], template: str) -> Mapping[str, Any]:
    """A message as a chat template reads it: thoughts have the name that it knows, and are a field if it knows one."""
    if message.get("role") != "assistant":
        return message
    content = message.get("content")
    inline = isinstance(content, str) and END_THINK in content and not message.get(THOUGHT_FIELDS[0])
    if inline and _reads_thoughts(template):
        answer = str(content).rpartition(END_THINK)[2].lstrip("\n")
        message = {**message, THOUGHT_FIELDS[0]: inline_thoughts(message), "content": answer}
    if message.get(THOUGHT_FIELDS[0]) and THOUGHT_FIELDS[0] not in template:
        message = {
            **message,
            **{name: message[THOUGHT_FIELDS[0]] for name in THOUGHT_FIELDS if mentions(template, name)},
        }
    return (
        {name: value for name, value in message.items() if name != TRAIN_FIELD} if TRAIN_FIELD in message else message
    )


_PARTS: weakref.WeakKeyDictionary[TextTokenizer, tuple[str | None, bool]] = weakref.WeakKeyDictionary()


def _reads_parts_only(tokenizer: TextTokenizer) -> bool:
    """True of a template that leaves out contents that are texts, and reads those in parts, as LLaVA's do."""
    template, known = _PARTS.get(tokenizer, (None, False))
    if template is None or template != tokenizer.chat_template:

        def shows(message: Mapping[str, object]) -> bool:
            try:
                return "FUNRL-TEXT" in chat_text(tokenizer, [message])
            except Exception:  # templates may raise anything
                return False

        message = {"role": "user", "content": "FUNRL-TEXT"}
        known = not shows(message) and shows(_in_parts(message))
        _PARTS[tokenizer] = (tokenizer.chat_template, known)
    return known


def _in_parts(message: Mapping[str, object]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls have their arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [{**x, "arguments": json.dumps(x["arguments"], ensure_ascii=False)} for x in functions]
    calls = [{**call, "function": x} for call, x in zip(message["tool_calls"], texts, strict=True)]
    return {**message, "tool_calls": calls}


def inline_thoughts(message: Mapping[str, Any]) -> str:
    """Thoughts of a message: in a field, or in its content up to the mark that ends them; ""."""
    thoughts = message.get(THOUGHT_FIELDS[0])
    content = message.get("content")
    if thoughts or not isinstance(content, str) or END_THINK not in content:
        return thoughts or ""
    return content.rpartition(END_THINK)[0].split(THINK)[-1].strip("\n")


def encode_rendered(tokenizer: Any, rendered: RenderedChat, begin: int = 0, before: str | None = None) -> list[int]:
    """Tokens of a rendered chat from a place in its text on.

    Args:
      begin: the place.
      before: text that they follow; None: that of the chat.
    """
    text, cuts = rendered
    before = text[:begin] if before is None else before
    ids: list[int] = []
    for first, last in itertools.pairwise([begin, *(cut for cut in cuts if cut > begin), len(text)]):
        ids += encode_after(tokenizer, before if first == begin else text[:first], text[first:last])
    return ids


def encode_as_text(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Tokens of a text in which no marker is a special token."""
    cuts = [match.start() + 1 for match in markers_of(tokenizer).finditer(text) if len(match[0]) > 1]
    return encode_rendered(tokenizer, RenderedChat(text, cuts))


def encode_after(tokenizer: TextTokenizer, before: str, text: str) -> list[int]:
    """Tokens of a text as it continues another one, which has its tokens already.

    Some tokenizers begin every text with a space. Behind a marker it is put where the tokenizer puts it; nothing is put
    between words.
    """
    if not before or not text:
        return encode_text(tokenizer, text)
    mark = last_marker(tokenizer, before)
    if mark:
        ids = encode_text(tokenizer, mark + text)
        marked = encode_text(tokenizer, mark)
        return ids[len(marked) :] if ids[: len(marked)] == marked else encode_text(tokenizer, text)
    library = _without_begin(tokenizer)
    if library is None:
        return encode_text(tokenizer, text)
    begins = (match.start() for match in markers_of(tokenizer).finditer(text) if len(match[0]) > 1)
    end = next(begins, len(text))
    rest = encode_text(tokenizer, text[end:]) if end < len(text) else []
    return [*library.encode(text[:end], add_special_tokens=False).ids, *rest]


def last_marker(tokenizer: TextTokenizer, text: str) -> str:
    """The marker that a text ends with; ""."""
    match = _final(markers_of(tokenizer)).search(text, max(0, len(text) - LONGEST_MARKER))
    return match[0] if match and len(match[0]) > 1 else ""


_LIBRARIES: weakref.WeakKeyDictionary[TextTokenizer, Any] = weakref.WeakKeyDictionary()


def _without_begin(tokenizer: TextTokenizer) -> Any:
    """The library of a tokenizer that puts a space before a text, made to put none; None: it puts none, or is slow."""
    if tokenizer not in _LIBRARIES:
        library = getattr(tokenizer, "backend_tokenizer", None)
        parts = () if library is None else (library.normalizer, library.pre_tokenizer)
        inserts = any(part is not None and _INSERTS.search(part.__getstate__()) for part in parts)
        _LIBRARIES[tokenizer] = _library_without_begin(library) if inserts else None
    return _LIBRARIES[tokenizer]


_INSERTS = re.compile(rb'"Prepend"|"prepend_scheme": ?"(?:always|first)"|"add_prefix_space": ?true')


def _library_without_begin(library: Any) -> Any:
    from tokenizers import Tokenizer

    def changed(part: object) -> Any:
        if isinstance(part, list):
            return [inner for inner in map(changed, part) if inner is not None]
        if not isinstance(part, dict):
            return part
        if part.get("type") == "Prepend":
            return None
        off = {"prepend_scheme": "never", "add_prefix_space": False}
        return {name: off.get(name, changed(value)) for name, value in part.items()}

    parts = json.loads(library.to_str())
    parts |= {name: changed(parts[name]) for name in ("normalizer", "pre_tokenizer")}
    return Tokenizer.from_str(json.dumps(parts))


def chat_text(
    tokenizer: Any, messages: Sequence[Any], tools: Sequence[object] = (), arguments: Any = None, **more: object
) -> str:
    """Render messages by a tokenizer's chat template as they are; the template may raise anything."""
    return tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=False, **{**(arguments or {}), **more}
    )


_PATTERNS: weakref.WeakKeyDictionary[TextTokenizer, tuple[str | None, re.Pattern[str]]] = weakref.WeakKeyDictionary()


def markers_of(tokenizer: TextTokenizer) -> re.Pattern[str]:
    """Pattern of the markers of a tokenizer and its template, and of characters that stand for them."""
    template = tokenizer.chat_template
    key, pattern = _PATTERNS.get(tokenizer, (None, None))
    if pattern is None or key != template:
        words = tuple(str(word) for word in tokenizer.all_special_tokens)
        added = [(str(x), x.special) for x in getattr(tokenizer, "added_tokens_decoder", {}).values()]
        words += tuple(word for word, special in added if word.strip() and (special or word in str(template)))
        pattern = _pattern(tuple(sorted({word for word in words if len(word) > 1}, key=len, reverse=True)))
        _PATTERNS[tokenizer] = (template, pattern)
    return pattern


@functools.cache
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join((*map(re.escape, words), f"[{STAND_INS}]")))


@functools.cache
def _final(pattern: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(f"(?:{pattern.pattern})\\Z")


def _without_end(tokenizer: TextTokenizer, ids: list[int], text: str) -> list[int]:
    """Remove the end-of-text token that some tokenizers append to every text."""
    added = bool(ids) and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token))
    return ids[:-1] if added else ids
