"""Models of a run: which each role has, read from their directories without weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funrl import trees
from funrl.algos.core import Algorithm, Loss
from funrl.algos.reading import reads
from funrl.data.tokenizer import load_tokenizer
from funrl.environments.agents import POLICY, AgentMap
from funrl.models import Model, Placed, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.peft_files import targets_of
from funrl.models.huggingface.resize import with_vocabulary
from funrl.models.lora import decoder_of, full_rank, with_lora
from funrl.models.model import Lora
from funrl.models.nf4_base import nf4_model_problem, with_nf4
from funrl.models.vision.model import model_of_config
from funrl.role_kinds import ROLES, SCORING_ROLES, RoleKind, RoleMessages
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.job import Job, JobModels, Task, Texts, compute_dtype
from funrl.trainer.settings.declaration import SettingsError, blaming, refusing, run_kind
from funrl.trainer.settings.scorers import MODEL_FLAGS, Given, model_path, scorers_of, sourced_paths, with_paths
from funrl.trainer.settings.settings import Settings, check_needs, flag_value, with_flags
from funrl.trainer.sources.own_texts import reads_tokens
from funrl.trainer.steps.roles import Companion, Role, main_role_of, role_names

TEACHER = "teacher"  # the role, and the flag of its model


def located(settings: Settings) -> Settings:
    """The settings with what this machine decides: directories of models in its Hugging Face cache, and the dtype."""
    directories = {}
    for name in MODEL_FLAGS:
        if flag_value(settings, name) is not None:
            directories[name] = with_paths(settings, name, lambda path: str(hf.find_directory(path)))
    return with_flags(settings, **directories, dtype=compute_dtype(settings))


def first_model(settings: Settings, given: Given) -> tuple[Model, Any]:
    """The model that a run begins with, and its tokenizer."""
    embedded = embedded_task(settings.examples.task)
    if given.model is not None:
        return given.model, given.tokenizer or embedded.tokenizer()
    if settings.models.model is None:
        return model_of_config(embedded.model_config(settings.engines.abilities.least_head)), embedded.tokenizer()
    with blaming("model"):
        model = hf.check_directory(settings.models.model, settings.models.model_code)
        tokenizer = load_tokenizer(settings.models.model)
    if settings.models.resize_vocab:
        rows = 1 + max(tokenizer.get_vocab().values(), default=0)
        check_needs(settings, unnamed_tokens=rows > model.config.vocab)
        with blaming("resize_vocab"):
            model = with_vocabulary(model, rows)
    return model, tokenizer


def models_of(
    algorithm: Algorithm,
    settings: Settings,
    model: Model,
    tokenizer: Any,
    read: Callable[[str, str], Model] = hf.check_directory,
) -> JobModels:
    """The models of every role of a run, and the directories of roles that do not begin as `model`.

    Args:
      tokenizer: of `model`; None: other models' tokenizers are not looked at.
      read: (directory, --model_code) -> model.
    """
    models = {}
    directories = {}
    tokenizers = {}
    lora = lora_of(settings, model)
    names = role_names(algorithm)
    names += tuple(name for name in SCORING_ROLES if flag_value(settings, name) is not None and name not in names)
    for name in names:
        kind = algorithm.role_kinds[name]
        path = directory_of(kind, settings, name in algorithm.losses)
        if path is not None:
            models[name] = stored_model_of(name, kind, path, settings, tokenizer, read)
            directories[name] = path
            if kind.own_tokens and tokenizer is not None:
                own = load_tokenizer(path)
                tokenizers |= {} if own.get_vocab() == tokenizer.get_vocab() else {name: own}
            if lora is not None and name in algorithm.losses:
                raise settings.refusal(
                    "{lora_rank}: {origin} learns all weights of a model of its own, and adapters stand on the "
                    "policy's; leave one out",
                    origin=kind.origin(path, name),
                )
        else:
            if not kind.value_head and model.unembed is None:
                raise settings.refusal("{model}: it has a value head; a {name} gives probabilities", name=name)
            models[name] = with_head_of(kind, model) if kind.value_head and model.value is None else model
            if lora is not None and name in algorithm.losses:
                models[name] = with_lora(models[name], lora)
            if settings.adapters.nf4:
                models[name] = with_nf4(models[name])
    role = None if algorithm.divergence is None else algorithm.divergence.role
    if role is not None and role in directories:
        rows = models[role].config.vocab
        own = models[main_role_of(models, algorithm)].config.vocab
        if rows != own:
            raise SettingsError(
                f"{algorithm.role_kinds[role].origin(directories[role], role)}: its vocabulary has {rows} rows and the "
                f"policy's {own}; a divergence over the whole vocabulary needs as many"
            )
    return JobModels(
        model=model, tokenizer=tokenizer, models=models, directories=directories, lora=lora, tokenizers=tokenizers
    )


def agent_models(
    settings: Settings,
    agents: AgentMap,
    first: Model,
    tokenizer: Any,
    read: Callable[[str, str], Model] = hf.check_directory,
) -> dict[str, Model]:
    """The models of directories that agents map to, by their names in `agents.frozen`, after a check of all.

    Args:
      first: the model that the run begins with, which an earlier self is.
      tokenizer: of the policy; None: others are not compared with it.
      read: as in `models_of`.

    Raises:
      SettingsError: there is no such model, or it cannot play.
    """
    models = {}
    for name, frozen in agents.frozen.items():
        flag = f"agents={settings.environments.agents}"
        directory = None if frozen.directory is None else str(hf.find_directory(frozen.directory))
        with blaming(flag):
            model = first if directory is None else read(directory, settings.models.model_code)
        problem = ""
        if not model.generates:
            problem = "it has a value head and cannot write"
        elif not model.pages:
            problem = "the native engine does not generate with it"
        elif directory and tokenizer is not None and load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
            problem = "its tokenizer is not the policy's, so tokens would not match"
        if problem:
            raise SettingsError(f"--{flag}: the model {directory or 'of the policy'}: {problem}; map {name} to another")
        if directory is not None:
            models[name] = model
    return models


def directory_of(kind: RoleKind, settings: Settings, learns: bool) -> str | None:
    """The directory that a role starts from; None: it starts from the model that the run begins with.

    Args:
      learns: whether the algorithm has a loss for it. Then the flag of its kind names a model for other algorithms.
    """
    if kind.model is not None:
        return str(hf.find_directory(kind.model))
    return model_path(settings, kind.flag) if kind.flag and not learns else None


def has_context(kind: RoleKind, settings: Settings) -> bool:
    """True if a flag gives prompts of its own to a role."""
    return bool(kind.context_flag) and flag_value(settings, kind.context_flag) is not None


def stored_model_of(
    name: str, kind: RoleKind, path: str, settings: Settings, tokenizer: Any, read: Callable[[str, str], Model]
) -> Model:
    """The model of a role that starts from a directory of its own, after checking that it fits its kind.

    Args:
      tokenizer: of the policy; None: it is not compared.
      read: as in `models_of`.

    Raises:
      SettingsError: it does not fit.
    """
    origin = kind.origin(path, name)
    with refusing(f"--{kind.flag}: " if kind.flag else f"{origin}: "):
        model = read(path, settings.models.model_code)
    problem = ""
    apart = kind.scores_completions or kind.own_tokens  # it may read completions in other tokens
    shared = None if apart else tokenizer
    if (model.value is None) == kind.value_head:
        trains = f", which `funrl {kind.flag}` trains" if kind.flag else ""
        problem = f"this model has no {f'value head{trains}' if kind.value_head else 'unembedding'}"
    elif shared is not None and load_tokenizer(path).get_vocab() != shared.get_vocab():
        problem = "its tokenizer is not the policy's; tokens would not match"
    if problem:
        raise SettingsError(f"{origin}: {problem}")
    return model


def lora_of(settings: Settings, model: Model) -> Lora | None:
    """The adapters that the flags describe; None: all weights learn.

    Args:
      model: the one that the run begins with.

    Raises:
      SettingsError: the model has no such projections, or takes no adapters.
    """
    rank = settings.adapters.lora_rank
    if rank is None:
        return None
    if model.abilities.code:
        code = " with {model_code}" if settings.models.model_code == "hf" else ""
        raise settings.refusal(f"{{lora_rank}}{code}: {model.abilities.code} takes no adapters here; leave it out")
    with blaming(f"lora_targets={settings.adapters.lora_targets}"):
        targets = targets_of(settings.adapters.lora_targets, model)
    if rank > (full := full_rank(model, targets)):
        raise settings.refusal(f"{{lora_rank}}: no matrix with adapters has a rank above {full}; give {full} or less")
    if settings.adapters.nf4 and (problem := nf4_model_problem(model)) is not None:
        raise settings.refusal("{base_format}: {problem}; leave it out", problem=problem)
    return Lora(rank, settings.adapters.lora_alpha or float(rank), targets)


def with_head_of(kind: RoleKind, model: Model) -> Model:
    """A model with the value head of a role: that of a token classifier where steps are scored, if there is such."""
    if kind.reads == "steps" and hf.has_token_classifier(model.config):
        return with_value_head(model, labels=2, bias=True)
    return with_value_head(model)


def reads_policys(kind: RoleKind, task: Task | Texts, tokenizer: object, directory: str | None) -> bool:
    """True if a role reads the policy's tokens, and not texts in tokens of its own.

    Args:
      directory: that the role starts from; None: it starts from the policy's model.
    """
    if not kind.scores_completions or directory is None or not isinstance(task, Task):
        return True
    return kind.reads == "completion" and reads_tokens(load_tokenizer(directory), tokenizer, task.prompts)


def companion_of(job: Job, loss: Loss, places: Mapping[str, Placed]) -> Companion | None:
    """The frozen role that a loss compares whole distributions with; None: it compares none."""
    divergence = job.algorithm.divergence
    if divergence is None or "divergence" not in reads(loss).required | reads(loss).optional:
        return None
    return Companion(divergence.role, places[divergence.role], divergence, job.base_of(divergence.role))


def base_role(begin: Placed, roles: Mapping[str, Role]) -> Role:
    """The frozen role that others stand on: the decoder that the run begins with.

    Without a role that gives probabilities it has no unembedding.
    """
    unembeds = any(role.placed.model.unembed is not None for role in roles.values() if role.base is not None)

    def part(tree: trees.Tree) -> trees.Tree:
        return {name: x for name, x in decoder_of(tree).items() if unembeds or name != "unembed"}

    return Role(dataclasses.replace(begin, stored=part(begin.stored), compute=part(begin.compute)))


def check_scoring_pools(algorithm: Algorithm, settings: Settings) -> None:
    """Refuse ranks for a role that a run does not have, or that does not score by itself. Raises: SettingsError."""
    for name in settings.devices.scoring:
        problem = _pool_problem(algorithm, settings, name)
        if problem is not None:
            raise SettingsError(
                f"--place={settings.devices.placement}: {name} cannot have ranks of its own: {problem}; leave it out"
            )


def _pool_problem(algorithm: Algorithm, settings: Settings, name: str) -> str | None:
    """Reason why a role cannot have ranks of its own; None: it can."""
    kinds = algorithm.role_kinds
    rewarding = scorers_of(settings)
    if name in rewarding:
        return None
    only_score = [x for x in role_names(algorithm) if x not in algorithm.losses and not kinds[x].scores_completions]
    if name not in only_score:
        return f"the roles of this run that only score are {', '.join([*only_score, *rewarding]) or 'none'}"
    if algorithm.divergence is not None and algorithm.divergence.role == name:
        return "the loss compares whole distributions with it, in the update"
    kind = kinds[name]
    if kind.model is not None or (kind.flag and flag_value(settings, kind.flag)):
        return None
    if settings.adapters.lora_rank:
        return f"with --lora_rank={settings.adapters.lora_rank} it is the base of the policy, which trains"
    return "its model begins as the policy, with a head of its own" if kinds[name].value_head else None


def with_teachers(algorithm: Algorithm, settings: Settings) -> Algorithm:
    """The algorithm with a teacher for each directory of --teacher that is of some sources of prompts.

    Raises:
      SettingsError: the algorithm cannot have several.
    """
    sourced = sourced_paths(settings, TEACHER)
    if not sourced or TEACHER not in role_names(algorithm):
        return algorithm
    if algorithm.divergence is not None:
        raise settings.refusal(
            "{teacher}: a divergence over the whole vocabulary is from one model; use an algorithm that reads the "
            "teachers' log-probabilities, as mopd and distillation do, or give one directory without a source"
        )
    if run_kind(algorithm, settings.examples.data) != "rl":
        raise settings.refusal("{teacher}: texts of --data have no source; give one directory")
    roles = {}
    for path in dict.fromkeys(sourced.values()):
        sources = tuple(source for source, own in sourced.items() if own == path)
        name = f"{TEACHER}_{re.sub(r'[^0-9A-Za-z]', '_', sources[0])}"
        roles[name if name not in roles else f"{name}_{len(roles)}"] = dataclasses.replace(
            ROLES[TEACHER],
            text=f"the teacher of {', '.join(sources)}",
            writes={},
            like=TEACHER,
            sources=sources,
            model=path,
        )
    return dataclasses.replace(algorithm, roles={**algorithm.roles, **roles})


def teachers_of(models: Mapping[str, Model], algorithm: Algorithm) -> list[Model]:
    """The models of a run's teachers."""
    kinds = algorithm.role_kinds
    return [model for name, model in models.items() if (kinds[name].like or name) == TEACHER]


def with_policies(algorithm: Algorithm, names: Sequence[str]) -> Algorithm:
    """The algorithm with further policies; each has the policy's loss and its initial weights.

    Raises:
      ValueError: a name is that of another role, or the algorithm has no loss of a policy alone.
    """
    if not names:
        return algorithm
    if POLICY not in algorithm.losses or algorithm.divergence is not None:
        raise ValueError(f"{POLICY}:{names[0]}: the algorithm has no loss of a policy alone, as grpo has")
    # What it writes are the policy's fields, on the rows of its own agents.
    kind = dataclasses.replace(
        ROLES[POLICY], writes={}, like=POLICY, generates=False, metric="", messages=RoleMessages()
    )
    kinds = {name: dataclasses.replace(kind, text=f"the policy {name!r}") for name in names}
    losses = {**algorithm.losses, **dict.fromkeys(names, algorithm.losses[POLICY])}
    extended = dataclasses.replace(algorithm, roles={**algorithm.roles, **kinds}, losses=losses)
    extended.role_kinds  # noqa: B018  (refuses names of other roles)
    return extended
