"""The command `funrl plan`: cost of a run on some numbers of GPUs, and the file that starts it.

    funrl plan grpo --model=config.json --gpus=8,16,32 --hardware=h200 --gpu_price=2.5 --budget=400
    funrl plan grpo --config=run.yaml --gpus=16 --run_dir=/shared/runs/first --launch=slurm --to=run.sbatch

Each number of devices is a dry run with --mesh=auto:N, or --place=auto:N where rows may be stale. Nothing is started.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from funrl.algos.core import Algorithm
from funrl.cli.command import Command, Experiment, read_command, with_models
from funrl.cli.doctor import experiment_of
from funrl.cli.line import program_words
from funrl.cli.usages import COMMANDS
from funrl.cost.dry_run import tokens_of
from funrl.cost.report import DEFAULT
from funrl.cost.schedules import cut_remarks, lengths_of, simulate_shared
from funrl.cost.search import place_search, search
from funrl.cost.tracing.hardware import HARDWARE, USABLE, Hardware
from funrl.cost.verdict import (
    PUBLISHED_ERRORS,
    duration_text,
    errors_text,
    quoted_flags,
    rates_of,
    size,
    table,
    written_flags,
)
from funrl.flags import parser as flags
from funrl.flags.arguments import full_source
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.trainer.jobs.prepare import new_tokens
from funrl.trainer.settings.declaration import Flag, SettingsError, above, at_least, one_of, parts
from funrl.trainer.settings.settings import Settings, settings_flags, with_flags


class Launcher(NamedTuple):
    """A form of the file that starts a run.

    Attributes:
      start: command that takes the file.
      storage: meaning of --storage; "": the launcher does not mount one.
    """

    start: str
    storage: str = ""


class GpuNames(NamedTuple):
    """Names of a kind of GPU.

    Attributes:
      sky: in SkyPilot.
      resource: in Kubernetes.
    """

    sky: str
    resource: str = "nvidia.com/gpu"


CLAIM = "the name of a volume claim, such as shared"
LAUNCHERS = {
    "slurm": Launcher("sbatch"),
    "sky": Launcher("sky jobs launch --yes", "a bucket, such as s3://mine"),
    "kuberay": Launcher("kubectl apply -f", CLAIM),
    "jobset": Launcher("kubectl apply -f", CLAIM),
}
GPUS = {
    "a100": GpuNames("A100-80GB"),
    "h100": GpuNames("H100"),
    "h200": GpuNames("H200"),
    "gb200": GpuNames("GB200"),
    "mi300x": GpuNames("MI300X", "amd.com/gpu"),
}
OF_THE_IMAGE = ("bin", "dev", "etc", "lib", "lib64", "opt", "proc", "root", "sbin", "srv", "sys", "tmp", "usr", "var")
CHOSEN = ("mesh", "generate_mesh", "place", "fsdp_axes")  # by the plan
SHORTEST_GRACE_S = 600  # from SIGTERM to SIGKILL, for the end of a step and its checkpoint
WITH_BOUND = "8,16,32,64"  # devices that are tried for a bound on the cost, without --gpus
PLAN_FLAGS = (
    Flag("gpus", None, str, optional=True, text="devices", chosen=f"8, or {WITH_BOUND} with a bound on the cost"),
    Flag("gpus_per_node", RANKS_PER_NODE, int, optional=False, text="devices of a node", bounds=(at_least(1),)),
    Flag("gpu_price", None, float, optional=True, text="price of a device for an hour", bounds=(above(0),)),
    Flag("gpu_hours", None, float, optional=True, text="bound on the hours of all devices", bounds=(above(0),)),
    Flag("budget", None, float, optional=True, text="bound on the price; needs --gpu_price", bounds=(above(0),)),
    Flag("launch", None, str, optional=True, text="form of the file that starts the run", bounds=(one_of(*LAUNCHERS),)),
    Flag("to", None, str, optional=True, text="the file of --launch to write; without it it is printed"),
    Flag("image", None, str, optional=True, text="image of the containers, with --launch", chosen="funrl"),
    Flag("storage", None, str, optional=True, text="storage with --run_dir that all nodes mount, with --launch"),
)


class RunPlan(NamedTuple):
    """A run on a number of devices.

    Attributes:
      gpus: number of devices.
      flags: of the split over the devices.
      nbytes: largest memory of a device.
      fits: whether a device has room for it.
      step_s: seconds of a step.
      tokens_per_s: trained tokens a second, prompts included.
      hours: of the whole run.
    """

    gpus: int
    flags: dict[str, Any]
    nbytes: float
    fits: bool
    step_s: float
    tokens_per_s: float
    hours: float

    @property
    def gpu_hours(self) -> float:
        """Hours of all devices together."""
        return self.gpus * self.hours


def plan_command(argv: Sequence[str]) -> int:
    """Print plans, and write the file that starts the best; return 0, or 1 if none fits a device and the budget.

    Args:
      argv: "plan", then an experiment or recipe with its flags, and those of `PLAN_FLAGS`.

    Raises:
      SettingsError: a flag cannot work.
    """
    flags.refuse_repeated(argv)
    line = flags.read(PLAN_FLAGS, argv)
    given = line.values
    counts = _counts(given)
    words = program_words(line.unknown, COMMANDS["plan"].usage)
    experiment = experiment_of(words[0])
    command = read_command(experiment, [f"funrl {words[0]}", *words[1:], "--dry_run"], writes=False)
    own = own_flags(command, experiment)
    hardware = command.settings.estimate.hardware or DEFAULT
    _check_launch(given, own, hardware)
    settings = with_flags(with_models(command).settings, hardware=hardware)
    devices = HARDWARE[hardware]._replace(node=given["gpus_per_node"])
    logged = settings.estimate.lengths is not None  # read before the searches, so that a wrong file is refused at once
    cut = cut_remarks(lengths_of(settings, new_tokens(settings))) if logged else []
    plans, problems = _plans(counts, settings, command.compose, devices)
    price = given["gpu_price"]
    print("\n".join([*plans_table(plans, hardware, price), *problems, *cut]))
    print(f"\n{errors_text()}\n")
    bounds = [x for x in (given["gpu_hours"], given["budget"] and given["budget"] / price) if x is not None]
    possible = [plan for plan in plans if plan.fits and plan.gpu_hours <= min(bounds, default=math.inf)]
    if not possible:
        nearest = min(plans, key=lambda plan: (not plan.fits, plan.gpu_hours))
        needs = (
            f"takes {nearest.gpu_hours:,.1f} GPU-hours" if nearest.fits else f"needs {size(nearest.nbytes)} a device"
        )
        print(f"no plan fits; the nearest, on {nearest.gpus} GPUs, {needs}")
        return 1
    best = min(possible, key=lambda plan: plan.hours)
    text = f"funrl {words[0]} {quoted_flags({**own, **best.flags})}"
    print(f"on {best.gpus} {hardware}, {duration_text(best.hours * 3600)} for --steps={settings.run.steps}:\n  {text}")
    if given["launch"] is not None:
        _write_launch(given, launch_text(given, best, text, settings))
    return 0


def plan_help() -> str:
    """The help of `funrl plan`: its own flags; those of the run are in the help of the experiment."""
    command = COMMANDS["plan"]
    summary = f"{command.summary}. Flags of the run: funrl NAME --help."
    whole = flags.help_text(command.usage, summary, PLAN_FLAGS, None).replace("\nThe algorithm:\n", "\nThe plan:\n")
    return "\n".join([command.usage, *whole.splitlines()[1:]])


def own_flags(command: Command, experiment: Experiment) -> dict[str, Any]:
    """Flags of a command line and its --config file that a run takes, as `written_flags` writes them.

    Flags of the dry run and --resume are left out.

    Raises:
      SettingsError: a flag is given that a plan chooses.
    """
    _, further = experiment.arguments(command.source)
    defaults = {flag.name: flag.default for flag in (*experiment.common, *further)}
    defaults["algorithm"] = None if experiment.algorithm is None else full_source(experiment.algorithm)
    estimated = {"dry_run", "resume", *(name for name, flag in settings_flags().items() if flag.requires == "dry_run")}
    own = {name: value for name, value in command.flags.items() if value != defaults[name] and name not in estimated}
    for name in CHOSEN:
        if name in own:
            raise SettingsError(f"--{name}={own[name]}: funrl plan chooses it; leave it out")
    texts: dict[bool | None, str] = {False: "false", None: "none"}
    return {
        name: texts[value] if value is None or value is False else value
        for name, value in own.items()
        if name != "fsdp"
    }


def plan_on(count: int, settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware) -> RunPlan:
    """The best split of a run over some devices. With --lengths its seconds are those of a simulation.

    Args:
      count: of the devices.
      settings: of the run.
      compose: the algorithm.
      hardware: of each device.

    Raises:
      SettingsError: no split is possible.
    """
    room = hardware.memory * USABLE
    steps = settings.run.steps
    if settings.asynchrony.staleness:
        chosen = with_flags(settings, place=f"auto:{count}")
        (best, *_) = place_search(chosen, compose(), hardware).candidates
        nbytes = max((peak.nbytes for peak in best.peaks.values()), default=best.nbytes)
        step_s = best.result.step
        return RunPlan(
            count,
            best.flags,
            nbytes,
            fits=best.fits(room),
            step_s=step_s,
            tokens_per_s=best.result.tokens,
            hours=steps * step_s / 3600,
        )
    (split, *_) = search(with_flags(settings, mesh=f"auto:{count}"), compose(), hardware).tried
    rates = rates_of(split.estimate, hardware)
    step_s = rates.seconds
    tokens_per_s = rates.tokens_per_second
    if settings.estimate.lengths is not None:
        algorithm = compose()
        simulated = simulate_shared(split.settings, algorithm, hardware, tokens_of(split.settings, algorithm))
        step_s = simulated.step
        tokens_per_s = simulated.tokens
    return RunPlan(
        count,
        split.flags,
        split.nbytes,
        fits=split.fits,
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        hours=steps * step_s / 3600,
    )


def _plans(
    counts: Sequence[int], settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware
) -> tuple[list[RunPlan], list[str]]:
    """Plans for numbers of devices, and lines on those that cannot be. Raises: SettingsError, none can be."""
    plans: list[RunPlan] = []
    problems = []
    for count in counts:
        try:
            plans.append(plan_on(count, settings, compose, hardware))
        except SettingsError as error:
            if len(counts) == 1:
                raise
            problems.append(f"not on {count}: {error}")
    if not plans:
        raise SettingsError("\n".join(problems))
    return plans, problems


def plans_table(plans: Sequence[RunPlan], hardware: str, price: float | None) -> list[str]:
    """Lines of a table of plans.

    Args:
      hardware: name of the devices.
      price: of a device for an hour; None: unknown.
    """
    room = size(HARDWARE[hardware].memory * USABLE)
    time = f"+-{PUBLISHED_ERRORS['seconds'].most:.0%}"
    memory = f"memory of {room}, +-{PUBLISHED_ERRORS['gib'].most:.0%}"
    head = ["GPUs", memory, "fits", f"a step, {time}", f"tokens/s a GPU, {time}", f"run, {time}"]
    head += [f"GPU-hours, {time}", "flags"]
    rows = [
        [
            str(plan.gpus),
            size(plan.nbytes),
            "yes" if plan.fits else "no",
            duration_text(plan.step_s),
            f"{plan.tokens_per_s / plan.gpus:,.0f}",
            duration_text(plan.hours * 3600),
            f"{plan.gpu_hours:,.1f}",
            written_flags(plan.flags),
        ]
        for plan in plans
    ]
    if price is not None:
        head.insert(-1, f"price, {time}")
        for row, plan in zip(rows, plans, strict=True):
            row.insert(-1, f"{plan.gpu_hours * price:,.0f}")
    return table(head, rows)


def launch_text(given: Mapping[str, Any], plan: RunPlan, command: str, settings: Settings) -> str:
    """The file that starts a plan.

    Args:
      given: values of `PLAN_FLAGS`.
      plan: that is started.
      command: its command line.
      settings: of the run, with its directory and the hardware.
    """
    nodes = max(1, plan.gpus // given["gpus_per_node"])
    run_dir = Path(str(settings.run.run_dir))
    gpu = GPUS[str(settings.estimate.hardware)]
    values = {
        "name": f"funrl-{re.sub('[^a-z0-9]+', '-', run_dir.name.lower())[:40]}".rstrip("-"),
        "nodes": nodes,
        "per_node": plan.gpus // nodes,
        "accelerator": gpu.sky,
        "resource": gpu.resource,
        "grace_s": max(SHORTEST_GRACE_S, math.ceil(3 * plan.step_s)),
        "command": command,
        "arguments": command.removeprefix("funrl "),
        "folder": f"/{run_dir.parts[1]}",
        "storage": given["storage"],
        "image": given["image"] or "funrl",
    }
    template = (Path(__file__).parent / "launchers" / given["launch"]).read_text()
    return jinja2.Template(template, undefined=jinja2.StrictUndefined, keep_trailing_newline=True).render(values)


def _counts(given: Mapping[str, Any]) -> list[int]:
    """Numbers of devices to plan for. Raises: SettingsError, a bound or a number cannot work."""
    if given["budget"] is not None and given["gpu_price"] is None:
        raise SettingsError(f"--budget={given['budget']:g}: give the price of a device for an hour, --gpu_price")
    text = given["gpus"] or (WITH_BOUND if given["budget"] or given["gpu_hours"] else "8")
    if not all(part.isdecimal() and int(part) > 0 for part in parts(text)):
        raise SettingsError(f"--gpus={text}: give numbers of devices, such as 8 or 8,16,32")
    counts = sorted({int(part) for part in parts(text)})
    node = given["gpus_per_node"]
    if broken := [count for count in counts if count > node and count % node]:
        raise SettingsError(f"--gpus={text}: {broken[0]} devices are not whole nodes of --gpus_per_node={node}")
    return counts


def _check_launch(given: Mapping[str, Any], own: Mapping[str, Any], hardware: str) -> None:
    """Check what the file that starts a run needs, before the search.

    Args:
      own: flags of the run.
      hardware: name of the devices.

    Raises:
      SettingsError: something is missing or cannot work.
    """
    name = given["launch"]
    if name is None:
        for flag in ("to", "image", "storage"):
            if given[flag] is not None:
                raise SettingsError(f"--{flag}={given[flag]} does nothing without --launch")
        return
    launcher = LAUNCHERS[name]
    if hardware not in GPUS:
        raise SettingsError(f"--launch={name}: it starts runs on {', '.join(GPUS)}, not on --hardware={hardware}")
    run_dir = Path(str(own.get("run_dir", "")))
    if len(run_dir.parts) < 3 or not run_dir.is_absolute():
        raise SettingsError(f"--launch={name}: give --run_dir, a path that all nodes see, such as /shared/runs/first")
    if given["to"] is not None and (Path(given["to"]).exists() or not Path(given["to"]).parent.is_dir()):
        raise SettingsError(f"--to={given['to']}: it exists, or its folder does not; give the name of a new file")
    if launcher.storage:
        _check_containers(given, own, run_dir)
        return
    for flag in ("image", "storage"):
        if given[flag] is not None:
            raise SettingsError(f"--{flag}={given[flag]} does nothing with --launch={name}")


def _check_containers(given: Mapping[str, Any], own: Mapping[str, Any], run_dir: Path) -> None:
    """Check what a run in containers needs. Raises: SettingsError."""
    name = given["launch"]
    if given["storage"] is None:
        needed = LAUNCHERS[name].storage
        raise SettingsError(f"--launch={name}: give --storage, {needed}; nodes mount it at /{run_dir.parts[1]}")
    if run_dir.parts[1] in OF_THE_IMAGE:
        raise SettingsError(f"--run_dir={run_dir}: images have a folder /{run_dir.parts[1]}; give one such as /shared")
    if own.get("engine") == "vllm":
        raise SettingsError(f"--launch={name} with --engine=vllm: the file starts the image's environment without vLLM")
    for flag, value in own.items():
        path = Path(value.partition(":")[0]) if isinstance(value, str) else None
        if name != "sky" and path is not None and path.exists() and not path.is_absolute():
            raise SettingsError(f"--{flag}={value}: give an absolute path that the containers see")


def _write_launch(given: Mapping[str, Any], text: str) -> None:
    """Write or print the file that starts a plan."""
    if given["to"] is None:
        print(f"\n{text}", end="")
        return
    Path(given["to"]).write_text(text)
    print(f"start it with: {LAUNCHERS[given['launch']].start} {given['to']}")
