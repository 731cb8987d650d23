"""Counts of programs that are compiled ahead of time, and what is refused."""

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from funrl.mesh.text import parse
from funrl.xla import ahead
from funrl.xla.ahead import equations_of, product_flops, sent_by, topology_mesh
from funrl.xla.errors import XlaError

pytestmark = pytest.mark.xla


def counted(fn, *args):
    return list(equations_of(jax.make_jaxpr(fn)(*args).jaxpr))


def test_products_in_a_loop_count_as_often_as_it_turns():
    def run(x, w):
        def turn(x, w):
            return jnp.tanh(x @ w), ()

        return lax.scan(turn, x, w)[0] @ w[0]

    found = counted(run, jnp.zeros((3, 4)), jnp.zeros((5, 4, 4)))
    assert sum(product_flops(equation) * turns for equation, turns in found) == (5 + 1) * 2 * 3 * 4 * 4


def test_grouped_products_count_each_row_once():
    sizes = jnp.array([3, 4], dtype=jnp.int32)
    found = counted(lambda x, w: lax.ragged_dot(x, w, sizes), jnp.zeros((7, 4)), jnp.zeros((2, 4, 6)))
    assert sum(product_flops(equation) * turns for equation, turns in found) == 2 * 7 * 4 * 6


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
