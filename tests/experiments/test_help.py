"""--help: short, grouped, and complete."""

import dataclasses
import re

import pytest

from funrl.experiments import run
from funrl.trainer.settings import Settings


def help_of(experiment, monkeypatch, capsys, columns=100):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run.main(f"funrl.experiments.{experiment}", [experiment, "--help"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


@pytest.mark.parametrize("experiment", ["ppo", "grpo"])
def test_every_flag_is_in_the_help_once_with_its_default(experiment, monkeypatch, capsys):
    text = help_of(experiment, monkeypatch, capsys)
    for field in dataclasses.fields(Settings):
        found = re.findall(rf"^  --{field.name}(?:=(\S+))?(?:\s|$)", text, re.MULTILINE)
        assert len(found) == 1, field.name
        assert found[0] == ("" if field.default is None else str(field.default)) or experiment != "ppo"
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 100
    groups = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert groups == ["What to do", "Where", "Generation", "Training", "Output", "The algorithm"]


def test_flags_of_the_algorithm_have_their_text(monkeypatch, capsys):
    text = help_of("ppo", monkeypatch, capsys)
    own = text.split("The algorithm:")[1].strip().splitlines()
    assert len(own) >= 9
    assert all(len(line.split()) > 3 for line in own)


def test_a_narrow_terminal_wraps_the_text(monkeypatch, capsys):
    assert max(map(len, help_of("ppo", monkeypatch, capsys, columns=40).splitlines())) <= 74
