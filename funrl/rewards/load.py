"""Users' reward functions and verifiers: load them by name, and check them against the fields of the prompts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence

from funrl import loading
from funrl.rewards.call import (
    BATCH_ARGUMENTS,
    BY_NAME,
    Reward,
    RewardError,
    RewardFunction,
    describe_function,
    named_fields,
    reward_functions,
    torch_state_kept,
)
from funrl.rewards.named import VERIFIERS, NamedReward, parse_rewards
from funrl.rewards.sandbox import SandboxError, check_platform


def load_rewards(text: str) -> tuple[RewardFunction, ...]:
    """Load the functions in a text such as "FILE.py:f,format@0.1"; `parse_rewards` gives their weights.

    Raises:
      LoadError: as in `loading.load_function` and `parse_rewards`; or a verifier's library is not installed.
    """
    with torch_state_kept():
        return reward_functions([_loaded(named) for named in parse_rewards(text)])


def _loaded(named: NamedReward) -> RewardFunction:
    verifier = VERIFIERS.get(named.source)
    if verifier is None:
        needs = next((known.fields for known in VERIFIERS.values() if known.source == named.source), ())
        return describe_function(loading.load_function("reward", named.source), named.name, needs)
    check = loading.load_function("reward", verifier.check) if verifier.check else None
    if verifier.package:
        try:
            importlib.import_module(verifier.package)  # once, before ranks and workers are forked
        except ImportError as error:
            raise loading.LoadError(
                f"--reward={named.source} needs {verifier.package.replace('_', '-')} ({error}): "
                f"pip install 'funrl[{verifier.extra}]'"
            ) from error
    if named.source == "code":
        try:
            check_platform()
        except SandboxError as error:
            raise loading.LoadError(f"--reward=code: {error}") from error
    described = describe_function(loading.load_function("reward", verifier.source), named.name, verifier.fields)
    return described._replace(check=check)


def check_fields(
    text: str, reward: Reward, fields: Sequence[Mapping[str, object]], sources: Sequence[str] | None = None
) -> None:
    """Raise RewardError if a prompt has a field that a function does not take, or lacks one that it needs.

    Args:
      text: value of the flag, or name of the function, for errors.
      reward: the function.
      fields: for every prompt, the fields of its record.
      sources: of every prompt, its file and line or row, for errors; None: unknown.
    """
    (described,) = reward_functions([reward])
    checked: set[tuple[str, ...]] = set()
    for number, record in enumerate(fields):
        names = tuple(sorted(record))
        source = "" if sources is None else sources[number]
        if names not in checked:
            checked.add(names)
            missing = next((group for group in described.needs if not set(group) & set(names)), None)
            if missing is not None:
                raise RewardError(
                    f"--reward={text}: {described.name} needs {_wanted(missing)}, and {source or 'a prompt'} has "
                    f"{', '.join(names) or 'none'}; --fields=NEW:OLD renames columns"
                )
            if described.takes or not described.keywords:  # one written in C does not say
                _check_call(text, described, names)
        if problem := _value_problem(described, record):
            raise RewardError(
                f"--reward={text}: {source and f'{source}: '}{problem}; correct the record, or leave it out"
            )


def _value_problem(reward: RewardFunction, record: Mapping[str, object]) -> str:
    """The reason why a function cannot use the values of a record; "" if it can."""
    for group in reward.needs:
        if all(record.get(name) is None for name in group):
            named = ", ".join(f"{name!r}" for name in group if name in record)
            return f"{reward.name} needs {_wanted(group)}, and {named} is null"
    if reward.check is None:
        return ""
    try:
        reward.check(record)
    except ValueError as error:
        shown = {name: value for name, value in record.items() if any(name in group for group in reward.needs)}
        return f"{error}; it has {str(shown)[:300]}" if shown else str(error)
    return ""


def _wanted(group: Sequence[str]) -> str:
    return f"a field {group[0]!r}" if len(group) == 1 else f"one of the fields {', '.join(group)}"


def _check_call(text: str, reward: RewardFunction, names: Sequence[str]) -> None:
    """Check that a function can be called with the fields of a prompt."""
    clash = sorted(set(names) & set(BATCH_ARGUMENTS)) if reward.batched else []
    if clash:
        raise RewardError(
            f"--reward={text}: it takes lists of {', '.join(BATCH_ARGUMENTS)}, but a prompt has a field {clash[0]!r} "
            f"too; --fields=NEW:{clash[0]} renames it"
        )
    signature = inspect.signature(reward.function)
    try:
        if reward.batched:
            columns = {*BATCH_ARGUMENTS, *names}
            signature.bind(**dict.fromkeys(columns if reward.keywords else columns & reward.takes))
        elif BY_NAME in reward.takes:
            signature.bind(**named_fields(reward, {BY_NAME: "", **dict.fromkeys(names)}))
        else:
            signature.bind("", "", **dict.fromkeys(names))
    except TypeError as error:
        given = [f"{name}=[...]" for name in (*BATCH_ARGUMENTS, *names)] if reward.batched else []
        call = ", ".join(given or ("prompt", "completion", *(f"{n}=..." for n in names)))
        raise RewardError(f"--reward={text}: the prompts' fields make the call ({call}), but it has {error}") from error
