"""The embedded task of programs: its explanations, its demonstrator, and the sandbox."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from funrl.environments.builtin.programs import ProgramOutcome, run_tests
from funrl.tasks import programs as p


def test_one_value_has_two_explanations_and_two_values_mostly_one():
    one = [{"role": "user", "content": "f([7,2,5])==5"}]
    assert p.explanations(one) == ["f=lambda x:x[2]", "f=lambda x:sorted(x)[1]"]
    two = [*one, {"role": "assistant"}, {"role": "user", "content": "f([1,8,4]) gives 4, not 8"}]
    assert p.explanations(two) == []
    assert p.explanations([*one, {"role": "user", "content": "f([1,4,8]) gives 8, not 4"}]) == [
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
