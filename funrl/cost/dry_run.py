"""What reinforcement learning will cost, before it is started: memory by phase, bytes by mesh axis, FLOPs, time.

    python -m funrl.experiments.ppo --mesh=dp64,tp8 --model=CONFIG.json --dry_run

It runs the trainer's own functions for one rank of the mesh, on tensors without memory and a process group that sends
nothing: what is counted is what the code does. No process is started, no weight and no prompt is read. Every completion
is taken to be as long as it may be, and no prompt to be filtered out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from funrl import trees
from funrl.algos.core import Algorithm, needs_of
from funrl.batch import Batch
from funrl.cost.costs import UPDATES, Costs, Tracer, Traffic, after, plus, times
from funrl.cost.estimate import (
    Estimate,
    Trace,
    TracedClock,
    at_rows,
    axes_of,
    make_weights,
    micro_batch,
    of_all_layers,
    pretended,
    stage_of,
    tracer_of,
)
from funrl.cost.hardware import Hardware
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import held, received_bytes, volume
from funrl.mesh.reshard import BUCKET_BYTES
from funrl.mesh.rules import GENERATE, layouts
from funrl.models import decoder
from funrl.models.config import Config, ModelError, config_from_hf
from funrl.rollout import native
from funrl.rollout.completions import Sampling
from funrl.tasks import arithmetic
from funrl.trainer import ensemble, offload, phases
from funrl.trainer import job as jobs
from funrl.trainer.job import Job, Task
from funrl.trainer.settings import Settings, SettingsError
from funrl.trainer.sharding import FROZEN, check_layouts, check_models, generate_sizes, models_of

PROMPT_TOKENS = 512  # of a prompt, where neither a flag nor the embedded task says


def plain_job(
    settings: Settings, compose: Callable[[], Algorithm], memory: float, models: Sequence[str] | None = None
) -> Job:
    """The job that the flags describe, as far as its costs go: nothing but config.json is read.

    Args:
      settings: the flags.
      compose: makes the algorithm.
      memory: bytes of a device, by which the default mesh to generate on is chosen.
      models: those of `sharding.MODELS` that the run has; None: what the algorithm needs.

    Raises:
      ValueError: the first thing that cannot work.
    """
    sizes = meshes.parse(settings.mesh)
    config = arithmetic.model_config() if settings.model is None else read_config(settings.model, "--model")
    settings = dataclasses.replace(settings, compile="off", device="cpu")
    jobs.check_choices(settings, "cpu")
    algorithm = compose()
    models = models_of(algorithm, settings) if models is None else models
    check_models(settings, models)
    generating = generate_sizes(settings, sizes, config, memory)
    check_layouts(config, settings, models, sizes, generating)
    jobs.check_needs(algorithm, settings)
    new_tokens = jobs.resolved(settings).max_new_tokens
    assert new_tokens is not None
    sampling = Sampling(
        settings.temperature, settings.top_k, settings.top_p, new_tokens, config.eos, settings.samples_per_prompt
    )
    return Job(
        settings=settings, sizes=sizes, generate_sizes=generating, device="cpu",
        dtype=jobs.DTYPES[settings.dtype], config=config, tokenizer=None,
        task=Task("dry run", (), (), (), (1.0,), None, new_tokens), algorithm=algorithm, sampling=sampling,
        eval_sampling=sampling, pad=0, warmstart_steps=0, lr=1e-5, critic_lr=1e-5, reward_lr=1e-5,
        teacher=None if settings.teacher is None else read_config(settings.teacher, "--teacher"),
    )  # fmt: skip


def read_config(model: str, flag: str) -> Config:
    """The record of a directory's config.json, or of such a file. Weights need not be there.

    Raises:
      ModelError: there is none, it is not JSON, or the model is not supported.
    """
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise ModelError(f"{flag}={model}: there is no {path}; a dry run needs a config.json and nothing else")
    try:
        return config_from_hf(json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error


def prompt_tokens_of(settings: Settings) -> int:
    """Tokens of a prompt: the longest of the embedded task."""
    if settings.model is not None or settings.prompts is not None:
        return PROMPT_TOKENS
    tokenizer = arithmetic.tokenizer()
    prompts = arithmetic.heldout_prompts(64)
    return max(len(tokenizer.encode(p.prompt, add_special_tokens=False)) for p in prompts)


def estimate(job: Job, prompt_tokens: int, hardware: Hardware) -> Estimate:
    """What a step of the job costs on each rank of its mesh, by phase."""
    if prompt_tokens + job.sampling.max_new_tokens > job.config.max_positions:
        raise SettingsError(
            f"--prompt_tokens={prompt_tokens} and --max_new_tokens={job.sampling.max_new_tokens} are more than the "
            f"model's {job.config.max_positions} positions"
        )
    with pretended(job.sizes) as mesh:
        found = of_all_layers(job, lambda job: _phases(job, mesh, prompt_tokens, hardware))
        models = ensemble.build(job, mesh, lambda _: None)
        axes = axes_of(mesh) | axes_of(models.generate_mesh)
        rests, engine = found.pop("rests").peak, _engine_bytes(models, job.master)
        found = {name: plus(costs, {"weights": engine}) for name, costs in found.items()}
        found["reshard"] = _resharding(models, rests, engine)
        if job.settings.offload and hardware.accelerator:
            found = _without_what_is_away(job, models, found, rests)
    rows, tokens = job.settings.batch_prompts * job.sampling.samples, prompt_tokens + job.sampling.max_new_tokens
    return Estimate(
        job=job,
        models=models_of(job.algorithm, job.settings),
        step=f"{rows:,} completions, prompt and completion {tokens:,} tokens, all of full length",
        tokens=tokens,
        phases=found,
        axes=axes,
        parameters=trees.count(decoder.shapes(job.config)),
        left_out=_left_out(job, hardware),
    )


def _left_out(job: Job, hardware: Hardware) -> tuple[str, ...]:
    """What a step has beside what is counted."""
    settings = job.settings
    out = ["rewards", "tokenizer", "files", f"the evaluation every {settings.eval_every} steps"]
    if job.algorithm.keep is not None and settings.max_refills > 1:
        out.append(f"up to {settings.max_refills - 1} more batches of completions in place of rows that are filtered")
    if settings.offload:
        copies = "the time of its copies" if hardware.accelerator else "it does nothing on a CPU"
        out.append(f"--offload={settings.offload}: {copies}")
    return tuple(out)


def _phases(job: Job, mesh: Mesh, prompt_tokens: int, hardware: Hardware) -> dict[str, Costs]:
    """Costs of all phases but the reshard, without the engine's own copy; "rests" is what is held between them."""
    models, settings, ranks = ensemble.build(job, mesh, lambda _: None), job.settings, mesh.size(mesh.row_axes)
    width, rows = prompt_tokens + job.sampling.max_new_tokens, settings.batch_prompts * job.sampling.samples
    at = functools.cache(lambda local: trace(job, models, prompt_tokens, local * ranks, hardware))
    local, mini = math.ceil(rows / ranks), math.ceil(rows / settings.minibatches / ranks)
    piece = micro_batch(job, width)
    found = {"generate": _generation(job, models, job.sampling, prompt_tokens, hardware)}
    if "greedy_score" in needs_of(job.algorithm):
        greedy = dataclasses.replace(job.sampling, greedy=True, samples=1)
        found["generate"] = after(found["generate"], _generation(job, models, greedy, prompt_tokens, hardware))
    found |= {n: c for n, c in at_rows(at, local, piece, ranks).items() if not n.startswith(UPDATES)}
    for name, costs in at_rows(at, mini, piece, ranks).items():
        if name.startswith(UPDATES):
            beyond = max(0, rows - mini * ranks) * at(min(mini, piece)).row_bytes
            found[name] = plus(times(costs, settings.epochs * settings.minibatches), {"batch": beyond})
    rests = at(min(mini, piece)).resting
    found["generate"] = plus(found["generate"], rests)
    return found | {"rests": Costs({"other": rests})}


def trace(
    job: Job, models: ensemble.Models, prompt_tokens: int, rows: int, hardware: Hardware, real: bool = False
) -> Trace:
    """Scores a batch and learns from it once, in one mini-batch, with the trainer's own functions.

    Args:
      models: made by `ensemble.build` on a mesh, which may be `pretended`.
      prompt_tokens: of each row.
      rows: of all ranks.
      real: compute what is counted, instead of pretending.
    """
    settings = dataclasses.replace(job.settings, minibatches=1, epochs=1)
    job, has = job._replace(settings=settings), models_of(job.algorithm, settings)
    lies = {
        "policy": models.policy_layouts, "critic": models.critic_layouts, "reference": models.reference_layouts,
        "reward_model": models.reward_layouts, "teacher": models.teacher_layouts,
    }  # fmt: skip
    tracer = tracer_of(job, [lies[name] for name in has], hardware, real)
    clock = TracedClock(tracer)
    dtypes = {name: job.dtype if name in FROZEN else job.master for name in has}
    weights = ensemble.Weights(**{name: make_weights(tracer, lies[name], dtypes[name]) for name in has})
    batch = full_batch(job, prompt_tokens, rows)
    tracer.hold_tree(batch, "batch")
    with tracer:
        state = ensemble.first_state(job, models, weights)
        for learner in (state.policy, state.critic, state.reward_model):
            tracer.hold_tree(learner and learner.opt_state, "optimizer")
        resting = {kind: tracer.held[kind] for kind in ("weights", "optimizer")}
        batch, state, _ = phases.score_batch(job, models, state, batch, clock)
        phases.learn(job, models, state, batch, settings.critic_warmup_steps + 1, clock)
    return Trace(tracer.phases, resting, trees.nbytes(batch) / rows)


def full_batch(job: Job, prompt_tokens: int, rows: int) -> Batch:
    """Rows of the greatest length, as they come from the engine; the same on every rank."""
    length = prompt_tokens + job.sampling.max_new_tokens
    shape = (rows, -(-length // 8) * 8)
    at_T = torch.arange(shape[1])
    batch = Batch(
        tokens=torch.arange(math.prod(shape)).remainder(job.config.vocab).view(shape),
        mask=((at_T >= prompt_tokens) & (at_T < length)).expand(shape).clone(),
        length=torch.full((rows,), length, dtype=torch.int64),
        group=torch.arange(rows) // job.sampling.samples,
        score=torch.arange(rows).remainder(2).to(torch.promote_types(job.dtype, torch.float32)),
        scores=torch.arange(rows).remainder(2).to(torch.promote_types(job.dtype, torch.float32))[:, None],
        truncated=torch.ones(rows, dtype=torch.bool),
        rollout_logp=torch.zeros(shape, dtype=torch.promote_types(job.dtype, torch.float32)),
    )
    return batch._replace(greedy_score=batch.score) if "greedy_score" in needs_of(job.algorithm) else batch


def _engine_bytes(models: ensemble.Models, master: torch.dtype) -> float:
    """What the engine holds beside the trainer's weights: leaves that change their box or their dtype."""
    made = models.to_generate
    return float(
        sum(
            volume(has.new) * dtype.itemsize
            for has, dtype in zip(held(made, 0), made.dtypes, strict=True)
            if has.new is not None and (has.old != has.new or dtype != master)
        )
    )


def _without_what_is_away(
    job: Job, models: ensemble.Models, found: dict[str, Costs], rests: dict[str, float]
) -> dict[str, Costs]:
    """The phases without the bytes that are off the device while they run.

    Args:
      rests: bytes of models and optimizers, by kind.
    """
    made, frozen = models.to_generate, [models.teacher_layouts]
    if "reference" in models_of(job.algorithm, job.settings):
        frozen.append(models.reference_layouts)
    reference = sum(math.prod(lay.local_shape(0)) for lay in trees.leaves(frozen)) * job.dtype.itemsize
    shared = sum(
        volume(has.new) * dtype.itemsize
        for has, dtype in zip(held(made, 0), made.dtypes, strict=True)
        if has.new is not None and has.old == has.new and dtype == job.master
    )
    parts = {
        "optimizer": {"optimizer": rests["optimizer"]},
        "reference": {"weights": float(reference)},
        "params": {"weights": rests["weights"] - reference - shared},
    }
    away = offload.parse(job.settings.offload)
    for name, costs in found.items():
        needs = offload.NEEDS["update" if name == "reshard" else stage_of(name)]
        for part in away.difference(needs):
            costs = plus(costs, {kind: -nbytes for kind, nbytes in parts[part].items()})
        found[name] = costs
    return found


def _resharding(models: ensemble.Models, kept: dict[str, float], engine: float) -> Costs:
    """The engine's new copy is made when its old one is gone; a few buckets are on their way."""
    received = received_bytes(models.to_generate)
    staging = min(2 * BUCKET_BYTES, 2 * max(received, default=0))
    peak = kept | {"weights": kept["weights"] + engine, "staging": float(staging)}
    traffic = {("reshard", "all"): Traffic(1, float(max(received)))} if max(received, default=0) else {}
    return Costs({"other": peak}, 0.0, 0.0, traffic)


def _generation(job: Job, models: ensemble.Models, sampling: Sampling, prompt_tokens: int, hardware: Hardware) -> Costs:
    """Prefill and one step of decoding half-way, traced; every row is decoded to the limit."""
    config, mesh = job.config, models.generate_mesh
    length = prompt_tokens + sampling.max_new_tokens
    prompts = -(-job.settings.batch_prompts // mesh.size(mesh.row_axes))
    rows = prompts * sampling.samples
    count = min(rows, models.engine._rows(length))  # type: ignore[attr-defined]
    chosen = [r // sampling.samples for r in range(count)]
    lays = layouts(decoder.shapes(config), decoder.axes(config), GENERATE, mesh.sizes)
    shape = decoder.init_cache(config, mesh, count, length, job.dtype, torch.device("meta")).keys[0].shape
    local = lays.get("unembed", lays["embed"]).local_shape(0)[0]
    tracer = Tracer(hardware, [lay.local_shape(0) for lay in trees.leaves(lays)], (local, config.vocab), tuple(shape))
    params = trees.map(lambda lay: tracer.empty(lay.local_shape(0), job.dtype), lays)
    tracer.hold_tree(params, "weights")
    model = native.Model(config, params, decoder.unembed(params), mesh, None)
    with tracer, torch.no_grad():
        with tracer.phase("prefill"):
            cache, hidden_RD = native._prefill(model, [[0] * prompt_tokens] * prompts, chosen, length)
        with tracer.phase("decode"):
            at = prompt_tokens + sampling.max_new_tokens // 2
            token_R1 = torch.zeros(count, 1, dtype=torch.int64)
            view = decoder.cache_prefix(cache, min(length, -(-(at + 1) // native.BLOCK) * native.BLOCK))
            decoder.apply(
                config, params, token_R1, torch.full((count, 1), at, dtype=torch.int64), cache=view, mesh=mesh
            )
            noise_RS = torch.zeros(count, 1, dtype=torch.float64)
            native._draw(model, hidden_RD, noise_RS, 0, sampling)
    chunks = rows / count
    prefill, decode = tracer.phases["prefill"], tracer.phases["decode"]
    whole = after(times(prefill, chunks), times(decode, chunks * sampling.max_new_tokens))
    return plus(whole, {"weights": -float(trees.nbytes(params))})
