"""A run, checked and ready to start: what the flags mean. Nothing here computes or starts a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from funrl.algos.core import Algorithm
from funrl.algos.reading import reads
from funrl.data.prompts import Example
from funrl.environments.agents import AgentMap
from funrl.environments.environment import Environment
from funrl.mesh.launch import device_type
from funrl.mesh.pools.placement import Placement
from funrl.models import Model
from funrl.models.model import Lora
from funrl.models.nf4_base import with_nf4
from funrl.models.weight_dtypes import TORCH_DTYPES
from funrl.rewards.call import reward_functions
from funrl.role_kinds import BASE, RoleKind
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.provenance import Provenance
from funrl.trainer.settings.scorers import JUDGE, scorers_of
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.parts import JudgeJob
from funrl.trainer.steps.roles import main_role_of, writes_of

DEMONSTRATION = "demonstration"  # field of a prompt's record


class Task(NamedTuple):
    """Prompts to complete.

    Attributes:
      name: of the task, for the report.
      prompts: to train on.
      heldout: to evaluate on.
      rewards: functions(prompt, completion, **fields) -> float.
      weights: of each of them in a completion's score, then of the models that score completions too.
      embedded: whether they are those of an embedded task.
      max_new_tokens: what a completion needs.
      readable: completion -> as it is shown to people; None: as it is.
      remarks: on prompts that are not taken as they are.
      curriculum: weights of the prompts before each step, see `curriculum.weighing`.
      demonstration_field: of the prompts, for an algorithm that learns from demonstrations of them.
      environment: makes episodes of the prompts and rewards them; None: they are completed once.
    """

    name: str
    prompts: Sequence[Example]
    heldout: Sequence[Example]
    rewards: tuple[Callable[..., float], ...]
    weights: tuple[float, ...]
    max_new_tokens: int
    embedded: bool = False
    readable: Callable[[str], str] | None = None
    remarks: tuple[str, ...] = ()
    curriculum: Callable[..., object] | None = None
    demonstration_field: str = DEMONSTRATION
    environment: Environment | None = None


class Texts(NamedTuple):
    """Texts to learn from.

    Attributes:
      name: of the data, for the report.
      examples: to train on.
      heldout: to evaluate on.
      kind: one of `supervised.TEXT_FIELDS`.
      readable: as in `Task`.
      remarks: on what was done with the data, for the log.
      most: tokens of a text.
    """

    name: str
    examples: Sequence[Any]
    heldout: Sequence[Any]
    kind: str
    readable: Callable[[str], str] | None = None
    remarks: tuple[str, ...] = ()
    most: int | None = None


def compute_dtype(settings: Settings) -> str:
    """The name of the dtype that forward passes compute in: --dtype, or by default that of the device.

    The device of a dry run is its --hardware, a GPU by default.
    """
    if settings.models.dtype != "auto":
        return settings.models.dtype
    on_gpu = (settings.devices.device or device_type()) == "cuda"
    if settings.estimate.dry_run:
        on_gpu = settings.estimate.hardware != "cpu"
    return "bfloat16" if on_gpu else "float32"


@dataclass(frozen=True, kw_only=True)
class JobModels:
    """Models of a run, without weights.

    Attributes:
      model: the one that the run begins with.
      tokenizer: of `model`; None in a dry run.
      models: of every role, by name; learning ones have adapters where `lora` is given.
      directories: of the roles that do not begin as `model`.
      lora: adapters of the roles that learn; None: all of their weights learn.
      tokenizers: of the roles that read the policy's rows in tokens of their own.
    """

    model: Model
    tokenizer: Any
    models: dict[str, Model]
    directories: dict[str, str]
    lora: Lora | None = None
    tokenizers: dict[str, Any] = field(default_factory=dict)

    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        ends = {*self.model.config.special_tokens.eos}
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ends.add(self.tokenizer.eos_token_id)
        return tuple(sorted(ends))

    @property
    def pad(self) -> int:
        """Id of the padding token."""
        pad = None if self.tokenizer is None else self.tokenizer.pad_token_id
        return next(iter((*self.stop, 0))) if pad is None else pad


@dataclass(frozen=True, kw_only=True)
class JobDevices:
    """Devices of a run.

    Attributes:
      sizes: of the mesh to train on.
      generate_sizes: of the mesh to generate on.
      device: "cpu" or "cuda".
    """

    sizes: dict[str, int]
    generate_sizes: dict[str, int]
    device: str


@dataclass(frozen=True, kw_only=True)
class BaseJob(JobModels, JobDevices):
    """Facts of a run that every rank needs; the same on all of them.

    Attributes:
      task: data that the run learns from.
      start: directory of the weights that the run begins with; None: random ones of the seed.
      warmstart_steps: supervised steps on the embedded task by which `start` is made.
      agents: models of an environment's agents.
      provenance: origin of the run, as whoever starts it knows it.
    """

    settings: Settings
    algorithm: Algorithm
    task: Task | Texts
    start: str | None = None
    warmstart_steps: int = 0
    agents: AgentMap = field(default_factory=AgentMap)
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in."""
        return TORCH_DTYPES[compute_dtype(self.settings)]

    @property
    def placement(self) -> Placement | None:
        """Pools of trainer and generator ranks; None: every rank does both."""
        return self.settings.devices.placement

    @property
    def launched(self) -> dict[str, int]:
        """Sizes of the mesh over all ranks of the run."""
        return self.sizes if self.placement is None else self.placement.launched

    @property
    def master(self) -> torch.dtype:
        """The dtype of the weights that an optimizer keeps."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    @property
    def save_dtype(self) -> str:
        """The dtype of the weights that the run saves as a model, by its name in config.json."""
        given = self.settings.models
        if given.save_dtype != "auto":
            return given.save_dtype
        source = self.models[self.main_role].config.source
        return str(self.master).removeprefix("torch.") if given.model is None else source.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients of sharded weights are summed over ranks."""
        return TORCH_DTYPES.get(self.settings.sharding.grad_reduce_dtype, self.master)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the numbers that a completion's score is the sum of; those of models are the last."""
        return ()

    @property
    def main_role(self) -> str:
        """The role that takes over the first weights, and is saved at the end."""
        return main_role_of(self.models, self.algorithm)

    @property
    def initial_role(self) -> str:
        """The role that takes over the weights that a run begins with: the base of adapters, if there are any."""
        return self.base_of(self.main_role) or self.main_role

    @property
    def initial_model(self) -> Model:
        """The model of the initial role without adapters: `model`, or that with weights in 4 bits."""
        if not self.settings.adapters.nf4:
            return self.model
        shared = (model for model in self.models.values() if model.whole is self.model)  # is compiled once
        return next(shared, None) or with_nf4(self.model)

    @property
    def initial_dtype(self) -> torch.dtype:
        """The dtype of the weights that a run begins with: to compute in, where they do not learn."""
        return self.master if self.initial_role in self.algorithm.losses else self.dtype

    def base_of(self, name: str) -> str | None:
        """The frozen role whose weights a role has, beside adapters if it learns; None: all are its own."""
        return BASE if self.lora is not None and name not in self.directories else None

    @property
    def role_sources(self) -> tuple[str, ...]:
        """Sources of prompts that roles name, by their numbers in the field `data_source`."""
        return tuple(dict.fromkeys(source for name in self.models for source in self.kind_of_role(name).sources))

    def kind_of_role(self, name: str) -> RoleKind:
        """The kind of a role."""
        return self.algorithm.role_kinds[name]


@dataclass(frozen=True, kw_only=True)
class RLJob(BaseJob):
    """A run whose policy generates the rows that it learns from.

    Attributes:
      task: prompts to complete, and rewards.
      sampling: of the completions to train on.
      eval_sampling: of those to evaluate.
      judge: the model that writes verdicts, if there is one.
      agent_models: models of directories among them, by their names in `agents.frozen`.
    """

    task: Task
    sampling: Sampling
    eval_sampling: Sampling
    judge: JudgeJob | None = None
    agent_models: Mapping[str, Model] = field(default_factory=dict)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the numbers that a completion's score is the sum of; those of models are the last."""
        functions = reward_functions(self.task.rewards)
        return (*(function.name for function in functions), *scorers_of(self.settings))


@dataclass(frozen=True, kw_only=True)
class TextJob(BaseJob):
    """A run that learns from given texts.

    Attributes:
      task: the texts.
    """

    task: Texts


Job = RLJob | TextJob


def rewards_completions(job: Job, name: str) -> bool:
    """True of a judge, and of a role that reads completions before there are scores."""
    return name == JUDGE or job.kind_of_role(name).scores_completions


def needs_old_scores(job: Job) -> bool:
    """True if the old log-probabilities take a pass of their own.

    Where each batch has a single update, they are those of its forward pass, unless something before or beside the
    policy's loss reads them, or a gap to the engine is to stop the run before the update.
    """
    algorithm = job.algorithm
    if isinstance(job, TextJob) and algorithm.advantage is None:
        return False
    kinds = algorithm.role_kinds
    main_role = job.main_role
    others = {name: loss for name, loss in algorithm.losses.items() if name != main_role}
    before = reads(algorithm.advantage, algorithm.filter, *others.values(), fields=algorithm.fields).required
    updates = job.settings.updates
    single = updates.epochs * updates.minibatches == 1 and job.settings.optimization.critic_warmup_steps == 0
    stops = isinstance(job, RLJob) and job.settings.engines.gap_rule.stops
    further = set(writes_of(main_role, algorithm)) - {"old_logp"}
    beside = any(not kinds[name].value_head for name in others)  # whose probabilities are not those of the samples
    return bool("old_logp" in before or further) or not single or beside or stops
