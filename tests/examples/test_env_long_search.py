"""The search that is longer than the context: pages, scores, and the demonstrator's conversations."""

import asyncio

import env_long_search as e
import pytest
from task_files import as_example

from funrl.environments.chat import TemplateChat
from funrl.tasks.calculator import chat_tokenizer


def letters_of(prompt):
    return "".join(prompt.fields["pages"]).replace(e.NOTHING, "")


def test_splits_share_no_pages_and_each_search_has_its_letters():
    train, heldout = e.searches(0, 500), e.searches(0, 256, "heldout")
    pages = {
        split: {tuple(prompt.fields["pages"]) for prompt in prompts}
        for split, prompts in {1: train, 2: heldout}.items()
    }
    assert not pages[1] & pages[2] and len(pages[2]) == 256
    assert all(len(letters_of(prompt)) == len(set(letters_of(prompt))) == e.WANTED for prompt in train)
    assert all(len(page) == e.PLACES for prompt in train for page in prompt.fields["pages"])


@pytest.mark.parametrize("order", [1, -1])
def test_both_letters_are_scored_in_any_order(order):
    prompt = e.searches(3, 1)[0]

    async def play(answer):
        side = e.Pages()
        await side.reset(as_example(prompt), 0)
        seen = [(await side.step({"content": e.NEXT}))[0][0]["content"] for _ in range(e.PAGES + 2)]
        assert seen == [*prompt.fields["pages"], e.LAST, e.LAST]
        return (await side.step({"content": answer}))[1:]

    letters = letters_of(prompt)[::order]
    assert asyncio.run(play(e.ANSWER + letters)) == (1.0, True)
    for wrong in (letters, e.ANSWER + letters[0] * 2, e.ANSWER + letters + letters[0], ""):
        assert asyncio.run(play(wrong)) == (0.0, True)


def test_the_demonstrator_forgets_and_never_invents_in_a_summary():
    records = e.search_conversations(0, 3000)
    kept = known = 0
    for record in records:
        messages = [message["content"] for message in record["messages"]]
        if messages[-2] == e.SUMMARY:
            letters = "".join(messages[:-2]).translate(
                {ord(sign): None for sign in f"{e.ASK}{e.NEXT}{e.SUMMARY}{e.NOTHING}"}
            )
            assert set(messages[-1]) <= set(letters)
            kept += len(messages[-1])
            known += len(letters)
        else:
            assert messages[-2] == e.LAST and len(messages[-1]) == 1 + e.WANTED
    assert abs(kept / known - e.KEPT) < 0.03


def test_histories_of_full_pages_are_summarised_where_the_demonstrator_does():
    chat = TemplateChat(chat_tokenizer(e.SEARCH_SIGNS))
    page = {"role": "user", "content": e.NOTHING * e.PLACES}
    asked = {"role": "assistant", "content": e.NEXT}
    for opening in (e.ASK, e.ASK + e.SUMMARY, e.ASK + e.SUMMARY + "ABCDE"):  # a reply has at most five letters
        begin = {"role": "user", "content": opening}
        before, at = (len(chat.opening([begin, *[asked, page] * pages], ())) for pages in (e.SEGMENT - 1, e.SEGMENT))
        assert before < e.COMPACT_AT <= at < e.CONTEXT - 16
    assert e.PAGES == 2 * e.SEGMENT
    assert e.PAGES * (e.PLACES + 4) >= e.CONTEXT
