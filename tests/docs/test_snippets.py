"""Every snippet of the pages runs: Python blocks as they are, shell commands with flags that make them short."""

import json
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/running.md", "docs/mesh.md", "docs/rewards.md"]
SHORT = [
    "--steps=1",
    "--warmstart_steps=1",
    "--batch_prompts=8",
    "--samples_per_prompt=2",
    "--eval_prompts=8",
    "--max_new_tokens=4",
]


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """(file name or "", text) of the fenced blocks of one language."""
    fences = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    return [(name, text) for kind, name, text in fences if kind == language]


def write_files(page: str, folder: Path) -> None:
    for language in ("python", "json"):
        for name, text in blocks(page, language):
            if name:
                (folder / name).write_text(text)


@pytest.mark.gloo
@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, tmp_path):
    write_files(page, tmp_path)
    for number, (name, text) in enumerate(blocks(page, "python")):
        if not name:
            script = tmp_path / f"block_{number}.py"
            script.write_text(text)
            done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{page}, block {number}:\n{done.stderr}"


def tiny_model(folder: Path) -> None:
    from funrl.data.tokenizer import character_tokenizer
    from funrl.models import decoder, hf
    from funrl.models.config import Config

    tokenizer = character_tokenizer(string.printable)
    config = Config(
        vocab=len(tokenizer),
        embed=16,
        layers=1,
        heads=4,
        kv_heads=2,
        head=4,
        mlp=16,
        max_positions=128,
        eos=(1,),
        pad=0,
    )
    hf.save(folder, config, decoder.init(config, torch.Generator().manual_seed(0)), tokenizer)


def commands(page: str) -> list[str]:
    lines = [line.strip() for _, text in blocks(page, "bash") for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and line != "./test"]


CASES = [(page, line) for page in PAGES for line in commands(page)]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("page,line", CASES, ids=[line[:60] for _, line in CASES])
def test_commands_run(page, line, tmp_path):
    write_files(page, tmp_path)
    tiny_model(tmp_path / "MODEL_DIR")
    tiny_model(tmp_path / "TEACHER_DIR")
    prompt = {"prompt": "Tell me of a cat. "}
    (tmp_path / "PROMPTS.jsonl").write_text("".join(json.dumps(prompt) + "\n" for _ in range(20)))
    (tmp_path / "REWARD.py").write_text(
        "def score(prompt, completion, **fields):\n    return float('a' in completion)\n"
    )
    (tmp_path / "RUN_DIR").mkdir()
    (tmp_path / "RUN_DIR/config.json").write_text(json.dumps({"experiment": "ppo", "flags": {"steps": 1}}))
    (tmp_path / "RUN_DIR/metrics.jsonl").write_text(
        json.dumps({"step": 1, "reward/mean": 0.5, "time_s/step": 1}) + "\n"
    )
    words = re.sub(r"^\./run (\w+)", r"python -m funrl.experiments.\1", line).split()
    if words[0] == "torchrun":
        words[:1] = ["python", "-m", "torch.distributed.run"]
    if "--help" not in words and any(w.startswith("funrl.experiments") for w in words):
        given = {w.split("=")[0] for w in words}
        words += [
            w for w in SHORT if w.split("=")[0] not in given | ({"--warmstart_steps"} if "--model" in given else set())
        ]
        words.append("--run_dir=here")
    words[0] = sys.executable
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{page}: {line}\n{done.stdout}\n{done.stderr}"
    if words[-1] == "--run_dir=here":
        assert (tmp_path / "here/report.html").exists() and (tmp_path / "here/model/config.json").exists()


def test_links_lead_somewhere():
    for page in [*PAGES, "docs/algorithms.md", "docs/resharding.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_the_two_commands_are_there():
    for name in ("run", "test", ".ci/run", ".ci/setup"):
        assert (ROOT / name).stat().st_mode & 0o100, f"{name} cannot be executed"
    assert "./test" in (ROOT / ".ci/run").read_text()
