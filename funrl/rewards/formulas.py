"""Answers that are formulas, compared as mathematics."""

from __future__ import annotations

import re
from collections.abc import Mapping

from funrl.rewards.answers import last_boxed, last_tagged
from funrl.rewards.mathematics.judge import same_answer
from funrl.rewards.mathematics.numbers import right_answer_text
from funrl.rewards.verifiers import right_answer
from funrl.rewards.views import ANSWER, read_as

_LAST_PART = 5000  # characters, in which an answer without a box stands
_STATED = re.compile(
    r"(?i)\banswers?\b(?:\s+(?:is|are|equals|(?:must|should|would|will) be)\b|\s*(?:is|=|:|\*\*)+)[\s:*]*"
    r"|#### *(?=[^\s#][^\n]*\Z)"
)
_NEXT = re.compile(r"\s*(?:,|;|or\b|and\b|,\s*(?:or|and)\b)\s*(?=[$\\])")  # between formulas that are one answer
_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|(?<![\\\d])\$((?:\\\$|[^$\n])+)\$|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]",
    re.DOTALL,
)
_NUMBER = (
    r"(?:(?<![\w.\\])[-+]|(?<![\w.]))[$\u20ac\u00a3]?(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)?"
    r"(?:(?<=\d)|(?<!\d)(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?(?<=\d)"
)
_UNIT = r"(?:cm|mm|km|kg|ft|mph|km/h|m/s|meters?|hours?|minutes?|dollars?|cents?|degrees?)\b(?:\^\d)?"
_PLAIN = re.compile(rf"{_NUMBER}(?:\s*[-+*/^]\s*\(?{_NUMBER}\)?)*(?:\s*(?:%|percent\b|{_UNIT}))?")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n|$")
_LONG_WORD = re.compile(
    r"(?<!\\)\b(?!(?:sin|cos|tan|sqrt|log|pi|infinity|inf|and|or)\b)[a-zA-Z]{3,}(?![a-zA-Z{])"
    r"|\b(?:it|is|so|we|he|to|be)\b"
)


@read_as(ANSWER)
def math_answer(prompt: str, completion: str, **fields: object) -> float:
    r"""1 if the completion's answer is equal to the right answer; see `same_answer`.

    Its answer is the last \boxed{...} that is closed; else, in the last <answer>...</answer> or its last 5,000
    characters, the formulas or number after the last "answer is" or "####", else the last formula in dollar signs or
    the last number. The right answer is that alone, or a solution with \boxed{...} or "#### ...". What cannot be read,
    or takes long to compare, is wrong.

    Raises:
      ValueError: there is no formula in the right answer.

    Example: math_answer("Half of 1?", r"It is $\frac{1}{2}$.", answer="0.5") is 1.0.
    """
    wanted = right_formula(fields)
    given = last_boxed(completion)
    given = stated_answer(last_tagged(completion) or completion) if given is None else given
    return float(given is not None and same_answer(wanted, given))


@read_as(ANSWER, example=r"\boxed{4}")
def boxed_answer(prompt: str, completion: str, **fields: object) -> float:
    r"""1 if the last \boxed{...} of the completion is equal to the right answer, and 0 without one.

    Raises:
      ValueError: there is no formula in the right answer.

    Example: boxed_answer("Half of 1?", r"So \boxed{\tfrac12}", answer=r"... \boxed{0.5}") is 1.0.
    """
    wanted = right_formula(fields)
    given = last_boxed(completion)
    return float(given is not None and same_answer(wanted, given))


def right_formula(fields: Mapping[str, object]) -> str:
    r"""The right answer of a record: the content of its \boxed{}, else what follows "####", else all of it.

    Raises:
      ValueError: there is none, or it is neither text nor a number.
    """
    answer = right_answer_text(right_answer(fields))
    boxed = last_boxed(answer)
    formula = answer.rpartition("####")[2].strip() if boxed is None else boxed.strip()
    if not formula:
        raise ValueError(f"there is no formula in the right answer {answer!r}")
    return formula


def check_formula(fields: Mapping[str, object]) -> None:
    """Check the right answer of a record before anything is computed.

    Raises:
      ValueError: as `right_formula`, or its braces do not match.
    """
    formula = right_formula(fields)
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", formula.replace("\\\\", "")):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            break
    if depth:
        raise ValueError(f"the braces of the right answer {formula[:200]!r} do not match")


def stated_answer(completion: str) -> str | None:
    """The answer of a completion without a box, as in `math_answer`; None: there is none."""
    text = completion[-_LAST_PART:].strip("*` \n\r\t")
    if "\n" not in text and "####" not in text and len(text) <= 100 and not _LONG_WORD.search(text) and "$" not in text:
        return text or None
    begin = max((match.end() for match in _STATED.finditer(text)), default=None)
    stated = None if begin is None else _first_answer(text, begin)
    answers = [] if stated is not None else _answers_in(text)
    return max(answers)[1] if answers else stated


def _first_answer(text: str, begin: int) -> str | None:
    """The answer at a place of a text: a formula, or the rest of the sentence, or the first number in that."""
    end = _SENTENCE_END.search(text, begin)
    rest = text[begin : len(text) if end is None else end.start()].strip(" *`")
    formula = _FORMULA.search(text, begin, begin + 500) if not rest or rest[0] in "$\\" else None
    formulas = []
    while formula is not None:
        formulas.append(next(group for group in formula.groups() if group is not None))
        between = _NEXT.match(text, formula.end())
        formula = _FORMULA.match(text, between.end()) if between is not None else None
    if formulas:
        return ", ".join(formulas)
    if len(rest) <= 100 and not _LONG_WORD.search(rest):
        return rest or None
    answers = _answers_in(rest)
    return answers[0][1] if answers else rest[:100]


def _answers_in(text: str) -> list[tuple[int, str]]:
    """Ends and texts of formulas and numbers, those in formulas left out."""
    formulas = [
        (match.end(), next(group for group in match.groups() if group is not None)) for match in _FORMULA.finditer(text)
    ]
    plain = _FORMULA.sub(lambda match: " " * len(match[0]), text)
    numbers = [(match.end(), match[0]) for match in _PLAIN.finditer(plain)]
    return sorted([*formulas, *numbers], key=lambda answer: answer[0]) if formulas else numbers
