"""The pass of a gated delta net in static shapes, against the one that goes sequence by sequence."""

import torch

from funrl.compiled_kernels.delta_rule.net_pass import DeltaInputs, delta_net_pass
from funrl.compiled_kernels.delta_rule.static_pass import static_delta_net_pass
from funrl.compiled_kernels.paged_attention import Paging, paging_of

K, N, H, M, WIDTH = 2, 8, 4, 6, 4
CHANNELS = 2 * K * N + H * M
PAGE = 16
SEQUENCES = [(37, 37, 3), (16, 48, 0), (5, 20, 2), (1, 33, 4)]  # new tokens, tokens with these, cell; cell 5 is spare


def rows_of_pages():
    """For each place of a row the number of the new token there, or -1, and its position; the cell of each row."""
    tokens, positions, cells = [], [], []
    first = 0
    for count, end, cell in SEQUENCES:
        for low in range(0, count, PAGE):
            filling = max(0, PAGE - (count - low))
            tokens.append([*range(first + low, first + low + PAGE - filling), *[-1] * filling])
            positions.append([*range(end - count + low, end - count + low + PAGE - filling), *[0] * filling])
            cells.append(cell)
        first += count
    tokens += [[-1] * PAGE] * 2
    positions += [[0] * PAGE] * 2
    return *(torch.tensor(x).flatten() for x in (tokens, positions)), torch.tensor([*cells, 5, 5])


def test_rows_of_pages_give_the_results_and_the_cells_of_whole_sequences():
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    counts, ends, cells = zip(*SEQUENCES, strict=True)
    per_token = numbers(sum(counts), CHANNELS), -numbers(sum(counts), H).abs(), numbers(sum(counts), H).sigmoid()
    filters = numbers(CHANNELS, WIDTH)
    whole = numbers(6, H, N, M), numbers(6, WIDTH - 1, CHANNELS)
    split = tuple(x.clone() for x in whole)
    table = torch.zeros(len(counts), 4, dtype=torch.int32)
    paging = paging_of(counts, ends, table, PAGE)
    want = delta_net_pass(DeltaInputs(*per_token, filters, K, N), whole, torch.tensor(cells), paging)

    tokens, positions, rows = rows_of_pages()
    held = tokens >= 0
    filled = (torch.where(held[:, None], x[tokens.clamp(min=0)], 0.5) for x in per_token)
    paging = Paging(positions, positions, table, *[positions[:0]] * 3)
    result = static_delta_net_pass(DeltaInputs(*filled, filters, K, N), split, rows, paging)
    assert (result[held] - want).abs().max() < 1e-13 < want.abs().max()
    for x, y in zip(split, whole, strict=True):
        assert (x[:5] - y[:5]).abs().max() < 1e-13
