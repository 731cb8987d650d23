"""Checks of several flags together, and of the files that they name. Nothing here imports torch."""

from __future__ import annotations

import re
from pathlib import Path

from funrl.data.columns import Fields, parsed_fields
from funrl.data.json_lines import DataError
from funrl.data.mixture import WeightedFile, weighted_files
from funrl.data.records import FORMATS, source_problem
from funrl.loading import locate
from funrl.mesh.text import ROW_AXES, SHORT, devices
from funrl.trainer.declaration import SettingsError, parts
from funrl.trainer.settings import Settings, check_values, mesh_sizes, settings_flags

LARGEST = 3.4028234663852886e38  # of float32, which the trainer computes in


def check_settings(settings: Settings, kind: str | None = None, rewarded: bool = True) -> None:
    """Check every flag by itself, then all together.

    Args:
      settings: the flags.
      kind: of the run, one of `declaration.RUN_KINDS`; None: not known yet, so what depends on it is not checked.
      rewarded: whether the algorithm goes by rewards.

    Raises:
      SettingsError: the first thing that cannot work, named, with its value and the way out.
    """
    check_values(settings)
    check_together(settings)
    if kind == "rl" and not settings.dry_run:
        check_rewards(settings, rewarded)
    if kind == "supervised" and not settings.dry_run:
        check_data(settings)


def check_together(settings: Settings) -> None:
    """Check what depends on several flags and holds for every kind of run.

    Raises:
      SettingsError: as `check_settings`.
    """
    for check in (
        _check_requirements,
        _check_engine,
        _check_sampling,
        _check_schedule,
        _check_critic_warmup,
        _check_minibatches,
        _check_remat,
        _check_generate_mesh,
        _check_sharding,
        _check_lora,
        _check_reward_timeout,
    ):
        check(settings)


def check_rewards(settings: Settings, rewarded: bool = True) -> None:
    """Check that the flags of reinforcement learning name prompts and, where `rewarded`, rewards.

    Raises:
      SettingsError: they do not.
    """
    if settings.prompts is None:
        refuse_idle_fields(settings)
        if settings.reward is not None:
            raise SettingsError(f"--reward={settings.reward} needs --prompts=FILE.jsonl")
        if settings.model is not None:
            reward = " and --reward=FILE.py:function" if rewarded else ""
            raise SettingsError(f"--model={settings.model} needs --prompts=FILE.jsonl{reward}")
    elif rewarded and settings.reward is None and settings.reward_model is None:
        raise SettingsError(f"--prompts={settings.prompts} needs --reward=FILE.py:function or --reward_model=DIR")
    functions = 1 if settings.prompts is None else len(parts(settings.reward))  # the embedded task has one
    weights_of_rewards(settings, functions + (settings.reward_model is not None))


def check_data(settings: Settings) -> None:
    """Check that the flags of a supervised run name texts. Raises: SettingsError."""
    if settings.model is not None and settings.data is None:
        raise SettingsError(f"--model={settings.model} needs --data=FILE.jsonl")
    if settings.data is None:
        refuse_idle_fields(settings)


def check_files(settings: Settings) -> None:
    """Check that the files and directories that flags name are there, and --fields; they are not read.

    A model that looks like a name of the Hugging Face hub, such as Qwen/Qwen3-0.6B, is left to who loads it.

    Raises:
      SettingsError, LoadError: one is missing.
    """
    names_of_fields(settings)
    prompts = () if settings.prompts is None else [one.path for one in prompt_files(settings)]
    for name, paths in (("prompts", prompts), ("data", () if settings.data is None else (settings.data,))):
        for path in () if settings.dry_run else paths:
            if problem := source_problem(path):
                raise SettingsError(f"--{name}: {path}: {problem}; {name} are {FORMATS}, see --help")
    for name in ("model", "teacher", "reward_model"):
        path = getattr(settings, name)
        if path is None or settings.dry_run or re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
            continue
        if not Path(path).is_dir():
            raise SettingsError(f"--{name}: {path} is not a directory")
    for text in parts(settings.reward):
        locate("reward", text)


def prompt_files(settings: Settings) -> list[WeightedFile]:
    """The files that --prompts names. Raises: SettingsError."""
    try:
        return weighted_files(str(settings.prompts))
    except DataError as error:
        raise SettingsError(f"--prompts: {error}") from error


def refuse_idle_fields(settings: Settings) -> None:
    """Refuse --fields where the embedded task is taken. Raises: SettingsError."""
    if settings.fields is not None:
        raise SettingsError(f"--fields={settings.fields} does nothing without --prompts or --data")


def names_of_fields(settings: Settings) -> Fields:
    """The columns that --fields names. Raises: SettingsError."""
    try:
        return parsed_fields(settings.fields)
    except DataError as error:
        raise SettingsError(str(error)) from error


def weights_of_rewards(settings: Settings, rewards: int) -> tuple[float, ...]:
    """The number by which each reward counts in a completion's score; that of a reward model is the last.

    Args:
      settings: the flags.
      rewards: how many there are.

    Raises:
      SettingsError: there are more or fewer numbers than rewards, or all are 0.
    """
    if settings.reward_weights is None:
        return (1.0,) * rewards
    try:
        weights = tuple(float(part) for part in parts(settings.reward_weights))
    except ValueError:
        weights = ()
    if len(weights) != rewards or not all(abs(weight) <= LARGEST for weight in weights):
        raise SettingsError(
            f"--reward_weights={settings.reward_weights}: give one number for each of the rewards ({rewards}), with "
            "commas between"
        )
    if not any(weights):  # a negative one alone is a penalty, from which a policy can learn
        raise SettingsError(f"--reward_weights={settings.reward_weights}: every score would be 0; give one that is not")
    return weights


def _check_requirements(settings: Settings) -> None:
    for name, one in settings_flags().items():
        value = getattr(settings, name)
        if one.requires and value != one.default and not getattr(settings, one.requires):
            given = f"--{name}" if value is True else f"--{name}={value}"
            raise SettingsError(f"{given} does nothing without --{one.requires}; give --{one.requires} too")


def _check_engine(settings: Settings) -> None:
    if settings.engine != "native" and settings.dry_run:
        raise SettingsError(f"--engine={settings.engine}: --dry_run counts the native engine; leave one of them out")
    if settings.engine != "native" and settings.speculate:
        raise SettingsError(
            f"--speculate={settings.speculate} does nothing with --engine={settings.engine}; leave it out"
        )
    if settings.engine_url is not None and settings.engine != "vllm_server":
        raise SettingsError(f"--engine_url={settings.engine_url} does nothing without --engine=vllm_server")
    if settings.engine_url is None and settings.engine == "vllm_server":
        raise SettingsError("--engine=vllm_server needs --engine_url=http://HOST:PORT, which vllm_server prints")
    for url in parts(settings.engine_url):
        if not re.fullmatch(r"http://[^/:]+:\d+/?", url):
            raise SettingsError(f"--engine_url={settings.engine_url}: {url} is not http://HOST:PORT")


def _check_sampling(settings: Settings) -> None:
    # The trainer compares with the tempered model. Of a truncated or penalised one the engine reports the model's own
    # log-probability, at temperature 1; see `funrl.trainer.generation.to_rows`.
    names = ("top_k", "top_p", "min_p", "repetition_penalty")
    given = [name for name in names if getattr(settings, name) != settings_flags()[name].default]
    if given and settings.temperature != 1:
        flags = " ".join(f"--{name}={getattr(settings, name)}" for name in given)
        raise SettingsError(
            f"--temperature={settings.temperature} with {flags}: the trainer needs the engine's log-probabilities "
            f"before {' and '.join(given)}, which it reports at temperature 1; use either a temperature, or "
            f"{' and '.join(given)} at temperature 1"
        )


def _check_schedule(settings: Settings) -> None:
    # The policy's schedule, the shorter one, decays over the updates that the critic's warm-up leaves it.
    updates = (settings.steps - settings.critic_warmup_steps) * settings.epochs * settings.minibatches
    if settings.lr_schedule != "constant" and settings.lr_warmup_steps >= max(updates, 1):
        raise SettingsError(
            f"--lr_warmup_steps={settings.lr_warmup_steps}: the run makes {updates} updates (steps x epochs x "
            f"minibatches) and --lr_schedule={settings.lr_schedule} needs some after the warm-up; use fewer"
        )


def _check_critic_warmup(settings: Settings) -> None:
    if settings.critic_warmup_steps >= settings.steps:
        raise SettingsError(
            f"--critic_warmup_steps={settings.critic_warmup_steps}: the policy would never learn; use fewer than "
            f"--steps={settings.steps}"
        )


def _check_minibatches(settings: Settings) -> None:
    rows = settings.batch_prompts * settings.samples_per_prompt
    if settings.minibatches > rows:
        raise SettingsError(f"--minibatches={settings.minibatches}: a batch has only {rows} rows")


def _check_remat(settings: Settings) -> None:
    if settings.remat == "selective" and settings.compile == "on":
        raise SettingsError("--remat=selective chooses among the operations that --compile=on makes into one; use one")


def _check_generate_mesh(settings: Settings) -> None:
    if settings.generate_mesh is None:
        return
    world, generating = devices(mesh_sizes(settings)), devices(mesh_sizes(settings, "generate_mesh"))
    if generating != world:
        raise SettingsError(
            f"--generate_mesh={settings.generate_mesh} has {generating} devices and --mesh={settings.mesh} "
            f"has {world}; they are two views of the same devices"
        )


def _check_sharding(settings: Settings) -> None:
    if not settings.fsdp:
        return
    named = parts(settings.fsdp_axes) or tuple(short for short, axis in SHORT.items() if axis in ROW_AXES)
    if devices(mesh_sizes(settings), [SHORT[short] for short in named]) == 1:
        raise SettingsError(
            f"--fsdp: the mesh {settings.mesh} has one device over {','.join(named)}, so none to shard over"
        )


def _check_lora(settings: Settings) -> None:
    if settings.lora_rank is None:
        return
    if settings.optimizer == "muon":
        raise SettingsError(
            f"--optimizer=muon with --lora_rank={settings.lora_rank}: Muon makes updates of whole matrices orthogonal, "
            "not those of thin factors; use --optimizer=adamw"
        )
    if settings.fsdp_models is not None:
        raise SettingsError(
            f"--fsdp_models={settings.fsdp_models} with --lora_rank={settings.lora_rank}: all models share one base, "
            "which is sharded or is not; leave it out"
        )


def _check_reward_timeout(settings: Settings) -> None:
    seconds = settings.reward_timeout
    if seconds is not None and seconds >= 60 * settings.timeout and devices(mesh_sizes(settings)) > 1:
        raise SettingsError(
            f"--reward_timeout={seconds:g}: the other ranks wait {settings.timeout} minutes for a rank's rewards; give "
            "a --timeout, in minutes, of more than that"
        )
