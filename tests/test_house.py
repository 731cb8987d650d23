"""The house stands as docs/design.md draws it, and what the page names exists."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from funrl.algos import WHERE

sys.path.insert(0, str(Path(__file__).parents[1]))  # tools/ is not part of the package
from tools import house, measure

PAGES = ["docs/design.md", "CONTRIBUTING.md"]


@pytest.fixture(scope="module")
def built():
    return house.read_house()


def test_no_rule_is_broken(built):
    assert house.problems(built) == []


def test_the_picture_is_that_of_the_source(built):
    text = house.PAGE.read_text()
    assert text == house.drawn(text, built), "python tools/house.py draws it anew"


def checkout(folder, files):
    """A house of the packages that the order asks for, with some files: path below funrl -> text."""
    for name in house.ORDER:
        (folder / "funrl" / name).mkdir(parents=True)
        (folder / "funrl" / name / "__init__.py").write_text("")
    (folder / "funrl" / "__init__.py").write_text("")
    for name, text in files.items():
        (folder / "funrl" / name).parent.mkdir(exist_ok=True)
        (folder / "funrl" / name).write_text(text)
    return house.read_house(folder)


@pytest.mark.parametrize(
    "files,problem",
    [
        ({"mesh/plan.py": "import funrl.models"}, "funrl/mesh/plan.py:1 imports funrl.models: models comes after mesh"),
        (
            {
                "mesh/plan.py": "def f():\n    from funrl.models.huggingface.directories import load",
                "models/huggingface/directories.py": "",
            },
            "funrl/mesh/plan.py:2 imports funrl.models.huggingface.directories: models comes after mesh",
        ),
        (
            {"algos/core.py": "from funrl.mesh import rules", "mesh/rules.py": ""},
            "funrl/algos/core.py:1 imports funrl.mesh.rules: algos may import only "
            "trees, across, kinds, role_kinds, fields, batch, seeds, algos",
        ),
        (
            {"models/a.py": "from funrl.models import b", "models/b.py": "if True:\n    import funrl.models.a"},
            "circle: funrl.models.a -> funrl.models.b",
        ),
        (
            {"trainer/jobs/a.py": "import funrl.trainer.checkpoints.b", "trainer/checkpoints/b.py": ""},
            "funrl/trainer/jobs/a.py:1 imports funrl.trainer.checkpoints.b: "
            "trainer.checkpoints comes after trainer.jobs",
        ),
        (
            {"models/a.py": "class Plan:\n    pass", "mesh/b.py": "Plan = int"},
            "Plan: defined in each of mesh.b, models.a",
        ),
        (
            {"models/a.py": "def chain(): pass", "optim/b.py": "chain = 1"},
            "chain: defined in each of models.a, optim.b",
        ),
        (
            {"trainer/loop.py": "import torch.distributed as dist"},
            "funrl/trainer/loop.py:1 imports torch.distributed, for mesh/ and processes/ only",
        ),
        (
            {"trainer/loop.py": "from torch import distributed"},
            "funrl/trainer/loop.py:1 imports torch.distributed, for mesh/ and processes/ only",
        ),
        (
            {
                "trainer/loop.py": "from importlib import import_module\nimport_module('funrl.cli.run')",
                "cli/run.py": "",
            },
            "funrl/trainer/loop.py:2 imports funrl.cli.run: cli comes after trainer",
        ),
        (
            {"mesh/plan.py": "PLAN = 'funrl.models.a:plan'", "models/a.py": ""},
            "funrl/mesh/plan.py:1 imports funrl.models.a: models comes after mesh",
        ),
        (
            {"api/warm_start.py": ""},
            "funrl.api.warm_start does not import funrl.experiments.sft, as UPWARDS says",
        ),
        ({"stray.py": ""}, "funrl/stray: not in the order of tools/house.py"),
    ],
)
def test_a_broken_rule_is_found(tmp_path, files, problem):
    assert house.problems(checkout(tmp_path, files)) == [problem]


def test_the_field_s_own_word_may_be_defined_twice(tmp_path):
    assert house.problems(checkout(tmp_path, {"algos/core.py": "def chain(): pass", "optim/b.py": "chain = 1"})) == []
    built = house.read_house()
    defined = {item.removeprefix("funrl."): set(house.read_source(file).defined) for item, file in built.files.items()}
    for name, places in house.SHARED_DEFINITIONS.items():
        users = [element for element, names in defined.items() if name in names]
        assert all(any(f"{user}.".startswith(f"{place}.") for user in users) for place in places), name


def test_an_index_is_looked_through(tmp_path):
    index = "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from funrl.models.huggingface.directories import load\n"
    files = {
        "models/__init__.py": index,
        "models/huggingface/directories.py": "",
        "trainer/jobs/job.py": "from funrl.models import load",
    }
    imports = house.imports(checkout(tmp_path, files))
    assert imports == [house.Import("funrl.trainer.jobs.job", 1, "funrl.models.huggingface.directories")]


def test_an_arrow_that_follows_from_others_is_not_drawn(tmp_path):
    files = {"batch/a.py": "import funrl.trees", "data/b.py": "import funrl.batch.a\nimport funrl.trees"}
    drawn = house.picture(checkout(tmp_path, files))
    assert "data --> batch" in drawn and "batch --> trees" in drawn and "data --> trees" not in drawn
    assert "| `data` | trees, batch |" in drawn


def test_importing_an_index_imports_no_other_file(built):
    indexes = sorted(name for name, file in built.files.items() if file.name == "__init__.py")
    packages = [name for name in indexes if name.count(".") < 2]
    program = f"import sys, {', '.join(packages)}\nprint(*sorted(m for m in sys.modules if m.startswith('funrl')))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert set(done.stdout.split()) <= set(indexes)


def names_in(file):
    """Functions, classes and methods of a file."""
    result = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            result.add(node.name)
        if isinstance(node, ast.ClassDef):
            result |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return result


@pytest.mark.parametrize("page", PAGES)
def test_every_function_that_a_page_links_to_exists(page):
    file = Path(__file__).parents[1] / page
    links = re.findall(r"\[`([\w.]+)`\]\(([\w./]+\.py)\)", file.read_text())
    assert links
    missing = [(name, target) for name, target in links if name not in names_in(file.parent / target)]
    assert missing == []


def names_of_module(file):
    """Names that can be imported from a file: its definitions and its imports."""
    source = house.read_source(file)
    return {*source.defined, *(alias.asname or alias.name for node in source.imports for alias in node.names)}


def test_what_benchmarks_and_examples_import_exists(built):
    root, missing = Path(__file__).parents[1], []
    known = {name: names_of_module(file) for name, file in built.files.items()}
    known["funrl.algos"] |= set(WHERE)
    for file in (
        file for folder in ("benchmarks", "examples", "tools") for file in sorted((root / folder).glob("*.py"))
    ):
        for node in house.read_source(file).imports:
            if isinstance(node, ast.ImportFrom) and node.module in known:
                names = {alias.name for alias in node.names} - known[node.module]
                missing += [f"{file.name}: {node.module}.{x}" for x in names if f"{node.module}.{x}" not in known]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("funrl"):
                missing.append(f"{file.name}: {node.module}")
    assert missing == []


FORBIDDEN = {  # a word that is not the field's: what to write instead
    r"lies|lay|lays": "is, layout",
    r"judged|judgement|judges (the|a|an|each|every)": "score",
    r"heeds?": "optional reads",
    r"patience": "timeout",
    r"likeliest|among_logp": "most probable, topk, topk_logp",
    r"lessons?|learnt|teach|teaches|taught": "example, train, trained",
    r"lam": "gae_lambda",
    r"(?<!actor/)kl_loss": "kl_coef",
    r"given up": "donated",
    r"in the place of": "instead of",
    r"is none of": "is not one of",
}


def pages_and_sources():
    root = Path(__file__).parents[1]
    results = [
        file for folder in ("funrl", "docs", "examples", "benchmarks", "tools") for file in (root / folder).rglob("*")
    ]
    return [file for file in (*results, *root.glob("*.md")) if file.suffix in (".py", ".md")]


@pytest.mark.parametrize("words", FORBIDDEN)
def test_words_are_the_field_s(words):
    root, results = Path(__file__).parents[1], []
    for file in pages_and_sources():
        if file.parent.name == "foreign" or file.name in ("names.py", "migration.md"):
            # other libraries' words
            continue
        text = file.read_text()
        results += [f"{file.relative_to(root)}: {match[0]}" for match in re.finditer(rf"\b(?:{words})\b", text)]
    assert results == [], f"write: {FORBIDDEN[words]}"


def test_a_docstring_begins_with_a_noun_phrase_or_an_imperative():
    root, results = Path(__file__).parents[1], []
    others = r"(What|How|Where|When|Which|Whether|Who|Why|Raises|Returns|Writes|Reads|Makes|Gives)\b(?!:)"
    for file in (file for file in pages_and_sources() if file.suffix == ".py"):
        lines = house.read_source(file).docstrings
        results += [f"{file.relative_to(root)}: {line}" for line in lines if re.match(others, line)]
    assert results == []


def test_a_model_is_called_by_its_record_and_not_by_the_module_that_made_it():
    root = Path(__file__).parents[1] / "funrl"
    outside = [file for file in root.rglob("*.py") if "models" not in file.relative_to(root).parts]
    named = re.compile(r"from funrl\.models\.decoder import [^\n]*\bdecoder\b|funrl\.models\.decoder\.decoder\b")
    assert [str(file.relative_to(root)) for file in outside if named.search(file.read_text())] == []


def test_only_what_needs_it_asks_for_a_kind_of_gpu():
    """A compute capability, a size of warps or e4m3fn elsewhere would leave out ROCm."""
    root = Path(__file__).parents[1] / "funrl"
    asks = re.compile(r"get_device_capability|warp_?size|multi_processor_count|gcnArchName|float8_e4m3fn\b", re.I)
    files = {str(file.relative_to(root)) for file in root.rglob("*.py") if asks.search(file.read_text())}
    # Formats of 8 bits, AMD's too; FA3 or FA4; launches that overlap; blocks of any L2; the dtype of files.
    names = ("float8.py", "flash_kernel.py", "gpu_kernels/decode_kernels.py", "logit_rows/operators.py")
    kernels = {f"compiled_kernels/{name}" for name in names}
    assert files == kernels | {"models/huggingface/fp8_files.py"}


def test_no_package_exceeds_the_bounds_of_its_figures():
    bounds = json.loads(measure.BOUNDS.read_text())
    assert measure.over_bounds(measure.by_package(), bounds) == []
    assert measure.subjects_over_budget(bounds["subjects"]) == []


def test_a_subject_over_its_budget_is_found(tmp_path):
    (tmp_path / "funrl" / "data").mkdir(parents=True)
    (tmp_path / "funrl" / "a.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "funrl" / "data" / "b.py").write_text("# no code\nc = 3\n")
    subjects = {"numbers": {"paths": ["funrl/a.py", "funrl/**/*.py"], "code": 2}}
    assert measure.subjects_over_budget(subjects, tmp_path) == ["numbers: code is 3, and may be at most 2"]
    with pytest.raises(ValueError, match="names no file"):
        measure.subject_lines(["funrl/c.py"], tmp_path)


def test_a_figure_over_its_bound_is_found(tmp_path):
    body = "def f(a, b, c, d, e, g, h):\n    one = a\n    x, y = b, c\n    g = f(1, 2, 3, 4, 5, 6, 7)  # fmt: skip\n"
    (tmp_path / "funrl" / "data").mkdir(parents=True)
    (tmp_path / "funrl" / "data" / "a.py").write_text('"""No code."""\n\n# nor this\n' + body)
    totals = measure.by_package(tmp_path)
    bounds = {"funrl/data": {"dense": 1, "wide": 1, "crowded": 1, "skips": 1, "vague": 1, "code": 5}}
    assert totals["funrl/data"].code == 4
    assert measure.bounds_of(totals) == bounds and json.loads(measure.bounds_text(bounds)) == bounds
    assert measure.over_bounds(totals, bounds) == []
    problems = measure.over_bounds(totals, {})
    assert [problem.split()[1] for problem in problems] == list(measure.GOALS)
    assert problems[-1] == "funrl/data: code is 4, and may be at most 0"


def test_a_figure_within_its_goal_needs_no_bound(tmp_path):
    (tmp_path / "funrl" / "data").mkdir(parents=True)
    functions = "def f():\n    pass\n" * 25
    (tmp_path / "funrl" / "data" / "a.py").write_text("x, y = 1, 2\n" + functions)
    assert measure.over_bounds(measure.by_package(tmp_path), {"funrl/data": {"code": 51}}) == []


def test_code_elsewhere_is_counted_where_it_lands(tmp_path):
    files = {
        "funrl/a.hpp": "// no code\nint a;\n\n/* nor\nthis */\nint b;\n",
        "funrl/page.html": "<p>\n{# no\ncode #}\n<!-- nor this -->\n</p>\n",
        "examples/a.py": '"""No code."""\n\na = 1\n',
        "tools/typings/a.pyi": "a: int\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    counts = measure.code_lines_elsewhere(tmp_path)
    assert counts == {"C++ of funrl": 2, "stubs": 1, "templates of funrl": 2, "examples": 1} | dict.fromkeys(
        ("tools", "tests", "benchmarks"), 0
    )
