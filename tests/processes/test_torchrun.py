"""The time that torchrun gives ranks to end."""

import pytest

from funrl.processes.environment import shutdown_remark, shutdown_s

STARTED = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    "environment,arguments,seconds",
    [
        ({}, ["torchrun", "--shutdown-timeout=9"], None),
        (STARTED, ["torchrun", "--nnodes=1", "train.py"], 30),
        (STARTED, ["torchrun", "--shutdown_timeout", "600", "train.py"], 600),
        (STARTED, ["python", "-m", "torch.distributed.run", "--shutdown-timeout=45", "train.py"], 45),
        (STARTED | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, ["torchrun"], 120),
        (STARTED | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, ["torchrun", "--shutdown-timeout=5"], 5),
        (STARTED | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, None, 30),
    ],
)
def test_the_time_is_that_of_the_command_line_then_of_the_variable(environment, arguments, seconds):
    assert shutdown_s(environment, arguments) == seconds
    remark = shutdown_remark(seconds)
    assert remark is None if seconds is None else f"torchrun kills ranks {seconds} s after SIGTERM" in remark
