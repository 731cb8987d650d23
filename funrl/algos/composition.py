"""The composition of an algorithm, read from its pieces: the calls that made them.

A piece is a closure of the function that made it, so its name and its arguments are known without a registry, also
those of a user's own piece. `print(grpo(kl_coef=0.1))` shows the composition.
"""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from funrl.algos.guarding import name_of

WIDTH = 110  # characters of a line


class PieceCall(NamedTuple):
    """A piece as the call that made it.

    Attributes:
      name: name of the function that made it, or of the piece itself if that is a function.
      arguments: name -> value of the arguments that the piece uses.
      made_by: the function that made it; None: unknown.
    """

    name: str
    arguments: Mapping[str, Any]
    made_by: Callable[..., Any] | None

    @property
    def joins(self) -> bool:
        """True if it only joins other pieces, as `add` does."""
        return getattr(self.made_by, "__module__", "") == f"{__package__}.core" and self.name in JOINS


def _sum(terms: tuple[Any, ...]) -> str:
    texts = [expression(term) for term in terms]
    return texts[0] if len(texts) == 1 else f"({' + '.join(texts)})"


def _product(factor: float, term: Any) -> str:
    return expression(term) if factor == 1 else f"{factor:g} * {expression(term)}"


JOINS: dict[str, Callable[[Mapping[str, Any]], str]] = {  # texts of pieces that join others
    "add": lambda arguments: _sum(arguments["terms"]),
    "scale": lambda arguments: _product(arguments["factor"], arguments["term"]),
    "reduce": lambda arguments: f"{expression(arguments['reduction'])} of {expression(arguments['term'])}",
    "sum_losses": lambda arguments: " + ".join(map(expression, arguments["losses"])),
}


def composition_text(algorithm: Any) -> str:
    """The advantage chain, the losses and the filter of an `Algorithm`, as the calls that made them.

    Example:
      >>> from funrl.algos import grpo
      >>> print(composition_text(grpo(kl_coef=0.0)).partition("loss of")[0].rstrip())
      advantage, from the score of each row:
        1. group_center()
        2. group_scale(eps=1e-06)
        3. to_tokens()
    """
    lines = []
    if algorithm.advantage is not None:
        lines.append("advantage, from the score of each row:")
        for number, piece in enumerate(chain_links(algorithm.advantage), 1):
            lines += _wrapped(f"{number}. {expression(piece)}")
    for role, loss in algorithm.losses.items():
        lines += [f"loss of {role}:", *_wrapped(expression(loss))]
    if algorithm.divergence is not None:
        lines += ["divergence:", *_wrapped(repr(algorithm.divergence))]
    if algorithm.filter is not None:
        lines += ["rows that are trained on:", *_wrapped(expression(algorithm.filter))]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)


def chain_links(piece: Any) -> Iterator[Any]:
    """Yield the pieces of an advantage chain in order, with nested chains flattened."""
    if not piece.pieces:
        yield piece
    for link in piece.pieces:
        yield from chain_links(link)


def expression(value: Any) -> str:
    """A piece as the call that makes it, as far as its arguments are known; other values as Python writes them."""
    if isinstance(value, tuple) and not is_piece(value) and any(map(is_piece, value)):
        return ", ".join(map(expression, value))
    if not is_piece(value):
        return repr(value)
    call = piece_call(value)
    if call.joins:
        return JOINS[call.name](call.arguments)
    if call.made_by is None:
        return call.name
    parameters = inspect.signature(call.made_by).parameters
    names = [name for name in parameters if name in call.arguments]
    # A piece that another factory made of the arguments, such as the estimate of a KL.
    names += [
        name
        for name, inner in call.arguments.items()
        if name not in parameters and is_piece(inner) and piece_call(inner).name != call.name
    ]
    return f"{call.name}({', '.join(f'{name}={expression(call.arguments[name])}' for name in names)})"


def is_piece(value: Any) -> bool:
    """True for a function and for a record of functions."""
    if isinstance(value, tuple):
        return hasattr(value, "_fields") and any(map(callable, value))
    return callable(value) and not inspect.isclass(value)


def piece_call(piece: Any) -> PieceCall:
    """The function that made a piece, and its arguments as far as the piece uses them."""
    functions = _functions_of(piece)
    function = _public_inner(functions[0])
    name = name_of(function)
    variables = {}
    for closure in (*reversed(functions), function):
        variables |= _variables(closure)
    fields = zip(getattr(piece, "_fields", ()), piece, strict=True) if isinstance(piece, tuple) else ()
    variables = {k: x for k, x in fields if type(x) in (int, float)} | variables  # fields that no function closes over
    module = sys.modules.get(getattr(function, "__module__", ""))
    made_by = getattr(module, name, None)
    if not callable(made_by) or inspect.isclass(made_by):
        return PieceCall(name, variables, None)
    returned = made_by.__annotations__.get("return")
    if getattr(returned, "__name__", returned) == "Algorithm":  # an inner function of a recipe
        code = function.__code__
        return PieceCall(f"the function at {os.path.basename(code.co_filename)}:{code.co_firstlineno}", {}, None)
    if "<locals>" not in function.__qualname__:  # the piece is that function itself
        return PieceCall(name, {}, made_by)
    return PieceCall(name, variables, made_by)


def _functions_of(piece: Any) -> list[Any]:
    """The functions of a piece that one factory made, and that close over its arguments."""
    if not (isinstance(piece, tuple) and hasattr(piece, "_fields")) or hasattr(piece, "of"):
        return [getattr(piece, "of", piece)]
    functions = [getattr(x, "of", x) for x in reversed(piece) if callable(x)]
    functions.sort(key=lambda x: "<locals>" not in x.__qualname__)
    return [x for x in functions if name_of(x) == name_of(functions[0])]


def _public_inner(function: Any) -> Any:
    """The function of the public factory, where that one builds its piece with a private factory."""
    inner = _variables(function).values() if name_of(function).startswith("_") else ()
    public = (x for x in inner if "<locals>" in getattr(x, "__qualname__", "") and not name_of(x).startswith("_"))
    return next(public, function)


def _variables(function: Any, depth: int = 2) -> dict[str, Any]:
    """Variables that a function closes over, those of inner functions of the same factory included."""
    variables: dict[str, Any] = {}
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None)
    if code is None or cells is None:
        return variables
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
        inner = getattr(variables[name], "__qualname__", "")
        if depth and "<locals>" in inner and name_of(variables[name]) == name_of(function):
            variables = _variables(variables[name], depth - 1) | variables
    return variables
