"""The place of a completion's answer: its last box, tag, fenced block, or line, in time linear in the text."""

from __future__ import annotations

import re

import numpy as np

from funrl.rewards.mathematics.numbers import decimal_of

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)[ ]?\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*([-+]?\d[\d.,/]*)")  # TeX needs no braces around one digit
_FENCE = re.compile(r"`{3,}|~{3,}")
MOST_FENCES = 1000  # of a text; one with more, as of a policy that repeats itself, has no blocks


def final_answer(completion: str) -> str:
    r"""The last \boxed{...}, else the last <answer>...</answer>, else the line after the last "####", else the text.

    Surrounding blanks are stripped; a number also loses commas and a dollar sign. A last box that is not closed ends
    with the text, unless an earlier one is closed.

    >>> final_answer(r"so \boxed{\frac{1}{2}}."), final_answer("3 * 400 #### 1,200"), final_answer(" 4 ")
    ('\\frac{1}{2}', '1200', '4')
    """
    boxed = last_boxed(completion)
    if boxed is None and r"\boxed{" in completion:
        boxed = completion.rpartition(r"\boxed{")[2]
    tagged = last_tagged(completion) if boxed is None else None
    if boxed is not None:
        answer = boxed
    elif tagged is not None:
        answer = tagged
    else:
        _, mark, rest = completion.rpartition("####")
        answer = (rest.strip().splitlines() or [""])[0] if mark else completion
    answer = answer.strip()
    return answer if decimal_of(answer) is None else re.sub(r"[$,]", "", answer)


def last_tagged(text: str) -> str | None:
    """Content of the last <answer>...</answer>, None where there is none."""
    content = None
    begin = None
    for tag in _TAG.finditer(text):
        closes = bool(tag[1])
        if closes and begin is not None:
            content = text[begin : tag.start()]
            begin = None
        elif not closes and begin is None:
            begin = tag.end()
    return content


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} or \fbox{...} that is closed, else of a last \boxed 7; None: there is none.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}, or \boxed{3")
    '\\frac{1}{2}'
    """
    ends = np.array([box.end() for box in _BOX.finditer(text)], dtype=np.int64)
    if not len(ends):
        bare = _BARE_BOX.findall(text)
        return bare[-1].rstrip(".,") if bare else None
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    signs = (letters == ord("{")).astype(np.int32) - (letters == ord("}"))
    escapes = letters[:-1] == ord("\\")
    escapes[1:] &= letters[:-2] != ord("\\")  # \\ is the end of a line
    signs[1:][escapes] = 0  # \{ and \} are signs of a set, and may be alone
    depths = np.cumsum(signs)
    lowest_after = np.minimum.accumulate(depths[::-1])[::-1]
    closed = ends[lowest_after[ends - 1] < depths[ends - 1]]
    if not len(closed):
        return None
    begin = int(closed[-1])
    return text[begin : begin + int(np.argmax(depths[begin:] < depths[begin - 1]))]


def last_fenced(text: str, word: str) -> str | None:
    """Content of the last fenced block whose first word is of a language, else of the last one without a word.

    A fence is three or more of ` or ~. It opens a block at the end of a line, with any words after it; the next line
    that ends with a fence at least as long closes it. A block that is not closed ends with the text. The indentation of
    the opening fence is taken off all lines.

    Args:
      text: of a completion, with line ends of any kind.
      word: pattern of the language's names, which match in upper and lower case.

    Returns: the text of the block with line ends "\\n"; None where there is no such block.
    """
    if text.count("```") + text.count("~~~") > MOST_FENCES:
        return None
    text = text.replace("\r\n", "\n")
    named = None
    unnamed = None
    position = 0
    while (opening := _FENCE.search(text, position)) is not None:
        line_end = _line_end(text, opening.end())
        words = text[opening.end() : line_end].strip(" \t{}.")
        position = line_end + 1
        alone = not text[text.rfind("\n", 0, opening.start()) + 1 : opening.start()].strip()
        if opening[0][0] in words or (not alone and " " in words):  # code, or a mention of fences, among words
            continue
        begin = position
        end, position = _closing(text, begin, opening[0])
        if not words:
            unnamed = (opening.start(), begin, end)
        elif re.fullmatch(word, re.split(r"[\s,:;=}]", words, maxsplit=1)[0], re.IGNORECASE):
            named = (opening.start(), begin, end)
    chosen = named or unnamed
    return None if chosen is None else _content(text, *chosen)


def _line_end(text: str, begin: int) -> int:
    end = text.find("\n", begin)
    return len(text) if end < 0 else end


def _closing(text: str, begin: int, opening: str) -> tuple[int, int]:
    """The end of a block, and the place after its closing fence."""
    position = begin
    while (place := text.find(opening, position)) >= 0:
        position = _line_end(text, place)
        if not text[place:position].strip(opening[0] + " \t"):
            return place, position + 1
    return len(text), len(text)


def _content(text: str, fence: int, begin: int, end: int) -> str:
    """The lines of a block without the blanks that stand before its opening fence."""
    content = text[begin:end]
    line = text[text.rfind("\n", 0, fence) + 1 : fence]
    if line and not line.strip():
        content = re.sub(rf"^[ \t]{{1,{len(line)}}}", "", content, flags=re.MULTILINE)
    return content
