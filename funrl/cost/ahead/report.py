"""The report of `funrl compile`: what the steps of a run take of a chip, beside what a dry run says."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from funrl.algos.core import Algorithm
from funrl.cost.ahead.steps import CompiledSteps, compile_steps
from funrl.cost.dry_run import check_width, estimate, plain_job, tokens_of
from funrl.cost.full_rows import full_rows
from funrl.cost.search.mesh_search import chosen_mesh
from funrl.cost.tracing.costs import Costs
from funrl.cost.tracing.estimate import Estimate, rows_of_a_pass
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.explain import size, table
from funrl.mesh.mesh import Mesh
from funrl.mesh.text import SHORT, text
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.sharding import splits_residual
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings, with_flags
from funrl.xla.ahead import ACCELERATORS, AheadProgram, topology_mesh

FINDING = 0.15  # share by which compiled steps and the dry run may differ without a remark


def compile_report(
    settings: Settings, compose: Callable[[], Algorithm], target: str, note: Callable[[str], None]
) -> str:
    """Everything that `funrl compile` prints.

    Args:
      target: chips, such as "v5e:4x4".
      note: receives lines about what is being done.

    Raises:
      ValueError: a flag cannot work.
      XlaError: libtpu is absent or does not know the target, or a program cannot be lowered.
    """
    kind = target.partition(":")[0]
    if kind not in ACCELERATORS:
        raise SettingsError(f"--target={target} begins with none of {', '.join(ACCELERATORS)}, such as v5e:4x4")
    hardware = HARDWARE[kind]
    if settings.devices.train.wanted is not None:
        settings, choice = chosen_mesh(settings, compose, hardware)
        note(choice)
    algorithm = compose()
    job = plain_job(settings, algorithm, hardware.memory)
    split = "on" if splits_residual(settings, job.sizes, hardware.accelerator) else "off"
    job = dataclasses.replace(job, settings=with_flags(job.settings, split_residual=split))
    chips = topology_mesh(target, job.sizes)
    tokens = tokens_of(settings, algorithm)
    rows = rows_of_chips(job, check_width(job, tokens))
    steps = compile_steps(job, chips, lambda host, parts: full_rows(host, parts, tokens, rows), note)
    expected = estimate(of_one_pass(job, rows), tokens, hardware, "train")
    what = f"a micro-batch of {settings.updates.token_budget} tokens on each of {chips.size} chips of {target}"
    phases = phases_of(steps)
    parts = [
        f"{text(job.sizes)}, {settings.models.dtype}: {what}",
        "\n".join(program_table(steps.programs)),
        "\n".join(phase_table(phases, steps.resident, expected)),
        "\n".join(traffic_table(phases, expected)),
        "\n".join(differences(phases, steps.resident, expected)),
    ]
    return "\n\n".join(parts)


def rows_of_chips(job: Job, width: int) -> int:
    """Rows of one micro-batch of every chip."""
    mesh = Mesh(job.sizes)
    return rows_of_a_pass(job.settings.updates.token_budget, width, mesh) * mesh.size(mesh.row_axes)


def of_one_pass(job: Job, rows: int) -> Job:
    """The job with a step of one update on one micro-batch."""
    settings = with_flags(job.settings, batch_prompts=rows, epochs=1, minibatches=1)
    if isinstance(job, RLJob):
        return dataclasses.replace(job, settings=settings, sampling=dataclasses.replace(job.sampling, samples=1))
    return dataclasses.replace(job, settings=settings)


def phases_of(steps: CompiledSteps) -> dict[str, tuple[AheadProgram, ...]]:
    """Programs of each phase of a step, by its name in a dry run."""
    scores = {f"score_{name}": (program,) for name, program in steps.scores.items()}
    return scores | {f"update_{name}": (x, steps.updates[name]) for name, x in steps.gradients.items()}


def memory_of(programs: Sequence[AheadProgram], resident: int) -> int:
    """Bytes of a chip in a phase at its peak: what stays there, and what the largest program takes beside it."""
    return resident + max(x.beside_arguments for x in programs)


def program_table(programs: Sequence[AheadProgram]) -> list[str]:
    """Lines about each program."""
    head = ("program", "compiled", "arguments", "results", "in their place", "temporary", "code", "GFLOP")
    rows = [
        (
            x.name,
            f"{x.seconds:.0f} s",
            *map(size, (x.arguments, x.results, x.aliased, x.temporary, x.code)),
            f"{x.flops / 1e9:.4g}",
        )
        for x in programs
    ]
    return table(head, rows)


def phase_table(phases: Mapping[str, Sequence[AheadProgram]], resident: int, expected: Estimate) -> list[str]:
    """Lines about memory and FLOPs of a chip in each phase, beside the dry run's."""
    rows = []
    for name, programs in phases.items():
        dry = expected.phases.get(name, Costs())
        flops = sum(x.flops for x in programs)
        numbers = (size(memory_of(programs, resident)), size(dry.total))
        rows.append((name, *numbers, f"{flops / 1e9:.4g}", f"{dry.flops / 1e9:.4g}"))
    return table(("phase", "memory", "dry run", "GFLOP", "dry run"), rows)


def sent_in(programs: Sequence[AheadProgram]) -> dict[tuple[str, ...], float]:
    """Bytes of a chip's collectives by mesh axes of more than one chip."""
    totals: dict[tuple[str, ...], float] = defaultdict(float)
    for program in programs:
        for sent in program.sent:
            totals[sent.axes] += sent.nbytes
    return dict(totals)


def expected_in(costs: Costs, expected: Estimate) -> dict[tuple[str, ...], float]:
    """Bytes of a rank's collectives by mesh axes, as the dry run counts them."""
    totals: dict[tuple[str, ...], float] = defaultdict(float)
    for (_, group), traffic in costs.traffic.items():
        totals[expected.axes[group][1]] += traffic.nbytes
    return dict(totals)


def traffic_table(phases: Mapping[str, Sequence[AheadProgram]], expected: Estimate) -> list[str]:
    """Lines about the collectives of each phase by kind and axes, and the dry run's bytes over the same axes."""
    rows = []
    for name, programs in phases.items():
        dry = expected_in(expected.phases.get(name, Costs()), expected)
        for sent in (sent for program in programs for sent in program.sent):
            axes = short(sent.axes)
            rows.append((name, sent.kind, axes, str(sent.count), size(sent.nbytes), size(dry.get(sent.axes, 0))))
    return table(("phase", "collective", "over", "count", "bytes", "dry run, all kinds"), rows) if rows else []


def short(axes: Sequence[str]) -> str:
    """Axes as --mesh calls them."""
    names = {axis: name for name, axis in SHORT.items()}
    return ",".join(names[axis] for axis in axes)


def differences(phases: Mapping[str, Sequence[AheadProgram]], resident: int, expected: Estimate) -> list[str]:
    """Lines about numbers that differ from the dry run's by more than `FINDING`."""
    lines = []
    for name, programs in phases.items():
        dry = expected.phases.get(name)
        if dry is None:
            lines.append(f"{name}: the dry run has no such phase")
            continue
        sent = sent_in(programs)
        wanted = expected_in(dry, expected)
        pairs: dict[str, tuple[float, float, Callable[[float], str]]] = {
            "memory": (memory_of(programs, resident), dry.total, size),
            "FLOPs": (sum(x.flops for x in programs), dry.flops, lambda x: f"{x / 1e9:.4g} G"),
        }
        for axes in sorted({*sent, *wanted}):
            pairs[f"bytes over {short(axes)}"] = (sent.get(axes, 0), wanted.get(axes, 0), size)
        for what, (compiled, want, shown) in pairs.items():
            if abs(compiled - want) > FINDING * want:
                share = f" ({compiled / want - 1:+.0%})" if want else ""
                lines.append(f"finding: {what} of {name}: compiled {shown(compiled)}, dry run {shown(want)}{share}")
    return lines or [f"the dry run agrees within {FINDING:.0%}"]
