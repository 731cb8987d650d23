"""Checks of several flags together, and of the files that they name. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from funrl.data.cached_datasets import has_cached_model
from funrl.data.columns import Fields, parse_fields
from funrl.data.order import WeightedFile, weighted_files
from funrl.data.records import FORMATS, source_problem
from funrl.environments.agents import AgentMap, parse_agents
from funrl.loading import locate
from funrl.mesh.pools.placement import names_train
from funrl.mesh.text import SHORT, TOKEN_AXES, devices
from funrl.rewards.named import VERIFIERS, parse_rewards
from funrl.rollout.engine_abilities import engines_that
from funrl.tasks.embedded import TASK_NAMES, has_tokenizer_of
from funrl.trainer.settings.declaration import SettingsError, blaming, parts
from funrl.trainer.settings.records import TRACKERS, save_interval
from funrl.trainer.settings.scorers import (
    MODEL_FLAGS,
    NOTHING_GIVEN,
    SCORERS,
    Given,
    check_environment_flags,
    has_environment,
    model_paths,
    own_environment,
    scorers_of,
    weights_by_name,
)
from funrl.trainer.settings.settings import (
    TOKEN_MULTIPLE,
    Settings,
    check_needs,
    check_values,
    flag_value,
    given_flag,
    is_given,
    mesh_sizes,
    refuse_beside,
    settings_flags,
)

LARGEST = 3.4028234663852886e38  # largest float32, the trainer's dtype
DATA_FLAGS = {"prompts": "prompts", "data": "texts", "eval_data": "held-out data"}
REST_WEIGHT = 0.1  # weight of prompts outside --difficulty's pass rates, by default


def check_settings(
    settings: Settings, kind: str | None = None, rewarded: bool = True, given: Given = NOTHING_GIVEN
) -> None:
    """Check every flag by itself, then all together.

    Args:
      settings: the flags.
      kind: kind of the run, one of `declaration.RUN_KINDS`; None: not known yet, skip the checks that depend on it.
      rewarded: whether the algorithm uses rewards.
      given: in Python, instead of flags.

    Raises:
      SettingsError: the first flag that cannot work, with its value and a way out.
    """
    check_values(settings)
    check_together(settings, given)
    if kind == "rl" and not settings.estimate.dry_run:
        check_rewards(settings, rewarded, given)
    if kind == "supervised" and not settings.estimate.dry_run:
        check_data(settings)


def check_together(settings: Settings, given: Given = NOTHING_GIVEN) -> None:
    """Check combinations of flags that matter for every kind of run.

    Raises:
      SettingsError: as `check_settings`.
    """
    for check in ALWAYS:
        check(settings)
    if settings.examples.difficulty is not None:
        difficulty_of(settings.examples.difficulty)
    check_environment_flags(settings, given)
    if has_environment(settings, given):
        check_agents(settings)


def check_rewards(settings: Settings, rewarded: bool = True, given: Given = NOTHING_GIVEN) -> None:
    """Check that a run of reinforcement learning has prompts and, where `rewarded`, rewards.

    Raises:
      SettingsError: it does not.
    """
    own_prompts = settings.examples.prompts is not None or given.records is not None
    own_rewards = settings.rewards.reward is not None or given.rewards is not None
    episodes = has_environment(settings, given)
    if not own_prompts and own_environment(settings, given) is None:
        if own_rewards:
            what = "reward=..." if settings.rewards.reward is None else "{reward}"
            raise settings.refusal(f"{what} needs --prompts=FILE.jsonl")
        _check_embedded(settings, "--prompts=FILE.jsonl" + " and --reward=FILE.py:function" * rewarded)
    elif rewarded and not (own_rewards or scorers_of(settings) or episodes):
        what = "prompts=..." if settings.examples.prompts is None else "{prompts}"
        raise settings.refusal(f"{what} needs --reward=FILE.py:function or --reward_model=DIR")
    functions = 0 if episodes else 1  # of the embedded task
    if own_prompts and not episodes:
        functions = len(parts(settings.rewards.reward) if given.rewards is None else given.rewards)
    check_needs(settings, reward=functions, step_scores=settings.rewards.process_reward_model)
    if not episodes:
        weights_of_rewards(settings, functions)


def check_data(settings: Settings) -> None:
    """Check that the flags of a supervised run name texts. Raises: SettingsError."""
    if settings.examples.data is None:
        _check_embedded(settings, "--data=FILE.jsonl")


def _check_embedded(settings: Settings, needed: str) -> None:
    """Check the flags of a run on the embedded task, which a model with another tokenizer cannot complete.

    Args:
      needed: flags that name other data.
    """
    check_needs(settings, data=False)
    if settings.models.model is None:
        return
    folder = Path(settings.models.model)  # of a model, a run or a checkpoint
    places = folder, folder / "model", folder / "checkpoints" / "model", folder.parent / "model"
    own = next((place for place in places if (place / "tokenizer.json").is_file()), folder)
    if not has_tokenizer_of(settings.examples.task, own):
        fitting = [f"--task={name}, or " for name in TASK_NAMES if has_tokenizer_of(name, own)]
        raise settings.refusal("{model} needs {needed}", needed="".join([*fitting[:1], needed]))


def check_files(settings: Settings) -> None:
    """Check that files and directories named by flags exist, without reading them; check --fields too.

    A model name with an owner, such as Qwen/Qwen3-0.6B, is checked when it is loaded.

    Raises:
      SettingsError, LoadError: one is missing.
    """
    names_of_fields(settings)
    for name in () if settings.estimate.dry_run else ("prompts", "data", "eval_data"):
        for path, _ in data_files(settings, name):
            if problem := source_problem(path):
                raise SettingsError(f"--{name}: {path}: {problem}; {DATA_FLAGS[name]} are {FORMATS}, see --help")
    paths = [(name, path) for name in MODEL_FLAGS for path in model_paths(settings, name).values()]
    for name, path in paths:
        if settings.estimate.dry_run or Path(path).is_dir():
            continue
        named = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path)
        if not named or ("/" not in path and not has_cached_model(path)):
            nor = ", nor the name of a model in the local Hugging Face cache" if named else ""
            raise SettingsError(f"--{name}: {path} is not a directory{nor}")
    for part in () if settings.rewards.reward is None else parse_rewards(settings.rewards.reward):
        if part.source not in VERIFIERS:
            locate("reward", part.source)
    if settings.examples.curriculum is not None:
        locate("curriculum", settings.examples.curriculum)


def data_files(settings: Settings, flag: str) -> list[WeightedFile]:
    """The files that --prompts, --data or --eval_data names. Raises: SettingsError."""
    value = flag_value(settings, flag)
    with blaming(flag):
        return [] if value is None else weighted_files(value)


def names_of_fields(settings: Settings) -> Fields:
    """The columns that --fields names. Raises: DataError, which names the flag."""
    return parse_fields(settings.examples.fields)


class Difficulty(NamedTuple):
    """Pass rates of the prompts to train on, and the weight of the others, at least 0 and below 1."""

    low: float
    high: float
    rest: float


def difficulty_of(text: str) -> Difficulty:
    """The pass rates in "0.1,0.9" or "0.1,0.9,0.05".

    Raises:
      SettingsError: the text is not of this form.
    """
    try:
        low, high, *rest = (float(part) for part in parts(text))
        difficulty = Difficulty(low, high, *(rest or [REST_WEIGHT]))
    except (ValueError, TypeError):
        difficulty = Difficulty(1.0, 0.0, 0.0)
    if not (0 <= difficulty.low < difficulty.high <= 1 and 0 <= difficulty.rest < 1):
        raise SettingsError(f"--difficulty={text}: write LOW,HIGH or LOW,HIGH,WEIGHT, numbers from 0 to 1, as 0.1,0.9")
    return difficulty


def weights_of_rewards(settings: Settings, functions: int) -> tuple[float, ...]:
    """The weight of each reward in a completion's score: reward functions first, then models that score.

    Weights come from --reward_weights, or from --reward and DIR@0.5, or are 1.

    Args:
      settings: the flags.
      functions: number of reward functions.

    Raises:
      SettingsError: the number of weights is wrong, all are 0, or two flags give weights.
    """
    named = weights_by_name(settings, functions)
    rewards = functions + len(scorers_of(settings))
    given = settings.rewards.reward_weights or named
    if given is None:
        return (1.0,) * rewards
    flag = "--reward_weights" if named is None else "--reward with weights"
    if named not in (None, given):
        flags = {name: str(flag_value(settings, name)) for name in ("reward", *SCORERS)}
        where = " and ".join(f"--{name}={value}" for name, value in flags.items() if "@" in value)
        raise SettingsError(f"--reward_weights={given}: {where} gives weights too; give them in one place")
    try:
        weights = tuple(float(part) for part in parts(given))
    except ValueError:
        weights = ()
    # One negative weight is a penalty, which a policy can learn from.
    if len(weights) != rewards or not any(weights) or not all(abs(weight) <= LARGEST for weight in weights):
        raise SettingsError(
            f"{flag}={given}: give one number for each of the rewards ({rewards}), separated by commas, not all 0"
        )
    return weights


def check_requirements(s: Settings) -> None:
    """Refuse flags that do nothing without another one, or beside it. Raises: SettingsError."""
    for name, flag in settings_flags().items():
        read_later = flag.requires == "lora_rank" and _names_adapter(s)
        if flag.requires and is_given(s, name) and not (flag_value(s, flag.requires) or read_later):
            raise s.refusal(f"{{{name}}} does nothing without --{flag.requires}; give --{flag.requires} too")
        if flag_value(s, name) not in (flag.default, 0):
            refuse_beside(s, name)


def _names_adapter(s: Settings) -> bool:
    """True if a flag names adapters, whose rank, alpha and projections are read before the run."""
    folder = Path(s.models.model or "")
    alone = (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
    return s.adapters.adapter is not None or (s.models.model is not None and alone)


def check_engine_flags(s: Settings) -> None:
    """Refuse flags that an engine does not take. Raises: SettingsError."""
    abilities = s.engines.abilities
    check_needs(s, own_steps=abilities.own_steps, servers=abilities.servers, float8=abilities.float8)
    if s.estimate.dry_run and not abilities.own_steps:
        raise s.refusal("{dry_run} with {engine}: it counts the native engine; leave one of them out")
    if s.engines.engine_url is None and abilities.servers:
        raise s.refusal("{engine} needs --engine_url=http://HOST:PORT, which its servers print")
    if s.updates.foreign_rows == "drop" and not s.engines.verify_sync:
        raise s.refusal("{foreign_rows} with {verify_sync}: no digests are taken, so none is foreign; leave one out")
    # The trainer compares with the tempered model. With truncation or penalties the engine reports the log-probability
    # of the unmodified model, at temperature 1; see `funrl.trainer.sources.generation.to_rows`.
    truncating = [name for name in ("top_k", "top_p", "min_p") if is_given(s, name)]
    if s.sampling.mask_replay:
        _check_mask_replay(s, truncating)
        return
    if s.sampling.raw_logp:
        if s.sampling.temperature == 1:
            raise s.refusal("{raw_logp} does nothing at temperature 1, where it holds already; leave it out")
        return
    given = [*truncating, *(["repetition_penalty"] if is_given(s, "repetition_penalty") else [])]
    if given and s.sampling.temperature != 1:
        replay = truncating == given and abilities.kept_tokens
        raise s.refusal(
            "{temperature} with {flags}: the trainer needs the engine's log-probabilities before {names}, which it "
            "reports at temperature 1; use either a temperature, or {names} at temperature 1, or --raw_logp, which "
            "trains the model's own distribution" + ", or --mask_replay, which trains the truncated one" * replay,
            flags=" ".join(given_flag(s, name) for name in given),
            names=" and ".join(given),
        )


def _check_mask_replay(s: Settings, truncating: list[str]) -> None:
    if not truncating:
        raise s.refusal("{mask_replay} does nothing without --top_k, --top_p or --min_p; leave it out")
    if is_given(s, "repetition_penalty"):
        raise s.refusal("{mask_replay} with {repetition_penalty}: the trainer knows no penalty; leave one of them out")
    if not s.engines.abilities.kept_tokens:
        engines = engines_that("kept_tokens")
        raise s.refusal("{mask_replay} with {engine}: it records no masks; give --engine={engines}", engines=engines)


def check_run_length(s: Settings) -> None:
    """Refuse numbers of steps, updates and rows that do not fit each other. Raises: SettingsError."""
    check_needs(s, checkpoints=any(save_interval(s.run.save_every)))
    # The policy's schedule is the shorter one: it decays over the updates after the critic's warm-up.
    steps = s.run.steps - s.optimization.critic_warmup_steps
    updates = steps * s.updates.epochs * s.updates.minibatches
    if s.optimization.lr_schedule != "constant" and s.optimization.lr_warmup_steps >= max(updates, 1):
        raise s.refusal(
            "{lr_warmup_steps}: the run makes {updates} updates (steps x epochs x minibatches) and {lr_schedule} "
            "needs some after the warm-up; use fewer",
            updates=updates,
        )
    if steps <= 0:
        raise s.refusal("{critic_warmup_steps}: the policy would never learn; use fewer than {steps}")
    rows = s.run.batch_prompts * s.sampling.samples_per_prompt
    if s.updates.minibatches > rows:
        raise s.refusal(f"{{minibatches}}: --batch_prompts x --samples_per_prompt is {rows}; give --minibatches={rows}")


def agents_of(s: Settings) -> AgentMap:
    """The agents that --agents names. Raises: SettingsError, it cannot be read."""
    with blaming(f"agents={s.environments.agents}"):
        return parse_agents(s.environments.agents)


def check_placement(s: Settings) -> None:
    """Refuse flags that do not go with pools of ranks. Raises: SettingsError."""
    if is_given(s, "mesh") and (names_train(s.devices.place or "") or s.devices.placement is None):
        raise s.refusal("{mesh} does nothing: {place} gives the mesh to train on")
    abilities = s.engines.abilities
    if s.asynchrony.staleness and abilities.whole_only:
        raise s.refusal("{engine} and {staleness} with {place}: it takes no weights during a request; leave one out")
    if s.devices.generators is not None:
        _check_ray(s)
    if s.sampling.new_tokens_per_step is not None and s.asynchrony.staleness:
        raise s.refusal(
            "{new_tokens_per_step} with {staleness}: completions are written on during the updates anyway, by newer "
            "weights as these come, and the trainer waits only for its oldest group; leave --new_tokens_per_step out, "
            "and raise --staleness or --window if the trainer waits for long ones"
        )
    if s.sampling.new_tokens_per_step is not None:
        raise s.refusal(
            "{new_tokens_per_step} with {place}: unfinished completions stay with the ranks that save them, which "
            "train; leave --place out, or give --staleness instead: completions then go on during the updates"
        )


def _check_ray(s: Settings) -> None:
    """Refuse flags that do not go with generators on Ray. Raises: SettingsError."""
    abilities = s.engines.abilities
    if abilities.servers or abilities.whole_only:
        problem = "Ray starts generators as it has devices, and each would need a server of its own"
        if abilities.whole_only:
            problem = "requests of a batch share their noise, and time decides which ones a generator has together"
        raise s.refusal("{engine} with {place}: {problem}; give another engine, or generate:2", problem=problem)
    if s.devices.generators is not None and s.devices.generators.tensor > 1 and not abilities.own_steps:
        raise s.refusal("{engine} with {place}: generators on Ray of several devices are native; leave ,tp out")
    if not s.estimate.dry_run and not is_installed("ray"):
        raise s.refusal("{place}: ray is not installed; pip install 'funrl[ray]'")


def check_mesh_flags(s: Settings) -> None:
    """Refuse flags of devices that do not go with the meshes. Raises: SettingsError."""
    sizes = mesh_sizes(s)
    world = devices(sizes)
    if s.devices.place is not None:
        check_placement(s)
    elif generating := mesh_sizes(s, "generate_mesh"):
        if generating["sequence"] > 1:
            raise s.refusal("{generate_mesh}: generation does not split the tokens of a row; write dp for sp")
        if devices(generating) != world:
            raise s.refusal(
                f"{{generate_mesh}} has {devices(generating)} devices and {{mesh}} has {world}; give as many"
            )
    named = parts(s.sharding.fsdp_axes) or tuple(short for short, axis in SHORT.items() if axis in TOKEN_AXES)
    shards = devices(sizes, [SHORT[short] for short in named])
    check_needs(s, shards=shards > 1, sp=sizes["sequence"] > 1, tp=sizes["tensor"] > 1)
    if s.devices.split_residual == "on" and TOKEN_MULTIPLE % sizes["tensor"]:
        raise s.refusal(
            f"{{split_residual}}: the tokens of a micro-batch are a multiple of {TOKEN_MULTIPLE}, which "
            f"tp{sizes['tensor']} does not divide; leave it out, or choose a tp of 2, 4 or 8"
        )


def check_adapter_flags(s: Settings) -> None:
    """Check what cannot be with adapters. Raises: SettingsError."""
    if s.adapters.lora_rank is not None and s.optimization.optimizer == "muon":
        raise s.refusal("{optimizer} with {lora_rank}: Muon takes matrices, no low-rank factors; use --optimizer=adamw")
    if s.adapters.nf4:
        check_nf4_flags(s)


def check_nf4_flags(s: Settings) -> None:
    """Refuse a base in 4 bits where nothing computes with it. Raises: SettingsError."""
    if devices(mesh_sizes(s)) > 1:
        raise s.refusal(
            "{base_format} with {mesh}: bytes and scales of 4 bits are not split or gathered; leave {mesh} out"
        )
    if s.devices.place is not None:
        raise s.refusal("{base_format} with {place}: a base in 4 bits is on one device; leave {place} out")
    if s.models.backend != "torch" or s.devices.device == "xla":
        raise s.refusal("{base_format}: weights in 4 bits are expanded by operators of torch for CPUs and GPUs alone")
    if s.engines.float8:
        raise s.refusal("{rollout_dtype} with {base_format}: products are of weights in 8 or in 4 bits; leave one out")
    if not s.estimate.dry_run and not is_installed("bitsandbytes"):
        raise s.refusal("{base_format}: bitsandbytes is not installed; pip install 'funrl[nf4]'")


def is_installed(module: str) -> bool:
    """True if a module can be imported, by its name with those of its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def check_outputs(s: Settings) -> None:
    """Refuse trackers that are not installed, and steps and ranks that the run does not have. Raises: SettingsError."""
    world = devices(mesh_sizes(s))
    for name in () if s.estimate.dry_run else parts(s.outputs.report_to):
        if not is_installed(TRACKERS[name]):
            package = TRACKERS[name].replace(".", "-")
            raise s.refusal("{report_to}: {name} is not installed; pip install {package}", name=name, package=package)
    if s.outputs.metrics_port is not None and not s.estimate.dry_run and not is_installed("prometheus_client"):
        raise s.refusal("{metrics_port}: prometheus_client is not installed; pip install prometheus-client")
    window = s.outputs.window
    if window is not None and window.last > s.run.steps:
        raise s.refusal(f"{{profile}}: the trace would end with step {window.last}, but {{steps}}; give steps of it")
    ranks = () if s.outputs.profile_ranks == "all" else parts(s.outputs.profile_ranks)
    if beyond := [rank for rank in ranks if int(rank) >= world]:
        raise s.refusal(f"{{profile_ranks}}: the mesh {s.devices.mesh} has the ranks 0 to {world - 1}, not {beyond[0]}")
    seconds = s.rewards.reward_timeout
    if seconds is not None and seconds >= 60 * s.waiting.timeout and world > 1:
        raise s.refusal(f"{{reward_timeout}}: other ranks wait {s.waiting.timeout} minutes; give a longer --timeout")


def check_agents(s: Settings) -> None:
    """Refuse flags that do not go with several models, or with episodes across steps. Raises: SettingsError."""
    agents = agents_of(s)
    further = bool(agents.frozen or agents.policies)
    if further and not s.engines.abilities.several_models:
        engines = engines_that("several_models")
        raise s.refusal(f"{{agents}} with {{engine}}: further models are served by --engine={engines}; give that one")
    if s.adapters.nf4 and further:
        raise s.refusal("{agents} with {base_format}: further models have whole weights; leave {base_format} out")
    if s.sampling.new_tokens_per_step is not None and further:
        raise s.refusal("{agents} with --new_tokens_per_step: episodes across steps have one model; leave one out")


ALWAYS = (
    check_requirements,
    check_engine_flags,
    check_run_length,
    check_mesh_flags,
    check_adapter_flags,
    check_outputs,
)
