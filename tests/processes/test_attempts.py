"""Ranks of one attempt find each other, whatever an earlier attempt has left in the store."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from funrl.processes.store import keep_store, listen
from funrl.processes.torchrun import has_agents, join_attempt, lead_attempt, new_attempt
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints

WAIT = timedelta(seconds=60)


@pytest.fixture
def store():
    listener = listen()
    port = listener.getsockname()[1]
    server = keep_store(listener)
    yield lambda: dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=WAIT)
    del server


def joined(store, world, lead):
    """The attempts that all ranks but the first join, beside a first rank that leads one."""
    names = {}

    def join(rank):
        names[rank] = join_attempt(store(), rank, WAIT)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(1, world)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)  # so that they ask before it leads, for an earlier attempt if the store has one
    lead()
    for thread in threads:
        thread.join()
    return [names[rank] for rank in range(1, world)]


def test_each_attempt_is_joined_by_the_ranks_that_are_there(store):
    for _ in range(3):
        attempt = new_attempt()
        assert joined(store, 4, lambda attempt=attempt: lead_attempt(store(), attempt, 4, WAIT)) == [attempt] * 3


def test_ranks_wait_while_the_store_has_an_earlier_attempt(store):
    first = new_attempt()
    joined(store, 2, lambda: lead_attempt(store(), first, 2, WAIT))
    with pytest.raises(TimeoutError, match="waited 0 s for rank 0 to start"):
        join_attempt(store(), 1, timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match="waited 0 s for ranks 1, 2 of 3 to start"):
        lead_attempt(store(), new_attempt(), 3, timedelta(seconds=0.2))


def test_only_several_agents_need_it():
    several = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    assert has_agents(several) and not has_agents(several | {"GROUP_WORLD_SIZE": "1"}) and not has_agents({})


REWARD = """
import os, pathlib, signal

def digits(prompt, completion):
    folder = pathlib.Path(__file__).parent
    killed = folder / "killed"
    if os.environ["RANK"] == "1" and (folder / "run/checkpoints/step-2").exists() and not killed.exists():
        killed.write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(map(completion.count, "12345"))
"""


@pytest.mark.slow
@pytest.mark.gloo
def test_a_run_of_two_agents_goes_on_after_one_of_its_ranks_was_killed(tmp_path):
    (tmp_path / "r.py").write_text(REWARD)
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(1, 9)))
    listener = listen()
    port = listener.getsockname()[1]
    server = keep_store(listener)  # the agents' store, here so that no other process can take its port meanwhile
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run", "--local-addr=127.0.0.1",
        "--rdzv-conf=is_host=0",
    ]  # fmt: skip
    program = [
        "-m", "funrl", "grpo", "--mesh=dp2", "--device=cpu", "--compile=off", "--batch_prompts=4", "--eval_prompts=2",
        "--warmstart_steps=0", "--steps=5", "--samples_per_prompt=2", "--max_new_tokens=4", "--save_every=1",
        "--reward_workers=0", "--resume", f"--run_dir={tmp_path}/run", f"--prompts={tmp_path}/p.jsonl",
        f"--reward={tmp_path}/r.py:digits", "--keep_checkpoints=9", "--timeout=2",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "agent-0.log", "w") as one, open(tmp_path / "agent-1.log", "w") as other:
        command = [*torchrun, *program]
        agents = [subprocess.Popen(command, stdout=log, stderr=log, env=environment) for log in (one, other)]
        try:
            codes = [agent.wait(timeout=300) for agent in agents]
        finally:
            for agent in agents:
                agent.terminate()  # which ends its ranks
            del server
    text = "\n".join((tmp_path / f"agent-{agent}.log").read_text()[-6000:] for agent in range(2))
    assert (tmp_path / "killed").exists() and codes == [0, 0], text
    assert max(complete_checkpoints(tmp_path / "run/checkpoints")) == 5, text
