"""Groups that --fsdp shards inside of on several nodes."""

import pytest
from dry_jobs import H100, settings, write_config

from funrl.algos.recipes import recipe
from funrl.cli.command import Experiment, read_command, with_mesh
from funrl.cost.search import node_mesh, with_groups
from funrl.mesh.text import parse, text
from funrl.trainer.settings.settings import with_flags

ROOM = H100
CROWDED = H100._replace(memory=1e6)


@pytest.mark.parametrize(
    ("mesh", "node", "experts", "expected"),
    [
        ("dp16", 8, False, "dp2,ep8"),
        ("dp8,tp2", 8, False, "dp2,ep4,tp2"),
        ("dp4,sp4", 8, False, "dp2,ep2,sp4"),
        ("dp2,sp8", 8, False, "dp2,sp8"),
        ("dp2,tp8", 8, False, None),
        ("dp6", 4, False, None),
        ("tp16", 8, False, None),
        ("dp2,ep8", 8, True, "dp2,ep8"),
        ("dp16", 8, True, None),
        ("dp4,ep4", 8, True, None),
        ("dp2,ep4,tp2", 8, False, "dp2,ep4,tp2"),
    ],
)
def test_data_is_across_nodes_and_the_rest_inside_of_one(mesh, node, experts, expected):
    result = node_mesh(parse(mesh), node, experts)
    assert (result and text(result)) == expected


def test_a_shard_that_fits_stays_in_its_node_and_a_line_says_so(tmp_path):
    flags = settings(mesh="dp16", fsdp=True, model=write_config(tmp_path, num_hidden_layers=1))
    inside, note = with_groups(flags, recipe("grpo"), ROOM, 8)
    assert inside == with_flags(flags, mesh="dp2,ep8", fsdp_axes="ep")
    assert "inside of each node of 8 and copied to 2 nodes" in note and "--mesh=dp2,ep8 --fsdp_axes=ep" in note
    over, note = with_groups(flags, recipe("grpo"), CROWDED, 8)
    assert over == flags
    assert note.startswith("--fsdp: weights are sharded over all 16 ranks") and "of 8 they would need" in note
    for node, given in ((8, {"fsdp_axes": "dp"}), (None, {}), (16, {}), (8, {"fsdp": False})):
        same = with_flags(flags, **given)
        assert with_groups(same, recipe("grpo"), ROOM, node) == (same, None)


def test_a_run_on_two_nodes_takes_them(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    argv = ["funrl sft", "--mesh=dp4", "--fsdp", "--device=cpu", "--batch_prompts=8"]
    command = with_mesh(read_command(Experiment("sft", "sft", {}), argv, writes=False))
    assert command.settings.devices.mesh == "dp2,ep2" and command.settings.sharding.fsdp_axes == "ep"
    assert "inside of each node of 2 and copied to 2 nodes" in command.notes[-1]
