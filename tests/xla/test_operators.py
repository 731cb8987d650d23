"""Every operator in the table of JAX against torch, values and gradients."""

import functools

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import torch
from jax.experimental.pallas import tpu as pltpu
from operator_cases import CASES, Draw
from selection import quick
from torch.utils import _pytree

from funrl.compiled_kernels import grouped_linear  # noqa: F401  (they declare operators)
from funrl.compiled_kernels.delta_rule import static_pass  # noqa: F401  (they declare operators)
from funrl.models.decoder import routing  # noqa: F401  (they declare operators)
from funrl.xla.interpret import result_of
from funrl.xla.meshes import to_host, to_jax
from funrl.xla.operators import LOWERINGS, WITHOUT_MEANING, _grouped_weight
from funrl.xla.tpu_kernels import grouped_sums

pytestmark = pytest.mark.xla

NOT_ON_ONE_CPU = ("_c10d_functional.", "funrl.segment_attention")
TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 2**-7}
UNDEFINED = ("aten.empty", "aten.new_empty")  # whose numbers are any


def test_every_operator_has_an_example():
    assert {case.row for case in CASES} == {name for name in LOWERINGS if not name.startswith(NOT_ON_ONE_CPU)}


@functools.cache
def of_torch(dtype):
    """Arguments, results, what is given back, and gradients by float arguments, of every example in torch."""
    results = []
    for case in CASES:
        draw = Draw(dtype)
        args = case.args(draw)
        leaves, structure = _pytree.tree_flatten(args)
        floats = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        leaves = [
            x.detach().requires_grad_(i in floats and case.smooth) if isinstance(x, torch.Tensor) else x
            for i, x in enumerate(leaves)
        ]
        out = case.operator(*_pytree.tree_unflatten(leaves, structure), **case.options)
        outs = list(out) if isinstance(out, list | tuple) else [out]
        learned = [i for i, x in enumerate(outs) if x.requires_grad]
        back = [draw.f(*outs[i].shape).to(outs[i].dtype) for i in learned]
        wanted = [leaves[i] for i in floats]
        grads = torch.autograd.grad([outs[i] for i in learned], wanted, back, allow_unused=True) if learned else []
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=False)]
        results.append((leaves, structure, floats, [x.detach() for x in outs], (learned, back), grads, out))
    return results


@functools.cache
def of_jax(dtype):
    """Results and gradients of every example in JAX, in one program; an exception in place of what fails."""
    expected = of_torch(dtype)
    failures = {}

    def one(case, torch_side, arrays, back):
        leaves, structure, floats, _, (learned, _), _, out = torch_side

        def run(*own):
            values = [arrays.get(i, x) for i, x in enumerate(leaves)]
            for i, x in zip(floats, own, strict=True):
                values[i] = x
            options = {key: value for key, value in case.options.items() if key not in WITHOUT_MEANING}
            result = result_of(out)
            made = LOWERINGS[case.row](result, *_pytree.tree_unflatten(values, structure), **options)
            made = made if isinstance(made, tuple) else (made,)
            wants = (result, *result.more)
            return tuple(x.astype(want.dtype) for x, want in zip(made, wants, strict=True))

        own = [arrays[i] for i in floats]
        if not learned:
            return run(*own), ()
        made, pull = jax.vjp(run, *own)
        given = [
            jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, jax.dtypes.float0)
            for x in made
        ]
        for i, x in zip(learned, back, strict=True):
            given[i] = x
        return made, pull(tuple(given))

    def all_of_them(inputs):
        results = []
        for i, (case, torch_side) in enumerate(zip(CASES, expected, strict=True)):
            try:
                results.append(one(case, torch_side, *inputs[i]))
            except Exception as error:
                failures[i] = error
                results.append(((), ()))
        return results

    with jax.enable_x64(True):
        inputs = [
            ({i: to_jax(x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}, [to_jax(x) for x in back])
            for leaves, *_, (_, back), _, _ in expected
        ]
        program = jax.jit(all_of_them).lower(inputs).compile({"xla_backend_optimization_level": 0})
        results = program(inputs)
        return [failures.get(i, jax.tree.map(to_host, x)) for i, x in enumerate(results)]


@pytest.mark.parametrize("dtype", quick(list(TOLERANCE), [torch.float64]), ids=str)
def test_they_are_those_of_torch(dtype):
    problems = [problem for i, case in enumerate(CASES) if (problem := problem_of(i, case, dtype))]
    assert not problems, "\n".join(problems)


def problem_of(number, case, dtype):
    """How a case differs from torch; None: it does not."""
    *_, outs, _, grads, _ = of_torch(dtype)[number]
    made = of_jax(dtype)[number]
    if isinstance(made, Exception):
        return f"{case.overload}: {made!r}"
    try:
        assert [(x.shape, x.dtype) for x in made[0]] == [(x.shape, x.dtype) for x in outs]
        if not case.row.startswith(UNDEFINED):
            for x, want in (*zip(made[0], outs, strict=True), *zip(made[1], grads, strict=False)):
                close(x, want, case, dtype)
    except AssertionError as error:
        return f"{case.overload}: {error}"
    return None


def close(x, want, case, dtype):
    if not want.is_floating_point():
        assert torch.equal(x, want), case.overload
        return
    scale = want.double().abs().nan_to_num(0, 0, 0).amax().clamp_min(1) if want.numel() else 1
    assert torch.equal(x.isnan(), want.isnan()), case.overload
    torch.testing.assert_close(x.double() / scale, want.double() / scale, rtol=0, atol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.slow
def test_sums_by_group_of_the_kernel_are_those_of_xla():
    """Interpreted on the CPU; a group is empty, and rows after the last group have no meaning."""
    generator = torch.Generator().manual_seed(0)
    grad, x = (to_jax(torch.randn(150, n, generator=generator)) for n in (20, 33))
    sizes = jnp.array([30, 0, 70, 41], jnp.int32)
    with pltpu.force_tpu_interpret_mode():
        sums = grouped_sums(grad, x, sizes)
    wanted = jax.jit(_grouped_weight, static_argnums=0)(result_of(torch.empty(4, 20, 33)), grad, x, jnp.cumsum(sizes))
    assert jnp.abs(sums - wanted).max() < 1e-4 < jnp.abs(wanted).max()
