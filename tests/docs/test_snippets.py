"""Every snippet of the pages runs: Python blocks as they are, shell commands with flags that make them short.

A command that another test or page runs the like of is only read and checked, as `PREPARED` says.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import run_once
from module_process import module_process
from selection import XLA_FLAGS

from funrl.algos.recipes import NAMES, recipe
from funrl.cli.command import Experiment, read_command, with_models
from funrl.cli.doctor import experiment_of
from funrl.cli.usages import COMMANDS
from funrl.cost.dry_run import tokens_of
from funrl.models import with_value_head
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.declaration import RL, kinds_of
from funrl.trainer.settings.settings import settings_flags

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/running.md",
    "docs/data.md",
    "docs/configuration.md",
    "docs/mesh.md",
    "docs/rewards.md",
    "docs/reward_models.md",
    "docs/engines.md",
    "docs/replay.md",
    "docs/models.md",
    "docs/dry_run.md",
    "docs/install.md",
    "docs/tutorial.md",
    "docs/python.md",
    "docs/migration.md",
    "docs/testing.md",
    "docs/concept_batch.md",
    "docs/concept_role.md",
    "docs/concept_layout.md",
    "docs/concept_engine.md",
    "docs/environments.md",
    "docs/serve.md",
    "docs/write_an_environment.md",
    "docs/example_environments.md",
    "docs/foreign_environments.md",
    "docs/placement.md",
    "docs/concept_rows.md",
    "docs/vision.md",
    "docs/xla.md",
]
SLOW_PAGES = ("docs/mesh.md", "docs/foreign_environments.md")
ELSEWHERE = {
    "docs/algorithms.md": "tests/algos/test_algorithms_doc.py",
    "docs/resharding.md": "tests/mesh/test_resharding_docs.py",
}
LINKED = [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
# This checkout, whichever is installed, with its examples, also in forks.
sys.path.append(str(ROOT / "examples"))
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "XLA_FLAGS": XLA_FLAGS}
PROGRAMS = {*NAMES, *(file.stem for file in (ROOT / "funrl" / "experiments").glob("*.py"))}
TIMEOUT_S = 900
TEXT_PROGRAMS = ("sft", "dpo", "kto", "reward_model", "process_reward_model")
MOST = {"--steps": 3, "--batch_prompts": 4, "--lr_warmup_steps": 0}  # of a command that gives them
MOST_OF_DRY_RUN = {"--batch_prompts": 64}
SHORT = [
    "--steps=1",
    "--warmstart_steps=1",
    "--batch_prompts=4",
    "--samples_per_prompt=2",
    "--eval_prompts=4",
    "--max_new_tokens=4",
]


def run(words: list[str], folder: Path) -> tuple[int, str]:
    """Status and output of `python WORDS`, in a fork of this process, which need not import torch.

    Raises:
      TimeoutError: it takes longer than `TIMEOUT_S`.
    """
    if "/" in words[0]:  # a program of examples/, which imports its neighbours
        program = [sys.executable, *words]
        done = subprocess.run(
            program, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, done.stdout
    if words[0] == "-m":
        module, arguments = words[1], words[2:]
    else:
        module, arguments = words[0].removesuffix(".py"), words[1:]
    run_once()
    text = ""
    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(TIMEOUT_S)
    try:
        with module_process(module, arguments, folder, ENVIRONMENT) as output:
            text = output.read()
    except subprocess.CalledProcessError as error:
        return error.returncode, text
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return 0, text


def expire(*_: Any) -> None:
    raise TimeoutError(f"it takes longer than {TIMEOUT_S} s")


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """(file name or "", text) of the fenced blocks of one language."""
    fences = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    return [(name, text) for kind, name, text in fences if kind == language]


def write_files(page: str, folder: Path) -> None:
    for language in ("python", "json", "jinja", "yaml"):
        for name, text in blocks(page, language):
            if name:
                (folder / name).write_text(text.replace("(0, 20000)", "(0, 200)"))  # demonstrations of one step


@pytest.mark.gloo
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW_PAGES else []) for page in PAGES]
)
def test_python_blocks_run(page, tmp_path):
    write_files(page, tmp_path)
    for number, (name, text) in enumerate(blocks(page, "python")):
        if not name:
            (tmp_path / f"block_{number}.py").write_text(text)
            status, printed = run([f"block_{number}.py"], tmp_path)
            assert status == 0, f"{page}, block {number}:\n{printed}"


def tiny_model(folder: Path, made_of: Callable[[Any], Any] = lambda model: model, positions: int = 128) -> None:
    from funrl.data.tokenizer import character_tokenizer
    from funrl.models import decoder_config, decoder_model
    from funrl.models.huggingface import directories as hf

    tokenizer = character_tokenizer(string.printable)
    config = decoder_config(
        vocab=len(tokenizer),
        embed=16,
        layers=1,
        heads=4,
        kv_heads=2,
        head=4,
        mlp=16,
        max_positions=positions,
        eos=(1,),
        pad=0,
    )
    model = made_of(decoder_model(config))
    hf.save(folder, model, model.init(torch.Generator().manual_seed(0)), tokenizer)


def tiny_gpt2(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from funrl.data.tokenizer import character_tokenizer

    tokenizer = character_tokenizer(string.printable)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, eos_token_id=1, bos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def commands(page: str) -> list[list[str]]:
    """The commands of the page's shell blocks; a block's run in one folder, in their order."""
    texts = [text.replace("\\\n", "") for _, text in blocks(page, "bash")]  # a command may take several lines
    groups = [[line for line in text.splitlines() if line and line != "./test"] for text in texts]
    return [lines for lines in groups if lines]


BLOCKS = [(page, lines) for page in PAGES for lines in commands(page)]
PREPARED = {  # how commands begin that are read and checked, but not run here: what runs the like
    "funrl dr_grpo --mesh=dp2": "tests/cli/test_experiments.py",
    "funrl gigpo --task=calculator": "tests/trainer/test_episode_recipes.py",
    "funrl grpo --backend=xla": "tests/trainer/test_lowered_runs.py",
    "funrl grpo --mesh=dp2 --steps=": "tests/cli/test_resume.py",
    'funrl grpo --place="train:dp2@0-1': "tests/trainer/test_placement_runs.py",
    "funrl grpo --steps=2 --save_every=1 --save_rollouts=1": "tests/cli/test_replay_command.py",
    "funrl grpo --task=calculator --mesh": "README.md",
    "funrl grpo --task=calculator --steps": "README.md",
    "funrl grpo --task=shapes --dry_run": "tests/cost/test_dry_pictures.py",
    "funrl ppo --mesh=dp64": "tests/cost/test_dry_generation.py",
    "funrl ppo --model=GPT2_DIR": "tests/trainer/test_module_runs.py",
    "funrl ppo --steps=3": "README.md",
    "funrl replay": "tests/cli/test_replay_command.py",
    "funrl rollout_is --dry_run --model": "tests/docs/test_placement_page.py",
    "funrl rollout_is --dry_run --place": "tests/cost/test_pools_report.py",
    'funrl rollout_is --place="train:dp1 generate:dp1"': "tests/trainer/test_placement_runs.py",
    "funrl sft --mesh=dp64": "tests/cost/test_dry_report.py",
}
ONLY_PREPARED = [(page, line) for page, lines in BLOCKS for line in lines if line.startswith((*PREPARED,))]


def run_here(line: str) -> bool:
    """True unless the command is only checked; torchrun's have a test of their own below."""
    return "torchrun" not in line and not line.startswith((*PREPARED,))


CASES = [(page, results) for page, lines in BLOCKS if (results := [line for line in lines if run_here(line)])]


def words_of(line: str) -> list[str]:
    """Words of Python's command line for a line of a page, with flags that make a run short."""
    words = shlex.split(re.sub(r"^(\./run|funrl) ", "python -m funrl.cli.main ", line))
    module = words[2] if words[1:2] == ["-m"] else ""
    program = words[3] if module == "funrl.cli.main" and len(words) > 3 else ""
    if program.startswith("--config="):  # the files of the pages are of grpo
        program = "grpo"
    if "--dry_run" in words:
        words = [shortened(word, MOST_OF_DRY_RUN) for word in words]
    if program in PROGRAMS and not {"--help", "--dry_run"} & set(words):
        most = MOST if any(word.startswith("--save_every") for word in words) else MOST | {"--steps": 1}
        words = [shortened(word, most) for word in words]
        given = {word.split("=")[0] for word in words}
        given |= {"--warmstart_steps"} if "--model" in given else set()
        from_texts = "--data" in given or program in TEXT_PROGRAMS
        given |= {"--samples_per_prompt", "--max_new_tokens"} if from_texts else set()
        words += [word for word in [*SHORT, "--run_dir=here"] if word.split("=")[0] not in given]
    return words[1:]


def shortened(word: str, most: dict[str, int]) -> str:
    """A flag of a run, of at most as many steps and prompts as show that it works."""
    name, _, number = word.partition("=")
    return f"{name}={min(int(number), most[name])}" if name in most else word


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of models, which runs only read."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("MODEL_DIR", "TEACHER_DIR"):
        tiny_model(folder / name)
    tiny_model(folder / "REWARD_MODEL_DIR", with_value_head)
    tiny_model(folder / "PROCESS_MODEL_DIR", lambda model: with_value_head(model, labels=2, bias=True))
    tiny_model(folder / "JUDGE_DIR", positions=512)
    tiny_gpt2(folder / "GPT2_DIR")
    return folder


def write_inputs(page: str, folder: Path, models: Path) -> None:
    """Write the files that commands of a page read."""
    write_files(page, folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    for model in models.iterdir():
        (folder / model.name).symlink_to(model)
    config = json.loads((models / "MODEL_DIR/config.json").read_text())
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512}
    sizes |= {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    texts: dict[str, Any] = {"completion": "Purr.", "chosen": "It purrs.", "rejected": "It barks.", "label": True}
    texts |= {"completions": ["It purrs.", "So it is a cat."], "labels": [True, False]}
    for name, fields in {
        "PROMPTS": (),
        "DEMONSTRATIONS": ("completion",),
        "PAIRS": ("chosen", "rejected"),
        "RATINGS": ("completion", "label"),
        "STEPS": ("completions", "labels"),
    }.items():
        record = {"prompt": "Tell me of a cat. "} | {field: texts[field] for field in fields}
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for _ in range(20)))
    (folder / "REWARD.py").write_text("def score(prompt, completion, **fields):\n    return float('a' in completion)\n")
    (folder / "RUN_DIR").mkdir()
    (folder / "RUN_DIR/config.json").write_text(json.dumps({"experiment": "ppo", "flags": {"steps": 1}}))
    (folder / "RUN_DIR/metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5, "time_s/step": 1}) + "\n")


@pytest.mark.parametrize(("page", "line"), ONLY_PREPARED, ids=[line[:60] for _, line in ONLY_PREPARED])
def test_commands_that_do_not_run_here_are_checked(page, line, models, tmp_path, monkeypatch):
    if "--backend=xla" in line and find_spec("jax") is None:
        pytest.skip("jax is not installed")
    (name,) = [name for name in PREPARED if line.startswith(name)]
    assert (ROOT / PREPARED[name]).exists()
    write_inputs(page, tmp_path, models)
    monkeypatch.chdir(tmp_path)
    _, _, program, *flags = words_of(line)
    if program not in PROGRAMS:
        assert program in COMMANDS and set(re.findall(r"--\w+", line)) <= set(
            re.findall(r"--\w+", COMMANDS[program].usage)
        )
        return
    command = with_models(read_command(experiment_of(program), [f"funrl {program}", *flags], writes=True))
    if command.settings.estimate.dry_run:
        check_settings(command.settings)
        assert tokens_of(command.settings, command.compose())
    else:
        prepare(command.settings, command.compose)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("page,lines", CASES, ids=[lines[0][:60] for _, lines in CASES])
def test_commands_run(page, lines, models, tmp_path):
    if any("--engine=vllm" in line for line in lines) and not importlib.util.find_spec("vllm"):
        pytest.skip("no vLLM here: ./test --all makes .venv-vllm for it")
    if any("read_checkpoint.py" in line for line in lines) and find_spec("orbax") is None:
        pytest.skip("orbax is not installed")
    if any("--reward=math" in line for line in lines) and find_spec("math_verify") is None:
        pytest.skip("math-verify is not installed")
    if any("env_search" in line for line in lines) and find_spec("bm25s") is None:
        pytest.skip("bm25s is not installed")
    write_inputs(page, tmp_path, models)
    for line in lines:
        words = [str(tmp_path / "TRAINED/checkpoints/step-2") if w == "CHECKPOINT" else w for w in words_of(line)]
        status, printed = run(words, tmp_path)
        assert status == 0, f"{page}: {line}\n{printed}"
        if "--run_dir=here" in words:
            assert (tmp_path / "here/report.html").exists() and (tmp_path / "here/model/config.json").exists()
            shutil.rmtree(tmp_path / "here")


def test_commands_of_torchrun_start_programs_with_flags_that_are_there():
    """tests/docs/test_manifests.py and tests/processes/test_attempts.py have torchrun start ranks."""
    lines = [line for _, lines in BLOCKS for line in lines if "torchrun" in line]
    assert lines
    for line in lines:
        _, *launcher, option, module = line.partition(" --mesh=")[0].split()
        assert {"--standalone", "--nproc-per-node=2"} == {*launcher} and option == "-m"
        name = module.removeprefix("funrl.experiments.")
        assert name in PROGRAMS and find_spec(module)
        flags = line.split()[len(launcher) + 3 :]
        assert read_command(Experiment(name, name, {}), [name, *flags], writes=False).settings.devices.mesh == "dp2"


def test_every_page_with_code_is_executed():
    """Here, or in the test that `ELSEWHERE` names; the README's commands all run."""
    assert all(any(line.startswith(name) for _, line in ONLY_PREPARED) for name in PREPARED)
    assert "README.md" not in {page for page, _ in ONLY_PREPARED}
    with_code = {page for page in LINKED if any(blocks(page, language) for language in ("python", "bash"))}
    assert with_code - {"CONTRIBUTING.md"} == {*PAGES, *ELSEWHERE}  # whose commands are those of the checks
    for page, file in ELSEWHERE.items():
        assert Path(page).name in (ROOT / file).read_text()


def anchors(page: Path) -> set[str]:
    """Names of a page's sections, as a code host and the site form them."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    """To a file that is there, and to a section that it has."""
    for page in LINKED:
        prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        for target, section in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", prose):
            file = (ROOT / page).parent.joinpath(target) if target else ROOT / page
            assert file.exists(), f"{page}: {target}"
            assert not section or section in anchors(file), f"{page}: {target}#{section}"


def test_every_page_is_in_the_index():
    """The site's tree of pages is made of the lists in docs/README.md."""
    index = re.findall(r"^- \[[^]]*\]\((\w+\.md)\)", (ROOT / "docs/README.md").read_text(), re.M)
    stubs = {"README.md", "contributing.md", "benchmarks.md", "changes.md"}
    assert len(index) == len({*index}) and {*index} == {page.name for page in (ROOT / "docs").glob("*.md")} - stubs


def test_the_two_commands_are_there():
    for name in ("run", "test", ".ci/run", ".ci/setup", ".ci/docs"):
        assert (ROOT / name).stat().st_mode & 0o100, f"{name} cannot be executed"
    assert "./test --all" in (ROOT / ".ci/run").read_text()
    assert ".ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()


def test_the_numbers_of_the_readme_and_the_comparison():
    comparison = (ROOT / "docs/comparison.md").read_text()
    reinforced = [name for name in NAMES if kinds_of(recipe(name)()) == RL]
    assert f"| {len(NAMES)} recipes" in (ROOT / "README.md").read_text()
    assert f"| {len(reinforced)} recipes of" in comparison
    assert f"| flags | {len(settings_flags())}, and" in comparison
