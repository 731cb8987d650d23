"""chex, which imports JAX, agrees on the trees of a model."""

import pytest

pytest.importorskip("jax")
import torch

from funrl import trees
from funrl.models import decoder_config, decoder_model, with_value_head

pytestmark = pytest.mark.xla

SIZES = {"vocab": 31, "embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head": 6, "mlp": 24}
BIASES = {"qk_norm": True, "attention_bias": True, "output_bias": True}


def test_chex_agrees_on_the_trees():
    import chex  # not for those who run other tests of this folder

    plain = [decoder_model(decoder_config(**SIZES, family="qwen3", **BIASES, tied=tied)) for tied in (False, True)]
    for model in (*plain, *map(with_value_head, plain)):
        chex.assert_trees_all_equal_shapes(model.init(torch.Generator().manual_seed(0)), model.shapes)
        trees.map(lambda x, axes: chex.assert_rank(x, len(axes)), model.shapes, model.axes)
