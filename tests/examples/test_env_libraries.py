"""Games of textarena and tasks of reasoning-gym, where they are installed."""

import asyncio
import sys

import pytest
from small_policy import Scripted

from funrl.data.prompts import Example
from funrl.environments.builtin.load import load_environment
from funrl.loading import LoadError

GAME = "examples/env_textarena.py:textarena_game"
TASK = "examples/env_reasoning_gym.py:reasoning_task"
NOT_INSTALLED = "it is not installed: pip install 'funrl[environments]'"


def play(environment, policy, seed=5, **fields):
    return asyncio.run(environment.run(policy, Example([], "a question", fields), seed))


@pytest.fixture
def textarena():
    return pytest.importorskip("textarena", reason=NOT_INSTALLED)


@pytest.fixture
def reasoning_gym():
    return pytest.importorskip(
        "reasoning_gym", reason="reasoning-gym is not installed: pip install 'funrl[environments]'"
    )


def test_a_game_of_one_player(textarena):
    environment = load_environment(GAME, {"name": "GuessTheNumber-v0"})
    policy = Scripted(policy=[f"[{n}]" for n in range(1, 21)])
    episode = play(environment, policy)
    assert episode.rewards["policy"] <= 1 and "between 1 and 20" in policy.heard[0][1]
    assert policy.heard[1][1] == "The target number is higher."
    again = Scripted(policy=[f"[{n}]" for n in range(1, 21)])
    assert play(environment, again).rewards == episode.rewards and again.heard == policy.heard
    cut = play(environment, Scripted(policy=["[1]"]), seed=9)
    assert cut.rewards == {"policy": 0.0} and cut.status == "tokens"


def test_a_game_of_two_players(textarena):
    environment = load_environment(GAME, {"name": "TicTacToe-v0", "players": 2})
    policy = Scripted(policy=["[0]", "[1]", "[2]"], player1=["[4]", "[5]"])
    episode = play(environment, policy)
    assert episode.rewards == {"policy": 1.0, "player1": -1.0} and environment.agents == ("policy", "player1")
    assert [agent for agent, _ in policy.heard] == ["policy", "player1", "policy", "player1", "policy"]
    assert "Player 0: [0]" in policy.heard[1][1] and "Player 0:" not in policy.heard[2][1]


def test_concurrent_games_draw_apart(textarena):
    environment = load_environment(GAME, {"name": "GuessTheNumber-v0", "games": 4})
    assert len({record["seed"] for seed in (0, 1) for record in environment.prompts(seed)}) == 8

    async def games():
        policies = [Scripted(policy=[f"[{n}]" for n in range(1, 21)]) for _ in range(6)]
        examples = [Example([], "", {"seed": n % 2}) for n in range(6)]
        await asyncio.gather(
            *(environment.run(p, e, n) for n, (p, e) in enumerate(zip(policies, examples, strict=True)))
        )
        return [policy.heard for policy in policies]

    heard = asyncio.run(games())
    assert heard[0] == heard[2] == heard[4] and heard[1] == heard[3] == heard[5]


def test_a_task_of_reasoning_gym(reasoning_gym):
    environment = load_environment(TASK, {"name": "chain_sum", "size": 5, "max_terms": 2, "attempts": 2})
    records = environment.prompts(3)
    assert len(records) == 5 and records == environment.prompts(3) != environment.prompts(4)
    fields = {"entry": records[0]["entry"]}
    right = records[0]["answer"]
    assert play(environment, Scripted(policy=["no", f"So <answer>{right}</answer>"]), **fields).rewards == {
        "policy": 1.0
    }
    assert play(environment, Scripted(policy=["no", "1"]), **fields).rewards["policy"] < 1.0


@pytest.mark.parametrize(
    "name,reply",
    [
        ("prime_factorization", "The answer is 5 x 7 x 7"),
        ("prime_factorization", "no idea"),
        ("boxnet", "42"),
        ("boxnet", "[1, 2]"),
        ("game_of_life", "{}"),
    ],
)
def test_an_answer_that_a_scorer_cannot_read_is_wrong(reasoning_gym, name, reply):
    environment = load_environment(TASK, {"name": name, "size": 1})
    (record,) = environment.prompts(0)
    with pytest.raises(Exception, match=r".*"):  # of the library
        reasoning_gym.create_dataset(name, size=1, seed=0).score_answer(reply, record["entry"])
    assert play(environment, Scripted(policy=[reply]), entry=record["entry"]).rewards == {"policy": 0.0}


def test_what_cannot_work_is_refused(textarena, reasoning_gym):
    for text, arguments, message in (
        (GAME, {"name": "Absent-v0"}, "env=examples/env_textarena.py:textarena_game: .*Absent-v0"),
        (GAME, {"name": "GuessTheNumber-v0", "players": 2}, "has to be 1, received 2"),
        (GAME, {"name": "TicTacToe-v0", "colour": 2}, "takes no argument 'colour', only name, players, games"),
        (TASK, {"name": "absent"}, "env=examples/env_reasoning_gym.py:reasoning_task: .*absent"),
        (TASK, {"name": "chain_sum", "colour": 2}, "colour"),
    ):
        with pytest.raises(LoadError, match=message):
            load_environment(text, arguments)


@pytest.mark.parametrize("text,package", [(GAME, "textarena"), (TASK, "reasoning_gym")])
def test_a_library_that_is_not_installed(monkeypatch, text, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(LoadError, match=r"pip install 'funrl\[environments\]'"):
        load_environment(text, {"name": "any"})
