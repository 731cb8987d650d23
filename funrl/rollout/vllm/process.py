"""The process that vLLM runs in, kept usable for others.

Importing and starting vLLM edits environment variables, seeds the global random state, disables
`torch.set_num_threads`, and opens a process group if there is none. What can be restored is restored.

Reference: https://docs.vllm.ai; undocumented interfaces used here are those of versions 0.32 and 0.33.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import random
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from funrl.mesh.collectives import psum
from funrl.mesh.mesh import Mesh, single

KEPT_VARIABLES = "VLLM_"  # of the environment, which vLLM reads as it goes


@contextlib.contextmanager
def contained(mesh: Mesh) -> Iterator[None]:
    """Restore what vLLM changes in its process when it starts."""
    variables = dict(os.environ)
    threads = torch.set_num_threads
    noise = random.getstate(), np.random.get_state()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
        "RANK": str(mesh.rank),
        "LOCAL_RANK": str(mesh.device.index or 0),
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        devices = [mesh.device] if mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's names that vLLM still uses
            yield
    finally:
        torch.set_num_threads = threads
        random.setstate(noise[0])
        np.random.set_state(noise[1])
        kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT_VARIABLES)}
        os.environ.clear()
        os.environ.update(variables | kept)


@functools.cache
def import_vllm() -> None:
    """Import what starts vLLM on a CPU, which takes ten seconds: forks of this process have it.

    Its platform replaces kernels of Triton with each engine, for which it reads all names of all modules: here once.
    """
    with contained(single("cpu")):
        for name in ("v1.engine.llm_engine", "v1.worker.cpu_worker", "model_executor.layers.quantization.online.base"):
            importlib.import_module(f"vllm.{name}")
        platform = importlib.import_module("vllm.platforms").current_platform
        platform.register_triton_kernel_overrides()
        type(platform).register_triton_kernel_overrides = lambda *_: None
        logger = importlib.import_module("vllm.logger")
        logger.configure_logging_if_needed(importlib.import_module("vllm.config.logging").LoggingConfig())


def inspect_models_here() -> None:
    """Make vLLM inspect the class of a model in this process, where there is no CUDA.

    It starts an interpreter for each new class, which imports vLLM again, lest CUDA is initialized.
    """
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()


def ending_alone(engine: Any) -> Any:
    """Keep the end of an engine from what else uses its process.

    When vLLM collects an engine it destroys the groups of all engines, and the process group of the run.
    """
    client = engine.engine_core
    client._finalizer.detach()
    weakref.finalize(client, _release, client.engine_core.model_executor, client.engine_core.scheduler)
    return engine


def _release(executor: Any, scheduler: Any) -> None:
    executor.shutdown()
    scheduler.shutdown()


def launcher(mesh: Mesh) -> Any:
    """vLLM's executor for ranks that are started externally.

    On a CPU it shares memory between the ranks of a model under a fixed name; here each run has a name of its own.
    """
    from vllm.v1.executor.uniproc_executor import (  # type: ignore[import-not-found]
        ExecutorWithExternalLauncher,
        UniProcExecutor,
    )

    own = torch.tensor(os.getpid() if mesh.index("tensor") == 0 else 0, device=mesh.device)
    name = int(psum(own, mesh, "tensor"))

    class FunrlLauncher(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"env://:{name}", mesh.rank, mesh.device.index or 0

        def shutdown(self) -> None:
            UniProcExecutor.shutdown(self)  # from 0.33 on the other one destroys groups of all engines

    return FunrlLauncher
