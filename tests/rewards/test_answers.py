"""The place of a completion's answer: boxes, tags and fenced blocks."""

import re
import time

import pytest

from funrl.rewards.answers import final_answer, last_boxed, last_fenced, last_tagged
from funrl.rewards.countdown import countdown
from funrl.rewards.formulas import boxed_answer, math_answer
from funrl.rewards.style import json_schema, repetition, think_then_answer
from funrl.rewards.unit_tests import program_of
from funrl.rewards.verifiers import exact_match, gsm8k, multiple_choice

PYTHON = r"(python|py)[\d.]*"


@pytest.mark.parametrize(
    "text,content",
    [
        ("First:\n```bash\npip list\n```\nThen:\n```python\na = 1\n```\nThat is all.", "a = 1\n"),
        ("```python\na = 1\n```\nIt prints:\n```text\n2\n```\n", "a = 1\n"),
        ("```Python\na = 1\n```\nDone.", "a = 1\n"),
        ("```python3\na = 1\n```", "a = 1\n"),
        ("```py\r\na = 1\r\n```\r\n", "a = 1\n"),
        ("```{.python .numbers}\na = 1\n```", "a = 1\n"),
        ('```python title="a"\na = 1\n```', "a = 1\n"),
        ("```python:a.py\na = 1\n```", "a = 1\n"),
        ("```python,linenos\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```\n```\nb = 2\n```\n", "b = 2\n"),
        ("```python\na = 1\n```\n```\nb = 2\n```\n", "a = 1\n"),
        ("```py\na = 1\n```\n```PYTHON\nb = 2\n```\n", "b = 2\n"),
        ("~~~python\na = 1\n~~~\n", "a = 1\n"),
        ("````python\na = '''\n```\n'''\n````\n", "a = '''\n```\n'''\n"),
        ("```python\ncut off", "cut off"),
        ("- so:\n    ```python\n    if a:\n        b = 2\n    ```\n", "if a:\n    b = 2\n"),
        ("Here: ```python\na = 1\n```", "a = 1\n"),
        ("```python\na = 1```\nDone.", "a = 1"),
        ("use ```x``` here\n```python\na = 1\n```", "a = 1\n"),
        ("end with ``` in a line\n```python\na = 1\n```", "a = 1\n"),
        ("```bash\nls\n```\nprose", None),
        ("a = 1", None),
        ("", None),
    ],
)
def test_the_last_block_of_python(text, content):
    block = last_fenced(text, PYTHON)
    assert (block if block is None else re.sub(r"[ \t]+$", "", block, flags=re.MULTILINE)) == content


def test_blocks_of_json_and_programs_are_read_alike():
    pytest.importorskip("jsonschema")
    schema = {"required": ["a"]}
    for text, right in [
        ('```python\nx\n```\n```JSON\n{"a": 1}\n```\nSo:\n```text\nx\n```', 1),
        ('```json\r\n{"a": 1}\r\n```\r\n', 1),
        ('```\n{"a": 1}\n```', 1),
        ('```json\n{"a": 1}\n```\n```json\n{}\n```', 0),
        ('```yaml\n{"a": 1}\n```', 0),
        ('{"a": ' + "1" * 5000 + "}", 0),
    ]:
        assert json_schema("", text, schema=schema) == right, text
    spaced = "\n" * 50 + "def f():\n    return 1"
    assert program_of("no", spaced, {"entry_point": "f"}) == spaced
    assert program_of("no", "async def f():\n    pass", {"entry_point": "f"}) == "async def f():\n    pass"


def test_braces_of_sets_do_not_close_a_box():
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{\{1} and more") == r"\{1"
    assert last_boxed(r"\boxed{a\\{b}\\} c}") == r"a\\{b}\\"
    assert last_boxed(r"\boxed{4}" + r"\boxed{" * 4000) == "4"
    assert last_boxed("\U0001f431} \\boxed{\u00bd} }") == "\u00bd"
    assert final_answer(r"\boxed{3} \boxed{4") == "3" and final_answer(r"so \boxed{ 4") == "4"


def test_lists_are_no_numbers_of_a_vote():
    assert [final_answer(text) for text in ("1,200", "$1200", "1,2", "12")] == ["1200", "1200", "1,2", "12"]


def degenerate_texts(length=100_000):
    pieces = (
        *(
            "\\boxed{",
            "{",
            "}",
            "\\boxed{}",
            "```",
            "```\n",
            "```python\n",
            "~~~\n",
            "``` x ```\n",
            "<think>",
            "9",
            "9,",
        ),
        *(
            "</think><answer>",
            "<answer>",
            "<answer></answer>",
            "####",
            "#### 9",
            "\n",
            " ",
            "$",
            "\\(",
            "\\[",
            "answer ",
        ),
        *("answer is ", "(", "1/", "+", "1e5 ", "\\frac{", "    def f\n", "[", '{"a":', "1,234", "\U0001f431"),
    )
    texts = {piece: (piece * (length // len(piece) + 1))[:length] for piece in pieces}
    texts["box"] = "\\boxed{" + texts["9"] + "}"
    texts["letters"] = "\\boxed{" + "a " * 240 + "}"
    texts["number"] = "#### " + texts["9,"]
    return texts


SCANS = {
    "final_answer": final_answer,
    "tagged": last_tagged,
    "exact": lambda text: exact_match("", text, answer=72.0),
    "gsm8k": lambda text: gsm8k("", text, answer=72),
    "math": lambda text: math_answer("", text, answer="72"),
    "boxed": lambda text: boxed_answer("", text, answer="x+1"),
    "choice": lambda text: multiple_choice("", text, answer="B"),
    "format": lambda text: think_then_answer("", "<think>" + text),
    "json": lambda text: json_schema("", text),
    "program": lambda text: program_of("", text, {"entry_point": "g"}),
    "repetition": lambda text: repetition("", text),
    "countdown": lambda text: countdown("", text, target=24, nums=[1, 4, 8]),
}


@pytest.mark.timed
@pytest.mark.parametrize("name", SCANS)
def test_a_hundred_thousand_characters_take_ten_milliseconds(name):
    scan = SCANS[name]
    scan("\\boxed{1}")
    for piece, text in degenerate_texts().items():
        best = 1.0
        for _ in range(20):
            begin = time.perf_counter()
            scan(text)
            best = min(best, time.perf_counter() - begin)
            if best < 0.01:
                break
        assert best < 0.01, piece
