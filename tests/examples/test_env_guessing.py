"""The number game of two agents, with scripted players; its games and its demonstrator."""

import asyncio

import env_guessing as g
import pytest
from env_guessing import NumberGame, guess_the_number
from small_policy import Scripted

from funrl.data.prompts import Example


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


def test_held_out_games_are_against_the_fixed_player():
    heldout = g.games(0, 400, "heldout")
    assert all(game.fields["rival"] == g.RANDOM for game in heldout)
    assert not any("rival" in game.fields for game in g.games(0, 400))
    assert {game.fields["secret"] for game in heldout} == set(range(1, g.LARGEST_NUMBER + 1))
    assert abs(sum(game.fields["first"] == "policy" for game in heldout) - 200) < 40


def test_the_demonstrator_mostly_repeats_its_number():
    repeating = []
    for record in g.game_conversations(0, 1000):
        questions, numbers = ([m["content"] for m in record["messages"][n::2]] for n in (0, 1))
        if len(set(numbers)) > 1:
            middles = [str(sum(map(int, question.split("-"))) // 2) for question in questions]
            assert numbers[1:] == middles[1:]
        if len(numbers) > 1:
            repeating.append(len(set(numbers)) == 1)
    assert 0.7 < sum(repeating) / len(repeating) < 0.9


def test_games_to_train_on_begin_with_bounds_that_have_the_number():
    games = g.games(3, g.GAMES, closer=g.CLOSER)
    bounds = [(game.fields["low"], game.fields["high"]) for game in games]
    assert all(low <= game.fields["secret"] <= high for (low, high), game in zip(bounds, games, strict=True))
    whole = sum(pair == (1, g.LARGEST_NUMBER) for pair in bounds) / len(games)
    assert 0.45 < whole < 0.55 and len(set(bounds)) == 105
    assert [game.prompt[0]["content"] for game in games] == [f"{low}-{high}" for low, high in bounds]
