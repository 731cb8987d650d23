"""A run, checked and ready to start: what the flags mean. Nothing here computes or starts a process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funrl import seeds
from funrl.algos.core import Algorithm, needs_of
from funrl.data.prompts import Prompt, load_prompts
from funrl.data.tokenizer import encode_prompt, load_tokenizer
from funrl.mesh import mesh as meshes
from funrl.mesh.launch import check_devices, device_type
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import layouts
from funrl.models import decoder, hf, remat
from funrl.models.config import Config
from funrl.rewards.load import LARGEST, check_fields, load_rewards
from funrl.rollout.completions import Sampling
from funrl.tasks import arithmetic
from funrl.trainer import offload
from funrl.trainer.rollout import Example
from funrl.trainer.settings import Settings, SettingsError
from funrl.trainer.sharding import check_layouts, check_models, generate_sizes, models_of, rank_memory, train_rules

NEW_TOKENS = 64  # of a completion, where neither a flag nor the embedded task says
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class Task(NamedTuple):
    """What is to be learnt.

    Attributes:
      name: of the task, for the report.
      prompts: to train on.
      heldout: to evaluate on.
      rewards: functions(prompt, completion, **fields) -> float, at least one.
      weights: of each of them in a completion's score.
      demonstrations: (seed, count) -> (prompt, completion) pairs for a supervised warm start, where there are any.
      max_new_tokens: what a completion needs.
    """

    name: str
    prompts: Sequence[Example]
    heldout: Sequence[Example]
    rewards: tuple[Callable[..., float], ...]
    weights: tuple[float, ...]
    demonstrations: Callable[[int, int], list[tuple[str, str]]] | None
    max_new_tokens: int


class Job(NamedTuple):
    """Everything that a rank needs to know; the same on every rank."""

    settings: Settings
    sizes: dict[str, int]
    generate_sizes: dict[str, int]
    device: str
    dtype: torch.dtype
    config: Config
    tokenizer: Any
    task: Task
    algorithm: Algorithm
    sampling: Sampling
    eval_sampling: Sampling
    pad: int
    warmstart_steps: int
    lr: float
    critic_lr: float
    reward_lr: float
    teacher: Config | None = None

    @property
    def master(self) -> torch.dtype:
        """The dtype of the weights that an optimizer keeps."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype


ROLLOUT = frozenset(
    {"tokens", "mask", "length", "group", "score", "scores", "truncated", "rollout_logp"}
)  # what is known of a completion before the trainer sees it; a filter may read these
BY_TEACHER = frozenset({"teacher_logp", "teacher_top_logp", "student_top_logp"})  # the last of the tokens it picks
AVAILABLE = ROLLOUT | {"old_logp", "old_entropy", "entropy", "sum_pi_squared", "ref_logp", "greedy_score"}


def prepare(
    settings: Settings,
    compose: Callable[[], Algorithm],
    make_task: Callable[[Settings, Any], Task] | None = None,
    models: Collection[str] | None = None,
) -> Job:
    """Checks every flag and file and reads the small ones.

    Args:
      settings: the flags.
      compose: makes the algorithm.
      make_task: makes the task of the settings and the tokenizer; None: what the flags say of prompts and rewards.
      models: those of `sharding.MODELS` that the run has; None: what the algorithm needs.

    Raises:
      ValueError: the first thing that cannot work, named, with its value and the way out.
    """
    torch.set_num_threads(1)  # a pool of threads does not survive the fork of the ranks
    if settings.remat != "none":
        importlib.import_module("torch._dynamo")  # checkpointing needs it; ranks that are forked need not import it
    sizes, device = meshes.parse(settings.mesh), settings.device or device_type()
    check_choices(settings, device)
    check_devices(sizes, device)
    if settings.model is None:
        config, tokenizer = arithmetic.model_config(), arithmetic.tokenizer()
    else:
        with _blaming("model"):
            config = hf.check(settings.model)
            tokenizer = load_tokenizer(settings.model)
    algorithm = compose()
    models = models_of(algorithm, settings) if models is None else models
    check_models(settings, models)
    generating = generate_sizes(settings, sizes, config, rank_memory(device, Mesh(sizes).world))
    with _blaming(f"mesh={settings.mesh}"):
        check_layouts(config, settings, models, sizes, generating)
    task = (make_task or _task)(settings, tokenizer)
    check_needs(algorithm, settings)
    teacher = _teacher(settings, tokenizer, sizes)
    new_tokens = settings.max_new_tokens or task.max_new_tokens
    stop = tuple(sorted({*config.eos, *({tokenizer.eos_token_id} - {None})}))
    sampling = Sampling(
        settings.temperature, settings.top_k, settings.top_p, new_tokens, stop, settings.samples_per_prompt
    )
    greedy = settings.eval_temperature == 0
    eval_sampling = Sampling(settings.eval_temperature or 1.0, 0, 1.0, new_tokens, stop, 1, greedy)
    for one in filter(None, (config, teacher)):
        _check_lengths(task, new_tokens, one)
    scratch = settings.model is None
    lr = settings.lr if settings.lr is not None else (1e-3 if scratch else 1e-5)
    warmstart = (
        settings.warmstart_steps if settings.warmstart_steps is not None else arithmetic.WARMSTART_STEPS * scratch
    )
    if warmstart and task.demonstrations is None:
        raise SettingsError(f"--warmstart_steps={warmstart}: only the embedded task has demonstrations; use 0")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stop[0] if stop else 0)
    return Job(
        settings, sizes, generating, device, DTYPES[settings.dtype], config, tokenizer, task, algorithm,
        sampling, eval_sampling, pad, warmstart, lr, settings.critic_lr if settings.critic_lr is not None else 2 * lr,
        settings.reward_lr if settings.reward_lr is not None else lr, teacher,
    )  # fmt: skip


def check_needs(algorithm: Algorithm, settings: Settings) -> None:
    """Compares what an algorithm reads with what a run of these settings provides.

    Raises:
      SettingsError: naming the fields of `Batch` that are missing, or the flag that would do nothing.
    """
    needed = needs_of(algorithm)
    models = {
        "value": (algorithm.value_loss, "the algorithm has no value_loss, so there is no critic"),
        "reward_logp": (algorithm.reward_loss, "the algorithm has no reward_loss, so there is no such model"),
        **dict.fromkeys(BY_TEACHER, (settings.teacher, "give --teacher=DIR")),
    }
    missing = []
    for name in sorted(needed - AVAILABLE):
        model, why = models.get(name, (None, ""))
        if model is None:
            missing.append(f"{name} ({why})" if why else name)
    if missing:
        raise SettingsError(f"the algorithm reads {', '.join(missing)}, which this run does not provide")
    late = sorted(needs_of(algorithm.keep) - ROLLOUT)
    if late:
        raise SettingsError(f"the algorithm's filter reads {', '.join(late)}, which is computed after filtering")
    if settings.teacher is not None and not needed & BY_TEACHER:
        raise SettingsError(f"--teacher={settings.teacher}: the algorithm reads nothing that a teacher says")
    if settings.critic_warmup_steps and algorithm.value_loss is None:
        raise SettingsError(f"--critic_warmup_steps={settings.critic_warmup_steps}: the algorithm has no critic")
    if settings.reward_lr is not None and algorithm.reward_loss is None:
        raise SettingsError(f"--reward_lr={settings.reward_lr}: the algorithm trains no reward model")


def resolved(settings: Settings) -> Settings:
    """The settings with the number of new tokens said that they imply."""
    embedded = settings.prompts is None and settings.reward is None
    default = arithmetic.MAX_NEW_TOKENS if embedded else NEW_TOKENS
    return dataclasses.replace(settings, max_new_tokens=settings.max_new_tokens or default)


@contextlib.contextmanager
def _blaming(flag: str) -> Iterator[None]:
    """Puts the flag that led to an error before its message."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"--{flag}: {error}") from error


def check_choices(settings: Settings, device: str) -> None:
    """Checks every flag by itself.

    Raises:
      SettingsError: the first whose value cannot work.
    """
    choices = {
        "dtype": tuple(DTYPES), "compile": ("auto", "on", "off"), "device": ("cpu", "cuda", None),
        "remat": remat.MODES, "lr_schedule": ("constant", "linear", "cosine"), "task": ("arithmetic",),
    }  # fmt: skip
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            known = ", ".join(a for a in allowed if a)
            raise SettingsError(f"--{name}={getattr(settings, name)}: it must be one of {known}")
    least = {
        "steps": 1, "batch_prompts": 1, "samples_per_prompt": 1, "epochs": 1, "minibatches": 1, "token_budget": 1,
        "eval_every": 1, "eval_prompts": 1, "sample_every": 1, "top_k": 0, "lr_warmup_steps": 0, "weight_decay": 0,
        "eval_temperature": 0, "max_refills": 1, "timeout": 1, "teacher_top_k": 1, "critic_warmup_steps": 0, "seed": 0,
    }  # fmt: skip
    for name, low in least.items():
        if getattr(settings, name) < low:
            raise SettingsError(f"--{name}={getattr(settings, name)}: it must be at least {low}")
    if settings.seed >= seeds.LIMIT:
        raise SettingsError(f"--seed={settings.seed}: it must be below 2^63 = {seeds.LIMIT}")
    for name in ("temperature", "max_grad_norm", "lr", "critic_lr", "reward_lr", "max_new_tokens"):
        if getattr(settings, name) is not None and getattr(settings, name) <= 0:
            raise SettingsError(f"--{name}={getattr(settings, name)}: it must be above 0")
    if not 0 < settings.top_p <= 1:
        raise SettingsError(f"--top_p={settings.top_p}: it must be above 0 and at most 1")
    if settings.warmstart_steps is not None and settings.warmstart_steps < 0:
        raise SettingsError(f"--warmstart_steps={settings.warmstart_steps}: it must be at least 0")
    if (settings.top_k > 0 or settings.top_p < 1) and settings.temperature != 1:
        raise SettingsError(
            f"--temperature={settings.temperature} with --top_k={settings.top_k} --top_p={settings.top_p}: the engine "
            "would report log-probabilities of a truncated and tempered distribution, which the trainer cannot "
            "compute; use either a temperature, or top_k and top_p at temperature 1"
        )
    # The policy's schedule, the shorter one, decays over the updates that the critic's warm-up leaves it.
    updates = (settings.steps - settings.critic_warmup_steps) * settings.epochs * settings.minibatches
    if settings.lr_schedule != "constant" and settings.lr_warmup_steps >= max(updates, 1):
        raise SettingsError(
            f"--lr_warmup_steps={settings.lr_warmup_steps}: the run makes {updates} updates (steps x epochs x "
            f"minibatches) and --lr_schedule={settings.lr_schedule} needs some after the warm-up; use fewer"
        )
    if settings.critic_warmup_steps >= settings.steps:
        raise SettingsError(
            f"--critic_warmup_steps={settings.critic_warmup_steps}: the policy would never learn; use fewer than "
            f"--steps={settings.steps}"
        )
    with _blaming(f"offload={settings.offload}"):
        offload.parse(settings.offload)
    if settings.remat == "selective" and settings.compile == "on":
        raise SettingsError("--remat=selective chooses among the operations that --compile=on makes into one; use one")
    rows = settings.batch_prompts * settings.samples_per_prompt
    if settings.minibatches > rows:
        raise SettingsError(f"--minibatches={settings.minibatches}: a batch has only {rows} rows")
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device=cuda: torch sees no GPU; use --device=cpu")


def _task(settings: Settings, tokenizer: Any) -> Task:
    if settings.prompts is None and settings.reward is None:
        if settings.model is not None:
            raise SettingsError(f"--model={settings.model} needs --prompts=FILE.jsonl and --reward=FILE.py:function")
        return _arithmetic(settings, tokenizer)
    if settings.reward is None:
        raise SettingsError(f"--prompts={settings.prompts} needs --reward=FILE.py:function")
    if settings.prompts is None:
        raise SettingsError(f"--reward={settings.reward} needs --prompts=FILE.jsonl")
    rewards = load_rewards(settings.reward)
    with _blaming("prompts"):
        examples = [to_example(p, tokenizer) for p in load_prompts(settings.prompts)]
    for reward in rewards:
        check_fields(settings.reward, reward, [e.fields for e in examples])
    held = min(settings.eval_prompts, len(examples) // 10)
    # With fewer than ten prompts there is none to spare: evaluation uses the training prompts.
    train, heldout = (examples[:-held], examples[-held:]) if held else (examples, examples)
    weights = _weights(settings, len(rewards))
    return Task(Path(settings.prompts).stem, train, heldout, rewards, weights, None, NEW_TOKENS)


def _weights(settings: Settings, rewards: int) -> tuple[float, ...]:
    """One number a reward function."""
    if settings.reward_weights is None:
        return (1.0,) * rewards
    try:
        weights = tuple(float(part) for part in settings.reward_weights.split(","))
    except ValueError:
        weights = ()
    if len(weights) != rewards or not all(abs(weight) <= LARGEST for weight in weights):
        raise SettingsError(
            f"--reward_weights={settings.reward_weights}: there are {rewards} reward functions; give as many numbers, "
            "with commas between"
        )
    if not any(weights):  # a negative one alone is a penalty, which can be learnt from
        raise SettingsError(f"--reward_weights={settings.reward_weights}: every score would be 0; give one that is not")
    return weights


def _teacher(settings: Settings, tokenizer: Any, sizes: Mapping[str, int]) -> Config | None:
    """The teacher's record, checked: the same tokens must mean the same texts."""
    if settings.teacher is None:
        return None
    config = hf.check(settings.teacher)
    if load_tokenizer(settings.teacher).get_vocab() != tokenizer.get_vocab():
        raise SettingsError(f"--teacher={settings.teacher}: its tokenizer is not the policy's; tokens would not match")
    layouts(decoder.shapes(config), decoder.axes(config), train_rules(settings, "teacher"), sizes)
    return config


def _arithmetic(settings: Settings, tokenizer: Any) -> Task:
    train = [to_example(p, tokenizer) for p in arithmetic.training_prompts(settings.seed)]
    heldout = [to_example(p, tokenizer) for p in arithmetic.heldout_prompts(settings.eval_prompts)]
    return Task(
        "arithmetic", train, heldout, (arithmetic.reward,), _weights(settings, 1), arithmetic.demonstrations,
        arithmetic.MAX_NEW_TOKENS,
    )  # fmt: skip


def to_example(prompt: Prompt, tokenizer: Any) -> Example:
    """A prompt as token ids; chat messages go through the tokenizer's chat template."""
    tokens, text = encode_prompt(tokenizer, prompt.prompt)
    if not tokens:
        raise SettingsError(f"prompt {prompt.prompt!r} has no tokens")
    return Example(tokens, text, prompt.fields)


def _check_lengths(task: Task, new_tokens: int, config: Config) -> None:
    longest = max((*task.prompts, *task.heldout), key=lambda e: len(e.tokens))
    if len(longest.tokens) + new_tokens > config.max_positions:
        raise SettingsError(
            f"the longest prompt has {len(longest.tokens)} tokens and --max_new_tokens is {new_tokens}, but the model "
            f"has {config.max_positions} positions; shorten one of them (prompt begins {longest.text[:60]!r})"
        )
