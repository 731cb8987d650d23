"""Preparation of a run: every flag and file is checked, and the small files are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from funrl.algos.core import Algorithm
from funrl.algos.reading import reads
from funrl.compiled_kernels.nf4 import nf4_problem
from funrl.data.conversations import ChatTemplate
from funrl.data.pictures import picture_form, with_most_pixels, with_picture_form
from funrl.data.processors.form import PictureForm
from funrl.environments.agents import parse_agents, with_environment
from funrl.environments.answer_rewards import check_readings
from funrl.mesh.launch import check_devices, device_type, gpu_problem
from funrl.mesh.mesh import AXES, Mesh
from funrl.models import Model, ModelConfig, with_fields
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.generation_config import GENERATION, sampling_defaults
from funrl.models.huggingface.peft_files import read_adapter
from funrl.models.weight_dtypes import TORCH_DTYPES
from funrl.role_kinds import ROLES
from funrl.rollout.native.backends import bytes_of_page
from funrl.rollout.native.cache_sizes import page_tokens
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.compatibility import (
    check_algorithm,
    check_code,
    check_context,
    check_follow,
    check_mask_replay,
    check_meshes,
    check_objectives,
    check_owned_values,
    check_readers,
    check_round_trip,
    check_sources,
    check_teacher_context,
    check_teacher_tokens,
    check_token_ids,
    filters_rows,
)
from funrl.trainer.jobs.datasets import fields_of_texts, fit_prompts, task_of_prompts, texts_of, with_chat_template
from funrl.trainer.jobs.demonstrations import check_demonstrations, learns_from_demonstrations
from funrl.trainer.jobs.engines import check_engine, has_control_rows
from funrl.trainer.jobs.job import Job, JobDevices, JobModels, RLJob, Task, TextJob, Texts
from funrl.trainer.jobs.models import (
    agent_models,
    first_model,
    located,
    models_of,
    reads_policys,
    teachers_of,
    with_policies,
    with_teachers,
)
from funrl.trainer.jobs.numerics import check_numerics
from funrl.trainer.jobs.sharding import check_driven, check_layouts, generate_sizes, rank_memory, sizes_on_trainers
from funrl.trainer.lowered.backend import check_backend
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.declaration import SettingsError, blaming, refusing, run_kind
from funrl.trainer.settings.scorers import JUDGE, Given, model_path, new_tokens_of, own_environment
from funrl.trainer.settings.settings import Settings, check_needs, flag_value, for_kind
from funrl.trainer.sources.judging import judge_job
from funrl.trainer.steps.optimizer import check_freeze
from funrl.trainer.steps.parts import JudgeJob
from funrl.trainer.steps.roles import main_role_of, reads_scores

EVAL_DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
IDLE_IF_GREEDY = ("top_k", "top_p", "min_p")


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
        raise SettingsError(f"env={given.environment_name} does nothing: the recipe learns from texts; leave it out")
    check_settings(settings, given=given)
    settings = located(settings)
    sizes, device = devices_of(settings)
    check_backend(settings, device)
    if settings.adapters.nf4 and (problem := nf4_problem(device)) is not None:
        raise settings.refusal("{base_format}: {problem}; leave it out", problem=problem)
    model, tokenizer = first_model(settings, given)
    tokenizer = with_chat_template(tokenizer, settings)
    tokenizer = with_picture_form(tokenizer, form_of_pictures(settings, model.config))
    model = with_turn_ends(model, tokenizer)
    algorithm = with_teachers(algorithm, settings)
    check_algorithm(algorithm, settings, given=given)
    with blaming(f"agents={settings.environments.agents}"):
        algorithm = with_policies(algorithm, parse_agents(settings.environments.agents).policies)
    models = models_of(algorithm, settings, model, tokenizer)
    with blaming(f"model={settings.models.model}"):
        hf.check_savable(models.models[main_role_of(models.models, algorithm)])
    devices = lay_out(settings, algorithm, models, sizes, device)
    check_driven(settings, models.models)
    check_mask_replay(settings, models.models, algorithm)
    check_teacher_context(settings, models.models, algorithm, given)
    check_teacher_tokens(settings, models, algorithm, given)
    check_follow(settings, algorithm, models.models, models.directories)
    check_freeze(settings, {name: x for name, x in models.models.items() if name in algorithm.losses})
    if kind == "rl":
        task = task_of_prompts(settings, tokenizer, given, reads_scores(algorithm))
        if learns_from_demonstrations(algorithm):
            check_demonstrations(task.prompts, task.demonstration_field, settings.sampling.new_tokens_per_step)
        if teachers := teachers_of(models.models, algorithm):
            positions = min(model.config.max_positions for model in teachers)
            check_context(settings, task.prompts, new_tokens(settings, task), positions)
        check_objectives(algorithm, task.prompts)
        check_sources(algorithm, models, task.prompts)
        check_round_trip(models, task.prompts)
        job = checked_job(settings, algorithm, models, devices, task)
    else:
        task = texts_of_algorithm(algorithm, settings, tokenizer, model, given)
        check_tokens(settings, algorithm, models, task)
        job = text_job(settings, algorithm, models, devices, task)
    return dataclasses.replace(job, warmstart_steps=warmstart_steps(settings, task, given))


def lay_out(
    settings: Settings, algorithm: Algorithm, models: JobModels, sizes: dict[str, int], device: str
) -> JobDevices:
    """The meshes of a run, after checking that its models can be laid out on them and do what the flags ask.

    Args:
      sizes: of the mesh to train on.
      device: "cpu" or "cuda".

    Raises:
      SettingsError, MeshError: they cannot.
    """
    generates = ROLES.generating(models.models) if run_kind(algorithm, settings.examples.data) == "rl" else None
    check_code(settings, models.models, generates)
    check_owned_values(settings, models.models, algorithm)
    generating = check_meshes(settings, models.models, sizes, rank_memory(device, Mesh(sizes).world))
    return JobDevices(sizes=sizes, generate_sizes=generating, device=device)


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


def check_tokens(settings: Settings, algorithm: Algorithm, models: JobModels, task: Task | Texts) -> dict[str, Model]:
    """Models of the roles that read the policy's tokens, by role, after a check of token ids and of --adapter.

    Raises:
      SettingsError: a token is not in a vocabulary, or the adapters do not fit.
    """
    kinds = algorithm.role_kinds
    readers = {
        name: model
        for name, model in models.models.items()
        if name not in models.tokenizers
        and reads_policys(kinds[name], task, models.tokenizer, models.directories.get(name))
    }
    smallest = min(readers, key=lambda name: readers[name].config.vocab)
    check_token_ids(task, models.tokenizer, readers[smallest], models.directories.get(smallest))
    if settings.adapters.adapter is not None:
        with blaming("adapter"):
            read_adapter(settings.adapters.adapter, models.models[main_role_of(models.models, algorithm)])
    return readers


def checked_job(settings: Settings, algorithm: Algorithm, models: JobModels, devices: JobDevices, task: Task) -> RLJob:
    """A job to learn from completions, after checking that its prompts fit the models and the engine.

    Raises:
      SettingsError: they do not.
    """
    readers = check_tokens(settings, algorithm, models, task)
    tokens = new_tokens(settings, task)
    part = settings.sampling.new_tokens_per_step
    if part is not None and part >= (most := row_new_tokens(settings, task, tokens)):
        raise settings.refusal(
            f"{{new_tokens_per_step}}: a row has {most} new tokens at most, so none would continue in a later step; "
            "give fewer, or leave it out"
        )
    if settings.asynchrony.staleness:
        _check_weighed(settings, algorithm, task)
    if not task.embedded:
        check_readings(task.rewards, models.tokenizer)
    task = fit_prompts(task, settings, tokens, readers, models.tokenizer)
    check_readers(models.directories, task, algorithm, settings)
    job = rl_job(settings, algorithm, models, devices, task)
    mesh = Mesh(devices.generate_sizes, device=torch.device(devices.device))
    if settings.engines.abilities.own_steps:
        check_cache(settings, task, tokens, models.model, mesh, rank_memory(devices.device, mesh.world))
    check_engine(settings, models.model, mesh, job.sampling, job.eval_sampling)
    others = agent_models(settings, job.agents, models.model, models.tokenizer)
    job = dataclasses.replace(job, judge=judge_of(settings, task, devices), agent_models=others)
    check_numerics(job, Mesh(devices.sizes, device=mesh.device), mesh)
    return job


def rl_job(settings: Settings, algorithm: Algorithm, models: JobModels, devices: JobDevices, task: Task) -> RLJob:
    """A job to learn from completions, without its judge and the models of other agents."""
    with blaming(f"agents={settings.environments.agents}"):
        agents = parse_agents(settings.environments.agents)
        agents = agents if task.environment is None else with_environment(agents, task.environment)
    if not set(agents.policies) <= set(algorithm.losses):  # nothing learns
        agents = agents.with_one_policy()
    sampling, eval_sampling = samplings(settings, new_tokens(settings, task), models.stop, models.model.config)
    return RLJob(
        **vars(models),
        **vars(devices),
        settings=settings,
        algorithm=algorithm,
        start=settings.models.model,
        task=task,
        agents=agents,
        sampling=sampling,
        eval_sampling=eval_sampling,
    )


def text_job(settings: Settings, algorithm: Algorithm, models: JobModels, devices: JobDevices, task: Texts) -> TextJob:
    """A job to learn from given texts."""
    start = settings.models.model
    return TextJob(**vars(models), **vars(devices), settings=settings, algorithm=algorithm, start=start, task=task)


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
    if settings.examples.difficulty is None and task.curriculum is None:
        return
    weights = "a curriculum" if settings.examples.difficulty is None else "{difficulty}"
    problem = ""
    if settings.asynchrony.window > 1:
        problem = "{window}: the batches that it joins are chosen apart; leave it out"
    elif filters_rows(algorithm, settings) and settings.sampling.max_refills > 1:
        problem = (
            "{max_refills}: what takes the place of a prompt that a filter drops is not chosen by weights; give "
            "--max_refills=1"
        )
    if problem:
        raise settings.refusal(f"{{staleness}} with {weights} and {problem}")


def judge_of(settings: Settings, task: Task, devices: JobDevices) -> JudgeJob | None:
    """The judge of a flag, if one is given. Raises: SettingsError."""
    directory = model_path(settings, "judge")
    if directory is None:
        return None
    placement = settings.devices.placement
    pool = settings.devices.scoring.get(JUDGE)

    def sizes_of(model: Model) -> dict[str, int]:
        if pool is not None:
            check_layouts({JUDGE: model}, settings, pool.sizes, pool.sizes)
            return pool.sizes
        choose = generate_sizes if placement is None else sizes_on_trainers
        return choose(settings, devices.sizes, model, rank_memory(devices.device, Mesh(devices.sizes).world))

    prompts = (*task.prompts, *task.heldout)
    with blaming("judge"):
        return judge_job(directory, settings.models.model_code, settings.judging, sizes_of, prompts)


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


def new_tokens(settings: Settings, task: Task | None = None) -> int:
    """Tokens that a completion may have."""
    if task is None:
        return new_tokens_of(settings)
    return settings.sampling.max_new_tokens or task.max_new_tokens


def row_new_tokens(settings: Settings, task: Task, new_tokens: int) -> int:
    """Tokens that the policy may sample for a row: a completion, or all turns of a trajectory.

    Args:
      new_tokens: of a completion.
    """
    if task.environment is None:
        return new_tokens
    most = settings.environments.episode_turns * new_tokens
    return min(most, settings.environments.episode_tokens or most)


def samplings(settings: Settings, count: int, stop: tuple[int, ...], config: ModelConfig) -> tuple[Sampling, Sampling]:
    """Sampling of the completions to train on, and of those to evaluate.

    Args:
      count: tokens that a completion may have.
      stop: tokens that end a completion.
      config: of the model that the run begins with.

    Raises:
      SettingsError: the model's generation_config.json has a number out of its range, or a flag does nothing.
    """
    shared: dict[str, Any] = {"max_new_tokens": count, "stop": stop}
    train_values: dict[str, Any] = {name: flag_value(settings, name) for name in EVAL_DEFAULTS}
    train = Sampling(**train_values, **shared, samples=settings.sampling.samples_per_prompt)
    given: dict[str, Any] = {name: flag_value(settings, f"eval_{name}") for name in EVAL_DEFAULTS}
    values = EVAL_DEFAULTS | sampling_defaults(config) | {name: x for name, x in given.items() if x is not None}
    greedy = values["temperature"] == 0
    check_needs(settings, sampled_evaluation=not greedy)
    with refusing(f"{GENERATION} of the model: "):
        numbers: dict[str, Any] = values | {"temperature": values["temperature"] or 1.0} | shared
        return train, Sampling(**numbers, greedy=greedy, samples=settings.evaluation.eval_samples)


def check_cache(settings: Settings, task: Task, new_tokens: int, model: Model, mesh: Mesh, memory: float) -> None:
    """Check that the cache holds the longest prompt with its completion, and the memory holds the cache.

    Args:
      mesh: the generate mesh.
      memory: bytes that one rank may use.

    Raises:
      SettingsError: --kv_cache_gb is less than the keys and values of that row, or more than the memory.
    """
    if settings.engines.kv_cache_gb is None:
        return
    if settings.engines.kv_cache_gb * 1e9 > memory:
        raise settings.refusal(f"{{kv_cache_gb}}: a rank of this machine has {memory / 1e9:.3g} GB in all; give less")
    longest = max(len(e.tokens) for e in (*task.prompts, *task.heldout))
    tokens = min(longest + row_new_tokens(settings, task, new_tokens), model.config.max_positions)
    dtype = TORCH_DTYPES[settings.models.dtype]
    pages = -(-tokens // page_tokens(mesh.device.type))
    packed = settings.models.compile != "on" and not settings.engines.float8
    page_bytes = bytes_of_page(model, mesh, dtype, packed=packed)
    rows = 1 + (has_control_rows(settings) and not model.cell_bytes(mesh, dtype))
    needed = (rows * pages * page_bytes + model.cell_bytes(mesh, dtype)) / 1e9
    if needed > settings.engines.kv_cache_gb:
        what = "completion" if task.environment is None else "episode"
        flag = "--max_new_tokens" if task.environment is None else "--episode_tokens"
        raise settings.refusal(
            f"{{kv_cache_gb}}: the longest prompt and {what} may have {tokens} tokens, whose keys and values take "
            f"{needed:.2g} GB on a rank{', for it and a control row' * (rows - 1)}; give it more, or a smaller {flag}"
        )


def warmstart_steps(settings: Settings, task: Task | Texts, given: Given) -> int:
    """Supervised steps before the first step; by default none but for the embedded task from scratch."""
    examples = settings.examples
    steps = settings.run.warmstart_steps
    check_needs(settings, demonstrations=not steps or isinstance(task, Texts) or task.embedded)
    if steps is not None:
        return steps
    given_data = (settings.models.model, examples.data, examples.prompts, given.records)
    scratch = all(x is None for x in (*given_data, own_environment(settings, given)))
    return embedded_task(examples.task).warmstart_steps if scratch else 0


def inherited(job: RLJob) -> dict[str, float]:
    """Numbers that evaluation takes from the model's generation_config.json, where no flag says otherwise."""
    defaults = sampling_defaults(job.model.config)
    idle = IDLE_IF_GREEDY if job.eval_sampling.greedy else ()
    return {
        name: value
        for name, value in defaults.items()
        if value != EVAL_DEFAULTS[name] and flag_value(job.settings, f"eval_{name}") is None and name not in idle
    }
