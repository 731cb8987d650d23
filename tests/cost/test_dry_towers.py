"""The dry run of a model with a vision tower: its weights, and its layers, of which a few stand for all."""

import dataclasses
import itertools

import pytest
from dry_jobs import CPU, plain

from funrl import trees
from funrl.cost import dry_run
from funrl.cost.tracing import estimate as cost_estimate
from funrl.cost.tracing.estimate import Depth, TracedLayers, traced_layers
from funrl.models.errors import ModelError


@pytest.mark.slow
def test_the_tower_is_counted_with_its_optimizer_if_it_learns_and_shared_with_fsdp():
    jobs = {
        "frozen": plain("grpo", task="shapes"),
        "learning": plain("grpo", task="shapes", freeze="none"),
        "shared": plain("grpo", task="shapes", freeze="none", mesh="dp2", generate_mesh="dp2", fsdp=True),
    }
    results = {name: dry_run.estimate(job, 32, CPU) for name, job in jobs.items()}
    shapes = jobs["frozen"].model.shapes
    assert {x.parameters for x in results.values()} == {trees.count(shapes)}
    weights = {name: x.phases["advantage"].peak["weights"] for name, x in results.items()}
    assert all(nbytes >= 4 * trees.count(shapes) for nbytes in weights.values())
    assert len(set(weights.values())) == 1  # of two roles, or of halves of both and of the engine
    peaks = {name: x.phases["update_policy"].peak for name, x in results.items()}
    held = trees.count((shapes["vision"]["embed"], shapes["vision"]["layers"]))
    more = peaks["learning"]["optimizer"] - peaks["frozen"]["optimizer"]
    assert more == pytest.approx(2 * 4 * held, rel=1e-2)  # two float32 moments of each weight
    assert peaks["shared"]["optimizer"] == pytest.approx(peaks["learning"]["optimizer"] / 2, rel=3e-2)  # but norms


def deeper(job, **tower):
    """The job with towers of other layers."""

    def with_layers(model):
        form = dataclasses.replace(model.config.tower.form, deep_layers=tower["deep_layers"])
        sizes = {"layers": tower["layers"], "whole_layers": tower["whole_layers"], "form": form}
        return model.rebuild(dataclasses.replace(model.config, tower=dataclasses.replace(model.config.tower, **sizes)))

    made = {id(model): with_layers(model) for model in (job.model, *job.models.values())}
    models = {name: made[id(model)] for name, model in job.models.items()}
    return dataclasses.replace(job, model=made[id(job.model)], models=models)


def numbers(costs):
    """All numbers of a phase by name."""
    traffic = {
        (kind, *key, name): number
        for kind, sent in (("all", costs.traffic), ("early", costs.early))
        for key, x in sent.items()
        for name, number in x._asdict().items()
    }
    held = {(part, kind): nbytes for part, peak in costs.peaks.items() for kind, nbytes in peak.items()}
    return traffic | held | {"flops": costs.flops, "seconds": costs.seconds, "cover": costs.cover}


@pytest.mark.slow
def test_a_few_layers_of_each_kind_stand_for_a_tower(monkeypatch):
    """FLOPs, seconds, messages and bytes at every peak are those of the whole tower."""
    flags = {"mesh": "dp2", "generate_mesh": "dp2", "fsdp": True, "freeze": "none"}
    few = {"batch_prompts": 2, "samples_per_prompt": 2, "max_new_tokens": 4, "token_budget": 4096}
    job = deeper(
        plain("grpo", task="shapes", **flags, **few), layers=14, whole_layers=(1, 4, 5, 7, 9, 11), deep_layers=(5,)
    )
    layers = tuple(range(job.model.config.layers))
    assert traced_layers(job.model).few == Depth(layers, tower=4, whole=2)
    phases = dry_run.estimate(job, 32, CPU).phases
    whole = TracedLayers(Depth(layers, 14, 6), ())
    monkeypatch.setattr(cost_estimate, "traced_layers", lambda *_: whole)
    exact = dry_run.estimate(job, 32, CPU).phases
    assert phases.keys() == exact.keys() and exact["update_policy"].traffic
    for name, costs in exact.items():
        assert numbers(phases[name]) == pytest.approx(numbers(costs), rel=1e-9), name


def test_a_shallow_tower_has_the_last_layers_of_each_kind():
    tower = plain("grpo", task="shapes").model.config.tower
    form = dataclasses.replace(tower.form, deep_layers=(0, 5))
    tower = dataclasses.replace(tower, layers=9, whole_layers=(1, 5, 8), form=form)
    few = tower.with_last_layers(5, 2)  # 0, 6, 7 and 5, 8
    assert (few.layers, few.whole_layers, few.form.deep_layers) == (5, (1, 4), (0, 1))
    for layers, whole in itertools.product((3, 9), (0, 4)):
        with pytest.raises(ModelError, match="layers are not between"):
            tower.with_last_layers(layers, whole)
