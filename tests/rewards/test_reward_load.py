"""Rewards by name: functions of files, verifiers, weights, and what does not fit the prompts."""

import functools
import re
import sys
from pathlib import Path

import pytest

from funrl.loading import LoadError
from funrl.rewards import load
from funrl.rewards.call import RewardError, describe_function
from funrl.rewards.load import check_fields, load_rewards
from funrl.rewards.named import VERIFIERS, parse_rewards
from funrl.rewards.sandbox import SandboxError
from funrl.trainer.settings.checks import weights_of_rewards
from funrl.trainer.settings.settings import settings_of


def test_several_functions_of_a_file(tmp_path):
    (tmp_path / "two.py").write_text("def a(p, c):\n    return 1\n\ndef b(p, c):\n    return 2\n")
    a, b, exact = load_rewards(f"{tmp_path}/two.py:a, {tmp_path}/two.py:b@0.5,exact")
    assert (a("", ""), b("", "")) == (1, 2) and a.function.__globals__ is b.function.__globals__
    assert exact("", "2", answer=2) == 1.0 and [item.name for item in (a, b, exact)] == ["a", "b", "exact"]


def test_names_weights_and_what_is_neither_a_file_nor_a_verifier():
    result = parse_rewards("a@b.py:f@-0.5,math@1e-1,own.rewards:f,x/own.rewards:f")
    assert [(item.source, item.weight) for item in result] == [
        ("a@b.py:f", -0.5),
        ("math", 0.1),
        ("own.rewards:f", None),
        ("x/own.rewards:f", None),
    ]
    assert [element.name for element in result] == ["a@b.f", "math", "rewards.f", "rewards.f.2"]
    for text, weights in (
        ("math,format", (1.0, 1.0)),
        ("math@2,format@0.25", (2.0, 0.25)),
        ("math@2,format", (2.0, 1.0)),
    ):
        assert weights_of_rewards(settings_of(reward=text), 2) == weights
    for text in ("r.py", "maths", "", "math,,format"):
        with pytest.raises(
            LoadError, match=rf"--reward={text}: '.*' is not a verifier \(exact, .*write FILE.py:function"
        ):
            parse_rewards(text)
    for text in ("math@", "math@x", "math@inf"):
        with pytest.raises(LoadError, match=rf"--reward={text}: the weight '.*' is not a finite number"):
            parse_rewards(text)


@pytest.mark.parametrize("name", VERIFIERS)
def test_every_verifier_loads_or_says_what_to_install(name, monkeypatch):
    library, extra = VERIFIERS[name].package, VERIFIERS[name].extra
    if library:
        with monkeypatch.context() as without:
            without.setitem(sys.modules, library, None)
            with pytest.raises(LoadError, match=rf"--reward={name} needs .*: pip install 'funrl\[{extra}\]'"):
                load_rewards(name)
        pytest.importorskip(library)
    (reward,) = load_rewards(name)
    assert reward.name == name and reward.needs == VERIFIERS[name].fields and not reward.batched and not reward.awaited


def test_the_page_names_every_verifier():
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| [a-z(]", page.partition("## Verifiers")[2], re.MULTILINE) == list(VERIFIERS)


def test_programs_are_refused_where_they_cannot_be_confined(monkeypatch):
    monkeypatch.setattr(load, "check_platform", check_nothing)
    with pytest.raises(LoadError, match="--reward=code: only elsewhere"):
        load_rewards("code")


def check_nothing():
    raise SandboxError("only elsewhere")


def says(function, fields, needs=()):
    with pytest.raises(RewardError) as caught:
        check_fields("r.py:f", describe_function(function, "f", needs), fields)
    return str(caught.value)


def test_fields_that_do_not_fit_a_function_are_told_before_the_run():
    check_fields("f", lambda prompt, completion, answer: 0, [{"answer": 1}])
    check_fields("f", lambda completions, answer: 0, [{"answer": 1, "level": 2}])
    check_fields("f", lambda prompts, completions, completion_ids, **columns: 0, [{"answer": 1}])
    assert "missing a required argument: 'answer'" in says(lambda p, c, answer: 0, [{"answer": 1}, {}])
    assert "unexpected keyword argument 'level'" in says(lambda p, c: 0, [{"level": 1}])
    missing = says(lambda completions, answer, **columns: 0, [{"level": 1}])
    assert "(prompts=[...], completions=[...], completion_ids=[...], level=[...])" in missing
    assert "missing a required argument: 'answer'" in missing
    assert "a field 'prompts' too; --fields=NEW:prompts" in says(lambda completions, **columns: 0, [{"prompts": 1}])
    wanted = says(lambda p, c, **f: 0, [{"x": 1}], (("answer", "solution"),))
    assert wanted.startswith(
        "--reward=r.py:f: f needs one of the fields answer, solution, and a prompt has x; --fields"
    )
    assert re.search("f needs a field 'pattern', and a prompt has none", says(len, [{}], (("pattern",),)))


def test_values_are_checked_and_the_row_is_named():
    for name, record, message in (
        (
            "exact",
            {"answer": None},
            "exact needs one of the fields answer, solution, ground_truth, and 'answer' is null",
        ),
        ("exact", {"answer": [4]}, r"the right answer is list \[4\], neither text nor a number"),
        ("exact", {"answer": float("nan")}, "the right answer is nan, not a finite number"),
        ("gsm8k", {"answer": "none"}, "there is no number in the right answer 'none'"),
        ("math", {"solution": " "}, "there is no formula in the right answer ' '"),
        ("boxed", {"answer": r"\boxed{}"}, "there is no formula in the right answer"),
        ("choice", {"answer": "BB", "choices": None}, "'BB' is no letter"),
        ("countdown", {"target": None, "nums": [1]}, "countdown needs a field 'target', and 'target' is null"),
        ("countdown", {"target": 4, "nums": [1, "x"]}, "must be numbers; 'x' is not"),
        ("json", {"schema": "{"}, "the field 'schema' is not a JSON schema"),
        ("length", {"min_words": None, "max_words": "3"}, "the field 'max_words' is a number of words, not '3'"),
        ("regex", {"pattern": None}, "regex needs a field 'pattern', and 'pattern' is null"),
        ("code", {"tests": None}, "code needs one of the fields tests,.* and 'tests' is null"),
    ):
        for package in (VERIFIERS[name].package,):
            if package:
                pytest.importorskip(package)
        (reward,) = load_rewards(name)
        good = {"exact": {"answer": 1}, "choice": {"answer": "A"}}.get(name)
        fields = [record] if good is None else [good, record]
        sources = ["a.jsonl, line 1", "a.jsonl, line 2"][: len(fields)]
        with pytest.raises(RewardError, match=rf"--reward={name}: {sources[-1]}: .*{message}.*; correct the record"):
            check_fields(name, reward, fields, sources)


def test_nulls_that_some_records_have_are_as_if_they_were_not_there():
    pytest.importorskip("jsonschema")
    for name, records in (
        ("choice", [{"answer": "A", "choices": ["x"]}, {"answer": "B", "choices": None}]),
        ("exact", [{"answer": 1, "solution": None}, {"answer": None, "solution": "2"}]),
        ("json", [{"schema": {}}, {"schema": None}]),
        ("countdown", [{"target": 1, "nums": [1], "numbers": None}, {"target": 1, "nums": None, "numbers": [1]}]),
        ("length", [{"min_words": 1, "max_words": None}]),
    ):
        (reward,) = load_rewards(name)
        check_fields(name, reward, records)
        assert {reward("", "1", **record) for record in records} <= {0.0, 1.0}


def yields(prompt, completion):
    yield 0.5


async def yields_later(prompt, completion):
    yield 0.5


class Yielding:
    def __call__(self, prompt, completion):
        yield 0.5


@pytest.mark.parametrize("function", [yields, yields_later, Yielding(), functools.partial(yields, "")])
def test_generators_are_refused_before_the_run(function):
    with pytest.raises(RewardError, match="is a generator, as it has a yield: it must return its number"):
        describe_function(function, "f")
