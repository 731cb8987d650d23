"""`funrl audit` prints what a log holds, and writes its numbers and a page."""

import json
import string

import pytest

from funrl.cli import main as cli
from funrl.data.tokenizer import chat_character_tokenizer

MARKS = ("<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


@pytest.fixture
def audit(tmp_path, capsys, monkeypatch):
    """Run `funrl audit` on records: (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    chat_character_tokenizer(string.printable, MARKS, TEMPLATE, unknown="#").save_pretrained("model")

    def run(*words, records=(TALK, TALK), model=("--model=model",)):
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return cli.main(["funrl", "audit", "log.jsonl", *model, *words]), *capsys.readouterr()

    return run


def test_entries_totals_numbers_and_the_page(audit, tmp_path):
    status, out, err = audit("--count=1", "--json=a.json", "--output=page.html")
    assert (status, err) == (0, "")
    assert out.count("log.jsonl, line") == 1
    assert "sampled 3 (3 by unknown weights); template 3; given 2" in out  # "ho" and its end; two marks and "<|end|>"
    assert "entries 2: sampled 6 (6 by unknown weights); rewritten histories 0" in out
    assert "funrl rows 2, tokens 16, trained 6: 6 as sampled, 0 again, 0 others; sampled tokens that are not" in out
    assert "TRL   rows 2, tokens 16, trained 14: 6 as sampled, 0 again, 8 others; sampled tokens that are not" in out
    first, second = json.loads((tmp_path / "a.json").read_text())
    assert first["token_ids"] == "rendered" and second["source"] == "log.jsonl, line 2"
    assert first["sampled"] == {"unknown weights": 3} and first["trained"]["verl"]["as_sampled"] == 3
    page = (tmp_path / "page.html").read_text()
    assert "funrl audit log.jsonl" in page and page.count("path 1") == 1 and "http" not in page.split("</style>")[1]


@pytest.mark.parametrize(
    "words,model,problem",
    [
        ((), (), "give --model, a directory or a name"),
        ((), ("--model=nothing",), "nothing: no such directory"),
        (("--count=-1",), ("--model=model",), "--count=-1: it must be at least 0"),
        (("--json=no/a.json",), ("--model=model",), "--json=no/a.json: it must be in a folder that exists"),
        (("--chat_template=no.jinja",), ("--model=model",), "--chat_template=no.jinja: "),
        (("--cuont=1",), ("--model=model",), "did you mean --count?"),
    ],
)
def test_bad_flags_are_named(audit, words, model, problem):
    status, _, err = audit(*words, model=model)
    assert status == 2 and problem in err


def test_a_bad_record_and_a_missing_file_are_named(audit, capsys):
    status, _, err = audit(records=(TALK, {"text": "x"}))
    assert status == 2 and err.startswith("error: log.jsonl, line 2: a record with text is of no known log")
    assert cli.main(["funrl", "audit", "no.jsonl", "--model=model"]) == 2
    assert "no.jsonl: no such file" in capsys.readouterr().err
