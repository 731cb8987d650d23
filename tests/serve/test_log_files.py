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
from funrl.serve.log_files import LoggedCall, grouped_calls, read_logs
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


def with_ids(tokens, prompt):
    """A call with token ids of its reply and its prompt."""
    record = call(assistant("r"), user("x"))
    record["response"]["choices"][0]["token_ids"] = tokens
    record["response"]["prompt_token_ids"] = prompt
    return record


def trace(*nodes, trainable=True):
    """A trace of verifiers: messages, each with the token ids of its content, the marked ones sampled."""
    entries = [
        {
            "message": message,
            "parent": number - 1 if number else None,
            "sampled": message["role"] == "assistant",
            "token_ids": ids,
            "mask": [message["role"] == "assistant"] * len(ids),
        }
        for number, (message, ids) in enumerate(nodes)
    ]
    agent = {"name": "helper", "trainable": trainable}
    return {"traces": [{"verifiers": {"version": "0.4"}, "calls": [], "nodes": entries, "agent": agent}]}


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


def test_a_history_as_a_client_dumps_it_goes_on(tmp_path):
    """OpenAI's client writes fields that the reply's normal form lacks; others leave the thoughts out."""
    calls = [call(assistant(reply), user("q"), model=reply) for reply in "ab"]
    dumped = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    calls += [call(assistant("d"), user("q"), assistant(reply) | dumped, user("w"), model=reply) for reply in "ab"]
    first, second = audits(tmp_path, calls)
    assert (first.sampled, second.sampled) == ({"a": 4}, {"b": 4}) and first.paths == second.paths == 1
    calls = [call(assistant(x) | {"reasoning": "t"}, user("q"), model=x) for x in "ab"]
    calls += [call(assistant("d"), user("q"), assistant(reply), user("w"), model=reply) for reply in "ab"]
    assert [[*audit.sampled] for audit in audits(tmp_path, calls)] == [["a"], ["b"]]


def test_a_reply_after_one_of_train_false_is_of_the_same_conversation(tmp_path):
    calls = [call(assistant(reply), user("q"), model=reply) for reply in "ab"]
    calls.append(call(assistant("d"), user("q"), assistant("a") | {"train": False}, user("w"), model="a"))
    assert [[*audit.sampled] for audit in audits(tmp_path, calls)] == [["a"], ["b"]]


class CountedMessages(list):
    """Messages that count how often they are read."""

    reads = 0

    def __iter__(self):
        CountedMessages.reads += 1
        return super().__iter__()

    def __getitem__(self, place):
        CountedMessages.reads += 1
        return super().__getitem__(place)


def test_calls_are_grouped_without_comparing_each_with_all():
    def logged(number, *messages):
        messages = CountedMessages(messages)
        return LoggedCall("line", "OpenAI", messages, assistant(f"r{number}"), (), "m", prompt=[number], tokens=[9])

    count = 200
    calls = [logged(n, user(f"q{n}")) for n in range(count)]
    calls += [logged(n, user(f"q{n}"), assistant(f"r{n}"), user("w")) for n in range(count)]
    CountedMessages.reads = 0
    assert len(grouped_calls(calls, SMALL)) == count
    assert CountedMessages.reads < 10 * len(calls)


def test_a_prompt_of_several_turns_is_one_prompt(tmp_path):
    prompt = [user("one"), assistant("a"), user("two")]
    (audit,) = audits(tmp_path, [{"prompt": prompt, "completion": "c"}])
    (end,) = audit.entry.episode.ends
    assert [([*node.messages], node.sampled) for node in end.nodes()] == [(prompt, False), ([assistant("c")], True)]
    trl, verl = audit.trained["TRL"], audit.trained["verl"]
    whole = "u>one</s>\na>a</s>\nu>two</s>\na>c</s>\n"
    assert trl.tokens == len(TOKENIZER(whole)["input_ids"])
    assert (trl.trained, trl.as_sampled, trl.other) == (3, 2, 1)  # "c", its end and the line break
    assert (verl.trained, verl.as_sampled, verl.other) == (6, 2, 4)


@pytest.mark.parametrize("prompt", ["q", [user("q")]])
def test_a_completion_of_messages_is_read_as_its_text(tmp_path, prompt):
    as_text, as_messages = audits(tmp_path, [{"prompt": prompt, "completion": x} for x in ("c", [assistant("c")])])
    assert as_text.trained == as_messages.trained and as_text.sampled == {"unknown weights": 2}
    assert as_messages.trained["TRL"].as_sampled == 2


def test_words_of_the_assistant_at_the_end_of_a_prompt_are_continued(tmp_path):
    (audit,) = audits(tmp_path, [{"prompt": [user("q"), assistant("ab")], "completion": "c"}])
    (end,) = audit.entry.episode.ends
    assert [TOKENIZER.decode(node.tokens) for node in end.nodes()] == ["u>q</s>\na>ab", "c</s>"]
    assert audit.sampled == {"unknown weights": 2} and audit.given == len("qab")
    (audit,) = audits(
        tmp_path, [{"prompt": [user("q"), assistant("ab")], "completion": [assistant("c"), user("w"), assistant("d")]}]
    )
    own = audit.trained["funrl"]  # the row of "c" is how that of "d" begins
    assert (own.rows, own.trained, own.as_sampled, own.other, own.lost) == (2, 4, 4, 0, 0)


def test_peers_render_a_conversation_once_and_whole(tmp_path):
    """Qwen3's template leaves out thoughts of earlier turns: funrl has two rows, TRL one."""
    thinking = [assistant(x) | {"reasoning_content": f"on {x}"} for x in "ab"]
    messages = [user("q"), thinking[0], user("w"), thinking[1], user("bye")]
    (audit,) = audits(tmp_path, [{"messages": messages}], QWEN)
    assert audit.trained["funrl"].rows == 2 and audit.trained["TRL"].rows == 1
    whole = QWEN.tokenizer.apply_chat_template(messages, tokenize=False)
    assert "bye" in whole and audit.trained["TRL"].tokens == len(QWEN.tokenizer(whole)["input_ids"])
    messages = [user("q"), assistant("a"), user("w"), assistant("bb") | {"train": False}]
    (audit,) = audits(tmp_path, [{"messages": messages}])
    assert audit.trained["funrl"].trained == 2
    assert audit.trained["verl"].trained == len("a</s>\n") - 3 + len("bb</s>\n") - 3


def test_an_agent_of_verifiers_that_is_not_trained(tmp_path):
    nodes = [(user("q"), [5, 6]), (assistant("a"), [7, 8])]
    logged, words, trained = audits(
        tmp_path,
        [trace(*nodes, trainable=False), trace(nodes[0], (assistant("a"), []), trainable=False), trace(*nodes)],
    )
    for audit in (logged, words):
        own = audit.trained["funrl"]
        assert (own.rows, own.trained, own.lost) == (0, 0, 2) and audit.paths == 1
        assert audit.entry.remarks == ("the agent helper is not trained",)
    assert (trained.trained["funrl"].trained, trained.entry.remarks, trained.entry.logged) == (2, (), True)


def test_a_trace_with_tokens_of_some_replies_says_that_they_are_not_used(tmp_path):
    nodes = [(user("q"), [5]), (assistant("a"), [7]), (user("w"), []), (assistant("b"), [])]
    (audit,) = audits(tmp_path, [trace(*nodes)])
    assert not audit.entry.logged and audit.entry.source.endswith("line 1")
    assert "its token ids are not used, as 1 of 2 replies have none" in audit.entry.remarks[0]


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
        ({"messages": []}, "its messages are [], which is no list of messages"),
        ({"messages": None}, "its messages are null, which is no list of messages"),
        ({"messages": "hi"}, 'its messages are "hi", which is no list of messages'),
        ({"prompt": None, "completion": "c"}, "its prompt is null, neither a text nor messages"),
        ({"prompt": [], "completion": "c"}, "its prompt is [], neither a text nor messages"),
        (call(assistant("r"), user("x")) | {"request": {"messages": ["x"]}}, "message 1: "),
        (call(assistant("r")), "message 1 is by the assistant"),
        (with_ids(5, [1]), "its token_ids is 5; a list of token ids is needed"),
        (with_ids([1], "ab"), 'its prompt_token_ids is "ab"; a list of token ids is needed'),
        (with_ids(["a"], [1]), 'its token_ids is ["a"]; a list of token ids is needed'),
    ],
)
def test_what_is_no_log_is_refused_with_its_line(tmp_path, record, problem):
    with pytest.raises(DataError, match=r"line 2: ") as caught:
        audits(tmp_path, [{"messages": [user("x"), assistant("y")]}, record])
    assert problem in str(caught.value)
