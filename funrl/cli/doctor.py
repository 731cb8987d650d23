"""The command `funrl doctor`: devices, versions and speed of this machine, and whether a command line would run on it.

    funrl doctor
    funrl doctor grpo --mesh=dp2 --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

A command line is checked as the run would check it before it starts ranks; nothing is trained or written.
"""

from __future__ import annotations

import ast
import functools
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import funrl
from funrl.cli.command import Experiment, read_command, with_mesh, with_models
from funrl.flags.arguments import full_source, recipe_names
from funrl.loading import shared_folder_of_files
from funrl.track.records.run_directory import installed_version
from funrl.trainer.settings.declaration import SettingsError

if TYPE_CHECKING:  # torch is imported after the checks of a command line that do not need it
    import torch

    from funrl.mesh.mesh import Mesh

REQUIRED = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "tensorstore", "tensorboard")
OPTIONAL = {
    "vllm": "--engine=vllm",
    "flash-attn": "faster attention on CUDA",
    "flash-linear-attention": "faster gated delta nets on CUDA",
    "math-verify": "--reward=math, --reward=boxed",
    "jsonschema": "--reward=json",
    "datasets": "parquet files, cached and saved datasets",
    "orbax-checkpoint": "reading checkpoints with orbax",
    "trl": "benchmarks",
}
MEASURED_S = 0.1  # duration of one measurement
MESSAGE_BYTES = 2**24


def doctor(argv: Sequence[str]) -> int:
    """Print the tables; return 0, or 1 if the command line would not run.

    Args:
      argv: "doctor", then the command line of a run, or nothing.
    """
    words = [word for word in argv[1:] if word != "funrl"]
    problem, sizes, device = would_run(words) if words else ("", {}, None)
    sections = [("this machine", machine()), ("packages", packages())]
    sections.append(("measured", [*collective_rates(sizes, device), *rates(device)]))
    for title, rows in sections:
        print(f"{title}:")
        for name, text in rows:
            print(f"  {name:<28}{text}")
    if words:
        print(f"funrl {' '.join(words)}:")
        print(f"  would not run: {problem}" if problem else "  would run")
    return 1 if problem else 0


def would_run(words: Sequence[str]) -> tuple[str, dict[str, int], str | None]:
    """The reason why a command line would not run ("" if it would), its mesh and its device.

    Args:
      words: an experiment or recipe and its flags.
    """
    try:
        command = read_command(experiment_of(words[0]), [f"funrl {words[0]}", *words[1:]], writes=True)
        command = with_models(command)
        if command.settings.estimate.dry_run:
            from funrl.cost.report import dry_run

            dry_run(command.settings, command.compose)
            return "", {}, None
        from funrl.trainer.jobs.prepare import prepare

        command = with_mesh(command)
        job = prepare(command.settings, command.compose)
    except (ValueError, OSError, ImportError) as error:
        return str(error).rstrip(), {}, None
    return "", job.sizes, job.device


def experiment_of(name: str) -> Experiment:
    """The experiment or recipe with this name, with the defaults of its file.

    Raises:
      SettingsError: there is none.
    """
    file = Path(str(funrl.__file__)).with_name("experiments") / f"{name}.py"
    is_program = name.isidentifier() and file.is_file()
    nodes = ast.walk(ast.parse(file.read_bytes())) if is_program else ()
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == "main" and call.args:  # main("sft", steps=300)
            defaults = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            return Experiment(name, name if name in recipe_names() else None, defaults)
    if name in recipe_names():
        return Experiment(name, name, {})
    try:
        full_source(name)
    except ValueError as error:
        raise SettingsError(str(error).replace("--algorithm=", "", 1)) from None
    raise SettingsError(f"{name!r} is not an experiment or a recipe; funrl --help lists all")


def machine() -> list[tuple[str, str]]:
    """Devices, kernels and communication."""
    import torch

    from funrl.compiled_kernels.kernel_library import library_problem
    from funrl.mesh.launch import communication_backends, cores, gpu_problem
    from funrl.processes.processor import processor_facts
    from funrl.rewards.sandbox import SandboxError, check_platform

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = [("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")]
    rows.append(("CPU", f"{cores()} of {os.cpu_count()} cores, {pages / 1e9:.1f} GB of memory"))
    facts = processor_facts()
    rows.append(("processor", f"{facts.pop('name')}; torch's kernels: {facts.pop('kernels')}"))
    rows.append(("matrix products", ", ".join(f"{name}={value}" for name, value in facts.items())))
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        rows.append(
            (f"GPU {number}", f"{torch.cuda.get_device_name(number)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
        )
    rows += [("GPU", problem)] if (problem := gpu_problem()) else gpu_kernels()
    rows.append(("communication", ", ".join(communication_backends()) or "none"))
    try:
        rows.append(("sandbox", check_platform()))
    except SandboxError as error:
        rows.append(("sandbox", str(error)))
    return [*rows, ("C++ kernels", library_problem() or "can be compiled")]


def gpu_kernels() -> list[tuple[str, str]]:
    """Kernels of attention on the GPU; a small call tries the kernel over pages."""
    import torch

    from funrl.compiled_kernels.flash_kernel import attention_by
    from funrl.compiled_kernels.paged_attention import paged_kernel

    paged = (
        "by a kernel" if paged_kernel() is not None else "gathers the pages, which is slow: no kernel takes them here"
    )
    return [("attention, bfloat16", attention_by(torch.bfloat16)), ("attention over pages", paged)]


def packages() -> list[tuple[str, str]]:
    """Versions of required and optional packages."""
    rows = [(name, installed_version(name) or "missing") for name in ("funrl", *REQUIRED)]
    rows.append(("recipes, examples, docs", str(shared_folder_of_files() or "not installed")))
    return rows + [(name, installed_version(name) or f"not installed (for {use})") for name, use in OPTIONAL.items()]


def rates(device: str | None = None) -> list[tuple[str, str]]:
    """Speed of matrix products and of memory on one device.

    Args:
      device: "cpu" or "cuda"; None: cuda if there is one.
    """
    import torch

    from funrl.mesh.launch import device_type

    device = device or device_type()
    accelerator = device == "cuda"
    n = 8192 if accelerator else 512
    nbytes = 2**30 if accelerator else 2**25
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(n, n, dtype=dtype, device=device)
        seconds = _seconds(functools.partial(torch.mm, x, x), accelerator)
        name = str(dtype).removeprefix("torch.")
        rows.append((f"matrix product, {name}", f"{2 * n**3 / seconds / 1e12:.3g} TFLOP/s ({n} x {n}, {device})"))
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    seconds = _seconds(functools.partial(torch.empty_like(source).copy_, source), accelerator)
    return [*rows, ("memory, read and written", f"{2 * nbytes / seconds / 1e9:.3g} GB/s")]


def _seconds(work: Callable[[], torch.Tensor], accelerator: bool) -> float:
    """Seconds per call, over the calls within `MEASURED_S` after a first one."""
    import torch

    def wait() -> float:
        if accelerator:
            torch.cuda.synchronize()
        return time.perf_counter()

    work()
    calls = 0
    begin = wait()
    while not calls or time.perf_counter() - begin < MEASURED_S:
        work()
        calls += 1
    return (wait() - begin) / calls


def collective_rates(sizes: dict[str, int], device: str | None) -> list[tuple[str, str]]:
    """Speed of an all-reduce over all ranks of a mesh on this machine; empty for a single device.

    Args:
      sizes: axis sizes of the mesh.
      device: "cpu" or "cuda".
    """
    from funrl.mesh.launch import WorkerError, launch
    from funrl.mesh.text import text

    if math.prod(sizes.values()) == 1:
        return []
    name = f"all-reduce over {text(sizes)}"
    try:
        seconds = launch(_all_reduce_seconds, sizes, device)
    except (WorkerError, ValueError) as error:
        return [(name, f"failed: {str(error).strip().splitlines()[0]}")]
    return [(name, f"{MESSAGE_BYTES / seconds / 1e9:.3g} GB/s of a message of {MESSAGE_BYTES / 1e6:.0f} MB")]


def _all_reduce_seconds(mesh: Mesh) -> float:
    """Seconds of one all-reduce; every rank makes the same number of them."""
    import torch

    from funrl.mesh.collectives import psum
    from funrl.mesh.mesh import AXES

    x = torch.ones(MESSAGE_BYTES // 4, device=mesh.device)
    repeats = 3
    float(psum(x, mesh, AXES)[0])  # the first call opens connections; float() waits for the device
    begin = time.perf_counter()
    for _ in range(repeats):
        float(psum(x, mesh, AXES)[0])
    return (time.perf_counter() - begin) / repeats
