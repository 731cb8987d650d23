"""Learning from demonstrations and preferences: the trainer's gradient and update, without rollouts.

    lessons -> (reference) -> gradient -> update -> (next step)

It runs on every rank alike, on the same meshes as `loop.py`, and what a run leaves behind is the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
from funrl.data.prompts import prompt_batch
from funrl.data.supervised import Lesson, check_lengths, lesson, load_lessons, to_batch
from funrl.mesh.mesh import Mesh
from funrl.mesh.reshard import copied, export_weights, unshard
from funrl.mesh.rules import layouts
from funrl.models import decoder, hf, value
from funrl.models.compile import compile_layer
from funrl.models.remat import rematerialized
from funrl.models.scores import token_scores
from funrl.optim import Transformation, global_norm
from funrl.tasks import arithmetic
from funrl.track.observe import Observer
from funrl.trainer import warmstart
from funrl.trainer.job import Job, Task, prepare
from funrl.trainer.loop import Outcome
from funrl.trainer.optimizer import make_optimizer
from funrl.trainer.rollout import Example
from funrl.trainer.settings import Settings, SettingsError
from funrl.trainer.sharding import train_rules
from funrl.trainer.spmd import Clock, peak_memory_gb
from funrl.trainer.step import (
    Divergence,
    Forward,
    Learner,
    Objective,
    check_finite,
    gathered,
    gradient,
    policy_objective,
    score,
    update,
    value_objective,
)

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
    text_tokens: int | None = _flag(
        None,
        "job",
        "tokens of a prompt and its completion that --dry_run takes; default: the embedded task's longest, else 1024",
    )
    fsdp_models: str | None = _flag(
        None, "devices", "which models --fsdp shards: some of policy,reference,reward_model; default: all"
    )


HIDDEN = (
    "generate_mesh", "prompts", "reward", "reward_weights", "teacher", "teacher_top_k", "samples_per_prompt",
    "max_new_tokens", "temperature", "top_k", "top_p", "max_refills", "critic_lr", "reward_lr", "critic_warmup_steps",
    "epochs", "minibatches", "eval_temperature", "sample_every", "offload", "prompt_tokens",
)  # fmt: skip


class Course(NamedTuple):
    """A supervised run, checked and ready to start.

    Attributes:
      job: settings, mesh, model, optimizer numbers.
      lessons, heldout: to train on, and to evaluate on.
      loss: of log-probabilities, or of a value head's numbers where `reads` is "rewards".
      kind: of lessons, "demonstrations" or "preferences".
    """

    job: Job
    lessons: Sequence[Lesson]
    heldout: Sequence[Lesson]
    loss: Loss
    reads: str
    kind: str

    @property
    def models(self) -> tuple[str, ...]:
        """Those of `sharding.MODELS` that the run has, the one that learns first."""
        return models_of_course(self.loss, self.reads)

    @property
    def sizes(self) -> dict[str, int]:
        return self.job.sizes

    @property
    def device(self) -> str:
        return self.job.device


PLAIN = Algorithm(chain(), reduce(negative_log_likelihood(), token_mean()))  # stands for a course's in its job


def models_of_course(loss: Loss, reads: str) -> tuple[str, ...]:
    """Those of `sharding.MODELS` that learning by this loss has; the arguments are fields of `Course`."""
    if reads == "rewards":
        return ("reward_model",)
    return ("policy", "reference") if "ref_logp" in needs_of(loss) else ("policy",)


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
        if reads == "rewards" and tokenizer.pad_token_id is None:  # transformers needs one to read rewards of a batch
            tokenizer.pad_token = tokenizer.eos_token
        found.extend(lessons_of(settings, kind, tokenizer))
        config = arithmetic.model_config() if settings.model is None else hf.check(settings.model)
        every = {id(one): one for part in found for one in part}  # the held-out ones may be those of training
        check_lengths([*every.values()], config.max_positions, tokenizer)
        # To a job a text is a prompt and one new token.
        texts = [Example(max((t.tokens[:-1] for t in one.texts), key=len), "", {}) for part in found for one in part]
        if settings.data is not None:
            return Task(Path(settings.data).stem, texts, texts, (), (), None, 1)
        return Task("arithmetic", texts, texts, (), (), arithmetic.demonstrations, 1)

    if settings.data is not None and settings.model is None and settings.warmstart_steps is None:
        settings = dataclasses.replace(settings, warmstart_steps=0)
    loss = compose()
    job = prepare(settings, lambda: PLAIN, task, models_of_course(loss, reads))
    lessons, heldout = found
    check_loss(loss, reads, to_batch([*lessons, *heldout], 0), settings.data or "the task")
    return Course(job, lessons, heldout, loss, reads, kind)


def check_loss(loss: Loss, reads: str, batch: Batch, source: str) -> None:
    """Compares what a loss reads with what a batch of lessons has.

    Raises:
      SettingsError: naming what is missing, and `source`, which should have provided it.
    """
    given = {name for name, x in batch._asdict().items() if x is not None}
    policy_only = {"ref_logp"} if reads == "likelihoods" else set()
    missing = sorted(needs_of(loss) - given - policy_only)
    if missing:
        raise SettingsError(f"the loss reads {', '.join(missing)}, which {source} does not provide")


class Methods(NamedTuple):
    """What is made once, as this rank sees it.

    Attributes:
      decoder_layouts: of the weights that the run begins with.
      layouts: of the learner's weights; those of a decoder, or of one with a value head.
      reference_layouts: of the reference's.
      layer: a replacement of `decoder.decoder_layer`, or None.
      objective: what is minimised.
      optimizer: how.
      say: (params, rows) -> what the loss is given, [B, T].
      say_before: the same of the reference.
    """

    mesh: Mesh
    decoder_layouts: trees.Tree
    layouts: trees.Tree
    reference_layouts: trees.Tree
    layer: Callable | None
    objective: Objective
    optimizer: Transformation
    say: Forward
    say_before: Forward


class Student(NamedTuple):
    """The model that learns; and the policy before the run, where the loss reads what it says."""

    learner: Learner
    reference: trees.Tree


def teach(course: Course, mesh: Mesh, run_dir: str | None) -> Outcome:
    """The whole run, on this rank: arguments and result are those of `loop.train`.

    A loss or a gradient that is not finite ends the run; what is saved is the model before that update.
    """
    job, clock = course.job, Clock()
    settings, count = job.settings, job.settings.batch_prompts
    with Observer(job, run_dir if mesh.rank == 0 else None) as observer:
        methods = build(course, mesh, observer.note)
        weights = warmstart.initial_weights(job, mesh, methods.decoder_layouts, methods.layer, observer)
        student = first_student(course, methods, *first_weights(course, methods, weights))
        held = judge(course, methods, student, batch_of(course, course.heldout, mesh.device), Clock())
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        error = None
        try:
            first = last = _evaluate(course, methods, student, held, 0)
            for step in range(1, settings.steps + 1):
                drawn = prompt_batch(course.lessons, count, settings.seed, (step - 1) * count)
                rows = judge(course, methods, student, batch_of(course, drawn, mesh.device), clock)
                student, said = learn(course, methods, student, rows, step, clock)
                said |= first if step == 1 else {}
                if step % settings.eval_every == 0 or step == settings.steps:
                    with clock.phase("eval"):
                        last = _evaluate(course, methods, student, held, step)
                    said |= last
                assert rows.length is not None
                said |= {"perf/total_num_tokens": float(rows.length.sum()), "memory/peak_gb": peak_memory_gb(mesh)}
                observer.step(step, said, clock.take())
        except Divergence as failure:
            error = str(failure)
        params, lies, head_1D = student.learner.params, methods.layouts, None
        if course.reads == "rewards":
            head_1D = unshard(params["value"], lies["value"], mesh)
            params, lies = params["decoder"], lies["decoder"]
        observer.finish(export_weights(params, lies, mesh, hf.hf_names(job.config)), error, head_1D)
    return Outcome(first, last, error)


def build(course: Course, mesh: Mesh, note: Callable[[str], None]) -> Methods:
    """Layouts and functions. Called by every rank."""
    job, settings = course.job, course.job.settings
    compiles = "off" if settings.remat == "selective" else settings.compile
    layer = compile_layer(job.config, compiles, mesh.device.type, note)
    layer = rematerialized(layer, settings.remat)
    rules = train_rules(settings, course.models[0])
    shapes, axes = decoder.shapes(job.config), decoder.axes(job.config)
    decoder_lies = lies = layouts(shapes, axes, rules, job.sizes)
    reference_lies = layouts(shapes, axes, train_rules(settings, "reference"), job.sizes)

    def likelihoods(lies: trees.Tree, params: trees.Tree, rows: Batch) -> list[Tensor]:
        whole = gathered(params, lies, mesh, job.dtype)
        scores = token_scores(
            job.config, whole, rows.tokens, rows.positions, rows.segments, mesh, 1.0, ("logp",), rows.mask, layer
        )
        assert scores.logp is not None
        return [scores.logp]

    def rewards(params: trees.Tree, rows: Batch) -> list[Tensor]:
        whole = gathered(params, lies, mesh, job.dtype)
        return [value.apply(job.config, whole, rows.tokens, rows.positions, rows.segments, mesh, layer)]

    if course.reads == "rewards":
        lies = layouts(value.shapes(job.config), value.axes(job.config), rules, job.sizes)
        say, objective = rewards, value_objective(job.config, course.loss, mesh, layer, job.dtype, lies)
    else:
        say = functools.partial(likelihoods, lies)
        objective = policy_objective(job.config, course.loss, mesh, 1.0, layer, job.dtype, lies)
    optimizer = make_optimizer(settings, job.lr, settings.steps, lies, mesh)
    say_before = functools.partial(likelihoods, reference_lies)
    return Methods(mesh, decoder_lies, lies, reference_lies, layer, objective, optimizer, say, say_before)


def first_weights(course: Course, methods: Methods, weights: trees.Tree) -> tuple[trees.Tree, trees.Tree]:
    """The learner's weights and the reference's, of a decoder that is given up."""
    reference = None
    if "reference" in course.models:
        reference = copied(weights, methods.decoder_layouts, methods.reference_layouts, methods.mesh, course.job.dtype)
    return value.init(course.job.config, weights) if course.reads == "rewards" else weights, reference


def first_student(course: Course, methods: Methods, weights: trees.Tree, reference: trees.Tree) -> Student:
    """The student before the first update, of weights that it takes over."""
    return Student(Learner(weights, methods.optimizer.init(weights)), reference)


def judge(course: Course, methods: Methods, student: Student, batch: Batch, clock: Clock) -> Batch:
    """The batch with what the reference says of it, where there is one."""
    if student.reference is None:
        return batch
    with clock.phase("ref"):
        (logp,) = score(methods.say_before, student.reference, batch, methods.mesh, course.job.settings.token_budget)
    return batch._replace(ref_logp=logp)


def learn(
    course: Course, methods: Methods, student: Student, rows: Batch, step: int, clock: Clock
) -> tuple[Student, dict[str, float]]:
    """One update on a judged batch, and what there is to say of it.

    Raises:
      Divergence: naming the step; the student has not changed.
    """
    with clock.phase("update_actor"):
        old = torch.zeros_like(rows.mask, dtype=course.job.master)
        grads, metrics, loss = gradient(
            methods.objective, course.loss, student.learner.params, rows, old, methods.mesh,
            course.job.settings.token_budget, methods.layouts,
        )  # fmt: skip
        norm = global_norm(grads, methods.layouts, methods.mesh)
        check_finite(loss, norm, f"step {step}")
        metrics |= {"train/loss": loss, "actor/grad_norm": norm}
        student = student._replace(learner=update(methods.optimizer, student.learner, grads))
    return student, {name: float(x) for name, x in metrics.items()}


def batch_of(course: Course, lessons: Sequence[Lesson], device: torch.device) -> Batch:
    """Lessons as rows, one a lesson."""
    batch = to_batch(lessons, course.job.pad, course.reads == "rewards", device)
    return batch if batch.margin is None else batch._replace(margin=batch.margin.to(course.job.master))


def _evaluate(course: Course, methods: Methods, student: Student, held: Batch, step: int) -> dict[str, float]:
    """The loss and its metrics on the held-out lessons.

    Raises:
      Divergence: the loss is not finite after `step` updates.
    """
    (said,) = score(methods.say, student.learner.params, held, methods.mesh, course.job.settings.token_budget)
    fractions, metrics = course.loss(said, held)
    loss = {"eval/loss": sum(f.value.item() for f in fractions)}
    if not math.isfinite(loss["eval/loss"]):
        when = f"after step {step}; a lower --lr may prevent it" if step else "before the first step"
        raise Divergence(f"the held-out loss is {loss['eval/loss']} {when}")
    return loss | {f"eval/{name.rsplit('/', 1)[-1]}": f.value.item() for name, f in metrics.items()}


def lessons_of(settings: SupervisedSettings, kind: str, tokenizer: Any) -> tuple[list[Lesson], list[Lesson]]:
    """Training and held-out lessons, of a file or of the embedded task."""
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
