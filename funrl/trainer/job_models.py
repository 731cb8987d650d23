"""Models of a run: which each role has, read from their directories without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from funrl.algos.core import Algorithm
from funrl.data.tokenizer import load_tokenizer
from funrl.models import Model, decoder_model, hf, with_value_head
from funrl.models.config import architecture
from funrl.models.lora import targets_of, with_lora
from funrl.models.model import Lora
from funrl.models.resize import with_vocabulary
from funrl.tasks import arithmetic
from funrl.trainer.declaration import SettingsError, blaming
from funrl.trainer.job_data import Given, Task, Texts
from funrl.trainer.own_texts import reads_tokens
from funrl.trainer.roles import READERS, VALUES, role_names
from funrl.trainer.scorers import SCORERS, model_path
from funrl.trainer.settings import Settings

TORCH_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


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
            found[name] = str(hf.find_directory(path)) + getattr(settings, name).removeprefix(path)  # DIR@0.5
    return dataclasses.replace(settings, **found)


def first_model(settings: Settings, given: Given) -> tuple[Model, Any]:
    """The model that a run begins with, and its tokenizer."""
    if given.model is not None:
        return given.model, given.tokenizer or arithmetic.tokenizer()
    if settings.model is None:
        head = arithmetic.VLLM_HEAD if settings.engine in ("vllm", "vllm_server") else arithmetic.HEAD
        return decoder_model(arithmetic.model_config(head, settings.task)), arithmetic.tokenizer()
    with blaming("model"):
        model, tokenizer = hf.check_directory(settings.model, settings.model_code), load_tokenizer(settings.model)
    if settings.resize_vocab:
        with blaming("resize_vocab"):
            model = with_vocabulary(model, 1 + max(tokenizer.get_vocab().values(), default=0))
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
    names += tuple(name for name in READERS if getattr(settings, name) is not None and name not in names)
    for name in names:
        path = model_path(settings, name) if name in ("teacher", *READERS) and name not in algorithm.losses else None
        if path is not None:
            with blaming(name):
                models[name] = read(path, settings.model_code)
            directories[name] = path
            if (models[name].value is None) == (name in VALUES):
                lacking = f"value head, which `funrl {name}` trains" if name in VALUES else "unembedding"
                raise SettingsError(f"--{name}={path}: this model has no {lacking}")
            own = name in READERS  # which may have another tokenizer
            if tokenizer is not None and not own and load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
                raise SettingsError(f"--{name}={path}: its tokenizer is not the policy's; tokens would not match")
        else:
            if name not in VALUES and model.unembed is None:
                raise SettingsError(f"--model={settings.model}: it has a value head; a {name} gives probabilities")
            models[name] = with_head_of(name, model) if name in VALUES and model.value is None else model
            if lora is not None and name in algorithm.losses:
                models[name] = with_lora(models[name], lora)
    if algorithm.divergence is not None and "teacher" in models:
        sizes = [models[name].config.vocab for name in ("teacher", "policy")]
        if sizes[0] != sizes[1]:
            raise SettingsError(
                f"--teacher={settings.teacher}: its vocabulary has {sizes[0]} rows and the policy's {sizes[1]}; a "
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
    rank = settings.lora_rank
    if rank is None:
        return None
    if model.config.module:
        raise SettingsError(
            f"--lora_rank={rank}: the model is {architecture(model.config)}, transformers' own code, which takes no "
            "adapters here; leave it out"
        )
    with blaming(f"lora_targets={settings.lora_targets}"):
        return Lora(rank, settings.lora_alpha or float(rank), targets_of(settings.lora_targets, model))


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
