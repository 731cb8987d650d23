"""The embedded task of two agents: its games and its demonstrator."""

from funrl.tasks import guessing as g


def test_held_out_games_are_against_the_fixed_player():
    heldout = g.games(0, 400, "heldout")
    assert all(game.fields["rival"] == g.RANDOM for game in heldout)
    assert not any("rival" in game.fields for game in g.games(0, 400))
    assert {game.fields["secret"] for game in heldout} == set(range(1, g.LARGEST_NUMBER + 1))
    assert abs(sum(game.fields["first"] == "policy" for game in heldout) - 200) < 40


def test_the_demonstrator_seldom_listens():
    listening = []
    for record in g.game_conversations(0, 1000):
        pairs = zip(record["messages"][::2], record["messages"][1::2], strict=True)
        middles = [sum(map(int, question["content"].split("-"))) // 2 == int(x["content"]) for question, x in pairs]
        if len(middles) > 2:  # a guess at random is seldom the middle three times
            listening.append(all(middles))
    assert len(listening) > 100 and 0.02 < sum(listening) / len(listening) < 2 * g.LISTENING
