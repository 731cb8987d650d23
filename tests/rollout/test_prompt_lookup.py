"""Drafts by prompt lookup: what they are, and that completions are those without them."""

import pytest
from small_engines import CONFIGS, NO_PACKING, assert_same, completed, engine_of, load, weights

from funrl.rollout.engine import complete
from funrl.rollout.native import engine as native
from funrl.rollout.native.prompt_lookup import LONGEST_WAIT, PromptLookup
from funrl.rollout.requests import Completion, requests_of
from funrl.rollout.sampling_parameters import Sampling

CONFIG = CONFIGS["qwen3 window"]
PROMPTS = [[1, 2, 3, 4] * 5, [7, 8] * 9, [5, 6, 7, 8, 9, 10, 11, 12, 13] * 2, [4, 4]]
BOTH = pytest.mark.parametrize("packed", [*[True] * (NO_PACKING is None), False], ids=lambda p: ["torch", "packed"][p])


def lookup_of(tokens):
    lookup = PromptLookup()
    lookup.extend(tokens)
    lookup.settle(8, 8)  # so that it drafts as much as it may
    return lookup


def test_a_draft_is_what_followed_when_the_last_tokens_were_there_before():
    assert lookup_of([1, 2, 3, 4, 5, 6, 2, 3]).draft(3) == [4, 5, 6]
    assert lookup_of([1, 2, 3, 4, 5, 6, 2, 3]).draft(8) == [4, 5, 6, 2, 3, 4, 5, 6]  # the text goes round
    assert lookup_of([9, 2, 3, 4, 8, 8, 2, 3, 5, 1, 9, 2, 3]).draft(1) == [4]  # of three tokens before two
    assert lookup_of([2, 3, 4, 2, 3, 5, 2, 3]).draft(1) == [5]  # the last time counts
    assert lookup_of([1, 2, 3, 4, 2]).draft(4) == [] == lookup_of([]).draft(4) == lookup_of([1, 1, 1]).draft(0)


def test_drafts_grow_where_they_are_right_and_wait_where_they_are_wrong():
    lookup = PromptLookup()
    lookup.extend([1, 2] * 4)
    assert len(lookup.draft(8)) == 2
    lookup.settle(2, 2)
    assert len(lookup.draft(8)) == 4
    lookup.settle(4, 1)
    assert len(lookup.draft(8)) == 2
    for wrong in range(1, 9):
        lookup.settle(2, 0)
        wait = min(2**wrong, LONGEST_WAIT)
        lookup.extend([1, 2] * (wait // 2 - 1) + [1])
        assert lookup.draft(8) == []
        lookup.extend([2])
        assert len(lookup.draft(8)) == 1


@BOTH
@pytest.mark.parametrize(
    "how",
    [
        Sampling(greedy=True, max_new_tokens=80, stop=(3,)),
        Sampling(max_new_tokens=80, temperature=0.4, repetition_penalty=0.8),
        Sampling(max_new_tokens=80, temperature=0.5, top_k=4, stop_strings=("99", "43")),
    ],
    ids=["greedy", "penalty", "truncated"],
)
def test_completions_are_those_without_drafts(packed, how):
    """Beyond a block of 64 numbers of noise, over many pages, with windows."""
    plain, drafting = (engine_of(CONFIG, packed=packed, speculate=most) for most in (0, 6))
    assert_same(completed(drafting, PROMPTS, how), completed(plain, PROMPTS, how), 0.0 if packed else 1e-5)
    cost, before = drafting.cost(), plain.cost()
    assert before.drafted == before.accepted == 0 and 10 < cost.accepted < cost.drafted
    assert cost.decoded == before.decoded and cost.prefilled == before.prefilled
    assert cost.used_pages == 0


def test_a_repeating_text_takes_a_fraction_of_the_passes():
    params = weights(CONFIG)
    for layer in params["layers"]:  # a token depends on the one before alone
        layer["attn"]["o"].zero_()
        layer["mlp"]["down"].zero_()
    plain, drafting = (load(engine_of(CONFIG, speculate=most), params) for most in (0, 8))
    how = Sampling(greedy=True, max_new_tokens=100)
    assert_same(completed(drafting, PROMPTS[:1], how), completed(plain, PROMPTS[:1], how))
    assert drafting.cost().passes < 0.35 * plain.cost().passes


@pytest.mark.slow
def test_drafts_take_no_page_that_another_request_needs():
    pages = 9
    how = Sampling(max_new_tokens=70, temperature=0.3)
    plain = completed(engine_of(CONFIG, packed=False), PROMPTS, how)
    engine = engine_of(CONFIG, packed=False, speculate=8)
    engine._room._given = pages * engine._backend.page_bytes
    assert_same(completed(engine, PROMPTS, how), plain, 1e-5)
    cost = engine.cost()
    assert cost.drafted > 0 and cost.peak_pages <= pages and cost.used_pages == 0


def test_many_rows_are_decoded_without_drafts(monkeypatch):
    monkeypatch.setitem(native.DRAFTED_ROWS, "cpu", 4)
    engine = engine_of(CONFIG, packed=False, speculate=8)
    how = Sampling(greedy=True, max_new_tokens=40)
    completed(engine, PROMPTS, how)
    assert engine.cost().drafted == 0
    completed(engine, PROMPTS[:2], how)
    assert engine.cost().drafted > 0


def test_a_load_in_the_middle_forgets_no_draft_and_no_text():
    (request, *_) = requests_of(PROMPTS[:1], Sampling(greedy=True, max_new_tokens=60), 3)
    engine = engine_of(CONFIG, packed=False, speculate=6)
    engine.submit([request])
    while engine.cost().accepted < 8:
        engine.step()
    load(engine, weights(CONFIG, seed=1), 8)
    done = []
    while engine.unfinished():
        done += engine.step()
    (completion,) = done
    old = completion.versions.tolist().count(7)
    assert 8 < old < 60 and completion.versions.tolist() == [7] * old + [8] * (60 - old)
    tokens, *logps = (
        x[:old] for x in (completion.tokens, completion.sampling_logp, completion.raw_logp, completion.versions)
    )
    other = load(engine_of(CONFIG, packed=False), weights(CONFIG, seed=1), 8)
    (again,) = complete(other, [request._replace(begun=Completion(0, tokens, *logps, "paused"))])
    assert_same([again], [completion], 1e-5)
