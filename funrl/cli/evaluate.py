"""Evaluation of a model, a run or one of its checkpoints, and completion of many prompts, on any mesh.

funrl evaluate MODEL --data=test.jsonl --reward=REWARD.py:score --samples=8 --temperature=0.7
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

from funrl.api.arguments import (
    GivenEnvironment,
    check_place,
    checked_settings,
    checked_value,
    given_of,
    mesh_text,
    split_arguments,
)
from funrl.api.python import RECORDS
from funrl.cli.inference_flags import PROMPTS, REWARDS, SAMPLED, inference_flags
from funrl.flags.foreign.meaning import NameContext
from funrl.mesh.launch import WaitLimits, launch
from funrl.mesh.mesh import Mesh
from funrl.processes.environment import read_environment
from funrl.rewards.call import Reward
from funrl.rewards.pool import Pool
from funrl.track.records.run_directory import (
    RunDirectory,
    RunDirectoryError,
    open_lines,
    read_lines,
    valid,
    write_text,
)
from funrl.track.records.run_lock import owned_run
from funrl.trainer.checkpoints.stored_models import StoredModel, find_stored_model
from funrl.trainer.env_check import check_first_episode
from funrl.trainer.inference import ALL, prepare_inference, run_inference, with_prompts
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import open_rewards, remarks_on_sampling
from funrl.trainer.settings.checks import data_files
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import EPISODE_FLAGS, Given, has_environment, resolved, scorers_of
from funrl.trainer.settings.settings import Settings, flag_values, settings_flags, settings_of
from funrl.trainer.sources.evaluation import EvalRow
from funrl.trainer.sources.observing import ShownSample

if TYPE_CHECKING:
    from funrl.api.keywords import EvaluateKeywords  # pyright: ignore[reportMissingModuleSource]

OF_SPLIT = ("prompts", "eval_data", "eval_prompts", "seed", "task")  # flags that determine held-out prompts
INHERITED = tuple(name for name in (*PROMPTS, *REWARDS) if name not in ("reward_workers", "reward_timeout"))
RESULT = "evaluation.json"
RankResult = TypeVar("RankResult")


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
    """Result of an evaluation.

    Attributes:
      metrics: values by name, such as "eval/accuracy" and the ends of its 95 % interval, "eval/accuracy_ci_low" and
        "..._ci_high".
      prompts, samples: number of prompts, and of completions of each.
      directory: directory with evaluation.json and eval_samples.jsonl.
    """

    metrics: dict[str, float]
    prompts: int
    samples: int
    directory: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every completion with its reward; see `EvalRow`."""
        return list(read_lines(RunDirectory(Path(self.directory)).eval_samples))

    def __repr__(self) -> str:
        return evaluation_text(self)


class InferenceTask(NamedTuple):
    """Task of the ranks."""

    job: RLJob
    stored: StoredModel
    seed: int


def evaluate(
    model: str | Path,
    *,
    data: str | Path | Sequence[Mapping[str, object]] | None = None,
    reward: str | Reward | Sequence[Reward] | Mapping[str, Reward] | None = None,
    env: GivenEnvironment | None = None,
    env_args: str | Mapping[str, object] | None = None,
    step: int | None = None,
    limit: int | None = None,
    output: str | Path | None = None,
    seed: int = 0,
    **settings: Unpack[EvaluateKeywords],
) -> Evaluation:
    """Complete prompts with a model and reward the completions, as `funrl evaluate` does.

    Args:
      model: a Hugging Face directory, a name in the local cache, or the directory of a run. The flags of a run are the
        defaults of `reward` and `settings`.
      data: prompts in the forms of --prompts, or dicts like their records. None: the run's held-out prompts.
      reward, env, env_args: as in `funrl.train`.
      step: step of the run's checkpoint; None: the final model, else the newest checkpoint.
      limit: maximum number of prompts, chosen by the seed; None: all.
      output: directory to write; None: runs/evaluate-TIME.
      seed: seed of the samples.
      settings: flags of `funrl evaluate --help` by name, such as `mesh`, `samples` and `temperature`.

    Raises:
      SettingsError: a setting does not exist or cannot work; raised before anything is started.
      WorkerError: a rank failed.
    """
    check_place("model", model)
    table = {flag.name: flag for flag in inference_flags("evaluate")}
    numbers = {"step": step, "limit": limit, "seed": seed}
    step, limit, seed = (checked_value(table[name], value) for name, value in numbers.items())
    stored = find_stored_model(model, step)
    texts, objects = split_arguments(eval_data=data, reward=reward, env=env, env_args=env_args)
    given = given_of(objects)
    named = {"data" if name == "eval_data" else name: text for name, text in texts.items()}
    if "mesh" in settings:
        named["mesh"] = mesh_text(settings["mesh"])
    chosen = settings_of_stored("evaluate", stored, {**settings, **named}, given, seed)
    _check_rewarded(chosen, given)
    with _own_names("data"):
        job = prepare_inference(chosen, stored, given, limit or ALL)
    call = {"model": str(model), "step": step, "limit": limit, "sampling_seed": seed}
    with contextlib.ExitStack() as owned:
        folder = None
        if not read_environment():
            flags = flag_values(chosen) | call
            with _own_names("data"):
                run = owned.enter_context(owned_run(output and str(output), "evaluate", flags))
            folder = str(run.path)
        begin = time.time()
        file = None if folder is None else RunDirectory(Path(folder)).eval_samples
        program = functools.partial(_completing, InferenceTask(job, stored, seed), file, True)
        metrics = launched(program, job)
        evaluation = Evaluation(metrics, len(job.task.heldout), job.eval_sampling.samples, folder or "")
        if folder is not None:
            counts = {
                "prompts": evaluation.prompts,
                "samples": evaluation.samples,
                "seconds": round(time.time() - begin, 3),
            }
            record = {**call, "data": job.task.name, **counts, "metrics": metrics, "flags": flag_values(chosen)}
            write_text(Path(folder) / RESULT, json.dumps(valid(record), indent=2) + "\n")
    return evaluation


def _check_rewarded(settings: Settings, given: Given) -> None:
    """Raises: SettingsError, nothing rewards the completions."""
    prompted = with_prompts(settings, given)
    embedded = settings.examples.prompts is None and prompted.records is None
    rewarded = settings.rewards.reward is not None or given.rewards is not None or bool(scorers_of(settings))
    if not (embedded or rewarded or has_environment(settings, prompted)):
        raise SettingsError(
            "an evaluation needs a --reward=FILE.py:function or --reward_model=DIR, or an --env=FILE.py:NAME"
        )


def complete_prompts(
    model: str | Path,
    prompts: str | Path | Sequence[Mapping[str, object]],
    *,
    step: int | None = None,
    limit: int | None = None,
    output: str | Path | None = None,
    seed: int = 0,
    **settings: object,
) -> None:
    """Complete prompts; write a JSON line per completion: the prompt, its other columns, sample, completion, tokens.

    Args:
      prompts: prompts in the forms of --prompts, or dicts like their records.
      output: the file to write; None: print the lines, or only the text of a single completion. The others: as in
      `evaluate`.

    Raises: as `evaluate`.
    """
    stored = find_stored_model(model, step)
    given = Given(rewards=(), eval_records=None if isinstance(prompts, (str, Path)) else prompts)
    named = {"prompts": str(prompts)} if isinstance(prompts, (str, Path)) else {}
    chosen = settings_of_stored("generate", stored, settings | named, given, seed)
    paths = [file.path for file in data_files(chosen, "eval_data") if os.path.exists(file.path)]
    if output is not None and os.path.exists(output) and any(os.path.samefile(output, path) for path in paths):
        raise SettingsError(f"--output={output} is the file of the prompts and would be overwritten; give another name")
    with _own_names("prompts"):
        job = prepare_inference(chosen, stored, given, limit or ALL)
    if output is not None and not read_environment():
        try:
            Path(output).write_bytes(b"")  # fails before any work if it cannot be written
        except OSError as error:
            raise SettingsError(f"--output={output}: cannot be written: {error.strerror}") from None
    file = None if output is None else Path(output)
    launched(functools.partial(_completing, InferenceTask(job, stored, seed), file, False), job)


def settings_of_stored(name: str, stored: StoredModel, own: Mapping[str, object], given: Given, seed: int) -> Settings:
    """The settings of a job, from the given flags and the flags of the run that made the model.

    Args:
      name: "evaluate" or "generate".
      own: flags of that command, by name.
      given: arguments given in Python instead of flags.

    Raises:
      SettingsError: a name is not a flag, or there are no prompts.
    """
    data = "data" if name == "evaluate" else "prompts"
    known = {flag.name: flag for flag in inference_flags(name)}
    table = {flag.name: flag.default for flag in settings_flags().values()}
    own = checked_settings(own, known, NameContext({}, table, frozenset(), name))
    for flag, value in own.items():
        known[flag].check(value, f"--{flag}={value}")
    has_data = own.get(data) is not None or given.eval_records is not None
    own_environment = own.get("env") is not None or given.environment is not None
    if not has_data and not (name == "evaluate" and (own_environment or _holds_out(stored.flags))):
        raise SettingsError(f"--{data}=FILE is needed: the prompts")
    names = _inherited(name, stored.flags, own, given, has_data)
    taken = {flag: stored.flags.get(flag) for flag in (*names, *(() if has_data else OF_SPLIT))}
    taken |= {f"eval_{flag}": stored.flags.get(f"eval_{flag}") for flag in SAMPLED if flag not in own}
    values = {flag: value for flag, value in taken.items() if value is not None and flag in settings_flags()}
    if stored.flags and "max_new_tokens" not in values:
        run = {flag: value for flag, value in stored.flags.items() if flag in settings_flags()}
        values["max_new_tokens"] = resolved(settings_of(**run)).sampling.max_new_tokens
    if values.get("chat_template") is not None:
        values["chat_template"] = "own"  # it was saved with the model
    renamed = {data: "eval_data", **{flag: f"eval_{flag}" for flag in SAMPLED}}
    values |= {renamed.get(flag, flag): value for flag, value in own.items()}
    return settings_of(**{"seed": seed, **values, "model": stored.directory})


def _inherited(
    name: str, flags: Mapping[str, object], own: Mapping[str, object], given: Given, has_data: bool
) -> Sequence[str]:
    """Names of a run's flags that a command takes where it has none of its own, but for those of the held-out prompts.

    Args:
      name: "evaluate" or "generate".
      flags: of the run.
      own, given: of the command.
      has_data: whether the command names its prompts.
    """
    environment = given.environment is not None or own.get("env") is not None
    rewarded = given.rewards is not None or own.get("reward") is not None
    prompts = [flag for flag in INHERITED if flag in PROMPTS]
    if environment:
        return [*prompts, *EPISODE_FLAGS]
    if rewarded or name == "generate":
        return prompts
    episodes = flags.get("env") is not None or not has_data
    return [*INHERITED, *(("env", "env_args", *EPISODE_FLAGS) if episodes else ())]


def _holds_out(flags: Mapping[str, object]) -> bool:
    """True if the flags of a run determine its held-out prompts, from files or from the embedded task."""
    if flags.get("prompts") is not None or flags.get("eval_data") is not None:
        return flags.get("prompts") != RECORDS or flags.get("eval_data") is not None
    if flags.get("env") is not None:
        return True
    return bool(flags) and all(flags.get(flag) is None for flag in ("data", "reward"))


@contextlib.contextmanager
def _own_names(data: str) -> Iterator[None]:
    """Rename flags in error messages to this command's names.

    Args:
      data: the flag of the prompts.
    """
    try:
        yield
    except SettingsError as error:
        text = str(error).replace("--eval_data", f"--{data}").replace("--eval_", "--")
        raise SettingsError(text.replace("needs --prompts=", f"needs --{data}=")) from error
    except RunDirectoryError as error:
        raise RunDirectoryError(str(error).replace("--run_dir", "--output")) from error


def launched(program: Callable[..., RankResult], job: RLJob) -> RankResult:
    """Run a program on all ranks of a job, after a trial of its environment, and return what rank 0 returned."""
    check_first_episode(job)
    timeout = datetime.timedelta(minutes=job.settings.waiting.timeout)
    return launch(
        program, job.sizes, job.device, before=functools.partial(open_rewards, job), waiting=WaitLimits(timeout)
    )


class TableObserver:
    """Observer of completions; it does nothing on ranks other than the first.

    Args:
      write: (row, the other columns of its prompt) -> None.
    """

    def __init__(self, job: RLJob, mesh: Mesh, write: Callable[[EvalRow, Mapping[str, object]], object]):
        self.readable = job.task.readable
        self.heldout = job.task.heldout
        self.per_prompt = job.eval_sampling.samples
        self.write = write
        self.first = mesh.rank == 0
        self.count = 0
        for remark in (*job.task.remarks, *remarks_on_sampling(job, "")):
            self.note(remark)

    def note(self, text: str) -> None:
        if self.first:
            print(text, file=sys.stderr, flush=True)

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None: ...

    def evaluated(self, rows: Sequence[EvalRow]) -> None:
        for row in rows if self.first else ():
            if self.readable is not None:
                row = row._replace(completion=self.readable(row.completion), answer=self.readable(row.answer))
            self.write(row, self.heldout[self.count // self.per_prompt].fields)
            self.count += 1


def _completing(
    task: InferenceTask, to: Path | None, evaluates: bool, mesh: Mesh, pool: Pool | None
) -> dict[str, float]:
    """Complete all prompts on this rank; the first one writes the rows of an evaluation, or the completions.

    Args:
      to: the file; None: completions are printed.
    """
    alone = len(task.job.task.heldout) * task.job.eval_sampling.samples == 1
    with contextlib.ExitStack() as stack:
        lines = open_lines(to) if to is not None and mesh.rank == 0 else None
        if lines is not None:
            stack.callback(lines.close)

        def write(row: EvalRow, fields: Mapping[str, object]) -> None:
            record = row._asdict()
            if not evaluates:
                record = {"prompt": row.prompt, **fields, "sample": row.sample, "completion": row.completion}
                record |= {"tokens": row.tokens, "finished": row.finished}
            if lines is not None:
                lines.write(record)
            elif not evaluates:
                text = row.completion if alone else json.dumps(valid(record), ensure_ascii=False)
                print(text, flush=True)

        return run_inference(task.job, task.stored, task.seed, mesh, pool, TableObserver(task.job, mesh, write))


NOT_IN_TABLE = ("examples", "response_length", "clip_ratio")  # shown on separate lines


def evaluation_text(evaluation: Evaluation) -> str:
    """The metrics of an evaluation as a table."""
    metrics = {name.removeprefix("eval/"): value for name, value in evaluation.metrics.items()}
    mean = f" (mean@{evaluation.samples})" if evaluation.samples > 1 else ""
    prompts = f"{evaluation.prompts} prompt{'s' * (evaluation.prompts != 1)}"
    noun = "episode" if "episodes/turns" in metrics else "completion"
    lines = [f"{prompts}, {evaluation.samples} {noun}{'s' * (evaluation.samples != 1)} of each", ""]
    lines.append(f"{'':<24}{'value':>9}   95% interval")
    for name, value in metrics.items():
        if "/" in name or name.endswith(("_ci_low", "_ci_high")) or name in NOT_IN_TABLE:
            continue
        shown = f"{name}{mean if name in ('reward', 'accuracy') else ''}"
        ends = [metrics.get(f"{name}_ci_{end}") for end in ("low", "high")]
        spread = "" if None in ends else f"   {ends[0]:.4g} to {ends[1]:.4g}"
        lines.append(f"{shown:<24}{value:>9.4g}{spread}")
    sets = [name for name in metrics if "/" in name]
    lines += ["", *(f"{name:<24}{metrics[name]:>9.4g}" for name in sets)] if sets else []
    cut = 100 * metrics["clip_ratio"]
    return "\n".join([*lines, "", f"{metrics['response_length']:.4g} tokens per {noun}; {cut:.3g}% were cut off"])
