"""Passes of a run's engine, compiled ahead of time for chips that are not here, and their costs by a dry run.

They are the functions that the lowered engine traces: a prefill, the sampling after it, and a decoding iteration. On a
mesh each replica of the engine is the chips that share a row index; it has slots and pages of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import torch

from funrl import trees
from funrl.cost.ahead.steps import compile_program
from funrl.cost.decoding import EngineWork, WaveSizes, hardware_page_tokens, traced_passes, wave_sizes, waves
from funrl.cost.tracing.costs import Costs
from funrl.cost.tracing.estimate import axes_of, of_all_layers, pretended
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.cost.tracing.turns import turns_of
from funrl.cost.weight_costs import agent_bytes, engine_bytes
from funrl.mesh.mesh import ROW_AXES, Mesh
from funrl.mesh.text import text
from funrl.models.errors import ModelError
from funrl.models.weight_dtypes import weight_dtypes
from funrl.rollout.native.cache_sizes import FREE_SHARE
from funrl.rollout.native.device.decode_state import STOP, DecodeForm, DecodeState, Spare
from funrl.rollout.native.passes import PassWork
from funrl.rollout.native.static_decode import bucket
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.lowered.decoding import CACHE, WITH_CACHE, FunctionOf, XlaBackend, pass_places
from funrl.trainer.lowered.mesh_decoding import PassSpecs, cache_of_chips, specs_of_stacks
from funrl.trainer.lowered.stacked_layers import LayerStacks
from funrl.xla.ahead import AheadProgram, topology_mesh
from funrl.xla.errors import XlaError
from funrl.xla.meshes import DeviceCopies, MeshProgram, spec_of


class DecodingPlan(NamedTuple):
    """The engines of a job, and what a dry run says of one pass of each kind.

    Attributes:
      job: with an engine on each replica of `job.generate_sizes`.
      weights: layouts of an engine's weights.
      sizes: of the passes of the first wave.
      page_tokens: tokens of a page.
      own_bytes: bytes of a chip that the engines' own weights take in every phase.
      costs: of one pass, by kind, at the full length of its rows.
      axes: as in `Estimate`, of the mesh to generate on.
    """

    job: RLJob
    weights: trees.Tree
    sizes: WaveSizes
    page_tokens: int
    own_bytes: float
    costs: Mapping[str, Costs]
    axes: Mapping[str, tuple[str, tuple[str, ...], dict[str, int]]]

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

    @property
    def slots(self) -> int:
        """Slots of an engine, without the spare one."""
        return self.job.settings.engines.decode_rows


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


def decoding_plan(job: RLJob, tokens: int, hardware: Hardware, resident: float) -> DecodingPlan | str:
    """The plan of a job's engines; or a reason why there is none.

    Args:
      tokens: of a prompt.
      hardware: of each chip.
      resident: bytes of a chip that weights and optimizer states of the roles take.
    """
    job = dataclasses.replace(job, judge=None)

    def quiet(line: str) -> None:
        """Print nothing: the dry run has."""

    with pretended(job.sizes) as mesh:
        whole = build(job, mesh, quiet)
        generator = whole.generator
        if generator.base is not None:
            return "adapters are beside the weights of a base"
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
            assert engine is not None
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
            axes=axes_of(generator.mesh),
        )


def compile_decoding(
    plan: DecodingPlan, target: str, note: Callable[[str], None]
) -> dict[str, tuple[AheadProgram, ...]] | str:
    """The programs of each pass of a plan's engines, by its kind; or a reason why one cannot be lowered.

    Args:
      target: chips, such as "v5e:4x4".
      note: receives lines about what was done.
    """
    try:
        mesh = topology_mesh(target, plan.job.generate_sizes)
        passes = EnginePasses(plan, mesh, note)
        return {"prefill": (passes.prefill(), passes.sample()), "decode": (passes.decode(),)}
    except (XlaError, ModelError) as error:
        return str(error)


class EnginePasses:
    """Passes of the engines of a mesh, each of which has rows and pages of its own."""

    def __init__(self, plan: DecodingPlan, mesh: jax.sharding.Mesh, note: Callable[[str], None]) -> None:
        """Describe the engines' weights and caches, which have no memory."""
        job = plan.job
        model = job.model
        dtypes = weight_dtypes(plan.weights, job.dtype)
        chips = Mesh(dict(mesh.shape))
        assert model.init_cache is not None
        pages = plan.sizes.rows * plan.sizes.row_pages
        cells = plan.sizes.rows if model.cell_bytes(chips, job.dtype) else 0
        sizes = pages + 1, plan.page_tokens, job.dtype, torch.device("meta")
        own = model.init_cache(chips, *sizes, cells + 1 if cells else 0)
        self.plan = plan
        self.mesh = mesh
        self.note = note
        self.engines = chips.size(ROW_AXES)
        self.spare = Spare(pages, cells or None)
        stacks = LayerStacks(model)
        whole = trees.map(lambda x, dtype: torch.empty(x.shape, dtype=dtype, device="meta"), plan.weights, dtypes)
        self.params = stacks.stack(whole, torch.stack)
        self.cache = cache_of_chips(stacks, own, chips)
        self.specs = PassSpecs(specs_of_stacks(stacks, trees.map(spec_of, plan.weights)))

    def decode(self) -> AheadProgram:
        """A decoding iteration of full rows: each slot gets a token."""
        plan = self.plan
        row_pages = bucket(plan.sizes.row_pages)
        form = DecodeForm(bucket(plan.sizes.rows, plan.slots), row_pages, ((0, plan.job.sampling),))
        slots = self.engines * (plan.slots + 1)  # the last one of an engine is spare
        numbers = _empty(STOP + len(plan.job.stop), slots)
        state = DecodeState(_empty(slots), numbers, _empty(slots, row_pages, dtype=torch.int32))
        return self._compiled(
            "decode",
            "decoding iteration",
            lambda backend: backend.decode_function(form, self.spare),
            (self.params, {}, self.cache, state, _empty(self.engines * form.rows)),
        )

    def prefill(self) -> AheadProgram:
        """New tokens of as many prompts as a pass has, each of full length."""
        plan = self.plan
        sizes = plan.sizes
        places = pass_places(prompt_work(plan), plan.page_tokens, self.spare)
        whole = trees.map(lambda x: _empty(self.engines * len(x), *x.shape[1:], dtype=x.dtype), places)
        return self._compiled(
            "prefill",
            f"prefill of {sizes.prompts} x {sizes.prompt_tokens} tokens",
            lambda backend: backend.prefill_function((-1,)),
            (self.params, {}, self.cache, whole),
        )

    def sample(self) -> AheadProgram:
        """The first tokens after a prefill."""
        plan = self.plan
        sampling = plan.job.sampling
        rows = self.engines * bucket(plan.sizes.prompts)
        hidden_RD = _empty(rows, plan.job.model.config.embed, dtype=plan.job.dtype)
        noise_R = _empty(rows, dtype=torch.float64)
        return self._compiled(
            "sample",
            "sampling after a prefill",
            lambda backend: backend.sample_function(sampling),
            (self.params, hidden_RD, noise_R, None),
        )

    def _compiled(self, kind: str, name: str, function_of: FunctionOf, args: Sequence[trees.Tree]) -> AheadProgram:
        """Compile a function of an engine's backend for whole arguments; the cache among them is donated.

        Args:
          kind: as in `PassSpecs`.
          name: for people.
          function_of: gives the function.
          args: its arguments.
        """
        job = self.plan.job
        model = job.model

        def make(place: Mesh) -> Callable[..., trees.Tree]:
            return function_of(XlaBackend(model, place, job.dtype, self.plan.page_tokens))

        given = self.specs.given(kind, args)
        results = functools.partial(self.specs.results, kind)
        program = MeshProgram(make, DeviceCopies(self.mesh), lambda *_: given, results, name=name)
        donated = (CACHE,) if kind in WITH_CACHE else ()
        return compile_program(program, tuple(args), donated, self.note)[0]


def prompt_work(plan: DecodingPlan) -> PassWork:
    """The work of a prefill of the prompts of one engine."""
    sizes = plan.sizes
    count = sizes.prompts
    each = sizes.prompt_tokens
    table_SP = torch.zeros(count, sizes.row_pages, dtype=torch.int32)
    last = np.arange(1, count + 1) * each - 1
    lengths = [each] * count, [each] * count
    return PassWork(_zeros(count * each), *lengths, table_SP, last, cells=np.arange(count))


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")
