"""Training from Python: `funrl.train` and its results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch

from funrl.algos.core import Algorithm
from funrl.api.arguments import (
    GivenEnvironment,
    GivenPrompt,
    check_callable,
    check_place,
    check_recipe,
    check_source,
    checked_value,
    given_example,
    given_of,
    mesh_text,
    recipe_flags,
    sampling_values,
    settings_and_arguments,
    split_arguments,
)
from funrl.api.meshes import choose_mesh
from funrl.api.warm_start import warm_started
from funrl.data.pictures import with_picture_form
from funrl.data.prompts import Example
from funrl.data.tokenizer import load_tokenizer
from funrl.flags.arguments import find_recipe, full_source, recipe_name
from funrl.mesh.launch import check_devices, device_type, launch
from funrl.mesh.mesh import Mesh, parse
from funrl.models import Model, ModelConfig
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.generation_config import sampling_defaults
from funrl.processes.workers import interrupt_asked
from funrl.rewards.call import Reward
from funrl.rewards.pool import Pool
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.sampling_parameters import Sampling
from funrl.track.observe import OnStep, RunObserver
from funrl.track.records.run_directory import RunDirectory, check_can_go_on, expanded, read_lines
from funrl.track.records.run_lock import leave_nothing, owned_run
from funrl.track.report.page import write_report
from funrl.track.report.run_files import ReportError
from funrl.trainer.checkpoints.resumable import check_resume
from funrl.trainer.checkpoints.stored_models import StoredModel, find_stored_model, with_model_directories
from funrl.trainer.env_check import check_first_episode
from funrl.trainer.inference import read_stored_model, stored_picture_form, stored_weights
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.jobs.provenance import Provenance, input_digests
from funrl.trainer.jobs.row_source import make_source, open_rewards, waiting_of
from funrl.trainer.loop import Outcome
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.settings.declaration import SettingsError, run_kind
from funrl.trainer.settings.scorers import Given, resolved
from funrl.trainer.settings.settings import Settings, flag_values, settings_flags, settings_of
from funrl.trainer.sources.generation import RewardedEngine, first_texts, rollout
from funrl.trainer.startup import MakeSource

if TYPE_CHECKING:
    from funrl.api.keywords import SamplingKeywords, TrainKeywords  # pyright: ignore[reportMissingModuleSource]

TEXT_METRICS = ("eval/reward", "eval/accuracy", "eval/loss")  # metrics that the text of a run shows
RECORDS = "records"  # in a run's config.json: prompts or texts given in Python


class TrainedModel:
    """The model that a run saved.

    Attributes:
      directory: a Hugging Face directory.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def __repr__(self) -> str:
        return f"<TrainedModel {self.directory}>"

    def generate(self, texts: Sequence[GivenPrompt], seed: int = 0, **sampling: Unpack[SamplingKeywords]) -> list[str]:
        """Complete texts on this device.

        Args:
          texts: prompts, as those of `funrl.generate`.
          seed: seed of the samples.
          sampling: fields of `Sampling`, such as `max_new_tokens` and `temperature`; greedy without a temperature.

        Returns: one completion per text.
        """
        return generate(self.directory, texts, seed=seed, **sampling)

    def save(self, directory: str | Path) -> None:
        """Copy the Hugging Face directory."""
        shutil.copytree(self.directory, directory, dirs_exist_ok=True)


def generate(
    model: str | Path | TrainedModel,
    texts: Sequence[GivenPrompt],
    *,
    seed: int = 0,
    mesh: str = "dp1",
    **sampling: Unpack[SamplingKeywords],
) -> list[str]:
    """Complete texts or chat messages with a model.

    Args:
      model: a Hugging Face directory, the name of a model in the local cache, the directory of a run, or its model.
      texts: prompts; messages go through the chat template of the model's tokenizer. For a model that sees pictures,
        parts {"type": "image", "image": ...} of messages hold some; a prompt may also be a dict as the records of
        --prompts are, with "prompt" and "images".
      seed: seed of the samples.
      mesh: devices per axis, such as "dp2"; a single device runs in this process.
      sampling: fields of `Sampling`, such as `max_new_tokens` and `temperature`. Defaults come from the model's
        generation_config.json; greedy if neither gives a temperature, or if the file does not sample.

    Returns: the completions; those of one prompt are consecutive.

    Raises:
      ModelError, ValueError: the model cannot be read, an argument does not exist, or a text is empty or too long.
    """
    values = sampling_values(sampling)
    sizes = parse(mesh_text(mesh))
    seed = checked_value(settings_flags()["seed"], seed)
    if isinstance(texts, (str, bytes)):
        raise SettingsError(f"texts={texts!r}: a list of prompts is needed; write [{texts!r}]")
    place = model.directory if isinstance(model, TrainedModel) else model
    check_place("model", place)
    stored = find_stored_model(place)
    tokenizer = load_tokenizer(stored.directory)
    described = read_stored_model(stored, "auto")
    if not described.generates:
        raise SettingsError(f"model={stored.directory!r}: it has a value head and cannot generate")
    stop = tuple(sorted({*described.config.special_tokens.eos, *({tokenizer.eos_token_id} - {None})}))
    fields: dict[str, Any] = {"stop": stop} | sampling_of_model(described.config, "temperature" in values) | values
    tokenizer = with_picture_form(tokenizer, stored_picture_form(stored, described))
    examples = [given_example(tokenizer, text) for text in texts]
    if not examples:
        return []
    task = _Completions(stored, described, examples, sampling=Sampling(**fields), seed=seed, tokenizer=tokenizer)
    return launch(functools.partial(_completed, task), sizes, device_type())


class _Completions(NamedTuple):
    """Task of the ranks: prompts to complete with a stored model."""

    stored: StoredModel
    model: Model
    examples: Sequence[Example]
    sampling: Sampling
    seed: int
    tokenizer: Any


def _completed(task: _Completions, mesh: Mesh) -> list[str]:
    """Completions of all prompts, on every rank."""
    decode = functools.partial(task.tokenizer.decode, skip_special_tokens=True)
    engine = (
        native_engine(task.model, mesh, options=NativeOptions(decode=decode))
        if task.model.pages
        else hf_engine(task.model, mesh)
    )
    weights = stored_weights(task.stored, task.model, torch.float32, layouts=engine.weights.layouts, mesh=mesh)
    engine.load(engine.weights.named(weights), 0)
    rewarded = RewardedEngine(engine, mesh, decode, pool=Pool(()), weights=())
    completions = rollout(rewarded, task.examples, task.sampling, seed=task.seed)
    before = [example.tokens[-1] for example in task.examples for _ in range(task.sampling.samples)]
    return first_texts(completions, range(len(before)), decode, before=before)


def sampling_of_model(config: ModelConfig, sampled: bool) -> dict[str, Any]:
    """Fields of `Sampling` from a model's generation_config.json.

    Args:
      sampled: whether a temperature is given, so that completions are sampled even if the file is greedy.
    """
    defaults = sampling_defaults(config)
    greedy = not sampled and defaults.get("temperature", 0.0) == 0.0
    idle = ("temperature", "top_k", "top_p", "min_p") if greedy else ("temperature",) * sampled
    return {"greedy": greedy} | {name: x for name, x in defaults.items() if name not in idle}


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A finished run.

    Attributes:
      run_dir: its directory.
      metrics: one dict per step.
      outcome: evaluations at the start and the end, and why the run ended early, if it did.
    """

    run_dir: str
    metrics: list[dict[str, float]]
    outcome: Outcome

    @property
    def model(self) -> TrainedModel:
        return TrainedModel(Path(self.run_dir) / "model")

    def __repr__(self) -> str:
        first, last, error = self.outcome.first, self.outcome.last, self.outcome.error
        results = [f"{key} {first[key]:.4g} -> {last.get(key, first[key]):.4g}" for key in TEXT_METRICS if key in first]
        failure = [] if error is None else [f"failed: {error.strip().splitlines()[0]}"]
        return f"<Run {self.run_dir}: {', '.join([f'{len(self.metrics)} steps', *results, *failure])}>"


class RunError(RuntimeError):
    """A run that failed. Its cause is chained to it.

    Attributes:
      run: the run so far; `run.run_dir` has its files and the last saved model.
    """

    def __init__(self, message: str, run: Run | None = None) -> None:
        super().__init__(message)
        self.run = run


def train(
    recipe: str | Algorithm,
    *,
    model: str | Path | Model | None = None,
    tokenizer: Any = None,
    prompts: str | Path | Sequence[Mapping[str, Any]] | None = None,
    reward: str | Reward | Sequence[Reward] | Mapping[str, Reward] | None = None,
    env: GivenEnvironment | None = None,
    env_args: str | Mapping[str, Any] | None = None,
    eval_data: str | Path | Sequence[Mapping[str, Any]] | None = None,
    curriculum: str | Callable[..., Any] | None = None,
    source: MakeSource | None = None,
    mesh: str = "dp1",
    on_step: OnStep | None = None,
    **settings: Unpack[TrainKeywords],
) -> Run:
    """Train a model by a recipe, as the command line does.

    It runs in this process on one device, and starts one process per device otherwise.

    Args:
      recipe: the name of a recipe, such as "grpo", "module:function" or "FILE.py:function", or an `Algorithm`.
      model: a Hugging Face directory, the name of a model in the local Hugging Face cache, or a `Model`, which starts
        from random weights. None: the embedded task's.
      tokenizer: tokenizer of a given `Model`.
      prompts: a file, as for --prompts, or dicts like its records; for supervised recipes, texts.
      reward: a value of --reward, such as "FILE.py:function" or "math", or one or several functions; a mapping gives
        the functions' names in metrics.
      env: "FILE.py:NAME", an environment, or a class, a function or a list of tools such as --env names, instead of
        `reward`.
      env_args: arguments of that class or function by name, whose values JSON has; or a text, as for --env_args.
      eval_data: held-out data, in the same forms as `prompts`; None: a tenth of these.
      curriculum: "FILE.py:function", or a function; see `funrl.trainer.sources.curriculum.weighing`.
      source: (job, parts, frozen weights, clock, observer) -> `Source`; None: the source of prompts and rewards, or of
        texts.
      mesh: devices per axis, such as "dp4,tp2"; "auto:8" chooses the best mesh of 8 devices by a dry run.
      on_step: called with the number and the metrics of every step, in the process of rank 0.
      settings: any flag by name, and arguments of a named recipe; paths may be `Path`s, numbers NumPy's.

    Raises:
      SettingsError: a setting does not exist or cannot work; raised before anything is started.
      RunError: the run failed; it holds the run so far, and the cause is chained to it.
      KeyboardInterrupt: the user interrupted. The first interrupt finishes and saves the step; a second one, or one
        before the first step, ends the run at once.
    """
    check_recipe(recipe)
    check_callable("on_step", on_step, {"step": 1, "metrics": {}})
    values, own = settings_and_arguments(recipe, settings)
    texts, objects = split_arguments(
        model=model,
        tokenizer=tokenizer,
        prompts=prompts,
        reward=reward,
        env=env,
        env_args=env_args,
        eval_data=eval_data,
        curriculum=curriculum,
    )
    given = given_of(objects)
    algorithm, wanted = _algorithm_and_settings(
        recipe, {"mesh": mesh_text(mesh), **texts}, values, own, prompts is not None or env is not None
    )
    chosen = _with_mesh(wanted, model, algorithm)
    check_source(source, chosen.devices.place)
    job = prepare(chosen, lambda: algorithm, given)
    shown = {**objects, "recipe": recipe, "source": source, "environment": given.environment}
    config = _recorded_flags(flag_values(chosen) | own, job, given, shown)
    job = dataclasses.replace(job, provenance=_provenance(job, recipe, config, given))
    _check_start(job, chosen, env)
    return _run(job, chosen, recipe if isinstance(recipe, str) else "run", config, on_step, source)


def _check_start(job: Job, settings: Settings, env: GivenEnvironment | None) -> None:
    """Check a run to resume, printing what changed, and an episode of its environment. Raises: SettingsError."""
    if settings.run.resume:
        folder = expanded(str(settings.run.run_dir))
        check_can_go_on(folder)
        print("".join(f"{line}\n" for line in check_resume(job, folder)), end="", file=sys.stderr)
    if env is None or isinstance(env, str | type):  # another object may hold what a forked process cannot share
        check_first_episode(job)


def _algorithm_and_settings(
    recipe: str | Algorithm,
    named: Mapping[str, Any],
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    has_prompts: bool,
) -> tuple[Algorithm, Settings]:
    """The algorithm of a recipe, and the settings of a call with the directories of their models.

    Args:
      named: texts of arguments of `train`; "prompts" is the file of whichever flag the kind of run reads.
      values: flags.
      own: arguments of the recipe.
      has_prompts: whether the call gives prompts or an environment.
    """
    named = dict(named)
    prompt_files = named.pop("prompts", None)
    algorithm = recipe
    if not isinstance(algorithm, Algorithm):
        settled = resolved(settings_of(**values, **named), has_prompts)
        algorithm = composed(algorithm, settled, own)
    if prompt_files is not None:
        named["data" if run_kind(algorithm, values.get("data")) == "supervised" else "prompts"] = prompt_files
    return algorithm, with_model_directories(settings_of(**named, **values))


def _with_mesh(settings: Settings, model: object, algorithm: Algorithm) -> Settings:
    """The settings with a mesh in place of "auto", which rank 0 reports. Raises: SettingsError."""
    if isinstance(model, Model):
        if settings.devices.train.wanted is not None:
            text = settings.devices.train.text
            raise SettingsError(
                f"mesh={text!r}: auto works only for the embedded task's model or a directory; name a mesh"
            )
        return settings
    chosen, note = choose_mesh(settings, lambda: algorithm)
    if note is not None and os.environ.get("RANK") == "0":
        print(note, file=sys.stderr)
    return chosen


def _recorded_flags(flags: Mapping[str, Any], job: Job, given: Given, shown: Mapping[str, object]) -> dict[str, Any]:
    """Flags for config.json, with the names of the arguments `shown` that no flag can say."""
    recipe = shown["recipe"]
    config = {**flags, "algorithm": recipe if isinstance(recipe, str) else None}
    if given.records is not None:
        config["prompts" if isinstance(job, RLJob) else "data"] = RECORDS
    names = ("recipe", "model", "prompts", "reward", "source", "environment")
    objects = [name for name in names if not isinstance(shown.get(name), (str, type(None)))]
    if objects:
        config["given_in_python"] = ", ".join(name if name == "prompts" else f"the {name}" for name in objects)
    return config


def _provenance(job: Job, recipe: str | Algorithm, config: Mapping[str, Any], given: Given) -> Provenance:
    """Origin of a run; the first rank has the digests of its files."""
    source = full_source(recipe) if isinstance(recipe, str) else None
    inputs = input_digests(job.settings, source, given) if os.environ.get("RANK", "0") == "0" else {}
    return Provenance(None if source is None else recipe_name(source), config, inputs)


def _run(
    job: Job, chosen: Settings, name: str, config: dict[str, Any], on_step: OnStep | None, source: MakeSource | None
) -> Run:
    """Train in the run's directory, and read its results. Raises: RunError."""
    check_devices(job.launched, job.device)
    run_dir = None
    experiment = Path(name).stem.replace(":", "-")
    try:
        with owned_run(chosen.run.run_dir, experiment, config, chosen.run.resume) as owned:
            run_dir = str(owned.path)
            rewards = functools.partial(open_rewards, job)
            try:
                with warm_started(job) as started:
                    program = functools.partial(_rank, started, run_dir, on_step, source)
                    outcome = launch(program, job.launched, job.device, before=rewards, waiting=waiting_of(job))
            except BaseException:
                leave_nothing(owned)
                raise
            if outcome.error is not None:
                leave_nothing(owned)
    except Exception as error:
        if run_dir is None:
            raise
        failed = _written_run(run_dir, Outcome({}, {}, str(error)))
        raise RunError(_failure(failed, f"{type(error).__name__}: {error}"), failed) from error
    run = _written_run(run_dir, outcome._replace(cause=None))  # its traceback would keep the weights alive
    if outcome.error is not None:
        raise RunError(_failure(run, outcome.error), run) from outcome.cause
    if outcome.stopped is not None and interrupt_asked():
        raise KeyboardInterrupt(
            f"after step {outcome.stopped}, which is saved; resume=True, run_dir={run_dir!r} continues"
        )
    return run


def _written_run(run_dir: str, outcome: Outcome) -> Run:
    """Read a run from its files, and write its report."""
    with contextlib.suppress(ReportError, OSError):  # the run stopped before its first step
        write_report(run_dir)
    lines = RunDirectory(Path(run_dir)).metrics
    return Run(run_dir, list(read_lines(lines)) if lines.exists() else [], outcome)


def _failure(run: Run, problem: str) -> str:
    """The message of a failed run: the step, the error in one line, and the directory with its results."""
    when = left = ""
    if os.path.isdir(run.run_dir):  # it may have been deleted
        left = f"; its files are in {run.run_dir}"
        when = f" after step {run.metrics[-1]['step']}" if run.metrics else " before its first step was done"
    first, *rest = problem.strip().splitlines()
    if first.endswith(":") and rest:  # a traceback of another process; its last line is the error
        first = f"{first} {rest[-1].strip()}"
    return f"the run failed{when}: {first}{left}"


def _rank(
    job: Job, run_dir: str, on_step: OnStep | None, source: MakeSource | None, mesh: Mesh, pool: Pool | None
) -> Outcome:
    with RunObserver(job, run_dir, mesh.rank, on_step) as observer:
        return run_rank(job, mesh, observer, source or make_source, pool)


def composed(recipe: str, settings: Settings, own: Mapping[str, Any]) -> Algorithm:
    """The algorithm of a named recipe; arguments with the name of a setting get its value.

    Args:
      settings: settings, with the number of new tokens filled in.
      own: values of other arguments; missing ones have their defaults.

    Raises:
      SettingsError: a value is invalid for its argument.
    """
    common = flag_values(settings)
    values = {}
    for name, flag in recipe_flags(recipe).items():
        values[name] = common[name] if name in common else own.get(name, flag.default)
        flag.check(values[name], f"{name}={values[name]!r}")
    return find_recipe(recipe)(**values)


def load(directory: str | Path) -> TrainedModel:
    """Load a Hugging Face directory, such as the `model` of a run, for generation.

    Raises:
      SettingsError, ModelError: it is not a directory, or holds no supported model.
    """
    check_place("directory", directory)
    hf.check_directory(directory, "auto")
    return TrainedModel(directory)
