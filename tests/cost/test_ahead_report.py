"""The report of `funrl compile`: what counts as a difference, and the mesh that it takes."""

import math

import pytest

pytest.importorskip("jax")
from dry_jobs import settings, write_config

from funrl.algos.recipes import recipe
from funrl.cost.ahead import report
from funrl.xla.ahead import AheadProgram
from funrl.xla.errors import XlaError

pytestmark = pytest.mark.xla


def findings(temporary):
    """Findings about a phase that the dry run gives 100 bytes; 50 bytes are resident."""
    program = AheadProgram("scores", 1.0, 50, 0, 0, temporary, 0)
    return report.differences({"score_policy": report.CompiledPhase((program,), 50, 100.0)})


@pytest.mark.parametrize("ratio", [0.86, 1.0, 1.14])
def test_numbers_within_15_percent_are_no_finding(ratio):
    assert findings(round(100 * ratio) - 50) == ["the dry run agrees within 15%"]


def test_a_number_that_differs_by_more_is_a_finding():
    assert findings(66) == ["finding: memory of score_policy: compiled 116 B, dry run 100 B (+16%)"]


def test_the_mesh_of_a_number_of_chips_is_chosen_for_the_target(tmp_path, monkeypatch):
    meshes = []
    notes = []

    def stop(target, sizes):
        meshes.append((target, sizes))
        raise XlaError("enough")

    monkeypatch.setattr(report, "topology_mesh", stop)
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = settings(mesh="auto:4", model=model, hardware="h100", dry_run=True, prompt_tokens=40)
    with pytest.raises(XlaError, match="enough"):
        report.compile_report(flags, recipe("grpo"), "v5e:2x2", notes.append)
    target, sizes = meshes[0]
    assert len(meshes) == 1 and target == "v5e:2x2" and math.prod(sizes.values()) == 4
    assert notes[0].startswith("--mesh=auto:4 is --mesh=") and "of a device's 14.7 GB" in notes[0]
