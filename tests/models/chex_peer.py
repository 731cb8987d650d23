"""A program in which chex compares the trees of a model, in a process of its own, and prints how many it compared.

A process that has imported JAX is not safely forked, and swallows an interrupt that comes while JAX collects garbage:
tests in the same process as those of models fork and interrupt.
"""

import torch

from funrl import trees
from funrl.models import decoder_config, decoder_model, with_value_head
from funrl.models.model import Model


def every_bias(tied: bool) -> Model:
    """A small decoder with every weight that a dense family has."""
    config = decoder_config(
        vocab=31,
        embed=16,
        layers=2,
        heads=4,
        kv_heads=2,
        head=6,
        mlp=24,
        family="qwen3",
        qk_norm=True,
        attention_bias=True,
        output_bias=True,
        tied=tied,
    )
    return decoder_model(config)


def main() -> None:
    """Compare the trees of weights, shapes and axes of four models."""
    import chex  # here, for a test imports `every_bias`

    models = [model for tied in (False, True) for model in (every_bias(tied), with_value_head(every_bias(tied)))]
    for model in models:
        chex.assert_trees_all_equal_shapes(model.init(torch.Generator().manual_seed(0)), model.shapes)
        trees.map(lambda x, axes: chex.assert_rank(x, len(axes)), model.shapes, model.axes)
    print(len(models))


if __name__ == "__main__":
    main()
