"""--config: files of flags, and the record of a run that repeats it."""

import json

import pytest

from funrl.experiments import cli
from funrl.experiments.command import Experiment, read_command
from funrl.trainer.declaration import SettingsError

YAML = """
lr: 1e-4
steps: 3
compile: on
fsdp: false
reward: [a.py:f, b.py:g]
model:
entropy_coef: 0.5  # the recipe's
"""


def read(*argv, name="grpo"):
    return read_command(Experiment(name, "grpo", {}), [name, *argv], writes=True)


def write(folder, name, text):
    (folder / name).write_text(text)
    return f"--config={folder / name}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", YAML),
        ("a.json", '{"lr": 1e-4, "steps": 3, "compile": "on", "entropy_coef": 0.5, "experiment": "grpo"}'),
        ("a.py", "import math\nlr = 10 ** -4\nsteps = 3\n_x = 7\ncompile, entropy_coef = 'on', 0.5\n"),
        ("b.py", "x = 3\nconfig = dict(lr=1e-4, steps=x, compile='on', entropy_coef=0.5)\n"),
    ],
)
def test_a_file_gives_flags_and_the_command_line_overrides_them(name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flag = write(tmp_path, name, text.replace("reward: [a.py:f, b.py:g]\n", ""))
    command = read(flag, "--steps=5")
    assert (command.settings.lr, command.settings.steps, command.settings.compile) == (1e-4, 5, "on")
    assert dict(command.arguments)["entropy_coef"] == 0.5 and command.settings.model is None
    assert read("--steps=5", flag) == command


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "setps: 3", r"a\.yaml: --setps is not a flag; did you mean --steps\?"),
        ("a.yaml", "steps: none", r"a\.yaml: --steps=none: a whole number is needed"),
        ("a.yaml", "steps: 3\nsteps: 4", "'steps' is there twice"),
        ("a.yaml", "actor_rollout_ref:\n  actor: {a: 1}", "actor_rollout_ref has entries of its own.*funrl import"),
        ("a.yaml", "- steps", "names of flags with values are needed"),
        ("a.py", "def reward():\n    pass", "names of flags with values are needed"),
        ("a.yaml", "temperature: 0.5\ntop_k: 3", r"--temperature=0\.5 with --top_k=3"),
        ("a.yaml", "reward: [a.py:f, b.py:g]\nprompts: p.jsonl", r"--prompts: p\.jsonl: no such file"),
        ("a.yaml", "a: [", "a.yaml: while parsing"),
        ("a.yaml", "experiment: ppo\nsteps: 3", "this is of ppo; `funrl ppo --config="),
        ("a.json", "{", "a.json: Expecting"),
        ("a.py", "steps = 1 / 0", "a.py: ZeroDivisionError"),
        ("a.toml.yaml", "a b: 3", "'a b' is not the name of a flag"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(name, text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        read(write(tmp_path, name, text))
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: no such file; give a \.yaml"):
        read("--config=nowhere.yaml")


def call(*argv):
    try:
        return cli.main(["funrl", *argv])
    except SystemExit as stopped:
        return stopped.code


def test_the_record_of_a_run_repeats_it(tmp_path, monkeypatch, capsys):
    """The same numbers, from the arguments of the recipe to those of flags that have no meaning in this run."""
    monkeypatch.chdir(tmp_path)
    small = ("--steps=2", "--warmstart_steps=0", "--batch_prompts=4", "--eval_prompts=4", "--device=cpu", "--seed=3")
    assert call("dpo", *small, "--beta=0.3", "--run_dir=a") == 0
    record = json.loads((tmp_path / "a/config.json").read_text())
    record["versions"]["torch"] = "1.0"
    (tmp_path / "a/config.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert call("--config=a/config.json", "--run_dir=b") == 0
    assert "a/config.json: made with torch 1.0; this is" in capsys.readouterr().err
    flags = [json.loads((tmp_path / run / "config.json").read_text())["flags"] for run in "ab"]
    assert flags[0].pop("run_dir") == "a" and flags[1].pop("run_dir") == "b" and flags[0] == flags[1]

    def numbers(run):
        rows = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith(("time_s/", "perf/", "memory/"))} for row in rows]

    assert numbers("a") == numbers("b") != []
    assert call("dpo", "--config=a/config.json", "--temperature=0.5") == 2
    assert "--temperature has no meaning" in capsys.readouterr().err
    assert call("sft", "--config=a/config.json") == 2 and "this is of dpo" in capsys.readouterr().err
    record["flags"]["given_in_python"] = "prompts, the reward"
    (tmp_path / "a/config.json").write_text(json.dumps(record))
    assert call("dpo", "--config=a/config.json") == 2
    assert "prompts, the reward of this run came from Python" in capsys.readouterr().err
