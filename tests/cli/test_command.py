"""From a command line to a command: order of the checks, kinds of runs, defaults, and what is imported for an error."""

import json
import pickle
import signal
import subprocess
import sys

import pytest
import torch

from funrl.cli.command import Experiment, read_command
from funrl.loading import LoadError
from funrl.models import decoder_model, with_fields
from funrl.models.decoder.routing import Experts
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.track.records.run_directory import RunDirectoryError
from funrl.trainer.settings.declaration import SettingsError

OWN = '''
from types import SimpleNamespace


def rl(clip: float = 0.2, max_new_tokens: int = 1, ratio: object = None):
    """Samples.

    Args:
      clip: how far.
    """
    if clip > 1:
        raise ValueError(f"--clip={clip}: it must be at most 1")
    return SimpleNamespace(advantage=(clip, max_new_tokens), losses={})


def supervised(smooth: bool = False):
    """Reads."""
    return SimpleNamespace(advantage=None, losses={})
'''


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return str(file)


def read(source, *flags, **defaults):
    return read_command(Experiment("own", source, defaults), ["own", *flags], writes=True)


def test_a_command_has_settings_arguments_and_a_kind(own):
    command = read(f"{own}:rl", "--clip", "0.5", "--steps=3", "--mesh=dp2", "--nofsdp")
    assert (command.kind, command.source, command.experiment) == ("rl", f"{own}:rl", "own")
    assert (command.settings.run.steps, command.settings.devices.mesh, command.settings.sharding.fsdp) == (
        3,
        "dp2",
        False,
    )
    assert dict(command.arguments) == {"clip": 0.5, "max_new_tokens": 6}
    assert command.compose().advantage == (0.5, 6)
    assert pickle.loads(pickle.dumps(command)) == command and hash(command) == hash(pickle.loads(pickle.dumps(command)))


def test_an_argument_with_the_name_of_a_flag_is_given_its_value(own):
    assert read(f"{own}:rl", "--max_new_tokens=9").compose().advantage == (0.2, 9)


def test_an_algorithm_without_an_advantage_is_supervised(own):
    command = read(f"{own}:supervised", "--smooth", "--batch_prompts=1")
    assert command.kind == "supervised" and dict(command.arguments) == {"smooth": True}
    assert command.settings.updates.minibatches == 1


@pytest.mark.parametrize(
    ("function", "flag", "says"),
    [
        ("supervised", "--temperature=0.5", "--temperature has no effect in learning from given texts, the kind of"),
        ("supervised", "--minibatches=1", "--minibatches has no effect"),  # its own value too
        ("rl", "--data=own.py", "--data has no effect in reinforcement learning"),
        ("rl", "--clip=far", "--clip=far: a number is needed"),
        ("rl", "--clip=inf", "--clip=inf: a finite number is needed"),
        ("rl", "--clip=3", "--clip=3.0: it must be at most 1"),
        ("rl", "--clap=3", "--clap is not a flag; did you mean --clip?"),
        ("rl", "--smooth", "--smooth is not a flag"),
        ("rl", "--ratio=3", "--ratio is not a flag: .*own.py:rl takes object there; give it in a FILE.py"),
        ("rl", "--model=/tmp", "--model=/tmp needs --prompts=FILE.jsonl"),
        ("supervised", "--model=/tmp", "--model=/tmp needs --data=FILE.jsonl"),
        ("rl", "clip=3", "'clip=3' is not a flag; flags are written --name=value"),
    ],
)
def test_flags_that_a_recipe_cannot_take_are_refused(function, flag, says, own, monkeypatch):
    monkeypatch.chdir(own.rsplit("/", 1)[0])
    with pytest.raises(ValueError, match=says):
        read(f"{own}:{function}", flag)


def test_defaults_of_an_experiment_are_of_its_own_recipe_alone(own):
    defaults = {"clip": 0.7, "steps": 5}
    command = read(f"{own}:rl", **defaults)
    assert dict(command.arguments)["clip"] == 0.7 and command.settings.run.steps == 5
    assert dict(read(f"{own}:rl", "--clip=0.1", **defaults).arguments)["clip"] == 0.1
    other = read(f"{own}:rl", f"--algorithm={own}:supervised", **defaults)
    assert other.kind == "supervised" and other.settings.run.steps == 5
    with pytest.raises(TypeError, match="'clap'"):
        read(f"{own}:rl", clap=0.7)


def test_an_algorithm_must_be_named():
    with pytest.raises(SettingsError, match="--algorithm is needed"):
        read(None)
    with pytest.raises(LoadError, match=r"--algorithm=not.py:f: not.py: no such file"):
        read(None, "--algorithm=not.py:f")


def test_a_run_directory_is_looked_at_by_the_process_that_writes_it(own, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("")
    flag, experiment = f"--run_dir={tmp_path}/used", Experiment("own", f"{own}:rl", {})
    with pytest.raises(RunDirectoryError, match=r"holds metrics\.jsonl"):
        read_command(experiment, ["own", flag], writes=True)
    read_command(experiment, ["own", flag], writes=False)
    read_command(experiment, ["own", flag, "--resume"], writes=True)


WITHOUT_TORCH = [  # flags, and what is said before torch or transformers is imported
    (["--steps=0"], "it must be at least 1"),
    (["--steps=many"], "a whole number is needed"),
    (["--setps=3"], "did you mean --steps?"),
    (["--clap_low=3"], "did you mean --clip_low?"),
    (["--mesh=xx2"], "'xx2' is not an axis"),
    (["--mesh=dp2", "--generate_mesh=dp3"], "has 3 devices"),
    (["--prompts=nowhere.jsonl"], "no such file"),
    (["--model=./nowhere"], "is not a directory"),
    (["--reward=nowhere.py:f"], "no such file"),
    (["--algorithm=nowhere.py:f"], "no such file"),
    (["--algorithm=grop"], "did you mean grpo?"),
    (["--run_dir={used}"], "holds metrics.jsonl"),
    (["--top_k=3", "--temperature=0.5"], "use either"),
]
WITHOUT_TORCH.sort(key=lambda case: "did you mean --" not in case[1])  # cases that import nothing come first
PROGRAM = """
import contextlib, io, json, runpy, sys
for flags in json.loads(sys.argv[1]):
    sys.argv = ["grpo", *flags]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            runpy.run_module("funrl.experiments.grpo", run_name="__main__", alter_sys=True)
    except SystemExit as stopped:
        watched = {"torch", "torch._dynamo", "transformers", "jax", "tensorboard", "numpy"}
        print(json.dumps([stopped.code, sorted(watched & set(sys.modules)), errors.getvalue()]))
"""


def test_an_error_that_needs_no_torch_comes_before_its_import(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("")
    commands = [[flag.format(used=tmp_path / "used") for flag in flags] for flags, _ in WITHOUT_TORCH]
    errors = errors_of(commands)
    for (flags, says), (modules, error) in zip(WITHOUT_TORCH, errors, strict=True):
        assert says in error, flags
        assert modules <= (set() if "did you mean --" in says else {"numpy"}), flags


@pytest.mark.slow
def test_neither_an_error_of_a_mesh_nor_a_step_on_a_cpu_imports_the_compiler(tmp_path):
    config = with_fields(arithmetic.model_config(), family="qwen3_moe", qk_norm=True, experts=Experts(4, 2, 16, True))
    model = decoder_model(config)
    hf.save(tmp_path / "model", model, model.init(torch.Generator().manual_seed(0)), arithmetic.tokenizer())
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    step = "--device=cpu --batch_prompts=4 --samples_per_prompt=2 --max_new_tokens=4 --steps=1 --reward=repetition"
    own = [f"--model={tmp_path}/model", f"--prompts={tmp_path}/p.jsonl", f"--run_dir={tmp_path}/run"]
    (modules, error), (modules_of_step, _) = errors_of([["--mesh=dp4,tp5"], [*step.split(), *own]], codes=[2, 0])
    assert "does not divide over tp5" in error and "torch" in modules
    assert "transformers" in modules_of_step and "torch._dynamo" not in modules | modules_of_step


def errors_of(commands, codes=None):
    """What `funrl grpo` says to each of these flags, one after the other, and the watched modules imported by then."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0 and "Traceback" not in "".join(error for *_, error in lines), done.stderr
    assert [code for code, *_ in lines] == (codes or [2] * len(commands)), lines
    return [(set(modules), error) for _, modules, error in lines]


CRASH = """
import os, signal
from funrl.cli import run

def crash(*_, **__):
    os.kill(os.getpid(), signal.SIGSEGV)

run.read_command = crash
run.main("ppo", ["ppo"])
"""


def test_a_crash_in_native_code_shows_where():
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr and "in crash" in done.stderr
