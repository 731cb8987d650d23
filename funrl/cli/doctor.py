"""The command `funrl doctor`: devices and versions of this machine, and whether a command line would run on it.

    funrl doctor
    funrl doctor grpo --mesh=dp2 --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

A command line is checked as the run would check it before it starts ranks; nothing is trained or written.
"""

from __future__ import annotations

import ast
import difflib
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import funrl
from funrl.cli.command import Experiment, read_command, with_mesh, with_models
from funrl.flags.arguments import recipe_names
from funrl.loading import shared_folder_of_files
from funrl.track.records.run_directory import installed_version
from funrl.trainer.settings.declaration import SettingsError

REQUIRED = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "tensorstore", "tensorboard")
OPTIONAL = {
    "vllm": "--engine=vllm",
    "flash-attn": "faster attention on CUDA",
    "flash-attn-4": "faster attention on Hopper and Blackwell",
    "bitsandbytes": "--base_format=nf4",
    "math-verify": "--reward=math, --reward=boxed",
    "jsonschema": "--reward=json",
    "datasets": "parquet files, cached and saved datasets",
    "orbax-checkpoint": "reading checkpoints with orbax",
    "trl": "benchmarks",
}


def doctor(argv: Sequence[str]) -> int:
    """Print the tables; return 0, or 1 if the command line would not run.

    Args:
      argv: "doctor", then the command line of a run, or nothing.
    """
    words = [word for word in argv[1:] if word != "funrl"]
    problem = problem_of_run(words) if words else ""
    for title, rows in (("this machine", machine()), ("packages", packages())):
        print(f"{title}:")
        for name, text in rows:
            print(f"  {name:<28}{text}")
    if words:
        print(f"funrl {' '.join(words)}:")
        print(f"  would not run: {problem}" if problem else "  would run")
    return 1 if problem else 0


def problem_of_run(words: Sequence[str]) -> str:
    """The reason why a command line would not run; "" if it would.

    Args:
      words: an experiment or recipe and its flags.
    """
    try:
        command = read_command(experiment_of(words[0]), [f"funrl {words[0]}", *words[1:]], writes=True)
        command = with_models(command)
        if command.settings.estimate.dry_run:
            from funrl.cost.report import dry_run

            dry_run(command.settings, command.compose)
            return ""
        from funrl.trainer.jobs.prepare import prepare

        command = with_mesh(command)
        prepare(command.settings, command.compose)
    except (ValueError, OSError, ImportError) as error:
        return str(error).rstrip()
    return ""


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
    near = difflib.get_close_matches(name, recipe_names(), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise SettingsError(f"{name!r} is not an experiment or a recipe; {hint}funrl --help lists all")


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
