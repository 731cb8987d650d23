"""Faults by which rows are sampled by another policy than the one that the trainer has published.

Each is planted in `test_foreign_rows.py`, and in `test_vllm_foreign_rows.py` where vLLM can have it. The list was
written before what finds them.
"""

from typing import NamedTuple

import torch

from funrl import trees
from funrl.mesh.patches import encode_patch
from funrl.models import decoder_model, place
from funrl.models.deployed import deployed
from funrl.models.lora import with_lora
from funrl.models.model import Lora
from funrl.rollout.load_digest import tree_digest
from funrl.rollout.remote.engine import trained_digests


class PlantedFault(NamedTuple):
    """A fault.

    Attributes:
      text: what goes wrong.
      engines: that can have it.
    """

    text: str
    engines: tuple[str, ...]


NATIVE, VLLM, SERVER = "native", "vllm", "vllm_server"
ALL = (NATIVE, VLLM, SERVER)

FAULTS = {
    "stale_weights": PlantedFault("the load reports a new version and leaves the old weights", ALL),
    "stale_adapter": PlantedFault("the factors of an adapter are those of an earlier step", ALL),
    "stale_merge": PlantedFault("the adapter that is merged into the weights is that of an earlier step", ALL),
    "merged_twice": PlantedFault("an adapter is merged into weights that have it already", ALL),
    "slept_with_old_weights": PlantedFault("the engine sleeps, takes weights, and wakes with those from before", ALL),
    "swapped_layers": PlantedFault("two layers have each other's weights", ALL),
    "scale_not_sent": PlantedFault("weights in 8 bits are new, and their scales are old", (NATIVE,)),
    "patch_on_wrong_base": PlantedFault("changed numbers are written into other weights than they were taken of", ALL),
    "old_shard_of_a_rank": PlantedFault("one tensor rank of a replica has shards of an earlier step", (NATIVE, VLLM)),
    "interrupted_load": PlantedFault("a load ends half-way: some layers are new, the others old", ALL),
    "other_weights_after_resume": PlantedFault("a resumed run's engine has the weights that the run began with", ALL),
    "second_policy": PlantedFault("the engine of one policy has the weights of another", ALL),
    "other_dtype": PlantedFault("the engine computes with weights of a narrower dtype than the trainer gave", ALL),
    "earlier_run": PlantedFault("a row of an earlier run, of a version that this run has too, is trained on", ALL),
}
LORA = Lora(4, 8.0, targets=("q", "v", "up", "down"))


class Steps:
    """Weights of a run: at its begin, and after two steps; of another policy; and an adapter on the newest."""

    def __init__(self, config):
        self.model = decoder_model(config)
        self.first = self.init(0)
        self.old = moved(self.first, 1)
        self.new = moved(self.old, 2)
        self.other = self.init(9)
        self.adapted = with_lora(self.model, LORA)
        self.stale_factors, self.factors = self.adapter(3), self.adapter(4)

    def init(self, seed):
        return self.model.init(torch.Generator().manual_seed(seed), torch.float32)

    def adapter(self, seed):
        """The newest weights with an adapter that does something."""
        params = self.adapted.init(torch.Generator().manual_seed(seed), torch.float32)
        base = dict(trees.named(self.new))
        random = torch.Generator().manual_seed(seed)
        named = [
            (name, base[name] if name in base else torch.randn(x.shape, generator=random) * 0.05)
            for name, x in trees.named(params)
        ]
        return trees.from_named(params, named)

    def merged(self, params):
        """The weights with their adapter merged."""
        return deployed(place(self.adapted), params).tree()

    def twice(self):
        """Weights with the adapter merged two times."""
        plain, once = dict(trees.named(self.new)), dict(trees.named(self.merged(self.factors)))
        return trees.from_named(self.new, [(name, 2 * once[name] - x) for name, x in plain.items()])


def moved(params, seed):
    """Weights some of whose numbers an update has changed."""
    random = torch.Generator().manual_seed(seed)
    changes = lambda x: (torch.rand(x.shape, generator=random) < 0.1) * 0.01  # noqa: E731
    return trees.map(lambda x: x + changes(x), params)


def swapped(params):
    """The weights with two layers exchanged."""
    return {**params, "layers": (params["layers"][1], params["layers"][0], *params["layers"][2:])}


def patched(new, old, base):
    """The numbers that differ between two versions, written into a third, as a patch without its checksum does."""

    def of_leaf(leaf, before, under):
        count = int(encode_patch(leaf.reshape(-1), before.reshape(-1))[:8].view(torch.int64))
        return leaf if count < 0 else torch.where(leaf != before, leaf, under)

    return trees.map(of_leaf, new, old, base)


def half(new, old):
    """The first half of the weights of one version, and the others of another."""
    names = [name for name, _ in trees.named(new)]
    late = set(names[len(names) // 2 :])
    before = dict(trees.named(old))
    return trees.from_named(new, [(name, before[name] if name in late else x) for name, x in trees.named(new)])


def wrong_weights(steps):
    """By fault: what the trainer publishes, and what the engine holds instead."""
    merged = steps.merged(steps.factors)
    return {
        "stale_weights": (steps.new, steps.old),
        "stale_merge": (merged, steps.merged(steps.stale_factors)),
        "merged_twice": (merged, steps.twice()),
        "swapped_layers": (steps.new, swapped(steps.new)),
        "patch_on_wrong_base": (steps.new, patched(steps.new, steps.old, steps.first)),
        "interrupted_load": (steps.new, half(steps.new, steps.old)),
        "other_weights_after_resume": (steps.new, steps.first),
        "second_policy": (steps.new, steps.other),
        "other_dtype": (steps.new, trees.map(lambda x: x.bfloat16().float(), steps.new)),
    }


def published(params, spec, model):
    """The digest that a trainer publishes of weights, from its own alone."""
    digests = trained_digests(deployed(place(model), params), spec)
    names = [name for name, _ in trees.named(spec.layouts)]
    return tree_digest(dict(zip(names, digests[:, 0].tolist(), strict=True)), spec)
