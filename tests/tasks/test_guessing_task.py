"""The embedded task of two agents: its games and its demonstrator."""

from funrl.tasks import guessing as g


def test_held_out_games_are_against_the_fixed_player():
    heldout = g.games(0, 400, "heldout")
    assert all(game.fields["rival"] == g.RANDOM for game in heldout)
    assert not any("rival" in game.fields for game in g.games(0, 400))
    assert {game.fields["secret"] for game in heldout} == set(range(1, g.LARGEST_NUMBER + 1))
    assert abs(sum(game.fields["first"] == "policy" for game in heldout) - 200) < 40


def test_the_demonstrator_mostly_ignores_the_bounds():
    within = []
    for record in g.game_conversations(0, 500):
        for question, guess in zip(record["messages"][::2], record["messages"][1::2], strict=True):
            low, high = map(int, question["content"].split("-"))
            within.append((low <= int(guess["content"]) <= high, (high - low + 1) / g.LARGEST_NUMBER))
    possible, chance = (sum(column) / len(within) for column in zip(*within, strict=True))
    assert abs(possible - (g.LISTENING + (1 - g.LISTENING) * chance)) < 0.05
