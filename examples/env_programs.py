"""Programs in several attempts: what a failed test says goes back to the policy, which writes the program again.

`programs` is for any model and records with tests. `functions` is a task for a small decoder: functions of three
numbers, of which one value is shown.

    user       f([7,2,5])==5
    assistant  f=lambda x:x[2]
    user       f([1,8,4]) gives 4, not 8        (from the sandbox)
    assistant  f=lambda x:sorted(x)[1]

    python examples/env_programs.py PROGRAMS   # writes its files; docs/example_environments.md has what follows

One value has two explanations, a place and a rank; a failed test leaves one. The demonstrator mostly writes its program
again, and often one that does not even explain the value. The sandbox runs each different program once, on all lists
that tests may have, for to start an interpreter takes longer than anything else of an episode.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from env_retry import Retry, ScoredAnswer
from task_files import CONVERSATIONS, Task, demonstrated, write_files

from funrl.data.prompts import Example, Prompt
from funrl.environments.adapters import message_environment
from funrl.environments.environment import Environment
from funrl.rewards.sandbox import check_platform, run_program
from funrl.rewards.unit_tests import check_tests, program_of, read_tests
from funrl.rollout.episodes import Message
from funrl.tasks.arithmetic import Split

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
HELD_OUT_VALUES = 7  # shown lists whose digit sum it divides are held out
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
LONGEST_REPORT = 1000  # characters
_processes = threading.Semaphore(os.cpu_count() or 1)  # more at once would run into their limits of time


class ProgramOutcome(NamedTuple):
    """Outcome of a program's tests.

    Attributes:
      passed: whether all of them pass.
      report: of the first one that fails, or of what ended the program; "" if all pass.
    """

    passed: bool
    report: str


RunTests = Callable[[str, Sequence[str]], ProgramOutcome]  # (program, source texts of its tests)


def programs(attempts: int = 3) -> Environment:
    """An environment in which the policy writes a program, and again after a failed test, whose report it reads.

    The tests are source texts in a record's field, as for --reward=code: ["assert f(2) == 4", ...]. They run in the
    sandbox. The reward of an episode is 1 if all tests pass at last, else 0.

    Args:
      attempts: programs that the policy may write, at least 1.

    Raises:
      ValueError: there is no attempt.
      SandboxError: programs cannot be confined on this machine.
    """
    if attempts < 1:
        raise ValueError(f"attempts={attempts}: the policy needs at least 1")
    check_platform()
    return program_environment(run_tests, attempts)


def program_environment(run: RunTests, attempts: int) -> Environment:
    """As `programs`, whose tests a function runs."""
    return message_environment(lambda: program_attempts(run, attempts))


def program_attempts(run: RunTests, attempts: int) -> Retry:
    """The other side of one episode."""

    def verify(example: Example, answer: str) -> ScoredAnswer:
        check_tests(example.fields)
        sources = read_tests(example.fields).sources
        if not sources:
            raise ValueError("tests of a program's episodes are source texts, such as 'assert f(2) == 4'")
        tested = run(program_of(example.text, answer, example.fields), sources)
        return ScoredAnswer(float(tested.passed), tested.report)

    return Retry(verify, attempts)


def run_tests(program: str, sources: Sequence[str]) -> ProgramOutcome:
    """Run a program's tests in the sandbox.

    >>> run_tests("double = lambda x: x * x", ["assert double(2) == 4", "assert double(3) == 6"]).report
    'double(3) gives 9, not 6'
    """
    with _processes:
        ended = run_program(program, [_reporting(n, source) for n, source in enumerate(sources)])
    failed = next((n for n in range(len(sources)) if n not in ended.passed), None)
    if failed is None:
        return ProgramOutcome(True, "")
    mark = _mark(failed)
    reports = [line.removeprefix(mark) for line in ended.stdout.splitlines() if line.startswith(mark)]
    errors = ended.stderr.strip().splitlines()
    report = reports[-1] if reports else errors[-1] if errors else ended.problem or f"{sources[failed]} fails"
    return ProgramOutcome(False, report[:LONGEST_REPORT])


def _mark(number: int) -> str:
    return f"test {number}: "


def _reporting(number: int, source: str) -> str:
    """A test that also prints what is wrong: of an equality both sides, of another one its source text."""
    sides = _sides(source)
    if sides is None:
        indented = "".join(f"    {line}\n" for line in source.splitlines())
        what = source.strip()
        body = f"try:\n{indented}except AssertionError:\n    print({_mark(number) + what!r}, 'fails')\n    raise\n"
    else:
        what, right = sides
        body = (
            f"_given = ({what})\n_wanted = ({right})\n"
            "if _given != _wanted:\n"
            f"    print({_mark(number) + what!r}, 'gives', repr(_given) + ', not', repr(_wanted))\n"
            "    raise AssertionError\n"
        )
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    return (
        f"try:\n{indented}except AssertionError:\n    raise\nexcept Exception as _error:\n"
        f"    print({_mark(number) + what!r}, 'raises', repr(_error))\n    raise\n"
    )


def _sides(source: str) -> tuple[str, str] | None:
    """Source texts of the two sides of a test such as "assert f(2) == 4" on one line; None: it is another one."""
    statements = ast.parse(source).body
    if len(statements) != 1 or "\n" in source.strip():
        return None
    match statements[0]:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            given = ast.get_source_segment(source, left)
            wanted = ast.get_source_segment(source, right)
            return None if given is None or wanted is None else (given, wanted)
    return None


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
        """Allow at most `running` programs at a time."""
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


def functions() -> Environment:
    """Functions in at most `PROGRAM_ATTEMPTS` attempts, of which as many run at a time as there are cores."""
    cache = SandboxCache(os.cpu_count() or 1)
    return program_environment(lambda program, tests: tested(cache.values(program), tests), PROGRAM_ATTEMPTS)


def _problem(lists: Sequence[Sequence[int]], program: str) -> Prompt:
    """The value of a program for the first list, to explain."""
    values = [FUNCTIONS[program](x) for x in lists]
    tests = [f"assert {_call(x)} == {value}" for x, value in zip(lists, values, strict=True)]
    return Prompt(
        [{"role": "user", "content": f"{_call(lists[0])}=={values[0]}"}], {"tests": tests, "program": program}
    )


def _call(numbers: Sequence[Any]) -> str:
    return f"f([{','.join(map(str, numbers))}])"


def task(conversations: int = CONVERSATIONS) -> Task:
    """The task of functions."""
    heldout = {str(prompt.prompt): prompt for prompt in problems_of_programs(0, 1024, "heldout")}
    return Task(
        PROGRAM_ALPHABET,
        PROGRAM_WORDS,
        vocab=32,  # 29 are used
        positions=128,
        prompts=problems_of_programs(0, PROBLEMS),
        heldout=list(heldout.values()),
        demonstrations=program_conversations(0, conversations),
    )


if __name__ == "__main__":
    write_files(task(), sys.argv[1])
