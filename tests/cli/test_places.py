"""Files and functions that a command line names: of the working directory, of funrl's own folder, of a wheel."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from funrl import loading
from funrl.cli import main as cli
from funrl.flags.config_file import read_config
from funrl.loading import existing_path, load_function, shared_folder_of_files
from funrl.models.huggingface import directories as hf

ROOT = Path(__file__).parents[2]


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("def score(prompt, completion, **fields):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
    assert load_function("reward", "rewards_of_mine:score")("p", "c") == 1.0
    sys.modules.pop("rewards_of_mine")


def test_recipes_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shared_folder_of_files() == ROOT
    config = read_config("recipes/qwen2.5_7b_8gpus.yaml")
    assert config.values["dtype"] == "bfloat16"
    assert hf.find_directory("recipes/models/qwen2.5_7b.json") == ROOT / "recipes/models/qwen2.5_7b.json"
    own = tmp_path / "recipes"
    own.mkdir()
    (own / "qwen2.5_7b_8gpus.yaml").write_text("steps: 3\n")
    assert read_config("recipes/qwen2.5_7b_8gpus.yaml").values == {"steps": "3"}  # the own file comes first
    assert existing_path("recipes/none.yaml") == "recipes/none.yaml"


def test_a_wheel_has_recipes_examples_and_pages(tmp_path, monkeypatch):
    share = tmp_path / "share" / "funrl"
    for folder in ("recipes", "docs"):
        (share / folder).mkdir(parents=True)
    monkeypatch.setattr(loading, "__file__", str(tmp_path / "lib" / "funrl" / "loading.py"))
    assert shared_folder_of_files() is None
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path) if name == "data" else "")
    assert shared_folder_of_files() == share
    listed = (ROOT / "pyproject.toml").read_text().partition("[tool.setuptools.data-files]")[2].partition("\n\n")[0]
    for folder in ("recipes", "recipes/models", "examples", "examples/animals", "docs"):
        assert f'"share/funrl/{folder}" = ["{folder}/' in listed


def test_the_package_is_a_program():
    command = [sys.executable, "-m", "funrl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and done.stdout.startswith("funrl 0")


def test_doctor_takes_a_configuration(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text("experiment: grpo\nsteps: 3\nlr: -1\n")
    assert cli.main(["funrl", "doctor", f"--config={file}"]) == 1
    out = capsys.readouterr().out
    assert "a.yaml: --lr=-1: it must be above 0" in out and str(ROOT) in out
    file.write_text("steps: 3\n")
    assert cli.main(["funrl", "doctor", f"--config={file}"]) == 2
    assert "it has no `experiment`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["recipes", "examples", "docs"])
def test_the_folders_are_there(name):
    assert (ROOT / name).is_dir()
