"""The report of `funrl compile`: what counts as a difference, and the mesh that it takes."""

import math

import pytest

pytest.importorskip("jax")
from dry_jobs import settings, write_config

from funrl.algos.recipes import recipe
from funrl.cost.ahead import report
from funrl.cost.tracing.costs import Costs, Traffic
from funrl.xla.ahead import AheadProgram, Sent
from funrl.xla.errors import XlaError

pytestmark = pytest.mark.xla

AXES = {"0": ("tp2", ("tensor",), {"tensor": 2})}


def findings(temporary=50, flops=1000, nbytes=100, attention=0):
    """Findings about a phase that the dry run gives 100 bytes, 1000 FLOPs and 100 bytes sent; 50 bytes are resident."""
    costs = Costs(traffic={("all_reduce", "0"): Traffic(1, 100.0)})
    expected = report.dry_costs(costs, AXES)._replace(memory=100.0, flops=1000.0)
    sent = (Sent("all-reduce", ("tensor",), 1, nbytes),)
    program = AheadProgram("scores", 1.0, 50, 0, 0, temporary, 0, flops, attention, sent)
    return report.differences({"score_policy": report.CompiledPhase((program,), 50, expected)})


@pytest.mark.parametrize("ratio", [0.86, 1.0, 1.14])
def test_numbers_within_15_percent_are_no_finding(ratio):
    result = findings(temporary=round(100 * ratio) - 50, flops=round(1000 * ratio), nbytes=round(100 * ratio))
    assert result == ["the dry run agrees within 15%"]


@pytest.mark.parametrize(
    "numbers,line",
    [
        ({"temporary": 66}, "finding: memory of score_policy: compiled 116 B, dry run 100 B (+16%)"),
        ({"flops": 840}, "finding: FLOPs of score_policy: compiled 8.4e-07 G, dry run 1e-06 G (-16%)"),
        (
            {"flops": 2000, "attention": 900},
            "finding: FLOPs of score_policy: compiled 2e-06 G, dry run 1e-06 G (+100%); "
            "9e-07 G of the compiled are whole tiles of attention",
        ),
        ({"nbytes": 120}, "finding: bytes over tp of score_policy: compiled 120 B, dry run 100 B (+20%)"),
    ],
)
def test_a_number_that_differs_by_more_is_a_finding(numbers, line):
    assert findings(**numbers) == [line]


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
