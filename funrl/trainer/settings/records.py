"""Flags of a run as records by subject: each field is a flag with its type, default, text and bounds."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from funrl import seeds
from funrl.mesh.pools.placement import (
    GeneratorBounds,
    Placement,
    RankPool,
    generators_on_ray,
    read_placement,
    training_sizes,
)
from funrl.mesh.text import SHORT, TOKEN_AXES, MeshFlag, parse, read_mesh, wanted_devices
from funrl.rewards.named import VERIFIERS
from funrl.role_kinds import ROLES
from funrl.rollout.engine_abilities import ENGINES, EngineAbilities
from funrl.rollout.sampling_parameters import PENALTIES, SMALLEST_TEMPERATURE
from funrl.tasks.embedded import TASK_NAMES
from funrl.trainer.settings.declaration import (
    RL,
    RUN_KINDS,
    SUPERVISED,
    Bound,
    FlagOptions,
    above,
    at_least,
    at_most,
    below,
    flag,
    names_like,
    one_of,
    parts,
    some_of,
)
from funrl.trainer.settings.follow_rule import FollowRule, are_follow_rules, follow_rules
from funrl.trainer.settings.gap_rule import GapRule, is_gap_rule

SAVED_DTYPES = ("float32", "bfloat16", "float16", "float64")
PENALTY_BOUNDS = at_least(PENALTIES[0]), at_most(PENALTIES[1])


@dataclass(frozen=True)
class ModelSettings:
    """Models."""

    model: str | None = flag(
        None, "Hugging Face directory, or name of a model in its local cache", chosen="a small decoder from scratch"
    )
    model_code: str = flag(
        "auto",
        "code that computes models: native, this package's decoder; hf, that of transformers, data parallel only; "
        "auto: native if it supports the model",
        one_of("auto", "native", "hf"),
        requires="model",
    )
    resize_vocab: bool = flag(
        False,
        "add embedding rows for tokens that only the tokenizer has: the mean of the others",
        requires="model",
        needs=("unnamed_tokens",),
    )
    teacher: str | None = flag(
        None,
        "Hugging Face directory of the teacher to distil from; DIR@math,DIR@chat: one for each source of prompts",
        needs=("teacher",),
    )
    teacher_top_k: int = flag(
        64,
        "number of the teacher's most likely tokens at each position, for algorithms that read them",
        at_least(1),
        needs=("teacher_topk",),
    )
    teacher_context: str | None = flag(
        None,
        "what the teacher alone sees (the first policy, without --teacher): a field of the records, sibling (the best "
        "completion), or FILE.py:function",
        kinds=RL,
        needs=("teacher",),
    )
    dtype: str = flag(
        "auto",
        "dtype of forward passes (bfloat16 keeps float32 master weights); auto: bfloat16 on CUDA, else float32",
        one_of("auto", "float32", "float64", "bfloat16"),
    )
    save_dtype: str = flag("auto", "dtype of weights in model/; auto: that of --model", one_of("auto", *SAVED_DTYPES))
    compile: str = flag(
        "auto",
        "compile one decoder layer; auto: if it pays off, on CUDA; on with --backend=xla: decode in JAX",
        one_of("on", "off", "auto"),
    )
    numerics: str = flag(
        "fast",
        "aligned: engine and trainer give the same bits on a GPU too, or the run is refused",
        one_of("fast", "aligned"),
        needs=("own_steps",),
    )
    backend: str = flag(
        "torch",
        "what computes gradients, updates and scores: torch, or xla, which is JAX on all devices of --mesh",
        one_of("torch", "xla"),
    )


@dataclass(frozen=True)
class ExampleSettings:
    """Prompts and texts."""

    task: str = flag(
        "arithmetic",
        "embedded task, without --prompts and --data",
        one_of(*TASK_NAMES),
        unless={"prompts": "", "data": ""},
    )
    prompts: str | None = flag(
        None,
        "prompts, text or chat messages, with fields: a .jsonl, .json, .csv or .parquet file, a directory "
        "that `datasets` saved, or a dataset in the local Hugging Face cache, such as "
        "openai/gsm8k:main:train; several as a.jsonl@0.7,b.parquet@0.3",
        kinds=RL,
    )
    data: str | None = flag(
        None,
        'files to learn from, in the forms of --prompts; each record is {"prompt": ..., "completion": ...}, for kto '
        'with a "label", {"prompt": ..., "chosen": ..., "rejected": ...}, or for labelled steps {"prompt": ..., '
        '"completions": [...], "labels": [...]}',
        chosen="generated from the embedded task",
        kinds=SUPERVISED,
    )
    fields: str | None = flag(
        None,
        "columns of --prompts or --data for fields with other names: prompt:question,answer:extra_info.answer",
        needs=("data",),
    )
    eval_data: str | None = flag(
        None, "held-out data, as --prompts or --data", chosen="a tenth of these by --seed", needs=("data",)
    )
    long_prompts: str = flag(
        "error",
        "action for prompts and texts that are too long: error, drop, or truncate (prompts keep their last tokens)",
        one_of("error", "drop", "truncate"),
    )
    max_prompt_tokens: int | None = flag(
        None, "maximum tokens of a prompt", at_least(1), kinds=RL, chosen="the model's positions less --max_new_tokens"
    )
    max_text_tokens: int | None = flag(
        None, "maximum tokens of a prompt and completion", at_least(2), kinds=SUPERVISED, chosen="the model's positions"
    )
    max_pixels: int | None = flag(
        None,
        "maximum pixels of a picture: larger ones are made smaller",
        at_least(1),
        chosen="that of the model's preprocessor_config.json, else 1,280 tokens",
        needs=("pictures",),
    )
    curriculum: str | None = flag(
        None, "FILE.py:function that gives prompts' sampling weights before each step, from metrics so far", kinds=RL
    )
    difficulty: str | None = flag(
        None,
        "LOW,HIGH or LOW,HIGH,WEIGHT: prompts with a measured pass rate outside LOW..HIGH get this sampling weight, "
        "by default 0.1; 0: never again",
        kinds=RL,
    )


@dataclass(frozen=True)
class FormatSettings:
    """Templates, messages and solved examples around a prompt."""

    SHARED: ClassVar[FlagOptions] = {"needs": ("data",)}

    prompt_template: str | None = flag(
        None,
        "template of text prompts, with {prompt} where the prompt goes: the text itself, or a .txt file",
        Bound("a text with {prompt} in it, or a .txt file", lambda x: "{prompt}" in x or x.endswith((".txt", ".md"))),
    )
    system_prompt: str | None = flag(
        None, "system message before prompts that have none: the text, or a .txt file", needs=("data", "chat_template")
    )
    few_shot: str | None = flag(
        None,
        "solved examples put before every prompt: FILE:n, the first n records, each with a prompt and a completion, "
        "answer or solution",
        kinds=RL,
    )
    chat_template: str | None = flag(
        None,
        "FILE.jinja replaces the tokenizer's chat template; own: use the tokenizer's. With this flag, "
        "--system_prompt, --tools or --template_arguments, a text prompt becomes a user message",
        Bound("own, or a .jinja file", lambda x: x == "own" or x.endswith(".jinja")),
        needs=("data", "chat_template"),
    )
    tools: str | None = flag(
        None, "FILE.json with a list of JSON schemas of tools, for the chat template", needs=("data", "tool_texts")
    )
    template_arguments: str | None = flag(
        None, "further arguments of the chat template: enable_thinking:false", needs=("data", "chat_template")
    )
    step_separator: str | None = flag(
        None,
        "text between two steps of a solution, such as \\n\\n for an empty line",
        chosen="\\n; in the embedded task every token is a step",
        needs=("step_scores",),
    )


@dataclass(frozen=True)
class RewardSettings:
    """Rewards."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL}

    reward: str | None = flag(
        None,
        "FILE.py:function, of (prompt, completion, **fields), or one of "
        f"{', '.join(VERIFIERS)}; several as math,format@0.1",
    )
    reward_model: str | None = flag(
        None,
        "directory of a reward model, whose scores are added to those of --reward or of the embedded task, times 0.5 "
        "with DIR@0.5; with --prompts it may be the only reward",
    )
    process_reward_model: str | None = flag(None, "directory of a reward model that scores each step of a completion")
    process_reward: str | None = flag(
        None,
        "use of its scores: each, a reward for the token that ends the step; the others, one reward for the completion",
        one_of("each", "min", "mean", "last", "product"),
        requires="process_reward_model",
        chosen="each if the algorithm reads token rewards, else min",
    )
    reward_weights: str | None = flag(
        None,
        "one weight per reward: those of --reward, then --reward_model, --process_reward_model and --judge: 1,0.5",
        chosen="those in --reward and DIR@0.5, else 1",
    )
    on_reward_error: str = flag(
        "stop",
        "if a reward fails: stop, use zero, or skip the completion in training",
        one_of("stop", "zero", "skip"),
        needs=("reward",),
    )
    reward_workers: int | None = flag(
        None,
        "processes per rank that run --reward during generation; 0: the rank runs it itself afterwards",
        at_least(0),
        at_most(256),
        chosen="the rank's share of the cores, up to 16 if functions mostly wait; 0 with the embedded task",
        needs=("reward",),
    )
    reward_timeout: float | None = flag(
        None, "maximum seconds of a reward in a worker", above(0), chosen="600", needs=("reward", "reward_worker")
    )


@dataclass(frozen=True)
class EnvironmentSettings:
    """Environments of several turns."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL, "needs": ("environment",)}

    env: str | None = flag(
        None,
        "environment that rewards its episodes: FILE.py:NAME, module:NAME, or FRAMEWORK:NAME such as gymnasium:ID",
        needs=(),
    )
    env_args: str | None = flag(
        None, "arguments of what --env names, such as attempts:3,reward:math, or a JSON object", needs=("env",)
    )
    agents: str | None = flag(
        None,
        "models of an environment's agents: NAME:policy, NAME:policy:ROLE, NAME:frozen, NAME:frozen:N or NAME:DIR",
        chosen="policy for each",
    )
    episode_turns: int = flag(16, "maximum replies of the policy in an episode", at_least(1))
    episode_tokens: int | None = flag(
        None, "maximum tokens that the policy writes in an episode", at_least(1), chosen="the model's positions"
    )
    env_timeout: float = flag(60.0, "maximum seconds of an environment between two replies", above(0))
    episode_retries: int = flag(
        1, "further attempts at an episode whose environment fails; then its group is left out", at_least(0)
    )
    env_workers: int = flag(
        0,
        "processes per rank that run whole episodes, for environments that compute; 0: the rank runs them itself",
        at_least(0),
        at_most(256),
        unless={"new_tokens_per_step": "such episodes wait in the rank"},
    )
    max_waiting: int = flag(1024, "maximum unfinished episodes of a replica", at_least(1))
    tool_parser: str | None = flag(
        None,
        "form of calls of tools",
        one_of("hermes", "qwen_xml", "llama_json", "mistral", "harmony", "glm"),
        chosen="by the chat template",
    )
    tool_tokens: int = flag(4096, "maximum tokens of a tool's result; the text says that it was cut", at_least(1))
    history: str = flag("append", "template: fork where it renders a history otherwise", one_of("append", "template"))


@dataclass(frozen=True)
class JudgeSettings:
    """A judge that writes verdicts."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL, "requires": "judge"}

    judge: str | None = flag(None, "directory of a model that writes verdicts on completions; their scores are rewards")
    judge_template: str | None = flag(
        None,
        "file with the judge's prompt, with {{prompt}}, {{completion}} and {{FIELD}} filled in",
        chosen="a plain request for a number from 0 to 10",
    )
    judge_pattern: str = flag(r"\[\[(-?[\d.]+)\]\]", "regular expression whose last match in a verdict has the score")
    judge_max_new_tokens: int = flag(256, "maximum tokens of a verdict", at_least(1))


INTERVAL = re.compile(r"(\d{1,9})([smh]?)")
SERVER_URL = re.compile(r"http://[^/:]+:\d+/?")
LENGTHS = r"mean:\d{1,9},max:\d{1,9}(,spread:\d{1,3}(\.\d{1,9})?)?"
HARDWARE_NAMES = ("a100", "h100", "h200", "gb200", "mi300x", "v5e", "v5p", "v6e", "cpu")


@dataclass(frozen=True)
class RunSettings:
    """Length of a run, and its directory."""

    steps: int = flag(30, "steps, each on one batch of rollouts or of given texts", at_least(1))
    batch_prompts: int = flag(128, "prompts, demonstrations or pairs per step", at_least(1))
    warmstart_steps: int | None = flag(
        None,
        "supervised steps before RL, on imperfect demonstrations",
        at_least(0),
        chosen="the task's, 0 with --model, --prompts or --data",
        unless={"model": ""},
        needs=("demonstrations",),
    )
    seed: int = flag(0, "seed of everything random", at_least(0), below(seeds.LIMIT, "2^63"))
    run_dir: str | None = flag(None, "where results go", chosen="runs/NAME-TIME")
    save_every: str = flag(
        "10m",
        "steps between checkpoints in --run_dir, such as 50, or a time, such as 10m; 0: none",
        Bound("a number of steps, or a time such as 90s, 10m or 2h", lambda x: INTERVAL.fullmatch(x) is not None),
    )
    keep_checkpoints: int = flag(
        2,
        "number of newest checkpoints to keep; the one with the best held-out result is kept too",
        at_least(1),
        needs=("checkpoints",),
    )
    save_rollouts: int = flag(
        0, "steps between steps whose rows and scores are saved for `funrl replay`; 1: every step, 0: none", at_least(0)
    )
    keep_rollouts: int | None = flag(
        None, "number of newest saved steps to keep", at_least(1), chosen="all", requires="save_rollouts"
    )
    env_check: str = flag(
        "on",
        "try an episode of --env before anything is started",
        one_of("on", "off"),
        kinds=RL,
        needs=("environment",),
    )
    resume: bool = flag(False, "continue the run in --run_dir from its newest checkpoint", requires="run_dir")


@dataclass(frozen=True)
class AsynchronySettings:
    """Asynchrony of trainer ranks and generator ranks."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL, "requires": "staleness"}

    staleness: int = flag(
        0, "versions that a group may be behind when it begins", at_least(0), needs=("generator_ranks",)
    )
    window: int = flag(1, "places among which finished groups are consumed", at_least(1))


@dataclass(frozen=True)
class EstimateSettings:
    """Dry run."""

    SHARED: ClassVar[FlagOptions] = {"requires": "dry_run"}

    dry_run: bool = flag(False, "only print a step's memory, traffic and time; reads a config.json")
    prompt_tokens: int | None = flag(
        None,
        "tokens of a prompt that --dry_run assumes",
        at_least(1),
        chosen="the embedded task's longest, else 512 or the model's positions",
        kinds=RL,
    )
    text_tokens: int | None = flag(
        None,
        "tokens of a prompt and its completion that --dry_run assumes",
        at_least(1),
        chosen="the embedded task's longest, else --max_text_tokens, else 1024",
        kinds=SUPERVISED,
    )
    assume_pictures: int | None = flag(
        None,
        "pictures of a prompt or text that --dry_run assumes",
        at_least(0),
        chosen="the embedded task's, else 1",
        needs=("pictures", "picture_rows"),
    )
    assume_turns: int | None = flag(
        None,
        "an episode's replies that --dry_run assumes",
        at_least(1),
        chosen="the embedded task's, else 2",
        kinds=RL,
        needs=("environment",),
    )
    assume_turn_tokens: int | None = flag(
        None,
        "tokens before each reply but an episode's first that --dry_run assumes",
        at_least(0),
        chosen="the embedded task's, else 64",
        kinds=RL,
        needs=("environment",),
    )
    assume_tool_seconds: float | None = flag(
        None,
        "seconds of the environment between two replies that --dry_run assumes",
        at_least(0),
        chosen="0",
        kinds=RL,
        needs=("environment",),
    )
    tool_trace: str | None = flag(
        None,
        "waits of episodes for their environment that --dry_run assumes",
        Bound("a file of JSON lines with the waits or the spans of episodes", lambda x: Path(x).is_file()),
        kinds=RL,
        needs=("environment",),
        unless={"assume_tool_seconds": "the trace has them"},
    )
    lengths: str | None = flag(
        None,
        "completions that --dry_run simulates",
        Bound(
            "mean:TOKENS,max:TOKENS[,spread:DEVIATION], a run directory, or a file of lengths",
            lambda x: re.fullmatch(LENGTHS, x) is not None or Path(x).is_file() or Path(x, "metrics.jsonl").is_file(),
        ),
        chosen="a mean of half of --max_new_tokens",
        kinds=RL,
    )
    json: bool = flag(False, "print the result of --dry_run as one JSON object")
    hardware: str | None = flag(
        None, "GPU or TPU whose memory and speed --dry_run assumes", one_of(*HARDWARE_NAMES), chosen="h100"
    )


class Interval(NamedTuple):
    """Interval in steps or in seconds; both 0: never."""

    steps: int
    seconds: float


def save_interval(text: str) -> Interval:
    """The interval that a text such as "50", "90s" or "10m" means."""
    unit = text[-1:].strip("0123456789")
    number = int(text.removesuffix(unit))
    return Interval(0 if unit else number, number * {"": 0, "s": 1, "m": 60, "h": 3600}[unit])


@dataclass(frozen=True)
class DeviceSettings:
    """Devices, and how models are split over them."""

    mesh: str = flag(
        "dp1",
        "devices per axis, dp (data), ep (expert), sp (sequence) or tp (tensor), such as dp4,tp2; auto:8 chooses "
        "these and --fsdp by a dry run",
    )
    generate_mesh: str | None = flag(
        None, "mesh of the same devices for generation", chosen="all of them dp", kinds=RL, unless={"place": ""}
    )
    place: str | None = flag(
        None,
        "ranks to train, generate, or score for a role, such as 'train:dp4@0-3 generate:dp2@4-5 reference:1@6'; "
        "generate:2 adds two; generate:ray1-8: on a Ray cluster; auto:8 chooses by a dry run",
        chosen="all do both",
        kinds=RL,
    )
    device: str | None = flag(
        None, "where tensors live; xla: train on torch_xla", one_of("cpu", "cuda", "xla"), chosen="cuda if there is one"
    )
    sequence_parallel: str = flag(
        "auto",
        "attention if sp splits the tokens of rows: ulysses exchanges heads for tokens, ring sends keys from rank to "
        "rank; auto: ulysses if sp divides the heads",
        one_of("auto", "ulysses", "ring"),
        needs=("sp",),
    )
    split_residual: str = flag(
        "auto",
        "split the residual stream's tokens over tp, so that norms and residuals take 1 / tp of the memory; auto: on "
        "GPUs",
        one_of("auto", "on", "off"),
        needs=("tp",),
    )
    remat: str = flag(
        "none",
        "what a backward pass recomputes: full, whole layers; selective, everything but matmuls",
        one_of("none", "full", "selective"),
    )
    offload: str | None = flag(
        None, "what is offloaded from a GPU while not needed", some_of("optimizer", "reference", "params"), kinds=RL
    )

    @functools.cached_property
    def placement(self) -> Placement | None:
        """The pools of ranks, parsed once; None: every rank trains, auto:N, or no pools. Raises: MeshError."""
        if self.place is None or self.generators is not None or self._wanted is not None:
            return None
        return read_placement(self.place, read_mesh(self.mesh).chosen)

    @functools.cached_property
    def generators(self) -> GeneratorBounds | None:
        """Bounds on the generators on Ray, beside ranks that all train; None: there are none. Raises: MeshError."""
        return generators_on_ray(self.place)

    @property
    def scoring(self) -> Mapping[str, RankPool]:
        """The pools of roles that only score, by role. Raises: MeshError."""
        return {} if self.placement is None else self.placement.scoring

    @property
    def _wanted(self) -> int | None:
        """N of --place=auto:N. Raises: MeshError."""
        return None if self.place is None else wanted_devices(self.place, "place")

    @property
    def written(self) -> str:
        """The mesh to train on, or the pools, for people."""
        if self.generators is not None:
            return f"place {self.place}"
        return f"mesh {self.mesh}" if self.place is None else f"place {self.placement or self.place}"

    @functools.cached_property
    def train(self) -> MeshFlag:
        """The mesh to train on, parsed once. Raises: MeshError."""
        placement = self.placement
        if placement is not None:
            return MeshFlag("place", str(placement), placement.train.sizes)
        if self.place is not None and self._wanted is not None:
            return MeshFlag("place", self.place, parse(f"dp{self._wanted}"), wanted=self._wanted)
        if self.place is not None and self.generators is not None:
            return MeshFlag("place", self.place, training_sizes(self.place, read_mesh(self.mesh).chosen))
        return read_mesh(self.mesh)

    @functools.cached_property
    def generate(self) -> MeshFlag | None:
        """The mesh to generate on, parsed once; None: the flag is not given. Raises: MeshError."""
        placement = self.placement
        if placement is not None:
            return MeshFlag("place", str(placement), placement.generate.sizes)
        text = self.generate_mesh
        return None if text is None else read_mesh(text, "generate_mesh", automatic=False)


@dataclass(frozen=True)
class ShardSettings:
    """Shards of weights, gradients and optimizer states."""

    fsdp: bool = flag(False, "shard weights, gradients and optimizer states over data and sp too", needs=("shards",))
    fsdp_axes: str | None = flag(
        None,
        "axes that --fsdp shards over; on dp2,ep4, ep makes 2 replicas of 4 shards",
        some_of(*(short for short, axis in SHORT.items() if axis in TOKEN_AXES)),
        chosen="all; on several nodes within each, if that fits",
        requires="fsdp",
    )
    fsdp_models: str | None = flag(
        None,
        "models to shard",
        names_like(*ROLES),
        chosen="all",
        requires="fsdp",
        unless={"lora_rank": "all models share one base, sharded as a whole"},
    )
    grad_reduce_dtype: str = flag(
        "auto",
        "dtype in which --fsdp sends gradients and sums them over ranks; bfloat16 sends half the bytes and rounds each "
        "partial sum to 8 bits; auto: that of the weights, which is float32, or float64 with --dtype=float64",
        one_of("auto", "float32", "bfloat16"),
        requires="fsdp",
        needs=("trained_shards",),
    )


@dataclass(frozen=True)
class WaitSettings:
    """Waiting for other ranks."""

    timeout: int = flag(60, "minutes a rank waits for another one, as for its rewards", at_least(1), at_most(525600))
    heartbeat: int = flag(
        60,
        "seconds without progress after which the run reports the rank, host and phase that it waits for",
        at_least(1),
        at_most(86400),
    )
    stalled_after: int = flag(
        300,
        "seconds without a heartbeat from a rank's process, after which the run ends; a long computation does not stop "
        "the heartbeat",
        at_least(1),
        at_most(86400),
    )


@dataclass(frozen=True)
class EngineSettings:
    """The engine that generates."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL}

    engine: str = flag("native", "what generates", one_of(*ENGINES))
    engine_url: str | None = flag(
        None,
        "vllm_servers, one per data rank",
        Bound("http://HOST:PORT each", lambda x: all(map(SERVER_URL.fullmatch, parts(x)))),
        needs=("servers",),
    )
    engine_timeout: float | None = flag(
        None, "timeout of a vllm_server's answer, in seconds", above(0), chosen="600", requires="engine_url"
    )
    kv_cache_gb: float | None = flag(
        None,
        "size of a rank's KV cache for generation, in 1e9 bytes; requests that do not fit wait, or are recomputed",
        above(0),
        chosen="half of the memory that is free when generation starts",
    )
    decode_rows: int = flag(512, "maximum completions that a rank decodes together", at_least(1))
    speculate: int = flag(
        0,
        "tokens drafted per completion by n-gram lookup in its own text and verified in one pass, if few rows are "
        "decoded; 0: none. Drafts do not change completions",
        at_least(0),
        needs=("own_steps",),
    )
    rollout_dtype: str = flag(
        "auto",
        "dtype of generation's products: float8, if the loss corrects by the engine's log-probabilities; auto: --dtype",
        one_of("auto", "float8"),
        needs=("float8",),
    )
    state_snapshot_tokens: int = flag(4096, "tokens between snapshots of recurrent states; 0: none", at_least(0))
    queue: str = flag(
        "tickets",
        "how prompts are assigned to generating ranks: tickets, whenever a rank has room; fixed, by their numbers, "
        "which exact repetition of a run on GPUs needs",
        one_of("tickets", "fixed"),
    )
    verify_sync: bool = flag(True, "compare the engine's weights with the trainer's bits after each sync")
    on_gap: str = flag(
        "say",
        "what to do if engine and trainer differ where the same bits are promised, or more than a bound",
        Bound("say, stop, or one with a bound as in stop:logprob_gap_p99>0.1 (docs/engines.md)", is_gap_rule),
    )
    probe_sync_every: int = flag(
        50,
        "steps between comparisons of the engine's log-probabilities of a fixed text with the trainer's, from the "
        "first sync on; 0: never",
        at_least(0),
    )

    @property
    def gap_rule(self) -> GapRule:
        """The rule of --on_gap."""
        return GapRule.from_text(self.on_gap)

    @property
    def float8(self) -> bool:
        """True if the engine multiplies in 8 bits."""
        return self.rollout_dtype == "float8"

    @property
    def abilities(self) -> EngineAbilities:
        """Abilities of the engine."""
        return ENGINES[self.engine]


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL}

    samples_per_prompt: int = flag(8, "completions of each prompt", at_least(1))
    max_new_tokens: int | None = flag(
        None, "maximum tokens of a completion", at_least(1), chosen="the task's; with --prompts 64, 32 without --model"
    )
    new_tokens_per_step: int | None = flag(
        None,
        "maximum new tokens per step of a completion, below --max_new_tokens, or of all turns of a trajectory; later "
        "steps continue it with their own weights",
        at_least(1),
        chosen="whole completions",
    )
    temperature: float = flag(
        1.0, "of sampling and, without --raw_logp, the trainer's log-probabilities", at_least(SMALLEST_TEMPERATURE)
    )
    top_k: int = flag(0, "sample among the k most likely tokens; 0: all", at_least(0))
    top_p: float = flag(1.0, "sample among the most likely tokens with this total probability", above(0), at_most(1))
    min_p: float = flag(0.0, "minimum probability, relative to the top token", at_least(0), at_most(1))
    mask_replay: bool = flag(
        False,
        "with --top_k, --top_p or --min_p: train the truncated, tempered distribution that was sampled from",
    )
    raw_logp: bool = flag(
        False,
        "train the model's own distribution, of the whole vocabulary at temperature 1, whatever is sampled from",
        unless={"mask_replay": "it trains the distribution that was sampled from"},
    )
    repetition_penalty: float = flag(1.0, "above 1: makes tokens that already occurred less likely", *PENALTY_BOUNDS)
    max_refills: int = flag(
        8, "maximum batches of prompts sampled until the filter has kept a full batch", at_least(1), needs=("filter",)
    )
    empty_filter: str = flag(
        "skip",
        "if the filter keeps nothing: skip the step's update, stop the run, or use the last prompts unfiltered",
        one_of("skip", "stop", "use"),
        needs=("filter",),
    )


@dataclass(frozen=True)
class OptimizerSettings:
    """Learning rates and optimizer."""

    lr: float | None = flag(
        None,
        "peak learning rate of the policy, or of the trained model",
        above(0),
        chosen=(
            "1e-3 from scratch; with --model 0.2 / sqrt(its parameters), 1 / sqrt for sft and reward models, 5e-7 to "
            "1e-3; --lora_rank: 3e-3, 10 times"
        ),
    )
    critic_lr: float | None = flag(
        None, "peak learning rate of the critic", above(0), chosen="twice the policy's", kinds=RL, needs=("critic",)
    )
    implicit_reward_lr: float | None = flag(
        None,
        "peak learning rate of the implicit reward model",
        above(0),
        chosen="the policy's",
        kinds=RL,
        needs=("implicit_reward",),
    )
    critic_warmup_steps: int = flag(
        0, "first steps that train only the critic", at_least(0), kinds=RL, needs=("critic",)
    )
    optimizer: str = flag("adamw", "muon applies to matrices; other weights use adamw", one_of("adamw", "muon"))
    lr_schedule: str = flag("constant", "schedule after the warm-up", one_of("constant", "linear", "cosine"))
    lr_warmup_steps: int = flag(0, "optimizer steps of linear warm-up", at_least(0))
    weight_decay: float = flag(0.0, "decoupled weight decay, of matrices only", at_least(0))
    decay_all: bool = flag(False, "apply weight decay to norms and biases too, as verl does", requires="weight_decay")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this global norm", above(0))
    freeze: str | None = flag(
        None,
        "what does not learn: vision (a tower less its projector), attention, none, or parts by name; "
        "critic:attention: of one role",
        chosen="vision",
        unless={"lora_rank": "adapters learn alone"},
        keeps_none=True,
    )
    follow: str | None = flag(
        None,
        "frozen models that move to the policy or nearer, every so many steps",
        Bound("ROLE:STEPS or ROLE:STEPS:SHARE, as teacher:1:0.1", are_follow_rules),
        chosen="none",
        unless={"lora_rank": "a reference of adapters is the base that they share"},
    )

    @property
    def follow_rules(self) -> dict[str, FollowRule]:
        """The rules of --follow, by role."""
        return follow_rules(self.follow)


@dataclass(frozen=True)
class AdapterSettings:
    """Adapters (LoRA)."""

    SHARED: ClassVar[FlagOptions] = {"requires": "lora_rank"}

    lora_rank: int | None = flag(
        None,
        "rank of the adapters (LoRA) that are trained; the frozen weights are the reference too",
        at_least(1),
        chosen="all weights are trained",
    )
    lora_alpha: float | None = flag(None, "adapters are scaled by alpha / rank", above(0), chosen="the rank")
    lora_targets: str = flag(
        "all-linear",
        "projections with adapters, by PEFT's names: q_proj,v_proj; named beside all-linear: experts,router, vision or "
        "vision.qkv",
    )
    adapter: str | None = flag(None, "directory of adapters on --model that the run begins with", requires="model")
    base_format: str = flag(
        "auto",
        "form in which the frozen weights are stored: nf4, the layers' projections in 4 bits, on one device; auto: "
        "--dtype",
        one_of("auto", "nf4"),
    )

    @property
    def nf4(self) -> bool:
        """True if the frozen base is in 4 bits."""
        return self.base_format == "nf4"


@dataclass(frozen=True)
class RouterSettings:
    """Routers of experts."""

    SHARED: ClassVar[FlagOptions] = {"needs": ("experts",)}

    router_aux_coef: float = flag(
        0.0,
        "weight of the load-balancing loss of experts; with several micro-batches per update it takes one more "
        "forward pass",
        at_least(0),
    )
    router_z_coef: float = flag(0.0, "weight of the loss on large router logits", at_least(0))
    router_bias_rate: float = flag(
        0.0,
        "step size of the experts' selection biases, which move against their load after each update, as in "
        "DeepSeek-V3 (0.001)",
        at_least(0),
        needs=("experts", "expert_biases"),
        unless={"lora_rank": "the biases belong to the frozen base"},
    )
    router_replay: bool = flag(
        False,
        "train the policy with the experts that its tokens used in the engine",
        kinds=RL,
        unless={"new_tokens_per_step": "earlier choices are lost"},
    )


@dataclass(frozen=True)
class UpdateSettings:
    """Updates and micro-batches."""

    epochs: int = flag(1, "passes over each batch of rollouts", at_least(1), kinds=RL, without=1)
    minibatches: int = flag(2, "optimizer steps per pass", at_least(1), kinds=RL, without=1)
    critic_updates: int = flag(
        1, "updates of the critic for each of the policy's", at_least(1), kinds=RL, needs=("critic",)
    )
    max_skipped: int = flag(
        3, "maximum consecutive updates skipped because loss or gradient is not finite; then the run stops", at_least(1)
    )
    foreign_rows: str = flag(
        "stop",
        "where other weights sampled a row than the run has published: stop, or drop it and its siblings",
        one_of("stop", "drop"),
        kinds=RL,
    )
    token_budget: int = flag(16384, "tokens of a micro-batch on one device", at_least(1))
    score_token_budget: int | None = flag(
        None,
        "tokens of a micro-batch without learning: scoring, and the loss on held-out texts",
        at_least(1),
        chosen="4 times --token_budget",
    )


TRACKERS = {  # with the modules that they import, whose packages have their names
    "wandb": "wandb",
    "mlflow": "mlflow",
    "otel": "opentelemetry.exporter.otlp.proto.http",
}
METRICS_PORT = r"(?:(?P<host>[\w.\[\]:-]+):)?(?P<port>\d{1,5})"  # [HOST:]PORT


def _is_port(address: str) -> bool:
    """True if the number after the last colon is one of a port."""
    return 0 < int(address.rpartition(":")[2]) < 1 << 16


PROFILE = r"([1-9]\d{0,8}):([1-9]\d{0,3})"  # STEP:COUNT


@dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL, "needs": ("sampled_evaluation",)}

    eval_every: int = flag(
        10, "steps between evaluations; first and last always evaluate", at_least(1), kinds=RUN_KINDS, needs=()
    )
    eval_prompts: int = flag(256, "held-out prompts, demonstrations or pairs", at_least(1), kinds=RUN_KINDS, needs=())
    eval_samples: int = flag(
        1, "completions of a held-out prompt, for pass@k and maj@k; 2 or more need a temperature", at_least(1)
    )
    eval_temperature: float | None = flag(
        None,
        "sampling temperature of evaluation; 0 is greedy; the model's is in generation_config.json",
        Bound(f"0, or at least {SMALLEST_TEMPERATURE}", lambda x: x == 0 or x >= SMALLEST_TEMPERATURE),
        needs=(),
        chosen="the model's, else 0",
    )
    eval_top_k: int | None = flag(None, "as --top_k", at_least(0), chosen="the model's, else 0")
    eval_top_p: float | None = flag(None, "as --top_p", above(0), at_most(1), chosen="the model's, else 1")
    eval_min_p: float | None = flag(None, "as --min_p", at_least(0), at_most(1), chosen="the model's, else 0")
    eval_repetition_penalty: float | None = flag(
        None, "as --repetition_penalty", *PENALTY_BOUNDS, needs=(), chosen="the model's, else 1"
    )


class ProfileWindow(NamedTuple):
    """First and last step that --profile traces."""

    first: int
    last: int


@dataclass(frozen=True)
class OutputSettings:
    """Profiles, trackers and samples."""

    profile: str | None = flag(
        None,
        "STEP:COUNT, such as 3:1: trace COUNT steps from STEP on into profile/ of the run directory, for Perfetto or "
        "Chrome",
        Bound("a step and a number of steps, such as 3:1", lambda x: re.fullmatch(PROFILE, x) is not None),
    )
    profile_ranks: str = flag(
        "0",
        "ranks that write a trace: some, such as 0,8, or all",
        Bound("all or some numbers, such as 0,8", lambda x: re.fullmatch(r"all|\d{1,6}(,\d{1,6})*", x) is not None),
        requires="profile",
    )
    report_to: str | None = flag(
        None,
        "further trackers",
        some_of(*TRACKERS)._replace(text=f"some of {','.join(TRACKERS)}; TensorBoard and JSON lines are always there"),
    )
    metrics_port: str | None = flag(
        None,
        "serve metrics to Prometheus at PORT or HOST:PORT",
        Bound("a port, such as 9100", lambda x: bool(re.fullmatch(METRICS_PORT, x)) and _is_port(x)),
    )
    sample_every: int = flag(10, "steps between samples", at_least(1), needs=("policy",))
    explain_every: int | None = flag(
        None,
        "steps between exact gradients of each reward function and group, which take several updates' time",
        at_least(1),
        kinds=RL,
        needs=("advantage",),
        chosen="never",
    )

    @property
    def window(self) -> ProfileWindow | None:
        """The steps of --profile; None: no profile."""
        match = re.fullmatch(PROFILE, self.profile) if self.profile else None
        return None if match is None else ProfileWindow(int(match[1]), int(match[1]) + int(match[2]) - 1)
