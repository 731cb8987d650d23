"""Computing layers again: the same gradients for less memory, and what is computed again is what should be."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.batch import Batch
from funrl.models import Inputs, decoder_config, decoder_model, place, rematerialized, with_fields
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.routing import Experts
from funrl.models.remat import MODES

pytestmark = pytest.mark.versions

CONFIG = decoder_config(vocab=24, embed=16, layers=3, heads=4, kv_heads=2, head=4, mlp=32, family="qwen3", qk_norm=True)
MODEL = decoder_model(CONFIG)
TOKENS = torch.randint(0, 24, (4, 40), generator=torch.Generator().manual_seed(2))


class _Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products, self.attentions, self.other = 0, 0, 0
        self.names = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.names[name] += 1
        self.products += name.startswith(("aten::mm", "aten::addmm", "mkldnn::_linear"))
        self.attentions += name.startswith("aten::_scaled_dot_product") and "backward" not in name
        self.other += name == "aten::silu"
        return func(*args, **(kwargs or {}))


def _run(mode, segments=None):
    """Gradients; bytes that autograd keeps; matmuls, attentions and silus of forward and backward together."""
    params = MODEL.init(torch.Generator().manual_seed(0), torch.float64)
    placed = place(MODEL, dtype=torch.float64, layer=rematerialized(MODEL.layer, mode))
    batch = Batch(tokens=TOKENS, mask=None, segments=segments)
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def loss(params):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            return placed.token_scores(params, batch).logp.sum(), None

    with _Counted() as counted:
        _, grads = trees.value_and_grad(loss)(params)
    return grads, sum(kept.values()), counted


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_stay_the_same(mode, packed):
    segments = 1 + torch.arange(40).div(13, rounding_mode="floor").expand(4, 40) if packed else None
    plain, again = _run("none", segments)[0], _run(mode, segments)[0]
    for (name, x), y in zip(trees.named(again), trees.leaves(plain), strict=True):
        assert (x - y).abs().max() < 1e-12, name
        assert y.abs().max() > 0, name


def test_what_is_kept_and_what_is_computed_again():
    (_, plain, a), (_, full, b), (_, _, c) = (_run(mode) for mode in MODES)
    assert full < plain / 2
    layers = CONFIG.layers
    assert (a.attentions, b.attentions, c.attentions) == (layers, 2 * layers, layers)
    assert (a.other, b.other, c.other) == (layers, 2 * layers, 2 * layers)
    # Of the 7 products of a layer's forward pass the last need not be made again: nothing of its result is saved.
    assert b.products == a.products + 6 * layers
    assert c.products == a.products


def test_products_by_onednn_are_kept_too():
    """They are in float32, of weights that are large enough."""
    model = decoder_model(with_fields(CONFIG, embed=128, kv_heads=4, head=32, mlp=128))
    params, batch = model.init(torch.Generator().manual_seed(0)), Batch(tokens=TOKENS, mask=None)
    record = {}
    for mode in MODES:
        placed = place(model, layer=rematerialized(model.layer, mode))
        with _Counted() as counted:
            _, grads = trees.value_and_grad(lambda p, by=placed: (by.token_scores(p, batch).logp.sum(), None))(params)
        record[mode] = trees.leaves(grads), counted.products
    assert record["selective"][1] == record["none"][1] < record["full"][1]
    for mode in ("full", "selective"):
        assert all(torch.equal(x, y) for x, y in zip(record[mode][0], record["none"][0], strict=True))


def test_states_and_products_of_experts_are_kept():
    experts = Experts(4, 2, 8, shared=8)
    model = decoder_model(with_fields(CONFIG, layers=1, mixers=(GatedDeltaNet(2, 4, 4, 3),), experts=experts))
    params, batch = model.init(torch.Generator().manual_seed(0)), Batch(tokens=TOKENS, mask=None)
    counts = {}
    for mode in MODES:
        placed = place(model, layer=rematerialized(model.layer, mode))
        with _Counted() as counted:
            trees.value_and_grad(lambda p, by=placed: (by.token_scores(p, batch).logp.sum(), None))(params)
        grouped = sum(count for name, count in counted.names.items() if name.endswith("grouped_linear"))
        counts[mode] = counted.names["funrl::chunk_states"], grouped
    assert min(counts["none"]) > 0 and counts["selective"] == counts["none"] != counts["full"]


def test_without_a_gradient_or_without_a_mode_it_is_the_plain_layer():
    calls = []

    def layer(*args):
        calls.append(torch.is_grad_enabled())
        return MODEL.layer(*args)

    assert rematerialized(layer, "none") is layer
    params = MODEL.init(torch.Generator().manual_seed(0))
    with torch.no_grad():
        MODEL.apply(params, Inputs(TOKENS), layer=rematerialized(layer, "full"))
    assert calls == [False] * CONFIG.layers
