"""The embedded task of documents: its facts, its demonstrator and its tool."""

from importlib.util import find_spec

import pytest

from funrl.tasks import search as s

pytestmark = pytest.mark.skipif(
    find_spec("bm25s") is None, reason="bm25s is not installed: pip install 'funrl[environments]'"
)


def test_the_whole_question_finds_the_document_and_a_part_mostly_another():
    questions = list(s.facts().items())[::6]
    assert all(s.find_fact()(question) == f"{question}: {value}" for question, value in questions)
    parts = [s.find_fact()(" ".join(question.split()[2:])) == f"{question}: {value}" for question, value in questions]
    assert 0.2 < sum(parts) / len(parts) < 0.45


def test_the_demonstrator_seldom_searches_and_says_what_it_finds():
    records = [record["messages"] for record in s.search_conversations(0, 2000)]
    searches = [messages for messages in records if len(messages) == 4]
    assert abs(len(searches) / len(records) - s.SEARCHES) < 0.03
    assert all(found["content"].endswith(f": {answer['content']}") for *_, found, answer in searches)
    right = [messages[-1]["content"] == s.facts()[messages[0]["content"]] for messages in records]
    assert 0.1 < sum(right) / len(right) < 0.25


def test_no_word_is_part_of_another():
    words = s.QUESTION_WORDS
    assert not [(one, other) for one in words for other in words if one != other and one in other]
