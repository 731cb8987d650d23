"""Checks of a run: whether algorithm, models, meshes and engine go together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from funrl.algos.checking import check
from funrl.algos.core import Algorithm, reads
from funrl.batch import FIELDS, fields_by
from funrl.data.tokenizer import load_tokenizer
from funrl.mesh.mesh import Mesh
from funrl.models import Model
from funrl.models.config import ModelError, architecture
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm_core import check_vllm
from funrl.trainer.declaration import SettingsError, blaming, parts
from funrl.trainer.job_data import Task
from funrl.trainer.job_models import TORCH_DTYPES
from funrl.trainer.roles import READERS, WRITES, role_names
from funrl.trainer.settings import Settings
from funrl.trainer.sharding import check_experts, check_forms, check_layouts, check_roles, generate_sizes


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
