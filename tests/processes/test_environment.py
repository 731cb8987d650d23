"""Ranks that another launcher has started: what the environment says of them."""

import pytest

from funrl.cli.run import main
from funrl.processes.environment import LauncherError, first_host, ranks_of_node, read_environment

SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "40123",
}


def test_ranks_of_torchrun_of_slurm_and_of_nobody():
    assert read_environment({}) is None
    assert read_environment({"RANK": "3", "WORLD_SIZE": "4"}) == 3
    environment = dict(SLURM)
    assert read_environment(environment) == 5
    assert environment == SLURM | {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "15123",
    }
    assert read_environment(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert read_environment(SLURM | {"RANK": "0", "WORLD_SIZE": "2"}) == 0  # torchrun in a Slurm step


@pytest.mark.parametrize(
    ("world", "local", "nodes", "expected"),
    [
        ("16", "8", "2", 8),
        ("16", "8", None, 8),
        ("8", "8", "1", None),
        ("12", "8", "2", None),
        ("12", "4", "2", None),
        ("4", None, None, None),
        (None, "8", None, None),
    ],
)
def test_ranks_of_a_node_where_all_nodes_have_as_many(world, local, nodes, expected):
    given = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": nodes}
    assert ranks_of_node({name: text for name, text in given.items() if text is not None}) == expected


@pytest.mark.parametrize(
    ("nodes", "host"), [("a1,a2", "a1"), ("node[01-04,07],x3", "node01"), ("h", "h"), ("r[2,5]-ib,z", "r2-ib")]
)
def test_the_first_host(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK=1 is in the environment and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is in the environment and RANK is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' in the environment: a whole number of at least 0 and below"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' in the environment: .* below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment: a whole number of at least 1 is"),
        (SLURM | {"SLURM_PROCID": ""}, "RANK='' in the environment"),
    ],
)
def test_half_an_environment_is_an_error(environment, message, monkeypatch, capsys):
    with pytest.raises(LauncherError, match=message):
        read_environment(dict(environment))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, environment.get(name, ""))  # so that what a Slurm step sets is taken back
        if name not in environment:
            monkeypatch.delenv(name)
    assert main("grpo", ["grpo", "--steps=1"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
