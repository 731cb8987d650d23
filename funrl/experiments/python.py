"""Training from Python: `funrl.train`, and what it gives back."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from funrl.algos.core import Algorithm
from funrl.cost.hardware import hardware_of
from funrl.cost.mesh_search import chosen_mesh
from funrl.cost.node_groups import with_groups
from funrl.data.tokenizer import encode_prompt, load_tokenizer
from funrl.experiments.arguments import arguments_of, find_recipe
from funrl.mesh.environment import ranks_of_node
from funrl.mesh.launch import device_type, launch
from funrl.mesh.mesh import Mesh, parse
from funrl.mesh.text import wanted_devices
from funrl.models import Config, Model, hf
from funrl.models.generation_config import sampling_defaults
from funrl.rewards.call import Reward, described_function
from funrl.rewards.pool import Pool
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native import native_engine
from funrl.rollout.sampling_parameters import Sampling
from funrl.track.observe import OnStep, RunObserver
from funrl.track.report import write_report
from funrl.track.run_directory import check_can_go_on, expanded
from funrl.track.run_files import ReportError
from funrl.track.run_lock import owned_run
from funrl.trainer.declaration import Flag, SettingsError, run_kind
from funrl.trainer.generation import Example, first_texts, rollout
from funrl.trainer.inference import StoredModel, find_stored_model, read_stored_model, stored_weights
from funrl.trainer.job import Job, prepare
from funrl.trainer.job_data import Given
from funrl.trainer.job_source import make_source, open_rewards
from funrl.trainer.loop import MakeSource, Outcome, train_loop
from funrl.trainer.resumable import check_resume
from funrl.trainer.settings import Settings, resolved, settings_flags

RECORDS = "records"  # in a run's config.json: prompts or texts that were given in Python


class TrainedModel:
    """The model that a run saved.

    Attributes:
      directory: a Hugging Face directory.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def generate(self, texts: Sequence[str], seed: int = 0, **sampling: Any) -> list[str]:
        """Complete texts on this device.

        Args:
          texts: prompts.
          seed: fixes the samples.
          sampling: fields of `Sampling`, such as `max_new_tokens` and `temperature`; greedy without a temperature.

        Returns: one completion a text.
        """
        return generate(self.directory, texts, seed=seed, **sampling)

    def save(self, directory: str | Path) -> None:
        """Copy the Hugging Face directory."""
        shutil.copytree(self.directory, directory, dirs_exist_ok=True)


def generate(
    model: str | Path | TrainedModel,
    texts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    seed: int = 0,
    mesh: str = "dp1",
    **sampling: Any,
) -> list[str]:
    """Complete texts or chat messages with a model.

    Args:
      model: a Hugging Face directory, the name of a model in the local cache, the directory of a run, or its model.
      texts: prompts; messages go through the chat template of the model's tokenizer.
      seed: fixes the samples.
      mesh: devices by axis, such as "dp2"; on one it runs in this process.
      sampling: fields of `Sampling`, such as `max_new_tokens` and `temperature`. Those that are not given are as the
        model's generation_config.json says; greedy where neither gives a temperature, or the file does not sample.

    Returns: the completions, those of one prompt beside each other.

    Raises:
      ModelError, ValueError: the model cannot be read, or a text is empty or too long.
    """
    if isinstance(texts, (str, bytes)):
        raise SettingsError(f"texts={texts!r}: a list of prompts is needed; write [{texts!r}]")
    stored = find_stored_model(model.directory if isinstance(model, TrainedModel) else model)
    tokenizer = load_tokenizer(stored.directory)
    examples = [_example(tokenizer, text) for text in texts]
    made = read_stored_model(stored, "auto")
    if made.unembed is None:
        raise SettingsError(f"model={stored.directory!r}: it has a value head and cannot generate")
    stop = tuple(sorted({*made.config.eos, *({tokenizer.eos_token_id} - {None})}))
    fields: dict[str, Any] = {"stop": stop} | sampling_of_model(made.config, "temperature" in sampling) | sampling
    if not examples:
        return []
    program = functools.partial(_completed, stored, made, examples, Sampling(**fields), seed, tokenizer)
    return launch(program, parse(mesh), device_type())


def _example(tokenizer: Any, text: str | Sequence[Mapping[str, Any]]) -> Example:
    """A prompt in tokens. Raises: ValueError."""
    try:
        return Example(*encode_prompt(tokenizer, text), {})
    except ValueError:
        raise
    except Exception as error:  # of a tokenizer that knows not all characters
        raise SettingsError(f"{text!r}: the tokenizer refuses it: {error}") from error


def _completed(
    stored: StoredModel, made: Model, examples: Sequence[Example], how: Sampling, seed: int, tokenizer: Any, mesh: Mesh
) -> list[str]:
    """Completions of all prompts, on every rank."""
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    engine = hf_engine(made, mesh) if made.config.module else native_engine(made, mesh, decode=decode)
    engine.load(engine.weights.named(stored_weights(stored, made, torch.float32, engine.weights.layouts, mesh)), 0)
    done = rollout(engine, examples, how, seed, Pool(()), decode, mesh, weights=())
    before = [example.tokens[-1] for example in examples for _ in range(how.samples)]
    return first_texts(done, range(len(before)), decode, before)


def sampling_of_model(config: Config, sampled: bool) -> dict[str, Any]:
    """Fields of `Sampling` by a model's generation_config.json.

    Args:
      sampled: a temperature is given, so that completions are sampled whatever the file says.
    """
    found = sampling_defaults(config)
    greedy = not sampled and found.get("temperature", 0.0) == 0.0
    idle = ("temperature", "top_k", "top_p", "min_p") if greedy else ("temperature",) * sampled
    return {"greedy": greedy} | {name: x for name, x in found.items() if name not in idle}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
      run_dir: where its files are.
      metrics: one dict a step.
      outcome: evaluations at the start and the end, and what ended the run early.
    """

    run_dir: str
    metrics: list[dict[str, float]]
    outcome: Outcome

    @property
    def model(self) -> TrainedModel:
        return TrainedModel(Path(self.run_dir) / "model")


def train(
    recipe: str | Algorithm,
    *,
    model: str | Path | Model | None = None,
    tokenizer: Any = None,
    prompts: str | Path | Sequence[Mapping[str, Any]] | None = None,
    reward: str | Reward | Sequence[Reward] | Mapping[str, Reward] | None = None,
    eval_data: str | Path | Sequence[Mapping[str, Any]] | None = None,
    curriculum: str | Callable[..., Any] | None = None,
    source: MakeSource | None = None,
    mesh: str = "dp1",
    on_step: OnStep | None = None,
    **settings: Any,
) -> Run:
    """Train a model by a recipe: what the command line does, from Python.

    It runs in this process on one device, and starts one process per device otherwise.

    Args:
      recipe: the name of a recipe, such as "grpo", "module:function" or "FILE.py:function", or an `Algorithm`.
      model: a Hugging Face directory, the name of a model in the local Hugging Face cache, or a `Model`, whose weights
        begin at random. None: the embedded task's.
      tokenizer: of a `Model` that is given.
      prompts: a file, as --prompts takes it, or dicts such as its records; for supervised recipes, texts.
      reward: what --reward takes, such as "FILE.py:function" or "math", or one function or several; a mapping of names
        to functions says what they are called in metrics.
      eval_data: what is held out, in the same forms as `prompts`; None: a tenth of these.
      curriculum: "FILE.py:function", or a function; see `funrl.trainer.curriculum.weighing`.
      source: (job, parts, frozen weights, clock, observer) -> `Source`; None: that of prompts and rewards, or texts.
      mesh: devices by axis, such as "dp4,tp2", or "auto:8", the best of 8 devices by a dry run.
      on_step: called with the number and the metrics of every step, in the process of rank 0.
      settings: any flag by its name, the arguments of a recipe that is named included; a path may be a `Path`.

    Raises:
      SettingsError: a setting that does not exist or cannot work; before anything is started.
      WorkerError: a rank failed.
    """
    settings, own = _settings_and_arguments(recipe, settings)
    given = _objects_given(model, tokenizer, prompts, reward, eval_data, curriculum)
    named = _texts_given(mesh, model, reward, eval_data, curriculum)
    algorithm = (
        recipe
        if isinstance(recipe, Algorithm)
        else composed(recipe, resolved(Settings(**settings, **named), prompts is not None), own)
    )
    if isinstance(prompts, (str, Path)):
        named["data" if run_kind(algorithm, settings.get("data")) == "supervised" else "prompts"] = str(prompts)
    chosen = _with_mesh(Settings(**named, **settings), algorithm, isinstance(model, Model))
    job = prepare(chosen, lambda: algorithm, given)
    if chosen.resume:
        check_can_go_on(expanded(str(chosen.run_dir)))
        check_resume(job, expanded(str(chosen.run_dir)))
    config = dataclasses.asdict(chosen) | own | {"algorithm": recipe if isinstance(recipe, str) else None}
    if given.records is not None:
        config["prompts" if job.generates else "data"] = RECORDS
    objects = {"the recipe": recipe, "the model": model, "prompts": prompts, "the reward": reward, "the source": source}
    if what := [name for name, x in objects.items() if x is not None and not isinstance(x, (str, Path))]:
        config["given_in_python"] = ", ".join(what)
    return _run(job, chosen, recipe if isinstance(recipe, str) else "run", config, on_step, source)


def _settings_and_arguments(
    recipe: str | Algorithm, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of flags of `Settings`, and those of arguments that only the recipe has. Raises: SettingsError."""
    arguments = {} if isinstance(recipe, Algorithm) else recipe_flags(recipe)
    known = {*settings_flags(), *arguments}
    unknown = sorted(set(settings) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {sorted(known)}"
        raise SettingsError(f"{unknown[0]}={settings[unknown[0]]!r}: there is no such setting; {hint}")
    values = {name: str(x) if isinstance(x, Path) else x for name, x in settings.items()}
    own = {name: values.pop(name) for name in arguments if name in values and name not in settings_flags()}
    return values, own


def _objects_given(model: Any, tokenizer: Any, prompts: Any, reward: Any, eval_data: Any, curriculum: Any) -> Given:
    """Arguments of `train` that are objects and no texts, which flags cannot name. Raises: SettingsError."""
    if not (model is None or isinstance(model, (str, Path, Model))):
        raise SettingsError(f"model={model!r}: a directory, a name, or a Model is needed")
    for name, given in (("prompts", prompts), ("eval_data", eval_data)):
        if not (given is None or isinstance(given, (str, Path, Iterable))):
            raise SettingsError(f"{name}={given!r}: a file, or a list of dicts is needed")
    return Given(
        model if isinstance(model, Model) else None,
        tokenizer,
        None if prompts is None or isinstance(prompts, (str, Path)) else prompts,
        None if reward is None or isinstance(reward, str) else functions_of(reward),
        None if eval_data is None or isinstance(eval_data, (str, Path)) else eval_data,
        curriculum if callable(curriculum) else None,
    )


def _texts_given(mesh: str, model: Any, reward: Any, eval_data: Any, curriculum: Any) -> dict[str, Any]:
    """Arguments of `train` that are texts, by their flags; the flag of prompts depends on the kind of the run."""
    named = {"mesh": mesh, "reward": reward if isinstance(reward, str) else None}
    named["eval_data"] = str(eval_data) if isinstance(eval_data, (str, Path)) else None
    named["curriculum"] = curriculum if isinstance(curriculum, str) else None
    if isinstance(model, (str, Path)):
        named["model"] = str(find_model(model))
    return named


def _with_mesh(chosen: Settings, algorithm: Algorithm, built: bool) -> Settings:
    """The settings with the best mesh where they say auto:N, and with groups for --fsdp on several nodes.

    Args:
      built: the model is an object, of which no dry run is made.

    Raises:
      SettingsError: a mesh cannot be chosen.
    """
    if wanted_devices(chosen.mesh) is not None:
        if built:
            raise SettingsError(
                f"mesh={chosen.mesh!r}: it is chosen for the embedded task's model or a directory; name one"
            )
        return chosen_mesh(chosen, lambda: algorithm, hardware_of(chosen.device or device_type()))[0]
    if not (chosen.fsdp and not built and ranks_of_node() is not None):
        return chosen
    hardware = hardware_of(chosen.device or device_type())
    chosen, note = with_groups(chosen, lambda: algorithm, hardware, ranks_of_node())
    if note is not None and os.environ.get("RANK") == "0":
        print(note, file=sys.stderr)
    return chosen


def _run(
    job: Job, chosen: Settings, name: str, config: dict[str, Any], on_step: OnStep | None, source: MakeSource | None
) -> Run:
    """Train in a directory of its own, and read what was written there."""
    with owned_run(chosen.run_dir, Path(name).stem.replace(":", "-"), config, chosen.resume) as owned:
        run_dir = str(owned.path)
        program = functools.partial(_rank, job, run_dir, on_step, source)
        timeout, rewards = datetime.timedelta(minutes=chosen.timeout), functools.partial(open_rewards, job)
        outcome = launch(program, job.sizes, job.device, timeout=timeout, before=rewards, heartbeat_s=chosen.heartbeat)
    with contextlib.suppress(ReportError):  # it stopped before its first step
        write_report(run_dir, running=False)
    lines = Path(run_dir) / "metrics.jsonl"
    metrics = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return Run(run_dir, metrics, outcome)


def _rank(
    job: Job, run_dir: str, on_step: OnStep | None, source: MakeSource | None, mesh: Mesh, pool: Pool | None
) -> Outcome:
    with RunObserver(job, run_dir, mesh.rank, on_step) as observer:
        return train_loop(job, mesh, observer, source or make_source, pool)


def functions_of(reward: Reward | Sequence[Reward] | Mapping[str, Reward]) -> tuple[Reward, ...]:
    """The functions that a caller gives, with the names of a mapping. Raises: SettingsError, they are none."""
    if isinstance(reward, Mapping):
        return tuple(described_function(function, name) for name, function in reward.items())
    if not (callable(reward) or isinstance(reward, Iterable)):
        raise SettingsError(f"reward={reward!r}: a function, several, or FILE.py:function is needed")
    return (reward,) if callable(reward) else tuple(reward)


def recipe_flags(recipe: str) -> Mapping[str, Flag]:
    """The arguments of a recipe that is named. Raises: LoadError, SettingsError."""
    return arguments_of(find_recipe(recipe), recipe).flags


def composed(recipe: str, settings: Settings, own: Mapping[str, Any]) -> Algorithm:
    """The algorithm of a recipe that is named; arguments that are settings too have the settings' values.

    Args:
      settings: with a number of new tokens.
      own: values of other arguments; those that are not there have their defaults.

    Raises:
      SettingsError: a value cannot be that argument's.
    """
    values, common = {}, dataclasses.asdict(settings)
    for name, flag in recipe_flags(recipe).items():
        values[name] = common[name] if name in common else own.get(name, flag.default)
        if problem := flag.problem(values[name]):
            raise SettingsError(f"{name}={values[name]!r}: {problem}")
    return find_recipe(recipe)(**values)


def find_model(model: str | Path) -> Path:
    """A directory as it is, or that of a model in the local Hugging Face cache; nothing is downloaded.

    Raises:
      SettingsError: there is neither.
    """
    found = hf.find_directory(model)
    if not found.exists():
        raise SettingsError(f"model={str(model)!r}: no such directory, and no such model in the local cache")
    return found


def load(directory: str | Path) -> TrainedModel:
    """A Hugging Face directory, such as the `model` of a run, to generate with.

    Raises:
      ModelError: it holds no model that is supported.
    """
    hf.check_directory(directory, "auto")
    return TrainedModel(directory)
