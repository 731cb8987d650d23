"""--config: files of flags, and the record of a run that repeats it."""

import json

import pytest

from funrl.cli import main as cli
from funrl.cli.command import Experiment, read_command
from funrl.cli.import_config import flattened
from funrl.flags.config_file import read_config
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_flags

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
    assert (command.settings.optimization.lr, command.settings.run.steps, command.settings.models.compile) == (
        1e-4,
        5,
        "on",
    )
    assert dict(command.arguments)["entropy_coef"] == 0.5 and command.settings.models.model is None
    assert read("--steps=5", flag) == command


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "setps: 3", r"a\.yaml: --setps is not a flag; did you mean --steps\?"),
        ("a.yaml", "steps: none", r"a\.yaml: --steps=none: a whole number is needed"),
        ("a.yaml", "steps: 3\nsteps: 4", "'steps' occurs twice"),
        ("a.yaml", "actor_rollout_ref:\n  actor: {a: 1}", "actor_rollout_ref is a nested table.*funrl import"),
        ("a.yaml", "- steps", "flag names with values are needed"),
        ("a.py", "def reward():\n    pass", "flag names with values are needed"),
        ("a.yaml", "temperature: 0.5\ntop_k: 3", r"--temperature=0\.5 with --top_k=3"),
        ("a.yaml", "reward: [a.py:f, b.py:g]\nprompts: p.jsonl", r"--prompts: p\.jsonl: no such file"),
        ("a.yaml", "a: [", "a.yaml: while parsing"),
        ("a.yaml", "experiment: ppo\nsteps: 3", "is for ppo; use `funrl ppo --config="),
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


@pytest.mark.slow
def test_the_record_of_a_run_repeats_it(tmp_path, monkeypatch, capsys):
    """The same numbers, from the arguments of the recipe to those of flags that have no meaning in this run."""
    monkeypatch.chdir(tmp_path)
    small = ("--steps=2", "--warmstart_steps=0", "--batch_prompts=4", "--eval_prompts=4", "--device=cpu", "--seed=3")
    assert call("dpo", *small, "--beta=0.3", "--run_dir=a") == 0
    record = json.loads((tmp_path / "a/config.json").read_text())
    record["versions"]["torch"] = "1.0"
    assert record["processor"]["MKL_CBWR"]
    record["processor"]["name"] = "Z80"
    (tmp_path / "a/config.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert call("--config=a/config.json", "--run_dir=b") == 0
    remarks = capsys.readouterr().err
    assert "a/config.json: made with torch 1.0; this is" in remarks
    assert "a/config.json: made with processor Z80; this is" in remarks
    flags = [json.loads((tmp_path / run / "config.json").read_text())["flags"] for run in "ab"]
    assert flags[0].pop("run_dir") == "a" and flags[1].pop("run_dir") == "b" and flags[0] == flags[1]

    def numbers(run):
        rows = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith(("time_s/", "perf/", "memory/"))} for row in rows]

    assert numbers("a") == numbers("b") != []
    assert call("dpo", "--config=a/config.json", "--temperature=0.5") == 2
    assert "--temperature has no effect" in capsys.readouterr().err
    assert call("sft", "--config=a/config.json") == 2 and "is for dpo" in capsys.readouterr().err
    record["flags"]["given_in_python"] = "prompts, the reward"
    (tmp_path / "a/config.json").write_text(json.dumps(record))
    assert call("dpo", "--config=a/config.json") == 2
    assert "prompts, the reward of this run came from Python" in capsys.readouterr().err


ALIASES = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 1}]\n" for n in range(10))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", ALIASES, "a.yaml: it has 926177116 values with aliases expanded; at most 100000 are read"),
        ("a.yaml", "a: &a [*a]", "a.yaml: an alias refers to an entry that contains it"),
        ("a.yaml", f"a: {'[' * 1500}", "a.yaml: its entries are nested too deeply"),
        ("a.yaml", f"a: {'b' * (1 << 20)}", "a.yaml: it has 1048579 characters; at most 1048576 are read"),
        ("a.json", f'{{"a": {"[" * 100_000}', "maximum recursion depth"),
    ],
    ids=["aliases", "a circle", "nested", "long", "nested JSON"],
)
def test_a_file_that_would_never_be_read_to_the_end_is_refused(name, text, says, tmp_path):
    path = str(tmp_path / name)
    (tmp_path / name).write_text(text)
    for reading in (read_config, flattened):  # of --config, and of `funrl import`
        with pytest.raises(SettingsError, match=says):
            reading(path)


def test_aliases_of_usual_files_are_read(tmp_path):
    path = write(tmp_path, "a.yaml", "lr: &rate 1e-4\ncritic_lr: *rate\n")
    assert read_config(path.removeprefix("--config=")).values == {"lr": "1e-4", "critic_lr": "1e-4"}


@pytest.mark.parametrize("value,freeze", [(None, None), ("none", "none"), ("vision", "vision")])
def test_no_frozen_part_is_not_the_default(value, freeze, tmp_path):
    """`--freeze=none` lets all learn, on a command line and in a file; null in a file is the default."""
    (tmp_path / "flags.json").write_text(json.dumps({"freeze": value, "steps": 3}))
    texts = read_config(str(tmp_path / "flags.json")).values
    assert texts["steps"] == "3" and ("freeze" in texts) == (value is not None)
    flag = settings_flags()["freeze"]
    assert (flag.parse(texts["freeze"]) if "freeze" in texts else flag.default) == freeze
    assert settings_flags()["episode_tokens"].parse("none") is None  # of other flags
