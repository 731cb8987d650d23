"""The gated delta rule and its convolution over a row that ranks share, against one rank's, in float64."""

import functools

import pytest
import torch
from test_gated_delta import HEADS, KEY_HEADS, M, N

from funrl.compiled_kernels.delta_rule import gated_delta as kernel
from funrl.compiled_kernels.delta_rule import split_rows
from funrl.mesh.collectives import all_gather
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse

RANKS = 4
CHUNK = 8
# Lengths of the sequences of a row; ranks begin at multiples of a quarter of it.
ROWS = {
    "several chunks a rank": [RANKS * (2 * CHUNK + 7)],
    "borders within parts": [5, 29, 1, 5, 8, 24],
    "borders at those of parts": [10, 20, 10],
    "fewer tokens a rank than the convolution spans": [5, 3],
    "a sequence a token": [1] * 8,
}
FAULTS = ("a part's own transition is left out", "sequences go on from those before", "inputs before are 0")


def _inputs(lengths, width=4):
    """Queries, keys, values, decays, betas, inputs of the convolution and filters; and the numbers of the sequences."""
    generator = torch.Generator().manual_seed(0)
    T = sum(lengths)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(1, T, KEY_HEADS, N), dim=-1) for _ in range(2))
    gates = -0.01 * normal(1, T, HEADS).exp(), (normal(1, T, HEADS) - 3).sigmoid()  # which forget little
    inputs = [q, k, normal(1, T, HEADS, M), *gates, normal(1, T, 3)]
    return inputs, normal(3, width), torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def _gradients(rule, convolution, inputs, weight, weights):
    """Results of both functions, and the gradients of their inputs and of the filters."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, weight)]
    out = rule(*leaves[:5]), convolution(*leaves[5:])
    total = sum((x * w).sum() for x, w in zip(out, weights, strict=True))
    return [*(x.detach() for x in out), *torch.autograd.grad(total, leaves)]


def _weights(T):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, T, *shape, generator=generator, dtype=torch.float64) for shape in ((HEADS, M), (3,))]


def _alone(lengths, width=4):
    inputs, weight, segments = _inputs(lengths, width)
    rule = functools.partial(kernel.gated_delta_rule_reference, segments_BT=segments)
    convolution = functools.partial(kernel.causal_convolution_reference, segments_BT=segments)
    return _gradients(rule, convolution, inputs, weight, _weights(sum(lengths)))


def _break(fault):
    states = split_rows._states
    if fault == FAULTS[0]:
        split_rows._states = lambda ends, continues, value: states(
            ends.masked_fill(torch.arange(ends.shape[-1]) >= value, 0), continues, value
        )
    if fault == FAULTS[1]:
        split_rows._states = lambda ends, continues, value: states(ends, torch.ones_like(continues), value)
    if fault == FAULTS[2]:
        split_rows.all_gather = lambda x, mesh, axis, dim=0: all_gather(x, mesh, axis, dim) * (x.dim() != 3)
    return states


def _split(mesh, lengths, width=4, fault=None, dtype=torch.float64):
    """The same of a rank's part, gathered; the gradient of the filters is summed by adding those of all ranks."""
    inputs, weight, segments = _inputs(lengths, width)
    own = [x.chunk(RANKS, 1)[mesh.index("sequence")].to(dtype) for x in (*inputs, *_weights(sum(lengths)))]
    states = _break(fault)

    def rule(*heads):
        return split_rows.split_delta_rule(heads, segments, mesh)

    convolution = functools.partial(split_rows.split_convolution, segments_1T=segments, mesh=mesh)
    *tokens, filters = _gradients(rule, convolution, own[:6], weight.to(dtype), own[6:])
    split_rows._states, split_rows.all_gather = states, all_gather
    whole = [all_gather(x, mesh, "sequence", 1) for x in tokens]
    return [*whole, all_gather(filters.unsqueeze(0), mesh, "sequence").sum(0)]


CASES = [
    *((name, {}) for name in ROWS),
    ("borders within parts", {"width": 1}),
    ("several chunks a rank", {"fault": FAULTS[0]}),
    ("borders at those of parts", {"fault": FAULTS[1]}),
    ("borders within parts", {"fault": FAULTS[2]}),
    ("several chunks a rank", {"dtype": torch.float32}),
]


@pytest.mark.slow
@pytest.mark.gloo
def test_a_row_that_ranks_share_is_that_of_one_rank(monkeypatch):
    monkeypatch.setattr(kernel, "CHUNK_TOKENS", CHUNK)
    results = launch(lambda mesh: [_split(mesh, ROWS[name], **more) for name, more in CASES], parse("sp4"), "cpu")
    for (name, more), got in zip(CASES, results, strict=True):
        expected = _alone(ROWS[name], more.get("width", 4))
        gap = max(((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in zip(got, expected, strict=True))
        if "fault" in more:
            assert gap > 1e-2, (name, more)
        else:
            assert gap < (1e-5 if "dtype" in more else 1e-11), (name, more)
