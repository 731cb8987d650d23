"""A search of documents: BM25, files of documents, and what is refused; the task of facts."""

import asyncio
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import env_search as s
import pytest
from env_search import NOTHING, read_documents, search_documents, search_tool

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
sys.path.append("examples")
from env_search import search_tool
assert search_tool(["a star", "a rock"], results=1)("rock") == "a rock"
sys.exit("jax" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@needs_bm25s
def test_the_whole_question_finds_the_document_and_a_part_mostly_another():
    questions = list(s.facts().items())[::6]
    assert all(s.find_fact()(question) == f"{question}: {value}" for question, value in questions)
    parts = [s.find_fact()(" ".join(question.split()[2:])) == f"{question}: {value}" for question, value in questions]
    assert 0.2 < sum(parts) / len(parts) < 0.45


@needs_bm25s
def test_the_demonstrator_seldom_searches_and_says_what_it_finds():
    records = [record["messages"] for record in s.search_conversations(0, 2000)]
    searches = [messages for messages in records if len(messages) == 4]
    assert abs(len(searches) / len(records) - s.SEARCHES) < 0.03
    assert all(search["content"].endswith(f": {answer['content']}") for *_, search, answer in searches)
    right = [messages[-1]["content"] == s.facts()[messages[0]["content"]] for messages in records]
    assert 0.1 < sum(right) / len(right) < 0.25


def test_no_word_is_part_of_another():
    words = s.QUESTION_WORDS
    assert not [(word, other) for word in words for other in words if word != other and word in other]


@needs_bm25s
def test_the_environment_pays_who_searches_by_the_whole_question_and_seldom_the_demonstrator():
    score = s.facts_of_persons()._score
    whole, others = [], []
    for record in s.search_conversations(0, 1000):
        question, first, *_ = [message["content"] for message in record["messages"]]
        paid = score(record["messages"], answer=s.facts()[question])
        (whole if first == f"{s.SEARCH}{question}{s.END_OF_CALL}" else others).append(paid)
    assert len(whole) > 50 and set(whole) == {1.0}
    assert set(others) == {0.0, 1.0} and sum(others) / len(others) < 0.2
