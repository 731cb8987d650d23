"""A run, checked and ready to start: what the flags mean. Nothing here computes or starts a process."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funrl.algos.core import Algorithm, needs_of
from funrl.data.prompts import Prompt, load_prompts
from funrl.data.tokenizer import encode_prompt, load_tokenizer
from funrl.mesh import mesh as meshes
from funrl.mesh.launch import check_devices, device_type
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import layouts
from funrl.models import decoder, hf
from funrl.models.config import Config
from funrl.rewards.load import check_fields, load_rewards
from funrl.rollout.completions import Sampling
from funrl.tasks import arithmetic
from funrl.trainer.checks import check_rewards, check_settings, weights_of_rewards
from funrl.trainer.rollout import Example
from funrl.trainer.settings import NEW_TOKENS, Settings, SettingsError
from funrl.trainer.sharding import check_layouts, check_models, generate_sizes, models_of, rank_memory, train_rules

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
    check_settings(settings)
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device=cuda: torch sees no GPU; use --device=cpu")
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
        settings.implicit_reward_lr if settings.implicit_reward_lr is not None else lr, teacher,
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
    if settings.implicit_reward_lr is not None and algorithm.reward_loss is None:
        raise SettingsError(
            f"--implicit_reward_lr={settings.implicit_reward_lr}: the algorithm trains no implicit reward model"
        )


@contextlib.contextmanager
def _blaming(flag: str) -> Iterator[None]:
    """Puts the flag that led to an error before its message."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"--{flag}: {error}") from error


def _task(settings: Settings, tokenizer: Any) -> Task:
    check_rewards(settings)
    if settings.prompts is None or settings.reward is None:
        return _arithmetic(settings, tokenizer)
    rewards = load_rewards(settings.reward)
    with _blaming("prompts"):
        examples = [to_example(p, tokenizer) for p in load_prompts(settings.prompts)]
    for reward in rewards:
        check_fields(settings.reward, reward, [e.fields for e in examples])
    held = min(settings.eval_prompts, len(examples) // 10)
    # With fewer than ten prompts there is none to spare: evaluation uses the training prompts.
    train, heldout = (examples[:-held], examples[-held:]) if held else (examples, examples)
    weights = weights_of_rewards(settings, len(rewards))
    return Task(Path(settings.prompts).stem, train, heldout, rewards, weights, None, NEW_TOKENS)


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
        "arithmetic", train, heldout, (arithmetic.reward,), weights_of_rewards(settings, 1), arithmetic.demonstrations,
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
