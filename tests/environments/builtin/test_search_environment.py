"""A search of documents: BM25, files of documents, and what is refused."""

import asyncio
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from funrl.environments.builtin.search import NOTHING, read_documents, search_documents, search_tool
from funrl.loading import LoadError

DOCUMENTS = ["the sun is a star", "the moon is a rock", "a cat is an animal", "the moon is far"]

needs_bm25s = pytest.mark.skipif(
    find_spec("bm25s") is None, reason="bm25s is not installed: pip install 'funrl[environments]'"
)


@needs_bm25s
def test_documents_are_ranked_and_equal_ones_in_their_order():
    find = search_tool(DOCUMENTS, results=2)
    assert find("MOON rock?") == "the moon is a rock\nthe moon is far"
    assert find("animal") == "a cat is an animal"
    assert find("moon") == find("moon")
    assert find("xyzzy") == find("") == NOTHING
    assert search_tool(DOCUMENTS, results=1, characters=8)("far") == "the moon"


def test_a_file_of_documents(tmp_path):
    records = [{"text": "one"}, {"title": "Two", "text": "two"}]
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert read_documents(f"{tmp_path}/documents.jsonl") == ["one", "Two\ntwo"]
    (tmp_path / "bad.jsonl").write_text('{"body": "one"}')
    with pytest.raises(ValueError, match="a document has a text in its field 'text'"):
        read_documents(f"{tmp_path}/bad.jsonl")
    with pytest.raises(ValueError, match="absent"):
        search_documents("absent.jsonl")


def test_what_cannot_work_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="results=0"):
        search_documents(DOCUMENTS, results=0)
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(LoadError, match="pip install 'funrl\\[environments\\]'"):
        search_documents(DOCUMENTS)


@needs_bm25s
def test_the_answer_after_a_search_is_rewarded():
    environment = search_documents(DOCUMENTS, results=1)
    question = [{"role": "user", "content": "What is a cat?"}]
    answered = [*question, {"role": "assistant", "content": "", "tool_calls": [{}]}, {"role": "tool", "content": "x"}]
    score = environment._score
    assert score([*answered, {"role": "assistant", "content": "an animal"}], answer="an animal") == 1.0
    assert score([*answered, {"role": "assistant", "content": "a star"}], answer="an animal") == 0.0
    assert score(answered[:2], answer="an animal") == 0.0
    assert asyncio.run(environment._output("search", {"query": "cat"})).text == "a cat is an animal"


@pytest.mark.slow
@needs_bm25s
def test_a_search_does_not_start_jax():
    code = """
import sys
from funrl.environments.builtin.search import search_tool
assert search_tool(["a star", "a rock"], results=1)("rock") == "a rock"
sys.exit("jax" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
