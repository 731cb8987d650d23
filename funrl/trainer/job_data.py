"""Data of a run: prompts with rewards, or given texts; of the embedded task or of files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funrl.data.columns import renamed
from funrl.data.mixture import Mixture, shares_of
from funrl.data.prompts import Prompt, check_prompts, load_prompts
from funrl.data.supervised import TextFile, check_lengths, load_examples, text_batch, text_example
from funrl.data.tokenizer import TokenizerError, encode_prompt
from funrl.mesh.mesh import Mesh
from funrl.models import Config, Model
from funrl.rewards.call import function_name
from funrl.rewards.load import check_fields, load_rewards
from funrl.rollout.native import bytes_of_page, page_tokens
from funrl.tasks import arithmetic
from funrl.trainer.checks import check_rewards, names_of_fields, prompt_files, refuse_idle_fields, weights_of_rewards
from funrl.trainer.declaration import SettingsError
from funrl.trainer.generation import Example
from funrl.trainer.settings import Settings, resolved

TEXTS = 4096  # made of the embedded task

Demonstrations = Callable[[int, int], list[tuple[str, str]]]


class Given(NamedTuple):
    """Objects that a caller in Python gives, instead of flags that name them.

    Attributes:
      model: instead of --model; its weights begin at random.
      tokenizer: of that model; None: the embedded task's.
      records: instead of --prompts or --data: dicts such as their lines.
      rewards: instead of --reward.
    """

    model: Model | None = None
    tokenizer: Any = None
    records: Sequence[Mapping[str, Any]] | None = None
    rewards: tuple[Callable[..., float], ...] | None = None


class Task(NamedTuple):
    """Prompts to complete.

    Attributes:
      name: of the task, for the report.
      prompts: to train on.
      heldout: to evaluate on.
      rewards: functions(prompt, completion, **fields) -> float.
      weights: of each of them in a completion's score; one more where a reward model scores completions too.
      demonstrations: (seed, count) -> (prompt, completion) pairs for a supervised warm start, where there are any.
      max_new_tokens: what a completion needs.
      readable: completion -> as it is shown to people; None: as it is.
    """

    name: str
    prompts: Sequence[Example]
    heldout: Sequence[Example]
    rewards: tuple[Callable[..., float], ...]
    weights: tuple[float, ...]
    demonstrations: Demonstrations | None
    max_new_tokens: int
    readable: Callable[[str], str] | None = None


class Texts(NamedTuple):
    """Texts to learn from.

    Attributes:
      name: of the data, for the report.
      examples: to train on.
      heldout: to evaluate on.
      kind: "demonstrations" or "preferences".
      demonstrations, readable: as in `Task`.
    """

    name: str
    examples: Sequence[Any]
    heldout: Sequence[Any]
    kind: str
    demonstrations: Demonstrations | None
    readable: Callable[[str], str] | None = None


def prompts_of(settings: Settings, tokenizer: Any, given: Given, rewarded: bool = True) -> Task:
    """The task that is given or that the flags name: prompts and rewards, or the embedded one.

    Args:
      rewarded: whether the algorithm goes by rewards; else prompts may come without.

    Raises:
      SettingsError, PromptError, RewardError, LoadError: the first thing that cannot work.
    """
    if given.records is None and given.rewards is None:
        check_rewards(settings, rewarded)
    functions = settings.reward is not None or given.rewards is not None
    if settings.prompts is None and given.records is None:
        if functions:
            raise SettingsError("prompts and a reward are given together, or the embedded task has both")
        return embedded_prompts(settings, tokenizer)
    if rewarded and not functions and settings.reward_model is None:
        raise SettingsError("prompts need a reward, or a --reward_model=DIR; the embedded task has both")
    named = () if settings.reward is None else load_rewards(settings.reward)
    rewards = named if given.rewards is None else given.rewards
    examples = _prompt_examples(settings, tokenizer, given)
    for reward in rewards:
        check_fields(settings.reward or function_name(reward), reward, [e.fields for e in examples])
    train, heldout = split(examples, settings.eval_prompts)
    check_workers(settings, rewards)
    weights = weights_of_rewards(settings, len(rewards) + (settings.reward_model is not None))
    name = "prompts" if settings.prompts is None else "+".join(Path(one.path).stem for one in prompt_files(settings))
    new_tokens = resolved(settings, given=True).max_new_tokens
    assert new_tokens is not None
    return Task(name, train, heldout, rewards, weights, None, new_tokens)


def _prompt_examples(settings: Settings, tokenizer: Any, given: Given) -> Sequence[Example]:
    """The prompts of all files or of a caller, as token ids; a mixture where files have weights."""
    fields = names_of_fields(settings)
    files = prompt_files(settings) if given.records is None else []
    try:
        if given.records is not None:
            return [to_example(p, tokenizer) for p in check_prompts(given.records, fields)]
        loaded = [[to_example(p, tokenizer) for p in load_prompts(one.path, fields)] for one in files]
    except ValueError as error:
        raise SettingsError(f"--prompts: {error}") from error
    weights = [one.weight for one in files if one.weight is not None]
    return Mixture(loaded, shares_of(weights)) if weights else [example for part in loaded for example in part]


def embedded_prompts(settings: Settings, tokenizer: Any) -> Task:
    """The embedded task as prompts."""
    train = [to_example(p, tokenizer) for p in arithmetic.training_prompts(settings.seed)]
    heldout = [to_example(p, tokenizer) for p in arithmetic.heldout_prompts(settings.eval_prompts)]
    rewards = (arithmetic.reward,)
    check_workers(settings, rewards)
    weights = weights_of_rewards(settings, len(rewards) + (settings.reward_model is not None))
    return Task(
        "arithmetic", train, heldout, rewards, weights, arithmetic.demonstrations,
        arithmetic.MAX_NEW_TOKENS, arithmetic.in_usual_order,
    )  # fmt: skip


def has_workers(settings: Settings, rewards: tuple[Callable[..., float], ...]) -> bool:
    """True if reward functions run in processes of their own. By default all do but the embedded task's, which takes a
    fraction of the time that a row needs to another process and back, and on Linux, where processes fork well."""
    if settings.reward_workers is not None:
        return settings.reward_workers > 0
    return sys.platform == "linux" and rewards not in ((), (arithmetic.reward,))


def check_workers(settings: Settings, rewards: tuple[Callable[..., float], ...]) -> None:
    """Raise SettingsError where a flag of reward workers would do nothing."""
    if settings.reward_workers and not rewards:
        raise SettingsError(f"--reward_workers={settings.reward_workers}: there is no --reward that they could run")
    if settings.reward_timeout is not None and not has_workers(settings, rewards):
        raise SettingsError(
            f"--reward_timeout={settings.reward_timeout:g}: only a worker's reward can be ended, and there are no "
            "workers; give --reward_workers=1 or more"
        )


def texts_of(settings: Settings, kind: str, tokenizer: Any, config: Config, given: Given) -> Texts:
    """The texts that are given or that the flags name, or those made of the embedded task.

    Args:
      kind: "demonstrations" or "preferences".
      config: of the model, which has a longest sequence.

    Raises:
      SettingsError, DataError: the first thing that cannot work.
    """
    if settings.data is None and given.records is None:
        refuse_idle_fields(settings)
        texts = embedded_texts(settings, kind, tokenizer)
    else:
        if given.records is None:
            examples = load_examples(str(settings.data), kind, tokenizer, names_of_fields(settings))
        else:
            fields = names_of_fields(settings)
            examples = [text_example(renamed(record, fields), kind, tokenizer) for record in given.records]
        train, heldout = split(examples, settings.eval_prompts)
        name = "records" if settings.data is None else Path(settings.data).stem
        texts = Texts(name, train, heldout, kind, arithmetic.demonstrations)
    check_lengths(texts.examples, config.max_positions, tokenizer)
    if texts.heldout is not texts.examples:
        check_lengths(texts.heldout, config.max_positions, tokenizer)
    return texts


def fields_of_texts(texts: Texts) -> frozenset[str]:
    """The fields of the rows that texts make."""
    fields = set(text_batch(texts.examples[:1], 0).names()) - {"margin"}
    file = texts.examples
    whole = file.has_margin if isinstance(file, TextFile) else all(one.margin is not None for one in file)
    return frozenset(fields | {"margin"} if whole else fields)


def embedded_texts(settings: Settings, kind: str, tokenizer: Any) -> Texts:
    """The embedded task as demonstrations without errors, or as pairs of a right and a wrong answer."""
    count = settings.eval_prompts
    if kind == "preferences":
        names = ("prompt", "chosen", "rejected")
        train = arithmetic.preferences(settings.seed, TEXTS, split="train")
        heldout = arithmetic.preferences(0, count, split="heldout")
    else:
        names = ("prompt", "completion")
        train = arithmetic.demonstrations(settings.seed, TEXTS, error=0.0)
        heldout = [(p.prompt, p.fields["answer"]) for p in arithmetic.heldout_prompts(count)]

    def made(rows: Sequence[Sequence[Any]]) -> list[Any]:
        return [text_example(dict(zip(names, row, strict=True)), kind, tokenizer) for row in rows]

    return Texts("arithmetic", made(train), made(heldout), kind, arithmetic.demonstrations, arithmetic.in_usual_order)


def split(examples: Sequence[Any], heldout: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Examples to train on, and at most a tenth of them to evaluate on; of a mixture, a tenth of each part by its
    share."""
    if isinstance(examples, Mixture):
        counts = [max(1, heldout * share // sum(examples.shares)) for share in examples.shares]
        pairs = [split(part, count) for part, count in zip(examples.parts, counts, strict=True)]
        held_out = [example for _, held in pairs for example in held]
        return Mixture([train for train, _ in pairs], examples.shares), held_out
    held = min(heldout, len(examples) // 10)
    # With fewer than ten there is none to spare: evaluation uses those to train on.
    return (examples[:-held], examples[-held:]) if held else (examples, examples)


def to_example(prompt: Prompt, tokenizer: Any) -> Example:
    """A prompt as token ids; chat messages go through the tokenizer's chat template."""
    where = f"{prompt.source}: " if prompt.source else ""
    try:
        tokens, text = encode_prompt(tokenizer, prompt.prompt)
    except TokenizerError as error:
        raise SettingsError(f"{where}{error}") from error
    if not tokens:
        raise SettingsError(f"{where}prompt {prompt.prompt!r} has no tokens")
    return Example(tokens, text, prompt.fields, prompt.source)


def check_prompt_lengths(task: Task, new_tokens: int, config: Config, further: int = 0) -> None:
    """Raise SettingsError where the longest prompt and its completion are longer than a model's positions.

    Args:
      further: tokens that the model reads behind a completion.
    """
    longest = max((*task.prompts, *task.heldout), key=lambda e: len(e.tokens))
    beyond = f", {further} of them to read the whole completion" if further else ""
    if len(longest.tokens) + new_tokens + further > config.max_positions:
        where = f"{longest.source}: " if longest.source else ""
        raise SettingsError(
            f"{where}the longest prompt has {len(longest.tokens)} tokens and --max_new_tokens is {new_tokens}, but the "
            f"model has {config.max_positions} positions{beyond}; shorten one of them (prompt begins "
            f"{longest.text[:60]!r})"
        )


def check_token_ids(task: Task | Texts, tokenizer: Any, config: Config) -> None:
    """Check the token ids that a run uses against the model's vocabulary. Ones that nothing uses may be beyond it.

    Raises:
      SettingsError: one is beyond it, and the way out.
    """
    ends = [("eos_token_id of config.json", token) for token in config.eos]
    ends += [(f"{name} of the tokenizer", getattr(tokenizer, name)) for name in ("eos_token_id", "pad_token_id")]
    for name, token in ends:
        if token is not None and token >= config.vocab:
            raise SettingsError(f"the {name} is {token}{_beyond(config)}")
    if max(tokenizer.get_vocab().values(), default=0) < config.vocab:
        return
    examples = (*task.prompts, *task.heldout) if isinstance(task, Task) else (*task.examples, *task.heldout)
    for example in examples:
        texts = [example] if isinstance(example, Example) else example.texts
        found = [token for one in texts for token in one.tokens if token >= config.vocab]
        if found:
            text = tokenizer.convert_ids_to_tokens(found[0])
            raise SettingsError(f"the tokenizer makes token {found[0]} ({text!r}) of a text{_beyond(config)}")


def _beyond(config: Config) -> str:
    return (
        f", but the model has token ids below {config.vocab} (vocab_size of config.json); use a token that it has, or "
        "add rows with transformers' resize_token_embeddings and save the model"
    )


def check_budget(settings: Settings, new_tokens: int) -> None:
    """Raise SettingsError where no completion could take more than one step."""
    tokens = settings.new_tokens_per_step
    if tokens is not None and tokens >= new_tokens:
        raise SettingsError(
            f"--new_tokens_per_step={tokens}: a completion has {new_tokens} tokens at most (--max_new_tokens), so none "
            "would go on in a later step; give fewer, or leave it out"
        )


def check_cache(settings: Settings, task: Task, new_tokens: int, model: Model, mesh: Mesh, dtype: torch.dtype) -> None:
    """Raise SettingsError where the longest prompt and its completion have more keys and values than --kv_cache_gb.

    Args:
      mesh: the generate mesh.
    """
    if settings.kv_cache_gb is None:
        return
    tokens = max(len(e.tokens) for e in (*task.prompts, *task.heldout)) + new_tokens
    pages = -(-tokens // page_tokens(mesh.device.type))
    needed = pages * bytes_of_page(model, mesh, dtype, packed=settings.compile != "on") / 1e9
    if needed > settings.kv_cache_gb:
        raise SettingsError(
            f"--kv_cache_gb={settings.kv_cache_gb:g}: the longest prompt and completion may have {tokens} tokens, "
            f"whose keys and values take {needed:.2g} GB on a rank; give it more, or a smaller --max_new_tokens"
        )
