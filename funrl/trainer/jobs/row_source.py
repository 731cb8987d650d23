"""The source of a job: its prompts, rewards and engine, or its texts; the workers that run its rewards."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Iterator, Mapping, Sequence

from funrl import trees
from funrl.algos.checking import learns_alone
from funrl.algos.core import Algorithm
from funrl.algos.filters.by_row import every, rewarded
from funrl.algos.objectives import OBJECTIVE, OBJECTIVE_FIELD
from funrl.algos.reading import reads
from funrl.algos.terms import Filter
from funrl.data.pictures import picture_form_of
from funrl.data.prompt_format import template_arguments, tools_of
from funrl.data.prompts import Example
from funrl.data.tokenizer import load_tokenizer
from funrl.environments.agents import with_environment
from funrl.environments.answer_rewards import CompletionReader
from funrl.environments.chat import ChatOptions, TemplateChat, template_limits
from funrl.environments.environment import Environment
from funrl.environments.hosted import HostedEnvironment, open_hosted
from funrl.environments.run import EpisodeLimits
from funrl.fields import DATA_SOURCE, SOURCE_FIELDS
from funrl.loading import load_function
from funrl.mesh.launch import cores, local_ranks
from funrl.mesh.mesh import Mesh
from funrl.models.huggingface.generation_config import GENERATION
from funrl.processes.stall_monitor import duration
from funrl.processes.watch import WaitLimits
from funrl.rewards.pool import Pool, open_pool
from funrl.serve.endpoint import serve_agent
from funrl.trainer.jobs.datasets import format_of, has_workers, step_separator
from funrl.trainer.jobs.demonstrations import DemonstrationReader, learns_from_demonstrations, text_rows
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.models import TEACHER, teachers_of
from funrl.trainer.jobs.prepare import inherited
from funrl.trainer.jobs.sharding import replica_sizes
from funrl.trainer.jobs.text_samples import text_samples
from funrl.trainer.partial_rollouts.source import partial_source
from funrl.trainer.settings.checks import difficulty_of, names_of_fields
from funrl.trainer.settings.scorers import JUDGE, scorers_of
from funrl.trainer.settings.settings import reward_timeout_of, scoring_budget
from funrl.trainer.sources.completion_scores import (
    Rescore,
    RewardModel,
    Scorer,
    as_read,
    scored_in_order,
    with_completion_scores,
    with_step_scores,
)
from funrl.trainer.sources.curriculum import PromptSchedule, weighing
from funrl.trainer.sources.episode_rows import EpisodeSetup
from funrl.trainer.sources.evaluation import PromptEvaluation, source_names, source_of, verdicts
from funrl.trainer.sources.generation import RewardedEngine, RowForm, SourceNumber
from funrl.trainer.sources.judging import with_verdicts
from funrl.trainer.sources.observing import Show, shows_samples
from funrl.trainer.sources.own_texts import Reader, read_steps, read_texts, reads_tokens
from funrl.trainer.sources.pair_rows import SAMPLED_PAIRS, pair_source
from funrl.trainer.sources.prompts import prompt_source
from funrl.trainer.sources.source import Generation, RowSelection, ScoreColumns, Source
from funrl.trainer.sources.teacher_prompts import TeacherPrompts, prompt_maker
from funrl.trainer.sources.teacher_tokens import TeacherReader, TeacherTokens
from funrl.trainer.sources.texts import LossEvaluation, TextData, text_source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts, Judge, Parts
from funrl.trainer.steps.roles import Role

FEW_HELD_OUT = 20  # examples, below which a remark says so
MOST_WORKERS = 16  # of a rank, where no flag says how many


@contextlib.contextmanager
def open_rewards(job: Job, rank: int) -> Iterator[Pool | None]:
    """A rank's reward workers and those of its environment, for as long as the context lasts; None: it has no former.

    Enter it before the rank has process groups, threads or a device; see `open_pool`. Only the first tensor rank of a
    replica asks for rewards, so only it has workers.
    """
    if not isinstance(job, RLJob) or not runs_episodes(job, rank):
        yield None
        return
    settings = job.settings
    rewards = job.task.rewards
    with contextlib.ExitStack() as stack:
        if isinstance(job.task.environment, HostedEnvironment):
            stack.enter_context(open_hosted(job.task.environment, chat_of(job), serve_agent))
        if not has_workers(settings, rewards):
            yield None
            return
        workers = share_of_cores(job) if settings.rewards.reward_workers is None else settings.rewards.reward_workers
        timeout_s = reward_timeout_of(settings)
        most = MOST_WORKERS if settings.rewards.reward_workers is None else workers
        yield stack.enter_context(open_pool(rewards, workers, timeout_s, most))


def runs_episodes(job: RLJob, rank: int) -> bool:
    """True of the first tensor rank of a replica, which asks for rewards and runs environments."""
    if job.settings.devices.generators is not None:
        return False  # generators on Ray do
    if job.placement is not None:
        if rank not in job.placement.generate.ranks:
            return False
        rank = job.placement.generate.ranks.index(rank)
    return Mesh(replica_sizes(job.settings, job.generate_sizes), rank).index("tensor") == 0


def share_of_cores(job: Job) -> int:
    """The cores of this machine for each of its ranks that ask for rewards, within bounds."""
    return max(1, min(MOST_WORKERS, int(cores() / max(replicas_here(job), 1))))


def replicas_here(job: Job) -> float:
    """Engine replicas per machine; with a placement, assume machines full of generators."""
    generating = Mesh(job.generate_sizes).world
    return (
        min(generating, local_ranks(Mesh(job.launched).world))
        / replica_sizes(job.settings, job.generate_sizes)["tensor"]
    )


def make_source(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show) -> Source:
    """The source of the rows that a job trains on."""
    if isinstance(job, RLJob):
        assert isinstance(parts, GeneratingParts)
        return source_of_generation(job, parts, remarked_generation(job, parts, frozen, clock, show), clock, show)
    settings = job.settings
    task = job.task
    remarks = remarks_on_counts(settings.run.batch_prompts, len(task.examples), len(task.heldout), "texts")
    for remark in (*task.remarks, *remarks):
        show.note(remark)
    to_rows = functools.partial(text_rows, job, parts.mesh)
    data = TextData(task.examples, task.heldout, to_rows, settings.run.batch_prompts, settings.run.seed)
    sample = text_samples(job, parts, frozen, show)
    evaluation = LossEvaluation(parts.roles, frozen, scoring_budget(settings), job.algorithm.advantage, sample)
    return text_source(data, evaluation, clock, show)


def source_of_generation(
    job: RLJob, parts: GeneratingParts, generation: Generation, clock: Clock, show: Show
) -> Source:
    """The source of a job whose generation is known."""
    if job.settings.sampling.new_tokens_per_step is None:
        source = prompt_source(generation, clock, show)
    else:
        source = partial_source(generation, job.settings.sampling.new_tokens_per_step, clock, show)
    if job.algorithm.example in SAMPLED_PAIRS:
        source = pair_source(source, job.reward_names)
    return source


def remarked_generation(
    job: RLJob, parts: GeneratingParts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show
) -> Generation:
    """`generation_of`, after remarks on the prompts and flags of the job."""
    settings = job.settings
    task = job.task
    remarks = (
        *remarks_on_counts(settings.run.batch_prompts, len(task.prompts), len(task.heldout), "prompts"),
        *remarks_on_groups(job.sampling.samples, job.algorithm),
        *remarks_on_sampling(job, "eval_"),
    )
    for remark in (*task.remarks, *remarks):
        show.note(remark)
    generation = generation_of(job, parts, frozen, clock, show)
    if generation.episodes is not None and generation.episodes.chat is not None:
        # a small decoder of an embedded task needs no description of its one tool
        tools = bool(getattr(generation.episodes.environment, "tools", ())) and not task.embedded
        for line in template_limits(generation.episodes.chat, tools):
            show.note(line)
    return generation


def remarks_on_counts(batch: int, examples: int, heldout: int, name: str) -> list[str]:
    """Remarks where a step draws more examples than there are, or one held-out example alone moves their mean.

    Args:
      examples: number of them to train on.
      name: of the examples, in the plural.
    """
    remarks = []
    if batch > examples:
        there = f"there are {examples} {name}" if examples > 1 else f"there is 1 {name.removesuffix('s')}"
        remarks.append(f"--batch_prompts={batch}: {there} to train on, so a step has some more than once")
    if 0 < heldout < FEW_HELD_OUT:
        noun = name if heldout > 1 else name.removesuffix("s")
        remarks.append(f"{heldout} held-out {noun}: one alone moves a mean over them by {1 / heldout:.0%} of its range")
    return remarks


def remarks_on_groups(samples: int, algorithm: Algorithm) -> list[str]:
    """A remark where completions are compared with others of their prompt, and there are none.

    Args:
      samples: completions of a prompt.
    """
    remark = (
        f"--samples_per_prompt={samples}: the algorithm compares completions of the same prompt, and learns nothing "
        "from the reward of a single one; give 2 or more"
    )
    return [remark] if samples == 1 and (algorithm.example == "pair" or not learns_alone(algorithm)) else []


def remarks_on_sampling(job: RLJob, prefix: str) -> list[str]:
    """Remarks on what evaluation takes from the model's generation_config.json.

    Args:
      prefix: of the flags that would come before it.
    """
    taken = inherited(job)
    values = ", ".join(f"{name} {value}" for name, value in taken.items())
    remark = f"evaluation: {values}, as the model's {GENERATION} says; --{prefix}{next(iter(taken), '')} overrides it"
    return [remark] if taken else []


def generation_of(
    job: RLJob, parts: GeneratingParts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show
) -> Generation:
    """Everything that the source of a job's prompts needs."""
    settings = job.settings
    task = job.task
    weights = task.weights[: max(len(task.rewards), task.environment is not None)]
    difficulty = None if settings.examples.difficulty is None else difficulty_of(settings.examples.difficulty)
    expects = "prompt_value" in reads(job.algorithm).required
    weighted = weighing(task.prompts, task.curriculum, difficulty, weights, parts.mesh, expects=expects)
    solved = verdicts(weights) if weights else None
    demonstrates = learns_from_demonstrations(job.algorithm)
    return Generation(
        engine=rewarded_engine(job, parts, show),
        schedule=PromptSchedule(task.prompts, settings.run.batch_prompts, settings.run.seed, weighted),
        sampling=job.sampling,
        evaluation=PromptEvaluation(task.heldout, job.eval_sampling, solved),
        selection=RowSelection(filter_of(job), settings.sampling.empty_filter, settings.sampling.max_refills),
        demonstrate=demonstrations_of(job).beside if demonstrates else None,
        rewards=ScoreColumns(job.reward_names, rescoring(job, parts, frozen, clock, show)),
        expects=expects,
        greedy_baseline="greedy_score" in reads(job.algorithm).required,
        shows=functools.partial(shows_samples, settings.run.steps, settings.outputs.sample_every),
        form=RowForm(
            pad=job.pad,
            versions=settings.asynchrony.staleness > 0,
            digests=settings.engines.verify_sync,
            raw=settings.sampling.raw_logp,
            kept=settings.sampling.mask_replay,
            context=teacher_prompts_of(job),
            numbers=source_numbers(job),
            teacher_tokens=teacher_tokens_of(job),
            choices=job.model.abilities.choices if settings.routers.router_replay else 0,
        ),
        episodes=None if task.environment is None else episode_setup(job, task.environment),
    )


def source_numbers(job: RLJob) -> tuple[SourceNumber, ...]:
    """The numbers of a prompt's source that rows have: that of its objective, and that by which roles score."""
    fields = {OBJECTIVE: (OBJECTIVE_FIELD, job.algorithm.objectives)}
    fields[DATA_SOURCE] = (SOURCE_FIELDS[DATA_SOURCE], job.role_sources)
    name_of = source_names(job.task.prompts)

    def number_of(sources: Sequence[str], example: Example) -> int:
        source = name_of(example)
        return sources.index(source) if source in sources else -1

    return tuple(
        SourceNumber(name, field, functools.partial(number_of, sources))
        for name, (field, sources) in fields.items()
        if sources
    )


def teacher_prompts_of(job: RLJob) -> TeacherPrompts | None:
    """Maker of the prompts of --teacher_context; None: the teacher has the policy's."""
    flags = job.settings
    if flags.models.teacher_context is None:
        return None
    form = format_of(flags, names_of_fields(flags))
    return TeacherPrompts(
        prompt_maker(flags.models.teacher_context, functools.partial(load_function, "teacher_context")),
        job.tokenizer,
        lambda example: tools_of(example.fields.get("tools"), form),
        form.arguments,
        min(model.config.max_positions for model in teachers_of(job.models, job.algorithm)),
    )


def teacher_tokens_of(job: RLJob) -> TeacherTokens | None:
    """Reader of rows for teachers with tokenizers of their own; None: there are none."""
    if not job.tokenizers:
        return None
    readers = {
        name: TeacherReader(name.replace("_", " "), tokenizer, job.models[name].config.max_positions)
        for name, tokenizer in job.tokenizers.items()
    }
    of_source = {source: reader for name, reader in readers.items() for source in job.kind_of_role(name).sources}
    name_of = source_names(job.task.prompts)
    form = format_of(job.settings, names_of_fields(job.settings))
    return TeacherTokens(
        (lambda example: of_source.get(name_of(example))) if of_source else lambda example: readers[TEACHER],
        job.tokenizer,
        lambda example: tools_of(example.fields.get("tools"), form),
        form.arguments,
    )


def episode_setup(job: RLJob, environment: Environment) -> EpisodeSetup:
    """Setup of the episodes of a job."""
    flags = job.settings.environments
    limits = EpisodeLimits(
        turns=flags.episode_turns,
        length=job.model.config.max_positions,
        tokens=flags.episode_tokens or 0,
        environment_s=flags.env_timeout,
        retries=flags.episode_retries,
        waiting=flags.max_waiting,
        fixed=job.settings.engines.queue == "fixed",
    )
    chat = chat_of(job)
    choices = job.model.abilities.choices if job.settings.routers.router_replay else 0
    agents = with_environment(job.agents, environment)
    models = agents.models
    frozen = tuple(agent for agent in models if agent not in agents.trained)
    in_parts = job.settings.sampling.new_tokens_per_step is not None  # such episodes cannot be repeated
    versions = in_parts or job.settings.asynchrony.staleness > 0
    owned = None if job.model.owned is None else job.model.owned.none
    form = RowForm(agents.trained, frozen, pad=job.pad, versions=versions, choices=choices, owned=owned)
    form = form._replace(pictures=picture_form_of(job.tokenizer), numbers=source_numbers(job))
    form = form._replace(kept=job.settings.sampling.mask_replay, raw=job.settings.sampling.raw_logp)
    form = form._replace(digests=job.settings.engines.verify_sync)
    log = [] if job.settings.run.save_rollouts and not in_parts else None
    return EpisodeSetup(environment, chat, limits, form, models=models, log=log, source_of=source_of(job.task.prompts))


def chat_of(job: RLJob) -> TemplateChat:
    """The chat of a job's tokenizer and template arguments."""
    arguments = job.settings.formatting.template_arguments
    flags = job.settings.environments
    options = ChatOptions(flags.tool_parser or "", flags.tool_tokens, flags.history)
    return TemplateChat(job.tokenizer, None if arguments is None else template_arguments(arguments), options)


def rewarded_engine(job: RLJob, parts: GeneratingParts, show: Show) -> RewardedEngine:
    """The engine of a job with the rewards of its task."""
    generator = parts.generator
    rewards = job.task.rewards
    return RewardedEngine(
        generator.serving,
        generator.mesh,
        decode=functools.partial(job.tokenizer.decode, skip_special_tokens=True),
        pool=parts.pool or Pool(rewards),
        weights=job.task.weights[: max(len(rewards), job.task.environment is not None)],
        queue=job.settings.engines.queue,
        on_error=job.settings.rewards.on_reward_error,
        note=show.note,
        proof=generator.proof,
        read=CompletionReader(chat_of(job), job.stop).views,
    )


def demonstrations_of(job: RLJob) -> DemonstrationReader:
    """The reader of the demonstrations of a job's prompts."""
    paired = job.algorithm.example == "demonstrated"
    form = format_of(job.settings, names_of_fields(job.settings))
    most = job.model.config.max_positions
    return DemonstrationReader(job.task.demonstration_field, job.tokenizer, form, most, job.pad, paired)


def filter_of(job: Job) -> Filter | None:
    """The rewarded rows that are worth training on."""
    filter = job.algorithm.filter
    if job.settings.rewards.on_reward_error != "skip":
        return filter
    return rewarded() if filter is None else every(rewarded(), filter)


def rescoring(
    job: RLJob, parts: GeneratingParts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show
) -> Rescore | None:
    """A function that adds the scores of models to rows; None on ranks that do not train, or without such a model."""
    names = scorers_of(job.settings)
    if not names or not parts.mesh.here:
        return None
    asked = asked_scorers(parts, show)
    scorers = {name: asked.get(name) or completion_scorer(job, parts, name, frozen.get(name), show) for name in names}
    return scored_in_order(scorers, clock)


def asked_scorers(parts: GeneratingParts, show: Show) -> dict[str, Scorer]:
    """Scores by models of other ranks, by name."""
    return {name: functools.partial(model.rewarded, note=show.note) for name, model in parts.remote_rewards.items()}


def completion_scorer(job: RLJob, parts: Parts, name: str, params: trees.Tree, show: Show) -> Scorer:
    """Scores by a model of this rank, of `scorers_of`.

    Args:
      params: this rank's weights; of a judge None, whose engine has them.
    """
    weights = job.task.weights[len(job.task.rewards) :]
    weight = weights[scorers_of(job.settings).index(name)]
    if name == JUDGE and parts.judge is not None:
        return verdict_scorer(job, parts.judge, weight, show)
    return model_scorer(job, parts.roles[name], name, params, weight)


def verdict_scorer(job: RLJob, judge: Judge, weight: float, show: Show) -> Scorer:
    """Scores by the verdicts of a judge; the first verdict is shown."""
    shown: list[str] = []

    def note(text: str) -> None:
        if not shown:
            show.note(text)
        shown.append(text)

    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    return functools.partial(with_verdicts, judge=judge, weight=weight, decode=decode, note=note)


def model_scorer(job: RLJob, role: Role, name: str, params: trees.Tree, weight: float) -> Scorer:
    """Scores by a reward model, of the whole completion or of its steps."""
    settings = job.settings
    config = role.placed.model.config
    tokenizer = load_tokenizer(job.directories[name])
    pads = (config.special_tokens.pad, tokenizer.pad_token_id, job.pad)
    pad = next(pad for pad in pads if pad is not None)
    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    separator = step_separator(settings, job.task.embedded)
    reader = Reader(name.replace("_", " "), tokenizer, decode, pad, config.max_positions, separator)
    model = RewardModel(role, params, weight, budget=scoring_budget(settings))
    if job.kind_of_role(name).reads == "steps":
        each = "token_reward" in reads(job.algorithm).optional
        reduction = settings.rewards.process_reward or ("each" if each else "min")
        read = functools.partial(read_steps, reader)
        return functools.partial(with_step_scores, model=model, reduction=reduction, read=read)
    if reads_tokens(tokenizer, job.tokenizer, job.task.prompts):
        return functools.partial(with_completion_scores, model=model, read=lambda rows, _: as_read(rows, pad))
    return functools.partial(with_completion_scores, model=model, read=functools.partial(read_texts, reader))


def waiting_of(job: Job) -> WaitLimits:
    """Limits of the waiting of a job's ranks, by its flags."""
    flags = job.settings.waiting
    reward = ""
    if isinstance(job, RLJob) and job.task.rewards:
        reward = "; nothing ends a reward function that runs without workers (--reward_workers=0): give workers"
        if has_workers(job.settings, job.task.rewards):
            reward = f"; a reward function may take {duration(reward_timeout_of(job.settings))} (--reward_timeout)"
    timeout = datetime.timedelta(minutes=flags.timeout)
    return WaitLimits(timeout, flags.heartbeat, flags.stalled_after, reward)
