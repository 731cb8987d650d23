"""A program in which chex compares the trees of a model, in a process of its own, and prints how many it compared.

A process that has imported JAX is not safely forked, and swallows an interrupt that comes while JAX collects garbage:
tests in the same process as those of models fork and interrupt.
"""

from typing import Any

import torch

from funrl import trees
from funrl.models import decoder_config, decoder_model, with_value_head
from funrl.models.model import Model

SIZES = {"vocab": 31, "embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head": 6, "mlp": 24}


def every_bias(**fields: Any) -> Model:
    """A small decoder with every weight that a dense family has; further fields are its config's."""
    biases = {"qk_norm": True, "attention_bias": True, "output_bias": True}
    return decoder_model(decoder_config(**SIZES | {"family": "qwen3"} | biases | fields))


def main() -> None:
    """Compare the trees of weights, shapes and axes of four models."""
    import chex  # here, for a test imports `every_bias`

    plain = [every_bias(tied=tied) for tied in (False, True)]
    models = [*plain, *map(with_value_head, plain)]
    for model in models:
        chex.assert_trees_all_equal_shapes(model.init(torch.Generator().manual_seed(0)), model.shapes)
        trees.map(lambda x, axes: chex.assert_rank(x, len(axes)), model.shapes, model.axes)
    print(len(models))


if __name__ == "__main__":
    main()
