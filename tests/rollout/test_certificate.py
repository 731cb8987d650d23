"""The proof of a sync: what is wrong is found and named, and what is right is not called wrong."""

import itertools
import re
from collections import Counter

import pytest
import torch
from device_waits import no_waits
from synced_engines import (
    CONFIG,
    WRONG,
    all_hidden,
    another_step,
    check,
    cut,
    half_precision,
    hidden,
    in_half,
    one_element,
    shows,
    stale,
    synced,
    twice,
    two_layers,
    weights,
    with_another,
    without,
    zeroed,
)
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.cost.tracing.hardware import HARDWARE
from funrl.cost.tracing.tracer import Tracer
from funrl.mesh.mesh import AXES, parse, single
from funrl.mesh.rules import Layout
from funrl.models import decoder_model, place
from funrl.models.deployed import deployed
from funrl.rollout import certificate
from funrl.rollout.certificate import SyncError, digest, probe_gap, probe_prompts, sync_digests
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.sync_proof import READ_AFTER, PolicyProof, SyncProof

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ONE = (1, 1, 1, 1)


def whole(shape):
    return Layout(tuple(shape), ((),) * len(shape), ONE)


# --- the digest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (), (2, 6)])
def test_a_digest_is_the_sum_of_bits_times_keys(shape, dtype, monkeypatch):
    x = torch.randn(shape).to(dtype)
    words = x.reshape(x.shape or (1,)).contiguous().view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    keys = [certificate._keys(dim, 0, length, x.device).tolist() for dim, length in enumerate(words.shape)]
    assert all(key % 2 for its in keys for key in its)
    expected = 0
    for at in itertools.product(*map(range, words.shape)):
        term = int(words[at])
        for dim, i in enumerate(at):
            term *= keys[dim][i]
        expected += term
    for piece in (1, 2, 7, 19, 1 << 17):
        monkeypatch.setitem(certificate.PIECE, "cpu", piece)
        assert (int(digest(x, whole(shape), 0, dtype)) - expected) % 2**64 == 0


SPECS = {  # of a weight [6, 8, 5]
    "whole": ((), (), ()),
    "columns": ((), ("tensor",), ()),
    "both": (("data",), ("tensor",), ()),
    "nested": ((), ("tensor", "data"), ()),
    "uneven": ((), (), ("data", "tensor")),
}


@pytest.mark.parametrize("sizes", ["dp2,tp2", "dp2", "tp4", "dp2,ep2,tp2"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_parts_of_a_weight_add_up_to_it(sizes, spec):
    x, mesh = torch.randn(6, 8, 5, dtype=torch.float64), parse(sizes)
    layout = Layout((6, 8, 5), SPECS[spec], tuple(mesh[axis] for axis in AXES))
    parts = [x[tuple(slice(*interval) for interval in layout.box(rank))] for rank in range(layout.world)]
    held = Counter(
        place
        for rank in range(layout.world)
        for place in itertools.product(*itertools.starmap(range, layout.box(rank)))
    )
    assert set(held.values()) == {certificate.copies(layout)}
    for dtype in DTYPES:
        total = sum(int(digest(part, layout, rank, dtype)) for rank, part in enumerate(parts))
        assert (total - certificate.copies(layout) * int(digest(x, whole(x.shape), 0, dtype))) % 2**64 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype):
    x = torch.randn(5, 6, dtype=torch.float64).to(dtype)
    right = digest(x, whole(x.shape), 0, dtype)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for at, bit in itertools.product(range(30), range(8 * dtype.itemsize)):
        wrong = x.clone()
        flat, first = wrong.view(integer).view(-1), 1 << bit
        flat[at] ^= first if bit < 8 * dtype.itemsize - 1 else -first  # the sign bit
        assert digest(wrong, whole(x.shape), 0, dtype) != right, (at, bit)


def test_exchanges_and_changes_of_sign_count():
    x = torch.randn(64, 64)
    right, every = digest(x, whole(x.shape), 0, x.dtype), torch.arange(64)
    changed = {
        "negated": -x,
        "even columns negated": x * (1 - 2 * (every % 2)),
        "transposed": x.T.contiguous(),
        "rows reversed": x.flip(0),
        "two rows exchanged": x[every.index_fill(0, torch.tensor([3, 9]), 0) + 9 * (every == 3) + 3 * (every == 9)],
        "columns turned": x.roll(1, 1),
        "halves of the columns exchanged": x.roll(32, 1),
        "half of it gone": x * (every < 32),
        "rounded": x.bfloat16().float(),
    }
    for name, wrong in changed.items():
        assert not torch.equal(wrong, x) and digest(wrong, whole(x.shape), 0, x.dtype) != right, name


def test_a_digest_takes_little_memory_whatever_the_weight():
    x = torch.randn(2048, 4096)
    tracer = Tracer(HARDWARE["cpu"], real=True)
    digest(x, whole(x.shape), 0, torch.bfloat16)  # its keys stay
    with tracer, tracer.phase("digest"):
        digest(x, whole(x.shape), 0, torch.bfloat16)
    piece = 8 * certificate.PIECE["cpu"]
    assert piece <= tracer.phases["digest"].total - x.nbytes <= 1.5 * piece


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_computes_the_same_digest():
    x = torch.randn(300, 70, 90)
    for dtype in DTYPES:
        assert int(digest(x.cuda(), whole(x.shape), 0, dtype)) == int(digest(x, whole(x.shape), 0, dtype))


# --- what is wrong is found


@pytest.mark.parametrize(
    "change, message",
    [
        (one_element, rf"{WRONG} differs on rank 0; 1 of \d+ weights"),
        (two_layers, rf"{WRONG} differs on rank 0; 2 of \d+ weights"),
        (zeroed, rf"{WRONG} differs on rank 0; 1 of \d+ weights"),
        (half_precision, r"embed differs on rank 0; \d\d of \d+ weights"),
        (another_step, r"embed differs on rank 0; \d\d of \d+ weights"),
    ],
)
def test_wrong_numbers_are_found_and_named(change, message):
    params = weights()
    assert check(synced(params), params) == {"sync/verified": 1.0}
    with pytest.raises(SyncError, match=f"after the sync of version 3 the engine does not hold .* {message}"):
        check(synced(params, change=change), params)


@pytest.mark.parametrize(
    "show, message",
    [
        (without, f"{WRONG} is missing on rank 0$"),
        (twice, f"{WRONG} is unknown or given twice on rank 0$"),
        (with_another, "bias is unknown or given twice on rank 0$"),
        (in_half, r"is torch.float16 .* instead of torch.float32 .*, and \d+ further faults"),
        (cut, WRONG + r" is torch.float32 \[47, 32\] instead of torch.float32 \[48, 32\]"),
    ],
)
def test_weights_that_are_not_there_or_of_another_kind_are_found(show, message):
    params = weights()
    with pytest.raises(SyncError, match=message):
        check(shows(synced(params), show), params)


def test_an_engine_of_another_version_is_found():
    params = weights()
    with pytest.raises(SyncError, match=r"of version 4 .* the version is 3 on rank 0"):
        check(synced(params), params, version=4)


def test_memory_that_is_the_trainers_is_read_once(monkeypatch):
    params, read = weights(), []
    engine = native_engine(decoder_model(CONFIG), options=NativeOptions(packed=False))
    engine.load(engine.weights.named(params), 3)
    monkeypatch.setattr(
        certificate, "digest", lambda x, *args, **options: read.append(x) or digest(x, *args, **options)
    )
    assert check(engine, params) == {"sync/verified": 1.0} and len(read) == len(trees.leaves(params))
    read.clear()
    assert check(synced(params), params) == {"sync/verified": 1.0} and len(read) == 2 * len(trees.leaves(params))


def test_weights_that_cannot_be_read_are_left_to_the_probe():
    params = weights()
    blind = shows(synced(params), hidden)
    assert check(blind, params) == {"sync/verified": 0.0}
    metrics = check(blind, params, probes=True)
    assert metrics.pop("sync/probe_gap") < 1e-5 and metrics == {"sync/verified": 0.5}
    message = r"from the trainer's; rounding in torch.float32 explains 0\.001\. Not all of its weights were compared"
    with pytest.raises(SyncError, match=message):
        check(shows(synced(params, change=zeroed), hidden), params, probes=True)
    with pytest.raises(SyncError, match="layers/2/mlp/up differs"):  # one that can be read
        check(shows(synced(params, change=two_layers), hidden), params)
    assert check(shows(synced(params), all_hidden), params) == {"sync/verified": 0.0}
    assert check(synced(params), params, digests=False, probes=True)["sync/verified"] == 0.5


def test_transformers_weights_are_compared_under_their_names():
    params, model = weights(), decoder_model(CONFIG)
    engine = hf_engine(model)
    engine.load(engine.weights.named(params), 3)
    metrics = check(engine, params, probes=True)
    assert metrics["sync/verified"] == 1 and metrics["sync/probe_gap"] < 1e-5
    engine.model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1e-6
    with pytest.raises(SyncError, match=f"{WRONG} differs"):
        check(engine, params)


# --- the probe


def test_an_engine_that_computes_with_earlier_weights_is_found_by_the_probe_alone():
    engine = stale(native_engine(decoder_model(CONFIG)))
    engine.load(engine.weights.named(weights()), 1)
    assert check(engine, weights(), version=1, probes=True)["sync/verified"] == 1
    params = another_step(dict(engine.weights.named(weights(seed=1))))
    params = trees.from_named(weights(), params.items())
    engine.load(engine.weights.named(params), 2)
    assert check(engine, params, version=2) == {"sync/verified": 1.0}
    with pytest.raises(
        SyncError, match="Its weights are the trainer's, so what it derives from them is wrong or stale"
    ):
        check(engine, params, version=2, probes=True)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "torch"])
def test_a_prefix_that_stays_in_the_cache_after_a_load_is_found_by_the_probe_alone(packed, monkeypatch):
    """The real cache: pages of the probe's own prompts, whose keys and values are of the weights before."""
    engine = native_engine(decoder_model(CONFIG), options=NativeOptions(packed=packed))
    engine.load(engine.weights.named(weights()), 1)
    assert check(engine, weights(), version=1, probes=True)["sync/verified"] == 1
    params, before = weights(seed=1), engine.cost().cached
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_drop_cache", lambda: None)
        engine.load(engine.weights.named(params), 2)
    assert check(engine, params, version=2) == {"sync/verified": 1.0}
    with pytest.raises(SyncError, match=r"what it derives from them is wrong or stale, such as .* cached prefixes"):
        check(engine, params, version=2, probes=True)
    assert engine.cost().cached > before
    engine.load(engine.weights.named(params), 2)
    assert check(engine, params, version=2, probes=True)["sync/probe_gap"] < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_allows_what_rounding_does_and_no_exchange_of_layers(dtype):
    params = weights()
    for name in ("embed", "unembed"):
        params[name] = params[name] * 5  # distributions that are neither flat nor certain
    placed, bound = place(decoder_model(CONFIG), dtype=dtype), certificate.PROBE_BOUNDS[dtype]
    assert probe_gap(placed, params, synced(params, dtype)) < bound / 10
    wide = place(decoder_model(CONFIG), dtype=torch.float64)  # another way to round
    assert probe_gap(wide, trees.cast(trees.cast(params, dtype), torch.float64), synced(params, dtype)) < bound / 3

    def layers(named):
        other = {"0": "2", "2": "0"}
        return {re.sub(r"(?<=layers/)[02]", lambda m: other[m[0]], name): x for name, x in named.items()}

    assert probe_gap(placed, params, synced(params, dtype, layers)) > 2 * bound


def test_the_text_of_the_probe_is_fixed_and_fits():
    ids, new = probe_prompts(300, 2048)
    assert probe_prompts(300, 2048) == (ids, new) and new == 8
    assert [len(row) for row in ids] == [32, 32] and ids[0] != ids[1] and max(map(max, ids)) < 300
    for positions in (2, 3, 8, 9, 33, 40, 41):
        ids, new = probe_prompts(5, positions)
        assert len(ids[0]) + new <= positions and len(ids[0]) >= 1 and new >= 1


# --- the proof while the engine runs


class ReadBytes(TorchDispatchMode):
    """Bytes that operators read of some tensors, and of all."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {x.untyped_storage().data_ptr() for x in tensors}
        self.of_weights = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            for x in args:
                if isinstance(x, torch.Tensor):
                    self.total += x.nbytes
                    self.of_weights += x.nbytes * (x.untyped_storage().data_ptr() in self.storages)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_reads_each_element_once_and_its_product_once(dtype):
    x = torch.randn(512, 1024).to(dtype)
    digest(x, whole(x.shape), 0, dtype)  # its keys stay
    with ReadBytes([x]) as read:
        digest(x, whole(x.shape), 0, dtype)
    assert read.of_weights == x.nbytes
    assert read.total <= x.nbytes + 8 * x.numel() * 1.02  # keys and row sums are the rest


def test_digests_of_a_device_are_computed_without_the_host(monkeypatch):
    """Nothing is read of the "meta" device, and every copy to it is asynchronous."""
    meta = torch.device("meta")
    certificate._keys.cache_clear()
    model = decoder_model(CONFIG)
    engine = native_engine(model, mesh=single(meta), options=NativeOptions(packed=False))
    params = trees.map(lambda x: x.to(meta), weights())
    engine.load(engine.weights.named(trees.map(torch.clone, params)), 3)
    with no_waits():
        digests = sync_digests(deployed(place(model, single(meta)), params), engine, 3)
    assert digests.own_N5.device == meta and len(digests.own_N5) == 1 + len(trees.leaves(params))
    certificate._keys.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_computes_digests_on_a_stream_of_its_own():
    """Weights that are freed at once are read first, and what follows on the usual stream does not wait."""
    device = torch.device("cuda:0")
    model = decoder_model(CONFIG)
    params = trees.map(lambda x: x.to(device), weights())
    for change in (None, zeroed):
        engine = native_engine(model, single(device), options=NativeOptions(packed=False))
        named = {name: x.clone() for name, x in engine.weights.named(params)}
        engine.load((change(named) if change else named).items(), 3)
        copies_of = trees.map(torch.clone, params)
        digests = sync_digests(deployed(place(model, single(device)), copies_of), engine, 3)
        del copies_of
        trees.map(lambda x: torch.full_like(x, 7.0), params)  # takes the memory that is free
        if change is None:
            assert digests.compare().whole
        else:
            with pytest.raises(SyncError, match=f"{WRONG} differs"):
                digests.compare()


def test_a_proof_is_read_once_after_some_iterations():
    params = weights()
    proof = SyncProof()
    source = deployed(place(decoder_model(CONFIG)), params)
    for change in (None, zeroed):
        engine = synced(params, change=change)
        proof.begin({"policy": PolicyProof(sync_digests(source, engine, 3), engine.weights, 3)})
        for _ in range(READ_AFTER - 1):
            proof.iterated()
        assert proof.take() == {}
        if change is None:
            proof.iterated()
            assert proof.take() == {"sync/verified": 1.0} and proof.take() == {}
        else:
            with pytest.raises(SyncError, match=f"{WRONG} differs on rank 0"):
                proof.iterated()
    proof.settle()  # of nothing
    assert proof.take() == {}
