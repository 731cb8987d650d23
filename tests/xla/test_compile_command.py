"""`funrl compile`: the steps of a run, compiled for TPUs that are not here."""

import re

import pytest

pytest.importorskip("jax")

from funrl.cli import main as cli
from funrl.xla.ahead import libtpu_problem

pytestmark = pytest.mark.xla


@pytest.mark.parametrize(
    "words,says",
    [
        (["--target=v5e:2x2"], "funrl compile needs an experiment"),
        (["sft"], "funrl compile needs one --target, such as --target=v5e:2x2"),
        (["sft", "--target=h100:8"], "--target=h100:8 begins with none of v5e, v6e, v5p, such as v5e:4x4"),
    ],
    ids=["experiment", "target", "kind"],
)
def test_what_is_missing_is_named(words, says, capsys):
    assert cli.main(["funrl", "compile", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(libtpu_problem() is not None, reason=str(libtpu_problem()))
def test_memory_flops_and_collectives_stand_beside_the_dry_run_s(capsys):
    assert cli.main(["funrl", "compile", "sft", "--mesh=dp2,tp2", "--token_budget=256", "--target=v5e:2x2"]) == 0
    text = capsys.readouterr().out
    rows = {line.split("  ")[0]: re.split(r"  +", line) for line in text.splitlines()}
    assert rows["gradient of train"][2] == "412 kB" and rows["update of train"][4] == "1.21 MB"  # state is donated
    assert re.search(r"update_policy +all-reduce +dp +1 +\d+ kB +201 kB", text)  # of all gradients at once
    assert "finding: memory of update_policy: compiled" in text
    assert "bytes over" not in text  # what is sent differs by less than 15 %
