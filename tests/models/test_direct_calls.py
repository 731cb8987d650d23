"""Direct calls of compiled graphs: which calls go past torch.compile, and which are noticed as new."""

import pytest
import torch

from funrl import trees
from funrl.compiled_kernels.rotary import frequencies, rotary
from funrl.mesh.mesh import SINGLE
from funrl.models import compile_layer, decoder_config, decoder_model, with_fields
from funrl.models.compiling import compiled_layer
from funrl.models.compiling.direct_calls import DirectCalls, LayerCall
from funrl.models.decoder.config import layers_of
from funrl.models.decoder.layers import Context

CONFIG = decoder_config(vocab=31, embed=16, layers=2, heads=4, kv_heads=2, head=4, mlp=24, family="qwen3", qk_norm=True)
MODEL = decoder_model(CONFIG)


@pytest.fixture
def dispatched(monkeypatch):
    """Calls that go to torch.compile's dispatch, each by the marks that it sets before."""
    torch._dynamo.reset()
    calls = []
    mark = compiled_layer._mark_dynamic

    def noted(x_BTD, context):
        calls.append(tuple(x_BTD.shape))
        mark(x_BTD, context)

    monkeypatch.setattr(compiled_layer, "_mark_dynamic", noted)
    return calls


def arguments(tokens, seed=0, dtype=torch.float32, learns=True):
    """Weights, hidden states and context of a layer over two packed sequences; new tensors in each call."""
    generator = torch.Generator().manual_seed(seed)
    params = trees.map(lambda x: x.to(dtype).requires_grad_(learns), MODEL.init(generator)["layers"][0])
    x_BTD = torch.randn(1, tokens, CONFIG.embed, generator=generator).to(dtype).requires_grad_(learns)
    rope = rotary(torch.arange(tokens)[None] % 5, frequencies(4, 1e4), dtype)
    offsets = torch.tensor([0, 5, tokens], dtype=torch.int32)
    return CONFIG, SINGLE, params, x_BTD, Context(layers_of(CONFIG)[0], rope, offsets=offsets)


def gradients(layer, call):
    leaves = [*trees.leaves(call[2]), call[3]]
    out = layer(*call)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def assert_near(layer, call):
    for got, want in zip(gradients(layer, call), gradients(MODEL.layer, call), strict=True):
        assert got.dtype == want.dtype and (got - want).abs().max() <= 1e-4 * (1 + want.abs().max())


def test_equal_calls_are_dispatched_once(dispatched):
    notes = []
    layer = compile_layer(MODEL, "on", note=notes.append, backend="aot_eager")
    for seed in range(3):
        assert_near(layer, arguments(12, seed))
    assert dispatched == [(1, 12, 16)] and len(notes) == 1
    with torch.no_grad():
        for seed in range(3):
            call = arguments(12, seed)
            assert torch.allclose(layer(*call), MODEL.layer(*call), atol=1e-5)
    assert dispatched == [(1, 12, 16)] * 2 and len(notes) == 2
    marked = [x for x in [*trees.leaves(call[2]), call[3]] if hasattr(x, "_dynamo_weak_dynamic_indices")]
    assert not marked


def test_a_new_size_is_dispatched_and_not_compiled(dispatched):
    notes = []
    layer = compile_layer(MODEL, "on", note=notes.append, backend="aot_eager")
    for tokens in (12, 9, 12, 9, 20):
        assert_near(layer, arguments(tokens))
    assert dispatched == [(1, 12, 16), (1, 9, 16), (1, 20, 16)] and len(notes) == 1


def changed(call, what):
    """A call that another graph computes, or none that is known."""
    config, mesh, params, x_BTD, context = call
    if what == "frozen weight":
        params = {**params, "mlp_norm": params["mlp_norm"].detach()}
    elif what == "strides":
        gate = params["mlp"]["gate"]
        strided = torch.empty_strided(gate.shape, (1, gate.shape[0])).copy_(gate.detach()).requires_grad_()
        params = {**params, "mlp": {**params["mlp"], "gate": strided}}
    elif what == "window":
        mixer = context.layer.mixer
        windowed = type(mixer)(**{**mixer.__dict__, "window": 3})
        context = context._replace(layer=context.layer._replace(mixer=windowed))
    elif what == "no offsets":
        context = context._replace(offsets=None, causal=True)
    elif what == "config":
        config = with_fields(config, vocab=33)
    elif what == "one sequence":
        context = context._replace(offsets=torch.tensor([0, 12], dtype=torch.int32))
    elif what == "shared weight":
        params = {**params, "mlp_norm": params["attn_norm"]}
    return config, mesh, params, x_BTD, context


CHANGES = ("frozen weight", "strides", "window", "no offsets", "config", "shared weight", "dtype", "one sequence")


def test_no_change_is_taken_for_a_known_call(dispatched):
    """Each is dispatched by torch.compile, and has the numbers of the plain layer."""
    layer = compile_layer(MODEL, "on", backend="eager")
    layer(*arguments(12))
    for count, what in enumerate(CHANGES, 2):
        call = arguments(12, 2, torch.float64) if what == "dtype" else changed(arguments(12, 2), what)
        got, want = layer(*call), MODEL.layer(*call)
        assert len(dispatched) == count and got.dtype == want.dtype, what
        assert (got - want).abs().max() < 1e-4, what
        known = layer(*arguments(12, 3))
        assert (known - MODEL.layer(*arguments(12, 3))).abs().max() < 1e-4
        assert len(dispatched) == count, "the first call is still known"


def test_settings_and_modes_are_noticed(dispatched):
    layer = compile_layer(MODEL, "on", backend="eager")
    call = arguments(12, learns=False)
    for _ in range(2):
        want = layer(*call)
    assert len(dispatched) == 1
    with torch.autocast("cpu", torch.bfloat16):
        layer(*call)
    assert len(dispatched) == 2
    with torch.inference_mode():
        assert torch.equal(layer(*arguments(12, learns=False)), want)
    assert len(dispatched) == 3
    layer(*call)
    assert len(dispatched) == 3


def test_an_error_leaves_no_graph_for_the_next_call(dispatched):
    """A call that torch.compile does not trace is not sent to the graph of a call that failed after its own."""
    calls = DirectCalls(lambda module, inputs: module.forward)
    x = torch.ones(2)
    graph = calls.compile_graph(torch.fx.symbolic_trace(lambda x: torch.neg(x)), [x])

    def fail():
        graph(x)
        raise RuntimeError("out of memory")

    call = LayerCall("key", (), [x])
    with pytest.raises(RuntimeError, match="out of memory"):
        calls.trace(call, fail)
    assert calls._last is None
    assert torch.equal(calls.trace(call, lambda: torch.abs(x)), x) and calls.find(call) is None


def test_layers_of_two_kinds_with_equal_sizes_keep_their_own_graphs(dispatched):
    layer = compile_layer(MODEL, "on", backend="eager")
    for seed in range(3):
        plain = arguments(12, seed)
        windowed = changed(plain, "window")
        for call in (plain, windowed):
            assert (layer(*call) - MODEL.layer(*call)).abs().max() < 1e-4
        assert not torch.allclose(layer(*plain), layer(*windowed))
    assert len(dispatched) == 2
