"""funrl/api/keywords.pyi: the keywords of `funrl.train`, `funrl.evaluate` and `funrl.generate` with their types.

    python tools/keywords.py

They are made of the flags and of the recipes' arguments, so that an editor completes them and a type checker refuses a
misspelt one. `tests/docs/test_written_pages.py` fails where the file is not what they say.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "funrl" / "api" / "keywords.pyi"
sys.path.insert(0, str(ROOT))

from funrl.api.python import generate, train  # noqa: E402
from funrl.cli.evaluate import evaluate  # noqa: E402
from funrl.cli.inference_flags import inference_flags  # noqa: E402
from funrl.flags.arguments import arguments_of, find_recipe, recipe_names  # noqa: E402
from funrl.rollout.sampling_parameters import Sampling  # noqa: E402
from funrl.trainer.settings.declaration import Flag  # noqa: E402
from funrl.trainer.settings.settings import settings_flags  # noqa: E402

HEAD = '''\
"""Keywords of `funrl.train`, `funrl.evaluate` and `funrl.generate` with their types; written by tools/keywords.py."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import numpy as np

TruthValue = bool | np.bool_
WholeValue = int | np.integer
NumberValue = float | np.integer | np.floating
TextValue = str | Path | float
'''
NAMES = {bool: "TruthValue", int: "WholeValue", float: "NumberValue", str: "TextValue"}


def page() -> str:
    """The text of the file."""
    flags = settings_flags()
    own: dict[str, set[str]] = {}
    for recipe in recipe_names():
        for name, flag in arguments_of(find_recipe(recipe), recipe).flags.items():
            if name not in flags:
                own.setdefault(name, set()).update(_types(flag))
    arguments = {name: " | ".join(sorted(types, key=lambda one: (one == "None", one))) for name, types in own.items()}
    fields = {name: _name_of(hint) for name, hint in typing.get_type_hints(Sampling).items()}
    of_run = _without(_keywords(flags.values()) | dict(sorted(arguments.items())), train)
    of_evaluation = _without(_keywords(inference_flags("evaluate")), evaluate)
    shared = {k: kind for k, kind in of_run.items() if of_evaluation.get(k) == kind}
    tables = [
        _table(
            "SharedKeywords", "Flags of a run and of `funrl evaluate`.", {k: shared[k] for k in of_run if k in shared}
        ),
        _table(
            "TrainKeywords",
            "Flags of a run alone, then the arguments of recipes.",
            {k: kind for k, kind in of_run.items() if k not in shared},
            base="SharedKeywords",
        ),
        _table(
            "EvaluateKeywords",
            "Flags of `funrl evaluate` alone.",
            {k: kind for k, kind in of_evaluation.items() if k not in shared},
            base="SharedKeywords",
        ),
        _table("SamplingKeywords", "Fields of `Sampling`.", _without(fields, generate)),
    ]
    return "\n".join([HEAD, *(line for table in tables for line in table)]).rstrip() + "\n"


def _table(name: str, text: str, types: Mapping[str, str], base: str = "TypedDict") -> list[str]:
    lines = [f"    {keyword}: {kind}" for keyword, kind in types.items()]
    return [f"class {name}({base}, total=False):", f'    """{text}"""', "", *lines, ""]


def _keywords(flags: Iterable[Flag]) -> dict[str, str]:
    return {flag.name: " | ".join(_types(flag)) for flag in flags}


def _types(flag: Flag) -> list[str]:
    return [NAMES[flag.type]] + ["None"] * flag.optional


def _name_of(hint: object) -> str:
    return NAMES[hint] if hint in (bool, int, float) else str(hint)  # type: ignore[index]


def _without(types: Mapping[str, str], function: Callable[..., Any]) -> dict[str, str]:
    """The keywords that a function does not name itself."""
    code = function.__code__
    own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {name: kind for name, kind in types.items() if name not in own}


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
