"""What learning from given texts will cost, before it is started: `dry_run.py` for the functions of `supervise.py`.

    python -m funrl.experiments.sft --mesh=dp64,tp8 --model=CONFIG.json --dry_run

Every text is taken to be of full length, and every token of it but the first to be learnt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from funrl import trees
from funrl.algos.core import Loss, needs_of
from funrl.batch import Batch
from funrl.cost.costs import Costs
from funrl.cost.dry_run import plain_job
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
    tracer_of,
)
from funrl.cost.hardware import Hardware
from funrl.data.supervised import FIELDS, Lesson, Text
from funrl.mesh.mesh import Mesh
from funrl.models import decoder, value
from funrl.tasks import arithmetic
from funrl.trainer import supervise
from funrl.trainer.settings import SettingsError
from funrl.trainer.supervise import Course, Methods, SupervisedSettings

TEXT_TOKENS = 1024  # of a text, where neither a flag nor the embedded task says


def plain_course(
    settings: SupervisedSettings, compose: Callable[[], Loss], memory: float, kind: str, reads: str
) -> Course:
    """The course that the flags describe, as far as its costs go: nothing but config.json is read.

    Args: as in `dry_run.plain_job` and `supervise.prepare_course`.

    Raises:
      ValueError: the first thing that cannot work.
    """
    loss = compose()
    job = plain_job(settings, lambda: supervise.PLAIN, memory, supervise.models_of_course(loss, reads))
    course = Course(job, (), (), loss, reads, kind)
    supervise.check_loss(loss, reads, full_batch(course, 2, 1), f"a file of {kind}")
    return course


def text_tokens_of(settings: SupervisedSettings, kind: str) -> int:
    """Tokens of a text: the longest of the embedded task."""
    if settings.model is not None or settings.data is not None:
        return TEXT_TOKENS
    train, heldout = supervise.lessons_of(settings, kind, arithmetic.tokenizer())
    return max(len(text.tokens) for one in (*train, *heldout) for text in one.texts)


def estimate(course: Course, text_tokens: int, hardware: Hardware) -> Estimate:
    """What an update costs each rank of the course's mesh, by phase."""
    job, width = course.job, _width(course, text_tokens)
    if text_tokens + (course.reads == "rewards") > job.config.max_positions:
        raise SettingsError(
            f"--text_tokens={text_tokens} is more than the model's {job.config.max_positions} positions"
        )
    with pretended(job.sizes) as mesh:
        found = of_all_layers(job, lambda job: _phases(course._replace(job=job), mesh, text_tokens, hardware))
        axes = axes_of(mesh)
    rows, texts = job.settings.batch_prompts, len(FIELDS[course.kind])
    each = f"{texts} texts of {text_tokens:,} tokens" if texts > 1 else f"{text_tokens:,} tokens"
    return Estimate(
        job=job,
        models=course.models,
        step=f"{rows:,} {course.kind}, each {each}, all of full length and learnt",
        tokens=width,
        phases=found,
        axes=axes,
        parameters=trees.count((value if course.reads == "rewards" else decoder).shapes(job.config)),
        left_out=("tokenizer", "files", f"the evaluation every {job.settings.eval_every} steps"),
    )


def _width(course: Course, text_tokens: int) -> int:
    """Tokens of a row: all its texts, each with one token more where a value head reads at its end."""
    return len(FIELDS[course.kind]) * (text_tokens + (course.reads == "rewards"))


def _phases(course: Course, mesh: Mesh, text_tokens: int, hardware: Hardware) -> dict[str, Costs]:
    methods, ranks = supervise.build(course, mesh, lambda _: None), mesh.size(mesh.row_axes)
    at = functools.cache(lambda local: trace(course, methods, text_tokens, local * ranks, hardware))
    local = math.ceil(course.job.settings.batch_prompts / ranks)
    return at_rows(at, local, micro_batch(course.job, _width(course, text_tokens)), ranks)


def trace(
    course: Course, methods: Methods, text_tokens: int, rows: int, hardware: Hardware, real: bool = False
) -> Trace:
    """Learns from a batch once, with the trainer's own functions.

    Args:
      methods: made by `supervise.build` on a mesh, which may be `pretended`.
      text_tokens: of each text.
      rows: of all ranks.
      real: compute what is counted, instead of pretending.
    """
    job = course.job
    tracer = tracer_of(job, [methods.decoder_layouts, methods.layouts, methods.reference_layouts], hardware, real)
    clock, reference = TracedClock(tracer), None
    weights = make_weights(tracer, methods.layouts, job.master)
    if "reference" in course.models:
        reference = make_weights(tracer, methods.reference_layouts, job.dtype)
    batch = full_batch(course, text_tokens, rows)
    tracer.hold_tree(batch, "batch")
    with tracer:
        student = supervise.first_student(course, methods, weights, reference)
        tracer.hold_tree(student.learner.opt_state, "optimizer")
        resting = {kind: tracer.held[kind] for kind in ("weights", "optimizer")}
        batch = supervise.judge(course, methods, student, batch, clock)
        supervise.learn(course, methods, student, batch, 1, clock)
    return Trace(tracer.phases, resting, trees.nbytes(batch) / rows)


def full_batch(course: Course, text_tokens: int, rows: int) -> Batch:
    """Lessons of full length; the same on every rank."""
    text = Text([i % course.job.config.vocab for i in range(text_tokens)], [i > 0 for i in range(text_tokens)])
    margin = 0.0 if "margin" in needs_of(course.loss) else None
    one = supervise.batch_of(course, [Lesson((text,) * len(FIELDS[course.kind]), margin)], torch.device("cpu"))
    return trees.map(lambda x: x.expand(rows, *x.shape[1:]).clone(), one)
