"""One compiled layer serves training, scoring and decoding of every size without being compiled again."""

import logging

import pytest
import torch
from paged_rows import Rows

from funrl import trees
from funrl.batch import Batch
from funrl.models import Config, compile_layer, decoder_model, place

CONFIG = Config(vocab=31, embed=16, layers=3, heads=4, kv_heads=2, head=6, mlp=24)
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
    layer = compile_layer(MODEL, "on")
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    with caplog.at_level(logging.INFO, "funrl.models.compile"):
        for packed in (False, True):
            _step(params, 4, 12, packed, layer)
    warm = counts["unique_graphs"]
    logged = [r.getMessage() for r in caplog.records]
    assert warm > before and len(logged) == warm - before
    assert "compiled one of 3 layers to train 4x12x16 in" in logged[0]
    for rows, length, packed in ((5, 19, False), (3, 30, True), (8, 7, False), (2, 10, True)):
        got = _step(params, rows, length, packed, layer)
        expected = _step(params, rows, length, packed, None)
        for a, b in zip(got, expected, strict=True):
            assert (a - b).abs().max() < 2e-5 * (1 + b.abs().max())
    assert counts["unique_graphs"] == warm
