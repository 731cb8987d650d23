"""Flags, values and commands of earlier versions name what to write instead."""

from __future__ import annotations

import json

import pytest

from funrl.cli.main import main
from funrl.flags.config_file import read_config
from funrl.trainer.settings import successors


@pytest.fixture(autouse=True)
def table_of_removed(monkeypatch):
    monkeypatch.setitem(successors.REMOVED_FLAGS, "sundial", successors.RemovedFlag("time", "use --staleness alone"))
    monkeypatch.setitem(successors.REMOVED_COMMANDS, "shrink", "use `funrl export`")
    monkeypatch.setitem(successors.REMOVED_VALUES, "engine", {"steam": "use --engine=native"})


def exit_status(words):
    """Status of `funrl` with these words; an experiment ends by `sys.exit`."""
    try:
        return main(["funrl", *words])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["grpo", "--sundial=tokens"], "--sundial is not a flag any more; use --staleness alone"),
        (["grpo", "--nosundial"], "--nosundial is not a flag any more; use --staleness alone"),
        (["shrink", "runs/a"], "`funrl shrink` is not a command any more; use `funrl export`"),
        (["grpo", "--engine=steam"], "not a value any more; use --engine=native"),
        (
            ["rollout_is", "--clock=tokens"],
            "--clock is not a flag any more; `funrl replay` repeats an asynchronous run",
        ),
        (["rollout_is", "--keep_cache"], "--keep_cache is not a flag any more; running sequences compute their keys"),
    ],
)
def test_a_removed_name_gives_its_successor(words, expected, capsys):
    assert exit_status(words) == 2
    assert expected in capsys.readouterr().err


def test_a_recorded_config_skips_removed_flags_without_effect_and_refuses_others(tmp_path, capsys):
    path = tmp_path / "config.json"
    record = {"command": "grpo", "experiment": "grpo", "flags": {"sundial": "time", "steps": 1}}
    path.write_text(json.dumps(record))
    assert read_config(str(path)).values == {"steps": "1"}
    record["flags"]["sundial"] = "tokens"
    path.write_text(json.dumps(record))
    assert exit_status([f"--config={path}"]) == 2
    assert "sundial is not a flag any more; use --staleness alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["grpo", "--task=retry"], "--task=retry: not a value any more; docs/example_environments.md trains it with"),
        (["grpo", "--env=textarena:TicTacToe-v0"], "use --env=examples/env_textarena.py:textarena_game --env_args="),
        (["grpo", "--env=funrl.environments.builtin.retry:retry"], "use --env=examples/env_retry.py:retry"),
    ],
)
def test_a_task_that_is_an_example_now_names_it(words, expected, capsys):
    assert exit_status(words) == 2
    assert expected in capsys.readouterr().err
