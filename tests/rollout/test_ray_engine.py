"""Weights of trainer ranks in Ray's object store: each once, in objects of a bounded size. No cluster is needed."""

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


class Store:
    """Ray's object store and an exchange in this process."""

    def __init__(self):
        self.objects = []
        self.topics = {}
        self.post = self

    def put(self, parts):
        self.objects.append([part.copy() for part in parts])
        return len(self.objects) - 1

    def get(self, reference):
        return self.objects[reference] if isinstance(reference, int) else None

    def remote(self, topic, references):
        self.topics.setdefault(topic, {}).update(references)

    @property
    def sizes(self):
        return [sum(part.nbytes for part in parts) for parts in self.objects]


@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}])
@pytest.mark.parametrize("wanted", [1, 2])
def test_each_weight_is_put_once_and_taken_by_every_layout(sizes, wanted, monkeypatch):
    monkeypatch.setattr(ray_engine, "gather_objects", lambda *_: None)
    monkeypatch.setattr(ray_engine, "OBJECT_BYTES", 3000)
    store = Store()
    monkeypatch.setattr(ray_engine, "connect_ranks", lambda mesh: (store, store))
    model = decoder_model(CONFIGS["qwen3"])
    sizes = dict.fromkeys(AXES, 1) | sizes
    stored = layouts(model.shapes, model.axes, STORED, sizes)
    whole = trees.map(lambda x: torch.randn(tuple(x.shape)), model.shapes)
    published = []
    for rank in reversed(range(Mesh(sizes).world)):
        mesh = Mesh(sizes, rank)
        engine = RayEngine(native_weights(model, Mesh(rank=-1), torch.float32), stored, mesh)
        engine.publish = published.append
        boxes = {name: tuple(slice(*edge) for edge in x.box(rank)) for name, x in trees.named(stored)}
        engine.load(((name, x[boxes[name]]) for name, x in trees.named(whole)), version=4)
        assert engine.version == 4
    assert published == [4]
    nbytes = [x.nbytes for x in trees.leaves(whole)]
    assert sum(store.sizes) == sum(nbytes)
    assert max(store.sizes) <= max(3000, *nbytes) and len(store.sizes) > 2
    for rank in range(wanted):
        own = Mesh(dict.fromkeys(AXES, 1) | {"tensor": wanted}, rank)
        spec = native_weights(model, own, torch.float32)
        tree = pull_weights(store, list(store.topics[4].values()), spec)
        for (name, x), (_, layout) in zip(trees.named(tree), trees.named(spec.layouts), strict=True):
            box = tuple(slice(*edge) for edge in layout.box(rank))
            assert torch.equal(x, dict(trees.named(whole))[name][box]), name
    missing = list(store.topics[4].values())[1:]
    with pytest.raises(ValueError, match="the trainer ranks have not put all of"):
        pull_weights(store, missing, native_weights(model, Mesh(), torch.float32))
