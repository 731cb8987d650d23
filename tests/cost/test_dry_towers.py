"""The dry run of a model with a vision tower: its weights."""

import pytest
from dry_jobs import CPU, plain

from funrl import trees
from funrl.cost import dry_run


@pytest.mark.slow
def test_the_tower_is_counted_with_its_optimizer_if_it_learns_and_shared_with_fsdp():
    jobs = {
        "frozen": plain("grpo", task="shapes"),
        "learning": plain("grpo", task="shapes", freeze="none"),
        "shared": plain("grpo", task="shapes", freeze="none", mesh="dp2", generate_mesh="dp2", fsdp=True),
    }
    found = {name: dry_run.estimate(job, 32, CPU) for name, job in jobs.items()}
    shapes = jobs["frozen"].model.shapes
    assert {x.parameters for x in found.values()} == {trees.count(shapes)}
    weights = {name: x.phases["advantage"].peak["weights"] for name, x in found.items()}
    assert all(nbytes >= 4 * trees.count(shapes) for nbytes in weights.values())
    assert len(set(weights.values())) == 1  # of two roles, or of halves of both and of the engine
    peaks = {name: x.phases["update_policy"].peak for name, x in found.items()}
    held = trees.count((shapes["vision"]["embed"], shapes["vision"]["layers"]))
    more = peaks["learning"]["optimizer"] - peaks["frozen"]["optimizer"]
    assert more == pytest.approx(2 * 4 * held, rel=1e-2)  # two float32 moments of each weight
    assert peaks["shared"]["optimizer"] == pytest.approx(peaks["learning"]["optimizer"] / 2, rel=3e-2)  # but norms
