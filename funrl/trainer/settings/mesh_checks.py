"""Checks of the mesh flags and of sharding over them."""

from __future__ import annotations

from funrl.environments.agents import parse_agents
from funrl.mesh.pools.placement import names_train
from funrl.mesh.text import SHORT, TOKEN_AXES, devices
from funrl.trainer.settings.declaration import SettingsError, parts
from funrl.trainer.settings.settings import TOKEN_MULTIPLE, Settings, mesh_sizes


def check_pools(settings: Settings) -> None:
    """Check the ranks to train on and those to generate on. Raises: SettingsError."""
    if settings.devices.place is None:
        check_generate_mesh(settings)
    else:
        check_placement(settings, settings.devices.place)


def check_placement(settings: Settings, place: str) -> None:
    """Refuse a placement of ranks that cannot be read, or flags of which it says otherwise. Raises: SettingsError.

    Args:
      place: the value of --place.
    """
    mesh_sizes(settings)
    flags = settings.devices
    if flags.generate_mesh is not None:
        raise SettingsError(
            f"--generate_mesh={flags.generate_mesh} does nothing: --place={place} gives the mesh to generate on"
        )
    if flags.mesh != "dp1" and (names_train(place) or flags.placement is None):
        raise SettingsError(f"--mesh={flags.mesh} does nothing: --place={place} gives the mesh to train on")
    check_placed_engine(settings, place)
    if flags.joined:
        check_joined(settings, place)
    most = settings.sampling.new_tokens_per_step
    staleness = settings.asynchrony.staleness
    if most is not None and staleness and not flags.joined:
        raise SettingsError(
            f"--new_tokens_per_step={most} with --staleness={staleness}: completions are written on during the updates "
            "anyway, by newer weights as these come, and the trainer waits only for its oldest group; leave "
            "--new_tokens_per_step out, and raise --staleness or --window if the trainer waits for long ones"
        )
    if most is not None:
        raise SettingsError(
            f"--new_tokens_per_step={most} with --place={place}: every rank has to generate then; leave --place out"
        )


def check_placed_engine(settings: Settings, place: str) -> None:
    """Refuse what the engine of ranks that generate cannot do. Raises: SettingsError, naming the flag.

    Args:
      place: the value of --place.
    """
    engine = settings.engines.engine
    flags = settings.asynchrony
    if engine == "native":
        return
    if settings.devices.joined:
        raise SettingsError(
            f"--engine={engine} with --place={place}: generators that join have the native engine; leave --engine out, "
            "or give ranks that generate, as generate:2"
        )
    if engine == "hf" and flags.staleness:
        raise SettingsError(
            f"--engine=hf and --staleness={flags.staleness} with --place={place}: transformers completes whole "
            "batches, and takes no weights meanwhile; leave --staleness out, or give another --engine"
        )
    if flags.clock == "tokens":
        raise SettingsError(
            f"--clock=tokens with --engine={engine}: what vLLM computes in an iteration is its own, and its bits "
            "depend on the rows beside; leave --clock out, or give --engine=native"
        )
    if flags.keep_cache:
        raise SettingsError(
            f"--keep_cache with --engine={engine}: vLLM computes keys and values of running sequences again under new "
            "weights; leave it out, or give --engine=native"
        )


def check_joined(settings: Settings, place: str) -> None:
    """Refuse flags of asynchronous runs that do not go with generators that join. Raises: SettingsError.

    Args:
      place: the value of --place.
    """
    flags = settings.asynchrony
    if flags.clock != "wall":
        raise SettingsError(
            f"--clock={flags.clock} with --place={place}: generators join when they like, and their iterations order "
            "nothing; leave it out, or give ranks that generate, as generate:2"
        )
    agents = parse_agents(settings.environments.agents)
    lacking = {
        f"--agents={settings.environments.agents}": agents.frozen or agents.policies,
        "--router_replay": settings.routers.router_replay,
    }
    for flag, given in lacking.items():
        if given:
            raise SettingsError(
                f"{flag} with --place={place}: generators that join have the policy's weights alone, and return tokens "
                "and log-probabilities; leave it out, or give ranks that generate, as generate:2"
            )
    for flag, given in {f"--window={flags.window}": flags.window > 1, "--keep_cache": flags.keep_cache}.items():
        if given:
            raise SettingsError(
                f"{flag} does nothing with --place={place}: rows are taken in their order, each of one version; leave "
                "it out, or give ranks that generate, as generate:2"
            )


def check_generate_mesh(settings: Settings) -> None:
    """Refuse a generate mesh of other devices, or one that splits the tokens of a row. Raises: SettingsError."""
    if settings.devices.generate_mesh is None:
        return
    world = devices(mesh_sizes(settings))
    generating = devices(mesh_sizes(settings, "generate_mesh"))
    if mesh_sizes(settings, "generate_mesh")["sequence"] > 1:
        raise SettingsError(
            f"--generate_mesh={settings.devices.generate_mesh}: generation does not split the "
            "tokens of a row; write dp for sp"
        )
    if generating != world:
        raise SettingsError(
            f"--generate_mesh={settings.devices.generate_mesh} has {generating} devices and "
            f"--mesh={settings.devices.mesh} "
            f"has {world}; both must have the same devices"
        )


def check_sequence_parallel(settings: Settings) -> None:
    """Refuse a form of sequence parallelism on a mesh without it. Raises: SettingsError."""
    if settings.devices.sequence_parallel != "auto" and mesh_sizes(settings)["sequence"] == 1:
        raise SettingsError(
            f"--sequence_parallel={settings.devices.sequence_parallel} does nothing: "
            f"--mesh={settings.devices.mesh} has no sp"
        )


def check_split_residual(settings: Settings) -> None:
    """Refuse a split of the residual stream that the mesh does not allow. Raises: SettingsError."""
    tensor = mesh_sizes(settings)["tensor"]
    if settings.devices.split_residual != "auto" and tensor == 1:
        form = settings.devices.split_residual
        raise SettingsError(f"--split_residual={form} does nothing: --mesh={settings.devices.mesh} has no tp")
    if settings.devices.split_residual == "on" and TOKEN_MULTIPLE % tensor:
        raise SettingsError(
            f"--split_residual=on: the tokens of a micro-batch are a multiple of {TOKEN_MULTIPLE}, which tp{tensor} "
            "does not divide; leave it out, or choose a tp of 2, 4 or 8"
        )


def check_sharding(settings: Settings) -> None:
    """Refuse sharding of weights over axes with one device. Raises: SettingsError."""
    if not settings.sharding.fsdp:
        return
    named = parts(settings.sharding.fsdp_axes) or tuple(short for short, axis in SHORT.items() if axis in TOKEN_AXES)
    if devices(mesh_sizes(settings), [SHORT[short] for short in named]) == 1:
        raise SettingsError(
            f"--fsdp: the mesh {settings.devices.mesh} has only one device over {','.join(named)}: nothing to shard "
            "over"
        )
