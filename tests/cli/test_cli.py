"""The command `funrl`: what it lists, and what it runs."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import funrl
from funrl.cli import main as cli
from funrl.cli.usages import COMMANDS
from funrl.flags.arguments import recipe_names


def call(capsys, *argv):
    try:
        status = cli.main(["funrl", *argv])
    except SystemExit as stopped:  # of an experiment, which runs as a program
        status = stopped.code
    return status, *capsys.readouterr()


def test_help_lists_every_experiment_and_recipe_in_a_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, _ = call(capsys, "--help")
    assert status == 0
    listed = re.findall(r"^  (\w+) +(\S.*)$", out, re.MULTILINE)
    programs = {
        p.stem
        for p in (Path(cli.__file__).parents[1] / "experiments").glob("*.py")
        if 'sys.exit(main("' in p.read_text()
    }
    assert {"ppo", "sft", "rl"} <= programs == set(cli.experiment_names())
    assert {name for name, _ in listed} == programs | set(recipe_names())
    assert len(listed) == len({name for name, _ in listed}) and max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "usage: funrl NAME"),
        (("pppo",), "did you mean ppo?"),
        (("dr_gprpo", "--steps=3"), "did you mean dr_grpo?"),
        (("xyzzy",), "'xyzzy' is not an experiment or a recipe; funrl --help lists all"),
        (("run",), "is not an experiment"),
        (("ppo", "--setps=3"), "did you mean --steps?"),
        (("dr_grpo", "--setps=3"), "did you mean --steps?"),
    ],
)
def test_a_name_or_flag_that_is_not_there(argv, says, capsys):
    status, out, err = call(capsys, *argv)
    assert status == 2 and says in err and out == ""


def test_help_and_version_are_words_too(capsys):
    assert call(capsys, "help") == (0, cli.listing() + "\n", "")
    assert call(capsys, "--version") == call(capsys, "version") == (0, f"funrl {funrl.__version__}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_beside_the_experiments_says_how_it_is_called(name, capsys):
    status, out, err = call(capsys, name, "--help")
    assert (status, err) == (0, "") and COMMANDS[name].usage in out and f"funrl {name} " in out
    assert COMMANDS[name].usage in cli.listing()
    pages = [page.read_text() for page in (Path(__file__).parents[2] / "docs").glob("*.md")]
    assert f"\nfunrl {name} " in (cli.__doc__ or "") and any(f"funrl {name}" in page for page in pages)


@pytest.mark.parametrize("name", ["ppo", "dr_grpo"])
def test_an_experiment_or_a_recipe_explains_itself(name, capsys):
    status, out, _ = call(capsys, name, "--help")
    assert status == 0 and out.startswith(f"funrl {name} [--flag=value ...]") and "The algorithm:" in out


def test_a_recipe_without_an_experiment_trains(tmp_path, capsys):
    small = ("--steps=1", "--warmstart_steps=0", "--batch_prompts=4", "--samples_per_prompt=2", "--eval_prompts=4")
    status, _, err = call(capsys, "dr_grpo", *small, "--device=cpu", f"--run_dir={tmp_path / 'run'}")
    assert status == 0, err
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1


def test_any_recipe_is_an_algorithm_of_any_experiment(capsys, monkeypatch):
    for program in ("rl", "ppo"):
        monkeypatch.setattr(sys, "argv", [program, "--algorithm=dr_grpo", "--help"])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_module(f"funrl.experiments.{program}", run_name="__main__")
        out = capsys.readouterr().out
        assert stopped.value.code == 0 and "--value_clip" not in out and "--clip_low" in out
        assert f"python -m funrl.experiments.{program} " in out
