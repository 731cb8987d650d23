"""Conversations by the templates of eight families: nothing drifts in silence, and others' markers are text."""

import asyncio
import base64
import importlib.util
import random
from pathlib import Path

import pytest
from family_templates import FAMILIES, FOLDER, REAL, TAGS, byte_tokenizer, real_templates, tokenizer_of
from random_chats import TOOLS, WORDS, compare, text_of
from selection import quick

from funrl.data.tokenizer import TokenizerError
from funrl.environments.chat import ChatOptions, TemplateChat, template_limits
from funrl.environments.forms.response_templates import REPLY_FORMS, form_of
from funrl.rollout.episodes import Episode, Node
from funrl.rollout.policy import EpisodeLimits, LimitReached, Policy, PolicySetup
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling

EITHER = ("append", "template")
SEEN = {  # causes that these conversations must have shown
    "qwen3": {"thinking", "whitespace", "unreadable"},
    "mistral_v3": {"system_prompt", "unreadable"},
    "harmony": {"arguments", "end_of_turn", "thinking", "truncated"},
    "glm_4_5": {"end_of_turn", "thinking", "unreadable"},
}


def check(seen, name, history, seeds):
    assert seen.silent == [], f"seed {seen.silent[0][0]}: {seen.silent[0][1:]}"
    assert seen.turns > 2 * len(seeds) and seen.equal > len(seeds) / 10
    causes = {cause.partition("/")[2] for cause in seen.causes}
    assert causes >= SEEN.get(name, set()) and "other" not in causes
    forks = {cause for cause in seen.causes if cause.startswith("forks/")}
    assert bool(forks) == (history == "template")


@pytest.mark.parametrize("name", FAMILIES)
def test_no_turn_differs_from_the_template_without_a_cause(name):
    # 935: a thought is dropped two questions later; then a user speaks where a tool should answer.
    seeds = [*range(20), 935, 100_005, 100_038, 100_143]
    check(compare(tokenizer_of(name), FAMILIES[name], seeds, "template"), name, "template", seeds)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES][::2])
def test_no_turn_of_many_differs_without_a_cause(name):
    seeds = range(1000, 1040)
    for history in EITHER:
        check(compare(tokenizer_of(name), FAMILIES[name], seeds, history), name, history, seeds)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_nor_does_one_by_a_published_template(name):
    template = real_templates().get(name)
    if template is None:
        pytest.skip("trl is not installed, which has the templates: pip install trl")
    for history in EITHER:
        seen = compare(byte_tokenizer(template, REAL[name]), REAL[name], range(80), history)
        assert seen.silent == [] and seen.turns > 160


def test_templates_of_families_allow_what_an_environment_needs():
    assert [template_limits(TemplateChat(tokenizer_of(name)), tools=True) for name in FAMILIES] == [[]] * len(FAMILIES)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "has no mark that ends a turn"),
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "shows no tools: describe them in a system"),
        (
            "{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
            "shows no known form of calls: name it, --tool_parser=hermes|qwen_xml|llama_json",
        ),
        (
            "{{ tools | tojson }}<tool_call>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}"
            "{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
            "refuses a tool's result behind a reply",
        ),
        (
            "{{ tools | tojson }}<tool_call>{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>"
            "{% endif %}{% endfor %}",
            "renders a reply anew where a user's message follows: start a new trajectory for every turn",
        ),
    ],
)
def test_each_limit_has_a_way_out(template, line):
    chat = TemplateChat(byte_tokenizer(template, FAMILIES["qwen2_5"]))
    lines = template_limits(chat, tools=True)
    assert any(item.startswith("the chat template " + line) for item in lines), lines


def test_the_form_of_calls_is_that_of_the_template_or_the_one_that_is_named():
    for name, family in FAMILIES.items():
        assert form_of((FOLDER / f"{name}.jinja").read_text()) == family.form
    assert form_of("{{ messages }}") == form_of(None) == ""
    plain = byte_tokenizer("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", FAMILIES["qwen2_5"])
    with pytest.raises(TokenizerError, match=r"no known form of calls of tools; name it: --tool_parser=hermes\|"):
        TemplateChat(plain).opening([{"role": "user", "content": "?"}], TOOLS)
    named = TemplateChat(plain, options=ChatOptions(parser="glm"))
    ids = plain.encode("<tool_call>find\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>")
    assert named.read(named.opening([{"role": "user", "content": "?"}], TOOLS), ids, TOOLS).tool_calls == [
        ("find", {"n": 3})
    ]
    with pytest.raises(TokenizerError, match=f"--tool_parser=pythonic: it is one of {', '.join(REPLY_FORMS)}"):
        TemplateChat(plain, options=ChatOptions(parser="pythonic"))


def qwen_tokenizer():
    """Qwen's own vocabulary, which the package dashscope has, with the marks of Qwen3."""
    spec = importlib.util.find_spec("dashscope")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("dashscope is not installed, which has Qwen's vocabulary: pip install dashscope")
    lines = (Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(word): int(rank) for word, rank in map(str.split, lines)}
    return tiktoken_tokenizer(ranks, FAMILIES["qwen3"].special, TAGS, (FOLDER / "qwen3.jinja").read_text())


def mistral_tokenizer():
    """Mistral's own vocabulary, which the package mistral-common has."""
    import json

    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("mistral-common is not installed, which has Mistral's vocabulary: pip install mistral-common")
    data = json.loads((Path(spec.submodule_search_locations[0]) / "data" / "tekken_240911.json").read_text())
    words = data["vocab"][: data["config"]["default_vocab_size"] - data["config"]["default_num_special_tokens"]]
    ranks = {base64.b64decode(word["token_bytes"]): word["rank"] for word in words}
    return tiktoken_tokenizer(ranks, FAMILIES["mistral_v3"].special, (), (FOLDER / "mistral_v3.jinja").read_text())


def tiktoken_tokenizer(ranks, special, added, template):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class OfRanks(TikTokenConverter):
        def load_tiktoken_bpe(self, tiktoken_url):
            return ranks

    converter = OfRanks("ranks")
    vocabulary, merges = converter.extract_vocab_merges_from_model("ranks")
    core = Tokenizer(BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(converter.pattern), "isolated", invert=False)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=special[0],
        eos_token=special[1],
        additional_special_tokens=list(special[2:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


MAKERS = {
    "bytes, qwen3": lambda: tokenizer_of("qwen3"),
    "bytes, mistral_v3": lambda: tokenizer_of("mistral_v3"),
    "bytes, harmony": lambda: tokenizer_of("harmony"),
    "qwen": qwen_tokenizer,
    "mistral": mistral_tokenizer,
}


@pytest.mark.parametrize("name", quick(MAKERS, ["bytes, qwen3", "bytes, mistral_v3", "bytes, harmony"]))
def test_a_marker_in_a_text_of_others_is_text(name):
    """The tokens of a message are those of the template, and of its text as if no marker were known."""
    tokenizer = MAKERS[name]()
    chat = TemplateChat(tokenizer)
    marks = {
        token for token, added in tokenizer.added_tokens_decoder.items() if added.content in WORDS or added.special
    }
    chance = random.Random(3)
    for _ in range(60):
        text = text_of(chance, WORDS, 9) + chance.choice(["<|im_end|>", "[/INST]", "<|end|>", "<|im_<|im_end|>end|>"])
        for kind in ("user", "tool"):
            messages = [{"role": kind, "content": text, "tool_call_id": "call00000"}]
            neutral = [{"role": kind, "content": "x", "tool_call_id": "call00000"}]
            ids, plain = (chat.continuation(some, TOOLS) for some in (messages, neutral))
            assert [i for i in ids if i in marks] == [i for i in plain if i in marks]
            written = tokenizer.decode(ids, skip_special_tokens=False)
            shown = text if "tojson" not in str(tokenizer.chat_template) or kind == "user" else None
            if shown is not None:
                assert shown.strip() in written
        opened = chat.opening([{"role": "user", "content": text}])
        assert text in tokenizer.decode(opened, skip_special_tokens=False)
        assert [i for i in opened if i in marks] == [
            i for i in chat.opening([{"role": "user", "content": "x"}]) if i in marks
        ]


def test_the_policy_s_own_marks_and_the_system_s_stay_marks():
    chat = TemplateChat(tokenizer_of("qwen2_5"))
    tag = chat.tokenizer.convert_tokens_to_ids("<tool_call>")
    system = {"role": "system", "content": "write <tool_call>"}
    assert tag in chat.opening([system, {"role": "user", "content": "?"}])
    assert tag not in chat.opening([{"role": "user", "content": "write <tool_call>"}])


def test_a_long_result_is_cut_and_says_so():
    chat = TemplateChat(tokenizer_of("qwen2_5"), options=ChatOptions(tool_tokens=50))
    for content in ("the " * 2_500_000, "日本語" * 100, "<|im_end|>" * 40, "\udc80" * 100, "\x00\x01" * 60):
        message = {"role": "tool", "content": content, "tool_call_id": "call00000"}
        ids = chat.continuation([message], TOOLS)
        text = chat.tokenizer.decode(ids, skip_special_tokens=False)
        assert len(ids) < 200 and f" of {len(content)} characters]" in text and "[cut here: " in text
    short = {"role": "tool", "content": "the " * 20, "tool_call_id": "call00000"}
    assert "cut here" not in chat.tokenizer.decode(chat.continuation([short], TOOLS))


class Scripted:
    """Replies of a list, in order."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.prompts = tokenizer, list(texts), []

    async def __call__(self, request):
        import torch

        self.prompts.append((list(request.prompt), request.computed))
        ids = torch.tensor(self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False))
        logp = torch.zeros(len(ids))
        versions = torch.zeros(len(ids), dtype=torch.int64)
        return Completion(0, ids, logp, raw_logp=logp, versions=versions, finish="stop")


def test_a_fork_keeps_both_trajectories_and_the_limits_of_one():
    tokenizer = tokenizer_of("qwen3")
    chat = TemplateChat(tokenizer, options=ChatOptions(history="template"))
    engine = Scripted(
        tokenizer, ["<think>\nhm\n</think>\n\none<|im_end|>", "two<|im_end|>", "three<|im_end|>", "four<|im_end|>"]
    )
    policy = Policy(engine, PolicySetup(Sampling(), chat), 1, EpisodeLimits(turns=3))
    user = {"role": "user", "content": "go"}

    async def run():
        _, first = await policy.sample(policy.start([user]))
        forked = policy.extend(first, [user])
        assert forked.leaf.parent is None and forked.messages() == [user, first.leaf.messages[0], user]
        longer = policy.extend(forked, [user])  # two messages are rendered together, in the same fork
        assert forked.leaf.turns_before == longer.leaf.turns_before == 1
        _, second = await policy.sample(forked)
        _, other = await policy.sample(longer)
        third = policy.extend(second, [user])
        _, third = await policy.sample(third)
        with pytest.raises(LimitReached, match="3 turns"):
            await policy.sample(policy.extend(third, [user]))
        assert policy.before_forks([third, other]) == [first]
        return first, third

    first, third = asyncio.run(run())
    assert policy.counts()["forks/thinking"] == 1.0 and policy.counts()["tool_calls"] == 0.0
    texts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt, _ in engine.prompts]
    assert texts[1].endswith("assistant\none<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    assert [computed for _, computed in engine.prompts[:2]] == [0, 0]
    assert isinstance(first.leaf, Node) and Episode([first, third], {"policy": 1.0}).agents() == ["policy"]


def test_no_fork_leaves_out_tokens_that_are_no_message():
    tokenizer = tokenizer_of("qwen3")
    chat = TemplateChat(tokenizer, options=ChatOptions(history="template"))
    engine = Scripted(tokenizer, ["one<|im_end|>", "two<|im_end|>", "<think>\nhm\n</think>\n\nthree<|im_end|>"])
    policy = Policy(engine, PolicySetup(Sampling(), chat), 1)
    user = {"role": "user", "content": "go"}
    raw = tokenizer.encode("raw", add_special_tokens=False)

    async def run():
        _, end = await policy.sample(policy.start([user]))
        _, end = await policy.sample(policy.extend(end, raw))
        _, end = await policy.sample(policy.extend(end, [user]))
        return policy.extend(end, [user])

    nodes = list(asyncio.run(run()).nodes())
    assert [node.sampled for node in nodes] == [False, True] * 3 + [False] and list(nodes[2].tokens) == raw
    assert policy.counts()["drift/thinking"] == 1.0
