"""Text environments of SkyRL-gym and of gymnasium, by their shapes."""

import re

import pytest
from env_skyrl import skyrl_environment
from foreign_runs import LIMITS, call_text, heard, run
from small_chats import SETUP, engine_of, text

from funrl.foreign.gym_text import load_gymnasium
from funrl.foreign.load import named_environment
from funrl.loading import LoadError
from funrl.testing import check_environment
from funrl.trainer.jobs.provenance import input_digests
from funrl.trainer.settings.settings import settings_of

GYM = """
class Discrete:
    n, start = 10, 0

class Guessing:
    action_space = Discrete()
    closed = 0

    def __init__(self, turns=3):
        self.turns = turns

    def reset(self, *, seed=None, options=None):
        self.secret, self.left = seed % 10, self.turns
        return "0 to 9", {}

    def step(self, action):
        self.left -= 1
        right = action == self.secret
        return "higher" if action < self.secret else "lower", float(right), right, not self.left, {}

    def close(self):
        type(self).closed += 1

class Words(Guessing):
    action_space = None

    def step(self, action):
        assert isinstance(action, str)
        return {"words": action.split()}, len(action) / 10, True, False, {}

class Forever:
    def reset(self, *, seed=None, options=None):
        return "go on", {}

    def step(self, action):
        return action, 1.0, action == "end", False, {}

def words(observation):
    return repr(observation)
"""


class Spelling:
    """As SkyRL-gym's `BaseTextEnv`."""

    closed = 0

    def __init__(self, env_config=None, extras=None):
        self.word, self.bonus, self.turns = extras["reward_spec"]["ground_truth"], env_config.get("bonus", 0.0), 0

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "in capitals"}], {}

    def step(self, action):
        self.turns += 1
        right = action == self.word
        done = right or self.turns == 2
        answer = [] if done else [{"role": "user", "content": f"not {action}"}]
        return {"observations": answer, "reward": right + self.bonus, "done": done, "metadata": {}}

    def close(self):
        type(self).closed += 1


def test_a_text_environment_of_skyrl():
    environment = skyrl_environment(Spelling, {"bonus": 0.25})
    row = {"reward_spec": {"ground_truth": "ABC"}}
    closed = Spelling.closed
    episode = run(environment, call_text("spell"), "ABC", **row)
    assert (episode.status, episode.rewards) == ("done", {"policy": 1.5})
    assert heard(episode) == ["not " + call_text("spell")]  # the whole text, not what is beside a call
    assert list(episode.turn_rewards.values()) == [0.25, 1.25] and Spelling.closed == closed + 1
    assert text(episode.ends[0].token_ids()).startswith("u>go</s>\nu>in capitals</s>\na>")
    cut = run(environment, "abc", limits=LIMITS._replace(turns=1), **row)
    assert (cut.status, cut.rewards) == ("turns", {"policy": 0.25})
    for node in run(environment, engine=engine_of(), setup=SETUP, **row).ends[0].nodes():
        assert not node.sampled or len(node.sampling_logp) == len(node.tokens)


def test_a_discrete_environment_of_gymnasium(tmp_path):
    (tmp_path / "games.py").write_text(GYM)
    environment = named_environment(f"gymnasium:{tmp_path}/games.py:Guessing", {"turns": 2})
    episode = run(environment, "I say 3.", "none", "10", "no, 7", seed=27)
    assert (episode.status, episode.rewards) == ("done", {"policy": 1.0})
    problem = "error: an action is a whole number from 0 to 9"
    assert heard(episode) == ["higher", problem, problem]
    assert text(episode.ends[0].token_ids()).startswith("u>go\n\n0 to 9</s>")
    assert run(environment, "1", seed=27).rewards == {"policy": 0.0}
    assert run(environment, "none", limits=LIMITS._replace(turns=2), seed=27).rewards == {"policy": None}
    records = environment.prompts(2)
    assert len({record["seed"] for record in records}) == len(records) == 256


def test_texts_and_observations_of_gymnasium(tmp_path):
    (tmp_path / "games.py").write_text(GYM)
    arguments = {"show": f"{tmp_path}/games.py:words", "instruction": "Write."}
    environment = named_environment(f"gymnasium:{tmp_path}/games.py:Words", arguments)
    episode = run(environment, "two words", seed=1)
    assert episode.rewards == {"policy": 0.9} and environment.prompts(0)[0]["prompt"][0]["content"] == "Write."
    assert "u>go\n\n'0 to 9'</s>" in text(episode.ends[0].token_ids())


def test_an_environment_of_gymnasium_needs_no_close(tmp_path):
    (tmp_path / "games.py").write_text(GYM)
    episode = run(named_environment(f"gymnasium:{tmp_path}/games.py:Forever"), "on", "end")
    assert (episode.status, episode.rewards) == ("done", {"policy": 2.0})


def test_what_cannot_be_used_is_named(tmp_path):
    (tmp_path / "games.py").write_text(GYM)
    for name, problem in (
        (f"gymnasium:{tmp_path}/games.py:GYM", "has no 'GYM'"),
        (f"gymnasium:{tmp_path}/games.py:Discrete", "is no environment of gymnasium: it lacks reset, step"),
    ):
        with pytest.raises(LoadError, match=problem):
            named_environment(name)
    with pytest.raises(TypeError, match="is no environment of SkyRL-gym: it lacks init"):
        skyrl_environment(f"{tmp_path}/games.py:Guessing")


def test_what_a_prefix_does_not_know_is_named():
    with pytest.raises(LoadError, match="neither a module nor a framework 'gymnasum'; did you mean gymnasium"):
        named_environment("gymnasum:thing")
    with pytest.raises(LoadError, match=r"--env=gymnasium:: nothing follows gymnasium:"):
        named_environment("gymnasium:")
    with pytest.raises(LoadError, match=r"takes no argument 'rewards', only reply, .*; did you mean reward"):
        named_environment("openenv:http://localhost:1", {"rewards": "exact"})


def test_a_changed_file_behind_a_prefix_has_another_digest(tmp_path):
    file = tmp_path / "games.py"
    settings = settings_of(env=f"gymnasium:{file}:Guessing")
    digests = []
    for source in (GYM, GYM + "\n# changed"):
        file.write_text(source)
        digests.append(input_digests(settings, None)["env"])
    assert digests[0] != digests[1]


@pytest.mark.slow
def test_properties_of_environments(tmp_path):
    (tmp_path / "games.py").write_text(GYM)
    row = {"reward_spec": {"ground_truth": "yes"}}
    check_environment(skyrl_environment(Spelling), examples=[("go", row)])
    check_environment(
        load_gymnasium(f"{tmp_path}/games.py:Guessing"), examples=[("go", {"seed": 3})], replies=["3", "4"]
    )


@pytest.mark.parametrize("package", ["skyrl_gym", "gymnasium"])
def test_registered_environments_of_the_packages(package):
    pytest.importorskip(package, reason=f"{package} is not installed: .ci/setup_environments")
    if package == "skyrl_gym":
        row = {"reward_spec": {"ground_truth": "4"}}
        assert run(skyrl_environment("gsm8k"), "so #### 4", **row).rewards == {"policy": 1.0}
        with pytest.raises(LoadError, match="skyrl-gym has no environment 'gsm9k'; it has "):
            skyrl_environment("gsm9k")
        return
    episode = run(named_environment("gymnasium:CartPole-v1"), "1", seed=1)
    assert episode.status == "done" and episode.rewards["policy"] == len(episode.turn_rewards) > 5
    assert re.match(r"u>go\n\n\[ *-?\d", text(episode.ends[0].token_ids()))
    with pytest.raises(LoadError, match="gymnasium has no environment 'Nothing-v0'"):
        named_environment("gymnasium:Nothing-v0")
