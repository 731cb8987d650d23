"""Programs in several attempts: reports of failed tests, from the sandbox."""

import pytest

from funrl.data.prompts import Example
from funrl.environments.builtin.programs import LONGEST_REPORT, ProgramOutcome, program_attempts, programs, run_tests

TESTS = ["assert f(2) == 4", "assert f('ab') == 'abab'", "assert f(1) < 3"]


@pytest.mark.parametrize(
    "program,report",
    [
        ("f = lambda x: x + x", ""),
        ("f = lambda x: x * x", "f('ab') raises TypeError(\"can't multiply sequence by non-int of type 'str'\")"),
        ("f = lambda x: x", "f(2) gives 2, not 4"),
        ("f = lambda x: x + x if x != 1 else 9", "assert f(1) < 3 fails"),
        ("f = lambda x: (", "SyntaxError: '(' was never closed"),
        ("f = lambda x: open('/etc/passwd').read()", "f(2) raises PermissionError"),
        ("print('test 0: ' + 'x' * 5000)\nf = 3", "f(2) raises TypeError"),
        ("import os\nos._exit(3)", "exit status 3"),
    ],
)
def test_the_report_is_that_of_the_first_test_that_fails(program, report):
    tested = run_tests(program, TESTS)
    assert tested.passed == (report == "") and tested.report.startswith(report)
    assert len(tested.report) <= LONGEST_REPORT


def test_a_failed_test_goes_back_and_a_fenced_program_is_read():
    ran = []

    def run(program, sources):
        ran.append((program, list(sources)))
        return ProgramOutcome("x+x" in program, "f(2) gives 2, not 4")

    environment = program_attempts(run, attempts=3)
    environment.reset(Example([], "Double.", {"tests": TESTS}), 0)
    first = environment.step({"role": "assistant", "content": "f = lambda x: x"})
    assert first == ([{"role": "user", "content": "f(2) gives 2, not 4"}], 0.0, False)
    assert environment.step({"role": "assistant", "content": "So:\n```python\nf = lambda x: x+x\n```"})[1:] == (
        1.0,
        True,
    )
    assert ran[1] == ("f = lambda x: x+x\n", TESTS)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="attempts=0"):
        programs(attempts=0)
    environment = program_attempts(run_tests, attempts=3)
    environment.reset(Example([], "Double.", {"tests": {"inputs": ["1"], "outputs": ["2"]}}), 0)
    with pytest.raises(ValueError, match="are source texts"):
        environment.step({"role": "assistant", "content": "print(2)"})
