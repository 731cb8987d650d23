"""Environments in processes of their own: whatever happens there ends as an episode."""

import os
import time

import pytest
from small_chats import SETUP, ScriptedEngine, examples_of

from funrl.environments.adapters import message_environment
from funrl.environments.hosted import hosted_environment, open_hosted
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rollout.policy import EpisodeLimits

KINDS = {
    "raises": "KeyError('no such square')",
    "hangs": "longer than 3 s between two calls",
    "blocks": "longer than 3 s between two calls",
    "is killed": "ended by signal SIGKILL",
    "exits": "ended with exit code 3",
    "takes 2 GB": "MemoryError",
    "fine": "",
}


class Dangerous:
    """Plain methods, which run in threads; what they do is named by the example."""

    async def reset(self, example, seed):
        self.kind = example.fields["kind"]
        return [{"role": "user", "content": f"{os.getpid()} {self.kind}"}], ()

    def step(self, message):
        if self.kind == "raises":
            raise KeyError("no such square")
        if self.kind == "hangs":
            time.sleep(1e3)
        if self.kind == "is killed":
            os.kill(os.getpid(), 9)
        if self.kind == "exits":
            os._exit(3)
        if self.kind == "takes 2 GB":
            self.held = b"x" * (2 << 30)
        return [], 1.0, True

    async def close(self):
        if self.kind == "blocks":
            time.sleep(1e3)


@pytest.mark.slow
def test_whatever_happens_in_a_process_ends_as_an_episode():
    examples = [example for kind in KINDS for example in examples_of(kind, kind=kind)]
    engine = ScriptedEngine(lambda prompt: "yes")
    limits = EpisodeLimits(environment_s=3, retries=1)
    environment = hosted_environment(message_environment(Dangerous), workers=32)
    with open_hosted(environment, SETUP.chat, memory_bytes=1 << 30):
        begin = time.monotonic()
        done = run_episodes(engine, SINGLE, environment, episode_groups(examples, 2, 0), SETUP, limits)
        assert time.monotonic() - begin < 60
        again = run_episodes(engine, SINGLE, environment, episode_groups(examples[-1:], 4, 0), SETUP, limits)
    assert [number for number, _ in done.episodes] == list(range(2 * len(KINDS)))
    for number, episode in done.episodes[:-2]:
        assert episode.status == "failed" and list(KINDS.values())[number // 2] in episode.problem
    for _, episode in done.episodes[-2:] + again.episodes:
        assert (episode.status, episode.rewards) == ("done", {"policy": 1.0})


@pytest.mark.parametrize("workers", [1, 4])
def test_a_process_has_one_environment_while_there_are_enough(workers):
    pids = []

    def answer(prompt):
        pids.append(prompt.split()[0])
        return "yes"

    environment = hosted_environment(message_environment(Dangerous), workers)
    with open_hosted(environment, SETUP.chat):
        groups = episode_groups(examples_of("a", kind="fine"), 4, 0)
        done = run_episodes(ScriptedEngine(answer, passes=20), SINGLE, environment, groups, SETUP)
    assert [episode.status for _, episode in done.episodes] == ["done"] * 4 and len(set(pids)) == workers
    assert all(not os.path.exists(f"/proc/{pid[2:]}") for pid in pids)
