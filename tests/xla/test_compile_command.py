"""`funrl compile`: the steps of a run, compiled for TPUs that are not here."""

import pytest

pytest.importorskip("jax")

from funrl.cli import main as cli

pytestmark = pytest.mark.xla


@pytest.mark.parametrize(
    "words,says",
    [
        (["--target=v5e:2x2"], "usage: funrl compile NAME"),
        (["sft"], "usage: funrl compile NAME"),
        (["sft", "--target=h100:8"], "--target=h100:8 begins with none of v5e, v6e, v5p, such as v5e:4x4"),
    ],
    ids=["experiment", "target", "kind"],
)
def test_what_is_missing_is_named(words, says, capsys):
    assert cli.main(["funrl", "compile", *words]) == 2
    assert says in capsys.readouterr().err
