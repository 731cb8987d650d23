"""The command `funrl plan`: what a run costs on some numbers of GPUs, and the file that starts it.

    funrl plan grpo --model=config.json --gpus=8,16,32 --hardware=h200 --gpu_price=2.5 --budget=400
    funrl plan grpo --config=run.yaml --gpus=16 --launch=sky --to=run.sky.yaml

Each number of devices is a dry run with --mesh=auto:N, or --place=auto:N where rows may be stale. Nothing is started.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from funrl.algos.core import Algorithm
from funrl.cli.command import read_command, with_models
from funrl.cli.doctor import experiment_of
from funrl.cli.line import program_words
from funrl.cli.usages import COMMANDS
from funrl.cost.report import DEFAULT, command_text
from funrl.cost.search import place_search, search
from funrl.cost.tracing.hardware import HARDWARE, USABLE
from funrl.cost.verdict import duration_text, rates_of, size, table, written_flags
from funrl.flags import parser as flags
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.trainer.settings.declaration import Flag, SettingsError, above, at_least, one_of, parts
from funrl.trainer.settings.settings import Settings, with_flags

LAUNCHERS = {
    "slurm": "sbatch",
    "sky": "sky jobs launch --yes",
    "kuberay": "kubectl apply -f",
    "jobset": "kubectl apply -f",
}
SHORTEST_GRACE_S = 600  # from SIGTERM to SIGKILL, for the end of a step and its checkpoint
TRIED = "8,16,32,64"  # with a budget and without --gpus
JUDGED = (
    "seconds and prices are estimates from makers' numbers, of which 50 % of the FLOPs and 70 % of the bandwidths are\n"
    "assumed; they have not been compared with published runs"
)
PLAN_FLAGS = (
    Flag("gpus", None, str, optional=True, text="devices", chosen=f"8, or {TRIED} with a bound on the cost"),
    Flag("gpus_per_node", RANKS_PER_NODE, int, optional=False, text="devices of a node", bounds=(at_least(1),)),
    Flag("gpu_price", None, float, optional=True, text="price of a device for an hour", bounds=(above(0),)),
    Flag("gpu_hours", None, float, optional=True, text="bound on the hours of all devices", bounds=(above(0),)),
    Flag("budget", None, float, optional=True, text="bound on the price; needs --gpu_price", bounds=(above(0),)),
    Flag("launch", None, str, optional=True, text="what starts the run", bounds=(one_of(*LAUNCHERS),)),
    Flag("to", None, str, optional=True, text="the file of --launch to write; without it it is printed"),
    Flag("image", "funrl", str, optional=False, text="image of the containers, with --launch=kuberay or jobset"),
)


class RunPlan(NamedTuple):
    """A run on some devices.

    Attributes:
      gpus: number of devices.
      flags: that split the run over them.
      nbytes: largest memory of a device.
      fits: whether a device has room for it.
      step_s: seconds of a step.
      tokens_per_s: tokens that are trained on in a second, prompts included.
      hours: of all steps.
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
    if given["budget"] is not None and given["gpu_price"] is None:
        raise SettingsError(f"--budget={given['budget']:g}: give the price of a device for an hour, --gpu_price")
    counts = _counts(given)
    words = [word for word in program_words(line.unknown, COMMANDS["plan"].usage) if word != "--resume"]
    program = [f"funrl {words[0]}", *words[1:]]
    command = with_models(read_command(experiment_of(words[0]), [*program, "--dry_run"], writes=False))
    settings = command.settings
    if given["launch"] is not None and not os.path.isabs(settings.run.run_dir or ""):
        raise SettingsError(f"--launch={given['launch']}: give --run_dir, an absolute path that all nodes see")
    hardware = settings.estimate.hardware or DEFAULT
    plans = [plan_on(count, with_flags(settings, hardware=hardware), command.compose) for count in counts]
    price = given["gpu_price"]
    most = [x for x in (given["gpu_hours"], given["budget"] and given["budget"] / price) if x is not None]
    possible = [plan for plan in plans if plan.fits and plan.gpu_hours <= min(most, default=math.inf)]
    best = min(possible, key=lambda plan: plan.hours, default=None)
    print("\n".join(plans_table(plans, hardware, price)))
    print(f"\n{JUDGED}\n")
    if best is None:
        cheapest = min(plans, key=lambda plan: (not plan.fits, plan.gpu_hours))
        what = (
            f"takes {cheapest.gpu_hours:,.1f} GPU-hours" if cheapest.fits else f"needs {size(cheapest.nbytes)} a device"
        )
        print(f"no plan fits; the nearest, on {cheapest.gpus} GPUs, {what}")
        return 1
    text = command_text(program, best.flags)
    print(f"on {best.gpus} {hardware}, {duration_text(best.hours * 3600)} for --steps={settings.run.steps}:\n  {text}")
    if given["launch"] is not None:
        _launch(given, best, text, settings)
    return 0


def plan_on(count: int, settings: Settings, compose: Callable[[], Algorithm]) -> RunPlan:
    """The best split of a run over some devices.

    Args:
      count: of the devices.
      settings: with the hardware.
      compose: the algorithm.

    Raises:
      SettingsError: no split is possible.
    """
    hardware = HARDWARE[str(settings.estimate.hardware)]
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
    return RunPlan(
        count,
        split.flags,
        split.nbytes,
        fits=split.fits,
        step_s=rates.seconds,
        tokens_per_s=rates.tokens_per_second,
        hours=rates.hours,
    )


def plans_table(plans: Sequence[RunPlan], hardware: str, price: float | None) -> list[str]:
    """Lines of a table of plans.

    Args:
      hardware: name of the devices.
      price: of a device for an hour; None: unknown.
    """
    room = size(HARDWARE[hardware].memory * USABLE)
    head = ["GPUs", f"memory of {room}", "fits", "a step", "tokens/s a GPU", "run", "GPU-hours", "flags"]
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
        head.insert(-1, "price")
        for row, plan in zip(rows, plans, strict=True):
            row.insert(-1, f"{plan.gpu_hours * price:,.0f}")
    return table(head, rows)


def launch_text(launcher: str, plan: RunPlan, command: str, settings: Settings, *, per_node: int, image: str) -> str:
    """The file that starts a plan.

    Args:
      launcher: one of `LAUNCHERS`.
      plan: that is started.
      command: its command line.
      settings: of the run, with its directory and the hardware.
      per_node: devices of a node.
      image: of containers.

    Raises:
      SettingsError: the devices do not fill nodes.
    """
    nodes, rest = divmod(plan.gpus, min(per_node, plan.gpus))
    if rest:
        raise SettingsError(f"--gpus={plan.gpus}: they are not whole nodes of --gpus_per_node={per_node}")
    run_dir = Path(str(settings.run.run_dir))
    values = {
        "name": "funrl",
        "nodes": nodes,
        "per_node": plan.gpus // nodes,
        "hardware": settings.estimate.hardware or DEFAULT,
        "grace_s": max(SHORTEST_GRACE_S, math.ceil(3 * plan.step_s)),
        "command": command,
        "arguments": command.removeprefix("funrl "),
        "folder": str(run_dir.parents[-2]) if len(run_dir.parents) > 1 else str(run_dir),
        "image": image,
    }
    template = (Path(__file__).parent / "launchers" / launcher).read_text()
    return jinja2.Template(template, undefined=jinja2.StrictUndefined, keep_trailing_newline=True).render(values)


def _counts(given: Mapping[str, Any]) -> list[int]:
    """Numbers of devices to plan for."""
    text = given["gpus"] or (TRIED if given["budget"] or given["gpu_hours"] else "8")
    if not all(part.isdecimal() and int(part) > 0 for part in parts(text)):
        raise SettingsError(f"--gpus={text}: give numbers of devices, such as 8 or 8,16,32")
    return sorted({int(part) for part in parts(text)})


def _launch(given: Mapping[str, Any], plan: RunPlan, command: str, settings: Settings) -> None:
    """Write or print the file that starts a plan."""
    launcher = given["launch"]
    text = launch_text(launcher, plan, command, settings, per_node=given["gpus_per_node"], image=given["image"])
    if given["to"] is None:
        print(f"\n{text}", end="")
        return
    Path(given["to"]).write_text(text)
    print(f"start it with: {LAUNCHERS[launcher]} {given['to']}")
