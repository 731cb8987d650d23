"""The host's CPU time in a turn of an episode: rendering, reading, all else beside tokenising; and TRL's tool loop.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py
    OMP_NUM_THREADS=1 python benchmarks/episodes.py --turns=8,128 --result_tokens=256

An engine that computes nothing calls a tool in each turn, so that what is left is Python: the policy, the chat
template, the parser and the tool. A turn is the time between two requests, tokenising is the time within the tokenizer,
both of all threads of the process, so that other programs change them little.
Where trl is installed, its loop runs beside, with the same calls, tool, tokenizer and template, and no model either.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import string
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from absl import app, flags

from funrl.data.prompts import Prompt, encode
from funrl.environments.adapters import tool_environment
from funrl.environments.chat import TemplateChat
from funrl.rollout.policy import EpisodeLimits, Policy, PolicySetup
from funrl.rollout.requests import Completion, Request
from funrl.rollout.sampling_parameters import Sampling

TURNS = flags.DEFINE_list("turns", ["8", "128"], "turns of an episode")
RESULT = flags.DEFINE_integer("result_tokens", 100, "tokens of a tool's result")
REPEATS = flags.DEFINE_integer("repeats", 5, "times 128 turns in each line; the quickest late turn counts")
INSTALL = "trl is not installed here, so there is nothing to compare with: pip install trl datasets accelerate"

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{% if m.role == 'tool' %}{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}{% else %}{{ m.content }}"
    "{% endif %}{% for c in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) + '
    "'}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = '<tool_call>\n{"name": "count", "arguments": {"word": "the"}}\n</tool_call>'


def count(word: str) -> str:
    """Count a word.

    Args:
        word: which one.
    """
    return "the " * (RESULT.value - 1) + str(len(word))


class Timed:
    """A tokenizer whose time is measured.

    Attributes:
      seconds: within `encode` and `decode`.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tokenizer, name)
        return functools.partial(self._timed, value) if name in ("encode", "decode") else value

    def _timed(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args, **named)
        finally:
            self.seconds += time.process_time() - begin


class Requests:
    """Completions that are one call of the tool.

    Attributes:
      times: of each request, and of the tokenizer until then, in seconds.
    """

    def __init__(self, tokenizer: Timed):
        ids = [*tokenizer.encode(CALL), tokenizer.eos_token_id]
        logp = torch.zeros(len(ids))
        versions = torch.zeros(len(ids), dtype=torch.int64)
        self._completion = Completion(0, torch.tensor(ids), logp, raw_logp=logp, versions=versions, finish="stop")
        self._tokenizer = tokenizer
        self.times: list[tuple[float, float]] = []

    async def __call__(self, request: Request) -> Completion:
        del request
        self.times.append((time.process_time(), self._tokenizer.seconds))
        return self._completion


def main(argv: list[str]) -> None:
    del argv
    torch.set_num_threads(1)
    print(f"{'turns':>8} {'turns/s':>9} {'a turn':>9} {'tokenising':>11} {'the rest':>9} {'rendering':>10}")
    for turns in map(int, TURNS.value):
        turn, tokenising, rendering = episode_times(turns)
        rest = turn - tokenising
        print(
            f"{turns:8} {1 / turn:9.0f} {turn * 1e6:6.0f} us {tokenising * 1e6:8.0f} us {rest * 1e6:6.0f} us "
            f"{rendering / turn:9.0%}",
            flush=True,
        )
    if importlib.util.find_spec("trl") is None:
        print(INSTALL)
        return
    for turns in map(int, TURNS.value):
        ours, theirs = episode_times(turns, trl_template())[0], trl_turn(turns)
        print(f"trl {turns:4} turns: {theirs * 1e6:6.0f} us a turn of its loop, {theirs / ours:.1f} times funrl's")


def episode_times(turns: int, template: str = TEMPLATE) -> tuple[float, float, float]:
    """Seconds of the quickest of the last eighth of turns, of its tokenising, and of its rendering and reading."""
    tokenizer = Timed(chat_tokenizer(template))
    environment = tool_environment([count], lambda messages: 0.0)
    example = encode(Prompt("count", {}), tokenizer._tokenizer)
    rows: list[tuple[float, float, float]] = []
    for _ in range(max(1, REPEATS.value * 128 // turns)):
        chat = TimedChat(tokenizer)
        requests = Requests(tokenizer)
        policy = Policy(requests, PolicySetup(Sampling(), chat), 0, EpisodeLimits(turns=turns + 1))
        asyncio.run(environment.run(policy, example, 0))
        late = range(turns - max(1, turns // 8), turns)
        for n in late:
            begin, end = requests.times[n], requests.times[n + 1]
            rows.append((end[0] - begin[0], end[1] - begin[1], chat.times[n + 1] - chat.times[n]))
    return min(rows)


class TimedChat(TemplateChat):
    """A chat whose time is measured: in `times`, seconds of rendering and reading until each reading."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self.seconds = 0.0
        self.times: list[float] = []

    def continuation(self, *args: Any, **named: Any) -> list[int]:
        return self._timed(super().continuation, *args, **named)

    def fork_cause(self, *args: Any, **named: Any) -> tuple[str, bool]:
        return self._timed(super().fork_cause, *args, **named)

    def read(self, *args: Any, **named: Any) -> Any:
        self.times.append(self.seconds)
        return self._timed(super().read, *args, **named)

    def _timed(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args, **named)
        finally:
            self.seconds += time.process_time() - begin


def trl_template() -> str:
    """A template that TRL knows: it takes no other."""
    found = importlib.util.find_spec("trl")
    assert found is not None and found.submodule_search_locations
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / "qwen2_5.jinja").read_text()


def trl_turn(turns: int) -> float:
    """Seconds of a turn of TRL's tool loop, all turns of an episode together, whose model writes the same calls."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = chat_tokenizer(trl_template())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=1 << 20,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_completion_length=1 << 20,
            per_device_train_batch_size=2,
            num_generations=2,
            max_tool_calling_iterations=turns,
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM(config),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "count"}]}]),
            processing_class=tokenizer,
            tools=[count],
        )
    calls = [*tokenizer.encode(CALL), tokenizer.eos_token_id]
    trainer._generate_single_turn = lambda prompts, *args, **named: ([list(calls) for _ in prompts], None)
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"count": count}], [{}]
    seconds: list[float] = []
    for _ in range(max(2, REPEATS.value * 8 // turns)):
        message = {"role": "user", "content": "count"}
        prompt = tokenizer.apply_chat_template([message], tools=[count], add_generation_prompt=True, return_dict=False)
        function = {"name": "count", "arguments": {"word": "the"}}
        completion = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
        begin = time.process_time()
        done = trainer._tool_call_loop([[message]], [prompt], [list(calls)], [completion], None, None, {})
        assert done[4] == turns, f"TRL has called its tool {done[4]} times"
        seconds.append((time.process_time() - begin) / turns)
    return min(seconds)


def chat_tokenizer(template: str) -> Any:
    """A tokenizer of letters, and of the words and marks of these conversations."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*pre_tokenizers.ByteLevel.alphabet(), *string.printable})
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ċ")]
    words = [*letters, *("".join(pair) for pair in merges)]
    core = Tokenizer(BPE({word: i for i, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(word, normalized=False) for word in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


if __name__ == "__main__":
    app.run(main)
