"""A run, or a checkpoint of one, wherever a flag takes a model."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import funrl
from funrl.cli import main as cli
from funrl.cli.run import main
from funrl.trainer.checkpoints.stored_models import with_model_directories
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

SMALL = ("--device=cpu", "--batch_prompts=2", "--eval_prompts=2", "--warmstart_steps=0", "--lr=0.01", "--compile=off")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of two supervised steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    assert main("sft", ["sft", *SMALL, "--steps=2", "--save_every=1", f"--run_dir={folder}"]) == 0
    return folder


def weights_of(folder):
    return load_file(Path(folder) / "model.safetensors")


def equal(first, other):
    return first.keys() == other.keys() and all((first[name] == other[name]).all() for name in first)


@pytest.mark.slow
def test_a_run_is_its_model_and_a_checkpoint_is_exported_once(run_dir):
    settings = settings_of(
        model=str(run_dir), reward_model=f"{run_dir}@0.5", teacher=str(run_dir / "checkpoints/step-1")
    )
    job = with_model_directories(settings)
    assert (job.models.model, job.rewards.reward_model) == (str(run_dir / "model"), f"{run_dir / 'model'}@0.5")
    assert job.models.teacher == str(run_dir / "model-step-1")
    assert not equal(weights_of(job.models.teacher), weights_of(job.models.model))
    written = (run_dir / "model-step-1/model.safetensors").stat()
    assert with_model_directories(settings) == job
    assert (run_dir / "model-step-1/model.safetensors").stat().st_ino == written.st_ino
    plain = settings_of(model=job.models.model, dry_run=True)
    assert with_model_directories(plain) == plain  # a directory of Hugging Face stays what it is
    of_checkpoint = settings_of(model=str(run_dir / "checkpoints/step-2"), dry_run=True)
    assert with_model_directories(of_checkpoint).models.model == str(run_dir / "checkpoints/model")
    assert not (run_dir / "model-step-2").exists()  # a dry run reads no weights
    with pytest.raises(SettingsError, match="step-7: no such directory"):
        with_model_directories(settings_of(model=str(run_dir / "checkpoints/step-7")))


def test_a_run_begins_with_the_weights_of_another(run_dir, tmp_path, capsys):
    for name, model in (("of run", run_dir), ("of checkpoint", run_dir / "checkpoints/step-1")):
        flags = (f"--model={model}", "--steps=1", f"--run_dir={tmp_path / name}", "--lr=1e-12")
        assert main("sft", ["sft", *SMALL[:4], "--compile=off", *flags]) == 0, capsys.readouterr().err
        config = json.loads((tmp_path / name / "config.json").read_text())
        began = weights_of(config["flags"]["model"])
        after = weights_of(tmp_path / name / "model")
        assert all((began[x] - after[x]).abs().max() < 1e-9 for x in began)


@pytest.mark.slow
def test_doctor_and_python_take_runs_too(run_dir, tmp_path, capsys):
    words = [f"--model={run_dir}", "--steps=1", "--eval_prompts=2", "--device=cpu"]
    assert cli.main(["funrl", "doctor", "grpo", *words]) == 0, capsys.readouterr().out
    run = funrl.train(
        "sft", model=run_dir, steps=1, eval_prompts=2, batch_prompts=2, device="cpu", run_dir=str(tmp_path / "next")
    )
    assert len(run.metrics) == 1


def test_a_model_goes_on_with_the_embedded_task_whose_tokenizer_it_has(tmp_path, capsys):
    small = [*SMALL, "--steps=1", "--samples_per_prompt=2", "--minibatches=1"]
    assert main("grpo", ["grpo", *small, "--task=calculator", f"--run_dir={tmp_path}/first"]) == 0
    further = [
        "grpo",
        *(flag for flag in small if "warmstart" not in flag),
        f"--model={tmp_path}/first",
        f"--run_dir={tmp_path}/second",
    ]
    assert main("grpo", [*further, "--task=shapes"]) == 2  # whose tokenizer is another one
    needed = "--task=calculator, or --prompts=FILE.jsonl and"
    assert f"--model={tmp_path}/first needs {needed}" in capsys.readouterr().err
    assert main("grpo", [*further, "--task=calculator"]) == 0
