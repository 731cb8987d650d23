"""What the C++ functions refuse: each wrong argument is an error that names it, before memory is touched."""

import pytest
import torch
from paged_sequences import NO_KERNEL, config_of, weights

from funrl import trees
from funrl.compiled_kernels.decode_step import PagedKeyValues, packed_decoder
from funrl.compiled_kernels.exact.adapters import TokenAdapters
from funrl.compiled_kernels.exact.expert_operators import (
    exact_grouped_linear,
    exact_head_products,
    exact_largest,
    exact_sigmoid,
    exact_softmax,
)
from funrl.compiled_kernels.exact.norm_operators import exact_scale_rows, exact_square_sums
from funrl.compiled_kernels.exact.operators import (
    exact_gate,
    exact_gate_backward,
    exact_linear,
    exact_low_rank,
    exact_norm,
    exact_norm_backward,
    exact_rotate,
)
from funrl.compiled_kernels.exact.scores import largest_logits, log_probabilities, logit_moments
from funrl.compiled_kernels.kernel_library import KernelError
from funrl.compiled_kernels.linear import _transposed_product
from funrl.compiled_kernels.packed import (
    AttentionOptions,
    PackedLinear,
    PagedKeys,
    fill_panels,
    pack_groups,
    pack_linear,
    packed_attention,
    packed_linear,
    page_attention,
    panel_numbers,
    sequence_attention,
)
from funrl.models.decoder.compiled_step import step_sizes

pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def ones(*shape, dtype=F32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


def whole(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


def ends(*numbers):
    return whole(*numbers, dtype=torch.int32)


def attend(q=(6, 4, 8), k=(6, 2, 8), v=None, offsets=(0, 2, 6), dtypes=(F32, F32, F32), window=0):
    tensors = (ones(*shape, dtype=dtype) for shape, dtype in zip((q, k, v or k), dtypes, strict=True))
    return sequence_attention(*tensors, whole(*offsets), AttentionOptions(window))


def attend_pages(table=((3, 1), (0, 2)), upto=(20, 4), keys=(4, 16, 2, 8), values=(4, 16, 2, 8), window=0):
    paged = PagedKeys(ones(*keys), ones(*values), torch.tensor(table), torch.tensor(upto))
    return page_attention(ones(3, 4, 8), paged, whole(0, 1, 3), AttentionOptions(window))


def moments(logits=(3, 16), top=(3,), ids=((1,), (2,), (15,)), parts=8, dtype=F32, top_dtype=F32, ids_dtype=None):
    ids_TN = torch.tensor(ids, dtype=ids_dtype or torch.int64)
    return logit_moments(ones(*logits, dtype=dtype), ones(*top, dtype=top_dtype), ids_TN, 1.0, parts)


# A call with one argument that is wrong -> what the message says.
REFUSED = {
    "a weight's dtype": (lambda: pack_linear(ones(5, 8).half()), "the weight is torch.float16"),
    "a weight's dims": (lambda: pack_linear(ones(2, 5, 8)), r"the weight is \[2, 5, 8\], it must have 2 dims"),
    "a weight's device": (lambda: pack_linear(ones(5, 8, device="meta")), "the weight is torch.float32 on meta"),
    "16 parts": (lambda: pack_linear(ones(5, 32), 16), "there are 16 parts of 32 terms"),
    "0 parts": (lambda: pack_linear(ones(5, 32), 0), "there are 0 parts of 32 terms"),
    "3 parts": (lambda: pack_groups(ones(2, 5, 9), 3), "there are 3 parts of 9 terms"),
    "parts that do not divide": (lambda: pack_groups(ones(2, 5, 12), 8), "there are 8 parts of 12 terms"),
    "no terms": (lambda: pack_linear(ones(5, 0)), "there are 1 parts of 0 terms"),
    "groups' dims": (lambda: pack_groups(ones(5, 8)), "the weight is .* it must have 3 dims"),
    "panels": (lambda: fill_panels(ones(5, 8), ones(panel_numbers(5, 8, 1, F32) - 1)), "the panels is"),
    "panels' dtype": (
        lambda: fill_panels(ones(5, 8), ones(panel_numbers(5, 8, 1, F32), dtype=BF16)),
        "the panels is torch.bfloat16",
    ),
    "x of a product": (lambda: packed_linear(ones(2, 9), pack_linear(ones(5, 8))), "9 columns"),
    "x's dims": (lambda: exact_linear(ones(8), ones(5, 8), None, 1, False), r"x is \[8\], it must have 2 dims"),
    "x's dtype": (lambda: exact_linear(ones(2, 8), ones(5, 8, dtype=F64), None, 1, False), "x is torch.float32"),
    "a bias' dtype": (
        lambda: exact_linear(ones(2, 8), ones(5, 8), ones(5, dtype=BF16), 1, False),
        r"bias_N is torch.bfloat16 \[5\] on cpu, it must be torch.float32 \[5\] on cpu",
    ),
    "a bias' length": (lambda: exact_linear(ones(2, 8), ones(5, 8), ones(4), 1, False), r"bias_N is torch.float32 \[4"),
    "a bias of sums": (lambda: exact_linear(ones(2, 8), ones(5, 8), ones(5), 1, True), "takes no bias"),
    "parts of a product": (lambda: exact_linear(ones(2, 32), ones(5, 32), None, 16, False), "there are 16 parts"),
    "a weight of groups": (lambda: exact_linear(ones(2, 8), ones(99, 5, 8), None, 1, False), "the packed weight is"),
    "panels that are short": (
        lambda: packed_linear(ones(2, 8), PackedLinear(ones(8), 5, 8)),
        "the packed weight is",
    ),
    "a weight elsewhere": (
        lambda: exact_linear(ones(2, 8), ones(5, 8, device="meta"), None, 1, False),
        "the weight is torch.float32 on meta",
    ),
    "a first factor": (
        lambda: exact_low_rank(ones(2, 8), ones(5, 8), None, [ones(3, 7), ones(5, 3)], 1.0, 1),
        "the first factor is",
    ),
    "a second factor": (
        lambda: exact_low_rank(ones(2, 8), ones(5, 8), None, [ones(3, 8), ones(1, 3)], 1.0, 1),
        "the second factor is",
    ),
    "a gradient's rows": (lambda: _transposed_product(ones(3, 4), ones(2, 5), ones(4, 5), True), "b_MK is"),
    "a gradient's dtype": (
        lambda: _transposed_product(ones(3, 4), ones(3, 5, dtype=BF16), ones(4, 5), True),
        "b_MK is torch.bfloat16",
    ),
    "a gradient's sum": (lambda: _transposed_product(ones(3, 4), ones(3, 5), ones(4, 4), True), "total_NK is"),
    "a gradient's strides": (
        lambda: _transposed_product(ones(3, 4), ones(3, 5), ones(5, 4).T, True),
        "total_NK is not contiguous",
    ),
    "a norm's x": (lambda: exact_norm(ones(), ones(8), 1e-6, 0.0), "x is .* it must have at least 1 dims"),
    "a norm's dtype": (lambda: exact_norm(ones(2, 8).half(), ones(8).half(), 1e-6, 0.0), "x is torch.float16"),
    "a norm's weight": (lambda: exact_norm(ones(2, 8), ones(7), 1e-6, 0.0), "weight is torch.float32"),
    "a norm's weight's dtype": (lambda: exact_norm(ones(2, 8), ones(8, dtype=BF16), 1e-6, 0.0), "weight is torch.b"),
    "a norm's gradient": (lambda: exact_norm_backward(ones(1, 8), ones(2, 8), ones(8), 1e-6, 0.0), "grad is"),
    "a norm's gradient's dtype": (
        lambda: exact_norm_backward(ones(2, 8, dtype=F32), ones(2, 8, dtype=F64), ones(8, dtype=F64), 1e-6, 0.0),
        "grad is torch.float32",
    ),
    "a norm's weight, backward": (
        lambda: exact_norm_backward(ones(2, 8), ones(2, 8), ones(9), 1e-6, 0.0),
        "weight is",
    ),
    "heads": (lambda: exact_rotate(ones(8), ones(1, 8), ones(1, 8), 1), "x is .* at least 2 dims"),
    "cosines' dtype": (lambda: exact_rotate(ones(3, 2, 8), ones(3, 1, 8, dtype=BF16), ones(3, 1, 8), 1), "cos is"),
    "sines' shape": (lambda: exact_rotate(ones(3, 2, 8), ones(3, 1, 8), ones(2, 1, 8), 1), "sin is"),
    "wide cosines": (lambda: exact_rotate(ones(3, 2, 8), ones(3, 1, 10), ones(3, 1, 10), 1), "cos has 10 numbers"),
    "odd cosines": (lambda: exact_rotate(ones(3, 2, 8), ones(3, 1, 7), ones(3, 1, 7), 1), "cos has 7 numbers"),
    "positions": (lambda: exact_rotate(ones(3, 2, 8), ones(2, 1, 8), ones(2, 1, 8), 1), "cos has 2 positions"),
    "no positions": (lambda: exact_rotate(ones(3, 2, 8), ones(0, 1, 8), ones(0, 1, 8), 1), "cos has 0 positions"),
    "a sign": (lambda: exact_rotate(ones(3, 2, 8), ones(3, 1, 8), ones(3, 1, 8), 0), "the sign is 0"),
    "a gate's up": (lambda: exact_gate(ones(2, 8), ones(2, 7), 0), "up is"),
    "a gate's dtype": (lambda: exact_gate(ones(2, 8), ones(2, 8, dtype=BF16), 0), "up is torch.bfloat16"),
    "an activation": (lambda: exact_gate(ones(2, 8), ones(2, 8), 3), "the activation is 3"),
    "a gate's gradient": (lambda: exact_gate_backward(ones(8), ones(2, 8), ones(2, 8), 0), "grad is"),
    "a gate's up, backward": (lambda: exact_gate_backward(ones(2, 8), ones(2, 8), ones(8), 0), "up is"),
    "a grouped weight": (
        lambda: exact_grouped_linear(ones(4, 8), ones(2, 5, 7), ends(2, 4), 1, False),
        "weight is .* it must be .*2, 5, 8",
    ),
    "a grouped weight's dtype": (
        lambda: exact_grouped_linear(ones(4, 8), ones(2, 5, 8, dtype=BF16), ends(2, 4), 1, False),
        "weight is torch.bfloat16",
    ),
    "ends' dtype": (
        lambda: exact_grouped_linear(ones(4, 8), ones(2, 5, 8), whole(2, 4), 1, False),
        "ends is torch.int64",
    ),
    "ends' length": (lambda: exact_grouped_linear(ones(4, 8), ones(2, 5, 8), ends(4), 1, False), "ends is"),
    "ends after the rows": (
        lambda: exact_grouped_linear(ones(4, 8), ones(2, 5, 8), ends(2, 5), 1, False),
        r"ends \[2, 5\] do not ascend from 0 to at most the 4 rows",
    ),
    "ends that descend": (
        lambda: exact_grouped_linear(ones(4, 8), ones(2, 5, 8), ends(3, 2), 1, False),
        "do not ascend",
    ),
    "ends below 0": (lambda: exact_grouped_linear(ones(4, 8), ones(2, 5, 8), ends(-1, 2), 1, False), "do not ascend"),
    "parts of groups": (
        lambda: exact_grouped_linear(ones(4, 32), ones(2, 5, 32), ends(2, 4), 16, False),
        "there are 16 parts",
    ),
    "heads' weight": (lambda: exact_head_products(ones(3, 2, 8), ones(3, 5, 8), 0, 5, False), "weight is"),
    "heads' columns": (lambda: exact_head_products(ones(3, 2, 7), ones(2, 5, 8), 0, 5, False), "x is"),
    "heads' rows": (lambda: exact_head_products(ones(3, 2, 8), ones(2, 5, 8), 2, 6, False), "no rows 2 to 6"),
    "heads' columns, transposed": (lambda: exact_head_products(ones(3, 2, 4), ones(2, 5, 8), 0, 5, True), "x is"),
    "a softmax's dtype": (lambda: exact_softmax(ones(2, 8, dtype=BF16)), "take float32 and float64"),
    "a softmax's dims": (lambda: exact_softmax(ones()), "at least 1 dims"),
    "a sigmoid's dtype": (lambda: exact_sigmoid(whole(1, 2)), "x is torch.int64"),
    "count 0": (lambda: exact_largest(ones(2, 8), 0), "count is 0, it must be from 1 to the 8"),
    "count 9": (lambda: exact_largest(ones(2, 8), 9), "count is 9"),
    "the largest's dtype": (lambda: exact_largest(ones(2, 8, dtype=BF16), 1), "take float32 and float64"),
    "parts of a norm": (lambda: exact_square_sums(ones(2, 32), 16), "there are 16 parts of 32 terms"),
    "dims of a norm in parts": (lambda: exact_square_sums(ones(32), 8), "it must have 2 dims"),
    "totals": (lambda: exact_scale_rows(ones(3, 8), ones(2), ones(8), 8, 1e-6, 0.0), "totals is"),
    "totals' dtype": (
        lambda: exact_scale_rows(ones(3, 8, dtype=BF16), *[ones(n, dtype=BF16) for n in (3, 8)], 8, 0.1, 0.0),
        "totals is",
    ),
    "the weight of scaled rows": (lambda: exact_scale_rows(ones(3, 8), ones(3), ones(9), 8, 1e-6, 0.0), "weight is"),
    "logits' dtype": (lambda: largest_logits(ones(3, 16, dtype=BF16)), "take float32 and float64"),
    "logits' dims": (lambda: largest_logits(ones(16)), "it must have 2 dims"),
    "no logits": (lambda: moments(logits=(3, 0)), "there are 8 parts of 0 terms"),
    "parts of logits": (lambda: moments(parts=16), "there are 16 parts of 16 terms"),
    "tops": (lambda: moments(top=(2,)), "top_T is"),
    "tops' dtype": (lambda: moments(top_dtype=F64), "top_T is torch.float64"),
    "ids' dtype": (lambda: moments(ids_dtype=torch.int32), "ids_TN is torch.int32"),
    "ids' rows": (lambda: moments(ids=((1,), (2,))), "ids_TN is"),
    "an id after the vocabulary": (lambda: moments(ids=((1,), (2,), (16,))), "ids_TN are from 1 to 16"),
    "an id below 0": (lambda: moments(ids=((1,), (-1,), (2,))), "ids_TN are from -1 to 2"),
    "sums": (lambda: log_probabilities(ones(3, 2, dtype=F64), ones(2, dtype=F64), 1.0, F32), "sum_T is"),
    "sums' dtype": (lambda: log_probabilities(ones(3, 2, dtype=F64), ones(3), 1.0, F32), "sum_T is torch.float32"),
    "differences' dtype": (lambda: log_probabilities(ones(3, 2), ones(3, dtype=F64), 1.0, F32), "above_TN is"),
    "the result's dtype": (
        lambda: log_probabilities(ones(3, 2, dtype=F64), ones(3, dtype=F64), 1.0, BF16),
        "the result is torch.bfloat16",
    ),
    "queries' dims": (lambda: attend(q=(6, 8)), "q is .* it must have 3 dims"),
    "keys' dtype": (lambda: attend(dtypes=(F32, BF16, F32)), "k is torch.bfloat16"),
    "values' dtype": (lambda: attend(dtypes=(F32, F32, F64)), "v is torch.float64"),
    "keys' tokens": (lambda: attend(k=(5, 2, 8)), "k is"),
    "keys' size": (lambda: attend(k=(6, 2, 7)), "k is"),
    "values' shape": (lambda: attend(v=(6, 1, 8)), "v is"),
    "key-value heads": (lambda: attend(k=(6, 3, 8)), "a multiple of the 3 key-value heads"),
    "no key-value heads": (lambda: attend(k=(6, 0, 8)), "a multiple of the 0 key-value heads"),
    "a window": (lambda: attend(window=-1), "the window is -1"),
    "offsets after the tokens": (lambda: attend(offsets=(0, 7)), "do not ascend from 0 to at most the 6 tokens"),
    "offsets that descend": (lambda: attend(offsets=(0, 4, 2)), "do not ascend"),
    "offsets that begin later": (lambda: attend(offsets=(1, 4)), "do not ascend"),
    "no offsets": (lambda: attend(offsets=()), "offsets is"),
    "offsets of all tokens": (
        lambda: packed_attention(*(ones(6, 2, 8) for _ in "qkv"), whole(0, 5)),
        "do not ascend from 0 to the 6 tokens",
    ),
    "pages of keys": (lambda: attend_pages(keys=(4, 16, 8)), "k is .* it must have 4 dims"),
    "pages of values": (lambda: attend_pages(values=(3, 16, 2, 8)), "v is"),
    "a table's rows": (lambda: attend_pages(table=((3, 1),)), "table_SP is"),
    "ends of sequences": (lambda: attend_pages(upto=(20,)), "ends_S is"),
    "an end after the pages": (lambda: attend_pages(upto=(33, 4)), r"ends_S \[33, 4\] are not between"),
    "an end before the queries": (lambda: attend_pages(upto=(20, 1)), r"ends_S \[20, 1\] are not between"),
    "a page after the others": (lambda: attend_pages(table=((3, 4), (0, 2))), "table_SP has a page"),
    "a page below 0": (lambda: attend_pages(table=((-1, 1), (0, 2))), "table_SP has a page"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_named(name):
    call, message = REFUSED[name]
    with pytest.raises((ValueError, KernelError), match=message):
        call()


def test_pages_that_are_not_read_may_be_any():
    right = attend_pages()[0]
    assert torch.equal(attend_pages(table=((3, 1), (0, 99)))[0], right)
    assert torch.equal(attend_pages(table=((-7, 1), (0, 2)), window=3)[0], right)


def step(decoder, cache=None, adapters=None, **changed):
    given = {
        "tokens": whole(1, 2),
        "positions": whole(0, 1),
        "sequence": whole(0, 0),
        "tables": torch.tensor([[0, 1]], dtype=torch.int32),
        "draw": whole(1),
    } | changed
    return decoder.forward(decoder.init_cache(5) if cache is None else cache, *given.values(), adapters=adapters)


def sample(decoder, logits=(2, 130), source=(0, 1), noise=(0.5, 0.5), temperature=1.0, **dtypes):
    source_R = torch.tensor(source, dtype=dtypes.get("source_dtype", torch.int64))
    noise_R = torch.tensor(noise, dtype=dtypes.get("noise_dtype", F64))
    return decoder.sample(ones(*logits, dtype=dtypes.get("dtype", F32)), source_R, noise_R, temperature)


def cached(decoder, change):
    return PagedKeyValues(*(change(x) for x in decoder.init_cache(5)))


def loaded(decoder, change):
    return decoder.load(trees.map_named(change, weights(config_of("llama"))))


def reshaped(name):
    return lambda path, x: x[..., :-1] if path == name else x


def factors(decoder, a=None, b=None, layers=None):
    sizes = decoder.sizes
    a = (3, sizes.embed) if a is None else a
    b = (sizes.mlp, 3) if b is None else b
    count = sizes.layers if layers is None else layers
    return decoder.adapter([{"up": (ones(*a), ones(*b))} for _ in range(count)], 1.0)


REFUSED_BY_A_STEP = {
    "tokens' dims": (lambda d: step(d, tokens=whole(1, 2).view(2, 1)), "tokens_N is"),
    "positions": (lambda d: step(d, positions=whole(0, 1, 2)), "positions_N is"),
    "sequences": (lambda d: step(d, sequence=whole(0)), "sequence_N is"),
    "tables' dtype": (lambda d: step(d, tables=torch.tensor([[0, 1]])), "tables_SP is torch.int64"),
    "tables' dims": (lambda d: step(d, tables=ends(0, 1)), "tables_SP is"),
    "draws' dims": (lambda d: step(d, draw=whole(1).view(1, 1)), "draw_M is"),
    "a cache's dtype": (lambda d: step(d, cached(d, torch.Tensor.double)), "keys is torch.float64"),
    "a cache's layers": (lambda d: step(d, cached(d, lambda x: x[1:])), "keys is"),
    "a cache's pages": (lambda d: step(d, cached(d, lambda x: x[..., 1:])), "keys is"),
    "a cache's values": (lambda d: step(d, PagedKeyValues(d.init_cache(5)[0], d.init_cache(4)[1])), "values is"),
    "a cache's strides": (lambda d: step(d, cached(d, lambda x: x[:, ::2])), "keys is not contiguous"),
    "adapters of tokens": (lambda d: step(d, adapters=TokenAdapters([], whole(0))), "number_N is"),
    "another's adapter": (
        lambda d: step(d, adapters=TokenAdapters([factors(decoder_of("qwen3"))], whole(0, 0))),
        "made by a decoder of other sizes",
    ),
    "a first factor": (lambda d: factors(d, (3, d.sizes.embed + 1)), "the first factor of up of layer 0 is"),
    "a second factor": (lambda d: factors(d, None, (d.sizes.mlp, 2)), "the second factor of up of layer 0 is"),
    "factors of layers": (lambda d: factors(d, layers=1), "factors of 1 layers"),
    "logits' dtype": (lambda d: sample(d, dtype=F64), "logits_MV is torch.float64"),
    "logits' dims": (lambda d: sample(d, logits=(130,)), "it must have 2 dims"),
    "sources' dtype": (lambda d: sample(d, source_dtype=torch.int32), "source_R is torch.int32"),
    "a source": (lambda d: sample(d, source=(0, 2)), "not one of the 2 rows"),
    "noise": (lambda d: sample(d, noise=(0.5,)), "noise_R is"),
    "noise's dtype": (lambda d: sample(d, noise_dtype=F32), "noise_R is torch.float32"),
    "temperatures": (lambda d: sample(d, temperature=ones(1)), "temperature is"),
    "layers": (lambda d: d.load(weights(config_of("llama")) | {"layers": []}), "weights of 0 layers"),
    **{
        name: (lambda d, name=name: loaded(d, reshaped(name)), f"{name} is")
        for name in ("embed", "norm", "layers/1/attn/q", "layers/0/attn/o", "layers/1/mlp/down", "layers/0/mlp_norm")
    },
}


def decoder_of(name):
    return packed_decoder(step_sizes(config_of(name)), weights(config_of(name)), F32, 1)


@pytest.mark.parametrize("name", REFUSED_BY_A_STEP)
def test_a_wrong_argument_of_a_step_is_named(name):
    call, message = REFUSED_BY_A_STEP[name]
    with pytest.raises(ValueError, match=message):
        call(decoder_of("llama"))
