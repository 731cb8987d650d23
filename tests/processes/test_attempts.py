"""Ranks of one attempt find each other, whatever an earlier attempt has left in the store."""

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from forked_python import run_with_python

from funrl.processes.environment import has_agents, join_attempt, lead_attempt, new_attempt
from funrl.processes.forks import end_with_parent
from funrl.processes.store import keep_store, listen
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


@contextlib.contextmanager
def store_of_a_process():
    """The port of a store that a process of its own keeps: a process with such threads could not fork."""
    listener = listen()  # here, so that no other process can take the port meanwhile
    pid = os.fork()
    if not pid:
        end_with_parent()
        server = keep_store(listener)
        while server:
            signal.pause()
    port = listener.getsockname()[1]
    listener.close()
    try:
        yield port
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


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
    rendezvous = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=run --local-addr=127.0.0.1 --rdzv-conf=is_host=0"
    torchrun = f"$PYTHON -m torch.distributed.run {rendezvous} --nproc-per-node=1 --max-restarts=1 --no-python"
    program = (
        "$PYTHON -m funrl grpo --mesh=dp2 --device=cpu --compile=off --batch_prompts=4 --eval_prompts=2 "
        "--warmstart_steps=0 --steps=5 --samples_per_prompt=2 --max_new_tokens=4 --save_every=1 --reward_workers=0 "
        "--resume --run_dir=run --prompts=p.jsonl --reward=r.py:digits --keep_checkpoints=9 --timeout=2"
    )
    with store_of_a_process() as port:
        agent = f"{torchrun} --rdzv-endpoint=127.0.0.1:{port} {program}"
        agents = f"cd {tmp_path}; {agent} & {agent}; second=$?; wait $!; echo codes $? $second"
        done = run_with_python(["sh", "-c", agents], os.environ | {"OMP_NUM_THREADS": "1"}, timeout_s=300)
    text = done.stdout[-6000:] + done.stderr[-6000:]
    assert (tmp_path / "killed").exists() and "codes 0 0" in done.stdout, text
    assert max(complete_checkpoints(tmp_path / "run/checkpoints")) == 5, text
