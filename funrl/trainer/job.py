"""A run, checked and ready to start: what the flags mean. Nothing here computes or starts a process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from funrl.algos.checking import check
from funrl.algos.core import Algorithm
from funrl.batch import FIELDS, fields_by
from funrl.data.tokenizer import load_tokenizer
from funrl.mesh import mesh as meshes
from funrl.mesh.launch import check_devices, device_type
from funrl.mesh.mesh import Mesh
from funrl.models import Config, Model, decoder_model, hf, with_value_head
from funrl.models.config import ModelError, architecture
from funrl.models.generation_config import GENERATION, sampling_defaults
from funrl.models.lora import targets_of, with_lora
from funrl.models.model import Lora
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm_core import check_vllm
from funrl.tasks import arithmetic
from funrl.trainer.checks import check_settings
from funrl.trainer.declaration import SettingsError, parts, run_kind
from funrl.trainer.job_data import (
    Given,
    Task,
    Texts,
    check_budget,
    check_cache,
    check_prompt_lengths,
    check_token_ids,
    fields_of_texts,
    prompts_of,
    texts_of,
)
from funrl.trainer.roles import VALUES, WRITES, reads_scores, role_names
from funrl.trainer.settings import Settings, for_kind, resolved
from funrl.trainer.sharding import check_layouts, check_roles, generate_sizes, rank_memory

EVAL_DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
IDLE_IF_GREEDY = ("top_k", "top_p", "min_p")
TORCH_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class Job(NamedTuple):
    """Everything that a rank needs to know; the same on every rank.

    Attributes:
      model: the one that the run begins with.
      models: of every role, by name; those that learn with adapters, where `lora` is given.
      directories: of the roles that do not begin as `model`.
      rates: peak learning rates of the roles that learn.
      task: prompts to complete, or texts to learn from.
    """

    settings: Settings
    sizes: dict[str, int]
    generate_sizes: dict[str, int]
    device: str
    dtype: torch.dtype
    model: Model
    models: dict[str, Model]
    directories: dict[str, str]
    rates: dict[str, float]
    tokenizer: Any
    task: Task | Texts
    algorithm: Algorithm
    sampling: Sampling
    eval_sampling: Sampling
    pad: int
    warmstart_steps: int
    lora: Lora | None = None

    @property
    def master(self) -> torch.dtype:
        """The dtype of the weights that an optimizer keeps."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    @property
    def generates(self) -> bool:
        """True if the policy writes the rows that it learns from."""
        return isinstance(self.task, Task)

    @property
    def lead(self) -> str:
        """The role that takes over the first weights, and is saved at the end."""
        return "policy" if "policy" in self.models else next(iter(self.algorithm.losses))


def prepare(settings: Settings, compose: Callable[[], Algorithm], given: Given | None = None) -> Job:
    """Check every flag and file and read the small ones.

    Args:
      settings: the flags.
      compose: makes the algorithm.
      given: what is given in Python instead of by flags.

    Raises:
      ValueError: the first thing that cannot work, named, with its value and the way out.
    """
    if settings.remat != "none":
        importlib.import_module("torch._dynamo")  # checkpointing needs it; ranks that are forked need not import it
    algorithm = compose()
    kind = run_kind(algorithm, settings.data)
    settings = for_kind(settings, kind)
    check_settings(settings)
    settings = located(settings)
    sizes, device = meshes.parse(settings.mesh), settings.device or device_type()
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device=cuda: torch sees no GPU; use --device=cpu")
    check_devices(sizes, device)
    given = given or Given()
    model, tokenizer = first_model(settings, given)
    check_algorithm(algorithm, settings)
    models, directories = models_of(algorithm, settings, model, tokenizer)
    lead = "policy" if "policy" in models else next(iter(algorithm.losses))
    with blaming(f"model={settings.model}"):
        hf.check_savable(models[lead])
    check_code(settings, models, "policy" if kind == "rl" else None)
    generating = check_meshes(settings, models, sizes, rank_memory(device, Mesh(sizes).world))
    task = task_of(algorithm, kind, settings, tokenizer, model, given)
    check_token_ids(task, tokenizer, min((one.config for one in models.values()), key=lambda config: config.vocab))
    if isinstance(task, Texts):
        check_algorithm(algorithm, settings, fields_of_texts(task))
    warmstart = warmstart_steps(settings, task, given)
    stop = tuple(sorted({*model.config.eos, *({tokenizer.eos_token_id} - {None})}))
    sampling, eval_sampling = samplings(settings, new_tokens(settings, task), stop, model.config)
    if isinstance(task, Task):
        check_budget(settings, sampling.max_new_tokens)
        for name, one in models.items():
            check_prompt_lengths(task, sampling.max_new_tokens, one.config, further=int(name == "reward_model"))
        mesh = Mesh(generating, device=torch.device(device))
        if settings.engine == "native":
            check_cache(settings, task, sampling.max_new_tokens, model, mesh, TORCH_DTYPES[settings.dtype])
        else:
            check_engine(settings, model, mesh, sampling, eval_sampling)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stop[0] if stop else 0)
    return Job(
        settings, sizes, generating, device, TORCH_DTYPES[settings.dtype], model, models, directories,
        learning_rates(settings, algorithm), tokenizer, task, algorithm, sampling, eval_sampling, pad, warmstart,
        lora_of(settings, model),
    )  # fmt: skip


def located(settings: Settings) -> Settings:
    """The settings with directories instead of names of models in the local Hugging Face cache."""
    given = {name: getattr(settings, name) for name in ("model", "teacher", "reward_model")}
    found = {name: str(hf.find_directory(model)) for name, model in given.items() if model is not None}
    return dataclasses.replace(settings, **found)


def first_model(settings: Settings, given: Given) -> tuple[Model, Any]:
    """The model that a run begins with, and its tokenizer."""
    if given.model is not None:
        return given.model, given.tokenizer or arithmetic.tokenizer()
    if settings.model is None:
        head = arithmetic.VLLM_HEAD if settings.engine in ("vllm", "vllm_server") else arithmetic.HEAD
        return decoder_model(arithmetic.model_config(head)), arithmetic.tokenizer()
    with blaming("model"):
        return hf.check_directory(settings.model, settings.model_code), load_tokenizer(settings.model)


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
    if settings.reward_model is not None and "reward_model" not in names:
        names = (*names, "reward_model")
    for name in names:
        path = getattr(settings, name) if name in ("teacher", "reward_model") and name not in algorithm.losses else None
        if path is not None:
            with blaming(name):
                models[name] = read(path, settings.model_code)
            directories[name] = path
            if (models[name].value is None) == (name in VALUES):
                lacking = "value head, which `funrl reward_model` trains" if name in VALUES else "unembedding"
                raise SettingsError(f"--{name}={path}: this model has no {lacking}")
            if tokenizer is not None and load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
                raise SettingsError(f"--{name}={path}: its tokenizer is not the policy's; tokens would not match")
        else:
            if name not in VALUES and model.unembed is None:
                raise SettingsError(f"--model={settings.model}: it has a value head; a {name} gives probabilities")
            models[name] = with_value_head(model) if name in VALUES and model.value is None else model
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


def check_algorithm(algorithm: Algorithm, settings: Settings, source: Collection[str] | None = None) -> None:
    """Compare what an algorithm reads with what a run of these settings provides.

    Args:
      source: fields that the source writes; None: all that a source may write.

    Raises:
      SettingsError: naming the fields of `Batch` that are missing, or the flag that would do nothing.
    """
    learning = set(algorithm.losses)
    writers = {"policy", "reference"} | learning | ({"teacher"} if settings.teacher is not None else set())
    available = {name for name, field in FIELDS.items() if field.writer in ("step", *writers)}
    available |= set(fields_by("source") if source is None else source)
    if settings.teacher is None:
        available.discard("divergence")  # the step computes it with a teacher beside the policy
    if settings.new_tokens_per_step is None:
        available.discard("version")  # all tokens of a step are of the same weights
    try:
        check(algorithm, available)
    except ValueError as error:
        teacher = "" if settings.teacher is not None or "teacher" not in str(error) else "; give --teacher=DIR"
        raise SettingsError(f"{error}{teacher}") from error
    names = role_names(algorithm)
    if settings.teacher is not None and "teacher" not in names:
        raise SettingsError(f"--teacher={settings.teacher}: the algorithm reads nothing that a teacher writes")
    if settings.critic_warmup_steps and "critic" not in learning:
        raise SettingsError(f"--critic_warmup_steps={settings.critic_warmup_steps}: the algorithm has no critic")
    if settings.implicit_reward_lr is not None and "implicit_reward" not in learning:
        raise SettingsError(f"--implicit_reward_lr={settings.implicit_reward_lr}: the algorithm trains no such model")
    unknown = sorted(learning - set(WRITES))
    if unknown:
        raise SettingsError(f"the algorithm has a loss for {unknown[0]!r}, which is not one of {', '.join(WRITES)}")


def check_meshes(
    settings: Settings, models: Mapping[str, Model], sizes: dict[str, int], memory: float
) -> dict[str, int]:
    """The mesh to generate on, after checking that all models can be laid out.

    Args:
      memory: bytes that one rank may use.

    Raises:
      SettingsError, MeshError: naming the flag, the sizes and the way out.
    """
    check_roles(settings, tuple(models))
    lead = models.get("policy") or next(iter(models.values()))
    generating = generate_sizes(settings, sizes, lead, memory) if "policy" in models else sizes
    with blaming(f"mesh={settings.mesh}"):
        check_layouts(models, settings, sizes, generating)
    return generating


def check_code(settings: Settings, models: Mapping[str, Model], generates: str | None) -> None:
    """Check what transformers' own code cannot do.

    Args:
      generates: the role that generates, if one does.

    Raises:
      SettingsError: naming the flag.
    """
    for name, model in models.items():
        if not model.config.module:
            continue
        what = f"the {name} is {architecture(model.config)}, transformers' own code"
        if settings.compile == "on":
            raise SettingsError(f"--compile=on: {what}, whose layers are not compiled; leave it out")
        if name == generates and settings.engine != "hf":
            raise SettingsError(f"--engine={settings.engine}: {what}, which has no pages of keys; give --engine=hf")


def check_engine(settings: Settings, model: Model, mesh: Mesh, sampling: Sampling, eval_sampling: Sampling) -> None:
    """Check that the engine of a flag can generate with the model.

    Args:
      mesh: the generate mesh.
      sampling, eval_sampling: of the completions to train on, and of those to evaluate.

    Raises:
      SettingsError: it cannot, or is not installed.
    """
    if settings.engine == "vllm_server":
        given, replicas = len(parts(settings.engine_url)), mesh.size(mesh.row_axes)
        if given != replicas or mesh.size("tensor") > 1:
            raise SettingsError(
                f"--engine_url={settings.engine_url}: {given} servers, which hold whole models, for the generate mesh "
                f"{mesh}; give one for each of its {replicas} data ranks, and a --generate_mesh without tp"
            )
        return  # the rest is for the server to say, which may have another device
    if settings.engine == "hf":
        if settings.dtype == "float64":
            raise SettingsError("--engine=hf: transformers' generate gives float32 at most; use --dtype=float32")
        if settings.new_tokens_per_step is not None:
            raise SettingsError(
                f"--new_tokens_per_step={settings.new_tokens_per_step}: --engine=hf writes whole completions only"
            )
        penalties = {one.repetition_penalty for one in (sampling, eval_sampling)} - {1.0}
        if penalties:
            raise SettingsError(
                f"--engine=hf: a repetition_penalty of {penalties.pop()} would count the padding of shorter prompts; "
                "leave it out (--repetition_penalty, --eval_repetition_penalty), or use --engine=native"
            )
        if mesh.size("tensor") > 1:
            raise SettingsError(f"--engine=hf holds whole weights; generate on a mesh without tp instead of {mesh}")
        return
    cache_bytes = round((settings.kv_cache_gb or 0) * 1e9)
    try:
        check_vllm(model.config, mesh.device.type, TORCH_DTYPES[settings.dtype], mesh.size("tensor"), cache_bytes)
    except (ModelError, ImportError) as error:
        raise SettingsError(f"--engine={settings.engine}: {error}") from error


def task_of(
    algorithm: Algorithm, kind: str, settings: Settings, tokenizer: Any, model: Model, given: Given
) -> Task | Texts:
    """Data that the run learns from: prompts to complete, or texts."""
    if kind == "rl":
        return prompts_of(settings, tokenizer, given, reads_scores(algorithm))
    if "reward_model" in algorithm.losses and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # transformers needs one to read rewards of a batch
    return texts_of(settings, texts_kind(algorithm), tokenizer, model.config, given)


def texts_kind(algorithm: Algorithm) -> str:
    """Kind of texts for an algorithm without an advantage, as in `funrl.data.supervised`."""
    return "preferences" if algorithm.example == "pair" else "demonstrations"


def warmstart_steps(settings: Settings, task: Task | Texts, given: Given) -> int:
    """Supervised steps before the first step; by default none but for the embedded task from scratch."""
    scratch = all(x is None for x in (settings.model, settings.data, settings.prompts, given.records))
    steps = settings.warmstart_steps
    steps = arithmetic.WARMSTART_STEPS * scratch if steps is None else steps
    if steps and task.demonstrations is None:
        raise SettingsError(f"--warmstart_steps={steps}: only the embedded task has demonstrations; use 0")
    return steps


def new_tokens(settings: Settings, task: Task | Texts | None = None) -> int:
    """Tokens that a completion may have."""
    default = task.max_new_tokens if isinstance(task, Task) else resolved(settings).max_new_tokens
    return settings.max_new_tokens or default or 1


def samplings(settings: Settings, count: int, stop: tuple[int, ...], config: Config) -> tuple[Sampling, Sampling]:
    """Sampling of the completions to train on, and of those to evaluate.

    Args:
      count: tokens that a completion may have.
      stop: tokens that end a completion.
      config: of the model that the run begins with.

    Raises:
      SettingsError: the model's generation_config.json has a number out of its range, or a flag does nothing.
    """
    train = Sampling(
        settings.temperature, settings.top_k, settings.top_p, count, stop, settings.samples_per_prompt,
        min_p=settings.min_p, repetition_penalty=settings.repetition_penalty,
    )  # fmt: skip
    given: dict[str, Any] = {name: getattr(settings, f"eval_{name}") for name in EVAL_DEFAULTS}
    how = EVAL_DEFAULTS | sampling_defaults(config) | {name: x for name, x in given.items() if x is not None}
    greedy = how["temperature"] == 0
    idle = [name for name in IDLE_IF_GREEDY if greedy and given[name] is not None]
    if idle:
        raise SettingsError(
            f"--eval_{idle[0]}={given[idle[0]]} does nothing: evaluation is greedy; give --eval_temperature too"
        )
    try:
        numbers: dict[str, Any] = how | {"temperature": how["temperature"] or 1.0}
        return train, Sampling(**numbers, max_new_tokens=count, stop=stop, greedy=greedy)
    except ValueError as error:
        raise SettingsError(f"{GENERATION} of the model: {error}") from error


def inherited(job: Job) -> dict[str, float]:
    """Numbers that evaluation takes from the model's generation_config.json, where no flag says otherwise."""
    found = {name: x for name, x in sampling_defaults(job.model.config).items() if x != EVAL_DEFAULTS[name]}
    idle = IDLE_IF_GREEDY if job.eval_sampling.greedy else ()
    return {name: x for name, x in found.items() if getattr(job.settings, f"eval_{name}") is None and name not in idle}


def learning_rates(settings: Settings, algorithm: Algorithm) -> dict[str, float]:
    """Peak learning rates of the roles that learn."""
    scratch, given = (1e-3, 1e-5) if settings.lora_rank is None else (3e-3, 1e-4)
    lr = settings.lr if settings.lr is not None else (scratch if settings.model is None else given)
    critic = 2 * lr if settings.critic_lr is None else settings.critic_lr
    implicit = lr if settings.implicit_reward_lr is None else settings.implicit_reward_lr
    own = {"critic": critic, "implicit_reward": implicit}
    return {name: own.get(name, lr) for name in algorithm.losses}


@contextlib.contextmanager
def blaming(flag: str) -> Iterator[None]:
    """Put the flag that led to an error before its message."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"--{flag}: {error}") from error
