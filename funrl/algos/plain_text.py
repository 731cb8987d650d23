r"""LaTeX of the notation as plain text."""

from __future__ import annotations

import re

from funrl.algos.notation import is_sum

LATEX_COMMANDS = (  # LaTeX commands whose text differs from their name
    (r"\leftarrow", "<-"),
    (r"\left", ""),
    (r"\right", ""),
    (r"\,", ""),
    (r"\quad ", ""),
    (r"\|", "||"),
    (r"\leq", "<="),
    (r"\geq", ">="),
    (r"\neq", "!="),
    (r"\cdot", "*"),
    (r"\notin", "not in"),
    (r"\in ", "in "),
    (r"^{\circ}", " degrees"),
    (r"\\", ""),
    ("&", ""),
)
WORD_COMMANDS = re.compile(r"\\(?:operatorname|mathrm|mathcal|mathbf)\{([^{}]*)\}")

REACHING = re.compile(r"\\(sum|prod|log)(?![a-z(])|mean_t ")


def plain(latex: str) -> str:
    r"""LaTeX of the notation as text.

    >>> plain(r"-\min(r_t A_t, \operatorname{clip}(r_t, 1 - 0.2, 1 + 0.2) A_t)")
    '-min(r_t A_t, clip(r_t, 1 - 0.2, 1 + 0.2) A_t)'
    >>> plain(r"\frac{1}{\sum_i |o_i|} \sum_i \frac{x_i - 1}{\sqrt{\operatorname{var}(x) + 2}}")
    '1 / (sum_i |o_i|) sum_i (x_i - 1) / sqrt(var(x) + 2)'
    >>> plain(r"\sum_t \log \frac{\pi(t)}{\pi_{\mathrm{ref}}(t)}")
    'sum_t log(pi(t) / pi_ref(t))'
    """
    text = WORD_COMMANDS.sub(lambda match: match[1].replace("\\ ", " "), latex)
    while (begin := text.rfind(r"\frac{")) >= 0:  # the innermost first
        above, rest = _braced(text[begin + len(r"\frac") :])
        below, rest = _braced(rest)
        before = text[:begin]
        fraction = f"{_numerator(above)} / {_operand(below)}"
        if before.endswith(r"\log "):
            before = before.rstrip()
            fraction = f"({fraction})"
        text = f"{before}{fraction}{rest}"
    while (begin := text.rfind(r"\sqrt{")) >= 0:
        inside, rest = _braced(text[begin + len(r"\sqrt") :])
        text = f"{text[:begin]}sqrt({inside}){rest}"
    for command, words in LATEX_COMMANDS:
        text = text.replace(command, words)
    text = re.sub(r"([_^])\{(-?[\w.]+\+?)\}", r"\1\2", text)
    text = re.sub(r"\\([a-z]+)", r"\1", text).replace(r"\_", "_").replace("{", "(").replace("}", ")")
    text = text.replace("_((i))", "_(i)")
    return re.sub(r"\s+", " ", text).replace("[ ", "[").replace(" ]", "]").replace("( ", "(").replace(" )", ")").strip()


def _braced(text: str) -> tuple[str, str]:
    """Content of the braces at the beginning of a text, and the rest."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[1:place], text[place + 1 :]
    raise ValueError(f"{text!r}: a brace is not closed")


def _operand(text: str) -> str:
    """A side of a fraction, in brackets unless it is one number, symbol, call or root."""
    call = re.fullmatch(r"[A-Za-z1.\\]*(?:_(?:\w|\{[^{}]*\}))?([({[].*[)}\]])(?:\^\d)?", text)
    symbol = re.fullmatch(r"[\w.\\{}^]+|\|\w+\|", text)
    return text if symbol or (call and _is_one(call[1])) else f"({text})"


def _numerator(text: str) -> str:
    """Upper side of a fraction: a product needs no brackets, unless it has an operator that reaches further."""
    return text if re.fullmatch(r"[^/,]*", text) and not is_sum(text) and not REACHING.search(text) else _operand(text)


def _is_one(text: str) -> bool:
    """True if the last character of a text closes its first bracket."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0:
            return place == len(text) - 1
    return False
