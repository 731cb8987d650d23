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


class WatchedInputs:
    """Inputs of a piece, with a copy of their values.

    Values are compared, not versions: a piece may also write through a tensor that shares memory with an input, such as
    the result of `detach` or `numpy`.
    """

    def __init__(self, batch: Batch | None = None, others: Mapping[str, Any] | None = None):
        fields = {} if batch is None else as_dict(batch)
        self._inputs = {**(others or {}), **{f"batch.{name}": x for name, x in fields.items()}}
        with torch.no_grad():
            self._before = {name: [x.clone() for x in _tensors(tree)] for name, tree in self._inputs.items()}

    def changed(self) -> str | None:
        """The name of the first input that has changed; None if none has."""
        for name, tree in self._inputs.items():
            tensors = _tensors(tree)
            before = self._before[name]
            if len(tensors) != len(before) or not all(map(_same, tensors, before)):
                return name
        return None

    def put_back(self) -> None:
        """Restore the values and shapes of the inputs."""
        for name, tree in self._inputs.items():
            for x, y in zip(_tensors(tree), self._before[name], strict=False):
                if not _same(x, y):
                    x.data = y.clone()


def guarded(
    what: str, run: Callable[[], Result], batch: Batch | None = None, others: Mapping[str, object] | None = None
) -> Result:
    """Call `run`, check that it did not change its inputs, and return its result.

    Args:
      what: name of the piece, for error messages.
      batch, others: its inputs; trees of tensors by name.

    Raises:
      PieceError: it changed one of them; names the input and the user's line.
    """
    inputs = WatchedInputs(batch, others)
    out = run()
    changed = inputs.changed()
    if changed is None:
        return out
    inputs.put_back()
    place = _place_of_change(run, inputs)
    inputs.put_back()
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


def defined_at(function: object) -> str:
    """The location of a user's function, as " (FILE:LINE)"; "" for one of this library."""
    code = getattr(_inner_function(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None and is_own(code) else ""


def described(x: object) -> str:
    """Describe a value for an error: a function by its name, a tensor by its shape."""
    if x is None:
        return "None"
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)}"
    return f"the function {name_of(x)}" if callable(x) else f"a {type(x).__name__}"


def name_of(piece: object) -> str:
    """The name of the factory that made a piece, or of the function that it is."""
    function = _of(piece)
    return getattr(function, "__qualname__", type(piece).__name__).split(".<locals>")[0]


def _of(piece: object) -> Any:
    """The function that an advantage piece was made from; any other piece is that function itself."""
    function = getattr(piece, "update", piece) if isinstance(piece, tuple) else piece
    return getattr(function, "of", function)


def _inner_function(piece: object) -> Any:
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


def _place_of_change(run: Callable[[], object], inputs: WatchedInputs) -> str | None:
    """FILE:LINE and text of the user's line that changes an input of `run`; None if no user line does."""
    tracer = _Tracer(inputs)
    former = sys.gettrace()
    sys.settrace(tracer)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(former)
    return tracer.place


def _tensors(tree: object) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [x for x in trees.leaves(tree) if isinstance(x, Tensor)]


def _same(x: Tensor, y: Tensor) -> bool:
    x = x.detach()
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if torch.equal(x, y):
        return True
    return bool(((x == y) | ((x != x) & (y != y))).all())  # NaN equals NaN here


class _Tracer:
    """A tracer that finds the user's line after which an input has changed, however it was written to.

    Attributes:
      place: FILE:LINE and text of the line; None: no such user line.
    """

    def __init__(self, inputs: WatchedInputs):
        self.inputs = inputs
        self.place = None
        self.line = ("", 0)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace the lines of the user's functions."""
        if not is_own(frame.f_code):
            return None
        if self.place is None and event != "call" and self.line[0] and self.inputs.changed() is not None:
            self.place = _written(*self.line)
        line_frame = frame.f_back if event == "return" and frame.f_back is not None else frame
        self.line = (line_frame.f_code.co_filename, line_frame.f_lineno)
        return self
