"""A run, checked and ready to start: what the flags mean. Nothing here computes or starts a process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from funrl.algos.checking import check
from funrl.algos.core import Algorithm, reads
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
from funrl.models.resize import with_vocabulary
from funrl.rewards.call import reward_functions
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
    check_token_ids,
    fields_of_texts,
    fit_prompts,
    task_of_prompts,
    texts_of,
)
from funrl.trainer.judging import JudgeJob, judge_job
from funrl.trainer.learning_rates import learning_rates
from funrl.trainer.own_texts import reads_tokens
from funrl.trainer.prompt_data import with_chat_template
from funrl.trainer.roles import READERS, VALUES, WRITES, reads_scores, role_names
from funrl.trainer.scorers import SCORERS, model_path, scorers_of
from funrl.trainer.settings import Settings, for_kind, resolved
from funrl.trainer.sharding import (
    check_experts,
    check_forms,
    check_layouts,
    check_roles,
    generate_sizes,
    rank_memory,
)

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
      judge: the model that writes verdicts, if there is one.
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
    judge: JudgeJob | None = None
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
    def reward_names(self) -> tuple[str, ...]:
        """Names of the numbers that a completion's score is made of; those of models are the last."""
        if not isinstance(self.task, Task):
            return ()
        return (*(one.name for one in reward_functions(self.task.rewards)), *scorers_of(self.settings))

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
    sizes, device = devices_of(settings)
    given = given or Given()
    model, tokenizer = first_model(settings, given)
    tokenizer = with_chat_template(tokenizer, settings)
    check_algorithm(algorithm, settings)
    models, directories = models_of(algorithm, settings, model, tokenizer)
    lead = "policy" if "policy" in models else next(iter(algorithm.losses))
    with blaming(f"model={settings.model}"):
        hf.check_savable(models[lead])
    check_code(settings, models, "policy" if kind == "rl" else None)
    generating = check_meshes(settings, models, sizes, rank_memory(device, Mesh(sizes).world))
    task = task_of(algorithm, kind, settings, tokenizer, model, given)
    if isinstance(task, Texts):
        check_algorithm(algorithm, settings, fields_of_texts(task))
        if "mismatched" in reads(algorithm).required and settings.batch_prompts < 2:
            raise SettingsError("--batch_prompts=1: KTO compares with completions of other prompts; give 2 or more")
    warmstart = warmstart_steps(settings, task, given)
    roles = Models(model, tokenizer, models, directories)
    return job_of(settings, algorithm, roles, sizes, generating, device, task)._replace(warmstart_steps=warmstart)


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


def job_of(
    settings: Settings, algorithm: Algorithm, roles: Models, sizes: dict[str, int], generating: dict[str, int],
    device: str, task: Task | Texts,
) -> Job:  # fmt: skip
    """A job of what has been checked by itself, after checking that the data fit the models and the engine.

    Args:
      sizes, generating: of the meshes to train and to generate on.

    Raises:
      SettingsError: they do not.
    """
    model, tokenizer, models, directories = roles
    reading = {name: one for name, one in models.items() if reads_policys(name, task, tokenizer, directories)}
    smallest = min(reading, key=lambda name: reading[name].config.vocab)
    check_token_ids(task, tokenizer, models[smallest].config, directories.get(smallest))
    stop = tuple(sorted({*model.config.eos, *({tokenizer.eos_token_id} - {None})}))
    sampling, eval_sampling = samplings(settings, new_tokens(settings, task), stop, model.config)
    if isinstance(task, Task):
        check_budget(settings, sampling.max_new_tokens)
        task = fit_prompts(task, settings, sampling.max_new_tokens, reading)
        check_readers(directories, task, algorithm, settings)
        mesh = Mesh(generating, device=torch.device(device))
        if settings.engine == "native":
            check_cache(settings, task, sampling.max_new_tokens, model, mesh, TORCH_DTYPES[settings.dtype])
        else:
            check_engine(settings, model, mesh, sampling, eval_sampling)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stop[0] if stop else 0)
    return Job(
        settings, sizes, generating, device, TORCH_DTYPES[settings.dtype], model, models, directories,
        learning_rates(settings, algorithm, model), tokenizer, task, algorithm, sampling, eval_sampling, pad, 0,
        judge_of(settings, task, sizes, rank_memory(device, Mesh(sizes).world)) if isinstance(task, Task) else None,
        lora_of(settings, model),
    )  # fmt: skip


def devices_of(settings: Settings) -> tuple[dict[str, int], str]:
    """Sizes of the mesh, and "cpu" or "cuda". Raises: SettingsError, MeshError, the machine does not have them."""
    sizes, device = meshes.parse(settings.mesh), settings.device or device_type()
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device=cuda: torch sees no GPU; use --device=cpu")
    check_devices(sizes, device)
    return sizes, device


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
    if settings.on_reward_error == "stop":
        available.discard("failed")
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
    check_experts(settings, models.values())
    lead = models.get("policy") or next(iter(models.values()))
    generating = generate_sizes(settings, sizes, lead, memory) if "policy" in models else sizes
    with blaming(f"mesh={settings.mesh}"):
        check_layouts(models, settings, sizes, generating)
    check_forms(models, settings, sizes)
    return generating


def reads_policys(name: str, task: Task | Texts, tokenizer: Any, directories: Mapping[str, str]) -> bool:
    """True if a role reads the policy's tokens, and not texts in tokens of its own."""
    if name not in READERS or name not in directories or not isinstance(task, Task):
        return True
    own = load_tokenizer(directories[name])
    return name == "reward_model" and reads_tokens(own, tokenizer, task.prompts)


def check_readers(directories: Mapping[str, str], task: Task, algorithm: Algorithm, settings: Settings) -> None:
    """Check that the models that score completions can read the prompts, and that their scores are of use.

    Raises:
      SettingsError: naming the flag.
    """
    chats = any(example.messages for example in task.prompts)
    for name in READERS:
        if chats and name in directories and load_tokenizer(directories[name]).chat_template is None:
            raise SettingsError(
                f"--{name}={directories[name]}: prompts are chats, but its tokenizer has no chat template; add one to "
                "its tokenizer_config.json"
            )
    if settings.process_reward == "each" and "token_reward" not in reads(algorithm).optional:
        raise SettingsError(
            "--process_reward=each: the algorithm reads no rewards of tokens, as ppo does; give --process_reward=min "
            "or another that makes one number of a completion's steps"
        )


def judge_of(settings: Settings, task: Task, sizes: dict[str, int], memory: float) -> JudgeJob | None:
    """The judge of a flag, if one is given. Raises: SettingsError."""
    directory, given = model_path(settings, "judge"), settings
    if directory is None:
        return None
    with blaming("judge"):
        return judge_job(
            directory, given.model_code, given.judge_template, given.judge_pattern, given.judge_max_new_tokens,
            lambda model: generate_sizes(given, sizes, model, memory), (*task.prompts, *task.heldout),
        )  # fmt: skip


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
        return task_of_prompts(settings, tokenizer, given, reads_scores(algorithm))
    if "reward_model" in algorithm.losses and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # transformers needs one to read rewards of a batch
    return texts_of(settings, texts_kind(algorithm), tokenizer, model.config, given)


def texts_kind(algorithm: Algorithm) -> str:
    """Kind of texts for an algorithm that learns from given ones, as in `funrl.data.supervised`."""
    kinds = {"pair": "preferences", "labelled": "ratings", "steps": "steps"}
    return kinds.get(algorithm.example, "demonstrations")


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
    if greedy and settings.eval_samples > 1:
        raise SettingsError(
            f"--eval_samples={settings.eval_samples}: evaluation is greedy, so all would be the same; give "
            "--eval_temperature too"
        )
    try:
        numbers: dict[str, Any] = how | {"temperature": how["temperature"] or 1.0}
        return train, Sampling(**numbers, max_new_tokens=count, stop=stop, greedy=greedy, samples=settings.eval_samples)
    except ValueError as error:
        raise SettingsError(f"{GENERATION} of the model: {error}") from error


def inherited(job: Job) -> dict[str, float]:
    """Numbers that evaluation takes from the model's generation_config.json, where no flag says otherwise."""
    found = {name: x for name, x in sampling_defaults(job.model.config).items() if x != EVAL_DEFAULTS[name]}
    idle = IDLE_IF_GREEDY if job.eval_sampling.greedy else ()
    return {name: x for name, x in found.items() if getattr(job.settings, f"eval_{name}") is None and name not in idle}


@contextlib.contextmanager
def blaming(flag: str) -> Iterator[None]:
    """Put the flag that led to an error before its message."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"--{flag}: {error}") from error
