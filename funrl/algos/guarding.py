"""Guards around a piece that runs on an example: it must not change its inputs; errors name the user's line."""

from __future__ import annotations

import contextlib
import linecache
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.metrics import PieceError
from funrl.batch import Batch, as_dict

Result = TypeVar("Result")
STANDARD = sysconfig.get_path("stdlib")
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), str(Path(np.__file__).parent))


def guarded(what: str, run: Callable[[], Result], batch: Batch, others: Mapping[str, Any] | None = None) -> Result:
    """Call `run`, check that it did not change its inputs, and return its result.

    Values are compared, not versions: a piece may also write through a tensor that shares memory with an input, such as
    the result of `detach` or `numpy`.

    Args:
      what: name of the piece, for error messages.
      batch, others: its inputs; trees of tensors by name.

    Raises:
      PieceError: it changed one of them; names the input and the user's line.
    """
    inputs = {**(others or {}), **{f"batch.{name}": x for name, x in as_dict(batch).items()}}
    with torch.no_grad():
        before = {name: [x.clone() for x in tensors] for name, tensors in _tensors(inputs).items()}
    out = run()
    changed = _changed(inputs, before)
    if changed is None:
        return out
    _put_back(inputs, before)
    place = _place_of_change(run, inputs, before)
    _put_back(inputs, before)
    where = "" if place is None else f" at {place}"
    raise PieceError(
        f"{what} changes its input {changed} in place{where}: later pieces would read changed values; make a new "
        "tensor (x - y instead of x.sub_(y), or x.clone() before writing to it)"
    )


def line_of(error: BaseException) -> str:
    """The user's line that an error comes from, as " in PIECE at FILE:LINE: SOURCE"; "" if there is none."""
    own = None
    trace = error.__traceback__
    piece = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_own(code):
            piece = piece or code.co_qualname.split(".<locals>")[0]
            own = _written(code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return "" if own is None else f" in {piece} at {own}"


def defined_at(function: Any) -> str:
    """The location of a user's function, as " (FILE:LINE)"; "" for one of this library."""
    code = getattr(_inner_function(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None and is_own(code) else ""


def described(x: Any) -> str:
    """Describe a value for an error: a function by its name, a tensor by its shape."""
    if x is None:
        return "None"
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)}"
    return f"the function {name_of(x)}" if callable(x) else f"a {type(x).__name__}"


def name_of(piece: Any) -> str:
    """The name of the factory that made a piece, or of the function that it is."""
    function = _of(piece)
    return getattr(function, "__qualname__", type(piece).__name__).split(".<locals>")[0]


def _of(piece: Any) -> Any:
    """The function that an advantage piece was made from; any other piece is that function itself."""
    function = getattr(piece, "update", piece) if isinstance(piece, tuple) else piece
    return getattr(function, "of", function)


def _inner_function(piece: Any) -> Any:
    """The function inside a piece, a partial or a decorator."""
    function = _of(piece)
    while True:
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            return function
        function = inner


def is_own(code: CodeType) -> bool:
    """True for the user's code: neither this library, its dependencies, nor Python itself."""
    file = code.co_filename
    if file.startswith("<frozen") or any(file.startswith(f"{folder}/") for folder in LIBRARIES):
        return False
    return not file.startswith(f"{STANDARD}/") or "/site-packages/" in file


def _written(file: str, line: int) -> str:
    """FILE:LINE and the text of the line."""
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"


def _place_of_change(
    run: Callable[[], Any], inputs: Mapping[str, Any], before: Mapping[str, list[Tensor]]
) -> str | None:
    """FILE:LINE and text of the user's line that changes an input of `run`; None if no user line does."""
    tracer = _Tracer(inputs, before)
    former = sys.gettrace()
    sys.settrace(tracer)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(former)
    return tracer.place


def _tensors(inputs: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    return {
        name: [tree] if isinstance(tree, Tensor) else [x for x in trees.leaves(tree) if isinstance(x, Tensor)]
        for name, tree in inputs.items()
    }


def _changed(inputs: Mapping[str, Any], before: Mapping[str, list[Tensor]]) -> str | None:
    """The name of the first input that has changed; None if none has."""
    for name, tensors in _tensors(inputs).items():
        if not all(_same(x.detach(), y) for x, y in zip(tensors, before[name], strict=True)):
            return name
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN equals NaN here


def _put_back(inputs: Mapping[str, Any], before: Mapping[str, list[Tensor]]) -> None:
    """Restore the values and shapes of the inputs."""
    for name, tensors in _tensors(inputs).items():
        for x, y in zip(tensors, before[name], strict=True):
            if not _same(x.detach(), y):
                x.data = y.clone()


class _Tracer:
    """A tracer that finds the user's line after which an input has changed, however it was written to.

    Attributes:
      place: FILE:LINE and text of the line; None: no such user line.
    """

    def __init__(self, inputs: Mapping[str, Any], before: Mapping[str, list[Tensor]]):
        self.inputs = inputs
        self.before = before
        self.place = None
        self.line = ("", 0)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace the lines of the user's functions."""
        if not is_own(frame.f_code):
            return None
        if self.place is None and event != "call" and self.line[0] and _changed(self.inputs, self.before) is not None:
            self.place = _written(*self.line)
        line_frame = frame.f_back if event == "return" and frame.f_back is not None else frame
        self.line = (line_frame.f_code.co_filename, line_frame.f_lineno)
        return self
