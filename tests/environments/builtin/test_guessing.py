"""The number game of two agents, with scripted players."""

import asyncio

import pytest
from small_policy import Scripted

from funrl.data.prompts import Example
from funrl.environments.builtin.guessing import NumberGame, guess_the_number


def play(policy, turns=3, **fields):
    environment = guess_the_number(9, turns, "{low}-{high}")
    return asyncio.run(environment.run(policy, Example([], "", {"secret": 7, **fields}), 5))


def test_players_hear_the_bounds_in_turn_and_one_wins():
    policy = Scripted(policy=["I say 4", "none", "7"], rival=["9", "5, no, 8"])
    episode = play(policy)
    assert policy.heard == [
        ("policy", "1-9"),
        ("rival", "5-9"),
        ("policy", "5-8"),
        ("rival", "5-8"),
        ("policy", "5-7"),
    ]
    assert episode.rewards == {"policy": 1.0, "rival": 0.0} and len(episode.ends) == 2


def test_who_begins_and_what_ends_a_game():
    policy = Scripted(policy=["1"] * 9, rival=["99", "0", "7"])
    assert play(policy, first="rival").rewards == {"rival": 1.0, "policy": 0.0}
    drawn = play(Scripted(policy=["1"] * 9, rival=["2"] * 9), turns=2)
    assert drawn.rewards == {"policy": 0.0, "rival": 0.0} and drawn.status == "done"
    assert play(Scripted(policy=["1"], rival=["2"] * 9)).status == "tokens"


def test_the_fixed_rival_names_what_is_possible_and_the_policy_has_a_turn():
    for seed in range(8):
        policy = Scripted(policy=["1"] * 9)
        environment = guess_the_number(2, 3, "{low}-{high}")
        fields = {"secret": 2, "rival": "random", "first": "rival"}
        episode = asyncio.run(environment.run(policy, Example([], "", fields), seed))
        assert episode.rewards == {"policy": 0.0} and len(episode.ends) == 1
        assert policy.heard in ([("policy", "1-2")], [("policy", "2-2")])


def test_a_guess_outside_of_the_bounds_changes_nothing():
    game = NumberGame(5, 1, 9)
    for number in (3, 2, 8, 9, None):
        assert not game.guess(number)
    assert (game.low, game.high) == (4, 7) and game.guess(5)
    with pytest.raises(ValueError, match="largest=1"):
        guess_the_number(1)
