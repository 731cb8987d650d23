"""Programs in several attempts: reports of failed tests, from the sandbox; the task of functions."""

import threading
from concurrent.futures import ThreadPoolExecutor

import env_programs as p
import pytest
from env_programs import LONGEST_REPORT, ProgramOutcome, program_attempts, programs, run_tests

from funrl.data.prompts import Example

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


def test_one_value_has_two_explanations_and_two_values_mostly_one():
    results = [{"role": "user", "content": "f([7,2,5])==5"}]
    assert p.explanations(results) == ["f=lambda x:x[2]", "f=lambda x:sorted(x)[1]"]
    two = [*results, {"role": "assistant"}, {"role": "user", "content": "f([1,8,4]) gives 4, not 8"}]
    assert p.explanations(two) == []
    assert p.explanations([*results, {"role": "user", "content": "f([1,4,8]) gives 8, not 4"}]) == [
        "f=lambda x:sorted(x)[1]"
    ]


def outcome(program, tests):
    return p.tested(p.known_values(program), tests)


@pytest.mark.parametrize("program", ["f=lambda x:x[1]", "f=lambda x:min(x)"])
def test_the_demonstrator_s_reports_are_those_of_the_sandbox(program):
    assert p.sandbox_values(program) == p.known_values(program)
    for prompt in p.problems_of_programs(3, 1):
        assert outcome(program, prompt.fields["tests"]) == run_tests(program, prompt.fields["tests"])


def test_a_program_has_the_values_that_it_gives_in_the_sandbox():
    tests = ["assert f([7,2,5]) == 7", "assert f([2,7,5]) == 2"]
    assert p.tested(p.sandbox_values("f=lambda x:[x][0]"), tests) == ProgramOutcome(
        False, "f([7,2,5]) gives [7, 2, 5], not 7"
    )
    sometimes = p.sandbox_values("f=lambda x:[7,x[0]][x[0]-6]")  # which only 4, 5, 6 and 7 have
    assert len(sometimes) == 4 * 72 and sometimes["f([7,2,5])"] == "7"
    assert p.tested(sometimes, tests) == ProgramOutcome(False, "f([2,7,5]) fails")
    assert p.sandbox_values("f=lambda x:x]") == {}


def test_a_program_runs_once_and_an_error_is_not_kept(monkeypatch):
    runs = []
    begun = threading.Barrier(2, timeout=10)

    def run(program):
        runs.append(program)
        if program == "broken" and runs.count(program) == 1:
            raise OSError("no process")
        if program in ("a", "b"):
            begun.wait()  # the two run at the same time
        return {"f": program}

    monkeypatch.setattr(p, "sandbox_values", run)
    cache = p.SandboxCache(2)
    with ThreadPoolExecutor(6) as pool:
        assert [v["f"] for v in pool.map(cache.values, "ababab")] == list("ababab")
    assert sorted(runs) == ["a", "b"]
    with pytest.raises(OSError):
        cache.values("broken")
    assert cache.values("broken") == {"f": "broken"} and len(runs) == 4
    monkeypatch.setattr(p, "KEPT_PROGRAMS", 2)
    for program in "cdc":
        cache.values(program)
    assert runs.count("c") == 1 and list(cache._values) == ["d", "c"]


def test_programs_pass_their_tests_and_the_demonstrator_mostly_fails():
    for prompt in p.problems_of_programs(0, 200):
        assert outcome(prompt.fields["program"], prompt.fields["tests"]).passed
    replies = [[m["content"] for m in r["messages"][1::2]] for r in p.program_conversations(0, 1000)]
    solved = [
        outcome(x[-1], prompt.fields["tests"]).passed
        for x, prompt in zip(replies, p.problems_of_programs(0, 1000), strict=True)
    ]
    assert 0.4 < sum(solved) / len(solved) < 0.65
    repeated = [len(set(x)) == 1 for x in replies if len(x) > 1]
    assert sum(repeated) / len(repeated) > 0.7
