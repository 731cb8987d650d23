"""The embedded task of two agents: its games and its demonstrator."""

from funrl.tasks import guessing as g


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
    games = g.guessing_task().training_prompts(3)
    bounds = [(game.fields["low"], game.fields["high"]) for game in games]
    assert all(low <= game.fields["secret"] <= high for (low, high), game in zip(bounds, games, strict=True))
    whole = sum(pair == (1, g.LARGEST_NUMBER) for pair in bounds) / len(games)
    assert 0.45 < whole < 0.55 and len(set(bounds)) == 105
    assert [game.prompt[0]["content"] for game in games] == [f"{low}-{high}" for low, high in bounds]
