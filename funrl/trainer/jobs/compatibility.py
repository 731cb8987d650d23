"""Checks of a run: whether algorithm, models, meshes and engine go together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from unicodedata import normalize

from funrl.algos.checking import Available, check
from funrl.algos.core import Algorithm, Divergence
from funrl.algos.reading import reads
from funrl.asynchrony.behaviour import check_behaviour, check_correction
from funrl.data.prompts import Example
from funrl.data.tokenizer import load_tokenizer
from funrl.fields import FIELDS
from funrl.loading import load_function
from funrl.models import Model, ModelConfig
from funrl.role_kinds import ROLES, SCORING_ROLES
from funrl.rollout.engine_abilities import engines_that
from funrl.rollout.native.cells import options_without_states
from funrl.trainer.jobs.demonstrations import learns_from_demonstrations
from funrl.trainer.jobs.job import JobModels, Task, Texts
from funrl.trainer.jobs.models import check_scoring_pools, has_context
from funrl.trainer.jobs.sharding import (
    check_experts,
    check_layouts,
    generate_sizes,
    learns_sharded,
)
from funrl.trainer.settings.declaration import SettingsError, blaming, parts, refusing, run_kind
from funrl.trainer.settings.scorers import JUDGE, NOTHING_GIVEN, Given, environment_flag, has_environment, scorers_of
from funrl.trainer.settings.settings import Settings, check_needs, flag_value, given_flag, is_given
from funrl.trainer.sources.evaluation import source_names
from funrl.trainer.sources.pair_rows import SAMPLED_PAIRS
from funrl.trainer.sources.teacher_prompts import SIBLING
from funrl.trainer.sources.teacher_tokens import PLAIN, encode_written
from funrl.trainer.steps.roles import fields_read, role_names, writes_of


def check_algorithm(
    algorithm: Algorithm, settings: Settings, source: Collection[str] | None = None, given: Given = NOTHING_GIVEN
) -> None:
    """Compare what an algorithm reads with what a run of these settings provides.

    Args:
      source: fields that the source writes; None: all that a source may write.
      given: in Python, instead of flags.

    Raises:
      SettingsError: naming the fields of `Batch` that are missing, or the flag that would do nothing.
    """
    _check_episodes(algorithm, settings, given)
    available = provided(algorithm, settings, source, given)
    try:
        check(algorithm, available)
    except ValueError as error:
        missing = [name for name in _roles_without_model(algorithm, settings) if name in str(error)]
        advice = f"; give --{algorithm.role_kinds[missing[0]].flag}=DIR" if missing else ""
        raise SettingsError(f"{error}{advice}") from error
    check_needs(settings, **_parts_of(algorithm, settings))
    _check_roles(algorithm)
    _check_staleness(algorithm, settings)
    check_scoring_pools(algorithm, settings)


def _check_staleness(algorithm: Algorithm, settings: Settings) -> None:
    """Refuse stale rows where a run has none, and a loss that does not correct for them or for rounded ones.

    Raises:
      SettingsError: naming the flag.
    """
    staleness = settings.asynchrony.staleness
    check_needs(settings, generator_ranks=settings.devices.place is not None or settings.estimate.dry_run)
    scorers = scorers_of(settings)
    refills = filters_rows(algorithm, settings) and settings.sampling.max_refills > 1
    if staleness and scorers and refills and "greedy_score" in reads(algorithm).required:
        raise settings.refusal(
            f"{{max_refills}} with {{staleness}}, --{scorers[0]} and greedy completions: these are scored with the "
            "batch, and replaced ones are not; give --max_refills=1, with which a batch has fewer prompts where a "
            "filter drops some"
        )
    with refusing():
        check_behaviour(algorithm, staleness)
        if settings.engines.float8:
            flag = given_flag(settings, "rollout_dtype")
            rounded = "products of generation are rounded to 8 bits"
            check_correction(algorithm, flag, rounded, sampler="the engine that sampled them")


def filters_rows(algorithm: Algorithm, settings: Settings) -> bool:
    """True if some sampled rows are not trained on."""
    return algorithm.filter is not None or settings.rewards.on_reward_error == "skip"


def _check_episodes(algorithm: Algorithm, settings: Settings, given: Given) -> None:
    """Refuse an environment with an algorithm that cannot learn from rows of episodes. Raises: SettingsError."""
    if run_kind(algorithm, settings.examples.data) != "rl" or not has_environment(settings, given):
        return
    problem = ""
    if algorithm.example in SAMPLED_PAIRS:
        problem = (
            "the algorithm compares two completions of a prompt, and an episode may have several rows and agents; "
            "leave the environment out, or compare groups, as grpo does"
        )
    elif "scores" in reads(algorithm).required:
        problem = (
            "the algorithm reads the scores of several reward functions, and an environment gives one reward; leave "
            "the environment out, or give its sum to grpo"
        )
    if problem:
        raise SettingsError(f"{environment_flag(settings, given)}: {problem}")


def _check_roles(algorithm: Algorithm) -> None:
    """Refuse a loss of an undeclared role, and a declared role that nothing reads. Raises: SettingsError."""
    kinds = algorithm.role_kinds
    present = role_names(algorithm)
    unknown = sorted(set(algorithm.losses) - set(kinds))
    if unknown:
        raise SettingsError(
            f"the algorithm has a loss for {unknown[0]!r}, which is not one of {', '.join(kinds)}; "
            f"Algorithm(roles={{{unknown[0]!r}: RoleKind(text)}}) declares it"
        )
    for name in algorithm.roles:
        if name not in present:
            fields = ", ".join(kinds[name].writes) or "nothing"
            raise SettingsError(f"the algorithm reads nothing that its role {name!r} writes ({fields}); leave it out")


def _roles_without_model(algorithm: Algorithm, settings: Settings) -> list[str]:
    """The roles that read the batch with a model of their own, for which no flag gives one."""
    return [
        name
        for name, kind in algorithm.role_kinds.items()
        if kind.flag
        and not kind.scores_completions
        and flag_value(settings, kind.flag) is None
        and not has_context(kind, settings)
    ]


def _parts_of(algorithm: Algorithm, settings: Settings) -> dict[str, bool]:
    """Roles, fields and further parts that flags may need, of `PARTS_NEEDED`, each with whether an algorithm has it."""
    names = role_names(algorithm)
    present = {*names, *fields_read(algorithm), *reads(algorithm).optional}
    present |= {algorithm.role_kinds[name].like for name in names if name in algorithm.role_kinds}
    parts_of_run = {name: name in present for name in (*ROLES, "teacher_topk")}
    sharded = learns_sharded(settings, algorithm.losses)
    chain = algorithm.advantage is not None
    return parts_of_run | {
        "advantage": chain,
        "filter": filters_rows(algorithm, settings),
        "trained_shards": sharded,
    }


def provided(
    algorithm: Algorithm, settings: Settings, source: Collection[str] | None = None, given: Given = NOTHING_GIVEN
) -> Available:
    """The fields that a run provides, by where they can be read.

    Args:
      source, given: as in `check_algorithm`.
    """
    sampled = run_kind(algorithm, settings.examples.data) == "rl"
    schema = algorithm.schema
    if source is None:
        source = sampled_fields(settings, given) if sampled else FIELDS.by("source")
    source = {*source, *(name for name in schema.by("source") if name in algorithm.fields)}  # of a source of one's own
    in_filter = {*source, "failed"} if settings.rewards.on_reward_error != "stop" else set(source)
    kinds = algorithm.role_kinds
    absent = {name for name, kind in kinds.items() if kind.learns and not kind.generates} - set(algorithm.losses)
    absent |= set(_roles_without_model(algorithm, settings))
    writers = (set(kinds) | set(algorithm.losses)) - absent
    in_chain = {*source, *schema.by(*writers)}
    if algorithm.example in SAMPLED_PAIRS and sampled:  # the rows of a pair are one: see `paired`
        in_chain = in_chain - set(schema.rows()) | {"length", "group", "positions", "segments"}
    elif sampled:
        in_chain |= {"greedy_score"}
        if settings.sampling.new_tokens_per_step is None and not scorers_of(settings):  # whose scores are not measured
            in_chain |= {"prompt_value"}
    beside = (algorithm.divergence or Divergence()).role  # the step computes it with that role beside the policy
    step = set(schema.by("step")) - ({"divergence"} if beside in absent else set())
    in_losses = in_chain | step | {"positions", "segments"}
    return Available(*map(frozenset, (in_filter, in_chain, in_losses)))


def sampled_fields(settings: Settings, given: Given = NOTHING_GIVEN) -> set[str]:
    """The fields of the rows that a policy samples, as they come from the engine and the rewards."""
    fields = set(FIELDS.by("source")) - {"label", "margin", "mismatched", "positions", "segments"}  # of given texts
    absent = {"greedy_score", "prompt_value", "failed"}  # the last goes after the filter, the others come after it
    absent.add("teacher_span")  # only a teacher with another tokenizer needs it
    if settings.sampling.new_tokens_per_step is None and not settings.asynchrony.staleness:
        absent |= {"version", "stale"}  # all tokens of a step are of the same weights
    if not settings.routers.router_replay:
        absent.add("routes")
    episodes = has_environment(settings, given)
    if settings.rewards.process_reward_model is None and not episodes:
        absent.add("token_reward")
    if not episodes:
        absent |= {"episode", "agent", "episode_tokens", "episode_first", "unit", "turn", "author", "state"}
    return fields - absent


def check_meshes(
    settings: Settings, models: Mapping[str, Model], sizes: dict[str, int], memory: float
) -> dict[str, int]:
    """The mesh to generate on, after checking that all models can be laid out.

    Args:
      memory: bytes that one rank may use.

    Raises:
      SettingsError, MeshError: naming the flag, the sizes and the way out.
    """
    absent = [name for name in parts(settings.sharding.fsdp_models) if name not in models]
    if absent:
        raise settings.refusal(f"{{fsdp_models}}: this run has no {absent[0]}; it has {', '.join(models)}")
    check_experts(settings, models.values())
    role = ROLES.generating(models)
    generating = sizes if role is None else generate_sizes(settings, sizes, models[role], memory)
    place = settings.devices.place
    with blaming(f"mesh={settings.devices.mesh}" if place is None else f"place={place}"):
        check_layouts(models, settings, sizes, generating)
        if role is not None and (generators := settings.devices.generators) is not None:
            check_layouts({role: models[role]}, settings, generators.sizes, generators.sizes)
        for name, pool in settings.devices.scoring.items():
            if name != JUDGE:  # which `judge_of` checks
                check_layouts({name: models[name]}, settings, pool.sizes, pool.sizes)
    for name, model in models.items():
        heads = -(-model.abilities.heads // sizes["tensor"])
        if settings.devices.sequence_parallel == "ulysses" and heads % sizes["sequence"]:
            raise settings.refusal(
                f"{{sequence_parallel}}: the {name} has {heads} query heads on a device, which do not divide over "
                f"sp{sizes['sequence']}; give --sequence_parallel=ring, or an sp that divides {heads}"
            )
    return generating


def check_code(settings: Settings, models: Mapping[str, Model], generates: str | None) -> None:
    """Check what transformers' own code, and models without pages, cannot do.

    Args:
      generates: the role that generates, if one does.

    Raises:
      SettingsError: naming the flag.
    """
    for name, model in models.items():
        own = model.abilities.code
        kind = f"{own}, transformers' own code" if own else f"a {model.config.source.family}"
        what = f"the {name} is {kind}"
        if own and settings.models.compile == "on":
            raise SettingsError(f"--compile=on: {what}, whose layers are not compiled; leave it out")
        if name != generates:
            continue
        for option, reason in options_without_states(model).items():
            if is_given(settings, option):
                raise settings.refusal(f"{{{option}}}: {reason}; leave it out")
        if not model.pages and not settings.engines.abilities.unpaged:
            code = " with {model_code}" if settings.models.model_code == "hf" else ""
            engines = engines_that("unpaged")
            raise settings.refusal(f"{{engine}}{code}: {what}, which has no pages of keys; give --engine={engines}")


def check_owned_values(settings: Settings, models: Mapping[str, Model], algorithm: Algorithm) -> None:
    """Check what models that see pictures cannot do yet, and flags of pictures of models that see none.

    Raises:
      SettingsError: naming the flag.
    """
    seeing = [name for name, model in models.items() if model.owned is not None]
    check_needs(settings, pictures=seeing)
    if not seeing:
        return
    what = f"the {seeing[0]} sees pictures"
    if algorithm.divergence is not None:
        raise settings.refusal("{model}: {what}, and its placeholders are in no divergence", what=what)
    blind = [name for name, model in models.items() if model.owned is None and name not in SCORING_ROLES]
    if blind:
        raise SettingsError(f"the {blind[0]} reads text only, but {what}; give it a model that sees pictures, or none")
    refused = {
        "engine": (not settings.engines.abilities.pictures, f"give --engine={engines_that('pictures')}"),
        "new_tokens_per_step": (settings.sampling.new_tokens_per_step is not None, "leave it out"),
        "backend": (settings.models.backend != "torch", "give --backend=torch"),
        "device": (settings.devices.device == "xla", "give --device=cpu"),
        "judge": (settings.judging.judge is not None, "a judge reads text: leave it out"),
        "long_prompts": (settings.examples.long_prompts == "truncate", "it loses some; give --long_prompts=drop"),
    }
    scoring = {name: (flag_value(settings, name) is not None, "it reads text: leave it out") for name in SCORING_ROLES}
    for name, (present, way_out) in {**refused, **scoring}.items():
        if present:
            raise settings.refusal(f"{{{name}}}: {what}; {way_out}")


def check_mask_replay(settings: Settings, models: Mapping[str, Model], algorithm: Algorithm) -> None:
    """Check that the trainer can take the distributions that the engine truncates.

    Raises:
      SettingsError: naming the flag.
    """
    if not settings.sampling.mask_replay:
        return
    refused = {
        "backend": (settings.models.backend != "torch", "give --backend=torch"),
        "device": (settings.devices.device == "xla", "give --device=cpu"),
    }
    for name, (present, reason) in refused.items():
        if present:
            raise settings.refusal(f"{{mask_replay}} with {{{name}}}: {reason}")
    if learns_from_demonstrations(algorithm):
        raise settings.refusal(
            "{mask_replay}: demonstrations, which the algorithm reads, were not sampled; leave it out"
        )
    renormalised = {"policy", "reference", "critic", *SCORING_ROLES}
    kinds = algorithm.role_kinds
    others = [name for name in models if (kinds[name].like or name) not in renormalised]
    if others or algorithm.divergence is not None:
        role = others[0] if others else "teacher"
        raise settings.refusal(f"{{mask_replay}}: the {role}'s log-probabilities are not truncated; leave it out")


def check_teacher_context(settings: Settings, models: Mapping[str, Model], algorithm: Algorithm, given: Given) -> None:
    """Check that the teacher can have prompts of its own.

    Raises:
      SettingsError: naming the flag.
    """
    if settings.models.teacher_context is None:
        return
    if has_environment(settings, given):
        flag = environment_flag(settings, given)
        raise settings.refusal(f"{{teacher_context}} with {flag}: an environment writes its own prompts; leave it out")
    if algorithm.divergence is not None:
        raise settings.refusal(
            "{teacher_context}: a divergence over the whole vocabulary is computed from the policy's own tokens; use "
            "an algorithm that reads the teacher's log-probabilities, as distillation does"
        )
    if learns_from_demonstrations(algorithm):
        raise settings.refusal("{teacher_context}: demonstrations have no prompt of the teacher; leave it out")
    if any(model.owned is not None for model in models.values()):
        raise settings.refusal("{teacher_context} with {model}: its prompts have pictures; leave it out")
    source = settings.models.teacher_context
    if (source == SIBLING or ":" in source) and scorers_of(settings):
        scorer = scorers_of(settings)[0]
        raise settings.refusal(
            f"{{teacher_context}} with {{{scorer}}}: its scores come after the teacher's prompts, which would be made "
            "without them; name a field of the records, or leave one out"
        )


def check_teacher_tokens(settings: Settings, models: JobModels, algorithm: Algorithm, given: Given) -> None:
    """Check that the algorithm and the run can have a teacher with another tokenizer, where there is one.

    Raises:
      SettingsError: naming the flag.
    """
    for name, tokenizer in models.tokenizers.items():
        rows = models.models[name].config.vocab
        largest = max(tokenizer.get_vocab().values())
        chain = algorithm.advantage
        spans = chain is not None and "teacher_span" in reads(chain).optional
        refused = {
            "reads the teacher's tokens one by one; use one with teacher_advantage(), such as distillation with "
            "--kind=k1 or mopd": not spans or bool(set(ROLES["teacher"].writes) & losses_read(algorithm)),
            "is run in an environment, which writes tokens of the policy": has_environment(settings, given),
            "has --teacher_context, whose prompts are in the policy's tokens": bool(settings.models.teacher_context),
            "shortens prompts by --long_prompts=truncate, and the teacher reads whole texts": (
                settings.examples.long_prompts == "truncate"
            ),
            "learns from demonstrations, which are in the policy's tokens": learns_from_demonstrations(algorithm),
            "learns from pictures, which are not in texts": any(x.owned is not None for x in models.models.values()),
            f"has a teacher with token ids up to {largest} and a vocabulary of {rows} rows": largest >= rows,
            "has a teacher whose tokenizer has no end-of-text token": tokenizer.eos_token_id is None,
        }
        for problem, present in refused.items():
            if present:
                raise SettingsError(
                    f"--teacher={models.directories[name]}: its tokenizer is not the policy's, and the run {problem}"
                )


def losses_read(algorithm: Algorithm) -> frozenset[str]:
    """Fields that the losses and the filter of an algorithm read."""
    read = reads(*algorithm.losses.values(), algorithm.filter, fields=algorithm.fields)
    return read.required | read.optional


ROUND_TRIPS = 256  # prompts that are read in a teacher's tokens before a run


def check_round_trip(models: JobModels, prompts: Sequence[Example]) -> None:
    """Check that teachers with other tokenizers read prompts as they are. Raises: SettingsError, one does not."""
    for name, tokenizer in models.tokenizers.items():
        where = f"--teacher={models.directories[name]}: "
        for prompt in prompts[:ROUND_TRIPS]:
            if prompt.messages is not None and tokenizer.chat_template is None:
                raise SettingsError(f"{where}prompts are chats, but its tokenizer has no chat template")
            with refusing(where, Exception):
                texts = [prompt.text] if prompt.messages is None else [str(x.get("content")) for x in prompt.messages]
                texts = [normalize("NFC", text) for text in texts]
                read = [tokenizer.decode(encode_written(tokenizer, "", text), **PLAIN) for text in texts]
            changed = next(((a, b) for a, b in zip(texts, read, strict=True) if a != normalize("NFC", b)), None)
            if changed is not None:
                raise SettingsError(
                    f"{where}its tokenizer reads {changed[0][:80]!r} as {changed[1][:80]!r}, so spans of both cannot "
                    "be compared; give a teacher whose tokenizer keeps texts as they are"
                )


def check_follow(
    settings: Settings, algorithm: Algorithm, models: Collection[str], directories: Collection[str]
) -> None:
    """Check that the models of --follow can follow the policy.

    Args:
      models: names of the roles that have one.
      directories: names of those whose model is not the one that the run begins with.

    Raises:
      SettingsError: naming the flag.
    """
    rules = settings.optimization.follow_rules
    apart = settings.devices.scoring
    own = {*algorithm.losses, *SCORING_ROLES, *directories}
    still = [name for name in models if name not in own and name not in apart]
    for name in rules:
        problem = ""
        if name not in models:
            problem = f"this run has no {name}"
        elif name in algorithm.losses:
            problem = f"the {name} learns by a loss of its own"
        elif name in own:
            problem = f"the {name} has a model of its own, which does not become the policy"
        elif name in apart:
            problem = f"the {name} has ranks of its own; leave it out of --place"
        if problem:
            others = f"; {', '.join(still)} can follow it" if still else ""
            raise settings.refusal(f"{{follow}}: {problem}{others}")
    if rules and settings.models.backend != "torch":
        raise settings.refusal("{follow} with {backend}: its programs hold frozen weights; give --backend=torch")


def check_objectives(algorithm: Algorithm, prompts: Sequence[Example]) -> None:
    """Check that each source of prompts has an objective, and each objective prompts. Raises: SettingsError."""
    if not algorithm.objectives:
        return
    name_of = source_names(prompts)
    sources = sorted({name_of(prompt) for prompt in prompts})
    without = [name for name in sources if name not in algorithm.objectives]
    idle = [name for name in algorithm.objectives if name not in sources]
    if without or idle:
        problem = f"no algorithm for the source {without[0]!r}" if without else f"no prompts of the source {idle[0]!r}"
        raise SettingsError(
            f"--algorithm: there is {problem}; the sources of the prompts, by `data_source` or the name of their file, "
            f"are {', '.join(sources)}, and there are algorithms for {', '.join(algorithm.objectives)}"
        )


def check_sources(algorithm: Algorithm, models: JobModels, prompts: Sequence[Example]) -> None:
    """Check that roles for sources of prompts cover the sources whose algorithm reads what they write.

    Raises:
      SettingsError: there are no prompts of a source, or no role for one.
    """
    kinds = {name: kind for name in models.models if (kind := algorithm.role_kinds[name]).sources}
    sources = sorted(set(map(source_names(prompts), prompts)))
    parts = dict(zip(algorithm.objectives, algorithm.parts, strict=True))
    for name, kind in kinds.items():
        like = kind.like or name
        own = {source for other, kind in kinds.items() if (kind.like or other) == like for source in kind.sources}
        idle = [source for source in kind.sources if source not in sources]
        readers = {source: parts.get(source, algorithm) for source in sources if source not in own}
        without = [x for x, reader in readers.items() if like in reader.role_kinds and writes_of(like, reader)]
        if idle or without:
            no_role = f"there is no {like} for the source {next(iter(without), '')!r}"
            problem = f"there are no prompts of the source {idle[0]!r}" if idle else no_role
            origin = f"--{kind.flag}" if kind.flag else f"the role {name!r}"
            raise SettingsError(
                f"{origin}: {problem}; the sources of the prompts, by `data_source` or the name of their "
                f"file, are {', '.join(filter(None, sources)) or 'none'}"
            )


def check_context(settings: Settings, prompts: Sequence[Example], new_tokens: int, positions: int) -> None:
    """Check that there is the field of the records, or the function, that --teacher_context names, and room for it.

    Args:
      new_tokens: bound on those of a completion.
      positions: of the teacher.

    Raises:
      SettingsError: a record lacks the field.
      LoadError: there is no such function.
    """
    field = settings.models.teacher_context
    if field is None:
        return
    if field == SIBLING:
        longest = max((len(prompt.tokens) for prompt in prompts), default=0)
        if longest + 2 * new_tokens > positions:
            raise settings.refusal(
                f"{{teacher_context}}: a prompt of {longest} tokens after a completion and before another, of up to "
                f"{new_tokens} each, exceeds the teacher's {positions} positions; give a lower --max_new_tokens"
            )
        return
    if ":" in field:
        load_function("teacher_context", field)
        return
    lacking = next((prompt for prompt in prompts if field not in prompt.fields), None)
    if lacking is not None:
        fields = ", ".join(sorted(lacking.fields)) or "none"
        raise settings.refusal(
            f"{{teacher_context}}: {lacking.source or 'a record'} has no such field; its fields are {fields}. Name "
            f"one of these, {SIBLING}, or FILE.py:function"
        )


def check_readers(directories: Mapping[str, str], task: Task, algorithm: Algorithm, settings: Settings) -> None:
    """Check that the models that score completions can read the prompts, and that their scores are of use.

    Raises:
      SettingsError: naming the flag.
    """
    chats = any(example.messages for example in task.prompts)
    for name in SCORING_ROLES:
        if chats and name in directories and load_tokenizer(directories[name]).chat_template is None:
            raise SettingsError(
                f"--{name}={directories[name]}: prompts are chats, but its tokenizer has no chat template, and "
                "--chat_template gives one to the policy's alone; add one to its tokenizer_config.json"
            )
    if settings.rewards.process_reward == "each" and "token_reward" not in {*reads(algorithm)[0], *reads(algorithm)[1]}:
        raise SettingsError(
            "--process_reward=each: the algorithm reads no rewards of tokens, as ppo does; give --process_reward=min "
            "or another that makes one number of a completion's steps"
        )


def check_token_ids(task: Task | Texts, tokenizer: Any, model: Model, directory: str | None = None) -> None:
    """Check the token ids that a run uses against the model's vocabulary. Ones that nothing uses may be beyond it.

    Args:
      directory: of the model; None: it is the one that the run begins with.

    Raises:
      SettingsError: one is beyond it, and the way out.
    """
    if problem := next(_tokens_beyond(task, tokenizer, model.config), None):
        raise SettingsError(f"{problem}{_way_out(model, directory)}")


def _tokens_beyond(task: Task | Texts, tokenizer: Any, config: ModelConfig) -> Iterator[str]:
    """The token ids in use beyond a vocabulary, each as the beginning of a message."""
    ends = [("eos_token_id of config.json", token) for token in config.special_tokens.eos]
    ends += [(f"{name} of the tokenizer", getattr(tokenizer, name)) for name in ("eos_token_id", "pad_token_id")]
    yield from (f"the {name} is {token}" for name, token in ends if token is not None and token >= config.vocab)
    if max(tokenizer.get_vocab().values(), default=0) < config.vocab:
        return
    examples = (*task.prompts, *task.heldout) if isinstance(task, Task) else (*task.examples, *task.heldout)
    for example in examples:
        texts = [example] if isinstance(example, Example) else example.texts
        for token in (token for text in texts for token in text.tokens if token >= config.vocab):
            yield f"the tokenizer makes token {token} ({tokenizer.convert_ids_to_tokens(token)!r}) of a text"


def _way_out(model: Model, directory: str | None) -> str:
    own = model.abilities.code or directory is not None
    rows = "with transformers' resize_token_embeddings and save the model" if own else "with --resize_vocab"
    which = "the model" if directory is None else directory
    return (
        f", but {which} has token ids below {model.config.vocab} (vocab_size of config.json); use a token that it "
        f"has, or add rows {rows}"
    )
