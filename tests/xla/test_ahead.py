"""Counts of the equations of programs, and what a compilation ahead of time refuses."""

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from program_counts import equations_of, is_attention, product_flops, sent_by

from funrl.mesh.text import parse
from funrl.xla import ahead
from funrl.xla.ahead import topology_mesh
from funrl.xla.errors import XlaError
from funrl.xla.operators import OperatorResult, _grouped_linear, _grouped_weight
from funrl.xla.tpu_kernels import splash_attention

pytestmark = pytest.mark.xla

RESULT = OperatorResult((), jnp.dtype(jnp.float32))


def counted(fn, *args):
    return list(equations_of(jax.make_jaxpr(fn)(*args).jaxpr))


def test_products_in_a_loop_count_as_often_as_it_turns():
    def run(x, w):
        def turn(x, w):
            return jnp.tanh(x @ w), ()

        return lax.scan(turn, x, w)[0] @ w[0]

    result = counted(run, jnp.zeros((3, 4)), jnp.zeros((5, 4, 4)))
    assert sum(product_flops(equation) * turns for equation, turns in result) == (5 + 1) * 2 * 3 * 4 * 4


def test_products_of_experts_count_rows_where_their_experts_are():
    """Forward pass and both gradients of a layer with experts on two ranks; each rank has the rows of both."""

    def run(x, weight, grad, ends):
        forward = _grouped_linear(RESULT, x, weight, ends)
        by_rows = _grouped_linear(RESULT, grad, jnp.swapaxes(weight, 1, 2), ends)
        return forward, by_rows, _grouped_weight(RESULT, grad, x, ends)

    rows, embed, inner = 2 * 128, 4, 6
    arrays = (jnp.zeros(shape, jnp.bfloat16) for shape in ((rows, embed), (2, inner, embed), (rows, inner)))
    result = counted(run, *arrays, jnp.zeros(2, jnp.int32))
    first = 2 * rows // 2 * embed * inner
    assert [n for n in (product_flops(x, expert_ranks=2) * turns for x, turns in result) if n] == [first] * 3


def test_sums_by_group_of_xla_count_all_rows_for_each_group():
    arrays = (jnp.zeros(shape, jnp.float16) for shape in ((7, 6), (7, 4)))  # which the kernel does not take
    result = counted(lambda *args: _grouped_weight(RESULT, *args), *arrays, jnp.zeros(3, jnp.int32))
    assert sum(product_flops(x, expert_ranks=2) for x, _ in result) == 3 * 2 * 7 * 4 * 6


def test_of_attention_s_kernel_tiles_up_to_the_diagonal_count():
    """Twice as many tokens have three times as many tiles; half of the FLOPs are of logits, half of values."""
    numbers = (0, 1.0, 0.0)
    for tokens, tiles in ((512, 1), (1024, 3)):
        q, k = (jax.ShapeDtypeStruct((tokens, heads, 128), jnp.bfloat16) for heads in (2, 1))
        offsets = jax.ShapeDtypeStruct((3,), jnp.int32)
        result = counted(lambda *args: splash_attention(RESULT, *args, numbers), q, k, k, offsets)
        kernels = [product_flops(x) for x, _ in result if is_attention(x)]
        assert kernels == [2 * tiles * 2 * 2 * 512 * 512 * 128]


def test_collectives_have_kinds_axes_and_bytes_of_their_larger_side():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))

    def run(x):
        whole = lax.all_gather(x, "tensor", axis=0, tiled=True)  # 4 x 3 numbers of 4 bytes
        return lax.psum(whole.sum(), ("data", "tensor"))

    spec = PartitionSpec(("data", "tensor"))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    sent = {x.kind: x[1:] for x in sent_by(counted(mapped, jnp.zeros((8, 3), jnp.float32)))}
    assert sent == {"all-gather": (("tensor",), 1, 48), "all-reduce": (("data", "tensor"), 1, 4)}


def test_libtpu_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(ahead.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(XlaError, match="libtpu is not installed: pip install libtpu"):
        topology_mesh("v5e:2x2", parse("dp4"))
