"""Compiled layers keep the bits of the plain ones on a CPU: engine and trainer, each compiled or not."""

import pytest
import torch
from bit_texts import Texts

from funrl import trees
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.models import compile_layer
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))]


def test_a_compiled_layer_has_the_bits_of_the_plain_one():
    """Of a model whose biases are rounded before the residual stream."""
    dtype = torch.bfloat16
    texts = Texts("qwen2", dtype, 2)
    generator = torch.Generator().manual_seed(1)

    def with_biases(name, x):
        return torch.rand(x.shape, generator=generator, dtype=x.dtype) if name.endswith("_bias") else x

    texts.params = trees.map_named(with_biases, texts.params)
    texts.generate()
    layer = compile_layer(texts.model, "on", "cpu")
    assert texts.differ(layer=layer) == 0
    engine = native_engine(texts.model, dtype=dtype, layer=layer)
    engine.load(engine.weights.named(trees.map(lambda x: x.to(dtype), texts.params)), 1)
    sampling = Sampling(max_new_tokens=5, temperature=texts.temperature)
    texts.prompts = [[1, 2, 3], [7] * 20]
    texts.done = complete(engine, requests_of(texts.prompts, sampling, seed=3))
    assert texts.differ() == 0
