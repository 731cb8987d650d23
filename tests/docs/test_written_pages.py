"""Pages that are written by a program are what the code says, and the glossary names every metric."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

import funrl
from funrl.cli.run import main
from funrl.cost.dry_run import PROMPT_TOKENS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # tools/ is not part of the package
from tools import comparison, keywords, names, pieces, recipes  # noqa: E402

GLOSSARY = ROOT / "docs" / "metrics.md"
GROUPS = (
    "actor",
    "compile",
    "critic",
    "curriculum",
    "difficulty",
    "distillation",
    "eval",
    "filter_groups",
    "implicit_reward",
    "memory",
    "partial",
    "perf",
    "preference",
    "resampling",
    "response_length",
    "reward",
    "rollout",
    "rollout_corr",
    "router",
    "sync",
    "time_s",
    "train",
    "update",
)
NOT_METRICS = {
    "rollout/logprob_gap_counts",
    "router/counts",
    "train/device",
    "eval/1",
    "eval/1/1",
    "preference/1",
    "response_length/1",
    "reward/1",
    "rollout/logprob_gap",
}


def test_the_pieces_page_is_current():
    assert pieces.PAGE.read_text() == pieces.page(), "python tools/pieces.py writes it anew"


def test_every_piece_has_what_the_page_shows():
    lines = [line for line in pieces.page().splitlines() if line.startswith("| [`")]
    assert len(lines) > 80
    assert [line for line in lines if not line.split(" | ")[1].strip()] == []


@pytest.mark.slow
def test_the_tables_of_names_are_current():
    text = names.PAGE.read_text()
    assert text == names.page(text), "python tools/names.py writes them anew"


def test_the_table_of_what_others_do_is_current():
    text = comparison.PAGE.read_text()
    assert text == comparison.page(text), "python tools/comparison.py writes it anew"


def test_the_types_of_keywords_are_current():
    assert keywords.PAGE.read_text() == keywords.page(), "python tools/keywords.py writes them anew"


@pytest.mark.parametrize("preset", recipes.PRESETS)
def test_the_dry_run_of_a_preset_on_the_page_is_of_its_flags(preset):
    """All fit; the test below makes one of them again."""
    shown = recipes.shown(recipes.PAGE.read_text(), preset)
    flags = yaml.safe_load((ROOT / f"recipes/{preset}.yaml").read_text())
    train = flags["mesh"] + " fully sharded" * ("fsdp" in flags)
    tokens = PROMPT_TOKENS + flags["max_new_tokens"]
    rows = flags["batch_prompts"] * flags["samples_per_prompt"]
    assert f": train {train}, generate {flags.get('generate_mesh', flags['mesh'])}\n" in shown
    assert f"\na step: {rows:,} completions, prompt and completion {tokens:,} tokens" in shown
    assert f" --steps={flags['steps']} take " in shown and "\nfits: " in shown


@pytest.mark.slow
def test_the_dry_run_of_the_largest_preset_is_current(capsys, monkeypatch):
    preset = "llama3_70b_8nodes"

    def facts(output):
        """The model, and the verdict with its peak; the other numbers of a page may be those of an earlier version."""
        return [line for line in output.splitlines() if line.startswith(("llama, ", "fits: "))]

    monkeypatch.chdir(ROOT)
    assert main("grpo", ["grpo", *recipes.arguments(preset)]) == 0
    result = facts(capsys.readouterr().out)
    shown = facts(recipes.shown(recipes.PAGE.read_text(), preset))
    assert len(result) == 2 and result == shown, "python tools/recipes.py makes them"


def defined():
    """Names of the glossary as patterns: NAME stands for any text, k for a number."""
    results = [name for line in GLOSSARY.read_text().splitlines() for name in re.findall(r"`([a-z_]+/[^`]+)`", line)]
    return [re.compile(re.escape(item).replace("NAME", ".+").replace("@k", r"@\d+") + r"\Z") for item in results]


def is_defined(name, patterns):
    return any(pattern.match(name) for pattern in patterns)


def metrics_of_the_source():
    """Every text of the package that is the name of a metric; what an f-string fills in is "1"."""
    result = set()
    sources = [file.read_text() for file in (ROOT / "funrl").rglob("*.py")]
    for source in (source for source in sources if re.search(rf"(?:{'|'.join(GROUPS)})/", source)):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if re.fullmatch(rf"({'|'.join(GROUPS)})/[\w@/]+", text):
                result.add(text)
    return {name for name in result - NOT_METRICS if not name.endswith("/")}


def test_the_glossary_has_every_metric_that_the_source_names():
    patterns = defined()
    metrics = metrics_of_the_source()
    assert len(metrics) > 90
    assert sorted(name for name in metrics if not is_defined(name, patterns)) == []


@pytest.mark.parametrize("recipe", ["ppo", "dpo"])
def test_the_glossary_has_every_metric_of_a_run(recipe, tmp_path):
    short = {"steps": 1, "warmstart_steps": 1, "batch_prompts": 4, "eval_prompts": 4, "run_dir": tmp_path / "run"}
    run = funrl.train(recipe, **short | ({} if recipe == "dpo" else {"samples_per_prompt": 2, "save_rollouts": 1}))
    written = json.loads(Path(run.run_dir, "metrics.jsonl").read_text().splitlines()[-1])
    assert set(written) == {"step", *written} and len(written) > 10
    patterns = defined()
    assert [name for name in written if name != "step" and not is_defined(name, patterns)] == []
