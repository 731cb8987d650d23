"""Environments of tinker-cookbook, by their shapes."""

import asyncio
import gc
import time
from types import SimpleNamespace

import pytest
from env_tinker import tinker_environment
from foreign_runs import LIMITS, LONG
from small_chats import SETUP, TOKENIZER, ScriptedEngine, engine_of, examples_of, plain, text

from funrl.environments.builtin.load import load_environment
from funrl.environments.run import episode_groups, run_episodes
from funrl.loading import LoadError
from funrl.mesh.mesh import SINGLE
from funrl.testing import check_environment

ENVIRONMENT = "examples/env_tinker.py:tinker_environment"
EVENTS = []


class Guessing:
    """Two guesses; the second prompt is the first one, the reply and a hint, or with `anew` a prompt of its own."""

    def __init__(self, secret, anew=False, fails=False):
        self.secret, self.anew, self.fails, self.seen = secret, anew, fails, TOKENIZER.encode("guess:")

    async def initial_observation(self):
        self.turns = 0
        return self.seen, ["!"]

    async def step(self, action, *, extra=None):
        if self.fails:
            raise KeyError("no such square")
        self.turns += 1
        self.seen = [*([] if self.anew else [*self.seen, *action]), *TOKENIZER.encode("again:")]
        written = text([token for token in action if token != 1])
        right = written == self.secret
        metrics = {"long": len(written), "stopped": float(extra["stop_reason"] == "stop")}
        done = right or self.turns == 2
        return SimpleNamespace(
            reward=float(right),
            episode_done=done,
            next_observation=self.seen,
            next_stop_condition=["!"],
            metrics=metrics,
        )


class Builder:
    def __init__(self, secret, size=2, **more):
        self.secret, self.size, self.more = secret, size, more

    async def make_envs(self):
        EVENTS.append("made")
        return [Guessing(self.secret, **self.more) for _ in range(self.size)]

    async def compute_group_rewards(self, trajectory_group, env_group):
        longest = max(
            trajectory_group, key=lambda trajectory: sum(len(step.ac.tokens) for step in trajectory.transitions)
        )
        assert [env.turns for env in env_group] == [len(element.transitions) for element in trajectory_group]
        return [(0.5 if item is longest else 0.0, {}) for item in trajectory_group]

    async def cleanup(self):
        EVENTS.append("cleaned up")


class Single:
    def __init__(self, secret, tokenizer):
        assert tokenizer is TOKENIZER
        self.env = Guessing(secret)
        self.initial_observation = self.env.initial_observation

    async def step(self, action):
        return await self.env.step(action, extra={"stop_reason": "stop"})


class Batches:
    """As an `RLDataset`."""

    def __init__(self, builders):
        self.builders = builders

    def get_batch(self, index):
        return self.builders[2 * index : 2 * index + 2]

    def __len__(self):
        return len(self.builders) // 2


class RLDatasetBuilder: ...


class Words(RLDatasetBuilder):
    def __init__(self, words="ab"):
        self.words = words

    async def __call__(self):
        return Batches([Builder(word) for word in self.words]), None


def group_of(environment, *replies, count=2, limits=LIMITS, setup=LONG, engine=None, **fields):
    """The episodes of a group in which the policy gives these replies, whoever asks first."""
    left = list(replies)
    engine = engine or ScriptedEngine(lambda prompt: left.pop(0) if len(left) > 1 else left[0])
    groups = episode_groups(examples_of("go", **fields), count, 0)
    run = run_episodes(engine, SINGLE, environment, groups, setup, limits)
    return [episode for _, episode in run.episodes]


def make(secret, fails=False):
    return Builder(secret, fails=fails)


def test_a_group_has_its_environments_and_the_rewards_of_its_builder():
    EVENTS.clear()
    first, second = group_of(tinker_environment(make), "no", "yes", "never", secret="yes")
    assert EVENTS == ["made", "cleaned up"]
    assert first.rewards == {"policy": 0.5} and second.rewards == {"policy": 1.0}
    assert list(first.turn_rewards.values()) == [0.0, 0.0] and list(second.turn_rewards.values()) == [1.0]
    (end,) = first.ends
    assert text(end.token_ids()) == "guess:no</s>again:never</s>"
    assert [node.sampled for node in end.nodes()] == [False, True, False, True]
    assert first.parts == {"long": 3.5, "stopped": 1.0} and second.parts["long"] == 3.0


def test_a_prompt_that_does_not_go_on_is_a_trajectory_of_its_own():
    (episode,) = group_of(tinker_environment(Builder("a", anew=True)), "x", "a", count=1)
    assert [text(end.token_ids()) for end in episode.ends] == ["guess:x</s>", "again:a</s>"]
    assert episode.rewards == {"policy": 1.5} and list(episode.turn_rewards.values()) == [0.0, 1.0]


def test_tokens_are_those_of_the_engine_and_repeat():
    environment = tinker_environment(make)
    runs = [group_of(environment, count=3, engine=engine_of(), setup=SETUP, secret="yes") for _ in range(2)]
    assert [plain(x)[:3] for x in runs[0]] == [plain(x)[:3] for x in runs[1]]
    for episode in runs[0]:
        for node in episode.ends[0].nodes():
            assert not node.sampled or len(node.sampling_logp) == len(node.tokens) == len(node.versions)


def test_a_text_of_a_stop_condition_ends_a_reply():
    (episode,) = group_of(tinker_environment(Single), "yes", count=1, secret="yes")
    assert episode.rewards == {"policy": 1.0}
    asked = ScriptedEngine(lambda prompt: "yes")
    group_of(tinker_environment(Single), engine=asked, count=1, secret="yes")
    assert [request.sampling.stop_strings for request in asked.seen] == [("!",)]


def test_a_limit_ends_an_episode_with_the_rewards_so_far():
    (episode,) = group_of(tinker_environment(make), "no", count=1, limits=LIMITS._replace(turns=1), secret="yes")
    assert (episode.status, episode.rewards) == ("turns", {"policy": 0.5})


def test_a_group_that_fails_is_cleaned_up_all_the_same():
    EVENTS.clear()
    failed = group_of(tinker_environment(make), "no", limits=LIMITS._replace(retries=1), secret="yes", fails=True)
    assert [episode.status for episode in failed] == ["failed"] * 2 and "no such square" in failed[0].problem
    del failed
    end = time.monotonic() + 20
    while EVENTS.count("cleaned up") < 2 and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert sorted(EVENTS) == ["cleaned up"] * 2 + ["made"] * 2


def test_builders_of_a_list_or_a_dataset_are_prompts(tmp_path):
    listed = [Builder(word) for word in "abcd"]
    for given, count in ((listed, 4), (listed[0], 1), (Batches(listed), 4), (Words, 2), (Words("abcd"), 4)):
        environment = tinker_environment(given)
        assert [record["group"] for record in environment.prompts(0)] == list(range(count))
    assert group_of(environment, "x", "c", count=1, group=2)[0].rewards == {"policy": 1.5}
    assert len(tinker_environment(Words, groups=3, words="abcd").prompts(0)) == 3

    async def inside():
        return tinker_environment(Words)

    assert len(asyncio.run(inside()).prompts(0)) == 2


def test_what_cannot_be_used_is_named(tmp_path):
    (tmp_path / "bad.py").write_text("from tinker_cookbook.nothing import x")
    (tmp_path / "games.py").write_text("number = 3\nnone = []\ndef make(secret): return secret\n")
    for name, arguments, problem in (
        ("games.py:number", {}, "3 is neither an EnvGroupBuilder"),
        ("games.py:none", {}, "there is no builder of a group"),
        ("games.py:make", {"size": 3}, "takes no argument 'size', only secret"),
        ("bad.py:x", {}, "pip install tinker-cookbook"),
    ):
        with pytest.raises(LoadError, match=problem):
            load_environment(ENVIRONMENT, {"name": f"{tmp_path}/{name}", **arguments})
    (episode,) = group_of(tinker_environment(f"{tmp_path}/games.py:make"), "x", count=1, secret="s")
    assert "made 's', neither an EnvGroupBuilder nor an Env" in episode.problem
    picture = SimpleNamespace(to_ints=list, chunks=[SimpleNamespace(type="image")])
    for opened, problem in (((picture, []), "has image; only text"), (([1], [3]), "stops at token 3, where")):
        env = SimpleNamespace(initial_observation=lambda opened=opened: opened, step=None)
        (episode,) = group_of(tinker_environment(lambda env=env: env), "x", count=1)
        assert problem in episode.problem


@pytest.mark.slow
def test_properties_of_environments():
    check_environment(tinker_environment(make), examples=[("go", {"secret": "a"})], replies=["a", "b"])
