"""Weights of trainer ranks in Ray's object store: each once, in objects of a bounded size, and patches of them.

No cluster is needed.
"""

import pytest
import torch
from small_engines import CONFIGS

from funrl import trees
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.rules import STORED, layouts
from funrl.models import decoder_model
from funrl.rollout.native.loading import native_weights
from funrl.rollout.ray import engine as ray_engine
from funrl.rollout.ray.engine import RayEngine, pull_weights


def nbytes_of(parts):
    return sum(part.nbytes for part in parts)


class Store:
    """Ray's object store and an exchange in this process."""

    def __init__(self):
        self.objects = []
        self.topics = {}
        self.post = self
        self.taken = 0  # bytes

    def put(self, parts):
        self.objects.append([part.copy() for part in parts])
        return len(self.objects) - 1

    def get(self, reference):
        if not isinstance(reference, int):
            return None
        self.taken += nbytes_of(self.objects[reference])
        return self.objects[reference]

    def remote(self, topic, references):
        self.topics.setdefault(topic, {}).update(references)

    @property
    def sizes(self):
        return [nbytes_of(parts) for parts in self.objects]


MODEL = decoder_model(CONFIGS["qwen3"])


def sizes_of(**axes):
    return dict.fromkeys(AXES, 1) | axes


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(ray_engine, "gather_objects", lambda own, mesh: [own])
    monkeypatch.setattr(ray_engine, "OBJECT_BYTES", 3000)
    monkeypatch.setattr(ray_engine, "connect_ranks", lambda mesh: (made, made))
    return made


def engines_of(sizes, wanted, dtype=torch.float32, **options):
    """The engine on each trainer rank, the last one first; a generator has `wanted` devices."""
    stored = layouts(MODEL.shapes, MODEL.axes, STORED, sizes)
    spec = native_weights(MODEL, Mesh(sizes_of(tensor=wanted), rank=-1), dtype)
    ranks = reversed(range(Mesh(sizes).world))
    return [RayEngine(spec, stored, Mesh(sizes, rank), **options) for rank in ranks]


def load(engines, whole, version):
    for engine in engines:
        rank = engine.requests.mesh.rank
        boxes = {name: tuple(slice(*edge) for edge in x.box(rank)) for name, x in engine._stored.items()}
        engine.load(((name, x[boxes[name]]) for name, x in trees.named(whole)), version)


def pulled(store, wanted, rank, version, dtype=torch.float32, base=None, model=""):
    """The shards of a device of a generator, whether they are intact, and the bytes that it has taken."""
    spec = native_weights(MODEL, Mesh(sizes_of(tensor=wanted), rank), dtype)
    store.taken = 0
    tree, intact = pull_weights(store, list(store.topics[model, version].values()), spec, base or {})
    return tree, intact, store.taken


def own_shards(whole, wanted, rank):
    spec = native_weights(MODEL, Mesh(sizes_of(tensor=wanted), rank), torch.float32)
    boxes = {name: tuple(slice(*edge) for edge in layout.box(rank)) for name, layout in trees.named(spec.layouts)}
    return trees.map_named(lambda name, x: x[boxes[name]], whole)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(trees.leaves(a), trees.leaves(b), strict=True))


@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}])
@pytest.mark.parametrize("wanted", [1, 2])
def test_each_weight_is_put_once_and_each_device_takes_its_own(sizes, wanted, store):
    whole = trees.map(lambda x: torch.randn(tuple(x.shape)), MODEL.shapes)
    engines = engines_of(sizes_of(**sizes), wanted)
    published = []
    for engine in engines:
        engine.publish = lambda *topic: published.append(topic)
    load(engines, whole, version=4)
    assert all(engine.version == 4 for engine in engines)
    assert published == [("", 4)]
    nbytes = [x.nbytes for x in trees.leaves(whole)]
    assert sum(store.sizes) == sum(nbytes)
    assert max(store.sizes) <= max(3000, *nbytes) and len(store.sizes) > 2
    for rank in range(wanted):
        tree, intact, taken = pulled(store, wanted, rank, 4)
        assert intact and same(tree, own_shards(whole, wanted, rank))
        assert taken == trees.nbytes(tree)
    first, *missing = store.topics["", 4].values()
    spec = native_weights(MODEL, Mesh(sizes_of(tensor=wanted), first.ranks[0]), torch.float32)
    with pytest.raises(ValueError, match=r"the trainer ranks have not put all weights: [0-9,]+ numbers"):
        pull_weights(store, missing, spec, {})


def changed(whole, share, seed=1):
    """Weights of which a share of the numbers differs."""
    draw = torch.Generator().manual_seed(seed)
    return trees.map(lambda x: torch.where(torch.rand(x.shape, generator=draw) < share, -1.5 * x - 1, x), whole)


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "tensor": 2}])
@pytest.mark.parametrize("wanted", [1, 2])
def test_a_generator_that_holds_the_version_before_takes_patches_and_others_everything(sizes, wanted, store):
    dtype = torch.bfloat16
    engines = engines_of(sizes_of(**sizes), wanted, dtype, patches=True)
    versions = [trees.map(lambda x: torch.randn(tuple(x.shape)).to(dtype), MODEL.shapes)]
    versions += [changed(versions[0], 0.03), changed(versions[0], 0.5)]
    for version, whole in enumerate(versions):
        load(engines, whole, version)
    other = engines_of(sizes_of(**sizes), wanted, dtype)  # of generators that show no weights
    for rank in range(wanted):
        before, now, later = (own_shards(whole, wanted, rank) for whole in versions)
        size = trees.nbytes(now)
        tree, intact, taken = pulled(store, wanted, rank, 1, dtype, {0: before})
        assert same(tree, now) and intact and taken < 0.2 * size
        for base in ({}, {7: before}):  # it joins late, or has missed a version
            tree, intact, taken = pulled(store, wanted, rank, 1, dtype, base)
            assert same(tree, now) and intact and taken == size
        tree, intact, taken = pulled(store, wanted, rank, 1, dtype, {0: later})  # other weights than it says
        assert same(tree, now) and not intact and taken > size
        tree, intact, taken = pulled(store, wanted, rank, 2, dtype, {1: now})  # of which most numbers have changed
        assert same(tree, later) and intact and taken == size
    before = len(store.objects)
    load(other, versions[0], 0)
    put = len(store.objects) - before
    load(other, versions[1], 1)
    assert len(store.objects) - before == 2 * put


def test_weights_of_another_model_have_topics_of_their_own(store):
    (policy,) = engines_of(sizes_of(), 1)
    published = []
    rival = policy.of_model("rival")
    policy.publish = lambda *topic: published.append(topic)
    whole = trees.map(lambda x: torch.randn(tuple(x.shape)), MODEL.shapes)
    earlier = changed(whole, 0.5)
    load([policy], whole, 3)
    load([rival], earlier, 1)
    assert (policy.version, rival.version) == (3, 1)
    assert published == [("", 3), ("rival", 1)]
    assert same(pulled(store, 1, 0, 3)[0], whole) and same(pulled(store, 1, 0, 1, model="rival")[0], earlier)
