"""The dry run of a model with a vision tower: its weights are counted, and what is not is said."""

import pytest
from dry_jobs import CPU, plain

from funrl import trees
from funrl.cost import dry_run
from funrl.cost.descriptions import left_out


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
    peaks = {name: x.phases["update_policy"].peak for name, x in found.items()}
    assert all(peak["weights"] >= 4 * trees.count(shapes) for peak in peaks.values())
    assert peaks["learning"]["weights"] == peaks["frozen"]["weights"] > peaks["shared"]["weights"]
    held = trees.count((shapes["vision"]["embed"], shapes["vision"]["layers"]))
    more = peaks["learning"]["optimizer"] - peaks["frozen"]["optimizer"]
    assert more == pytest.approx(2 * 4 * held, rel=1e-2)  # two float32 moments of each weight
    assert peaks["shared"]["optimizer"] == pytest.approx(peaks["learning"]["optimizer"] / 2, rel=3e-2)  # but norms


def test_the_work_of_the_tower_is_said_not_to_be_counted():
    said = "the work of the vision tower, and patches of pictures"
    assert said in left_out(plain("grpo", task="shapes"), None, CPU)
    assert said not in left_out(plain("grpo"), None, CPU)
