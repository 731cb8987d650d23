"""funrl: reinforcement learning for language models as pure functions over trees on a named device mesh.

run = funrl.train("grpo", mesh="dp2", steps=10)
run.model.generate(["12+30="])
funrl.evaluate(run.run_dir).metrics["eval/accuracy"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funrl import algos, optim
    from funrl.batch import Batch
    from funrl.experiments.evaluate import Evaluation, evaluate
    from funrl.experiments.python import Run, generate, load, train
    from funrl.models import Model

__version__ = "0.1.0"
__all__ = ["Batch", "Evaluation", "Model", "Run", "algos", "evaluate", "generate", "load", "optim", "train"]
_PLACES = {
    "Batch": "funrl.batch",
    "Evaluation": "funrl.experiments.evaluate",
    "Model": "funrl.models",
    "Run": "funrl.experiments.python",
    "evaluate": "funrl.experiments.evaluate",
    "generate": "funrl.experiments.python",
    "load": "funrl.experiments.python",
    "train": "funrl.experiments.python",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    if name in ("algos", "optim"):
        return importlib.import_module(f"funrl.{name}")
    raise AttributeError(f"funrl has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
