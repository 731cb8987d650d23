"""The keywords of `funrl.train` and its like as a type checker and an editor see them."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import funrl
from funrl.algos.recipes import NAMES
from funrl.api.arguments import python_value
from funrl.cli.inference_flags import inference_flags
from funrl.flags.arguments import arguments_of, find_recipe
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.settings.settings import settings_flags

ROOT = Path(__file__).parents[2]
CALLS = """
from pathlib import Path
from typing import Any

import numpy as np

import funrl

run = funrl.train(
    "grpo", model=Path("m"), steps=np.int64(3), lr=np.float32(1e-4), fsdp=np.bool_(False), save_every=0, kl_coef=0.0,
    remat="full", run_dir=Path("r"), num_minibatches=3,
)
funrl.train("grpo", steps="three")
own: dict[str, Any] = {"own_argument": 3}
funrl.train("own.py:recipe", **own)
funrl.evaluate("m", samples=4, smaples=4)
print(funrl.load("m").generate(["a"], max_new_tokens=3), funrl.load("m").generate(["a"], max_new_token=3))
funrl.generate("m", ["a"], tempreature=1.0)
"""
REFUSED = {"num_minibatches": 11, "steps": 13, "smaples": 16, "max_new_token": 17, "tempreature": 18}


def test_the_keywords_are_the_settings_and_the_arguments_of_recipes():
    """As keywords.pyi has them, beside the parameters of each function."""
    arguments = {name for recipe in NAMES for name in arguments_of(find_recipe(recipe), recipe).flags}
    tables = {"TypedDict": set()}
    for table in ast.parse((ROOT / "funrl/api/keywords.pyi").read_text()).body:
        if isinstance(table, ast.ClassDef):
            own = {ast.unparse(entry.target) for entry in table.body if isinstance(entry, ast.AnnAssign)}
            tables[table.name] = tables[ast.unparse(table.bases[0])] | own
    train, evaluate, generate, of_model = (
        set(inspect.signature(function).parameters) - {"settings", "sampling"} | tables[f"{name}Keywords"]
        for function, name in (
            (funrl.train, "Train"),
            (funrl.evaluate, "Evaluate"),
            (funrl.generate, "Sampling"),
            (funrl.TrainedModel.generate, "Sampling"),
        )
    )
    assert train == {*settings_flags(), *arguments, "recipe", "tokenizer", "source", "on_step"}
    assert evaluate == {*(flag.name for flag in inference_flags("evaluate")), "model"}
    fields = set(Sampling.__dataclass_fields__)
    assert generate == {*fields, "model", "texts", "seed", "mesh"} and of_model == {*fields, "self", "texts", "seed"}
    for function, keywords in ((funrl.train, "TrainKeywords"), (funrl.evaluate, "EvaluateKeywords")):
        assert function.__annotations__["settings"] == f"Unpack[{keywords}]"
    assert funrl.generate.__annotations__["sampling"] == "Unpack[SamplingKeywords]"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("steps", np.int64(3), 3),
        ("steps", np.uint8(3), 3),
        ("lr", np.float32(0.5), 0.5),
        ("lr", np.int16(1), 1),
        ("lr", np.longdouble(2), 2.0),
        ("fsdp", np.bool_(True), True),
        ("save_every", 0, "0"),
        ("save_every", np.int8(5), "5"),
        ("run_dir", Path("a/b"), "a/b"),
        ("save_every", "10m", "10m"),
        ("generate_mesh", None, None),
    ],
)
def test_values_of_other_types_become_those_of_the_flag(name, value, wanted):
    flag = settings_flags()[name]
    result = python_value(flag, value)
    assert result == wanted and type(result) is type(wanted) and flag.problem(result) == ""


@pytest.mark.slow
def test_pyright_accepts_a_call_and_refuses_a_misspelt_one(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"], "pythonVersion": "3.11"}}')
    command = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    output = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    errors = [line for line in output.splitlines() if " - error: " in line]
    assert len(errors) == len(REFUSED), output
    for (name, number), line in zip(REFUSED.items(), errors, strict=True):
        assert f"calls.py:{number}:" in line and name in line, output
