"""An embedded task of programs in several attempts: functions of three numbers, of which one value is shown.

    user       f([7,2,5])==5
    assistant  f=lambda x:x[2]
    user       f([1,8,4]) gives 4, not 8        (from the sandbox)
    assistant  f=lambda x:sorted(x)[1]

One value has two explanations, a place and a rank; a failed test leaves one. The demonstrator mostly writes its program
again, and often one that does not even explain the value. The sandbox runs each different program once, on all lists
that tests may have, for to start an interpreter takes longer than anything else of an episode.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from funrl.data.prompts import Prompt
from funrl.environments.builtin.programs import ProgramOutcome, program_attempts, program_environment
from funrl.rewards.sandbox import run_program
from funrl.tasks.arithmetic import Split
from funrl.tasks.conversations import (
    CONVERSATIONS,
    IMITATION_FLAGS,
    IMITATION_STEPS,
    chat_model,
    chat_tokenizer,
    demonstrated,
    has_chat_tokenizer,
    user_prompt,
)
from funrl.tasks.task import EmbeddedTask

if TYPE_CHECKING:
    from funrl.environments.environment import Environment
    from funrl.rollout.episodes import Message

PROGRAM_BEGIN = "f=lambda x:"
FUNCTIONS = {  # program -> its value
    f"{PROGRAM_BEGIN}x[0]": lambda x: x[0],
    f"{PROGRAM_BEGIN}x[1]": lambda x: x[1],
    f"{PROGRAM_BEGIN}x[2]": lambda x: x[2],
    f"{PROGRAM_BEGIN}min(x)": min,
    f"{PROGRAM_BEGIN}sorted(x)[1]": lambda x: sorted(x)[1],
    f"{PROGRAM_BEGIN}max(x)": max,
}
PROGRAM_ALPHABET = "0123456789,x[])?"
PROGRAM_WORDS = (PROGRAM_BEGIN, "min(", "max(", "sorted(", "f([", "])==", "]) gives ", ", not ")
PROGRAM_ATTEMPTS = 3
PROGRAM_TESTS = 5  # of a program; the first one is shown
PROBLEMS = 4096  # to train on
USING_REPORTS = 0.2  # share of the conversations that use the reports of failed tests
GUESSING = 0.5  # share of the other ones that begin with a random program
HELD_OUT_VALUES = 7  # of the shown lists those whose digits have a sum of which this is a divisor are held out
LISTS = tuple(itertools.permutations(range(10), 3))  # that tests have
KEPT_PROGRAMS = 1024  # whose values are remembered
LONGEST_VALUE = 12  # characters of a value in a report
_PRINT_VALUES = f"""
import itertools
for _x in itertools.permutations(range(10), 3):
    try:
        _value = repr(f(list(_x)))
    except Exception:
        continue
    print(*_x, _value[:{LONGEST_VALUE}])
"""
_SHOWN = re.compile(r"f\(\[(\d),(\d),(\d)\]\)")


def problems_of_programs(seed: int, count: int, split: Split = "train") -> list[Prompt]:
    """Values to explain, with the tests and the program in fields; the two splits show no list in common."""
    rng = np.random.default_rng((seed, 6))
    candidates = 2 * HELD_OUT_VALUES * count
    lists = rng.random((candidates, PROGRAM_TESTS, 10)).argsort(-1)[..., :3]
    programs = rng.integers(len(FUNCTIONS), size=candidates)
    chosen = np.flatnonzero((lists[:, 0].sum(1) % HELD_OUT_VALUES == 0) == (split == "heldout"))[:count]
    return [_problem(lists[n].tolist(), list(FUNCTIONS)[programs[n]]) for n in chosen]


def explanations(messages: Sequence[Message]) -> list[str]:
    """Programs that give all the values that a conversation names."""
    values = []
    for message in messages:
        if message["role"] == "user":
            given = [int(digit) for digit in _SHOWN.match(message["content"]).groups()]  # type: ignore[union-attr]
            values.append((given, int(message["content"][-1])))
    return [name for name, function in FUNCTIONS.items() if all(function(x) == value for x, value in values)]


def tested(values: Mapping[str, str], sources: Sequence[str]) -> ProgramOutcome:
    """Outcome of tests such as "assert f([7,2,5]) == 5".

    Args:
      values: text of a program's value by the text of the call; a call without one raises.
      sources: the tests.
    """
    for source in sources:
        call, _, wanted = source.removeprefix("assert ").partition(" == ")
        if call not in values:
            return ProgramOutcome(False, f"{call} fails")
        if values[call] != wanted:
            return ProgramOutcome(False, f"{call} gives {values[call]}, not {wanted}")
    return ProgramOutcome(True, "")


@functools.cache
def known_values(program: str) -> Mapping[str, str]:
    """Values of one of `FUNCTIONS`, as the sandbox has them."""
    return {_call(x): repr(FUNCTIONS[program](list(x))) for x in LISTS}


def sandbox_values(program: str) -> Mapping[str, str]:
    """Values of a program's function `f` for `LISTS`, computed in the sandbox."""
    lines = [line.split(" ", 3) for line in run_program(program, [_PRINT_VALUES]).stdout.splitlines()]
    calls = {_call(x) for x in LISTS}
    values = {_call(line[:3]): line[3] for line in lines if len(line) == 4}
    return {call: value for call, value in values.items() if call in calls}


class SandboxCache:
    """Values of programs. The sandbox runs a program again only after an error, or when it was forgotten."""

    def __init__(self, running: int):
        """Let at most `running` programs run at a time."""
        self._slots = threading.Semaphore(running)
        self._guard = threading.Lock()
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._values: OrderedDict[str, Mapping[str, str]] = OrderedDict()

    def values(self, program: str) -> Mapping[str, str]:
        """As `sandbox_values`."""
        with self._guard:
            lock = self._locks.setdefault(program, threading.Lock())
        with lock:
            values = self._values.get(program)
            if values is None:
                with self._slots:
                    values = sandbox_values(program)
            with self._guard:
                self._values[program] = values
                self._values.move_to_end(program)
                while len(self._values) > KEPT_PROGRAMS:
                    self._values.popitem(last=False)
        return values


def program_conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations of a demonstrator that uses reports in a share of them, and else writes its program again."""
    rng = np.random.default_rng((seed, 7))
    records = []
    for prompt in problems_of_programs(seed, count):
        uses = rng.random() < USING_REPORTS
        guesses = not uses and rng.random() < GUESSING
        choice = rng.random(PROGRAM_ATTEMPTS)

        def reply(
            messages: Sequence[Message],
            uses: bool = uses,
            guesses: bool = guesses,
            choice: np.ndarray = choice,
        ) -> str:
            number = len(messages) // 2
            if number and not uses:
                return messages[-2]["content"]
            candidates = list(FUNCTIONS) if guesses else explanations(messages)
            return candidates[int(choice[number] * len(candidates))]

        attempts = program_attempts(lambda program, tests: tested(known_values(program), tests), PROGRAM_ATTEMPTS)
        records.append({"messages": demonstrated(attempts, prompt, reply)})
    return records


def programs_task() -> EmbeddedTask:
    """Programs in several attempts."""
    return EmbeddedTask(
        name="programs",
        training_prompts=lambda seed: problems_of_programs(seed, PROBLEMS),
        heldout_prompts=_heldout_prompts,
        reward=None,
        demonstrations=program_conversations,
        texts={"demonstrations": _right_texts},
        tokenizer=lambda: chat_tokenizer(PROGRAM_ALPHABET, PROGRAM_WORDS),
        is_its_tokenizer=_has_tokenizer,
        model_config=lambda head: chat_model(head, vocab=32, positions=128),  # 29 are used
        max_new_tokens=8,
        warmstart_steps=IMITATION_STEPS,
        warmstart_demonstrations=CONVERSATIONS,
        warmstart_flags=IMITATION_FLAGS,
        demonstration_field="program",
        readable=None,
        environment=_environment,
    )


def _environment() -> Environment:
    """Programs in at most `PROGRAM_ATTEMPTS` attempts, of which as many run at a time as there are cores."""
    cache = SandboxCache(os.cpu_count() or 1)
    return program_environment(lambda program, tests: tested(cache.values(program), tests), PROGRAM_ATTEMPTS)


def _problem(lists: Sequence[Sequence[int]], program: str) -> Prompt:
    """The value of a program for the first list, to explain."""
    values = [FUNCTIONS[program](x) for x in lists]
    tests = [f"assert {_call(x)} == {value}" for x, value in zip(lists, values, strict=True)]
    return user_prompt(f"{_call(lists[0])}=={values[0]}", tests=tests, program=program)


def _call(numbers: Sequence[Any]) -> str:
    return f"f([{','.join(map(str, numbers))}])"


def _heldout_prompts(count: int) -> list[Prompt]:
    prompts = {str(prompt.prompt): prompt for prompt in problems_of_programs(0, 4 * count, "heldout")}
    return list(prompts.values())[:count]


def _right_texts(seed: int, count: int, split: Split = "train") -> list[tuple[Any, str]]:
    return [(prompt.prompt, prompt.fields["program"]) for prompt in problems_of_programs(seed, count, split)]


def _has_tokenizer(folder: str | Path) -> bool:
    return has_chat_tokenizer(folder, PROGRAM_ALPHABET, PROGRAM_WORDS)
