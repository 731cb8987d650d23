"""--help: short, grouped, and complete."""

import re
import runpy
import sys

import pytest

from funrl.flags.arguments import arguments_of, find_recipe, full_source
from funrl.flags.parser import help_text
from funrl.trainer.settings.declaration import Flag
from funrl.trainer.settings.settings import flag_groups, settings_flags


def help_of(experiment, monkeypatch, capsys, columns=100):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", [experiment, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"funrl.experiments.{experiment}", run_name="__main__")
    assert stopped.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def written(default):
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


@pytest.mark.parametrize(("experiment", "kind"), [("ppo", "rl"), ("grpo", "rl"), ("sft", "supervised")])
def test_every_flag_of_a_run_is_in_the_help_once_with_its_default(experiment, kind, monkeypatch, capsys):
    text = help_of(experiment, monkeypatch, capsys)
    before, _, own = text.partition("\nThe algorithm:\n")
    changed = {"sft": {"steps": 300, "warmstart_steps": 0, "eval_every": 50}}.get(experiment, {})
    for name, flag in settings_flags().items():
        matches = re.findall(rf"^  --{name}(?:=(\S+))?(?:\s|$)", before, re.MULTILINE)
        assert matches == [written(changed.get(name, flag.default))] * (kind in flag.kinds), name
    assert re.findall(r"^  --algorithm=(\S+)", before, re.MULTILINE) == [experiment]
    arguments = arguments_of(find_recipe(experiment), full_source(experiment)).flags
    shown = re.findall(r"(?:^  |, )--(\w+)(?:=([^\s,]+))?", own, re.MULTILINE)
    expected = {name: written(flag.default) for name, flag in arguments.items() if name not in settings_flags()}
    assert dict(shown) == expected and len(shown) == len(expected) > 0
    assert max(map(len, text.splitlines())) <= 100
    groups = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert len(text.splitlines()) - 2 * len(groups) <= 2 * len(settings_flags()) - 12  # apart from titles of groups
    shown = {flag.group for flag in settings_flags().values() if kind in flag.kinds}
    assert groups == [*(title for group, title in flag_groups().items() if group in shown), "The algorithm"]


def test_flags_of_the_algorithm_have_their_text(monkeypatch, capsys):
    own = help_of("ppo", monkeypatch, capsys).split("The algorithm:")[1]
    for entry in re.split(r"\n(?=  --)", own.strip("\n")):
        words = [word for word in entry.split() if not word.startswith("--")]
        assert len(words) >= 3, entry


def test_a_narrow_terminal_wraps_the_text(monkeypatch, capsys):
    assert max(map(len, help_of("ppo", monkeypatch, capsys, columns=40).splitlines())) <= 74


def test_neighbours_with_the_same_text_share_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    flags = [
        Flag("low", 0.2, float, False, "how far"),
        Flag("high", 0.3, float, False, "how far"),
        Flag("seed", None, int, True, "of it"),
        Flag("far", True, bool, False, "how far"),
    ]
    lines = help_text("program", "One line.", flags, None).splitlines()
    assert lines == [
        "program [--flag=value ...]",
        "One line.",
        "",
        "The algorithm:",
        "  --low=0.2, --high=0.3     how far",
        "  --seed                    of it",
        "  --far=true                how far",
    ]
