"""Parts of the embedded tasks of several turns: a chat of one token a role, a small decoder, a demonstrator.

The demonstrator talks to the task's own environment, so what is imitated has the messages that episodes have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funrl.data.prompts import Example, Prompt
from funrl.data.tokenizer import chat_character_tokenizer
from funrl.tasks.arithmetic import model_config

if TYPE_CHECKING:
    from funrl.environments.environment import PlainEnvironment
    from funrl.models.decoder.config import Config
    from funrl.rollout.episodes import Message

ROLE_MARKS = ("<user>", "<assistant>", "<tool>")  # one token each
UNKNOWN = "?"  # any character outside of a task's alphabet is read as this one
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>{\"name\": \"' + call['function']['name']"
    " + '\", \"arguments\": ' + call['function']['arguments'] | tojson + '}</tool_call>' }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SMALLEST_HEAD = 16
END_OF_CALL = '"}}</tool_call>'  # one token, as is the begin of a call
IMITATION_STEPS = 400  # of `funrl sft` on conversations of a demonstrator
CONVERSATIONS = 25_600
IMITATION_FLAGS = {"batch_prompts": 64, "lr": 4e-3}


def chat_tokenizer(alphabet: str, words: Sequence[str] = ()) -> Any:
    """One token a character of the alphabet, which contains `UNKNOWN`, and one for each role and each word."""
    return chat_character_tokenizer(alphabet, (*ROLE_MARKS, *words), CHAT_TEMPLATE, unknown=UNKNOWN)


def has_chat_tokenizer(folder: str | Path, alphabet: str, words: Sequence[str] = ()) -> bool:
    """True if a model's directory has the `chat_tokenizer` of an alphabet and words."""
    try:
        content = json.loads((Path(folder) / "tokenizer.json").read_text())
        added = {token["content"] for token in content["added_tokens"]}
        characters = set(content["model"]["vocab"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return {*ROLE_MARKS, *words} == added - characters and set(alphabet) == {c for c in characters if len(c) == 1}


def chat_model(head: int, vocab: int, positions: int = 64) -> Config:
    """The small decoder of a task.

    Args:
      head: size of a head, at least; keys and values have fewer of a larger size, and as many parameters.
      vocab: token ids, of which a tensor axis up to 16 needs a multiple.
      positions: of the longest episode.
    """
    from funrl.models.flat import with_fields  # here, for flags are read without torch

    return with_fields(model_config(max(head, SMALLEST_HEAD)), vocab=vocab, max_positions=positions)


def call_begin(tool: str, argument: str) -> str:
    """Begin of a call of a tool with one argument, whose text and `END_OF_CALL` follow."""
    return f'<tool_call>{{"name": "{tool}", "arguments": {{"{argument}": "'


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
