"""Every number and name that a run takes from outside: one field is one flag, with its bounds where it is defined.

Whether a value is good, what a command line's text means, the help and the table in docs/flags.md come from the
declaration of the field. What depends on several flags is checked by the functions of `checks.py`. Nothing here imports
torch.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from funrl import seeds
from funrl.mesh.text import SHORT, TOKEN_AXES, MeshError, parse, wanted_devices
from funrl.rewards.named import VERIFIERS
from funrl.tasks import arithmetic
from funrl.trainer.declaration import (
    RL,
    SUPERVISED,
    Bound,
    Flag,
    SettingsError,
    above,
    at_least,
    at_most,
    below,
    flag,
    one_of,
    some_of,
    value_type,
)
from funrl.trainer.scorers import weights_by_name

GROUPS = {"job": "What to do", "devices": "Where", "rollout": "Generation", "update": "Training", "output": "Output"}
ROLES = ("policy", "critic", "reference", "implicit_reward", "reward_model", "process_reward_model", "teacher")
TRACKERS = ("wandb", "mlflow", "trackio", "swanlab")
SCORE_BUDGETS = 4  # token budgets in one forward pass without a gradient, where no flag says
TOKEN_MULTIPLE = 8  # a rank's tokens of a micro-batch are a multiple of it
NEW_TOKENS = 64  # of a completion, where neither a flag nor the embedded task says
PROFILE = r"([1-9]\d{0,8}):([1-9]\d{0,3})"  # STEP:COUNT
INTERVAL = re.compile(r"(\d{1,9})([smh]?)")
NEW_TOKENS_FROM_SCRATCH = 32  # the same without --model; the embedded task's decoder has 64 positions


@dataclass(frozen=True)
class Settings:
    """The flags of every run. None means: the run chooses."""

    mesh: str = flag(
        "dp1", "devices", "devices by axis, dp (data), ep (expert), sp (sequence) or tp (tensor), such as dp4,tp2; "
        "auto:8 chooses, and --fsdp too, by a dry run"
    )  # fmt: skip
    generate_mesh: str | None = flag(
        None, "devices", "the same devices while generating", chosen="all of them dp", kinds=RL
    )
    device: str | None = flag(
        None, "devices", "where tensors live", one_of("cpu", "cuda"), chosen="cuda where there is one"
    )
    dtype: str = flag(
        "float32",
        "devices",
        "what forward passes compute in (bfloat16 keeps float32 master weights)",
        one_of("float32", "float64", "bfloat16"),
    )
    fsdp: bool = flag(False, "devices", "shard weights, gradients and optimizer states over data and sp too")
    fsdp_axes: str | None = flag(
        None,
        "devices",
        "what --fsdp shards over; on dp2,ep4 ep makes shards of 4, twice",
        some_of(*(short for short, axis in SHORT.items() if axis in TOKEN_AXES)),
        chosen="all; over several nodes inside of each, if that fits",
        requires="fsdp",
    )
    fsdp_models: str | None = flag(
        None, "devices", "which models --fsdp shards", some_of(*ROLES), chosen="all", requires="fsdp"
    )
    sequence_parallel: str = flag(
        "auto", "devices", "attention where sp splits tokens of rows: ulysses exchanges heads for tokens, ring sends "
        "keys from rank to rank; auto: ulysses where the heads divide",
        one_of("auto", "ulysses", "ring"),
    )  # fmt: skip
    split_residual: str = flag(
        "auto", "devices", "split tokens between the halves of a layer over tp, whose norms and residuals then take "
        "1 / tp of the memory; auto: on GPUs",
        one_of("auto", "on", "off"),
    )  # fmt: skip
    remat: str = flag(
        "none",
        "devices",
        "what a backward pass computes again: full a whole layer, selective all of it but matmuls",
        one_of("none", "full", "selective"),
    )
    offload: str | None = flag(
        None,
        "devices",
        "what leaves a GPU while it is not needed",
        some_of("optimizer", "reference", "params"),
        kinds=RL,
    )
    hardware: str | None = flag(
        None,
        "devices",
        "whose memory and speed --dry_run takes",
        one_of("a100", "h100", "h200", "mi300x", "cpu"),
        chosen="h100",
        requires="dry_run",
    )
    timeout: int = flag(
        60, "devices", "minutes that a rank waits for another, such as for its reward", at_least(1), at_most(525600)
    )
    heartbeat: int = flag(
        60, "devices", "seconds without progress after which the run says for which rank, host and phase it waits",
        at_least(1), at_most(86400),
    )  # fmt: skip
    kv_cache_gb: float | None = flag(
        None, "devices", "keys and values that a rank may keep while it generates, in 1e9 bytes; what does not fit "
        "waits, or is computed again",
        above(0), kinds=RL, chosen="half of the memory that is free then",
    )  # fmt: skip
    decode_rows: int = flag(512, "devices", "completions that a rank decodes together at most", at_least(1), kinds=RL)
    speculate: int = flag(
        0, "devices", "tokens of a completion that are drafted by what followed before in its text, and drawn in one "
        "pass where few rows are decoded; 0: none. A draft changes no completion",
        at_least(0), kinds=RL,
    )  # fmt: skip
    queue: str = flag(
        "tickets", "devices", "how prompts come to ranks that generate: tickets, as a rank has room for them; fixed, "
        "by their numbers, which a run on GPUs needs to be repeated exactly",
        one_of("tickets", "fixed"), kinds=RL,
    )  # fmt: skip
    compile: str = flag(
        "auto", "devices", "compile one decoder layer; auto: where it pays, on CUDA", one_of("on", "off", "auto")
    )

    model: str | None = flag(
        None,
        "job",
        "Hugging Face directory, or name of a model in its local cache",
        chosen="a small decoder from scratch",
    )
    model_code: str = flag(
        "auto", "job", "whose code computes models: native, this package's decoder; hf, transformers' own, data "
        "parallel only; auto: native where it can",
        one_of("auto", "native", "hf"), requires="model",
    )  # fmt: skip
    resize_vocab: bool = flag(
        False, "job", "give the model rows for tokens that only its tokenizer has, each the mean of the others",
        requires="model",
    )  # fmt: skip
    task: str = flag(
        "arithmetic", "job", "the embedded task, unless --prompts or --data is given; arithmetic_moe: by a decoder "
        "with experts",
        one_of(*arithmetic.MODELS),
    )  # fmt: skip
    prompts: str | None = flag(
        None, "job", "prompts, text or chat messages, with fields: a .jsonl, .json, .csv or .parquet file, a directory "
        "that `datasets` saved, or a dataset in the local Hugging Face cache, such as openai/gsm8k:main:train; several "
        "as a.jsonl@0.7,b.parquet@0.3",
        kinds=RL,
    )  # fmt: skip
    reward: str | None = flag(
        None,
        "job",
        "FILE.py:function, of (prompt, completion, **fields), or one of "
        f"{', '.join(VERIFIERS)}; several as math,format@0.1",
        kinds=RL,
    )
    reward_model: str | None = flag(
        None, "job", "directory of a reward model, whose scores are added to those of --reward or of the embedded "
        "task, times 0.5 with DIR@0.5; with --prompts it may be all that scores",
        kinds=RL,
    )  # fmt: skip
    process_reward_model: str | None = flag(
        None, "job", "directory of a reward model that scores the end of every step of a completion", kinds=RL
    )
    process_reward: str | None = flag(
        None, "job", "what its scores are: each a reward of the token that ends the step, or one reward of the "
        "completion",
        one_of("each", "min", "mean", "last", "product"), kinds=RL, requires="process_reward_model",
        chosen="each, where the algorithm reads rewards of tokens, else min",
    )  # fmt: skip
    step_separator: str | None = flag(
        None, "job", "text between two steps of a solution, such as \\n\\n for an empty line",
        chosen="\\n; in the embedded task every token is a step",
    )  # fmt: skip
    judge: str | None = flag(
        None, "job", "directory of a model that writes a verdict on each completion, which is a reward", kinds=RL
    )
    judge_template: str | None = flag(
        None, "job", "file with the text that it is given, in which {{prompt}}, {{completion}} and {{FIELD}} stand",
        kinds=RL, requires="judge", chosen="a plain request for a number from 0 to 10",
    )  # fmt: skip
    judge_pattern: str = flag(
        r"\[\[(-?[\d.]+)\]\]", "job", "regular expression whose last match in a verdict has the number",
        kinds=RL, requires="judge",
    )  # fmt: skip
    judge_max_new_tokens: int = flag(256, "job", "tokens of a verdict", at_least(1), kinds=RL, requires="judge")
    reward_weights: str | None = flag(
        None, "job", "one number for each of --reward, then for --reward_model, --process_reward_model and --judge: "
        "1,0.5",
        chosen="those in --reward and DIR@0.5, else 1", kinds=RL,
    )  # fmt: skip
    on_reward_error: str = flag(
        "stop", "job", "where a reward fails: stop the run, take it as zero, or skip the completion in training",
        one_of("stop", "zero", "skip"), kinds=RL,
    )  # fmt: skip
    reward_workers: int | None = flag(
        None, "job", "processes of a rank that run --reward while it generates; 0: the rank does, afterwards",
        at_least(0), kinds=RL,
        chosen="the rank's share of the cores, up to 16 where functions mostly wait; 0 with the embedded task",
    )  # fmt: skip
    reward_timeout: float | None = flag(
        None, "job", "seconds that a call of a reward function may take in a worker", above(0), chosen="600", kinds=RL
    )
    data: str | None = flag(
        None,
        "job",
        'file to learn from, or several, as --prompts takes them, each record {"prompt": ..., "completion": ...}, for '
        'kto with a "label", {"prompt": ..., "chosen": ..., "rejected": ...}, or of steps {"prompt": ..., '
        '"completions": [...], "labels": [...]}',
        chosen="made of the embedded task",
        kinds=SUPERVISED,
    )
    fields: str | None = flag(
        None, "job", "columns of --prompts or --data that have other names: prompt:question,answer:extra_info.answer"
    )
    eval_data: str | None = flag(
        None, "job", "held-out data, as --prompts or --data", chosen="a tenth of these, which --seed chooses"
    )
    prompt_template: str | None = flag(
        None, "job", "text, or a .txt file of it, with {prompt} where a prompt that is text goes",
        Bound("a text with {prompt} in it, or a .txt file", lambda x: "{prompt}" in x or x.endswith((".txt", ".md"))),
    )  # fmt: skip
    system_prompt: str | None = flag(
        None, "job", "text, or a .txt file of it, of a system message before prompts that begin with none"
    )
    few_shot: str | None = flag(
        None, "job", "solved examples before every prompt: FILE:n, the first n records, each with a prompt and a "
        "completion, answer or solution",
        kinds=RL,
    )  # fmt: skip
    chat_template: str | None = flag(
        None, "job", "FILE.jinja instead of the tokenizer's chat template, or own, the tokenizer's: with this flag, "
        "--system_prompt, --tools or --template_arguments a prompt that is text is a user's message",
        Bound("own, or a .jinja file", lambda x: x == "own" or x.endswith(".jinja")),
    )  # fmt: skip
    tools: str | None = flag(None, "job", "FILE.json with a list of JSON schemas of tools, for the chat template")
    template_arguments: str | None = flag(None, "job", "further arguments of the chat template: enable_thinking:false")
    long_prompts: str = flag(
        "error", "job", "what is done with prompts and texts that are too long: error, drop, or truncate, prompts to "
        "their last tokens",
        one_of("error", "drop", "truncate"),
    )  # fmt: skip
    max_prompt_tokens: int | None = flag(
        None, "job", "tokens of a prompt at most", at_least(1), kinds=RL,
        chosen="what --max_new_tokens leaves of the model's positions",
    )  # fmt: skip
    max_text_tokens: int | None = flag(
        None, "job", "tokens of a prompt and its completion at most", at_least(2), kinds=SUPERVISED,
        chosen="the model's positions",
    )  # fmt: skip
    curriculum: str | None = flag(
        None, "job", "FILE.py:function that weights the prompts before each step, by the metrics so far", kinds=RL
    )
    difficulty: str | None = flag(
        None, "job", "LOW,HIGH or LOW,HIGH,WEIGHT: prompts whose measured pass rate is outside are drawn with this "
        "weight, by default 0.1, and 0 is never again",
        kinds=RL,
    )  # fmt: skip
    teacher: str | None = flag(
        None, "job", "Hugging Face directory of a model to distil from, with the policy's tokenizer"
    )
    teacher_top_k: int = flag(
        64, "job", "most likely tokens of the teacher in each place, for algorithms that read them", at_least(1)
    )
    steps: int = flag(30, "job", "steps, each of one batch of rollouts or of given texts", at_least(1))
    batch_prompts: int = flag(128, "job", "prompts, demonstrations or pairs a step", at_least(1))
    warmstart_steps: int | None = flag(
        None,
        "job",
        "supervised steps before, on imperfect demonstrations",
        at_least(0),
        chosen="the task's, 0 with --model, --prompts or --data",
    )
    seed: int = flag(0, "job", "seed of everything random", at_least(0), below(seeds.LIMIT, "2^63"))
    dry_run: bool = flag(False, "job", "only print memory, traffic and time of a step; needs a config.json")
    prompt_tokens: int | None = flag(
        None,
        "job",
        "tokens of a prompt that --dry_run takes",
        at_least(1),
        chosen="the embedded task's longest, else 512, or what the model has positions for",
        kinds=RL,
        requires="dry_run",
    )
    text_tokens: int | None = flag(
        None,
        "job",
        "tokens of a prompt and its completion that --dry_run takes",
        at_least(1),
        chosen="the embedded task's longest, else --max_text_tokens, else 1024",
        kinds=SUPERVISED,
        requires="dry_run",
    )
    json: bool = flag(False, "job", "print what --dry_run finds as one JSON object", requires="dry_run")
    run_dir: str | None = flag(None, "job", "where results go", chosen="runs/NAME-TIME")
    save_every: str = flag(
        "10m", "job", "steps between checkpoints in --run_dir, such as 50, or a time, such as 10m; 0: none",
        Bound("a number of steps, or a time such as 90s, 10m or 2h", lambda x: INTERVAL.fullmatch(x) is not None),
    )  # fmt: skip
    keep_checkpoints: int = flag(
        2, "job", "newest checkpoints that are kept; so is the one with the best held-out result", at_least(1)
    )
    save_rollouts: int = flag(
        0, "job", "steps between those whose rows and scores are kept, for `funrl replay`; 1: all, 0: none",
        at_least(0),
    )  # fmt: skip
    keep_rollouts: int | None = flag(
        None, "job", "newest of these steps that are kept", at_least(1), chosen="all", requires="save_rollouts"
    )
    profile: str | None = flag(
        None, "output", "STEP:COUNT, such as 3:1: a trace of so many steps from this one on, in profile/ of the run "
        "directory, for Perfetto or Chrome",
        Bound("a step and a number of steps, such as 3:1", lambda x: re.fullmatch(PROFILE, x) is not None),
    )  # fmt: skip
    profile_ranks: str = flag(
        "0", "output", "ranks that write one: some, such as 0,8, or all",
        Bound("all or some numbers, such as 0,8", lambda x: re.fullmatch(r"all|\d{1,6}(,\d{1,6})*", x) is not None),
        requires="profile",
    )  # fmt: skip
    resume: bool = flag(False, "job", "continue the run in --run_dir from its newest checkpoint", requires="run_dir")

    engine: str = flag(
        "native", "rollout", "what generates", one_of("native", "vllm", "vllm_server", "hf"), kinds=RL
    )  # fmt: skip
    engine_url: str | None = flag(
        None, "rollout", "addresses of a vllm_server for each data rank",
        kinds=RL,
    )  # fmt: skip
    engine_timeout: float | None = flag(
        None, "rollout", "seconds that such a server may be silent", above(0),
        kinds=RL, chosen="600", requires="engine_url",
    )  # fmt: skip
    samples_per_prompt: int = flag(8, "rollout", "completions of each prompt", at_least(1), kinds=RL)
    max_new_tokens: int | None = flag(
        None, "rollout", "tokens a completion may have", at_least(1), kinds=RL,
        chosen="the embedded task's; with --prompts 64, or 32 without --model",
    )  # fmt: skip
    new_tokens_per_step: int | None = flag(
        None, "rollout", "tokens that a completion may be continued by in a step, fewer than --max_new_tokens; the "
        "rest is written in later steps, by their weights",
        at_least(1), kinds=RL, chosen="whole completions",
    )  # fmt: skip
    temperature: float = flag(
        1.0, "rollout", "of sampling; the trainer's log-probabilities use it too", above(0), kinds=RL
    )
    top_k: int = flag(0, "rollout", "sample among the k most likely tokens; 0: all", at_least(0), kinds=RL)
    top_p: float = flag(
        1.0, "rollout", "sample among the most likely tokens of this total probability", above(0), at_most(1), kinds=RL
    )
    min_p: float = flag(
        0.0, "rollout", "tokens with this part of the top probability", at_least(0), at_most(1),
        kinds=RL,
    )  # fmt: skip
    repetition_penalty: float = flag(
        1.0, "rollout", "above 1 makes tokens that were there less likely", above(0), kinds=RL
    )
    max_refills: int = flag(
        8, "rollout", "prompts are sampled until the algorithm's filter keeps a batch of them, at most so many batches",
        at_least(1), kinds=RL,
    )  # fmt: skip
    verify_sync: bool = flag(
        True, "rollout", "compare all bits of the engine's weights with the trainer's after every sync", kinds=RL
    )  # fmt: skip
    probe_sync_every: int = flag(
        50, "rollout", "steps between syncs after which the engine's log-probabilities of a fixed text are compared "
        "with the trainer's; so they are after the first; 0: never",
        at_least(0), kinds=RL,
    )  # fmt: skip

    lr: float | None = flag(
        None, "update", "peak learning rate of the policy, or of the model that learns", above(0),
        chosen="1e-3 from scratch; with --model 0.2 / sqrt(its parameters), sft and reward models 1 / sqrt, 5e-7 to "
        "1e-3; --lora_rank: 3e-3, 10 times",
    )  # fmt: skip
    critic_lr: float | None = flag(
        None, "update", "peak learning rate of the critic", above(0), chosen="twice the policy's", kinds=RL
    )
    implicit_reward_lr: float | None = flag(
        None, "update", "peak learning rate of the implicit reward model", above(0), chosen="the policy's", kinds=RL
    )
    critic_warmup_steps: int = flag(0, "update", "first steps in which only the critic learns", at_least(0), kinds=RL)
    lora_rank: int | None = flag(
        None, "update", "rank of adapters (LoRA) that learn instead of the weights, which are the reference too",
        at_least(1), chosen="all weights learn",
    )  # fmt: skip
    lora_alpha: float | None = flag(
        None, "update", "adapters count by alpha / rank", above(0), chosen="the rank", requires="lora_rank"
    )
    lora_targets: str = flag(
        "all-linear", "update", "projections that have adapters, by PEFT's names: q_proj,v_proj",
        requires="lora_rank",
    )  # fmt: skip
    optimizer: str = flag("adamw", "update", "muon is for matrices; the rest takes adamw", one_of("adamw", "muon"))
    lr_schedule: str = flag("constant", "update", "after the warm-up", one_of("constant", "linear", "cosine"))
    lr_warmup_steps: int = flag(0, "update", "optimizer steps of linear warm-up", at_least(0))
    weight_decay: float = flag(0.0, "update", "decoupled, of matrices only", at_least(0))
    max_grad_norm: float = flag(1.0, "update", "gradients are scaled down to this global norm", above(0))
    router_aux_coef: float = flag(
        0.0, "update", "how much the uneven load of experts counts in the loss; with several micro-batches an update "
        "it takes a forward pass more", at_least(0),
    )  # fmt: skip
    router_z_coef: float = flag(0.0, "update", "how much large logits of routers count in the loss", at_least(0))
    router_bias_rate: float = flag(
        0.0, "update", "how far an update moves the bias by which an expert is chosen, against its load, as in "
        "DeepSeek-V3 (0.001)", at_least(0),
    )  # fmt: skip
    router_replay: bool = flag(
        False, "update", "train the policy with the experts that its tokens went to in the engine", kinds=RL
    )
    epochs: int = flag(1, "update", "passes over each batch of rollouts", at_least(1), kinds=RL, without=1)
    minibatches: int = flag(2, "update", "optimizer steps a pass", at_least(1), kinds=RL, without=1)
    max_skipped: int = flag(
        3, "update", "updates in a row that may be left out because their loss or gradient is not finite; then the run "
        "stops",
        at_least(1),
    )  # fmt: skip
    token_budget: int = flag(16384, "update", "tokens of a micro-batch on one device", at_least(1))
    score_token_budget: int | None = flag(
        None, "update", "the same where nothing is learned: scoring, and the loss on held-out texts", at_least(1),
        chosen="4 times --token_budget",
    )  # fmt: skip

    eval_every: int = flag(10, "output", "steps between evaluations; first and last always evaluate", at_least(1))
    eval_prompts: int = flag(256, "output", "held-out prompts, demonstrations or pairs", at_least(1))
    eval_samples: int = flag(
        1, "output", "completions of each held-out prompt, for pass@k and maj@k; several need a temperature",
        at_least(1), kinds=RL,
    )  # fmt: skip
    eval_temperature: float | None = flag(
        None,
        "output",
        "of evaluation; 0 is greedy; the model's is in generation_config.json",
        at_least(0),
        kinds=RL,
        chosen="the model's, else 0",
    )
    eval_top_k: int | None = flag(None, "output", "as --top_k", at_least(0), kinds=RL, chosen="the model's, else 0")
    eval_top_p: float | None = flag(
        None, "output", "as --top_p", above(0), at_most(1), kinds=RL,
        chosen="the model's, else 1",
    )  # fmt: skip
    eval_min_p: float | None = flag(
        None, "output", "as --min_p", at_least(0), at_most(1), kinds=RL,
        chosen="the model's, else 0",
    )  # fmt: skip
    eval_repetition_penalty: float | None = flag(
        None, "output", "as --repetition_penalty", above(0), kinds=RL,
        chosen="the model's, else 1",
    )  # fmt: skip
    report_to: str | None = flag(
        None, "output", "further trackers",
        some_of(*TRACKERS)._replace(text=f"some of {','.join(TRACKERS)}; TensorBoard and JSON lines are always there"),
    )  # fmt: skip
    sample_every: int = flag(
        10, "output", "steps between samples", at_least(1)
    )  # fmt: skip


@functools.cache
def settings_flags() -> Mapping[str, Flag]:
    """The flags of `Settings` by name, in their order."""
    hints, found = typing.get_type_hints(Settings), {}
    for field in dataclasses.fields(Settings):
        kind = value_type(hints[field.name])
        found[field.name] = Flag(field.name, field.default, kind.type, kind.optional, **field.metadata)
    return types.MappingProxyType(found)


def check_values(settings: Settings) -> None:
    """Check the value of each flag by itself.

    Raises:
      SettingsError: the first that cannot work.
    """
    for name, one in settings_flags().items():
        value = getattr(settings, name)
        if problem := one.problem(value):
            raise SettingsError(f"--{name}={value}: {problem}")
    for name in ("mesh", "generate_mesh"):
        mesh_sizes(settings, name)


def mesh_sizes(settings: Settings, name: str = "mesh") -> dict[str, int]:
    """Sizes of the mesh that a flag gives; of --generate_mesh, where it is not given, none. Those of auto:N, which is
    not chosen yet, are N over data.

    Raises:
      SettingsError: its text is not a mesh.
    """
    text = getattr(settings, name)
    try:
        wanted = wanted_devices(text) if text is not None and name == "mesh" else None
        return {} if text is None else parse(text if wanted is None else f"dp{wanted}", name)
    except MeshError as error:
        raise SettingsError(str(error)) from error


def scoring_budget(settings: Settings) -> int:
    """Tokens of a micro-batch where nothing is learned; a longer row raises it.

    A forward pass without a gradient holds the activations of one layer. By the dry run it takes 99 kB a token of a 70B
    on tp8, 111 of an 8B and 62 of a 1B; an update that saves only what enters each layer 1,580, 525 and 200.
    """
    return settings.score_token_budget or SCORE_BUDGETS * settings.token_budget


def for_kind(settings: Settings, kind: str) -> Settings:
    """The settings of a kind of run: flags without a meaning in it have the value that changes nothing."""
    idle = {name: one.without for name, one in settings_flags().items() if kind not in one.kinds}
    return dataclasses.replace(settings, **idle)


def resolved(settings: Settings, given: bool = False) -> Settings:
    """The settings with the number of new tokens, and the weights of rewards, that they imply.

    Args:
      given: whether prompts are given in another way than by a flag.

    Raises:
      LoadError: --reward is not one.
    """
    if settings.reward_weights is None:
        functions = int(settings.prompts is None and not given)  # of the embedded task
        settings = dataclasses.replace(settings, reward_weights=weights_by_name(settings, functions))
    if settings.prompts is None and settings.reward is None and not given:
        default = arithmetic.MAX_NEW_TOKENS
    else:
        default = NEW_TOKENS_FROM_SCRATCH if settings.model is None else NEW_TOKENS
    return dataclasses.replace(settings, max_new_tokens=settings.max_new_tokens or default)


class Interval(typing.NamedTuple):
    """Interval in steps, or in seconds; 0 of both: never."""

    steps: int
    seconds: float


def save_interval(text: str) -> Interval:
    """The interval that a text such as "50", "90s" or "10m" means."""
    found = INTERVAL.fullmatch(text)
    assert found is not None, text
    number, unit = int(found[1]), found[2]
    return Interval(0 if unit else number, number * {"": 0, "s": 1, "m": 60, "h": 3600}[unit])
