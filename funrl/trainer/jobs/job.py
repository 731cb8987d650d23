"""A run, checked and ready to start: what the flags mean. Nothing here computes or starts a process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funrl.algos.core import Algorithm
from funrl.algos.reading import reads
from funrl.mesh.launch import check_devices, device_type
from funrl.mesh.mesh import Mesh
from funrl.models import Model
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.generation_config import sampling_defaults
from funrl.models.model import Lora
from funrl.models.weight_dtypes import TORCH_DTYPES
from funrl.rewards.call import reward_functions
from funrl.role_kinds import BASE, RoleKind
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks.embedded import TASKS
from funrl.trainer.jobs.compatibility import (
    check_algorithm,
    check_budget,
    check_cache,
    check_code,
    check_engine,
    check_meshes,
    check_readers,
)
from funrl.trainer.jobs.datasets import (
    Given,
    Task,
    Texts,
    check_token_ids,
    fields_of_texts,
    fit_prompts,
    task_of_prompts,
    texts_of,
)
from funrl.trainer.jobs.demonstrations import check_demonstrations, learns_from_demonstrations
from funrl.trainer.jobs.learning_rates import learning_rates
from funrl.trainer.jobs.models import Models, first_model, located, lora_of, models_of, reads_policys
from funrl.trainer.jobs.prompts import with_chat_template
from funrl.trainer.jobs.provenance import Provenance
from funrl.trainer.jobs.sampling import EVAL_DEFAULTS, IDLE_IF_GREEDY, new_tokens, samplings
from funrl.trainer.jobs.sharding import generate_sizes, rank_memory
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.declaration import SettingsError, blaming, run_kind
from funrl.trainer.settings.scorers import model_path, scorers_of
from funrl.trainer.settings.settings import Settings, flag_value, for_kind
from funrl.trainer.sources.judging import JudgeJob, judge_job
from funrl.trainer.steps.roles import main_role_of, reads_scores


class Job(NamedTuple):
    """Everything that a rank needs to know; the same on every rank.

    Attributes:
      model: the one that the run begins with.
      models: of every role, by name; those that learn with adapters, where `lora` is given.
      directories: of the roles that do not begin as `model`.
      rates: peak learning rates of the roles that learn.
      task: prompts to complete, or texts to learn from.
      judge: the model that writes verdicts, if there is one.
      provenance: origin of the run, as whoever starts it knows it.
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
    provenance: Provenance = Provenance()

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
    def main_role(self) -> str:
        """The role that takes over the first weights, and is saved at the end."""
        return main_role_of(self.models, self.algorithm)

    @property
    def initial_role(self) -> str:
        """The role that takes over the weights that a run begins with: the base of adapters, if there are any."""
        return self.base_of(self.main_role) or self.main_role

    @property
    def initial_dtype(self) -> torch.dtype:
        """The dtype of the weights that a run begins with: to compute in, where they do not learn."""
        return self.master if self.initial_role in self.algorithm.losses else self.dtype

    def base_of(self, name: str) -> str | None:
        """The frozen role whose weights a role has, beside adapters if it learns; None: all are its own."""
        return BASE if self.lora is not None and name not in self.directories else None

    def kind_of_role(self, name: str) -> RoleKind:
        """The kind of a role."""
        return self.algorithm.role_kinds[name]


def prepare(settings: Settings, compose: Callable[[], Algorithm], given: Given | None = None) -> Job:
    """Check every flag and file and read the small ones.

    Args:
      settings: the flags.
      compose: makes the algorithm.
      given: what is given in Python instead of by flags.

    Raises:
      ValueError: the first thing that cannot work, named, with its value and the way out.
    """
    if settings.devices.remat != "none":
        importlib.import_module("torch._dynamo")  # checkpointing needs it; ranks that are forked need not import it
    algorithm = compose()
    kind = run_kind(algorithm, settings.examples.data)
    settings = for_kind(settings, kind)
    check_settings(settings)
    settings = located(settings)
    sizes, device = devices_of(settings)
    given = given or Given()
    model, tokenizer = first_model(settings, given)
    tokenizer = with_chat_template(tokenizer, settings)
    check_algorithm(algorithm, settings)
    models, directories = models_of(algorithm, settings, model, tokenizer)
    main_role = main_role_of(models, algorithm)
    with blaming(f"model={settings.models.model}"):
        hf.check_savable(models[main_role])
    check_code(settings, models, main_role if kind == "rl" else None)
    generating = check_meshes(settings, models, sizes, rank_memory(device, Mesh(sizes).world))
    task = task_of(algorithm, kind, settings, tokenizer, model, given)
    if isinstance(task, Task) and learns_from_demonstrations(algorithm):
        check_demonstrations(task.prompts, task.demonstration_field, settings.sampling.new_tokens_per_step)
    if isinstance(task, Texts):
        check_algorithm(algorithm, settings, fields_of_texts(task))
        if "mismatched" in reads(algorithm).required and settings.run.batch_prompts < 2:
            raise SettingsError("--batch_prompts=1: KTO compares with completions of other prompts; give 2 or more")
    warmstart = warmstart_steps(settings, task, given)
    roles = Models(model, tokenizer, models, directories)
    return job_of(settings, algorithm, roles, sizes, generating, device, task)._replace(warmstart_steps=warmstart)


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
    lora = lora_of(settings, model)
    reading = {
        name: one
        for name, one in models.items()
        if reads_policys(algorithm.role_kinds[name], task, tokenizer, directories.get(name))
    }
    smallest = min(reading, key=lambda name: reading[name].config.vocab)
    check_token_ids(task, tokenizer, models[smallest], directories.get(smallest))
    stop = tuple(sorted({*model.config.special_tokens.eos, *({tokenizer.eos_token_id} - {None})}))
    sampling, eval_sampling = samplings(settings, new_tokens(settings, task), stop, model.config)
    if isinstance(task, Task):
        check_budget(settings, sampling.max_new_tokens)
        task = fit_prompts(task, settings, sampling.max_new_tokens, reading, tokenizer)
        check_readers(directories, task, algorithm, settings)
        mesh = Mesh(generating, device=torch.device(device))
        if settings.engines.engine == "native":
            check_cache(settings, task, sampling.max_new_tokens, model, mesh, rank_memory(device, mesh.world))
        else:
            check_engine(settings, model, mesh, sampling, eval_sampling)
    rates = learning_rates(settings, algorithm, model, lora is not None)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stop[0] if stop else 0)
    return Job(
        settings, sizes, generating, device, TORCH_DTYPES[settings.models.dtype], model, models, directories,
        rates, tokenizer, task, algorithm, sampling, eval_sampling, pad, 0,
        judge_of(settings, task, sizes, rank_memory(device, Mesh(sizes).world)) if isinstance(task, Task) else None,
        lora,
    )  # fmt: skip


def devices_of(settings: Settings) -> tuple[dict[str, int], str]:
    """Sizes of the mesh, and "cpu" or "cuda". Raises: SettingsError, MeshError, the machine does not have them."""
    sizes = settings.devices.train.chosen
    device = settings.devices.device or device_type()
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device=cuda: torch sees no GPU; use --device=cpu")
    check_devices(sizes, device)
    return sizes, device


def judge_of(settings: Settings, task: Task, sizes: dict[str, int], memory: float) -> JudgeJob | None:
    """The judge of a flag, if one is given. Raises: SettingsError."""
    directory = model_path(settings, "judge")
    if directory is None:
        return None
    with blaming("judge"):
        return judge_job(
            directory,
            settings.models.model_code,
            settings.judging,
            lambda model: generate_sizes(settings, sizes, model, memory),
            (*task.prompts, *task.heldout),
        )


def task_of(
    algorithm: Algorithm, kind: str, settings: Settings, tokenizer: Any, model: Model, given: Given
) -> Task | Texts:
    """Data that the run learns from: prompts to complete, or texts."""
    if kind == "rl":
        return task_of_prompts(settings, tokenizer, given, reads_scores(algorithm))
    reads_whole = any(algorithm.role_kinds[name].reads == "completion" for name in algorithm.losses)
    if reads_whole and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # transformers needs one to read rewards of a batch
    return texts_of(settings, texts_kind(algorithm), tokenizer, model.config, given)


def texts_kind(algorithm: Algorithm) -> str:
    """Kind of texts for an algorithm that learns from given ones, as in `funrl.data.supervised`."""
    kinds = {"pair": "preferences", "triple": "triples", "labelled": "ratings", "steps": "steps"}
    return kinds.get(algorithm.example, "demonstrations")


def warmstart_steps(settings: Settings, task: Task | Texts, given: Given) -> int:
    """Supervised steps before the first step; by default none but for the embedded task from scratch."""
    scratch = all(
        x is None for x in (settings.models.model, settings.examples.data, settings.examples.prompts, given.records)
    )
    steps = settings.run.warmstart_steps
    steps = TASKS[settings.examples.task].warmstart_steps * scratch if steps is None else steps
    if steps and task.demonstrations is None:
        raise SettingsError(f"--warmstart_steps={steps}: only the embedded task has demonstrations; use 0")
    return steps


def inherited(job: Job) -> dict[str, float]:
    """Numbers that evaluation takes from the model's generation_config.json, where no flag says otherwise."""
    found = {name: x for name, x in sampling_defaults(job.model.config).items() if x != EVAL_DEFAULTS[name]}
    idle = IDLE_IF_GREEDY if job.eval_sampling.greedy else ()
    return {
        name: x for name, x in found.items() if flag_value(job.settings, f"eval_{name}") is None and name not in idle
    }
