"""Data of a run: prompts with rewards, or given texts; of the embedded task or of files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from funrl.data.columns import renamed
from funrl.data.json_lines import DataError
from funrl.data.mixture import Mixture, WeightedFile, shares_of
from funrl.data.pair_halves import halves_of
from funrl.data.prompt_format import PLAIN_PROMPTS, PromptFormat
from funrl.data.supervised import (
    LABELS,
    TEXT_FIELDS,
    TextFile,
    joined_files,
    load_examples,
    text_batch,
    text_example,
)
from funrl.data.text_lengths import fit_texts
from funrl.loading import load_function
from funrl.mesh.mesh import Mesh
from funrl.models import Config, Model
from funrl.rewards.call import function_name
from funrl.rewards.load import check_fields, load_rewards
from funrl.rollout.native import bytes_of_page, page_tokens
from funrl.tasks import arithmetic
from funrl.trainer.checks import check_rewards, data_files, names_of_fields, refuse_idle_data, weights_of_rewards
from funrl.trainer.curriculum import names_taken
from funrl.trainer.declaration import SettingsError
from funrl.trainer.generation import Example
from funrl.trainer.prompt_data import (
    chosen_places,
    examples_at,
    fit,
    format_of,
    given_prompts,
    pairs_of,
    read_prompts,
    split,
    to_example,
)
from funrl.trainer.roles import READERS
from funrl.trainer.scorers import scorers_of
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
      eval_records: instead of --eval_data.
      curriculum: instead of --curriculum.
    """

    model: Model | None = None
    tokenizer: Any = None
    records: Sequence[Mapping[str, Any]] | None = None
    rewards: tuple[Callable[..., float], ...] | None = None
    eval_records: Sequence[Mapping[str, Any]] | None = None
    curriculum: Callable[..., Any] | None = None


class Task(NamedTuple):
    """Prompts to complete.

    Attributes:
      name: of the task, for the report.
      prompts: to train on.
      heldout: to evaluate on.
      rewards: functions(prompt, completion, **fields) -> float.
      weights: of each of them in a completion's score, then of the models that score completions too.
      demonstrations: (seed, count) -> (prompt, completion) pairs for a supervised warm start, where there are any.
      max_new_tokens: what a completion needs.
      readable: completion -> as it is shown to people; None: as it is.
      remarks: on prompts that are not taken as they are.
      curriculum: weights of the prompts before each step, see `curriculum.weighing`.
    """

    name: str
    prompts: Sequence[Example]
    heldout: Sequence[Example]
    rewards: tuple[Callable[..., float], ...]
    weights: tuple[float, ...]
    demonstrations: Demonstrations | None
    max_new_tokens: int
    readable: Callable[[str], str] | None = None
    remarks: tuple[str, ...] = ()
    curriculum: Callable[..., Any] | None = None


class Texts(NamedTuple):
    """Texts to learn from.

    Attributes:
      name: of the data, for the report.
      examples: to train on.
      heldout: to evaluate on.
      kind: one of `supervised.TEXT_FIELDS`.
      demonstrations, readable: as in `Task`.
      remarks: on what was done with the data, for the log.
      most: tokens of a text.
    """

    name: str
    examples: Sequence[Any]
    heldout: Sequence[Any]
    kind: str
    demonstrations: Demonstrations | None
    readable: Callable[[str], str] | None = None
    remarks: tuple[str, ...] = ()
    most: int | None = None


def task_of_prompts(settings: Settings, tokenizer: Any, given: Given, rewarded: bool = True) -> Task:
    """The task with its curriculum, where there is one; the others as in `prompts_of`."""
    task, curriculum = prompts_of(settings, tokenizer, given, rewarded), given.curriculum
    if curriculum is None and settings.curriculum is not None:
        curriculum = load_function("curriculum", settings.curriculum)
    if curriculum is not None:
        names_taken(curriculum)
    return task._replace(curriculum=curriculum)


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
    if rewarded and not functions and not scorers_of(settings):
        raise SettingsError("prompts need a reward, or a --reward_model=DIR; the embedded task has both")
    fields = names_of_fields(settings)
    form = format_of(settings, fields)
    if given.records is not None:
        examples: Sequence[Example] = given_prompts(given.records, fields, form, tokenizer)
    else:
        examples = read_prompts(data_files(settings, "prompts"), "prompts", fields, form, tokenizer)
    train, heldout = examples, eval_prompts(settings, given, form, tokenizer)
    if heldout is None:
        train, heldout = split(examples, settings.eval_prompts, settings.seed)
    name = "prompts" if settings.prompts is None else name_of_files(data_files(settings, "prompts"))
    return rewarded_task(name, train, heldout, settings, given)


def eval_prompts(
    settings: Settings, given: Given, form: PromptFormat, tokenizer: Any, most: int | None = None
) -> Sequence[Example] | None:
    """The prompts that are given to evaluate on: at most `most`, which the seed chooses; None: none are given.

    Args:
      most: None: --eval_prompts.
    """
    fields, most = names_of_fields(settings), settings.eval_prompts if most is None else most
    if given.eval_records is not None:
        examples: Sequence[Example] = given_prompts(given.eval_records, fields, form, tokenizer)
    elif settings.eval_data is not None:
        examples = read_prompts(data_files(settings, "eval_data"), "eval_data", fields, form, tokenizer)
    else:
        return None
    if len(examples) <= most:
        return list(examples)
    return [examples[place] for place in chosen_places(len(examples), most, settings.seed).tolist()]


def rewarded_task(
    name: str, train: Sequence[Example], heldout: Sequence[Example], settings: Settings, given: Given
) -> Task:
    """Prompts with the rewards that are given or that the flags name."""
    named = () if settings.reward is None else load_rewards(settings.reward)
    rewards = named if given.rewards is None else given.rewards
    for reward in rewards:
        fields = [e.fields for e in (*train, *heldout)]
        check_fields(settings.reward or function_name(reward), reward, fields)
    check_workers(settings, rewards)
    weights = weights_of_rewards(settings, len(rewards))
    new_tokens = resolved(settings, given=True).max_new_tokens
    assert new_tokens is not None
    return Task(name, train, heldout, rewards, weights, None, new_tokens)


def name_of_files(files: Sequence[WeightedFile]) -> str:
    """Names of files without folders and endings, such as "a+b"."""
    return "+".join(Path(one.path).stem for one in files)


def embedded_prompts(settings: Settings, tokenizer: Any) -> Task:
    """The embedded task as prompts."""
    train = [to_example(p, tokenizer) for p in arithmetic.training_prompts(settings.seed)]
    heldout = [to_example(p, tokenizer) for p in arithmetic.heldout_prompts(settings.eval_prompts)]
    rewards = (arithmetic.reward,)
    check_workers(settings, rewards)
    weights = weights_of_rewards(settings, len(rewards))
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
      kind: one of `supervised.TEXT_FIELDS`.
      config: of the model, which has a longest sequence.

    Raises:
      SettingsError, DataError: the first thing that cannot work.
    """
    if settings.step_separator is not None and kind != "steps":
        raise SettingsError(f"--step_separator={settings.step_separator}: {kind} have no steps; leave it out")
    most, reason = config.max_positions, f"the model has {config.max_positions} positions"
    if settings.max_text_tokens is not None and settings.max_text_tokens < most:
        most, reason = settings.max_text_tokens, f"--max_text_tokens is {settings.max_text_tokens}"
    if settings.data is None and given.records is None:
        refuse_idle_data(settings)
        texts = embedded_texts(settings, kind, tokenizer)
        return _fitting(texts, most, settings.long_prompts, reason, tokenizer)
    examples = _text_examples(settings, "data", kind, tokenizer, given.records)
    heldout = _text_examples(settings, "eval_data", kind, tokenizer, given.eval_records)
    name = "records" if settings.data is None else name_of_files(data_files(settings, "data"))
    texts = Texts(name, examples, heldout or (), kind, arithmetic.demonstrations)
    texts = _fitting(texts, most, settings.long_prompts, reason, tokenizer)
    if heldout is None:
        train, held = split(texts.examples, settings.eval_prompts, settings.seed)
        return texts._replace(examples=train, heldout=held)
    places = chosen_places(len(texts.heldout), settings.eval_prompts, settings.seed)
    return texts._replace(heldout=examples_at(texts.heldout, places))


def _fitting(texts: Texts, most: int, how: str, reason: str, tokenizer: Any) -> Texts:
    """Texts of at most so many tokens, with remarks; the others as in `fit_texts`."""
    numbers = pairs_of(texts.examples)
    pairs = 0 if numbers is None else len(numbers) - len(np.unique(numbers))
    found = [f"{pairs} pairs are {2 * pairs} texts, the chosen ones labelled good and the rejected ones bad"]
    found = found if pairs else []
    fitting = {}
    for name, examples, said in (("examples", texts.examples, "texts"), ("heldout", texts.heldout, "held-out texts")):
        fitting[name], remark = fit_texts(examples, most, how, reason, tokenizer) if len(examples) else (examples, "")
        found += [f"{said}: {remark}"] * bool(remark)
    return texts._replace(**fitting, remarks=tuple(found), most=most)


def _text_examples(
    settings: Settings, flag: str, kind: str, tokenizer: Any, records: Sequence[Mapping[str, Any]] | None
) -> Any:
    """The texts of a caller, or of the files that a flag names; None where there are neither."""
    fields = names_of_fields(settings)
    form = format_of(settings, fields)
    if records is not None:
        made = [(f"record {n}", renamed(record, fields)) for n, record in enumerate(records, 1)]
        if kind == "ratings":
            made = [(source, half) for source, record in made for half in halves_of(record)]
        return [text_example(record, kind, tokenizer, form)._replace(source=source) for source, record in made]
    if getattr(settings, flag) is None:
        return None
    files = data_files(settings, flag)
    try:
        loaded = [load_examples(one.path, kind, tokenizer, fields, form) for one in files]
    except DataError as error:
        raise SettingsError(f"--{flag}: {error}") from error
    weights = [one.weight for one in files if one.weight is not None]
    return joined_files(loaded, shares_of(weights) if weights else None)


def fields_of_texts(texts: Texts) -> frozenset[str]:
    """The fields of the rows that texts make."""
    fields = set(text_batch(texts.examples[:1], 0).names()) - {"margin"}
    whole = _has_margins(texts.examples) and _has_margins(texts.heldout)
    further = {"margin": whole, "mismatched": texts.kind == "ratings"}
    return frozenset(fields | {name for name, there in further.items() if there})


def _has_margins(examples: Sequence[Any]) -> bool:
    if isinstance(examples, Mixture):
        return all(_has_margins(part) for part in examples.parts)
    return examples.has_margin if isinstance(examples, TextFile) else all(one.margin is not None for one in examples)


def embedded_texts(settings: Settings, kind: str, tokenizer: Any) -> Texts:
    """The embedded task as demonstrations without errors, as pairs of a right and a wrong answer, or as either one with
    a label, or labels of its digits."""
    count, of_kind = settings.eval_prompts, {
        "preferences": arithmetic.preferences, "ratings": arithmetic.ratings, "steps": arithmetic.steps,
    }  # fmt: skip
    if kind in of_kind:
        names = ("prompt", *TEXT_FIELDS[kind], *([LABELS[kind]] if kind in LABELS else []))
        train = of_kind[kind](settings.seed, TEXTS, split="train")
        heldout = of_kind[kind](0, count, split="heldout")
    else:
        names = ("prompt", "completion")
        train = arithmetic.demonstrations(settings.seed, TEXTS, error=0.0)
        heldout = [(p.prompt, p.fields["answer"]) for p in arithmetic.heldout_prompts(count)]

    def made(rows: Sequence[Sequence[Any]]) -> list[Any]:
        form = PLAIN_PROMPTS._replace(step_separator="")
        return [text_example(dict(zip(names, row, strict=True)), kind, tokenizer, form) for row in rows]

    return Texts("arithmetic", made(train), made(heldout), kind, arithmetic.demonstrations, arithmetic.in_usual_order)


def fit_prompts(task: Task, settings: Settings, new_tokens: int, models: Mapping[str, Model]) -> Task:
    """The task with prompts that are short enough for every model and for --max_prompt_tokens.

    Args:
      new_tokens: of a completion.
      models: of the roles that read its tokens.

    Raises:
      SettingsError: one is too long, or none is left; see `fit`.
    """
    # A reward model reads one more token, behind the completion.
    room = {name: one.config.max_positions - new_tokens - (name in READERS) for name, one in models.items()}
    name = min(room, key=lambda name: room[name])
    most = room[name]
    beyond = ", 1 of them to read the whole completion" if name in READERS else ""
    positions = models[name].config.max_positions
    reason = f"--max_new_tokens is {new_tokens} and the model has {positions} positions{beyond}"
    if settings.max_prompt_tokens is not None and settings.max_prompt_tokens < most:
        most, reason = settings.max_prompt_tokens, f"--max_prompt_tokens is {settings.max_prompt_tokens}"
    if most < 1:
        raise SettingsError(
            f"--max_new_tokens={new_tokens}: the model has {positions} positions{beyond}, which leaves none for a "
            "prompt; give fewer"
        )
    train, held = (fit(prompts, most, settings.long_prompts, reason) for prompts in (task.prompts, task.heldout))
    remarks = [f"{name}: {one.remark}" for name, one in (("prompts", train), ("held-out prompts", held)) if one.remark]
    return task._replace(prompts=train.prompts, heldout=held.prompts, remarks=(*task.remarks, *remarks))


def check_token_ids(task: Task | Texts, tokenizer: Any, config: Config, directory: str | None = None) -> None:
    """Check the token ids that a run uses against the model's vocabulary. Ones that nothing uses may be beyond it.

    Args:
      directory: of the model, where it is not the one that the run begins with.

    Raises:
      SettingsError: one is beyond it, and the way out.
    """
    ends = [("eos_token_id of config.json", token) for token in config.eos]
    ends += [(f"{name} of the tokenizer", getattr(tokenizer, name)) for name in ("eos_token_id", "pad_token_id")]
    for name, token in ends:
        if token is not None and token >= config.vocab:
            raise SettingsError(f"the {name} is {token}{_beyond(config, directory)}")
    if max(tokenizer.get_vocab().values(), default=0) < config.vocab:
        return
    examples = (*task.prompts, *task.heldout) if isinstance(task, Task) else (*task.examples, *task.heldout)
    for example in examples:
        texts = [example] if isinstance(example, Example) else example.texts
        found = [token for one in texts for token in one.tokens if token >= config.vocab]
        if found:
            text = tokenizer.convert_ids_to_tokens(found[0])
            raise SettingsError(
                f"the tokenizer makes token {found[0]} ({text!r}) of a text{_beyond(config, directory)}"
            )


def _beyond(config: Config, directory: str | None) -> str:
    own = config.module or directory is not None
    rows = "with transformers' resize_token_embeddings and save the model" if own else "with --resize_vocab"
    which = "the model" if directory is None else directory
    return (
        f", but {which} has token ids below {config.vocab} (vocab_size of config.json); use a token that it has, or "
        f"add rows {rows}"
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
