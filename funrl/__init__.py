"""funrl: reinforcement learning for language models as pure functions over trees on a named device mesh.

run = funrl.train("grpo", mesh="dp2", steps=10)
run.model.generate(["12+30="])
funrl.evaluate(run.run_dir).metrics["eval/accuracy"]
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funrl import algos, optim
    from funrl.api.python import Run, RunError, TrainedModel, generate, load, train
    from funrl.batch import Batch
    from funrl.cli.evaluate import Evaluation, evaluate
    from funrl.models import Model

# MKL reads this before its first product. Without it, the last bits of a product depend on the alignment of its tensors
# in memory on many processors, and no run could be repeated. AUTO is the only mode that all processors have at full
# speed: on processors that are not Intel's, MKL takes AVX2 and AVX512 for AUTO, and COMPATIBLE halves the speed.
os.environ.setdefault("MKL_CBWR", "AUTO")

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Evaluation",
    "Model",
    "Run",
    "RunError",
    "TrainedModel",
    "algos",
    "evaluate",
    "generate",
    "load",
    "optim",
    "train",
]
_PLACES = {
    "Batch": "funrl.batch",
    "Evaluation": "funrl.cli.evaluate",
    "Model": "funrl.models",
    "Run": "funrl.api.python",
    "RunError": "funrl.api.python",
    "TrainedModel": "funrl.api.python",
    "evaluate": "funrl.cli.evaluate",
    "generate": "funrl.api.python",
    "load": "funrl.api.python",
    "train": "funrl.api.python",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    if name in ("algos", "optim"):
        return importlib.import_module(f"funrl.{name}")
    raise AttributeError(f"funrl has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
