"""A new engine takes changes to the five files that CONTRIBUTING.md names, and no other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = "funrl/rollout/plain_engine.py"
CHANGES = {  # file: a text of it, and the same text with the new engine
    "funrl/rollout/engine_abilities.py": (
        '    "hf": EngineAbilities(',
        '    "plain": EngineAbilities(whole_only=True),\n    "hf": EngineAbilities(',
    ),
    "funrl/trainer/jobs/engines.py": (
        '    "hf": EngineMaker(',
        '    "plain": EngineMaker(_make_plain, plain_weights),\n    "hf": EngineMaker(',
    ),
    "tests/rollout/small_engines.py": (
        '    "hf": Kind(',
        '    "plain": Kind(plain_engine, close=3e-5, whole=True),\n    "hf": Kind(',
    ),
    "docs/engines.md": ("`--engine=hf` generates", "`--engine=plain` is a copy of it.\n\n`--engine=hf` generates"),
}
MAKER = """

def _make_plain(job: Job, place: EnginePlace) -> Engine:
    engine = plain_engine(place.model, place.mesh, job.dtype)
    engine.record_digests = job.settings.engines.verify_sync
    return engine


MAKERS = {"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout with one more engine, made of the package's smallest one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("funrl", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.svg"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    text = (folder / "funrl/rollout/hf_engine.py").read_text()
    (folder / ENGINE).write_text(
        re.sub(r"\bhf_(engine|weights)\b", r"plain_\1", text.replace("HFEngine", "PlainEngine"))
    )
    for name, (old, new) in CHANGES.items():
        text = (folder / name).read_text()
        assert text.count(old) == 1, name
        text = text.replace(old, new)
        if name.endswith("jobs/engines.py"):
            text = text.replace("\n\nMAKERS = {", MAKER)
            text = text.replace(
                "\n\nCONTROL_", "\nfrom funrl.rollout.plain_engine import plain_engine, plain_weights\n\nCONTROL_"
            )
        if name.endswith("small_engines.py"):
            text = text.replace("\n\nSMALL", "\nfrom funrl.rollout.plain_engine import plain_engine\n\nSMALL")
        (folder / name).write_text(text)
    return folder


def run(folder, *arguments):
    """Output of Python in a checkout."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", *arguments]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return process.returncode, process.stdout + process.stderr


def test_contributing_names_the_files():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add an engine")[1].split("\n## ")[0]
    steps = re.findall(r"^\d\. (.*?)(?=^\d\. |\Z)", section, re.MULTILINE | re.DOTALL)
    assert len(steps) == 1 + len(CHANGES) == 5
    assert "funrl/rollout/NAME.py" in steps[0]
    assert all(name in step for name, step in zip(CHANGES, steps[1:], strict=True))


def test_a_new_engine_is_a_value_of_the_flag(checkout):
    status, output = run(checkout, "funrl.cli.main", "grpo", "--engine=plain", "--staleness=1", "--place=generate:1")
    assert status and "--engine=plain and --staleness=1" in output and "takes no weights during a request" in output


@pytest.mark.slow
def test_a_run_generates_with_a_new_engine(checkout, tmp_path):
    small = ["--batch_prompts=4", "--samples_per_prompt=2", "--steps=2", "--eval_prompts=4", "--warmstart_steps=0"]
    where = ["--dtype=float32", f"--run_dir={tmp_path / 'run'}", "--save_every=0"]
    status, output = run(checkout, "funrl.cli.main", "grpo", "--engine=plain", *small, *where)
    assert status == 0, output
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_new_engine_keeps_the_contract(checkout):
    status, output = run(
        checkout, "pytest", "-q", "-p", "no:cacheprovider", "tests/rollout/test_engines.py", "-k", "plain"
    )
    assert status == 0 and "100%" in output, output
