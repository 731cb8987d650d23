"""Layers as one operator each: a deep model is a program of the size of a shallow one."""

import pytest

pytest.importorskip("jax")
import jax
import torch
from single_device import program_of

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.varlen_attention import segment_offsets
from funrl.models import decoder_config, decoder_model, place
from funrl.xla.interpret import chains_of, lowered
from funrl.xla.layers import as_one_operator
from funrl.xla.meshes import to_jax
from funrl.xla.trace import trace_program

pytestmark = pytest.mark.xla

SIZES = {"vocab": 16, "embed": 8, "heads": 2, "kv_heads": 1, "head": 4, "mlp": 12}


def batch():
    generator = torch.Generator().manual_seed(3)
    segments = torch.tensor([[1] * 5 + [2] * 8 + [3] * 2 + [0] * 3])
    positions = torch.cat([torch.arange(5), torch.arange(8), torch.arange(2), torch.arange(3)]).unsqueeze(0)
    tokens = torch.randint(0, 16, segments.shape, generator=generator)
    trained = torch.arange(segments.shape[1] - 1)
    fields = {"tokens": tokens, "positions": positions, "segments": segments, "mask": segments > 0, "trained": trained}
    return fields | {"offsets": segment_offsets(segments, 4)}


def gradient_of(model, layer):
    placed = place(model, dtype=torch.float64, layer=layer)

    def loss(params, fields):
        scores = placed.token_scores(params, Batch(**fields), ("logp", "entropy"))
        return scores.logp.square().sum() + scores.entropy.sum(), scores.logp.detach()

    return lambda params, fields: trees.value_and_grad(loss)(params, fields)


def weights(model):
    return model.init(torch.Generator().manual_seed(0), torch.float64)


@pytest.mark.slow
def test_a_deep_program_of_two_kinds_of_layers_is_as_large_as_a_shallow_one():
    products = {}
    for turns in (2, 3):
        model = decoder_model(decoder_config(**SIZES, layers=2 * turns, windows=(3, None) * turns))
        args = (weights(model), batch())
        program = trace_program(gradient_of(model, as_one_operator(model.layer)), *args, name="step")
        chains = chains_of(program.graph)
        there, back = chains.values()
        assert len(there.turns) == len(back.turns) == turns and len(there.turns[0]) == 2
        with jax.enable_x64(True):
            text = jax.jit(lowered(program)).lower(*map(to_jax, trees.leaves(args))).as_text()
        products[turns] = text.count("stablehlo.dot_general")
    assert products[2] == products[3] > 20


@pytest.mark.slow
def test_the_gradient_of_turns_and_a_rest_is_that_of_plain_layers():
    model = decoder_model(decoder_config(**SIZES, layers=5, windows=(3, None) * 2 + (3,)))
    args = (weights(model), batch())
    want = gradient_of(model, None)(*args)
    made = program_of(gradient_of(model, as_one_operator(model.layer, "full")))(*args)
    for (name, x), y in zip(trees.named(made), trees.leaves(want), strict=True):
        assert (x - y).abs().max() < 1e-12, name


def test_a_kind_of_remat_is_named():
    with pytest.raises(ValueError, match=r"remat is 'some', on XLA it is one of none, full"):
        as_one_operator(lambda *args: args, "some")
