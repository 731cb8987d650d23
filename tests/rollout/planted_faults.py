"""Faults by which rows are sampled by another policy than the one that the trainer has published.

Each is planted in `test_foreign_rows.py`, and in `test_vllm_foreign_rows.py` where vLLM can have it. The list was written
before what finds them.
"""

from typing import NamedTuple


class PlantedFault(NamedTuple):
    """A fault.

    Attributes:
      text: what goes wrong.
      engines: that can have it.
    """

    text: str
    engines: tuple[str, ...]


NATIVE, VLLM, SERVER = "native", "vllm", "vllm_server"
ALL = (NATIVE, VLLM, SERVER)

FAULTS = {
    "stale_weights": PlantedFault("the load reports a new version and leaves the old weights", ALL),
    "stale_adapter": PlantedFault("the factors of an adapter are those of an earlier step", (NATIVE,)),
    "stale_merge": PlantedFault(
        "the weights are new, and the adapter merged into them is that of an earlier step", ALL
    ),
    "merged_twice": PlantedFault("an adapter is merged into weights that have it already", ALL),
    "slept_with_old_weights": PlantedFault("the engine sleeps, takes weights, and wakes with those from before", ALL),
    "swapped_layers": PlantedFault("two layers have each other's weights", ALL),
    "scale_not_sent": PlantedFault("weights in 8 bits are new, and their scales are old", (NATIVE,)),
    "patch_on_wrong_base": PlantedFault(
        "changed numbers are written into other weights than they were taken from", ALL
    ),
    "old_shard_of_a_rank": PlantedFault(
        "one tensor rank of a replica has the shards of an earlier step", (NATIVE, VLLM)
    ),
    "interrupted_load": PlantedFault("a load ends half-way: some layers are new, the others old", ALL),
    "other_weights_after_resume": PlantedFault("a resumed run's engine has the weights that the run began with", ALL),
    "second_policy": PlantedFault("the engine of one policy has the weights of another", ALL),
    "other_dtype": PlantedFault("the engine computes with weights of a narrower dtype than the trainer gave", ALL),
    "earlier_run": PlantedFault("a row of an earlier run, of a version that this run has too, is trained on", ALL),
}
