"""One compiled layer serves training, scoring and decoding of every size without being compiled again."""

import collections
import logging

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from paged_rows import Rows
from torch._dynamo.backends.common import aot_autograd

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.models import compile_layer, decoder_config, decoder_model, place, with_fields

pytestmark = pytest.mark.versions

CONFIG = decoder_config(vocab=31, embed=16, layers=3, heads=4, kv_heads=2, head=6, mlp=24)
MODEL = decoder_model(CONFIG)


def test_modes():
    for mode, device, compiles in (
        ("off", "cuda", False),
        ("auto", "cpu", False),
        ("auto", "cuda", True),
        ("on", "cpu", True),
    ):
        layer = compile_layer(MODEL, mode, device)
        assert callable(layer) and (layer is not MODEL.layer) == compiles


def _step(params, rows, length, packed, layer):
    """Everything that a training step does with the model: numbers to compare."""
    tokens = torch.randint(0, CONFIG.vocab, (rows, length), generator=torch.Generator().manual_seed(length))
    segments = (torch.arange(length) * 2 // length + 1).expand(rows, length) if packed else None
    placed, batch = place(MODEL, layer=layer), Batch(tokens=tokens, mask=None, segments=segments)

    def loss(p):
        return placed.token_scores(p, batch).logp.square().mean(), ()

    (value, _), grads = trees.value_and_grad(loss)(params)
    numbers = [value, *trees.leaves(grads)]
    with torch.no_grad():
        numbers.append(placed.token_scores(params, batch).logp)
        paged = Rows(MODEL, params, tokens, layer=layer)
        numbers.append(paged.pass_of([length - 3] * rows))  # prefill
        numbers.append(paged.pass_of([1] * rows))  # decode
        numbers.append(paged.pass_of([1] * (rows - 1) + [2]))  # and a chunk beside it
    return numbers


@pytest.mark.slow
def test_nothing_is_compiled_again_after_warm_up(caplog):
    torch._dynamo.reset()
    params = MODEL.init(torch.Generator().manual_seed(0))
    layer = compile_layer(MODEL, "on", backend="eager")  # what is compiled again is dynamo's matter alone
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    with caplog.at_level(logging.INFO, "funrl.models.compiling.compile"):
        for packed in (False, True):
            _step(params, 4, 12, packed, layer)
    warm = counts["unique_graphs"]
    logged = [r.getMessage() for r in caplog.records]
    assert warm > before and len(logged) == warm - before
    assert "compiled one of 3 layers to train 4x12x16 in" in logged[0]
    for rows, length, packed in ((5, 19, False), (3, 30, True)):
        got = _step(params, rows, length, packed, layer)
        expected = _step(params, rows, length, packed, None)
        for a, b in zip(got, expected, strict=True):
            assert (a - b).abs().max() < 2e-5 * (1 + b.abs().max())
    assert counts["unique_graphs"] == warm


QWEN = with_fields(CONFIG, family="qwen3", qk_norm=True, head=4)


def counted(graphs):
    """A backend that computes as eager mode does, and counts the operators of every graph's forward and backward."""

    def compiler(graph, _):
        graphs.append(collections.Counter(str(node.target).removesuffix(".default") for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)


EXACT = library_problem() is None
PRODUCT = "funrl.exact_linear" if EXACT else "aten.mm"
NORM = "funrl.exact_norm" if EXACT else "aten.rsqrt"


def packed_row(lengths, padding):
    """A packed row of sequences with padding behind them."""
    T, ends = sum(lengths) + padding, torch.tensor([0, *lengths]).cumsum(0).int()
    segments = torch.bucketize(torch.arange(T), ends[1:].long(), right=True) + 1
    segments = torch.where(torch.arange(T) < ends[-1], segments, 0)[None]
    positions = torch.cat([torch.arange(n) for n in (*lengths, padding)])[None]
    tokens = torch.randint(0, CONFIG.vocab, (1, T), generator=torch.Generator().manual_seed(T))
    return Batch(tokens=tokens, mask=segments > 0, segments=segments, positions=positions, offsets=ends)


def gradients(model, params, row, layer):
    # As runs do with a compiled layer, which would have one more variant for rows with beginnings in common.
    placed = place(model, dtype=torch.float64, layer=layer, shares_prefixes=False)

    def loss(p):
        return placed.token_scores(p, row).logp.square().sum(), ()

    (value, _), grads = trees.value_and_grad(loss)(params)
    return [value, *trees.leaves(grads)]


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_a_packed_layer_is_compiled_once_and_computes_again_what_it_should(remat):
    """Gradients are eager mode's in float64; for rows of other lengths, and at every depth, nothing is compiled."""
    torch._dynamo.reset()
    model, graphs = decoder_model(QWEN), []
    params = model.init(torch.Generator().manual_seed(0), torch.float64)
    layer = compile_layer(model, "on", remat=remat, backend=counted(graphs))
    for lengths, padding in (((5, 9, 2), 4), ((20, 1, 2), 1)):
        row = packed_row(lengths, padding)
        for got, want in zip(gradients(model, params, row, layer), gradients(model, params, row, None), strict=True):
            assert (got - want).abs().max() < 1e-9 * (1 + want.abs().max())
    forward, backward = graphs  # one of each
    assert forward[PRODUCT] == 7 and forward["funrl.varlen_attention"] == 1
    # What is sent back through 7 products are 14; the last of them need not be computed again.
    again = 6 if remat == "full" else 0
    assert backward["aten.mm"] == 2 * forward[PRODUCT] + (again if PRODUCT == "aten.mm" else 0)
    assert backward[PRODUCT] == again or PRODUCT == "aten.mm"
    assert backward["funrl.varlen_attention"] == (1 if remat == "full" else 0)
    assert backward[NORM] == (4 if remat == "full" else backward[NORM])
