"""A chat of characters, engines that sample from it, and environments whose answers are known."""

import dataclasses
import string

import torch

from funrl import trees
from funrl.data.prompts import Prompt, encode
from funrl.data.tokenizer import character_tokenizer
from funrl.environments.chat import TemplateChat
from funrl.mesh import rules
from funrl.mesh.mesh import SINGLE
from funrl.models import decoder_config, decoder_model, with_fields
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.rollout.engine import EngineCost, complete
from funrl.rollout.episode_replay import turn_request
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.policy import PolicySetup
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling

ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}a>{% endif %}"
)
END = 1  # id of </s>


def chat_of(template=TEMPLATE):
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    return TemplateChat(tokenizer)


CHAT = chat_of()
TOKENIZER = CHAT.tokenizer
CONFIG = decoder_config(
    vocab=len(TOKENIZER), embed=32, layers=2, heads=4, kv_heads=2, head=8, mlp=48, max_positions=1024
)
STATES = with_fields(CONFIG, family="qwen3_next", mixers=(GatedDeltaNet(2, 4, 8, 6), None))
SAMPLING = Sampling(max_new_tokens=12, stop=(END, 30, 50), samples=3)  # also by "C" and "W": most turns end by chance
SETUP = PolicySetup(SAMPLING, CHAT)


def engine_of(mesh=SINGLE, dtype=torch.float32, config=CONFIG, **options):
    """A native engine with random weights, the same numbers in every dtype."""
    engine = native_engine(decoder_model(config), mesh, dtype, NativeOptions(decode=TOKENIZER.decode, **options))
    params = decoder_model(config).init(torch.Generator().manual_seed(0))
    for name in {"embed", "unembed"} & set(params):
        params[name] = params[name] * 25
    params = trees.map(lambda x: x.to(dtype), params)
    engine.load(engine.weights.named(rules.shard(params, engine.weights.layouts, mesh)), 7)
    return engine


def examples_of(*prompts, **fields):
    return [encode(Prompt(prompt, fields), TOKENIZER) for prompt in prompts]


def text(tokens):
    return TOKENIZER.decode(list(tokens))


class ScriptedEngine:
    """An engine whose completions a function gives: text of the prompt -> text, ended by </s>."""

    def __init__(self, answer, rows=64, passes=2, tokenizer=TOKENIZER, end=END):
        self.answer, self.rows, self.passes = answer, rows, passes
        self.encode, self.decode, self.end = tokenizer.encode, tokenizer.decode, end
        self.paused, self.version = False, 7
        self.requests, self.seen, self.cancelled = {}, [], []

    def check(self, requests):
        for request in requests:
            if len(request.prompt) > 2000:
                raise ValueError(f"prompt {request.number} is too long")

    def submit(self, requests):
        self.check(requests)
        self.seen += requests
        self.requests |= {request.number: [request, self.passes] for request in requests}

    def step(self):
        done = []
        for number, entry in list(self.requests.items())[: self.rows]:
            entry[1] -= 1
            if not entry[1]:
                del self.requests[number]
                ids = self.encode(self.answer(self.decode(entry[0].prompt)))[: entry[0].sampling.max_new_tokens]
                finish = "length" if len(ids) == entry[0].sampling.max_new_tokens else "stop"
                tokens = torch.tensor([*ids, self.end] if finish == "stop" else ids)
                logp = torch.zeros(len(tokens))
                versions = torch.full((len(tokens),), 7)
                done.append(Completion(number, tokens, logp, raw_logp=logp, versions=versions, finish=finish))
        return done

    def sampled(self, number, begin=0):
        return []

    def reserve(self, tokens):
        self.reserved = tokens

    def cost(self):
        return EngineCost(
            0, 0, 0, used_pages=0, peak_pages=0, rows=0, passes=0, prefilled=0, cached=0, decoded=0, preempted=0
        )

    def unfinished(self):
        return len(self.requests)

    def room(self):
        return max(0, self.rows - len(self.requests))

    def cancel(self, numbers):
        self.cancelled += [number for number in numbers if self.requests.pop(number, None)]
        return []


def numbers(node):
    return [None if x is None else x.tolist() for x in (node.raw_logp, node.sampling_logp, node.versions)]


def plain(episode):
    """An episode as values that can be compared."""
    nodes = {}
    for end in episode.ends:
        for node in end.nodes():
            nodes.setdefault(node, len(nodes))
    facts = [(nodes.get(node.parent), list(node.tokens), node.sampled, node.finish, numbers(node)) for node in nodes]
    turn_rewards = {nodes[node]: reward for node, reward in episode.turn_rewards.items()}
    ends = [(end.agent, nodes[end.leaf]) for end in episode.ends]
    rest = dataclasses.replace(episode, ends=[], turn_rewards={}, problem="")
    return facts, turn_rewards, ends, rest


def differing_turns(engine, episodes):
    """The episode, the node and the new completion of each turn that an engine samples differently now."""
    nodes = {node: n for n, x in enumerate(episodes) for end in x.ends for node in end.nodes() if node.sampled}
    requests = [turn_request(node)._replace(number=number) for number, node in enumerate(nodes)]
    again = zip(nodes.items(), complete(engine, requests), strict=True)
    return [(episode, node, x) for (node, episode), x in again if x.tokens.tolist() != list(node.tokens)]
