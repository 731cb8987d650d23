"""The report of `funrl compile`: the memory that the steps of a run take of a chip, beside what a dry run says.

The steps of a job and the passes of its engine are compiled ahead of time for chips that are not here. The roles' steps
run on rows of the job with programs that compile and compute nothing. Passes are the functions that the lowered engine
traces: a prefill and a decoding iteration, with their costs by a dry run. On a mesh each
replica of the engine is the chips that share a row index. Weights have no memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import PartitionSpec
from torch import Tensor

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.cost.decoding import EngineWork, WaveSizes, hardware_page_tokens, traced_passes, wave_sizes, waves
from funrl.cost.dry_run import agent_bytes, check_width, engine_bytes, estimate, plain_job, tokens_of
from funrl.cost.rows import full_rows
from funrl.cost.search import chosen_mesh
from funrl.cost.tracing.costs import Costs
from funrl.cost.tracing.estimate import of_all_layers, pretended, rows_of_a_pass, turns_of
from funrl.cost.tracing.hardware import HARDWARE, USABLE, Hardware
from funrl.cost.verdict import size, table
from funrl.mesh.mesh import AXES, ROW_AXES, Mesh, single
from funrl.mesh.text import text
from funrl.models.errors import ModelError
from funrl.models.weight_dtypes import weight_dtypes
from funrl.optim import layouts_of
from funrl.rollout.native.cache_sizes import FREE_SHARE
from funrl.rollout.native.device.decode_state import DecodeForm, Spare, empty_state
from funrl.rollout.native.passes import PassWork
from funrl.rollout.native.static_decode import bucket
from funrl.trainer.jobs.build import build, on_mesh
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.sharding import splits_residual
from funrl.trainer.lowered.decoding import EnginePrograms, pass_places
from funrl.trainer.lowered.jax_steps import jax_devices, stored_layouts
from funrl.trainer.lowered.programs import RolePrograms, StepProgram
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings, with_flags
from funrl.trainer.steps.advantage_phase import advantages
from funrl.trainer.steps.learn import denominators
from funrl.trainer.steps.micro import own_micro_batches, row_cost
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.roles import RoleState, row_fields_of, weights_of
from funrl.trainer.steps.router_losses import Choices, token_count
from funrl.trainer.steps.score import score
from funrl.trainer.steps.step_rows import Rows
from funrl.xla.ahead import ACCELERATORS, AheadProgram, compile_for_chips, struct_of, topology_mesh
from funrl.xla.errors import XlaError
from funrl.xla.meshes import ShardedFunction, spec_of, traced_mesh
from funrl.xla.operators import HOST_DTYPES

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
    steps, resident = compile_steps(job, chips, lambda host, parts: full_rows(host, parts, tokens, rows), note)
    expected = estimate(of_one_pass(job, rows), tokens, hardware, "train")
    phases = {}
    for name, programs in steps.items():
        dry = expected.phases.get(name)
        phases[name] = CompiledPhase(programs, resident, 0.0 if dry is None else dry.total)
    try:
        plan = decoding_plan(job, tokens, hardware, resident)
        mesh = topology_mesh(target, plan.job.generate_sizes)
        passes = {
            kind: compile_for_chips(function, args, mesh, note)[0]
            for kind, (function, args) in engine_passes(plan, mesh).items()
        }
        generation = plan.text
        phases = phases_of_engine(plan, passes, resident) | phases
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


class CompiledPhase(NamedTuple):
    """The programs of a phase.

    Attributes:
      programs: in their order.
      resident: bytes of a chip that stay there, arguments of the programs among them.
      dry: bytes at the peak by a dry run; 0 where it has no such phase.
    """

    programs: tuple[AheadProgram, ...]
    resident: float
    dry: float

    @property
    def memory(self) -> float:
        """Bytes at the peak: the largest program takes memory beside what stays."""
        return self.resident + max(x.beside_arguments for x in self.programs)


def phases_of_engine(
    plan: DecodingPlan, passes: Mapping[str, AheadProgram], resident: float
) -> dict[str, CompiledPhase]:
    """One pass of each kind of an engine, beside whose weights its cache and its slots stay on the chip.

    Their bytes are read from a decoding iteration, which has all weights as arguments; a prefill lacks the unembedding.

    Args:
      plan: of the engine.
      passes: its programs, by kind.
      resident: bytes of a chip that weights and optimizer states of the roles take.
    """
    resident += plan.own_bytes
    kept = passes["decode"].arguments - plan.weight_bytes
    phases = {}
    for name, program in passes.items():
        dry = resident + plan.costs[name].total - plan.weight_bytes
        phases[name] = CompiledPhase((program,), resident + kept, dry)
    return phases


def phase_tables(phases: Mapping[str, CompiledPhase]) -> list[str]:
    """Tables of the programs, and of the memory of each phase beside the dry run's."""
    programs = [
        (x.name, f"{x.seconds:.0f} s", *map(size, (x.arguments, x.results, x.aliased, x.temporary, x.code)))
        for phase in phases.values()
        for x in phase.programs
    ]
    memory = [(name, size(phase.memory), size(phase.dry)) for name, phase in phases.items()]
    heads = {
        ("program", "compiled", "arguments", "results", "in their place", "temporary", "code"): programs,
        ("phase", "memory", "dry run"): memory,
    }
    return ["\n".join(table(head, rows)) for head, rows in heads.items()]


def differences(phases: Mapping[str, CompiledPhase]) -> list[str]:
    """Lines about phases whose memory differs from the dry run's by more than `FINDING`."""
    lines = []
    for name, phase in phases.items():
        if abs(phase.memory - phase.dry) > FINDING * phase.dry:
            share = f" ({phase.memory / phase.dry - 1:+.0%})" if phase.dry else ""
            sizes = f"compiled {size(phase.memory)}, dry run {size(phase.dry)}"
            lines.append(f"finding: memory of {name}: {sizes}{share}")
    return lines or [f"the dry run agrees within {FINDING:.0%}"]


def compile_steps(
    job: Job, mesh: jax.sharding.Mesh, rows_of: Callable[[Job, Parts], Rows], note: Callable[[str], None]
) -> tuple[dict[str, tuple[AheadProgram, ...]], int]:
    """Compile scores, gradients and updates of the roles of a job.

    Args:
      job: of the flags, for the mesh.
      mesh: of the chips; its axes have the sizes of the job's.
      rows_of: (job of one process, its parts) -> rows that give each chip a micro-batch.
      note: receives lines about what was done.

    Returns: programs by the dry run's names of phases, "score_reference", or "update_policy" with two; and bytes of a
      chip that weights and optimizer states of all roles take.
    """
    compiled: dict[StepProgram, AheadProgram] = {}

    def program(purpose: str, function: ShardedFunction) -> StepProgram:
        """Compile at a call; the results have no meaning."""

        def run(*args: trees.Tree) -> trees.Tree:
            compiled[run], results = compile_for_chips(function, args, mesh, note)
            device = "cpu" if purpose == "scores" else "meta"
            return trees.map(lambda x: torch.zeros(x.shape, dtype=HOST_DTYPES[x.dtype], device=device), results)

        return run

    alone = dict.fromkeys(AXES, 1)
    host = dataclasses.replace(job, sizes=alone, generate_sizes=alone)
    parts = build(host, dataclasses.replace(single(), driven=dict(mesh.shape)), note)
    place, optimize = on_mesh(job, parts.roles)
    devices = jax_devices(mesh, place, optimize, job.settings.devices.remat, program)
    programs = {name: RolePrograms(devices, role, name) for name, role in parts.roles.items()}
    roles = {name: role._replace(programs=programs[name]) for name, role in parts.roles.items()}
    own = {}
    for name, role in roles.items():
        if role.base is None or role.loss is not None:
            dtype = job.dtype if role.loss is None else job.master
            own[name] = trees.map(lambda x, d=dtype: torch.empty(x.shape, dtype=d, device="meta"), role.stored)
    states = {n: RoleState(own[n], r.optimizer.init(own[n])) for n, r in roles.items() if r.optimizer is not None}
    frozen = {name: tree for name, tree in own.items() if name not in states}
    budget = job.settings.updates.token_budget
    rows = score(roles, weights_of(roles, states, frozen), rows_of(host, parts), budget)
    chain = job.algorithm.advantage
    if chain is not None:
        rows, _, _ = advantages(chain, chain.init(), rows, host.reward_names)
    for name, state in states.items():
        role = roles[name]
        assert role.loss is not None
        total = denominators({"": role}, rows, [np.arange(len(rows.owner))])[0][""].denominators
        fields = row_fields_of(role.loss)
        pieces = own_micro_batches(rows, budget, row_cost(role.placed), mask=role.mask, row_fields=fields)
        group = [next(pieces).batch for _ in range(programs[name].lanes)]
        chosen = Choices(None, token_count(group, role.placed.mesh)) if role.router.wanted else None
        _, grads = programs[name].value_and_grad(state.params, role, group, total, frozen, chosen)
        programs[name].update(role, grads, state, torch.zeros(()))
    resident = 0
    for name, weights in own.items():
        stored = stored_layouts(place(name, traced_mesh(mesh.shape)))
        pairs = [(weights, stored)]
        if name in states:
            pairs.append((states[name].opt_state, layouts_of(states[name].opt_state, stored)))
        for x, layout in (pair for trees_ in pairs for pair in zip(*map(trees.leaves, trees_), strict=True)):
            resident += math.prod(layout.local_shape()) * x.dtype.itemsize
    kinds = {"score": ("scores",), "update": ("gradient", "update")}
    phases = {
        f"{kind}_{name}": tuple(compiled[role.programs[purpose]] for purpose in purposes)
        for kind, purposes in kinds.items()
        for name, role in programs.items()
        if purposes[0] in role.programs
    }
    return phases, resident


class DecodingPlan(NamedTuple):
    """The engines of a job, and what a dry run says of one pass of each kind.

    Attributes:
      job: with an engine on each replica of `job.generate_sizes`.
      weights: layouts of an engine's weights.
      sizes: of the passes of the first wave.
      page_tokens: tokens of a page.
      own_bytes: bytes of a chip that the engines' own weights take in every phase.
      costs: of one pass, by kind, at the full length of its rows.
    """

    job: RLJob
    weights: trees.Tree
    sizes: WaveSizes
    page_tokens: int
    own_bytes: float
    costs: Mapping[str, Costs]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the engine's weights on a chip."""
        empty = trees.map(lambda x: torch.empty(x.local_shape(0), device="meta"), self.weights)
        return trees.nbytes(trees.map(torch.Tensor.to, empty, weight_dtypes(self.weights, self.job.dtype)))

    @property
    def text(self) -> str:
        """Description for people."""
        sizes = self.sizes
        pages = f"{sizes.row_pages} page{'s' * (sizes.row_pages > 1)} of {self.page_tokens} tokens"
        return f"generation on {text(self.job.generate_sizes)}: each engine decodes {sizes.rows} rows of {pages}"


class NoDecoding(Exception):
    """The passes of an engine are not compiled; the message is the reason."""


def decoding_problem(job: Job) -> str | None:
    """Reason why the passes of an engine are not compiled; None: they are."""
    if not isinstance(job, RLJob):
        return "the run does not generate"
    settings = job.settings
    model = job.models[job.main_role]
    reasons = {
        f"--engine={settings.engines.engine} decodes by itself": not settings.engines.abilities.own_steps,
        "--place gives generation other chips": settings.devices.place is not None,
        "--speculate drafts tokens on the host": bool(settings.engines.speculate),
        "--router_replay records experts in torch": settings.routers.router_replay,
        "the model has no pages": not model.pages,
        "prompts may own pictures, whose positions are made on the host": model.owned is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def decoding_plan(job: Job, tokens: int, hardware: Hardware, resident: float) -> DecodingPlan:
    """The plan of a job's engines.

    Args:
      tokens: of a prompt.
      hardware: of each chip.
      resident: bytes of a chip that weights and optimizer states of the roles take.

    Raises:
      NoDecoding: the passes of its engines are not compiled.
    """
    problem = decoding_problem(job)
    if problem is not None or not isinstance(job, RLJob):
        raise NoDecoding(problem)
    job = dataclasses.replace(job, judge=None)

    def quiet(line: str) -> None:
        """Print nothing: the dry run has."""

    with pretended(job.sizes) as mesh:
        whole = build(job, mesh, quiet)
        generator = whole.generator
        if generator.base is not None:
            raise NoDecoding("adapters are beside the weights of a base")
        own_bytes = engine_bytes(job, whole, generator)[0] + agent_bytes(job, whole)
        engines = 1 + len(generator.frozen) + len(generator.policies)
        room = FREE_SHARE * max(0.0, hardware.memory * USABLE - resident - own_bytes) / engines
        turns = turns_of(job.settings)
        work = EngineWork(job, generator, generator, tokens, room=room, hardware=hardware, turns=turns)
        sizes = wave_sizes(work, job.sampling, max(rows for number, rows in waves(work, job.sampling) if number))
        length = turns.row_tokens(tokens, job.sampling.max_new_tokens)

        def costs_of(shallow: Job) -> dict[str, Costs]:
            assert isinstance(shallow, RLJob)
            engine = build(shallow, mesh, quiet).generator
            own = work._replace(job=shallow, generator=engine)
            return traced_passes(own, job.sampling, sizes, length).phases

        costs = of_all_layers(job, costs_of)
        weights = generator.whole.weights.layouts
        return DecodingPlan(
            job=job,
            weights=weights,
            sizes=sizes,
            page_tokens=hardware_page_tokens(hardware),
            own_bytes=own_bytes,
            costs=costs,
        )


def engine_passes(
    plan: DecodingPlan, mesh: jax.sharding.Mesh
) -> dict[str, tuple[ShardedFunction, tuple[trees.Tree, ...]]]:
    """Passes of the engines of a mesh, by kind: each engine is a lane, with rows and pages of its own.

    A prefill has new tokens of as many prompts as a pass has, each of full length. In a decoding iteration each row
    gets a token.

    Returns: of each kind a function of a chip's shards, and its whole arguments without memory.
    """
    job = plan.job
    model = job.model
    sizes = plan.sizes
    pages = sizes.pages
    functions = EnginePrograms(model, job.generate_sizes, job.dtype, plan.page_tokens)
    spare = Spare(pages, sizes.rows if model.cell_bytes(functions.chips, job.dtype) else None)
    dtypes = weight_dtypes(plan.weights, job.dtype)
    empty = trees.map(lambda x, dtype: torch.empty(x.shape, dtype=dtype, device="meta"), plan.weights, dtypes)
    specs = functions.stacks.stack(trees.map(spec_of, plan.weights), lambda xs: PartitionSpec(None, *xs[0]))
    params = trees.map(lambda x, spec: struct_of(x, spec, mesh), functions.stacks.stack(empty, torch.stack), specs)
    begin = params, {}, functions.cache(spare)
    engines = functions.chips.size(ROW_AXES)

    def rows_of_all(x: Tensor) -> Tensor:
        """Rows of all engines without memory, for those of one."""
        return torch.empty(engines * len(x), *x.shape[1:], dtype=x.dtype, device="meta")

    counts = np.full(sizes.prompts, sizes.prompt_tokens)
    table_SP = torch.zeros(sizes.prompts, sizes.row_pages, dtype=torch.int32)
    tokens_N = torch.zeros(counts.sum(), dtype=torch.int64)
    cells = np.arange(sizes.prompts)
    prompts = PassWork(tokens_N, counts, counts, table_SP, counts.cumsum() - 1, cells=cells)
    places, _ = pass_places(prompts, plan.page_tokens, spare)
    form = DecodeForm(bucket(sizes.rows), bucket(sizes.row_pages), ((0, job.sampling),))
    rows_B = torch.arange(form.rows)
    state = empty_state(rows_B, len(job.stop), form.pages)
    state = state._replace(numbers_CS=state.numbers_CS.T)
    none = ((-1, None),)
    prefill = functions.prefill(none)._replace(name=f"prefill of {sizes.prompts} x {sizes.prompt_tokens} tokens")
    decode = functions.decode(none, form, spare)._replace(name="decoding iteration")
    return {
        "prefill": (prefill, (*begin, trees.map(rows_of_all, places))),
        "decode": (decode, (*begin, *trees.map(rows_of_all, (state, rows_B)))),
    }
