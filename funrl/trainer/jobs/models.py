"""Models of a run: which each role has, read from their directories without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from funrl.algos.core import Algorithm
from funrl.data.tokenizer import load_tokenizer
from funrl.models import Model, decoder_model, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.peft_files import targets_of
from funrl.models.huggingface.resize import with_vocabulary
from funrl.models.lora import full_rank, with_lora
from funrl.models.model import Lora
from funrl.tasks.embedded import TASKS
from funrl.trainer.jobs.datasets import Given, Task, Texts
from funrl.trainer.settings.declaration import SettingsError, blaming
from funrl.trainer.settings.scorers import SCORERS, model_path
from funrl.trainer.settings.settings import Settings, flag_value, with_flags
from funrl.trainer.sources.own_texts import reads_tokens
from funrl.trainer.steps.roles import READERS, VALUES, role_names

VLLM_HEAD = 32  # smallest size of a head that vLLM's attention takes on a CPU


class Models(NamedTuple):
    """Models of a job.

    Attributes:
      first, tokenizer: that the run begins with.
      models, directories: as in `Job`.
    """

    first: Model
    tokenizer: Any
    models: dict[str, Model]
    directories: dict[str, str]


def located(settings: Settings) -> Settings:
    """The settings with directories instead of names of models in the local Hugging Face cache."""
    found = {}
    for name in ("model", "teacher", *SCORERS):
        path = model_path(settings, name)
        if path is not None:
            found[name] = str(hf.find_directory(path)) + flag_value(settings, name).removeprefix(path)  # DIR@0.5
    return with_flags(settings, **found)


def first_model(settings: Settings, given: Given) -> tuple[Model, Any]:
    """The model that a run begins with, and its tokenizer."""
    embedded = TASKS[settings.examples.task]
    if given.model is not None:
        return given.model, given.tokenizer or embedded.tokenizer()
    if settings.models.model is None:
        head = VLLM_HEAD if settings.engines.engine in ("vllm", "vllm_server") else 1
        return decoder_model(embedded.model_config(head)), embedded.tokenizer()
    with blaming("model"):
        model, tokenizer = (
            hf.check_directory(settings.models.model, settings.models.model_code),
            load_tokenizer(settings.models.model),
        )
    if settings.models.resize_vocab:
        rows = 1 + max(tokenizer.get_vocab().values(), default=0)
        if rows <= model.config.vocab:
            raise SettingsError(
                f"--resize_vocab does nothing: the model has {model.config.vocab} token ids and its tokenizer {rows}; "
                "leave it out"
            )
        with blaming("resize_vocab"):
            model = with_vocabulary(model, rows)
    return model, tokenizer


def models_of(
    algorithm: Algorithm,
    settings: Settings,
    model: Model,
    tokenizer: Any,
    read: Callable[[str, str], Model] = hf.check_directory,
) -> tuple[dict[str, Model], dict[str, str]]:
    """The model of every role of a run, and the directories of those that do not begin as `model`.

    Args:
      tokenizer: of `model`; None: other models' tokenizers are not looked at.
      read: (directory, --model_code) -> model.
    """
    models, directories, lora = {}, {}, lora_of(settings, model)
    names = role_names(algorithm)
    names += tuple(name for name in READERS if flag_value(settings, name) is not None and name not in names)
    for name in names:
        path = model_path(settings, name) if name in ("teacher", *READERS) and name not in algorithm.losses else None
        if path is not None:
            with blaming(name):
                models[name] = read(path, settings.models.model_code)
            directories[name] = path
            if (models[name].value is None) == (name in VALUES):
                lacking = f"value head, which `funrl {name}` trains" if name in VALUES else "unembedding"
                raise SettingsError(f"--{name}={path}: this model has no {lacking}")
            own = name in READERS  # which may have another tokenizer
            if tokenizer is not None and not own and load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
                raise SettingsError(f"--{name}={path}: its tokenizer is not the policy's; tokens would not match")
        else:
            if name not in VALUES and model.unembed is None:
                raise SettingsError(
                    f"--model={settings.models.model}: it has a value head; a {name} gives probabilities"
                )
            models[name] = with_head_of(name, model) if name in VALUES and model.value is None else model
            if lora is not None and name in algorithm.losses:
                models[name] = with_lora(models[name], lora)
    if algorithm.divergence is not None and "teacher" in models:
        sizes = [models[name].config.vocab for name in ("teacher", "policy")]
        if sizes[0] != sizes[1]:
            raise SettingsError(
                f"--teacher={settings.models.teacher}: its vocabulary has {sizes[0]} rows and "
                f"the policy's {sizes[1]}; a "
                "divergence over the whole vocabulary needs as many"
            )
    return models, directories


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
        code = f" with --model_code={settings.models.model_code}" if settings.models.model_code == "hf" else ""
        raise SettingsError(
            f"--lora_rank={rank}{code}: the model is {model.abilities.code}, transformers' own code, which takes "
            "no adapters here; leave it out"
        )
    with blaming(f"lora_targets={settings.adapters.lora_targets}"):
        targets = targets_of(settings.adapters.lora_targets, model)
    if rank > (full := full_rank(model, targets)):
        raise SettingsError(
            f"--lora_rank={rank}: no matrix that has adapters is of a rank above {full}; give {full} or less"
        )
    return Lora(rank, settings.adapters.lora_alpha or float(rank), targets)


def with_head_of(name: str, model: Model) -> Model:
    """A model with the value head of a role: that of a token classifier where steps are scored, if there is such."""
    if name == "process_reward_model" and hf.has_token_classifier(model.config):
        return with_value_head(model, labels=2, bias=True)
    return with_value_head(model)


def reads_policys(name: str, task: Task | Texts, tokenizer: Any, directories: Mapping[str, str]) -> bool:
    """True if a role reads the policy's tokens, and not texts in tokens of its own."""
    if name not in READERS or name not in directories or not isinstance(task, Task):
        return True
    own = load_tokenizer(directories[name])
    return name == "reward_model" and reads_tokens(own, tokenizer, task.prompts)
