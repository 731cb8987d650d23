"""Values of flags that do not go together. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import re

from funrl.environments.agents import parse_agents
from funrl.mesh.pools.placement import names_train
from funrl.mesh.text import SHORT, TOKEN_AXES, devices
from funrl.rollout.engine_abilities import engines_that
from funrl.trainer.settings.declaration import blaming, parts
from funrl.trainer.settings.runs import save_interval
from funrl.trainer.settings.settings import (
    TOKEN_MULTIPLE,
    Settings,
    flag_value,
    given_flag,
    is_given,
    mesh_sizes,
    refuse_beside,
    settings_flags,
)


def check_requirements(s: Settings) -> None:
    """Refuse flags that do nothing without another one, or beside it. Raises: SettingsError."""
    for name, flag in settings_flags().items():
        value = flag_value(s, name)
        if flag.requires and is_given(s, name) and not flag_value(s, flag.requires):
            raise s.refusal(f"{{{name}}} does nothing without --{flag.requires}; give --{flag.requires} too")
        if value not in (flag.default, 0):
            refuse_beside(name, value, s)
    if s.run.resume and s.run.overwrite:
        raise s.refusal("--overwrite starts over and --resume continues; leave one of them out")
    if s.models.model is not None and is_given(s, "task"):
        raise s.refusal(
            "{task} with {model}: the task trains its own decoder, but --model gives another; leave one of them out"
        )


def check_engine_flags(s: Settings) -> None:
    """Refuse flags that an engine does not take. Raises: SettingsError."""
    abilities = s.engines.abilities
    if s.estimate.dry_run and not abilities.own_steps:
        raise s.refusal("{engine}: --dry_run counts the native engine; leave one of them out")
    if s.engines.speculate and not abilities.own_steps:
        raise s.refusal("{speculate} does nothing with {engine}; leave it out")
    if s.engines.engine_url is not None and not abilities.servers:
        raise s.refusal(f"{{engine_url}} does nothing without --engine={engines_that('servers')}")
    if s.engines.engine_url is None and abilities.servers:
        raise s.refusal("{engine} needs --engine_url=http://HOST:PORT, which its servers print")
    for url in parts(s.engines.engine_url):
        if not re.fullmatch(r"http://[^/:]+:\d+/?", url):
            raise s.refusal("{engine_url}: {url} is not http://HOST:PORT", url=url)
    # The trainer compares with the tempered model. With truncation or penalties the engine reports the log-probability
    # of the unmodified model, at temperature 1; see `funrl.trainer.sources.generation.to_rows`.
    given = [name for name in ("top_k", "top_p", "min_p", "repetition_penalty") if is_given(s, name)]
    if given and s.sampling.temperature != 1:
        raise s.refusal(
            "{temperature} with {flags}: the trainer needs the engine's log-probabilities before {names}, which it "
            "reports at temperature 1; use either a temperature, or {names} at temperature 1",
            flags=" ".join(given_flag(s, name) for name in given),
            names=" and ".join(given),
        )


def check_run_length(s: Settings) -> None:
    """Refuse numbers of steps, updates and rows that do not fit each other. Raises: SettingsError."""
    if is_given(s, "keep_checkpoints") and not any(save_interval(s.run.save_every)):
        raise s.refusal("{keep_checkpoints} does nothing with {save_every}, which writes no checkpoints")
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
        raise s.refusal(
            f"{{minibatches}}: a batch has only {rows} row{'s' * (rows > 1)}, --batch_prompts x --samples_per_prompt; "
            f"give --minibatches={rows} or fewer"
        )


def has_further_agents(s: Settings) -> bool:
    """True if --agents names models besides the policy. Raises: SettingsError, it cannot be read."""
    with blaming(f"agents={s.environments.agents}"):
        agents = parse_agents(s.environments.agents)
    return bool(agents.frozen or agents.policies)


def check_placement(s: Settings) -> None:
    """Refuse flags that do not go with pools of ranks. Raises: SettingsError."""
    if s.devices.generate_mesh is not None:
        raise s.refusal("{generate_mesh} does nothing: {place} gives the mesh to generate on")
    if is_given(s, "mesh") and (names_train(s.devices.place or "") or s.devices.placement is None):
        raise s.refusal("{mesh} does nothing: {place} gives the mesh to train on")
    abilities = s.engines.abilities
    if s.asynchrony.staleness and abilities.whole_only and not s.devices.joined:
        raise s.refusal(
            "{engine} and {staleness} with {place}: it completes whole requests, and takes no weights meanwhile; leave "
            "--staleness out, or give another --engine"
        )
    if s.devices.joined:
        _check_joined(s)
    if s.asynchrony.clock == "tokens" and not abilities.own_steps:
        raise s.refusal(
            "{clock} with {engine}: what it computes in an iteration is its own; leave it out, or give --engine=native"
        )
    if s.asynchrony.keep_cache and not abilities.own_steps:
        raise s.refusal(
            "{keep_cache} with {engine}: it computes keys and values of running sequences again under new weights; "
            "leave it out, or give --engine=native"
        )
    if s.sampling.new_tokens_per_step is not None and s.asynchrony.staleness and not s.devices.joined:
        raise s.refusal(
            "{new_tokens_per_step} with {staleness}: completions are written on during the updates anyway, by newer "
            "weights as these come, and the trainer waits only for its oldest group; leave --new_tokens_per_step out, "
            "and raise --staleness or --window if the trainer waits for long ones"
        )
    if s.sampling.new_tokens_per_step is not None:
        raise s.refusal("{new_tokens_per_step} with {place}: every rank has to generate then; leave --place out")


def _check_joined(s: Settings) -> None:
    """Refuse flags that do not go with generators of other jobs. Raises: SettingsError."""
    weights = "with {place}: generators that join have the policy's weights alone, and return log-probabilities"
    order = "does nothing with {place}: rows are taken in their order, each of one version"
    problems = {
        "engine": (not s.engines.abilities.own_steps, "with {place}: generators that join have the native engine"),
        "clock": (s.asynchrony.clock != "wall", "with {place}: generators join when they like, and order nothing"),
        "agents": (has_further_agents(s), weights),
        "router_replay": (s.routers.router_replay, weights),
        "window": (s.asynchrony.window > 1, order),
        "keep_cache": (s.asynchrony.keep_cache, order),
    }
    for name, (given, problem) in problems.items():
        if given:
            raise s.refusal(f"{{{name}}} {problem}; leave it out, or give ranks that generate, as generate:2")


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
                f"{{generate_mesh}} has {devices(generating)} devices and {{mesh}} has {world}; both must have the "
                "same devices"
            )
    named = parts(s.sharding.fsdp_axes) or tuple(short for short, axis in SHORT.items() if axis in TOKEN_AXES)
    if s.sharding.fsdp and devices(sizes, [SHORT[short] for short in named]) == 1:
        raise s.refusal(
            f"--fsdp: the mesh {s.devices.mesh} has only one device over {','.join(named)}: nothing to shard over"
        )
    if s.devices.sequence_parallel != "auto" and sizes["sequence"] == 1:
        raise s.refusal("{sequence_parallel} does nothing: {mesh} has no sp")
    if s.devices.split_residual != "auto" and sizes["tensor"] == 1:
        raise s.refusal("{split_residual} does nothing: {mesh} has no tp")
    if s.devices.split_residual == "on" and TOKEN_MULTIPLE % sizes["tensor"]:
        raise s.refusal(
            f"{{split_residual}}: the tokens of a micro-batch are a multiple of {TOKEN_MULTIPLE}, which "
            f"tp{sizes['tensor']} does not divide; leave it out, or choose a tp of 2, 4 or 8"
        )


def check_adapter_flags(s: Settings) -> None:
    """Check what cannot be with adapters. Raises: SettingsError."""
    if s.adapters.lora_rank is None:
        return
    if s.optimization.optimizer == "muon":
        raise s.refusal(
            "{optimizer} with {lora_rank}: Muon orthogonalises updates of whole matrices, not of low-rank factors; use "
            "--optimizer=adamw"
        )
    if s.routers.router_bias_rate:
        raise s.refusal(
            "{router_bias_rate} with {lora_rank}: the biases belong to the base, which is frozen; leave one out"
        )
    if s.sharding.fsdp_models is not None:
        raise s.refusal(
            "{fsdp_models} with {lora_rank}: all models share one base, which is sharded as a whole; leave it out"
        )


def check_outputs(s: Settings) -> None:
    """Refuse trackers that are not installed, and steps and ranks that the run does not have. Raises: SettingsError."""
    world = devices(mesh_sizes(s))
    for name in () if s.estimate.dry_run else parts(s.outputs.report_to):
        if importlib.util.find_spec(name) is None:
            raise s.refusal("{report_to}: {name} is not installed; pip install {name}", name=name)
    window = s.outputs.window
    if window is not None and window.last > s.run.steps:
        raise s.refusal(
            f"{{profile}}: the trace would end with step {window.last}, but {{steps}}; give steps of the run"
        )
    ranks = () if s.outputs.profile_ranks == "all" else parts(s.outputs.profile_ranks)
    if beyond := [rank for rank in ranks if int(rank) >= world]:
        raise s.refusal(f"{{profile_ranks}}: the mesh {s.devices.mesh} has the ranks 0 to {world - 1}, not {beyond[0]}")
    seconds = s.rewards.reward_timeout
    if seconds is not None and seconds >= 60 * s.waiting.timeout and world > 1:
        raise s.refusal(
            f"{{reward_timeout}}: the other ranks wait only {s.waiting.timeout} minutes for a rank's rewards; give a "
            "longer --timeout, in minutes"
        )


def check_agents(s: Settings) -> None:
    """Refuse flags that do not go with several models, or with episodes across steps. Raises: SettingsError."""
    further = has_further_agents(s)
    if further and not s.engines.abilities.several_models:
        engines = engines_that("several_models")
        raise s.refusal(f"{{agents}} with {{engine}}: further models are served by --engine={engines}; give that one")
    if s.sampling.new_tokens_per_step is not None and s.environments.env_workers:
        raise s.refusal(
            "{env_workers} with --new_tokens_per_step: episodes across steps wait in the rank's own process; leave one "
            "of them out"
        )
    if s.sampling.new_tokens_per_step is not None and further:
        raise s.refusal(
            "{agents} with --new_tokens_per_step: episodes across steps have one model; leave one of them out"
        )


ALWAYS = (
    check_requirements,
    check_engine_flags,
    check_run_length,
    check_mesh_flags,
    check_adapter_flags,
    check_outputs,
)
