"""Data of a run: prompts with rewards, or given texts; of the embedded task or of files."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from funrl.data.columns import Fields
from funrl.data.messages import RecordRemarks
from funrl.data.order import Mixture, WeightedFile, shares_of
from funrl.data.pictures import picture_form_of, with_picture_form
from funrl.data.processors.form import PictureForm
from funrl.data.prompt_format import (
    OWN,
    PLAIN_PROMPTS,
    SEPARATOR,
    PromptFormat,
    read_shots,
    read_tools,
    template_arguments,
    text_of_flag,
)
from funrl.data.prompts import Example, check_prompts, encode, encode_prompts, load_prompts
from funrl.data.records import TableRows, rows_in_memory
from funrl.data.supervised import (
    LABELS,
    TEXT_FIELDS,
    PairHalves,
    TextFile,
    join_files,
    load_examples,
    rows_of_conversation,
    text_batch,
    text_example,
)
from funrl.data.text_lengths import fit_examples, pick
from funrl.data.tokenizer import TextTokenizer, chat_text
from funrl.environments.builtin.load import environment_arguments, environment_from, made
from funrl.environments.environment import Environment, PromptingEnvironment
from funrl.environments.hosted import hosted_environment
from funrl.foreign.load import FRAMEWORKS, named_environment
from funrl.loading import load_function
from funrl.models import Model, ModelConfig
from funrl.rewards.call import function_name
from funrl.rewards.load import check_fields, load_rewards
from funrl.role_kinds import SCORING_ROLES
from funrl.tasks.embedded import embedded_task, is_embedded_reward
from funrl.tasks.task import RIGHT_ANSWER
from funrl.trainer.jobs.job import Task, Texts
from funrl.trainer.settings.checks import (
    check_data,
    check_rewards,
    data_files,
    names_of_fields,
    weights_of_rewards,
)
from funrl.trainer.settings.declaration import SettingsError, blaming, refusing
from funrl.trainer.settings.scorers import Given, environment_flag, new_tokens_of
from funrl.trainer.settings.settings import Settings, check_needs, flag_value, settings_flags
from funrl.trainer.sources.curriculum import names_taken

TEXTS = 4096  # made of the embedded task
CHAT_FLAGS = ("system_prompt", "tools", "template_arguments")
LEAST_TO_SPLIT = 10  # examples; one of them is held out
MOST_COMPARED = 5000  # texts to train on that are compared with those held out
PLACE = re.compile(r"(?<![\\\w{]){([a-zA-Z_]\w*)}(?!})")  # not the argument of a command of LaTeX
SPLIT = 0x5917  # separates the random numbers of held-out prompts from those of shuffling


def task_of_prompts(settings: Settings, tokenizer: TextTokenizer, given: Given, rewarded: bool = True) -> Task:
    """The task with its curriculum, where there is one; the others as in `prompts_of`."""
    task = prompts_of(settings, tokenizer, given, rewarded)
    curriculum = given.curriculum
    if curriculum is None and settings.examples.curriculum is not None:
        curriculum = load_function("curriculum", settings.examples.curriculum)
    if curriculum is not None:
        names_taken(curriculum)
    return task._replace(curriculum=curriculum)


def prompts_of(settings: Settings, tokenizer: TextTokenizer, given: Given, rewarded: bool = True) -> Task:
    """The task that is given or that the flags name: prompts and rewards, or the embedded one.

    Args:
      rewarded: whether the algorithm goes by rewards; else prompts may come without.

    Raises:
      SettingsError, PromptError, RewardError, LoadError: the first thing that cannot work.
    """
    check_rewards(settings, rewarded, given)
    environment = given_environment(settings, given)
    records = given.records
    if settings.examples.prompts is None and records is None and environment is not None:
        records = prompts_of_environment(environment, settings, given)
    if settings.examples.prompts is None and records is None:
        return embedded_prompts(settings, tokenizer)
    form = format_of(settings, names_of_fields(settings))
    train = examples = prompt_examples(settings, "prompts", records, form, tokenizer)
    heldout = eval_prompts(settings, given, form, tokenizer)
    if heldout is None:
        train, heldout = split(examples, settings.evaluation.eval_prompts, settings.run.seed)
    odd = RecordRemarks(tokenizer)
    for number, example in enumerate(examples):
        odd.see(number, {"prompt": example.text if example.messages is None else example.messages})
    remarks = (
        *remarks_on_template(settings),
        *odd.lines(lambda number: examples[number].source),
        *remarks_on_heldout(train, heldout, settings.evaluation.eval_prompts),
    )
    name = "prompts" if settings.examples.prompts is None else name_of_files(data_files(settings, "prompts"))
    if environment is not None:
        return episode_task(name, train, heldout, settings, environment)._replace(remarks=remarks)
    return rewarded_task(name, train, heldout, settings, given)._replace(remarks=remarks)


def given_environment(settings: Settings, given: Given) -> Environment | None:
    """The environment that is given or that --env names; None: neither. Raises: SettingsError, LoadError."""
    arguments = environment_arguments(settings.environments.env_args)
    env = settings.environments.env
    if given.environment is None:
        return None if env is None else named_environment(env, arguments)
    with refusing(f"env={given.environment!r:.100}: ", TypeError, ValueError):
        return environment_from(given.environment, arguments)


def prompts_of_environment(
    environment: Environment, settings: Settings, given: Given
) -> Sequence[Mapping[str, object]]:
    """An environment's own prompts. Raises: SettingsError, it has none."""
    if isinstance(environment, PromptingEnvironment):
        return made(lambda: environment.prompts(settings.run.seed), "prompts()")
    what = environment_flag(settings, given)
    raise SettingsError(f"{what} needs --prompts=FILE.jsonl, whose records its episodes begin with")


def eval_prompts(
    settings: Settings, given: Given, form: PromptFormat, tokenizer: TextTokenizer, most: int | None = None
) -> Sequence[Example] | None:
    """The prompts that are given to evaluate on: at most `most`, which the seed chooses; None: none are given.

    Args:
      most: None: --eval_prompts.
    """
    if given.eval_records is None and settings.examples.eval_data is None:
        return None
    most = settings.evaluation.eval_prompts if most is None else most
    examples = prompt_examples(settings, "eval_data", given.eval_records, form, tokenizer)
    if len(examples) <= most:
        return list(examples)
    return [examples[place] for place in chosen_places(len(examples), most, settings.run.seed).tolist()]


def episode_task(
    name: str, train: Sequence[Example], heldout: Sequence[Example], settings: Settings, environment: Environment
) -> Task:
    """Prompts with an environment, which rewards its episodes. Raises: SettingsError, it cannot take them."""
    check_text_prompts(settings.environments.env, (*train, *heldout))
    most = new_tokens_of(settings, given=True)
    hosted = in_workers(environment, settings)
    return Task(name, train, heldout, (), weights=(1.0,), max_new_tokens=most, environment=hosted)


def in_workers(environment: Environment, settings: Settings) -> Environment:
    """An environment whose episodes run in --env_workers processes. Raises: SettingsError, they cannot."""
    workers = settings.environments.env_workers
    if not workers:
        return environment
    with blaming(f"env_workers={workers}"):
        return hosted_environment(environment, workers)


def rewarded_task(
    name: str, train: Sequence[Example], heldout: Sequence[Example], settings: Settings, given: Given
) -> Task:
    """Prompts with the rewards that are given or that the flags name."""
    named = () if settings.rewards.reward is None else load_rewards(settings.rewards.reward)
    rewards = named if given.rewards is None else given.rewards
    fields = [example.fields for example in (*train, *heldout)]
    sources = [example.source for example in (*train, *heldout)]
    for reward in rewards:
        check_fields(settings.rewards.reward or function_name(reward), reward, fields, sources)
    check_needs(settings, reward_worker=has_workers(settings, rewards))
    weights = weights_of_rewards(settings, len(rewards))
    return Task(name, train, heldout, rewards, weights=weights, max_new_tokens=new_tokens_of(settings, given=True))


def name_of_files(files: Sequence[WeightedFile]) -> str:
    """Names of files without folders and endings, such as "a+b"."""
    return "+".join(Path(file.path).stem for file in files)


def embedded_prompts(settings: Settings, tokenizer: TextTokenizer) -> Task:
    """The embedded task as prompts."""
    embedded = embedded_task(settings.examples.task)
    train = _training_examples(settings, None, tokenizer)
    heldout = [encode(p, tokenizer) for p in embedded.heldout_prompts(settings.evaluation.eval_prompts)]
    environment = None if embedded.environment is None else in_workers(embedded.environment(), settings)
    rewards = () if embedded.reward is None else (embedded.reward,)
    check_needs(settings, reward_worker=has_workers(settings, rewards))
    weights = (1.0,) if environment is not None else weights_of_rewards(settings, len(rewards))
    return Task(
        embedded.name,
        train,
        heldout,
        rewards=rewards,
        weights=weights,
        max_new_tokens=embedded.max_new_tokens,
        embedded=True,
        readable=embedded.readable,
        demonstration_field=RIGHT_ANSWER,
        environment=environment,
    )


def _training_examples(settings: Settings, kind: str | None, tokenizer: Any) -> list[Any]:
    """An embedded task's prompts to train on, or texts of a kind, which all runs in this process encode once."""
    task = settings.examples.task
    if _encode_alike(tokenizer, embedded_task(task).tokenizer()):
        return list(_own_training_examples(task, kind, settings.run.seed, picture_form_of(tokenizer)))
    return _encode_training(task, kind, settings.run.seed, tokenizer)


def _encode_training(task: str, kind: str | None, seed: int, tokenizer: TextTokenizer) -> list[Any]:
    embedded = embedded_task(task)
    if kind is None:
        return [encode(prompt, tokenizer) for prompt in embedded.training_prompts(seed)]
    return embedded_examples(embedded.texts[kind](seed, TEXTS, split="train"), kind, tokenizer)


@functools.lru_cache(maxsize=8)
def _own_training_examples(task: str, kind: str | None, seed: int, form: PictureForm | None) -> tuple[Any, ...]:
    """`_training_examples` in the tokens of the task's own tokenizer."""
    return tuple(_encode_training(task, kind, seed, with_picture_form(embedded_task(task).tokenizer(), form)))


def _encode_alike(tokenizer: Any, other: Any) -> bool:
    """True if two tokenizers of the tokenizers library have the same pipeline, end of text and chat template."""
    pipeline = getattr(tokenizer, "backend_tokenizer", None)
    other_pipeline = getattr(other, "backend_tokenizer", None)
    if pipeline is None or other_pipeline is None or pipeline.get_vocab_size() != other_pipeline.get_vocab_size():
        return False
    facts = [(x.eos_token, x.chat_template, x.backend_tokenizer.to_str()) for x in (tokenizer, other)]
    return facts[0] == facts[1]


def has_workers(settings: Settings, rewards: tuple[Callable[..., float], ...]) -> bool:
    """True if reward functions run in processes of their own.

    By default all do on Linux, where processes fork well, except the embedded task's: it takes a fraction of the time
    that a row needs to another process and back.
    """
    if settings.rewards.reward_workers is not None:
        return settings.rewards.reward_workers > 0
    return sys.platform == "linux" and any(not is_embedded_reward(reward) for reward in rewards)


def texts_of(settings: Settings, kind: str, tokenizer: TextTokenizer, config: ModelConfig, given: Given) -> Texts:
    """The texts that are given or that the flags name, or those made of the embedded task.

    Args:
      kind: one of `supervised.TEXT_FIELDS`.
      config: of the model, which has a longest sequence.

    Raises:
      SettingsError, DataError: the first thing that cannot work.
    """
    check_needs(settings, step_scores=kind == "steps")
    reason = f"the model has {config.max_positions} positions"
    most, reason, idle = token_limit("max_text_tokens", settings.examples.max_text_tokens, config.max_positions, reason)
    if settings.examples.data is None and given.records is None:
        check_data(settings)
        texts = embedded_texts(settings, kind, tokenizer)._replace(remarks=idle)
        return _fitting(texts, most, settings.examples.long_prompts, reason, tokenizer)
    examples, odd = _text_examples(settings, "data", kind, tokenizer, given.records)
    heldout, odd_heldout = _text_examples(settings, "eval_data", kind, tokenizer, given.eval_records)
    name = "records" if settings.examples.data is None else name_of_files(data_files(settings, "data"))
    remarks = (*idle, *remarks_on_template(settings), *odd, *odd_heldout)
    texts = Texts(name, examples, heldout or (), kind, remarks=remarks)
    texts = _fitting(texts, most, settings.examples.long_prompts, reason, tokenizer)
    if heldout is None:
        train, held = split(texts.examples, settings.evaluation.eval_prompts, settings.run.seed)
    else:
        train = texts.examples
        held = pick(
            texts.heldout, chosen_places(len(texts.heldout), settings.evaluation.eval_prompts, settings.run.seed)
        )
    remarks = (*texts.remarks, *remarks_on_heldout(train, held, settings.evaluation.eval_prompts))
    return texts._replace(examples=train, heldout=held, remarks=remarks)


def token_limit(flag: str, asked: int | None, most: int, reason: str) -> tuple[int, str, tuple[str, ...]]:
    """Tokens that an example may have, why, and a remark where a flag changes nothing.

    Args:
      flag: that bounds the tokens further.
      asked: its value.
      most: tokens that there is room for.
      reason: of that number.
    """
    if asked is None:
        return most, reason, ()
    if asked > most:
        return most, reason, (f"--{flag}={asked} changes nothing: {reason}, so there is room for {most}",)
    return asked, f"--{flag} is {asked}", ()


def _fitting(texts: Texts, most: int, long: str, reason: str, tokenizer: TextTokenizer) -> Texts:
    """Texts of at most `most` tokens, with remarks; the others as in `fit_examples`."""
    numbers = pairs_of(texts.examples)
    pairs = 0 if numbers is None else len(numbers) - len(np.unique(numbers))
    remarks = [*texts.remarks]
    if pairs:
        remarks.append(f"{pairs} pairs are {2 * pairs} texts, the chosen ones labelled good and the rejected ones bad")
    examples, remark = fit_examples(texts.examples, most, long, reason, tokenizer)
    heldout, heldout_remark = fit_examples(texts.heldout, most, long, reason, tokenizer)
    remarks += [f"texts: {remark}"] * bool(remark) + [f"held-out texts: {heldout_remark}"] * bool(heldout_remark)
    return texts._replace(examples=examples, heldout=heldout, remarks=tuple(remarks), most=most)


def _text_examples(
    settings: Settings, flag: str, kind: str, tokenizer: TextTokenizer, records: Sequence[Mapping[str, object]] | None
) -> tuple[Any, list[str]]:
    """The texts of a caller, or of the files that a flag names, with remarks; None where there are neither."""
    files = data_files(settings, flag) if records is None else []
    sources = [file.path for file in files] if records is None else [TableRows("records", rows_in_memory(records))]
    if not sources:
        return None, []
    fields = names_of_fields(settings)
    form = format_of(settings, fields)
    with blaming(flag):
        loaded = [load_examples(source, kind, tokenizer, fields, form) for source in sources]
    weights = [file.weight for file in files if file.weight is not None]
    remarks = [remark for file in loaded for remark in file.remarks]
    return join_files(loaded, shares_of(weights) if weights else None), remarks


def fields_of_texts(texts: Texts) -> frozenset[str]:
    """The fields of the rows that texts make."""
    first = texts.examples[0]
    rows = rows_of_conversation(first) if texts.kind == "demonstrations" else [first]
    fields = set(text_batch(rows, 0).names()) - {"margin"}
    whole = _has_margins(texts.examples) and _has_margins(texts.heldout)
    further = {"margin": whole, "mismatched": texts.kind == "ratings"}
    return frozenset(fields | {name for name, there in further.items() if there})


def _has_margins(examples: Sequence[Any]) -> bool:
    if isinstance(examples, Mixture):
        return all(_has_margins(part) for part in examples.parts)
    return examples.has_margin if isinstance(examples, TextFile) else all(x.margin is not None for x in examples)


def embedded_texts(settings: Settings, kind: str, tokenizer: TextTokenizer) -> Texts:
    """The embedded task as texts of a kind.

    They are demonstrations without errors, pairs of a right and a wrong answer, or one of these with a label, or with
    labels of its digits.
    """
    count = settings.evaluation.eval_prompts
    embedded = embedded_task(settings.examples.task)
    if kind not in embedded.texts:
        raise SettingsError(f"--task={settings.examples.task} has no {kind}; it has {', '.join(embedded.texts)}")
    train = _training_examples(settings, kind, tokenizer)
    heldout = embedded_examples(embedded.texts[kind](0, count, split="heldout"), kind, tokenizer)
    return Texts(embedded.name, train, heldout, kind, embedded.readable)


def embedded_examples(rows: Sequence[Any], kind: str, tokenizer: TextTokenizer) -> list[Any]:
    """Tokenize an embedded task's texts: records, or rows of values in the order of the kind's fields."""
    names = ("prompt", *TEXT_FIELDS[kind], *([LABELS[kind]] if kind in LABELS else []))
    form = PLAIN_PROMPTS._replace(step_separator="")
    records = [row if isinstance(row, Mapping) else dict(zip(names, row, strict=True)) for row in rows]
    return [text_example(record, kind, tokenizer, form) for record in records]


def fit_prompts(
    task: Task, settings: Settings, new_tokens: int, models: Mapping[str, Model], tokenizer: TextTokenizer
) -> Task:
    """The task with prompts that are short enough for every model and for --max_prompt_tokens.

    Args:
      new_tokens: of a completion.
      models: of the roles that read its tokens.
      tokenizer: of the policy.

    Raises:
      SettingsError: there is no room for a prompt.
      DataError: one is too long, or none is left; see `fit_examples`.
    """
    # A reward model reads one more token, behind the completion.
    room = {name: model.config.max_positions - new_tokens - (name in SCORING_ROLES) for name, model in models.items()}
    name = min(room, key=lambda name: room[name])
    most = room[name]
    beyond = ", 1 of them to read the whole completion" if name in SCORING_ROLES else ""
    positions = models[name].config.max_positions
    reason = f"--max_new_tokens is {new_tokens} and the model has {positions} positions{beyond}"
    most, reason, idle = token_limit("max_prompt_tokens", settings.examples.max_prompt_tokens, most, reason)
    if most < 1:
        raise SettingsError(f"{reason}, which leaves none for a prompt; give fewer")
    train, remark = fit_examples(task.prompts, most, settings.examples.long_prompts, reason, tokenizer)
    heldout, heldout_remark = fit_examples(task.heldout, most, settings.examples.long_prompts, reason, tokenizer)
    remarks = [f"prompts: {remark}"] * bool(remark) + [f"held-out prompts: {heldout_remark}"] * bool(heldout_remark)
    return task._replace(prompts=train, heldout=heldout, remarks=(*task.remarks, *idle, *remarks))


def check_text_prompts(env: str | None, examples: Sequence[Example]) -> None:
    """Refuse prompts with pictures for an environment of another framework. Raises: SettingsError.

    Args:
      env: value of --env; None: it is not given.
    """
    framework = (env or "").partition(":")[0]
    seeing = next((example for example in examples if example.opening is not None), None)
    if framework in FRAMEWORKS and seeing is not None:
        raise SettingsError(
            f"--env={env}: environments of {framework} get text, and {seeing.source or 'a prompt'} has pictures; leave "
            "these out, or give an environment of FILE.py:NAME"
        )


def format_of(settings: Settings, fields: Fields) -> PromptFormat:
    """The format of all prompts that the flags give.

    Raises:
      SettingsError: naming the flag.
    """

    def read(name: str, parse: Callable[[str], object], otherwise: object) -> Any:
        value = flag_value(settings, name)
        with blaming(name):
            return otherwise if value is None else parse(value)

    return PromptFormat(
        chat=any(flag_value(settings, name) is not None for name in (*CHAT_FLAGS, "chat_template")),
        system=read("system_prompt", text_of_flag, None),
        text=read("prompt_template", text_of_flag, PLAIN_PROMPTS.text),
        shots=read("few_shot", lambda text: read_shots(text, fields), ()),
        tools=read("tools", read_tools, ()),
        arguments=read("template_arguments", template_arguments, {}),
        step_separator=step_separator(settings, embedded=False),
    )


def step_separator(settings: Settings, embedded: bool) -> str:
    r"""The text between two steps: that of the flag, in which \n is a line end; of the embedded task there is none."""
    if settings.formatting.step_separator is not None:
        return settings.formatting.step_separator.replace("\\n", "\n").replace("\\t", "\t")
    return "" if embedded else SEPARATOR


def with_chat_template(tokenizer: Any, settings: Settings) -> Any:
    """The tokenizer with the chat template of a flag, which is saved with the model.

    Raises:
      SettingsError: the file cannot be read, or there is no template where one is needed.
    """
    given = settings.formatting.chat_template
    if given is not None and given != OWN:
        tokenizer = copy.copy(tokenizer)
        with blaming("chat_template"):
            tokenizer.chat_template = text_of_flag(given)
    shows = tokenizer.chat_template is not None
    check_needs(settings, chat_template=shows, tool_texts=shows and _shows_tools(tokenizer, settings.formatting.tools))
    return tokenizer


def _shows_tools(tokenizer: TextTokenizer, file: str | None) -> bool:
    """True if the chat template shows the tools of a file, or fails. Raises: SettingsError, they cannot be read."""
    with blaming("tools"):
        tools = () if file is None else read_tools(file)
    conversation = [{"role": "user", "content": "?"}]
    try:
        return chat_text(tokenizer, conversation, tools) != chat_text(tokenizer, conversation)
    except Exception:  # templates may raise anything, and are asked again with the prompts
        return True


def prompt_examples(
    settings: Settings, flag: str, records: Sequence[object] | None, form: PromptFormat, tokenizer: TextTokenizer
) -> Sequence[Example]:
    """The prompts of a caller, or of the files of a flag, as token ids; a mixture where files have weights.

    Raises:
      SettingsError: naming the flag, the file, and the line or row.
    """
    fields = names_of_fields(settings)
    files = data_files(settings, flag)
    with blaming(flag):
        if records is not None:
            return encode_prompts(check_prompts(records, fields), tokenizer, form)
        loaded = [encode_prompts(load_prompts(file.path, fields), tokenizer, form) for file in files]
    weights = [file.weight for file in files if file.weight is not None]
    return Mixture(loaded, shares_of(weights)) if weights else [example for part in loaded for example in part]


def split(examples: Sequence[Any], heldout: int, seed: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Examples to train on, and at most a tenth of them to evaluate on, which the seed chooses; both keep their order.

    Of a mixture with shares a tenth of each part is held out, by its share. With fewer than ten examples there is none
    to spare: evaluation uses the first of those to train on.
    """
    if isinstance(examples, Mixture) and examples.shares is not None:
        counts = [max(1, heldout * share // sum(examples.shares)) for share in examples.shares]
        pairs = [split(part, count, seed) for part, count in zip(examples.parts, counts, strict=True)]
        held_out = [example for _, held in pairs for example in held]
        return Mixture([train for train, _ in pairs], examples.shares), held_out
    count = min(heldout, len(examples) // LEAST_TO_SPLIT)
    if not count:
        few = examples if heldout >= len(examples) else pick(examples, np.arange(heldout))
        return examples, few
    held = chosen_examples(examples, count, seed)
    return pick(examples, np.setdiff1d(np.arange(len(examples)), held)), pick(examples, held)


def remarks_on_heldout(train: Sequence[object], heldout: Sequence[object], wanted: int) -> list[str]:
    """Remarks on held-out examples: fewer than a flag asks for, or the same as examples that are trained on.

    Of texts only the first 5,000 are compared, for they are read from their files.

    Args:
      wanted: --eval_prompts.
    """
    remarks = []
    there = f"are {len(heldout)} examples" if len(heldout) > 1 else "is 1 example"
    if wanted not in (settings_flags()["eval_prompts"].default, len(heldout)) and wanted > len(heldout):
        remarks.append(f"--eval_prompts={wanted}: there {there} to evaluate on")
    compared = train if isinstance(train[0], Example) else itertools.islice(train, MOST_COMPARED)
    keys = {_key(example) for example in compared}
    same = sum(_key(example) in keys for example in heldout)
    if same:
        few = f" ({len(train)} examples are too few to hold a tenth out)" if len(train) < LEAST_TO_SPLIT else ""
        remarks.append(
            f"{same} of the {len(heldout)} held-out prompts are trained on too, word for word{few}; --eval_data=FILE "
            "gives others"
        )
    return remarks


def remarks_on_template(settings: Settings) -> list[str]:
    """A remark on what looks like a place of --prompt_template and is not filled."""
    text = None if settings.formatting.prompt_template is None else text_of_flag(settings.formatting.prompt_template)
    names = [name for name in dict.fromkeys(PLACE.findall(text or "")) if name != "prompt"]
    if not names:
        return []
    return [f"--prompt_template: {{{names[0]}}} stays in every prompt as it is written; only {{prompt}} is replaced"]


def _key(example: Any) -> tuple[int, ...]:
    """Tokens of the prompt of an example, and the digest of what it owns."""
    if isinstance(example, Example):
        return (*(() if example.owned is None else (example.owned.digest,)), *example.tokens)
    owned = [value.digest for value in example.owned]
    text = example.texts[0]
    first = next((place for place, trained in enumerate(text.trained) if trained), len(text.tokens))
    return (*owned, *text.tokens[:first])


def chosen_places(total: int, count: int, seed: int) -> np.ndarray:
    """`count` places of `total`, ascending, that the seed chooses."""
    return np.sort(np.random.default_rng((seed, SPLIT)).permutation(total)[:count])


def chosen_examples(examples: Sequence[object], count: int, seed: int) -> np.ndarray:
    """`chosen_places` of at most `count` examples, but one pair at least; the two texts of a pair stay together."""
    pairs = pairs_of(examples)
    if pairs is None:
        return chosen_places(len(examples), count, seed)
    order = pairs[np.random.default_rng((seed, SPLIT)).permutation(len(examples))]
    _, first = np.unique(order, return_index=True)
    drawn = order[np.sort(first)]
    sizes = np.bincount(pairs)[drawn].cumsum()
    return np.flatnonzero(np.isin(pairs, drawn[sizes <= max(count, sizes[0])]))


def pairs_of(examples: Sequence[object]) -> np.ndarray | None:
    """[examples] a number of the pair that each text is from, or of its own; None: all are their own."""
    if isinstance(examples, TextFile) and isinstance(examples.records.table, PairHalves):
        return examples.records.places // 2
    if not isinstance(examples, Mixture):
        return None
    parts = [pairs_of(part) for part in examples.parts]
    if all(part is None for part in parts):
        return None
    numbers = []
    begin = 0
    for part, pairs in zip(examples.parts, parts, strict=True):
        numbers.append(begin + (np.arange(len(part)) if pairs is None else pairs))
        begin = 1 + int(numbers[-1].max(initial=begin))
    return np.concatenate(numbers)
