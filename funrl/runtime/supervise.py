"""Learning from demonstrations and preferences: the trainer's gradient and update, without rollouts.

    lessons -> (reference) -> gradient -> update -> (next step)

It runs on every rank alike, on the same meshes as `loop.py`, and what a run leaves behind is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Algorithm, Loss, chain, needs_of, reduce
from funrl.algos.reductions import token_mean
from funrl.algos.supervised import negative_log_likelihood
from funrl.batch import Batch
from funrl.data import arithmetic
from funrl.data.prompts import prompt_batch
from funrl.data.supervised import Lesson, lesson, load_lessons, to_batch
from funrl.mesh.mesh import Mesh
from funrl.mesh.reshard import unshard
from funrl.mesh.rules import layouts
from funrl.models import decoder, hf, value
from funrl.models.compile import compile_layer
from funrl.models.fsdp import gathered
from funrl.models.remat import rematerialized
from funrl.models.scores import token_scores
from funrl.optim import Transformation, global_norm
from funrl.runtime import warmstart
from funrl.runtime.job import Job, Task, prepare
from funrl.runtime.loop import Outcome
from funrl.runtime.observe import Observer
from funrl.runtime.optimizer import make_optimizer
from funrl.runtime.rollout import Example
from funrl.runtime.settings import Settings, SettingsError
from funrl.runtime.sharding import train_rules
from funrl.runtime.spmd import Clock, peak_memory_gb
from funrl.runtime.step import Forward, Learner, Objective, gradient, policy_objective, score, update, value_objective

LESSONS = 4096  # made of the embedded task


def _flag(default: Any, group: str, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"group": group, "help": text})


@dataclass(frozen=True)
class SupervisedSettings(Settings):
    """The flags of experiments that learn from given texts; those of `HIDDEN` have no meaning there."""

    data: str | None = _flag(None, "job", "JSON lines to learn from; default: made of the embedded task")
    task: str = _flag("arithmetic", "job", "the embedded task; --data replaces it")
    steps: int = _flag(30, "job", "updates, each of one batch")
    warmstart_steps: int | None = _flag(
        None,
        "job",
        "supervised steps before, on imperfect demonstrations; default: the task's, 0 with --model or --data",
    )
    batch_prompts: int = _flag(128, "update", "demonstrations or pairs an update")
    lr: float | None = _flag(None, "update", "peak learning rate; default: 1e-3 from scratch, 1e-5 with --model")
    eval_prompts: int = _flag(256, "output", "held-out demonstrations or pairs an evaluation uses")
    minibatches: int = _flag(1, "update", "hidden: a batch is one")


HIDDEN = (
    "generate_mesh", "prompts", "reward", "reward_weights", "teacher", "samples_per_prompt", "max_new_tokens",
    "temperature", "top_k", "top_p", "max_refills", "critic_lr", "reward_lr", "critic_warmup_steps", "epochs",
    "minibatches", "eval_temperature", "sample_every", "offload", "dry_run", "hardware", "prompt_tokens",
)  # fmt: skip


class Course(NamedTuple):
    """A supervised run, checked and ready to start.

    Attributes:
      job: settings, mesh, model, optimizer numbers.
      lessons, heldout: to train on, and to evaluate on.
      loss: of log-probabilities, or of a value head's numbers where `reads` is "rewards".
    """

    job: Job
    lessons: Sequence[Lesson]
    heldout: Sequence[Lesson]
    loss: Loss
    reads: str

    @property
    def sizes(self) -> dict[str, int]:
        return self.job.sizes

    @property
    def device(self) -> str:
        return self.job.device


def prepare_course(
    settings: SupervisedSettings, compose: Callable[[], Loss], kind: str, reads: str = "likelihoods"
) -> Course:
    """Checks flags and files and reads the lessons.

    Args:
      settings: the flags.
      compose: makes the loss.
      kind: "demonstrations" or "preferences".
      reads: "likelihoods" of a policy or "rewards" of a value head: what the loss is given.

    Raises:
      ValueError: the first thing that cannot work, named, with its value and the way out.
    """
    found: list[list[Lesson]] = []

    def task(settings: Settings, tokenizer: Any) -> Task:
        assert isinstance(settings, SupervisedSettings)
        found.extend(_lessons(settings, kind, tokenizer))
        texts = [Example(max((t.tokens for t in one.texts), key=len), "", {}) for part in found for one in part]
        if settings.data is not None:
            return Task(Path(settings.data).stem, texts, texts, (), (), None, 1)
        return Task("arithmetic", texts, texts, (), (), arithmetic.demonstrations, 1)

    plain = Algorithm(chain(), reduce(negative_log_likelihood(), token_mean()))
    if settings.data is not None and settings.model is None and settings.warmstart_steps is None:
        settings = dataclasses.replace(settings, warmstart_steps=0)
    job = prepare(settings, lambda: plain, task)
    lessons, heldout = found
    loss = compose()
    given = {name for name, x in to_batch([*lessons, *heldout], 0)._asdict().items() if x is not None}
    policy_only = {"ref_logp"} if reads == "likelihoods" else set()
    missing = sorted(needs_of(loss) - given - policy_only)
    if missing:
        raise SettingsError(
            f"the loss reads {', '.join(missing)}, which {settings.data or 'the task'} does not provide"
        )
    return Course(job, lessons, heldout, loss, reads)


class Student(NamedTuple):
    """The model that learns and what goes with it, as this rank sees them.

    Attributes:
      learner: weights and optimizer state.
      reference: weights of the policy before the run, where the loss reads what it says.
      layouts: of the learner's weights.
      objective: what is minimised.
      optimizer: how.
      say: (params, rows) -> what the loss is given, [B, T].
      say_before: the same of the reference.
    """

    learner: Learner
    reference: trees.Tree
    layouts: trees.Tree
    objective: Objective
    optimizer: Transformation
    say: Forward
    say_before: Forward


def teach(course: Course, mesh: Mesh, run_dir: str | None) -> Outcome:
    """The whole run, on this rank: arguments and result are those of `loop.train`."""
    job, clock = course.job, Clock()
    settings, count = job.settings, job.settings.batch_prompts
    with Observer(job, run_dir if mesh.rank == 0 else None) as observer:
        student = _student(course, mesh, observer)
        held = _rows(course, student, course.heldout, mesh)
        first = last = _evaluate(course, student, held, mesh)
        for step in range(1, settings.steps + 1):
            drawn = prompt_batch(course.lessons, count, settings.seed, (step - 1) * count)
            with clock.phase("ref"):
                rows = _rows(course, student, drawn, mesh)
            with clock.phase("update_actor"):
                old = torch.zeros_like(rows.mask, dtype=_dtype(student))
                grads, metrics, loss = gradient(
                    student.objective, course.loss, student.learner.params, rows, old, mesh, settings.token_budget,
                    student.layouts,
                )  # fmt: skip
                metrics |= {"train/loss": loss, "actor/grad_norm": global_norm(grads, student.layouts, mesh)}
                student = student._replace(learner=update(student.optimizer, student.learner, grads))
            said = {name: float(x) for name, x in metrics.items()} | (first if step == 1 else {})
            if step % settings.eval_every == 0 or step == settings.steps:
                with clock.phase("eval"):
                    last = _evaluate(course, student, held, mesh)
                said |= last
            assert rows.length is not None
            said |= {"perf/total_num_tokens": float(rows.length.sum()), "memory/peak_gb": peak_memory_gb(mesh)}
            observer.step(step, said, clock.take())
        save = _save_rewards if course.reads == "rewards" else hf.save
        observer.finish(unshard(student.learner.params, student.layouts, mesh), None, save)
    return Outcome(first, last, None)


def _student(course: Course, mesh: Mesh, observer: Observer) -> Student:
    """Weights, layouts and functions."""
    job, settings = course.job, course.job.settings
    compiles = "off" if settings.remat == "selective" else settings.compile
    layer = rematerialized(compile_layer(job.config, compiles, mesh.device.type, observer.note), settings.remat)
    rules = train_rules(settings, "policy")
    lies = policy_lies = layouts(decoder.shapes(job.config), decoder.axes(job.config), rules, job.sizes)
    weights = warmstart.initial_weights(job, mesh, lies, layer, observer)
    reference = trees.clone(weights) if "ref_logp" in needs_of(course.loss) else None

    def likelihoods(params: trees.Tree, rows: Batch) -> list[Tensor]:
        whole = gathered(params, policy_lies, mesh, job.dtype)
        scores = token_scores(
            job.config, whole, rows.tokens, rows.positions, rows.segments, mesh, 1.0, ("logp",), rows.mask, layer
        )
        assert scores.logp is not None
        return [scores.logp]

    def rewards(params: trees.Tree, rows: Batch) -> list[Tensor]:
        whole = gathered(params, lies, mesh, job.dtype)
        return [value.apply(job.config, whole, rows.tokens, rows.positions, rows.segments, mesh, layer)]

    say: Forward = likelihoods
    objective = policy_objective(job.config, course.loss, mesh, 1.0, layer, job.dtype, lies)
    if course.reads == "rewards":
        say, weights = rewards, value.init(job.config, weights)
        lies = layouts(value.shapes(job.config), value.axes(job.config), rules, job.sizes)
        objective = value_objective(job.config, course.loss, mesh, layer, job.dtype, lies)
    optimizer = make_optimizer(settings, job.lr, settings.steps, lies, mesh)
    learner = Learner(weights, optimizer.init(weights))
    return Student(learner, reference, lies, objective, optimizer, say, likelihoods)


def _rows(course: Course, student: Student, lessons: Sequence[Lesson], mesh: Mesh) -> Batch:
    """The lessons as a batch, with what the reference says of them."""
    job = course.job
    batch = to_batch(lessons, job.pad, course.reads == "rewards", mesh.device)
    if batch.margin is not None:
        batch = batch._replace(margin=batch.margin.to(_dtype(student)))
    if student.reference is None:
        return batch
    (logp,) = score(student.say_before, student.reference, batch, mesh, job.settings.token_budget)
    return batch._replace(ref_logp=logp)


def _evaluate(course: Course, student: Student, held: Batch, mesh: Mesh) -> dict[str, float]:
    """The loss and its metrics on the held-out lessons."""
    (said,) = score(student.say, student.learner.params, held, mesh, course.job.settings.token_budget)
    fractions, metrics = course.loss(said, held)
    loss = {"eval/loss": sum(f.value.item() for f in fractions)}
    return loss | {f"eval/{name.rsplit('/', 1)[-1]}": f.value.item() for name, f in metrics.items()}


def _dtype(student: Student) -> torch.dtype:
    return trees.leaves(student.learner.params)[0].dtype


def _save_rewards(path: Any, config: Any, params: trees.Tree, tokenizer: Any) -> None:
    hf.save(path, config, params["decoder"], tokenizer, head_1D=params["value"])


def _lessons(settings: SupervisedSettings, kind: str, tokenizer: Any) -> tuple[list[Lesson], list[Lesson]]:
    """Training and held-out lessons."""
    if settings.data is not None:
        lessons = load_lessons(settings.data, kind, tokenizer)
        held = min(settings.eval_prompts, len(lessons) // 10)
        # With fewer than ten lessons there is none to spare: evaluation uses the training ones.
        return (lessons[:-held], lessons[-held:]) if held else (lessons, lessons)
    if settings.model is not None:
        raise SettingsError(f"--model={settings.model} needs --data=FILE.jsonl")
    names = ("prompt", "completion") if kind == "demonstrations" else ("prompt", "chosen", "rejected")
    records: list[list[dict[Any, Any]]] = []
    splits: tuple[tuple[int, int, arithmetic.Split], ...] = (
        (settings.seed, LESSONS, "train"), (0, settings.eval_prompts, "heldout"),
    )  # fmt: skip
    for seed, count, split in splits:
        if kind == "preferences":
            found = arithmetic.preferences(seed, count, split=split)
        elif split == "train":
            found = arithmetic.demonstrations(seed, count, error=0.0)
        else:
            found = [(p.prompt, p.fields["answer"]) for p in arithmetic.heldout_prompts(count)]
        records.append([dict(zip(names, row, strict=True)) for row in found])
    train, heldout = ([lesson(record, kind, tokenizer) for record in part] for part in records)
    return train, heldout
