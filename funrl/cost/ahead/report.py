"""The report of `funrl compile`: what the steps of a run take of a chip, beside what a dry run says."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from funrl.algos.core import Algorithm
from funrl.cost.ahead.programs import DecodingPlan, NoDecoding, compile_steps, decoding_plan, engine_passes
from funrl.cost.dry_run import check_width, estimate, plain_job, tokens_of
from funrl.cost.full_rows import full_rows
from funrl.cost.search.mesh_search import chosen_mesh
from funrl.cost.tracing.costs import Costs
from funrl.cost.tracing.estimate import rows_of_a_pass
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.explain import size, table
from funrl.mesh.mesh import Mesh
from funrl.mesh.text import SHORT, text
from funrl.models.errors import ModelError
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.sharding import splits_residual
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings, with_flags
from funrl.xla.ahead import ACCELERATORS, AheadProgram, compile_for_chips, topology_mesh
from funrl.xla.errors import XlaError

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
    phases = {}
    for name, programs in steps.phases.items():
        costs = expected.phases.get(name)
        dry = PhaseCosts() if costs is None else dry_costs(costs, expected.axes)
        phases[name] = CompiledPhase(programs, steps.resident, dry)
    try:
        plan = decoding_plan(job, tokens, hardware, steps.resident)
        mesh = topology_mesh(target, plan.job.generate_sizes)
        passes = {
            kind: tuple(compile_for_chips(function, args, mesh, note)[0] for function, args in functions)
            for kind, functions in engine_passes(plan, mesh).items()
        }
        generation = plan.text
        phases = phases_of_engine(plan, passes, steps.resident) | phases
    except (NoDecoding, XlaError, ModelError) as error:
        generation = f"decoding is not compiled: {error}"
    what = f"a micro-batch of {settings.updates.token_budget} tokens on each of {chips.size} chips of {target}"
    head = f"{text(job.sizes)}, {settings.models.dtype}: {what}\n{generation}"
    return "\n\n".join([head, *phase_tables(phases), "\n".join(differences(phases))])


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


class PhaseCosts(NamedTuple):
    """Costs of a phase on a chip.

    Attributes:
      memory: bytes at the peak.
      flops: of products.
      sent: bytes of collectives, by mesh axes of more than one chip.
    """

    memory: float = 0.0
    flops: float = 0.0
    sent: Mapping[tuple[str, ...], float] = {}


class CompiledPhase(NamedTuple):
    """The programs of a phase.

    Attributes:
      programs: in their order.
      resident: bytes of a chip that stay there, arguments of the programs among them.
      dry: costs by a dry run; zeros where it has no such phase.
    """

    programs: tuple[AheadProgram, ...]
    resident: float
    dry: PhaseCosts

    @property
    def costs(self) -> PhaseCosts:
        """Costs of the programs: at the peak the largest takes memory beside what stays."""
        sent = Counter[tuple[str, ...]]()
        for x in (x for program in self.programs for x in program.sent):
            sent[x.axes] += x.nbytes
        memory = self.resident + max(x.beside_arguments for x in self.programs)
        return PhaseCosts(memory, sum(x.flops for x in self.programs), sent)


def dry_costs(costs: Costs, axes: Mapping[str, tuple[str, tuple[str, ...], dict[str, int]]]) -> PhaseCosts:
    """Costs of a phase by a dry run.

    Args:
      axes: of the groups, as in `Estimate`.
    """
    sent = Counter[tuple[str, ...]]()
    for (_, group), traffic in costs.traffic.items():
        sent[axes[group][1]] += traffic.nbytes  # type: ignore[assignment]
    return PhaseCosts(costs.total, costs.flops, sent)


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
        dry = dry_costs(plan.costs[name], plan.axes)
        dry = dry._replace(memory=resident + dry.memory - plan.weight_bytes)
        phases[name] = CompiledPhase(programs, resident + kept, dry)
    return phases


def phase_tables(phases: Mapping[str, CompiledPhase]) -> list[str]:
    """Tables of the programs; of memory and FLOPs of each phase; and of its collectives by kind and axes.

    Those of phases have the dry run's numbers beside the compiled programs'.
    """
    programs, costs, collectives = [], [], []
    for name, phase in phases.items():
        pair = phase.costs, phase.dry
        costs.append((name, *(size(x.memory) for x in pair), *(f"{x.flops / 1e9:.4g}" for x in pair)))
        for x in phase.programs:
            sizes = map(size, (x.arguments, x.results, x.aliased, x.temporary, x.code))
            programs.append((x.name, f"{x.seconds:.0f} s", *sizes, f"{x.flops / 1e9:.4g}"))
            for sent in x.sent:
                nbytes = sent.nbytes, phase.dry.sent.get(sent.axes, 0)
                collectives.append((name, sent.kind, short(sent.axes), str(sent.count), *map(size, nbytes)))
    heads = {
        ("program", "compiled", "arguments", "results", "in their place", "temporary", "code", "GFLOP"): programs,
        ("phase", "memory", "dry run", "GFLOP", "dry run"): costs,
        ("phase", "collective", "over", "count", "bytes", "dry run, all kinds"): collectives,
    }
    return ["\n".join(table(head, rows)) for head, rows in heads.items() if rows]


def short(axes: Sequence[str]) -> str:
    """Axes as --mesh calls them."""
    names = {axis: name for name, axis in SHORT.items()}
    return ",".join(names[axis] for axis in axes)


def differences(phases: Mapping[str, CompiledPhase]) -> list[str]:
    """Lines about numbers that differ from the dry run's by more than `FINDING`."""
    lines = []
    for name, phase in phases.items():
        costs, dry = phase.costs, phase.dry
        pairs = {"memory": (costs.memory, dry.memory), "FLOPs": (costs.flops, dry.flops)}
        for axes in sorted({*costs.sent, *dry.sent}):
            pairs[f"bytes over {short(axes)}"] = costs.sent.get(axes, 0), dry.sent.get(axes, 0)
        for what, (compiled, want) in pairs.items():
            if abs(compiled - want) > FINDING * want:
                show = flops_text if what == "FLOPs" else size
                share = f" ({compiled / want - 1:+.0%})" if want else ""
                line = f"finding: {what} of {name}: compiled {show(compiled)}, dry run {show(want)}{share}"
                attention = sum(x.attention for x in phase.programs)
                if what == "FLOPs" and attention:
                    line += f"; {show(attention)} of the compiled are whole tiles of attention"
                lines.append(line)
    return lines or [f"the dry run agrees within {FINDING:.0%}"]


def flops_text(flops: float) -> str:
    """FLOPs for people."""
    return f"{flops / 1e9:.4g} G"
