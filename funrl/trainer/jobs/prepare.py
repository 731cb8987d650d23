"""Preparation of a run: every flag and file is checked, and the small files are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funrl.algos.core import Algorithm
from funrl.algos.reading import reads
from funrl.data.conversations import ChatTemplate
from funrl.data.pictures import picture_form, with_most_pixels, with_picture_form
from funrl.data.processors.form import PictureForm
from funrl.environments.agents import AgentMap, parse_agents, with_environment
from funrl.environments.answer_rewards import check_readings
from funrl.environments.environment import answer_delay
from funrl.mesh.launch import check_devices, device_type, gpu_problem
from funrl.mesh.mesh import AXES, Mesh
from funrl.models import Model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.generation_config import sampling_defaults
from funrl.models.huggingface.peft_files import read_adapter
from funrl.models.model import ModelConfig
from funrl.models.weight_dtypes import TORCH_DTYPES
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.agents import with_policies
from funrl.trainer.jobs.compatibility import (
    check_algorithm,
    check_code,
    check_engine,
    check_meshes,
    check_owned_values,
    check_readers,
    check_token_ids,
)
from funrl.trainer.jobs.datasets import fields_of_texts, fit_prompts, task_of_prompts, texts_of
from funrl.trainer.jobs.demonstrations import check_demonstrations, learns_from_demonstrations
from funrl.trainer.jobs.job import Job, RLJob, Task, TextJob, Texts
from funrl.trainer.jobs.learning_rates import learning_rates
from funrl.trainer.jobs.models import Models, agent_models, first_model, located, lora_of, models_of, reads_policys
from funrl.trainer.jobs.prompts import with_chat_template
from funrl.trainer.jobs.provenance import Given
from funrl.trainer.jobs.sampling import EVAL_DEFAULTS, IDLE_IF_GREEDY, check_budget, check_cache, new_tokens, samplings
from funrl.trainer.jobs.sharding import check_driven, check_layouts, generate_sizes, rank_memory, sizes_on_trainers
from funrl.trainer.lowered.backend import check_backend
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.declaration import SettingsError, blaming, run_kind
from funrl.trainer.settings.scorers import JUDGE, model_path, own_environment
from funrl.trainer.settings.settings import Settings, flag_value, for_kind
from funrl.trainer.sources.judging import JudgeJob, judge_job
from funrl.trainer.steps.optimizer import check_freeze
from funrl.trainer.steps.roles import main_role_of, reads_scores


class Devices(NamedTuple):
    """Devices of a job.

    Attributes:
      sizes, generating: of the meshes to train and to generate on.
      device: "cpu" or "cuda".
    """

    sizes: dict[str, int]
    generating: dict[str, int]
    device: str

    @property
    def memory(self) -> float:
        """Bytes that one rank may use."""
        return rank_memory(self.device, Mesh(self.sizes).world)


def prepare(settings: Settings, compose: Callable[[], Algorithm], given: Given | None = None) -> Job:
    """Check every flag and file and read the small ones.

    Args:
      settings: the flags.
      compose: makes the algorithm.
      given: what is given in Python instead of by flags.

    Raises:
      ValueError: the first thing that cannot work, named, with its value and the way out.
    """
    algorithm = compose()
    kind = run_kind(algorithm, settings.examples.data)
    settings = for_kind(settings, kind)
    given = given or Given()
    if kind != "rl" and given.environment is not None:
        raise SettingsError(f"env={given.objects.environment} does nothing: the recipe learns from texts; leave it out")
    check_settings(settings, given=given.objects)
    settings = located(settings)
    sizes, device = devices_of(settings)
    check_backend(settings, device)
    model, tokenizer = first_model(settings, given)
    tokenizer = with_chat_template(tokenizer, settings)
    tokenizer = with_picture_form(tokenizer, form_of_pictures(settings, model.config))
    model = with_turn_ends(model, tokenizer)
    check_algorithm(algorithm, settings, given=given.objects)
    with blaming(f"agents={settings.environments.agents}"):
        algorithm = with_policies(algorithm, parse_agents(settings.environments.agents).policies)
    models, directories = models_of(algorithm, settings, model, tokenizer)
    main_role = main_role_of(models, algorithm)
    with blaming(f"model={settings.models.model}"):
        hf.check_savable(models[main_role])
    check_code(settings, models, main_role if kind == "rl" else None)
    check_driven(settings, models)
    check_owned_values(settings, models, algorithm)
    check_freeze(settings, {name: x for name, x in models.items() if name in algorithm.losses})
    generating = check_meshes(settings, models, sizes, rank_memory(device, Mesh(sizes).world))
    roles = Models(model, tokenizer, models, directories)
    devices = Devices(sizes, generating, device)
    if kind == "rl":
        task = task_of_prompts(settings, tokenizer, given, reads_scores(algorithm))
        if not task.embedded:
            check_readings(task.rewards, tokenizer)
        if learns_from_demonstrations(algorithm):
            check_demonstrations(task.prompts, task.demonstration_field, settings.sampling.new_tokens_per_step)
        steps = warmstart_steps(settings, task, given)
        return rl_job(settings, algorithm, roles, devices=devices, task=task, warmstart_steps=steps)
    texts = texts_of_algorithm(algorithm, settings, tokenizer, model, given)
    steps = warmstart_steps(settings, texts, given)
    return text_job(settings, algorithm, roles, devices=devices, texts=texts, warmstart_steps=steps)


def with_turn_ends(model: Model, tokenizer: Any) -> Model:
    """The model with the marks that end a turn in its chat template, as GLM-4.5's do, among its tokens that end a text.

    What is saved names them too. Templates that end turns themselves, by the end-of-text token or another one that the
    model's files name, change nothing.
    """
    if tokenizer.chat_template is None:
        return model
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in ChatTemplate(tokenizer).next_marks().values()]
    eos = model.config.special_tokens.eos
    further = [token for token in ids if token not in eos and token < model.config.vocab]
    if not further:
        return model
    return dataclasses.replace(model, config=with_fields(model.config, eos=(*eos, *further)))


def form_of_pictures(settings: Settings, config: ModelConfig) -> PictureForm | None:
    """The form in which a model takes pictures, with the bound of --max_pixels; None: it sees none."""
    with blaming(f"model={settings.models.model}"):
        form = picture_form(config, settings.models.model)
    most = settings.examples.max_pixels
    if form is None or most is None:
        return form
    with blaming(f"max_pixels={most}"):
        return with_most_pixels(form, most)


def rl_job(
    settings: Settings, algorithm: Algorithm, roles: Models, *, devices: Devices, task: Task, warmstart_steps: int = 0
) -> RLJob:
    """A job to learn from completions, after checking that the prompts fit the models and the engine.

    Raises:
      SettingsError: they do not.
    """
    fields = _common_fields(settings, algorithm, roles, devices=devices, task=task)
    model = roles.first
    sampling, eval_sampling = samplings(settings, new_tokens(settings, task), fields["stop"], model.config)
    check_budget(settings, task, sampling.max_new_tokens)
    if settings.asynchrony.staleness:
        _check_weighed(settings, algorithm, task)
    if settings.asynchrony.clock == "tokens":
        with blaming("clock=tokens"):
            answer_delay(task.environment)
    agents = agents_of(settings, task)
    if not set(agents.policies) <= set(algorithm.losses):  # nothing learns
        agents = agents.with_one_policy()
    reading = readers_of(algorithm, roles, task)
    task = fit_prompts(task, settings, sampling.max_new_tokens, reading, roles.tokenizer)
    check_readers(roles.directories, task, algorithm, settings)
    mesh = Mesh(devices.generating, device=torch.device(devices.device))
    if settings.engines.engine == "native":
        check_cache(settings, task, sampling.max_new_tokens, model, mesh, rank_memory(devices.device, mesh.world))
    else:
        check_engine(settings, model, mesh, sampling, eval_sampling)
    return RLJob(
        **fields,
        task=task,
        sampling=sampling,
        eval_sampling=eval_sampling,
        judge=judge_of(settings, task, devices),
        agents=agents,
        agent_models=agent_models(settings, agents, model, roles.tokenizer),
        warmstart_steps=warmstart_steps,
    )


def agents_of(settings: Settings, task: Task) -> AgentMap:
    """The models of the agents of a task's environment. Raises: SettingsError, the flag does not fit it."""
    with blaming(f"agents={settings.environments.agents}"):
        agents = parse_agents(settings.environments.agents)
        return agents if task.environment is None else with_environment(agents, task.environment)


def text_job(
    settings: Settings, algorithm: Algorithm, roles: Models, *, devices: Devices, texts: Texts, warmstart_steps: int = 0
) -> TextJob:
    """A job to learn from given texts, after checking that they fit the models.

    Raises:
      SettingsError: they do not.
    """
    fields = _common_fields(settings, algorithm, roles, devices=devices, task=texts)
    return TextJob(**fields, task=texts, warmstart_steps=warmstart_steps)


def _common_fields(
    settings: Settings, algorithm: Algorithm, roles: Models, *, devices: Devices, task: Task | Texts
) -> dict[str, Any]:
    """Fields of `BaseJob` but for the task and the warm start, after a check of the token ids."""
    model, tokenizer, models, directories = roles
    reading = readers_of(algorithm, roles, task)
    smallest = min(reading, key=lambda name: reading[name].config.vocab)
    check_token_ids(task, tokenizer, models[smallest], directories.get(smallest))
    stop = tuple(sorted({*model.config.special_tokens.eos, *({tokenizer.eos_token_id} - {None})}))
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = stop[0] if stop else 0
    lora = lora_of(settings, model)
    if settings.adapters.adapter is not None:
        with blaming("adapter"):
            read_adapter(settings.adapters.adapter, models[main_role_of(models, algorithm)])
    return {
        "settings": settings,
        "sizes": devices.sizes,
        "generate_sizes": devices.generating,
        "device": devices.device,
        "dtype": TORCH_DTYPES[settings.models.dtype],
        "model": model,
        "models": models,
        "directories": directories,
        "rates": learning_rates(settings, algorithm, model, lora is not None),
        "tokenizer": tokenizer,
        "algorithm": algorithm,
        "stop": stop,
        "pad": pad,
        "start": settings.models.model,
        "lora": lora,
    }


def readers_of(algorithm: Algorithm, roles: Models, task: Task | Texts) -> dict[str, Model]:
    """Models of the roles that read the policy's tokens, by role."""
    _, tokenizer, models, directories = roles
    kinds = algorithm.role_kinds
    return {
        name: model
        for name, model in models.items()
        if reads_policys(kinds[name], task, tokenizer, directories.get(name))
    }


def devices_of(settings: Settings) -> tuple[dict[str, int], str]:
    """Sizes of the mesh, and "cpu" or "cuda". Raises: SettingsError, MeshError, the machine does not have them."""
    sizes = settings.devices.train.chosen
    if settings.models.backend != "torch":  # one process drives all devices
        sizes = dict.fromkeys(AXES, 1)
    device = settings.devices.device or device_type()
    if device == "xla":  # beside the host's tensors; see `torch_xla_device`
        device = "cpu"
    if device == "cuda" and (problem := gpu_problem()) is not None:
        raise SettingsError(f"--device=cuda: {problem}; --device=cpu runs without one")
    placement = settings.devices.placement
    if placement is None:
        check_devices(sizes, device)
    else:
        with blaming(f"place={settings.devices.place}"):
            check_devices(placement.launched, device)
    return sizes, device


def _check_weighed(settings: Settings, algorithm: Algorithm, task: Task) -> None:
    """Refuse weights of prompts that are chosen ahead where other prompts may come between. Raises: SettingsError."""
    given = {
        f"--difficulty={settings.examples.difficulty}": settings.examples.difficulty is not None,
        "a curriculum": task.curriculum is not None,
    }
    weights = next((name for name, there in given.items() if there), None)
    if weights is None:
        return
    filters = algorithm.filter is not None or settings.rewards.on_reward_error == "skip"
    problem = None
    if settings.devices.joined:
        problem = "generators that join: they take the next prompts of the order; give ranks that generate: generate:2"
    elif settings.asynchrony.window > 1:
        problem = f"--window={settings.asynchrony.window}: the batches that it joins are chosen apart; leave it out"
    elif filters and settings.sampling.max_refills > 1:
        problem = (
            f"--max_refills={settings.sampling.max_refills}: what takes the place of a prompt that a filter drops is "
            "not chosen by weights; give --max_refills=1"
        )
    if problem is not None:
        raise SettingsError(f"--staleness={settings.asynchrony.staleness} with {weights} and {problem}")


def judge_of(settings: Settings, task: Task, devices: Devices) -> JudgeJob | None:
    """The judge of a flag, if one is given. Raises: SettingsError."""
    directory = model_path(settings, "judge")
    if directory is None:
        return None
    with blaming("judge"):
        return judge_job(
            directory,
            settings.models.model_code,
            settings.judging,
            lambda model: _judging_sizes(settings, model, devices),
            (*task.prompts, *task.heldout),
        )


def _judging_sizes(settings: Settings, model: Model, devices: Devices) -> dict[str, int]:
    """Sizes of the mesh that the judge writes on: of its own ranks, or over those that train. Raises: MeshError."""
    placement = settings.devices.placement
    if placement is None:
        return generate_sizes(settings, devices.sizes, model, devices.memory)
    pool = placement.scoring.get(JUDGE)
    if pool is None:
        return sizes_on_trainers(settings, devices.sizes, model, devices.memory)
    check_layouts({JUDGE: model}, settings, pool.sizes, pool.sizes)
    return pool.sizes


def texts_of_algorithm(algorithm: Algorithm, settings: Settings, tokenizer: Any, model: Model, given: Given) -> Texts:
    """Texts of the kind that an algorithm learns from, after a check of their fields against what it reads.

    Raises:
      SettingsError: they lack a field, or a batch is too small.
    """
    reads_whole = any(algorithm.role_kinds[name].reads == "completion" for name in algorithm.losses)
    if reads_whole and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # transformers needs one to read rewards of a batch
    texts = texts_of(settings, texts_kind(algorithm), tokenizer, model.config, given)
    check_algorithm(algorithm, settings, fields_of_texts(texts))
    if "mismatched" in reads(algorithm).required and settings.run.batch_prompts < 2:
        raise SettingsError("--batch_prompts=1: KTO compares with completions of other prompts; give 2 or more")
    return texts


def texts_kind(algorithm: Algorithm) -> str:
    """Kind of texts for an algorithm that learns from given ones, as in `funrl.data.supervised`."""
    kinds = {"pair": "preferences", "triple": "triples", "labelled": "ratings", "steps": "steps"}
    return kinds.get(algorithm.example, "demonstrations")


def warmstart_steps(settings: Settings, task: Task | Texts, given: Given) -> int:
    """Supervised steps before the first step; by default none but for the embedded task from scratch."""
    examples = settings.examples
    own = (
        settings.models.model,
        examples.data,
        examples.prompts,
        given.records,
        own_environment(settings, given.objects),
    )
    scratch = all(x is None for x in own)
    steps = settings.run.warmstart_steps
    if steps is None:
        steps = embedded_task(examples.task).warmstart_steps if scratch else 0
    if steps and isinstance(task, Task) and not task.embedded:
        raise SettingsError(f"--warmstart_steps={steps}: only the embedded task has demonstrations; use 0")
    return steps


def inherited(job: RLJob) -> dict[str, float]:
    """Numbers that evaluation takes from the model's generation_config.json, where no flag says otherwise."""
    defaults = sampling_defaults(job.model.config)
    idle = IDLE_IF_GREEDY if job.eval_sampling.greedy else ()
    return {
        name: value
        for name, value in defaults.items()
        if value != EVAL_DEFAULTS[name] and flag_value(job.settings, f"eval_{name}") is None and name not in idle
    }
