"""The final answer of a completion, which majority votes compare."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)


def final_answer(completion: str) -> str:
    r"""The last \boxed{...}, else the last <answer>...</answer>, else the line after the last "####", else the text.

    Surrounding blanks are stripped; a number also loses commas and a dollar sign.

    >>> final_answer(r"so \boxed{\frac{1}{2}}."), final_answer("3 * 400 #### 1,200"), final_answer(" 4 ")
    ('\\frac{1}{2}', '1200', '4')
    """
    boxed = completion.rfind(r"\boxed{")
    tagged = last_tagged(completion)
    if boxed >= 0:
        answer = _braced(completion[boxed + len(r"\boxed{") :])
    elif tagged is not None:
        answer = tagged
    else:
        _, mark, rest = completion.rpartition("####")
        answer = (rest.strip().splitlines() or [""])[0] if mark else completion
    answer = answer.strip()
    return re.sub(r"[$,]", "", answer) if re.fullmatch(r"[-+]?\$?[\d,]+(\.\d+)?", answer) else answer


def last_tagged(text: str) -> str | None:
    """Content of the last <answer>...</answer>, None where there is none; in time linear in the text's length."""
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


def _braced(text: str) -> str:
    """The text up to its closing brace; the whole text if there is none."""
    depth = 1
    for end, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:end]
    return text
