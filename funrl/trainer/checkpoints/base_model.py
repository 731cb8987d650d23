"""The base that adapters stand on: it does not learn, so it is in no checkpoint, and is opened again by who needs it.

What a checkpoint has of it are the directory that it is from and a digest of each of its weights. A run without
--model keeps the base that it made in its own directory.
"""

from __future__ import annotations

import collections
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from funrl import trees
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import Mesh
from funrl.models.deployed import deployed
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.names import names_of
from funrl.models.model import Lora
from funrl.models.weight_dtypes import cast_weights
from funrl.trainer.checkpoints.checkpoint import Recorded
from funrl.trainer.checkpoints.weight_digests import weight_digests
from funrl.trainer.jobs.job import Job
from funrl.trainer.steps.parts import Parts
from funrl.trainer.storage.shard_server import CheckpointError

OWN_BASE = "base"  # in the directory of a run


def own_base(job: Job, folder: str | None) -> Path | None:
    """Directory in which a run keeps a base that it makes itself; None: it keeps none.

    Args:
      folder: of its checkpoints; None: it has no directory.
    """
    kept = job.initial_role != job.main_role and job.settings.models.model is None and folder is not None
    return Path(str(folder)).parent / OWN_BASE if kept else None


def kept_already(directory: Path | None, mesh: Mesh) -> bool:
    """True if a run that is resumed has kept its base, as the first rank sees it."""
    return directory is not None and gather_objects(directory.exists(), mesh)[0]


def keep_base(directory: Path, job: Job, parts: Parts, begin: trees.Tree) -> None:
    """Write what a run begins with as a Hugging Face directory, beside and renamed. Every rank takes part.

    Args:
      begin: weights in the layouts of `parts.begin`.

    Raises:
      CheckpointError: on the first rank, where it cannot be written.
    """
    named = deployed(parts.begin, cast_weights(begin, job.dtype)).exported(names_of(job.model))
    if parts.mesh.rank > 0:
        collections.deque(named, maxlen=0)
        return
    beside = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        hf.write(beside, job.model, named, job.tokenizer)
        os.replace(beside, directory)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(f"{directory}: the base cannot be written: {error.strerror or error}") from error


def adapter_facts(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree]) -> dict[str, Any]:
    """Facts of a checkpoint of adapters: what they are, and what they stand on. Every rank takes part.

    Args:
      frozen: this rank's weights of the roles that do not learn.

    Returns: the facts; none where all weights learn.
    """
    if job.lora is None:
        return {}
    lora = job.lora._asdict() | {"targets": list(job.lora.targets)}
    digests = weight_digests(frozen[job.initial_role], parts.roles[job.initial_role].stored, parts.mesh)
    base = {"directory": job.settings.models.model, "digests": digests, "format": job.settings.adapters.base_format}
    return {"lora": lora, "base": base}


def has_nf4_base(facts: Mapping[str, Any]) -> bool:
    """True if the adapters of a checkpoint were trained on a base in 4 bits."""
    return facts["base"].get("format") == "nf4"


def lora_in(facts: Mapping[str, Any]) -> Lora | None:
    """The adapters that a checkpoint holds; None: it holds all weights."""
    lora = facts.get("lora")
    return None if lora is None else Lora(lora["rank"], lora["alpha"], tuple(lora["targets"]))


def check_lora(path: Path, facts: Mapping[str, Any], own: Lora | None, nf4: bool = False) -> None:
    """Compare the adapters of a checkpoint with those of a run.

    Args:
      facts: of the checkpoint at `path`.
      own: of the run; None: all weights learn.
      nf4: whether the run's base is in 4 bits.

    Raises:
      CheckpointError: they differ; the message names the flags.
    """
    lora = lora_in(facts)
    if lora == own:
        if own is not None and has_nf4_base(facts) != nf4:
            form = facts["base"].get("format", "auto")
            raise CheckpointError(f"--resume: {path}: its adapters stand on another base; give --base_format={form}")
        return
    if lora is None:
        raise CheckpointError(f"--resume: {path}: it holds all weights and no adapters; leave --lora_rank out")
    given = facts.get("provenance", {}).get("flags", {}).get("lora_targets")
    targets = given or ",".join(f"{name}_proj" for name in lora.targets)
    flags = f"--lora_rank={lora.rank} --lora_alpha={lora.alpha:g} --lora_targets={targets}"
    raise CheckpointError(f"--resume: {path}: it holds other adapters; give {flags}")


def base_directory(found: Recorded) -> Path:
    """Directory of the base of a checkpoint of adapters."""
    directory = found.facts["base"]["directory"]
    return found.path.parents[1] / OWN_BASE if directory is None else Path(directory)


def check_base(
    path: Path,
    facts: Mapping[str, Any],
    digests: Mapping[str, str],
    directory: str | Path | None,
    names: Collection[str] | None = None,
) -> None:
    """Compare a base with that on which the adapters of a checkpoint were trained.

    Args:
      path, facts: of the checkpoint.
      digests: of the base's weights.
      directory: that the base is from; None: that of the run.
      names: of the weights to compare; None: all.

    Raises:
      CheckpointError: a weight differs, or is missing.
    """
    known = facts["base"]["digests"]
    began = facts["base"]["directory"]
    changed = [name for name in (names or known) if digests.get(name) != known[name]]
    if changed:
        before = f", {began}" if began is not None and str(began) != str(directory) else ""
        raise CheckpointError(
            f"{path}: the base {directory or OWN_BASE} is not the one that its adapters were trained on{before}: "
            f"{changed[0]} differs; give that model as it was"
        )
