"""The way of a prompt to its gradient: which modules take part in a step, and how often a call climbs.

    python tools/journey.py           # a step of GRPO on one device with the native engine

A module takes part if one of its functions runs between the reading of a prompt's record and the update that it leads
to. A climb is a call from a package into one further down the list of `tools/house.py`, which it cannot import: it got
there by a function that was passed. A function that is mapped over a tree is called by who maps it, not by
`funrl.trees`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import funrl
from tools.house import INSIDE, ORDER, inner_package, package

FOLDER = str(Path(str(funrl.__file__)).parent)
MAPS = f"{FOLDER}/trees.py"


class Journey:
    """Modules of the frames that run while it is a profile function, and the calls between them that climb."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}  # in the order of their first frames
        self.climbs: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take note of a call. The signature is that of `sys.setprofile`."""
        if event != "call" or not frame.f_code.co_filename.startswith(FOLDER):
            return
        module = frame.f_globals["__name__"]
        self.modules.setdefault(module)
        caller = frame.f_back
        while caller is not None and not (
            caller.f_code.co_filename.startswith(FOLDER) and caller.f_code.co_filename != MAPS
        ):
            caller = caller.f_back
        if caller is None:
            return
        below = caller.f_globals["__name__"]
        if height(module) > height(below):
            self.climbs[below, module] += 1


def height(module: str) -> tuple[int, int]:
    """Place of a module's package in the order of the house."""
    name = package(module)
    inside = INSIDE.get(name, ())
    inner = inside.index(inner_package(module)) if inside else 0
    return (ORDER.index(name) if name in ORDER else -1, inner)


def travelled() -> Journey:
    """Run two steps of GRPO and follow the second one, in which nothing is set up any more."""
    from funrl.trainer import loop

    journey = Journey()
    one_step = loop.one_step
    steps: list[int] = []

    def followed(*arguments: Any) -> Any:
        steps.append(len(steps))
        sys.setprofile(journey if len(steps) == 2 else None)
        try:
            return one_step(*arguments)
        finally:
            sys.setprofile(None)

    loop.one_step = followed
    prompts = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 30)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        funrl.train(
            "grpo",
            prompts=prompts,
            reward=lambda prompt, completion, **fields: float(len(completion)),
            steps=2,
            batch_prompts=4,
            samples_per_prompt=2,
            max_new_tokens=4,
            eval_prompts=4,
            device="cpu",
        )
    return journey


def main() -> int:
    journey = travelled()
    print(f"{len(journey.modules)} modules take part")
    for module in journey.modules:
        print(f"  {module}")
    print(f"{len(journey.climbs)} climbs")
    for (below, above), count in sorted(journey.climbs.items()):
        print(f"  {below} -> {above} ({count} calls)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
