"""Compilation of one layer, which then serves every depth of the model."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator

from funrl.models.equivalent_layer import EquivalentLayer
from funrl.models.model import Layer, Model
from funrl.models.remat import rematerialized

log = logging.getLogger(__name__)


def compile_layer(
    model: Model,
    mode: str = "auto",
    device: str = "cpu",
    note: Callable[[str], None] = log.info,
    remat: str = "none",
    backend: str | Callable = "inductor",
) -> Layer:
    """The layer of a model, compiled, to pass as `layer`.

    Row counts and lengths are dynamic and weights are not, so that after the first training batch, the first prefill
    and the first decode step nothing is compiled again; a size of 1 is a case of its own.

    Args:
      model: the model; others of the same architecture can use the layer too.
      mode: "on", "off" (the plain layer) or "auto", which compiles on CUDA and ROCm; on CPU a cold compile costs more
        than a short run gains. Layers of transformers' own code are not compiled.
      device: type of the device, such as "cuda".
      note: receives what was compiled and how long it took.
      remat: what the backward pass computes again, as `rematerialized` has it; of a compiled layer it is part of what
        is compiled.
      backend: torch.compile's.
    """
    layer = rematerialized(model.layer, remat)
    if is_compiled(model, mode, device):
        from funrl.models.compiling.compiled_layer import compiled_layer

        layer = compiled_layer(layer, note, backend, device)
    return layer if layer is model.layer else EquivalentLayer(model.layer, layer)


def is_compiled(model: Model, mode: str, device: str) -> bool:
    """True if `compile_layer` compiles the layer of a model; the arguments are its."""
    return mode != "off" and not model.abilities.code and (mode == "on" or device == "cuda")


class Compilations:
    """Compilations of the layers of a run: their number, and a remark on the first one that comes too late.

    Until `ahead` is entered each one is reported; while it is open they are only counted; after it only the first one
    is reported, as a step should have none.

    Attributes:
      variants: compiled so far in this process.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        """Begin without any; `note` receives the remarks."""
        self.variants = 0
        self._note = note

    def add(self, text: str) -> None:
        """Count a compilation; `text` describes it, as `compile_layer` does."""
        self.variants += 1
        log.info(text)
        self._note(text)

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Compile everything that is needed, for the duration of the context; then report number and seconds."""
        from funrl.models.compiling.compile_cache import graphs_compiled, graphs_found

        note = self._note
        self._note = _ignore
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        cached = graphs_found()
        total = cached + graphs_compiled()
        note(
            f"compiled {self.variants} variants of a layer in {took:.1f} s; {cached} of {total} graphs were in a cache"
        )
        self._note = functools.partial(self._report_late, note)

    def _report_late(self, note: Callable[[str], None], text: str) -> None:
        note(f"{text}, after the compile phase, which did not foresee it; further ones go to the log only")
        self._note = _ignore


def _ignore(text: str) -> None:
    """Leave a remark to the log."""
