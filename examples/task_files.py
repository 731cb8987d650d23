"""Parts of the examples env_*.py: a small decoder that chats, the files of a task, and its demonstrator.

The tokenizer has one token a character of an alphabet, and one for each role and some words. The demonstrator talks to
the task's own environment, so the conversations that are imitated have the messages that episodes have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funrl.data.prompts import Example, Prompt
from funrl.environments.environment import PlainEnvironment
from funrl.models import decoder_model
from funrl.models.huggingface import directories as hf
from funrl.rollout.episodes import Message
from funrl.tasks.calculator import chat_model, chat_tokenizer

CONVERSATIONS = 25_600  # as many as 400 steps of 64 take


class Task(NamedTuple):
    """A task for a decoder of 90,000 parameters.

    Attributes:
      alphabet, words: tokens of its tokenizer; the alphabet has "?", which stands for any other character.
      vocab: token ids of the decoder, a multiple of 16.
      positions: of the longest episode.
      prompts: to train on.
      heldout: prompts to evaluate on.
      demonstrations: records of an imperfect demonstrator.
    """

    alphabet: str
    words: Sequence[str]
    vocab: int
    positions: int
    prompts: Sequence[Prompt]
    heldout: Sequence[Prompt]
    demonstrations: Sequence[dict[str, Any]]


def write_files(task: Task, folder: str | Path) -> None:
    """Write a model with random weights, `initial`, and prompts, held-out prompts and demonstrations as JSON lines."""
    folder = Path(folder)
    model = decoder_model(chat_model(16, task.vocab, task.positions))
    tokenizer = chat_tokenizer(task.alphabet, task.words)
    hf.save(folder / "initial", model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    records = {
        "prompts": [{"prompt": prompt.prompt, **prompt.fields} for prompt in task.prompts],
        "heldout": [{"prompt": prompt.prompt, **prompt.fields} for prompt in task.heldout],
        "demonstrations": task.demonstrations,
    }
    for name, rows in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def demonstrated(
    environment: PlainEnvironment, prompt: Prompt, reply: Callable[[Sequence[Message]], str], seed: int = 0
) -> list[Message]:
    """Messages of a demonstrator and an environment, up to the demonstrator's last reply.

    Args:
      environment: a new one.
      prompt: that the episode begins with.
      reply: (messages so far) -> text of the demonstrator's next turn.
      seed: of the episode.
    """
    messages, _ = environment.reset(as_example(prompt), seed)
    messages = [*messages]
    ended = False
    while not ended:
        message = {"role": "assistant", "content": reply(messages)}
        messages.append(message)
        further, _, ended = environment.step(message)
        if not ended:
            messages += further
    return messages


def as_example(prompt: Prompt) -> Example:
    """A prompt of messages as environments get it, without its tokens."""
    messages = [{"role": "user", "content": prompt.prompt}] if isinstance(prompt.prompt, str) else prompt.prompt
    return Example([], str(messages[-1]["content"]), prompt.fields, messages=messages, conversational=True)


def user_prompt(text: str, **fields: Any) -> Prompt:
    """A prompt of one message of the user, with the fields of its record."""
    return Prompt([{"role": "user", "content": text}], fields)
