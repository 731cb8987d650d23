"""Explanation of an algorithm: its advantage chain and losses as composed, in text and in LaTeX.

    print(explain_algorithm(grpo(kl_coef=0.1)))
    explain_algorithm(grpo(kl_coef=0.1)).latex

The composition is read from the pieces themselves: the name of the function that made a piece, and the variables that
the piece closes over as its arguments. Formulas of the project's pieces are in `notation`; a user's own piece is shown
by its name and arguments.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from funrl.algos.core import Advantage, Algorithm, Divergence, Loss
from funrl.algos.guarding import name_of
from funrl.algos.notation import MEANINGS, Formula, grouped, is_sum, occurs, with_factor
from funrl.algos.notation_chains import STEPS, TO_TOKENS
from funrl.algos.notation_losses import FORMULAS, divergence_between
from funrl.algos.plain_text import plain
from funrl.algos.reading import reads, run_advantage

WIDTH = 100  # characters of a line of text
CALL_WIDTH = 120  # characters of a line with the call of a piece
FORMULA_WIDTH = 56  # characters of a formula before the name of its piece
ADDRESS = re.compile(r"https?://[^\s,;)]+[^\s,;).]")
PLACEHOLDERS = re.compile(r"<(\w+)>")
DEFINED = r", \quad "  # between a formula and its definitions
SUMMAND = r" \\ &\quad + "  # between summed losses, one per line
ARROW = r" \leftarrow "


class Node(NamedTuple):
    """A piece, as the call that made it.

    Attributes:
      name: name of the function that made it, or of the piece itself if that is a function.
      arguments: name -> value of the arguments that the piece uses.
      made_by: the function that made it; None: unknown.
    """

    name: str
    arguments: Mapping[str, Any]
    made_by: Callable[..., Any] | None


class ChainStep(NamedTuple):
    r"""A step of an advantage chain.

    Attributes:
      formula: formula of the new x, or a statement with \leftarrow if the step sets another field; "": none.
      definitions: definitions of the symbols in the formula.
      sentence: first sentence of the docstring.
      call: the call that makes the piece.
    """

    formula: str
    definitions: tuple[str, ...]
    sentence: str
    call: str

    @property
    def statements(self) -> list[str]:
        """The formula as a statement, and its definitions."""
        if not self.formula:
            return []
        return [self.formula if ARROW in self.formula else f"x{ARROW}{self.formula}", *self.definitions]


class PieceNote(NamedTuple):
    """Name, first line and references of a piece."""

    name: str
    summary: str
    references: tuple[str, ...]


class Explanation(NamedTuple):
    """An algorithm, explained; its text is `str(explanation)`.

    Attributes:
      steps: steps of the advantage chain.
      losses: role -> formula in LaTeX.
      filter: the call that makes the filter; "": none.
      required, optional: fields of the batch that it reads.
      pieces: notes on all pieces, each once.
    """

    steps: tuple[ChainStep, ...]
    losses: Mapping[str, str]
    filter: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    pieces: tuple[PieceNote, ...]

    @property
    def latex(self) -> str:
        """The chain and the losses as one aligned block, without delimiters."""
        rows = [
            DEFINED.join(step.statements).replace(ARROW, r" &\leftarrow ", 1) for step in self.steps if step.formula
        ]
        rows += [rf"\mathcal{{L}}_{{\mathrm{{{_escaped(role)}}}}} &= {x}" for role, x in self.losses.items()]
        rows = [row.replace(DEFINED, r" \\ &\quad \mathrm{with}\ ") for row in rows]
        return "\\begin{aligned}\n" + " \\\\\n".join(rows) + "\n\\end{aligned}"

    def __str__(self) -> str:
        lines: list[str] = []
        if self.steps:
            lines.append("advantage, from the score x_i of row i:")
            lines += [line for number, step in enumerate(self.steps, 1) for line in _step_lines(number, step)]
        for role, formula in self.losses.items():
            main, *definitions = formula.split(DEFINED)
            first, *others = map(plain, main.split(SUMMAND))
            lines += [f"loss of {role}:", *_wrapped(first, "  ")]
            lines += [line for text in others for line in _wrapped(f"+ {text}", "  ")]
            lines += _definition_lines(definitions, "    ")
        if self.filter:
            lines.append(f"rows that are trained on: {self.filter}")
        if meanings := self.meanings():
            lines += ["where", *(line for text in meanings for line in _wrapped(text, "  "))]
        lines += _wrapped(f"reads: {', '.join(self.required) or 'nothing'}", "")
        if self.optional:
            lines += _wrapped(f"reads where there is one: {', '.join(self.optional)}", "")
        lines.append("pieces:")
        for note in self.pieces:
            lines += _wrapped(f"{note.name}: {note.summary}", "  ")
            lines += [f"    {address}" for address in note.references]
        return "\n".join(lines)

    def meanings(self) -> list[str]:
        """One sentence on each symbol that occurs."""
        formulas = [text for step in self.steps for text in step.statements] + list(self.losses.values())
        texts = {
            symbol: text for symbol, text in MEANINGS.items() if any(occurs(symbol, formula) for formula in formulas)
        }
        simple = re.compile(r"\w(_\w)?")
        named = {
            f"{symbol}: {text}" if simple.fullmatch(symbol) and not text.startswith(f"{symbol} is") else text: None
            for symbol, text in texts.items()
        }
        return list(named)


def explain_algorithm(algorithm: Algorithm) -> Explanation:
    """Explain an algorithm.

    Raises:
      PieceError: one of its pieces cannot be run.

    Example:
      >>> from funrl.algos import grpo
      >>> print(str(explain_algorithm(grpo(kl_coef=0.0))).partition("loss of")[0].rstrip())
      advantage, from the score x_i of row i:
        1. x <- x_i - mean_G(x)                                      group_center()
        2. x <- x_i / (std_G(x) + 10^-6)                             group_scale(eps=1e-06)
        3. x <- x_i at every sampled token                           to_tokens()
    """
    weighted = algorithm.advantage is not None and "weight" in run_advantage(algorithm.advantage).makes
    chain = () if algorithm.advantage is None else tuple(_links(algorithm.advantage))
    parts = [*chain, *algorithm.losses.values(), *([] if algorithm.filter is None else [algorithm.filter])]
    notes = {note.name: note for part in parts for note in _notes(part)}
    fields = reads(algorithm)
    return Explanation(
        steps=_steps(chain),
        losses={
            role: _with_definitions(loss, weighted, algorithm.divergence) for role, loss in algorithm.losses.items()
        },
        filter="" if algorithm.filter is None else call_text(node_of(algorithm.filter)),
        required=tuple(sorted(fields.required)),
        optional=tuple(sorted(fields.optional - fields.required)),
        pieces=tuple(notes.values()),
    )


def _with_definitions(loss: Loss, weighted: bool, divergence: Divergence | None) -> str:
    context = {} if divergence is None else {"divergence": divergence_between(**asdict(divergence))}
    writer = Writer(weighted, context)
    formula = writer.formula(loss)
    return DEFINED.join([formula, *writer.definitions])


def node_of(piece: Any) -> Node:
    """The function that made a piece, and its arguments as far as the piece uses them."""
    outer, *others = _functions_of(piece)
    function = _made_within(outer)
    name = name_of(function)
    variables = _variables(function)
    for other in (outer, *others):
        variables = _variables(other) | variables
    fields = zip(getattr(piece, "_fields", ()), piece, strict=True) if isinstance(piece, tuple) else ()
    variables = {k: x for k, x in fields if type(x) in (int, float)} | variables  # fields that no function closes over
    module = sys.modules.get(getattr(function, "__module__", ""))
    made_by = getattr(module, name, None)
    if not callable(made_by) or inspect.isclass(made_by):
        return Node(name, variables, None)
    if made_by.__annotations__.get("return") in ("Algorithm", Algorithm):  # an inner function of a recipe
        code = function.__code__
        return Node(f"the function at {os.path.basename(code.co_filename)}:{code.co_firstlineno}", {}, None)
    if not hasattr(function, "__code__") or "<locals>" not in function.__qualname__:
        return Node(name, {}, made_by)
    names = inspect.signature(made_by).parameters
    own = {key: variables[key] for key in names if key in variables}
    rest = {key: value for key, value in variables.items() if key not in own}
    return Node(name, own | rest, made_by)


def _functions_of(piece: Any) -> list[Any]:
    """The functions of a piece that close over its arguments, the one that names the piece first."""
    if isinstance(piece, Advantage):
        update = getattr(piece.update, "of", piece.update)
        return [update, *([piece.init] if name_of(piece.init) == name_of(update) else [])]
    if isinstance(piece, Loss):
        return [piece.numerators]
    if isinstance(piece, tuple) and hasattr(piece, "_fields") and not hasattr(piece, "of"):
        functions = [x for x in reversed(piece) if callable(x)]  # a reduction or another record of functions
        return sorted(functions, key=lambda x: "<locals>" not in x.__qualname__)
    return [getattr(piece, "of", piece)]


def _made_within(function: Any) -> Any:
    """The function of the public factory if it builds its piece with a private factory."""
    if not name_of(function).startswith("_"):
        return function
    inner = [x for x in _variables(function).values() if "<locals>" in getattr(x, "__qualname__", "")]
    return next((x for x in inner if not name_of(x).startswith("_")), function)


def _variables(function: Any, depth: int = 2) -> dict[str, Any]:
    """Variables that a function closes over, those of inner functions of the same factory included."""
    variables: dict[str, Any] = {}
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None)
    if code is None or cells is None:
        return variables
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        variables[name] = value
        inner = getattr(value, "__qualname__", "")
        if depth and "<locals>" in inner and inner.split(".")[0] == function.__qualname__.split(".")[0]:
            variables = _variables(value, depth - 1) | variables
    return variables


def _links(piece: Advantage) -> Iterator[Advantage]:
    """The pieces of a chain in order, with nested chains flattened."""
    if not piece.pieces:
        yield piece
    for link in piece.pieces:
        yield from _links(link)


def _is_piece(value: Any) -> bool:
    if isinstance(value, tuple):
        return hasattr(value, "_fields") and any(map(callable, value))
    return callable(value) and not inspect.isclass(value)


def call_text(node: Node) -> str:
    """A piece as the call that makes it, as far as its arguments are known."""
    if node.made_by is None:
        return node.name
    names = inspect.signature(node.made_by).parameters
    given = [f"{name}={_argument(node.arguments[name])}" for name in names if name in node.arguments]
    return f"{node.name}({', '.join(given)})"


def _argument(value: Any) -> str:
    if _is_piece(value):
        return call_text(node_of(value))
    if isinstance(value, tuple) and any(map(_is_piece, value)):
        return ", ".join(_argument(item) for item in value)
    return repr(value)


def _steps(chain: Iterable[Advantage]) -> tuple[ChainStep, ...]:
    steps: list[ChainStep] = []
    signal = "row"
    weighted = False
    for piece in chain:
        node = node_of(piece)
        writer = Writer(context={"signal": signal, "weighted": str(weighted), "first": str(not steps)})
        entry = STEPS.get(node.name)
        formula = None if entry is None else writer.filled(entry, node)
        step = ChainStep(formula or "", tuple(writer.definitions), _summary(node), call=call_text(node))
        weighted = weighted or any(text.startswith("w_t" + ARROW) for text in step.statements)
        signal = "token" if node.name in TO_TOKENS else signal
        steps.append(step)
    return tuple(steps)


def _notes(piece: Any) -> Iterator[PieceNote]:
    """Notes on a piece and on its inner pieces."""
    node = node_of(piece)
    if not node.name.startswith("_") and node.name not in JOINS:
        text = inspect.getdoc(node.made_by) or ""
        part = re.search(r"\bReferences?: (.*?)(?=\n\n|\n\S|\Z)", text, re.DOTALL)
        yield PieceNote(node.name, _summary(node), tuple(dict.fromkeys(ADDRESS.findall(part[1] if part else ""))))
    for value in node.arguments.values():
        for item in value if isinstance(value, tuple) and not _is_piece(value) else (value,):
            if _is_piece(item) and getattr(item, "__module__", "").split(".")[0] != "torch":
                yield from _notes(item)


def _summary(node: Node) -> str:
    """First sentence of a piece's docstring."""
    text = (inspect.getdoc(node.made_by) or "") if node.made_by is not None else ""
    return re.sub(r"\s+", " ", text.partition("\n\n")[0]) or f"{node.name}, which has no docstring"


JOINS = ("add", "scale", "weighted", "reduce", "sum_losses", "restrict", "times_ratio", "chain", "every")


class Writer:
    """Formulas of pieces, composed from the formulas of their parts.

    Args:
      weighted: whether the advantage chain makes importance weights.
      context: values that formulas may read besides the arguments of their pieces.
    """

    def __init__(self, weighted: bool = False, context: Mapping[str, str] | None = None):
        self._has_weights = weighted
        self._context = context or {}
        self.definitions: list[str] = []

    def formula(self, piece: Any) -> str:
        """LaTeX of a loss, a term, a ratio or another piece."""
        node = node_of(piece)
        joined = getattr(self, f"_{node.name}", None) if node.name in JOINS else None
        if joined is not None:
            return joined(node.arguments)
        entry = FORMULAS.get(node.name) or STEPS.get(node.name)
        text = None if entry is None else self.filled(entry, node)
        return text if text is not None else self._as_call(node)

    def filled(self, entry: Formula, node: Node) -> str | None:
        """A formula with the arguments filled in; None if one of them is unknown."""
        defaults = _defaults(node)
        values: dict[str, Any] = dict(self._context)
        for name, value in {**defaults, **node.arguments}.items():
            before = list(self.definitions)
            values[name] = None if value is None else self._value(value)
            if node.made_by is not None and name not in inspect.signature(node.made_by).parameters:
                self.definitions = before  # belongs to an inner function that has only a part of the arguments
        try:
            if callable(entry):
                text = entry(values)
            else:
                text = PLACEHOLDERS.sub(lambda match: match[0] if match[1] == "L" else str(values[match[1]]), entry)
        except KeyError:
            return None
        text, *definitions = text.split(" ; ")
        self.definitions += [x for x in definitions if x not in self.definitions]
        return text

    def _value(self, value: Any) -> str:
        if _is_piece(value):
            return self.formula(value)
        if isinstance(value, (tuple, list)):
            return ", ".join(map(self._value, value))
        if not isinstance(value, float):
            return str(value)
        digits, _, power = f"{value:g}".partition("e")
        if not power:
            return digits
        return ("" if digits == "1" else rf"{digits} \cdot ") + f"10^{{{int(power)}}}"

    def _as_call(self, node: Node) -> str:
        simple = {name: x for name, x in node.arguments.items() if isinstance(x, (bool, int, float, str))}
        inside = ", ".join(rf"\mathrm{{{_escaped(name)}}} = {_escaped(self._value(x))}" for name, x in simple.items())
        return rf"\operatorname{{{_escaped(node.name)}}}({inside})"

    def _reduce(self, a: Mapping[str, Any]) -> str:
        node = node_of(a["reduction"])
        entry = FORMULAS.get(node.name)
        frame = None if entry is None else self.filled(entry, node)
        term = self.formula(a["term"])
        inside = rf"\left[ {term} \right]" if is_sum(term) else term
        return rf"{self._as_call(node)} {inside}" if frame is None else frame.replace("<L>", inside)

    def _sum_losses(self, a: Mapping[str, Any]) -> str:
        return SUMMAND.join(self.formula(loss) for loss in a["losses"])

    def _restrict(self, a: Mapping[str, Any]) -> str:
        loss = self.formula(a["loss"])
        tokens = a["which"].__name__.replace("_", r"\ ") if "which" in a else "selected"
        return rf"{f'({loss})' if SUMMAND in loss else loss} \operatorname{{over}} \mathrm{{{tokens}}}"

    def _add(self, a: Mapping[str, Any]) -> str:
        text = " + ".join(self.formula(term) for term in a["terms"])
        return text.replace("+ -", "- ")

    def _scale(self, a: Mapping[str, Any]) -> str:
        term = self.formula(a["term"])
        return term if a["factor"] == 1 else with_factor(self._value(a["factor"]), term)

    def _weighted(self, a: Mapping[str, Any]) -> str:
        text = self.formula(a["term"])
        return with_factor("w_t", text) if self._has_weights else text

    def _times_ratio(self, a: Mapping[str, Any]) -> str:
        return f"{self.formula(a['ratio'])} {grouped(self.formula(a['term']))}"


def _defaults(node: Node) -> dict[str, Any]:
    """Defaults of the arguments that a piece does not close over."""
    if node.made_by is None:
        return {}
    parameters = inspect.signature(node.made_by).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def _escaped(text: str) -> str:
    return text.replace("_", r"\_")


def _wrapped(text: str, indent: str) -> list[str]:
    further = indent + "  "
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=further, break_long_words=False)


def _step_lines(number: int, step: ChainStep) -> list[str]:
    statement, *definitions = step.statements or [step.sentence]
    *before, last = _wrapped(f"{number}. {plain(statement) if step.formula else statement}", "  ")
    if len(last) > FORMULA_WIDTH + 6:
        before = [*before, last]
        last = ""
    line = f"{last:<{FORMULA_WIDTH + 6}} {step.call}"
    if len(line) > CALL_WIDTH:
        before = [*before, last] if last else before
        line = f"{step.call:>{CALL_WIDTH}}"
    return [*before, line, *_definition_lines(definitions, "       ")]


def _definition_lines(definitions: Iterable[str], indent: str) -> list[str]:
    texts = ((("and " if ARROW in text else "with ") + plain(text)) for text in definitions)
    return [line for text in texts for line in _wrapped(text, indent)]
