"""The host's time in a turn of an episode: rendering, reading, and all else beside tokenising; and TRL's tool loop.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py
    OMP_NUM_THREADS=1 python benchmarks/episodes.py --turns=8,128 --result_tokens=256 --trl_turns=8

An engine that computes nothing calls a tool in each turn, so that what is left is Python: the policy, the chat template,
the parser and the tool. A turn is the time between two requests, tokenising is the time within the tokenizer. TRL's loop
runs on a small random model, as funrl does beside it, with the same model, tool and seeds, where trl is installed.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from absl import app, flags

from funrl.data.prompts import Prompt, encode
from funrl.environments.adapters import tool_environment
from funrl.environments.chat import TemplateChat
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.models import decoder_config, decoder_model
from funrl.models.huggingface import directories as hf
from funrl.rollout.native.engine import native_engine
from funrl.rollout.policy import EpisodeLimits, Policy, PolicySetup
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling

TURNS = flags.DEFINE_list("turns", ["8", "128"], "turns of an episode")
RESULT = flags.DEFINE_integer("result_tokens", 100, "tokens of a tool's result")
REPEATS = flags.DEFINE_integer("repeats", 5, "times 128 turns in each line; the quickest of the last eighth of turns counts")
TRL_TURNS = flags.DEFINE_integer("trl_turns", 8, "calls of a tool in the comparison with TRL; 0: no comparison")
TRL_EPISODES = flags.DEFINE_integer("trl_episodes", 8, "episodes of that comparison")
INSTALL = "trl is not installed here, so there is nothing to compare with: pip install trl datasets accelerate"

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{% if m.role == 'tool' %}{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}{% else %}{{ m.content }}"
    "{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' + (c.function.arguments | tojson) + "
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
        begin = time.perf_counter()
        try:
            return function(*args, **named)
        finally:
            self.seconds += time.perf_counter() - begin


class Requests:
    """Completions that are one call of the tool.

    Attributes:
      times: of each request, and of the tokenizer until then, in seconds.
    """

    def __init__(self, tokenizer: Timed):
        ids = tokenizer.encode(CALL) + [tokenizer.eos_token_id]
        logp = torch.zeros(len(ids))
        versions = torch.zeros(len(ids), dtype=torch.int64)
        self._completion = Completion(0, torch.tensor(ids), logp, raw_logp=logp, versions=versions, finish="stop")
        self._tokenizer = tokenizer
        self.times: list[tuple[float, float]] = []

    async def __call__(self, prompt: Sequence[int], sampling: Sampling, seed: int, computed: int) -> Completion:
        self.times.append((time.perf_counter(), self._tokenizer.seconds))
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
    if TRL_TURNS.value:
        compare_with_trl()


def episode_times(turns: int) -> tuple[float, float, float]:
    """Seconds of the quickest of the last eighth of turns, of its tokenising, and of its rendering and reading."""
    tokenizer = Timed(chat_tokenizer())
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
        begin = time.perf_counter()
        try:
            return function(*args, **named)
        finally:
            self.seconds += time.perf_counter() - begin


def chat_tokenizer() -> Any:
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
    tokenizer.chat_template = TEMPLATE
    return tokenizer


if __name__ == "__main__":
    app.run(main)
