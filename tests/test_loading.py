"""Functions by name: of a file as of a script, of a package as of an import, and what is said where there is none."""

import dataclasses
import pickle
import sys

import pytest

from funrl.loading import LoadError, load_files, load_function, loaded_files

GOOD = """
from __future__ import annotations
from dataclasses import dataclass
import helper_of_functions

helper_of_functions.TIMES.append(__name__)

@dataclass
class Weights:
    bonus: float = helper_of_functions.BONUS

constant = 3

def score(prompt, completion, *, answer, **fields):
    return float(completion == answer) + Weights().bonus

def other(prompt, completion):
    return 0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper_of_functions.py").write_text("BONUS = 0.5\nTIMES = []\n")
    (tmp_path / "json.py").write_text(GOOD)  # the name of a module that exists
    yield tmp_path
    sys.modules.pop("helper_of_functions", None)


def test_a_function_of_a_file_and_of_a_package(folder):
    fn = load_function("reward", f"{folder}/json.py:score")
    assert fn("1+1=", "2", answer="2", level=3) == 1.5
    assert sys.modules["json"].__file__ != str(folder / "json.py")
    assert load_function("reward", "funrl.rewards.verifiers:exact_match")("", "2", answer=2) == 1.0


def test_a_dataclass_of_the_file_works_under_its_own_module_name(folder):
    weights = load_function("algorithm", f"{folder}/json.py:score").__globals__["Weights"]
    assert [f.name for f in dataclasses.fields(weights)] == ["bonus"]
    assert sys.modules[weights.__module__].Weights is weights


def test_a_file_runs_once_whatever_is_asked_of_it(folder, monkeypatch):
    first = load_function("algorithm", f"{folder}/json.py:score")
    monkeypatch.chdir(folder)
    assert load_function("algorithm", "json.py:score") is first
    assert load_function("reward", "./json.py:other").__globals__ is first.__globals__
    assert len(sys.modules["helper_of_functions"].TIMES) == 1


def test_two_files_of_one_name_are_two(folder):
    (folder / "below").mkdir()
    (folder / "below" / "json.py").write_text("def score(prompt, completion):\n    return 7\n")
    assert load_function("reward", f"{folder}/below/json.py:score")("", "") == 7
    assert load_function("reward", f"{folder}/json.py:score")("", "2", answer="2") == 1.5


def test_a_file_that_failed_is_run_again(folder):
    (folder / "later.py").write_text("1 / 0")
    with pytest.raises(LoadError):
        load_function("reward", f"{folder}/later.py:fn")
    (folder / "later.py").write_text("def fn():\n    return 1\n\n# another length, so another cached bytecode\n")
    assert load_function("reward", f"{folder}/later.py:fn")() == 1


@pytest.mark.parametrize(
    "name,message",
    [
        ("json.py", "write FILE.py:function or module:function"),
        ("json.py:", "write FILE.py:function"),
        (":score", "write FILE.py:function"),
        ("nothing.py:score", r"nothing\.py: no such file"),
        ("folder.py:score", r"folder\.py: this is a directory, a file is needed"),
        ("json.py:scores", "has no 'scores'; did you mean score\\? its functions: Weights, score, other$"),
        ("json.py:constant", "'constant' is 3, which cannot be called"),
        ("broken.py:score", r"does not import: SyntaxError.*broken\.py.*line 2"),
        ("raises.py:score", r"does not import: ZeroDivisionError.*raises\.py\", line 3"),
        ("leaves.py:score", "does not import: SystemExit"),
        ("needs.py:score", "does not import: ModuleNotFoundError.*no_such_module_anywhere"),
        ("lacks.py:score", "has no 'score'; its functions: none$"),
        ("no_such_package.rewards:score", "does not import: ModuleNotFoundError"),
    ],
)
@pytest.mark.parametrize("flag", ["reward", "algorithm"])
def test_what_cannot_be_loaded_is_explained(flag, folder, monkeypatch, name, message):
    (folder / "folder.py").mkdir()
    (folder / "broken.py").write_text("x = 1\ndef score(:\n")
    score = "def score(prompt, completion):\n    return 1\n"
    (folder / "raises.py").write_text(f"\n\n1 / 0\n{score}")
    (folder / "leaves.py").write_text(f"import sys\nsys.exit(2)\n{score}")
    (folder / "needs.py").write_text(f"import no_such_module_anywhere\n{score}")
    (folder / "lacks.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.chdir(folder)
    with pytest.raises(LoadError, match=f"(?s)^--{flag}={name}: .*{message}"):
        load_function(flag, name)


def test_functions_of_files_are_pickled_for_processes_that_load_the_files(folder, monkeypatch):
    file = folder / "r.py"
    file.write_text("def f():\n    return 3\n")
    content = pickle.dumps(load_function("reward", f"{file}:f"))
    files = loaded_files()
    assert str(file) in files
    for name in [name for name in sys.modules if name.startswith("funrl_file_r_")]:
        monkeypatch.delitem(sys.modules, name)
    load_files([str(file)])
    assert pickle.loads(content)() == 3
