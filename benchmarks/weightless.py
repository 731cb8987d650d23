"""A backend of the native engine without weights and pages, for benchmarks of what the host does around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from funrl import trees
from funrl.models import Config, decoder_config
from funrl.models.lora import Adapter


class Weightless:
    """The part of a backend beside `forward` and `draw`; it does nothing."""

    lanes = 1

    def load(self, params: trees.Tree) -> None: ...

    def drop(self) -> None: ...

    def rest(self) -> None: ...

    def held(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def load_adapter(self, number: int, adapter: Adapter | None) -> None: ...

    def held_adapter(self, number: int) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    cell_bytes = 0

    def resize(self, pages: int, cells: int) -> None: ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def copy_cells(self, copies: Sequence[tuple[int, int]]) -> None: ...


def smallest_config(vocab: int, max_positions: int) -> Config:
    """Sizes of a model that nothing is computed with."""
    return decoder_config(
        vocab=vocab, embed=2, layers=1, heads=1, kv_heads=1, head=2, mlp=1, max_positions=max_positions
    )
