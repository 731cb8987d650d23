"""Programs in several attempts: what a failed test says goes back to the policy, which writes the program again."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.environments.adapters import message_environment
from funrl.environments.builtin.retry import Retry, ScoredAnswer
from funrl.environments.environment import Environment
from funrl.rewards.sandbox import check_platform, run_program
from funrl.rewards.unit_tests import check_tests, program_of, read_tests

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
