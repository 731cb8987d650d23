"""Log-probabilities and grouped products in the forms that a device decides between: what each form costs by itself."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from gpu_parts.kernels import SMALL, Case, Sizes, both_ways, grouped, logprob, measured, random
from gpu_parts.rows import Bench, Rows

from funrl.compiled_kernels.grouped_linear import grouped_linear
from funrl.compiled_kernels.linear_logprob import project
from funrl.compiled_kernels.logit_rows import operators

CHUNK = 1024


def logprob_rows(bench: Bench) -> Rows:
    """Log-probabilities by blocks of logits that stay in the L2, and by all columns at a time.

    Blocks are worth it where their products take less than 8 % longer than those of all columns.
    """
    sizes = SMALL if bench.small else Sizes()
    chunk = min(CHUNK, sizes.short)
    blocks = operators.l2_blocks(bench.device) or operators.ColumnBlocks(numbers=2 * 128 * 256, processors=1)
    forms = {
        "all columns": None,
        f"blocks of {chunk:,} x {blocks.width(chunk, sizes.vocab):,}": blocks,
    }
    for form, taken in forms.items():
        yield measured(bench, f"products of logits, {form}", lambda on, taken=taken: products(on, sizes, taken))
        with mock.patch.object(operators, "l2_blocks", lambda device, taken=taken: taken):
            for name, make in both_ways(f"linear log-prob, {form}", lambda on: logprob(on, sizes)).items():
                yield measured(bench, name, make)


def products(on: torch.device, sizes: Sizes, blocks: operators.ColumnBlocks | None) -> Case:
    """Logits in float32, each chunk in memory of its own."""
    hidden = random(on, sizes.short, sizes.embed).detach()
    unembed = random(on, sizes.vocab, sizes.embed).detach()
    chunk = min(CHUNK, sizes.short)
    width = sizes.vocab if blocks is None else blocks.width(chunk, sizes.vocab)

    def run() -> None:
        for unembed_BD in unembed.split(width):
            for hidden_CD in hidden.split(chunk):
                project(hidden_CD, unembed_BD)

    return Case(run, (hidden, unembed))


def grouped_rows(bench: Bench) -> Rows:
    """Grouped products: of gate and up apart and as one, with rows of no expert, and with a copied weight."""
    sizes = SMALL if bench.small else Sizes()

    def transposed(on: torch.device, copied: bool) -> Case:
        """Product of the gradient of rows, whose weight is read transposed."""
        _, (x, weight, ends) = grouped(on, sizes)
        grad = random(on, len(x), sizes.expert_mlp).detach()
        other = weight.detach().transpose(1, 2)
        return Case(lambda: grouped_linear(grad, other.contiguous() if copied else other, ends), (grad, weight, ends))

    def gate_up(on: torch.device, parts: int) -> tuple[Callable[[], torch.Tensor], tuple]:
        """Gate and up by some products, side by side or in halves of one result."""
        _, (x, weight, ends) = grouped(on, sizes)
        weights = [random(on, *weight.shape, scale=sizes.embed**-0.5) for _ in range(2)]
        if parts == 1:
            weights = [torch.cat([w.detach() for w in weights], 1).requires_grad_()]

        def compute() -> torch.Tensor:
            gate, up = (
                [grouped_linear(x, w, ends) for w in weights]
                if parts == 2
                else grouped_linear(x, weights[0], ends).chunk(2, 1)
            )
            return gate * up

        return compute, (x, *weights, ends)

    def half_full(on: torch.device) -> tuple[Callable[[], torch.Tensor], tuple]:
        """Only every second row is an expert's."""
        _, (x, weight, ends) = grouped(on, sizes)
        ends = ends // 2
        return lambda: grouped_linear(x, weight, ends), (x, weight, ends)

    cases: dict[str, Callable[[torch.device], Case]] = {
        "gradient of rows, weight as it is": lambda on: transposed(on, copied=False),
        "gradient of rows, weight copied": lambda on: transposed(on, copied=True),
        **both_ways("one product of experts", lambda on: grouped(on, sizes)),
        **both_ways("half of the rows without an expert", half_full),
        **both_ways("gate and up apart", lambda on: gate_up(on, 2)),
        **both_ways("gate and up as one product", lambda on: gate_up(on, 1)),
    }
    for name, make in cases.items():
        yield measured(bench, name, make)
