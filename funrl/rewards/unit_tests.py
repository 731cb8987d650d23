"""Rewards of programs by their unit tests, which run in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from funrl.rewards.answers import last_fenced
from funrl.rewards.named import TESTS
from funrl.rewards.sandbox import LIMITS, Limits, run_program
from funrl.rewards.views import ANSWER, read_as


class UnitTests(NamedTuple):
    """Tests of a program.

    Attributes:
      sources: source texts that run after the program, each a test.
      pairs: (input, expected output), each a test.
    """

    sources: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()


def unit_tests(share: bool = False, limits: Limits = LIMITS) -> Callable[..., float]:
    """A reward of 1.0 for a program that passes all its tests, or, with `share`, the share of tests that pass.

    The program is the completion's last fenced block of Python (`python`, `py`, `python3`), else the last one without a
    word, else the whole completion. If a field "entry_point" names a function that the program lacks, the program
    continues the prompt.

    The tests are the first of the fields "tests", "test_list", "test_cases", "test" and "ground_truth" that the record
    has: Python text; a list of such texts, each a test, such as "assert f(2) == 4"; or {"inputs": [...], "outputs":
    [...]}, input and expected output of a script, compared without blanks at ends of lines. Either may be JSON text. A
    "test" that defines `check` is called with the `entry_point`, as in HumanEval. A field "test_setup_code" runs first.

    Args:
      share: return the share of tests that pass, instead of all or nothing.
      limits: of each run of the program: one run for all source texts, and one for every input.

    Raises:
      ValueError: the tests are in none of these forms, or are not Python.
      SandboxError: programs cannot be confined on this machine.

    Example:
      >>> double = "```python\\ndef double(x):\\n    return x + x\\n```"
      >>> unit_tests(share=True)("", double, tests=["assert double(2) == 4", "assert double('a') == 'b'"])
      0.5
    """

    @read_as(ANSWER)
    def reward(prompt: str, completion: str, **fields: object) -> float:
        check_tests(fields)
        tests = read_tests(fields)
        program = program_of(prompt, completion, fields)
        setup = str(fields.get("test_setup_code") or "")
        passed = len(run_program(f"{setup}\n{program}", tests.sources, limits=limits).passed) if tests.sources else 0
        for stdin, wanted in tests.pairs:
            ended = run_program(program, stdin=stdin, limits=limits)
            right = not ended.problem and _lines(ended.stdout) == _lines(wanted)
            passed += right
            if not (right or share):
                return 0.0
        count = len(tests.sources) + len(tests.pairs)
        return passed / count if share else float(passed == count)

    return reward


code_tests = unit_tests()


def program_of(prompt: str, completion: str, fields: Mapping[str, object]) -> str:
    """Extract the program of a completion."""
    block = last_fenced(completion, r"(python|py)[\d.]*")
    program = completion if block is None else block
    entry = fields.get("entry_point")
    if entry is None:
        return program
    definition = rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(str(entry))}\b"
    lacks = str(entry) not in program or not re.search(definition, program, re.MULTILINE)
    return prompt + program if lacks else program


def check_tests(fields: Mapping[str, object]) -> None:
    """Check the tests of a record before anything is computed.

    Raises:
      ValueError: there are no readable tests, or one is not Python, so that every program would fail.
    """
    for number, source in enumerate(read_tests(fields).sources):
        try:
            compile(source, f"test {number}", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"test {number} is not Python, {source[:200]!r}: {error}") from None


def read_tests(fields: Mapping[str, object]) -> UnitTests:
    """The tests of a record. Raises: ValueError, it has no readable tests."""
    name = next((name for name in TESTS if fields.get(name)), None)
    if name is None:
        raise ValueError(f"one of the fields {', '.join(TESTS)} is needed; there are {', '.join(fields) or 'none'}")
    given = fields[name]
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            given = fields[name]  # Python that begins with a bracket
    if isinstance(given, str):
        call = f"\ncheck({fields['entry_point']})" if fields.get("entry_point") and "def check(" in given else ""
        return UnitTests((given + call,))
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= set(given) and not given.get("fn_name"):
        return UnitTests(pairs=_pairs(given["inputs"], given["outputs"]))
    if isinstance(given, Sequence) and given and all(isinstance(test, str) for test in given):
        return UnitTests(tuple(given))
    if isinstance(given, Sequence) and given and all(isinstance(test, Mapping) and "input" in test for test in given):
        return UnitTests(pairs=_pairs([test["input"] for test in given], [test.get("output", "") for test in given]))
    raise ValueError(
        f"the field {name!r} holds no tests: Python text, a list of such texts, or {{'inputs': [...], 'outputs': "
        f"[...]}} is needed, not {str(given)[:200]}"
    )


def _pairs(inputs: Sequence[object], outputs: Sequence[object]) -> tuple[tuple[str, str], ...]:
    if not len(inputs) or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs are no tests; as many of each are needed")
    return tuple((_joined(given), _joined(wanted)) for given, wanted in zip(inputs, outputs, strict=True))


def _joined(lines: object) -> str:
    """Text, or the joined lines of a list."""
    return "\n".join(map(str, lines)) if isinstance(lines, (list, tuple)) else str(lines)


def _lines(text: str) -> list[str]:
    """Lines without trailing blanks, and without empty lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
