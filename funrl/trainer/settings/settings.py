"""All settings of a run: one field is one flag, with its bounds in its definition.

`records.py` has a record for each group of flags. Validation, parsing, the help and the table in docs/flags.md derive
from the declaration of the field. `checks.py` checks combinations of flags. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from funrl.trainer.settings import records
from funrl.trainer.settings.declaration import NONE, PARTS_NEEDED, Flag, SettingsError, refusing, value_type

SCORE_BUDGETS = 4  # token budgets in one forward pass without a gradient, by default
TOKEN_MULTIPLE = 8  # a rank's tokens of a micro-batch are a multiple of it
REWARD_TIMEOUT_S = 600.0  # where no flag says


@dataclass(frozen=True)
class Settings:
    """The flags of every run as records by subject. None means that the run chooses."""

    models: records.ModelSettings = field(default_factory=records.ModelSettings)
    examples: records.ExampleSettings = field(default_factory=records.ExampleSettings)
    formatting: records.FormatSettings = field(default_factory=records.FormatSettings)
    rewards: records.RewardSettings = field(default_factory=records.RewardSettings)
    judging: records.JudgeSettings = field(default_factory=records.JudgeSettings)
    environments: records.EnvironmentSettings = field(default_factory=records.EnvironmentSettings)
    run: records.RunSettings = field(default_factory=records.RunSettings)
    asynchrony: records.AsynchronySettings = field(default_factory=records.AsynchronySettings)
    estimate: records.EstimateSettings = field(default_factory=records.EstimateSettings)
    devices: records.DeviceSettings = field(default_factory=records.DeviceSettings)
    sharding: records.ShardSettings = field(default_factory=records.ShardSettings)
    waiting: records.WaitSettings = field(default_factory=records.WaitSettings)
    engines: records.EngineSettings = field(default_factory=records.EngineSettings)
    sampling: records.SamplingSettings = field(default_factory=records.SamplingSettings)
    optimization: records.OptimizerSettings = field(default_factory=records.OptimizerSettings)
    adapters: records.AdapterSettings = field(default_factory=records.AdapterSettings)
    routers: records.RouterSettings = field(default_factory=records.RouterSettings)
    updates: records.UpdateSettings = field(default_factory=records.UpdateSettings)
    evaluation: records.EvaluationSettings = field(default_factory=records.EvaluationSettings)
    outputs: records.OutputSettings = field(default_factory=records.OutputSettings)

    def refusal(self, text: str, **values: object) -> SettingsError:
        """An error whose text names flags: {steps} stands for --steps with its value.

        Args:
          text: of the error, a format string.
          **values: that it names besides flags.
        """
        flags = {name: given_flag(self, name) for name in settings_flags()}
        return SettingsError(text.format_map(flags | values))


def settings_of(**flags: object) -> Settings:
    """Settings from flags by name; other flags have their defaults."""
    return with_flags(Settings(), **flags)


def with_flags(settings: Settings, **flags: object) -> Settings:
    """The settings with some flags, by name, set to other values.

    Raises:
      TypeError: there is no flag of a name.
    """
    changes: dict[str, dict[str, object]] = {}
    for name, value in flags.items():
        if name not in settings_flags():
            raise TypeError(f"there is no flag {name!r}")
        changes.setdefault(settings_flags()[name].group, {})[name] = value
    records = {group: dataclasses.replace(getattr(settings, group), **values) for group, values in changes.items()}
    return dataclasses.replace(settings, **records)


def flag_value(settings: Settings, name: str) -> Any:
    """The value of a flag by its name."""
    return getattr(getattr(settings, settings_flags()[name].group), name)


def is_given(settings: Settings, name: str) -> bool:
    """True if a flag has another value than its default."""
    return flag_value(settings, name) != settings_flags()[name].default


def given_flag(settings: Settings, name: str) -> str:
    """A flag with its value as on a command line.

    >>> given_flag(settings_of(steps=3, fsdp=True), "steps"), given_flag(settings_of(fsdp=True), "fsdp")
    ('--steps=3', '--fsdp')
    """
    value = flag_value(settings, name)
    if value is True:
        return f"--{name}"
    return f"--{name}={NONE if value is None else str(value).removesuffix('.0')}"


def flag_values(settings: Settings) -> dict[str, object]:
    """The values of all flags by their names."""
    return {name: flag_value(settings, name) for name in settings_flags()}


@functools.cache
def settings_flags() -> Mapping[str, Flag]:
    """The flags of `Settings` by name, in their order."""
    flags = {}
    for group in dataclasses.fields(Settings):
        record: Any = group.default_factory
        hints = typing.get_type_hints(record)
        for member in dataclasses.fields(record):
            kind = value_type(hints[member.name])
            facts: dict[str, Any] = {**getattr(record, "SHARED", {}), **member.metadata, "group": group.name}
            if facts.get("requires") == member.name:  # the flag that the others of its record require
                del facts["requires"]
            flags[member.name] = Flag(member.name, member.default, kind.type, kind.optional, **facts)
    return types.MappingProxyType(flags)


@functools.cache
def flag_groups() -> Mapping[str, str]:
    """The titles of the groups of flags: the first docstring line of each record of `Settings`."""
    return {record.name: str(record.default_factory.__doc__).rstrip(".") for record in dataclasses.fields(Settings)}


def check_values(settings: Settings) -> None:
    """Check the value of each flag separately.

    Raises:
      SettingsError: for the first invalid value.
    """
    for name, flag in settings_flags().items():
        value = flag_value(settings, name)
        flag.check(value, f"--{name}={value}")
    for name in ("mesh", "generate_mesh"):
        mesh_sizes(settings, name)


def mesh_sizes(settings: Settings, name: str = "mesh") -> dict[str, int]:
    """Sizes of the mesh that a flag gives; {} for a --generate_mesh that is not given.

    Raises:
      SettingsError: its text is not a mesh.
    """
    with refusing():
        mesh = settings.devices.train if name == "mesh" else settings.devices.generate
    return {} if mesh is None else mesh.sizes


def reward_timeout_of(settings: Settings) -> float:
    """Seconds that a reward function may take in a worker."""
    seconds = settings.rewards.reward_timeout
    return REWARD_TIMEOUT_S if seconds is None else seconds


def scoring_budget(settings: Settings) -> int:
    """Tokens of a micro-batch in passes without learning; a longer row raises it.

    A forward pass without a gradient holds the activations of one layer: by the dry run, 99 kB per token for a 70B on
    tp8, 111 for an 8B and 62 for a 1B. An update that saves only the input of each layer takes 1,580, 525 and 200.
    """
    return settings.updates.score_token_budget or SCORE_BUDGETS * settings.updates.token_budget


def for_kind(settings: Settings, kind: str) -> Settings:
    """The settings for a kind of run: flags that do not apply to it get a neutral value."""
    idle = {name: flag.without for name, flag in settings_flags().items() if kind not in flag.kinds}
    return with_flags(settings, **idle)


def refuse_beside(settings: Settings, name: str) -> None:
    """Refuse a flag that does not go together with another one. Raises: SettingsError."""
    for other, reason in settings_flags()[name].unless.items():
        if flag_value(settings, other) not in (None, False):
            problem = f"with {{{other}}}: {reason}" if reason else f"does nothing together with {{{other}}}"
            raise settings.refusal(f"{{{name}}} {problem}; leave one of them out")


def check_needs(settings: Settings, **parts: object) -> None:
    """Refuse flags that do nothing in a run.

    Args:
      **parts: of `PARTS_NEEDED`, each with whether the run has it; needs of others are not checked.

    Raises:
      SettingsError: the first given flag that needs a part which the run does not have.
    """
    for name, flag in settings_flags().items():
        absent = [need for need in flag.needs if not parts.get(need, True)]
        if absent and flag_value(settings, name) not in (flag.default, flag.without, 0):
            raise settings.refusal(f"{{{name}}} does nothing without {PARTS_NEEDED[absent[0]]}; leave it out")
