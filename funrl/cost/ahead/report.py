"""The report of `funrl compile`: what the steps of a run take of a chip, beside what a dry run says."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from funrl.algos.core import Algorithm
from funrl.cost.ahead.decoding import DecodingPlan, compile_decoding, decoding_plan, decoding_problem
from funrl.cost.ahead.steps import CompiledSteps, compile_steps
from funrl.cost.dry_run import check_width, estimate, plain_job, tokens_of
from funrl.cost.rows import full_rows
from funrl.cost.search import chosen_mesh
from funrl.cost.tables import size, table
from funrl.cost.tracing.costs import Costs
from funrl.cost.tracing.estimate import Estimate, rows_of_a_pass
from funrl.cost.tracing.hardware import HARDWARE, Hardware
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
    plan = plan_of(job, tokens, hardware, steps.resident)
    passes = plan if isinstance(plan, str) else compile_decoding(plan, target, note)
    phases = phases_of(steps, expected)
    if isinstance(plan, str) or isinstance(passes, str):
        generation = f"decoding is not compiled: {passes}"
    else:
        generation = plan.text
        phases = phases_of_engine(plan, passes, steps.resident) | phases
    what = f"a micro-batch of {settings.updates.token_budget} tokens on each of {chips.size} chips of {target}"
    programs = [program for phase in phases.values() for program in phase.programs]
    parts = [
        f"{text(job.sizes)}, {settings.models.dtype}: {what}\n{generation}",
        "\n".join(program_table(programs)),
        "\n".join(phase_table(phases)),
        "\n".join(traffic_table(phases)),
        "\n".join(differences(phases)),
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


GroupAxes = Mapping[str, tuple[str, tuple[str, ...], dict[str, int]]]


class Expected(NamedTuple):
    """Costs of a phase by a dry run.

    Attributes:
      memory: bytes of a chip at the peak.
      flops: on a chip.
      sent: bytes of a chip's collectives, by mesh axes.
    """

    memory: float
    flops: float
    sent: Mapping[tuple[str, ...], float]


class CompiledPhase(NamedTuple):
    """The programs of a phase, and what a dry run says of it.

    Attributes:
      programs: in their order.
      resident: bytes of a chip that stay there, arguments of the programs among them.
      expected: None: the dry run has no such phase.
    """

    programs: tuple[AheadProgram, ...]
    resident: float
    expected: Expected | None

    @property
    def dry(self) -> Expected:
        """Costs by the dry run; zeros where it has no such phase."""
        return self.expected or Expected(0.0, 0.0, {})

    @property
    def memory(self) -> float:
        """Bytes of a chip at the peak: what stays there, and what the largest program takes beside it."""
        return self.resident + max(x.beside_arguments for x in self.programs)

    @property
    def flops(self) -> int:
        """FLOPs of a chip."""
        return sum(x.flops for x in self.programs)

    @property
    def attention(self) -> int:
        """Those of them in attention's kernel."""
        return sum(x.attention for x in self.programs)


def plan_of(job: Job, tokens: int, hardware: Hardware, resident: float) -> DecodingPlan | str:
    """`decoding_plan`; or the reason why the job's passes are not compiled."""
    problem = decoding_problem(job)
    if problem is not None:
        return problem
    assert isinstance(job, RLJob)
    return decoding_plan(job, tokens, hardware, resident)


def phases_of(steps: CompiledSteps, expected: Estimate) -> dict[str, CompiledPhase]:
    """Phases of the roles, by their names in a dry run."""
    programs = {f"score_{name}": (program,) for name, program in steps.scores.items()}
    programs |= {f"update_{name}": (x, steps.updates[name]) for name, x in steps.gradients.items()}
    phases = {}
    for name, some in programs.items():
        costs = expected.phases.get(name)
        dry = None if costs is None else Expected(costs.total, costs.flops, sent_of(costs, expected.axes))
        phases[name] = CompiledPhase(some, steps.resident, dry)
    return phases


def phases_of_engine(
    plan: DecodingPlan, passes: Mapping[str, tuple[AheadProgram, ...]], resident: float
) -> dict[str, CompiledPhase]:
    """One pass of each kind of an engine, beside whose weights its cache and its slots stay on the chip.

    Their bytes are read from a decoding iteration, which has all weights as arguments; a prefill lacks the unembedding.

    Args:
      plan: of the engine.
      passes: its programs, by kind.
      resident: bytes of a chip that weights and optimizer states of the roles take.
    """
    resident += plan.own_bytes
    kept = passes["decode"][0].arguments - plan.weight_bytes
    phases = {}
    for name, programs in passes.items():
        costs = plan.costs[name]
        dry = Expected(resident + costs.total - plan.weight_bytes, costs.flops, sent_of(costs, plan.axes))
        phases[name] = CompiledPhase(programs, resident + kept, dry)
    return phases


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


def phase_table(phases: Mapping[str, CompiledPhase]) -> list[str]:
    """Lines about memory and FLOPs of a chip in each phase, beside the dry run's."""
    rows = []
    for name, phase in phases.items():
        flops = (f"{x / 1e9:.4g}" for x in (phase.flops, phase.dry.flops))
        rows.append((name, size(phase.memory), size(phase.dry.memory), *flops))
    return table(("phase", "memory", "dry run", "GFLOP", "dry run"), rows)


def sent_in(programs: Sequence[AheadProgram]) -> dict[tuple[str, ...], float]:
    """Bytes of a chip's collectives by mesh axes of more than one chip."""
    totals: dict[tuple[str, ...], float] = defaultdict(float)
    for program in programs:
        for sent in program.sent:
            totals[sent.axes] += sent.nbytes
    return dict(totals)


def sent_of(
    costs: Costs, axes: Mapping[str, tuple[str, tuple[str, ...], dict[str, int]]]
) -> dict[tuple[str, ...], float]:
    """Bytes of a rank's collectives by mesh axes, as a dry run counts them.

    Args:
      axes: of the groups, as in `Estimate`.
    """
    totals: dict[tuple[str, ...], float] = defaultdict(float)
    for (_, group), traffic in costs.traffic.items():
        totals[axes[group][1]] += traffic.nbytes
    return dict(totals)


def traffic_table(phases: Mapping[str, CompiledPhase]) -> list[str]:
    """Lines about the collectives of each phase by kind and axes, and the dry run's bytes over the same axes."""
    rows = []
    for name, phase in phases.items():
        for sent in (sent for program in phase.programs for sent in program.sent):
            dry = phase.dry.sent.get(sent.axes, 0)
            rows.append((name, sent.kind, short(sent.axes), str(sent.count), size(sent.nbytes), size(dry)))
    return table(("phase", "collective", "over", "count", "bytes", "dry run, all kinds"), rows) if rows else []


def short(axes: Sequence[str]) -> str:
    """Axes as --mesh calls them."""
    names = {axis: name for name, axis in SHORT.items()}
    return ",".join(names[axis] for axis in axes)


def differences(phases: Mapping[str, CompiledPhase]) -> list[str]:
    """Lines about numbers that differ from the dry run's by more than `FINDING`."""
    lines = []
    for name, phase in phases.items():
        if phase.expected is None:
            lines.append(f"{name}: the dry run has no such phase")
            continue
        sent = sent_in(phase.programs)
        wanted = phase.expected.sent
        pairs: dict[str, tuple[float, float, Callable[[float], str]]] = {
            "memory": (phase.memory, phase.expected.memory, size),
            "FLOPs": (phase.flops, phase.expected.flops, lambda x: f"{x / 1e9:.4g} G"),
        }
        for axes in sorted({*sent, *wanted}):
            pairs[f"bytes over {short(axes)}"] = (sent.get(axes, 0), wanted.get(axes, 0), size)
        for what, (compiled, want, shown) in pairs.items():
            if abs(compiled - want) > FINDING * want:
                share = f" ({compiled / want - 1:+.0%})" if want else ""
                line = f"finding: {what} of {name}: compiled {shown(compiled)}, dry run {shown(want)}{share}"
                if what == "FLOPs" and phase.attention:
                    line += f"; {shown(phase.attention)} of the compiled are whole tiles of attention"
                lines.append(line)
    return lines or [f"the dry run agrees within {FINDING:.0%}"]
