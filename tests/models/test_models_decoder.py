"""The decoder's own promises: packing, caches, trees, configs that are refused."""

import math

import pytest
import torch
from dense_models import every_bias
from paged_rows import Rows

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.paged_attention import paging_of
from funrl.mesh.mesh import SINGLE
from funrl.models import Inputs, ModelError, decoder_config, decoder_model, place, with_value_head
from funrl.models.decoder.layers import RopeScaling
from funrl.models.huggingface.config import config_from_hf, config_to_hf
from funrl.models.huggingface.names import names_of

CONFIG = decoder_config(vocab=31, embed=16, layers=3, heads=4, kv_heads=2, head=6, mlp=24, windows=(None, 4, None))
MODEL = decoder_model(CONFIG)
PLACED = place(MODEL, dtype=torch.float64)
CRITIC = place(with_value_head(MODEL), dtype=torch.float64)
LENGTHS = (5, 1, 8)


@pytest.fixture(scope="module")
def params():
    noise = torch.Generator().manual_seed(1)
    drawn = MODEL.init(torch.Generator().manual_seed(0), torch.float64)
    return trees.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=noise, dtype=x.dtype), drawn)


def _sequences():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, CONFIG.vocab, (1, n), generator=generator) for n in LENGTHS]


def _packed():
    """The sequences behind one another in one row, with two tokens of padding."""
    padding = torch.zeros(1, 2, dtype=torch.int64)
    tokens = torch.cat((*_sequences(), padding), 1)
    positions = torch.cat((*(torch.arange(n) for n in LENGTHS), padding[0]))[None]
    segments = torch.cat((*(torch.full((n,), i + 1) for i, n in enumerate(LENGTHS)), padding[0]))[None]
    return Inputs(tokens, positions, segments)


def _batch(inputs, mask=None):
    return Batch(tokens=inputs.tokens, mask=mask, positions=inputs.positions, segments=inputs.segments)


def _scores(params, inputs, want=("logp",), mask=None):
    return PLACED.token_scores(params, _batch(inputs, mask), want)


def test_packed_segments_equal_separate_rows(params):
    want = ("logp", "entropy", "sum_pi_squared")
    separate = [trees.leaves(_scores(params, Inputs(x), want)) for x in _sequences()]
    packed = trees.leaves(_scores(params, _packed(), want))
    for got, *alone in zip(packed, *separate, strict=True):
        expected = torch.cat((*alone, torch.zeros(1, 2, dtype=torch.float64)), 1)
        assert (got - expected).abs().max() < 1e-12
        firsts = [0, 5, 6, 14, 15]  # first tokens and padding
        assert torch.equal(got[0, firsts], torch.zeros(5, dtype=torch.float64))


def test_packed_gradients_equal_separate_rows(params):
    def packed(p):
        return _scores(p, _packed()).logp.square().sum(), ()

    def separate(p):
        return sum(_scores(p, Inputs(x)).logp.square().sum() for x in _sequences()), ()

    grads, expected = (trees.leaves(trees.value_and_grad(f)(params)[1]) for f in (packed, separate))
    assert all((g - e).abs().max() < 1e-12 * (1 + e.abs().max()) for g, e in zip(grads, expected, strict=True))


def test_padding_to_the_right_changes_nothing(params):
    tokens = _sequences()[2]
    padded = torch.cat((tokens, torch.full((1, 9), 7)), 1)
    hidden, longer = (MODEL.apply(params, Inputs(x)).hidden for x in (tokens, padded))
    assert (longer[:, : tokens.shape[1]] - hidden).abs().max() < 1e-12


def test_scores_within_the_mask_only(params):
    tokens = torch.cat(_sequences(), 1)
    mask = torch.arange(tokens.shape[1])[None] % 3 == 1

    def loss(p, given):
        logp = _scores(p, Inputs(tokens), mask=given).logp
        return (logp * mask).square().sum(), logp

    (_, every), expected = trees.value_and_grad(loss)(params, None)
    (_, some), grads = trees.value_and_grad(loss)(params, mask)
    assert (some - every * mask).abs().max() < 1e-12
    assert all((g - e).abs().max() < 1e-12 for g, e in zip(trees.leaves(grads), trees.leaves(expected), strict=True))


def test_rows_of_different_length_over_pages_equal_forward(params):
    """Prompts of unequal length, in chunks beside rows that decode; then some of the rows, each at its own position."""
    tokens = torch.randint(0, CONFIG.vocab, (3, 23), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = MODEL.apply(params, Inputs(tokens)).hidden
        rows = Rows(MODEL, params, tokens)
        passes = [((0, 1, 2), [2, 5, 4]), *[((0, 1, 2), [1, 1, 1])] * 7, ((2, 0), [6, 2]), ((0, 2, 1), [1, 1, 9])]
        for some, counts in passes:
            before = [rows.ends[r] for r in some]
            hidden = rows.pass_of(counts, some)
            parts = [expected[r, at : at + n] for r, at, n in zip(some, before, counts, strict=True)]
            assert (hidden - torch.cat(parts)).abs().max() < 1e-12
    assert rows.ends == [12, 21, 18]


def test_a_cache_and_paging_go_together(params):
    cache = MODEL.init_cache(SINGLE, 4, 16, torch.float64)
    with pytest.raises(ModelError, match="one of them is missing"):
        MODEL.apply(params, _packed(), cache=cache)
    paging = paging_of([3], [3], torch.zeros(1, 1, dtype=torch.int32), 16)
    with pytest.raises(ModelError, match="one of them is missing"):
        MODEL.apply(params, Inputs(torch.zeros(1, 3, dtype=torch.int64), paging=paging))


def test_values_speak_of_the_state_before_the_token(params):
    critic = CRITIC.copy_from(PLACED, params)
    inputs = _packed()
    batch = _batch(inputs)
    assert torch.equal(CRITIC.values(critic, batch), torch.zeros(1, 16, dtype=torch.float64))
    critic["value"] = torch.ones_like(critic["value"])
    got = CRITIC.values(critic, batch)
    expected = MODEL.apply(params, inputs).hidden.sum(-1)[0]
    assert got[0, 1] == pytest.approx(expected[0].item()) and got[0, 7] == pytest.approx(expected[6].item())
    assert torch.equal(got[0, [0, 5, 6, 14, 15]], torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("tied", [False, True])
def test_trees_have_one_structure(tied):
    model = every_bias(tied=tied)
    assert len(trees.leaves(model.shapes)) == 2 * 15 + (2 if tied else 3)
    for each in (model, with_value_head(model)):
        assert names_of(each).keys() == dict(trees.named(each.shapes)).keys()
        assert all(math.prod(names_of(each)[name][1]) == x.numel() for name, x in trees.named(each.shapes))


def test_init_is_the_same_in_every_dtype():
    single, double = (MODEL.init(torch.Generator().manual_seed(0), d) for d in (torch.float32, torch.float64))
    assert all(torch.equal(a.double(), b) for a, b in zip(trees.leaves(single), trees.leaves(double), strict=True))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
RAW = config_to_hf(
    decoder_config(
        vocab=31, embed=16, layers=2, heads=4, kv_heads=2, head=4, mlp=24, family="qwen2", attention_bias=True
    )
)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'.*llama.*qwen2.*qwen3"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'.*'silu'"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type is 'ntk', supported: .*linear.*yarn"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling is .*longrope.*: .*short_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "rope_scaling has 1 short factors, the rotated part of a head has 2 frequencies",
        ),
        ({"rope_scaling": YARN | {"attn_factor": 0.8}}, "attn_factor is 0.8, supported is None"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters is .*dynamic.*: .*factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "rope_scaling is .*llama3.*: .*low_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters is given per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method is 'gptq'"),
        ({"num_key_value_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"hidden_size": "16"}, "hidden_size is '16'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"head_dim": 5}, "head_dim is 5: "),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*num_hidden_layers. \\(2\\)"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_unsupported_config_names_the_field(change, message):
    assert config_from_hf(RAW).layers == 2
    with pytest.raises(ModelError, match=message):
        config_from_hf(RAW | change)


def test_config_that_no_file_can_say_is_refused():
    with pytest.raises(ModelError, match="qk_norm=True"):
        config_to_hf(
            decoder_config(
                vocab=31, embed=16, layers=2, heads=4, kv_heads=2, head=4, mlp=24, family="llama", qk_norm=True
            )
        )
    with pytest.raises(ModelError, match="windows has sizes"):
        config_to_hf(
            decoder_config(
                vocab=31,
                embed=16,
                layers=2,
                heads=4,
                kv_heads=2,
                head=4,
                mlp=24,
                family="qwen2",
                attention_bias=True,
                windows=(3, 4),
            )
        )
    scaled = decoder_config(
        vocab=31,
        embed=16,
        layers=2,
        heads=4,
        kv_heads=2,
        head=4,
        mlp=24,
        rope_scaling=RopeScaling("linear", 2.0),
        max_positions=64,
    )
    assert config_from_hf(config_to_hf(scaled)) == scaled
