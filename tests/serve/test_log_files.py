"""Logs read as episodes: who wrote each token, where histories were rewritten, and what is trained of them."""

import json
from pathlib import Path

import pytest
from family_templates import tokenizer_of
from small_chats import SETUP, TOKENIZER, engine_of, examples_of

from funrl.data.conversations import ChatTemplate, conversation_texts
from funrl.data.json_lines import DataError
from funrl.environments.logged import LoggedEpisode
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rollout.episodes import Episode
from funrl.serve.log_audit import audit_entry
from funrl.serve.log_files import read_logs
from funrl.trainer.checkpoints.saved_episodes import write_episodes

LOGS = Path(__file__).parent / "logs"
SMALL = ChatTemplate(TOKENIZER)
QWEN = ChatTemplate(tokenizer_of("qwen3"))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def call(reply, *messages, model="m"):
    return {"request": {"messages": [*messages]}, "response": {"model": model, "choices": [{"message": reply}]}}


def audits(tmp_path, records, template=SMALL):
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [audit_entry(entry, template) for entry in read_logs(file, template)]


class TwoTurns:
    """Says "more" once."""

    async def run(self, policy, example, seed):
        _, end = await policy.sample(policy.start([user(example.text)]))
        _, end = await policy.sample(policy.extend(end, [user("more")]))
        return Episode([end], {"policy": 1.0})


def test_rollouts_of_a_run_have_their_versions(tmp_path):
    done = run_episodes(engine_of(), SINGLE, TwoTurns(), episode_groups(examples_of("go", "on"), 1, 0), SETUP).episodes
    episodes = [LoggedEpisode(number, 0, episode) for number, (_, episode) in enumerate(done)]
    write_episodes(tmp_path, episodes, SINGLE)
    (file,) = tmp_path.glob("*.jsonl")
    for entry, logged in zip(read_logs(file, SMALL), episodes, strict=True):
        audit = audit_entry(entry, SMALL)
        (end,) = logged.episode.ends
        sampled = sum(len(node.tokens) for node in end.nodes() if node.sampled)
        assert entry.logged and audit.sampled == {"version 7": sampled}
        assert audit.tokens == len(end.token_ids()) and not audit.rewrites
        assert audit.given == sum(len(m["content"]) for n in end.nodes() if not n.sampled for m in n.messages)
        own = audit.trained["funrl"]
        assert (own.rows, own.trained, own.as_sampled, own.lost) == (1, sampled, sampled, 0)


def test_a_conversation_is_counted_as_it_is_trained(tmp_path):
    messages = [user("one"), assistant("a"), user("two"), assistant("bb")]
    (audit,) = audits(tmp_path, [{"messages": messages}])
    (text,) = conversation_texts(messages, SMALL)
    own = audit.trained["funrl"]
    assert (own.rows, own.tokens, own.trained) == (1, len(text.tokens), sum(text.trained)) == (1, audit.tokens, 5)
    assert audit.sampled == {"unknown weights": 5} and audit.given == len("onetwo")
    assert "does not say" in audit.entry.remarks[0] and not audit.entry.logged
    # TRL trains every token but the first, verl the replies with the line break behind their ends.
    trl, verl = audit.trained["TRL"], audit.trained["verl"]
    whole = "u>one</s>\na>a</s>\nu>two</s>\na>bb</s>\n"
    assert trl.trained == trl.tokens - 1 == len(TOKENIZER(whole)["input_ids"]) - 1 and trl.as_sampled == 5
    assert (verl.trained, verl.as_sampled, verl.other, verl.refused) == (7, 5, 2, "")


@pytest.mark.parametrize(
    "histories,words",
    [
        ([[user("q")], [user("q"), assistant("r0"), user("w")]], []),
        ([[user("q")], [user("q"), assistant("SUM"), user("w")]], ["path 2, message 2: rewritten; 3 sampled"]),
        (
            [
                [user("q")],
                [user("q"), assistant("r0"), user("w")],
                [user("q"), assistant("r0"), user("w"), assistant("r1"), user("x")],
                [user("q"), assistant("S"), user("x")],
            ],
            ["path 2, message 2: compacted, 5 messages became 2; 9 sampled tokens"],
        ),
    ],
)
def test_rewritten_and_compacted_histories_are_found(tmp_path, histories, words):
    records = [call(assistant(f"r{n}"), *history, model=f"m{n}") for n, history in enumerate(histories)]
    (audit,) = audits(tmp_path, records)
    assert [any(line.startswith(word) for line in audit.rewrites) for word in words] == [True] * len(words)
    assert len(audit.rewrites) == len(words)
    assert audit.sampled == {f"m{n}": len("rn") + 1 for n in range(len(histories))}  # with the end token
    assert audit.paths == 1 + len(words) == audit.trained["funrl"].rows
    assert audit.trained["funrl"].lost == audit.trained["funrl"].again == 0


def test_histories_that_a_template_renders_anew_are_found(tmp_path):
    """Qwen3's leaves out thoughts of earlier turns: the reply is another path's, and TRL never sees it."""
    thinking = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    records = [call(thinking, user("2+2?")), call(assistant("8"), user("2+2?"), thinking, user("twice?"))]
    (audit,) = audits(tmp_path, records, QWEN)
    assert audit.paths == 2 and audit.rewrites[0].startswith("path 2: the same messages have other tokens")
    own, trl = audit.trained["funrl"], audit.trained["TRL"]
    assert own.as_sampled == sum(audit.sampled.values()) and own.other == 0
    assert trl.other > 0 and "other tokens than the conversation" in audit.trained["verl"].refused


def test_words_of_several_bytes_and_with_blanks_are_not_the_templates(tmp_path):
    """The tokenizer has a token for each byte of them."""
    text = "\u4f60\u597d, how  are you?\n\u00fc"
    (audit,) = audits(tmp_path, [{"messages": [user(text), assistant("ok")]}], QWEN)
    whole = "<|im_start|>user\n" + text + "<|im_end|>\n<|im_start|>assistant\n"
    context = len(QWEN.tokenizer(whole)["input_ids"])
    assert audit.given == len(QWEN.tokenizer(text)["input_ids"]) and audit.template == context - audit.given > 0


def test_conversations_that_begin_alike_are_told_apart_by_their_replies(tmp_path):
    calls = [call(assistant(reply), user("q"), model=reply) for reply in "ab"]
    calls += [call(assistant("d"), user("q"), assistant(reply), user("w"), model=reply) for reply in "ab"]
    first, second = audits(tmp_path, calls)
    assert (first.sampled, second.sampled) == ({"a": 4}, {"b": 4})
    assert first.paths == second.paths == 1 and not first.rewrites and not second.rewrites


def test_choices_of_a_call_and_other_openings_are_apart(tmp_path):
    two = call(assistant("a"), user("q"))
    two["response"]["choices"].append({"message": assistant("b")})
    found = audits(tmp_path, [two, call(assistant("c"), user("other"))])
    assert [audit.sampled for audit in found] == [{"m": 2}] * 3 and not any(audit.rewrites for audit in found)


def test_rollouts_that_verl_wrote(tmp_path):
    """Written by `RayPPOTrainer._log_rollout_data` of verl 0.9.1 at step 7."""
    entries = [*read_logs(LOGS / "verl_0.9.1.jsonl", QWEN)]
    assert [entry.texts for entry in entries] == [
        ("user\nWhat is 2+2?\nassistant\n", "<think>\neasy\n</think>\n\n4"),
        ("user\nName a fruit.\nassistant\n", "an apple"),
    ]
    audit = audit_entry(entries[1], QWEN)
    assert audit.sampled == {"step 7": len(b"an apple") + 1} and "special tokens" in audit.entry.remarks[0]
    assert audit.trained["verl"].refused == "the file has no messages, which it takes"
    assert audit.trained["TRL"].as_sampled == audit.trained["funrl"].as_sampled == 9


@pytest.mark.parametrize(
    "record,problem",
    [
        ({"text": "x"}, "a record with text is of no known log"),
        (3, "3 is not a record of a log"),
        ({"traces": [{"nodes": [{}]}]}, "the record lacks a part: KeyError: 'verifiers'"),
        ({"request": {"messages": []}, "response": {"object": "response"}}, "neither of /v1/chat/completions"),
        ({"messages": [user("x")]}, "no turn of the assistant is trained"),
        ([1, 2, [3]], "the record lacks a part"),
    ],
)
def test_what_is_no_log_is_refused_with_its_line(tmp_path, record, problem):
    with pytest.raises(DataError, match=r"line 2: ") as caught:
        audits(tmp_path, [{"messages": [user("x"), assistant("y")]}, record])
    assert problem in str(caught.value)
