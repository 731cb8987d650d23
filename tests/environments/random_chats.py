"""Random conversations of a policy that writes like a family, compared with its chat template turn by turn."""

import asyncio
import json
import random
from collections import Counter

import torch

from funrl.data.tokenizer import TokenizerError
from funrl.environments.chat import ChatOptions, TemplateChat
from funrl.rollout.policy import EpisodeLimits, Policy, PolicySetup
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling

SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("find", "add_1")
]
WORDS = [
    "the",
    "then",
    "3.5",
    "naïve",
    "日本語",
    "🙂",
    "שלום",
    "{",
    "}",
    '"',
    "\\n",
    "\n",
    "\n\n",
    "  ",
    "<b>",
    "'",
    "&amp;",
    "<|im_end|>",
    "<|im_start|>",
    "<tool_call>",
    "</tool_call>",
    "</think>",
    "<think>",
    "[INST]",
    "</s>",
    "<|end|>",
    "<|eot_id|>",
    "<|user|>",
    "[TOOL_CALLS]",
    "<|channel|>",
    "<|start|>",
    "\t",
    "\x00",
    "é",
    "e\u0301",
]
OWN_WORDS = ["the", "then", "3.5", "naïve", "日本語", "🙂", "{", '"', "\n", "  ", "<b>", "'", "x", "yes", "no"]
VALUES = ["a b", "日本", 'q"uote', "line\nbreak", "", "{", 3, -1, [1, "x"], [], 10**12]


def text_of(chance, words, most):
    return " ".join(chance.choice(words) for _ in range(chance.randrange(most)))


class Writer:
    """Completes prompts by what a family could write; some replies are cut off or have faults."""

    def __init__(self, tokenizer, reply, ends, chance):
        self.tokenizer, self.reply, self.ends, self.chance = tokenizer, reply, ends, chance
        self.wrote = ""

    async def __call__(self, request):
        chance = self.chance
        calls = [
            (chance.choice(["find", "add_1", "unknown"]), self.arguments())
            for _ in range(chance.choice([0, 0, 1, 1, 2]))
        ]
        thoughts = text_of(chance, OWN_WORDS, 4).strip() if chance.random() < 0.4 else None
        content = text_of(chance, OWN_WORDS, 6)
        content = content.strip() if chance.random() < 0.8 else content
        text = self.reply(content, calls, thoughts, chance)
        if chance.random() < 0.1:
            text = text.replace("}", "", 1)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        finish = "stop"
        if chance.random() < 0.1 and len(ids) > 2:
            ids, finish = ids[: chance.randrange(1, len(ids))], "length"
        else:
            ids = [*ids, self.tokenizer.convert_tokens_to_ids(self.ends[bool(calls)])]
        logp = torch.zeros(len(ids))
        return Completion(
            0, torch.tensor(ids), logp, raw_logp=logp, versions=torch.zeros(len(ids), dtype=torch.int64), finish=finish
        )

    def arguments(self):
        return {key: self.chance.choice(VALUES) for key in ("s", "n", "l") if self.chance.random() < 0.7}


class Compared:
    """What was seen: turns, those equal to the template's rendering, causes, and differences that nothing names."""

    def __init__(self):
        self.turns = self.equal = self.refused = 0
        self.causes, self.silent = Counter(), []


def rendering(tokenizer, messages, tools):
    """Text of a history by the template, with the ids that it demands."""
    named = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [{"id": f"call{n:05}", **call} for n, call in enumerate(calls)]}
        named.append(message)
    return tokenizer.apply_chat_template(named, tools=tools or None, tokenize=False, add_generation_prompt=True)


def converse(chat, family, seed, seen):
    """One conversation; every turn is compared with the rendering of the whole history."""
    chance = random.Random(seed)
    tokenizer = chat.tokenizer
    policy = Policy(
        Writer(tokenizer, family.reply, family.ends, chance),
        PolicySetup(Sampling(), chat),
        seed,
        EpisodeLimits(turns=99),
    )
    tools = TOOLS if chance.random() < 0.8 else ()
    messages = [{"role": "system", "content": text_of(chance, OWN_WORDS, 4)}] if chance.random() < 0.3 else []
    messages.append({"role": "user", "content": text_of(chance, WORDS, 8)})

    async def run():
        trajectory = policy.start(messages, tools)
        since = Counter()
        for _ in range(chance.randrange(1, 7)):
            before = policy.counts()
            reply, trajectory = await policy.sample(trajectory)
            answers = len(reply.tool_calls) + len(reply.problems)
            if tools and answers and chance.random() < 0.9:
                ids = [call.get("id") for call in reply.message.get("tool_calls", ())] + [None] * len(reply.problems)
                new = [
                    {"role": "tool", "tool_call_id": ids[n] or f"call{n:05}", "content": text_of(chance, WORDS, 8)}
                    for n in range(answers)
                ]
            else:
                new = [{"role": "user", "content": text_of(chance, WORDS, 8)}]
            try:
                trajectory = policy.extend(trajectory, new)
            except TokenizerError:  # the template has no place for it
                seen.refused += 1
                return
            seen.turns += 1
            counted = Counter({k: v for k, v in policy.counts().items() if "/" in k})
            counted.subtract({k: v for k, v in before.items() if "/" in k})
            new_causes = [name for name, number in counted.items() if number]
            seen.causes.update(new_causes)
            if any(name.startswith("forks/") for name in new_causes):
                since.clear()
            else:
                since.update(new_causes)
            sampled = tokenizer.decode(trajectory.token_ids(), skip_special_tokens=False)
            try:
                rendered = rendering(tokenizer, chat.prepared(trajectory.messages()), tools)
            except Exception as error:
                rendered = f"refused: {error}"
            seen.equal += sampled == rendered
            if sampled != rendered and not since:
                seen.silent.append((seed, sampled, rendered, json.dumps(trajectory.messages(), ensure_ascii=False)))

    asyncio.run(run())


def compare(tokenizer, family, seeds, history="append"):
    """Many conversations."""
    chat = TemplateChat(tokenizer, options=ChatOptions(history=history, parser=family.form))
    seen = Compared()
    for seed in seeds:
        converse(chat, family, seed, seen)
    return seen
