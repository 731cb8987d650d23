"""One compiled layer serves training, scoring and decoding of every size without being compiled again."""

import logging

import pytest
import torch

from funrl import trees
from funrl.models import decoder
from funrl.models.compile import compile_layer
from funrl.models.config import Config
from funrl.models.scores import token_scores

CONFIG = Config(vocab=31, embed=16, layers=3, heads=4, kv_heads=2, head=6, mlp=24)


def test_modes():
    assert compile_layer(CONFIG, "off", "cuda") is None
    assert compile_layer(CONFIG, "auto", "cpu") is None
    assert callable(compile_layer(CONFIG, "auto", "cuda"))
    assert callable(compile_layer(CONFIG, "on", "cpu"))


def _step(params, rows, length, packed, layer):
    """Everything that a training step does with the model: numbers to compare."""
    tokens = torch.randint(0, CONFIG.vocab, (rows, length), generator=torch.Generator().manual_seed(length))
    segments = (torch.arange(length) * 2 // length + 1).expand(rows, length) if packed else None

    def loss(p):
        return token_scores(CONFIG, p, tokens, segments=segments, layer=layer).logp.square().mean(), ()

    (value, _), grads = trees.value_and_grad(loss)(params)
    numbers = [value, *trees.leaves(grads)]
    with torch.no_grad():
        numbers.append(token_scores(CONFIG, params, tokens, segments=segments, layer=layer).logp)
        cache = decoder.init_cache(CONFIG, decoder.SINGLE, rows, 64, torch.float32)
        hidden, cache = decoder.apply(CONFIG, params, tokens, cache=cache, layer=layer)
        numbers.append(hidden)
        for step in range(2):
            at = torch.full((rows, 1), length + step)
            view = decoder.cache_prefix(cache, length + step + 1)
            numbers.append(decoder.apply(CONFIG, params, tokens[:, :1], at, cache=view, layer=layer)[0])
    return numbers


@pytest.mark.slow
def test_nothing_is_compiled_again_after_warm_up(caplog):
    torch._dynamo.reset()
    params = decoder.init(CONFIG, torch.Generator().manual_seed(0))
    layer = compile_layer(CONFIG, "on")
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
