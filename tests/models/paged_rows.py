"""Rows of tokens through a cache of pages: how tests of models decode."""

import torch

from funrl.compiled_kernels.paged_attention import paging_of
from funrl.mesh.mesh import SINGLE
from funrl.models import Inputs

PAGE = 4  # tokens


class Rows:
    """Rows [B, T] of a model; each pass computes some next tokens of them. Row r has pages r, r + B, r + 2B, ..."""

    def __init__(self, model, params, tokens_BT, mesh=SINGLE, layer=None):
        self.model, self.params, self.tokens_BT, self.mesh, self.layer = model, params, tokens_BT, mesh, layer
        rows, length = tokens_BT.shape
        pages = -(-length // PAGE)
        dtype = next(iter(params.values())).dtype
        self.cells = bool(model.cell_bytes(mesh, dtype))
        self.cache = model.init_cache(mesh, rows * pages, PAGE, dtype, cells=rows * self.cells)
        self.table = torch.arange(rows * pages).view(pages, rows).T.contiguous()
        self.ends = [0] * rows

    def pass_of(self, counts, rows=None):
        """Hidden states [N, D] of the next tokens of some rows, row by row."""
        rows = range(len(self.ends)) if rows is None else rows
        parts = []
        for r, count in zip(rows, counts, strict=True):
            parts.append(self.tokens_BT[r, self.ends[r] : self.ends[r] + count])
            self.ends[r] += count
        paging = paging_of(counts, [self.ends[r] for r in rows], self.table[list(rows)], PAGE)
        cells = torch.tensor(list(rows)) if self.cells else None
        inputs = Inputs(torch.cat(parts)[None], paging=paging, cells_S=cells)
        hidden, self.cache, _ = self.model.apply(self.params, inputs, self.mesh, self.cache, self.layer)
        return hidden[0]
