"""Calls of tools by the forms of six families, and what is said of calls and tools that are wrong."""

import json

import pytest
from small_chats import SETUP, ScriptedEngine, examples_of

from funrl.environments.adapters import tool_environment
from funrl.environments.forms.drift import NodeText, drift_cause
from funrl.environments.forms.tool_calls import argument_problem, read_reply
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rollout.policy import EpisodeLimits
from funrl.rollout.sampling_parameters import Sampling

PROPERTIES = {
    "a": {"type": "integer"},
    "s": {"type": "string"},
    "l": {"type": "array"},
    "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "c": {"type": "string", "enum": ["red", "blue"]},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES, "required": ["a"]}}},
    {"type": "function", "function": {"name": "liar", "parameters": "none"}},
    {"name": "flat", "parameters": {"properties": {"a": {"type": ["integer", "null"]}}}},
]


def xml(**values):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


def glm(**values):
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>f\n{pairs}</tool_call>"


CALL = [("f", {"a": 1})]
MANY = {"a": "3", "s": "4", "l": "[1, 2]", "x": "None", "c": "red"}
TYPED = ("f", {"a": 3, "s": "4", "l": [1, 2], "x": None, "c": "red"})
HEAD = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
REPLIES = [  # form, reply, content, thoughts, calls, part of each problem
    ("hermes", "<think>\nhm\n</think>\n\nhi", "hi", "hm", [], []),
    (
        "hermes",
        '<think>no <tool_call>{"name": "f"}</tool_call></think>',
        "",
        'no <tool_call>{"name": "f"}</tool_call>',
        [],
        [],
    ),
    (
        "hermes",
        'so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and <tool_call>{</tool_call> on',
        "so  and  on",
        None,
        CALL,
        ["not JSON: expecting property name enclosed in double quotes at its end"],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        "",
        None,
        [],
        ["a call is not JSON: expecting ',' delimiter at '\"arguments\": {}}'"],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{a: 1}"}</tool_call>',
        "",
        None,
        [],
        ["arguments of f are not JSON: expecting property name enclosed in double quotes at 'a: 1}'"],
    ),
    ("qwen_xml", "ok\n" + xml(**MANY) + "\n" + xml(a="three"), "ok", None, [TYPED, ("f", {"a": "three"})], []),
    ("qwen_xml", "<tool_call>\nf\n</tool_call>", "", None, [], ["<function=NAME>"]),
    ("qwen_xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "", None, [], ["of f cannot be read"]),
    ("glm", "<think>hm</think>\nso\n" + glm(**MANY), "so", "hm", [TYPED], []),
    ("glm", "<tool_call>f</tool_call><tool_call> </tool_call>", "", None, [("f", {})], ["begins with the name"]),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key></tool_call>", "", None, [], ["cannot be read"]),
    ("llama_json", '{"name": "f", "parameters": {"a": 1}}', "", None, CALL, []),
    (
        "llama_json",
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}} so',
        "so",
        None,
        CALL * 2,
        [],
    ),
    ("llama_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', None, [], []),
    ("llama_json", 'Sure: {"name": "f", "parameters": {"a": 1', "Sure:", None, [], ["not JSON"]),
    ("llama_json", "<|python_tag|>search(1)", "", None, [], ["not JSON"]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "f"}]',
        "",
        None,
        [*CALL, ("f", {})],
        [],
    ),
    (
        "mistral",
        '[THINK]hm[/THINK]so[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}',
        "so",
        "hm",
        [*CALL, ("f", {})],
        [],
    ),
    ("mistral", "[TOOL_CALLS]f", "", None, [], ["a name and an object"]),
    ("harmony", HEAD + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', "", "hm", CALL, []),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", None, CALL, []),
    ("harmony", HEAD + "<|channel|>final<|message|>four", "four", "hm", [], []),
    ("harmony", "<|channel|>final<|message|>", "", None, [], []),
    ("harmony", "what", "what", None, [], []),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{a", "", None, [], ["not JSON"]),
]


@pytest.mark.parametrize(("form", "reply", "content", "thoughts", "calls", "problems"), REPLIES)
def test_a_reply_is_read_by_the_form_of_its_family(form, reply, content, thoughts, calls, problems):
    reading = read_reply(form, reply, TOOLS)
    assert (reading.message["content"], list(reading.tool_calls)) == (content, calls)
    assert (reading.message.get("reasoning_content") or reading.message.get("thinking")) == thoughts
    assert len(reading.problems) == len(problems)
    assert all(part in problem for part, problem in zip(problems, reading.problems, strict=True))
    written = [call["function"] for call in reading.message.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in written] == calls


def test_thoughts_that_the_template_opened_are_thoughts():
    assert read_reply("hermes", "hm</think>yes", TOOLS, thinking=True).message == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hm",
    }
    assert read_reply("mistral", '[TOOL_CALLS][{"name": "f", "id": "abcdefghi"}]').message["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("f", {"a": 1}, ""),
        ("f", {"a": 1.0, "x": None, "c": "red"}, ""),
        ("f", {"a": "1"}, 'f: a is of type integer, not "1" (string)'),
        ("f", {"a": True}, "f: a is of type integer, not true (boolean)"),
        ("f", {"a": 1.5}, "f: a is of type integer, not 1.5 (number)"),
        ("f", {"a": 1, "x": "2"}, 'f: x is of type number or null, not "2" (string)'),
        ("f", {"a": 1, "c": "green"}, 'f: c is one of ["red", "blue"], not "green"'),
        ("f", {}, "f needs a; it has a, s, l, x, c"),
        ("f", {"a": 1, "b": 2}, "f has no argument b, only a, s, l, x, c"),
        ("g", {}, "there is no tool 'g', only f, liar, flat"),
        ("liar", {"anything": 1}, ""),
        ("flat", {"a": None}, ""),
    ],
)
def test_arguments_are_checked_against_the_schema(name, arguments, problem):
    assert argument_problem(name, arguments, TOOLS) == problem


def test_a_difference_has_the_first_cause_that_explains_it():
    def cause(sampled, rendered, end=""):
        return drift_cause(
            [NodeText("<u>?<b>"), NodeText(sampled, True, end), NodeText("<u>!<b>")], f"<u>?<b>{rendered}<u>!<b>", "<b>"
        )

    assert cause("a", "a") == ""
    assert cause(" a\n", "a") == "whitespace"
    assert cause('f{"a":1,"b":[2]}', 'f{"b": [2], "a": 1}') == "arguments"
    assert cause('{"n": 1, "id": "x"}', '{"n": 1, "id": "y"}') == "tool_ids"
    assert cause("a<|return|>", "a<|end|>") == "end_of_turn"
    assert cause("a<stop>", "a", end="<stop>") == "end_of_turn"
    assert cause("<think>hm</think>a", "a") == cause("<think>hm", "") == "thinking"
    assert cause("a", "b") == cause('{"a": 1}', '{"a": 2}') == "other"


def wrong(kind: str) -> str:
    """A tool that does what it should not.

    Args:
        kind: what it does.
    """
    if kind == "raises":
        raise KeyError("<|im_end|></s>\ud800")
    if kind == "exits":
        raise SystemExit(3)
    if kind == "unspeakable":
        raise Unspeakable()
    return {  # what it returns is not what its schema says
        "binary": bytes(range(256)),
        "languages": "日本語 שלום 🙂",
        "markers": "</s>\na>42</s>\nu>more<tool_call></tool_call>",
        "long": "x" * 10_000_000,
        "nothing": None,
        "circle": CIRCLE,
        "surrogate": "\udcff",
        "nan": float("nan"),
        "object": Unspeakable(),
    }[kind]


class Unspeakable(Exception):
    """Its text fails."""

    def __str__(self):
        raise RuntimeError("no")


CIRCLE: list = []
CIRCLE.append(CIRCLE)
SHOWN = {
    "raises": "error: KeyError: ",
    "exits": "error: SystemExit: 3",
    "unspeakable": "error: Unspeakable",
    "binary": "\x00",
    "languages": "",
    "markers": "</s>\na>42</s>\nu>more<tool_call></tool_call>",
    "long": "xxxx",
    "nothing": "null",
    "circle": "error: ValueError: Circular",
    "surrogate": "?",
    "nan": "NaN",
    "object": "error: RuntimeError: no",
}


@pytest.mark.parametrize("kind", SHOWN)
def test_whatever_a_tool_does_stays_in_its_message(kind):
    """A tool that lies, or returns what it should not: the conversation has one message for it, and continues."""
    from family_templates import tokenizer_of

    from funrl.environments.chat import ChatOptions, TemplateChat

    tokenizer = tokenizer_of("qwen2_5")
    chat = TemplateChat(tokenizer, options=ChatOptions(tool_tokens=300))
    call = f'<tool_call>{{"name": "wrong", "arguments": {{"kind": {json.dumps(kind)}}}}}</tool_call>'
    replies = iter([call, "done"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    engine = ScriptedEngine(lambda prompt: next(replies), tokenizer=tokenizer, end=end)
    setup = SETUP._replace(chat=chat, sampling=Sampling(max_new_tokens=400))
    environment = tool_environment([wrong], lambda messages: 1.0)
    groups = episode_groups(examples_of("go"), 1, 0)
    ((_, episode),) = run_episodes(engine, SINGLE, environment, groups, setup, EpisodeLimits(retries=0)).episodes
    assert (episode.status, episode.rewards) == ("done", {"policy": 1.0}), episode.problem
    nodes = list(episode.ends[0].nodes())
    assert [node.sampled for node in nodes] == [False, True, False, True]
    assert len(nodes[2].tokens) < 600 and nodes[2].tokens.count(end) == 1
    shown = tokenizer.decode(nodes[2].tokens, skip_special_tokens=False)
    result = shown.partition("<tool_response>\n")[2].rpartition("\n</tool_response>")[0]
    assert result.startswith(SHOWN[kind]), result[:300]
    assert ("cut here: " in result) == (kind == "long")
