"""Messages whose parts hold pictures: {"type": "image", "image": ...}, as templates take them, and as tokens."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from funrl.data.json_lines import DataError, JsonObject
from funrl.data.pictures import expand_placeholders, inner_pictures, one_placeholder_each, picture_form_of
from funrl.kinds import OwnedLines
from funrl.rollout.episodes import Message, Node
from funrl.rollout.policy import RunEndingError


class UnseenPicturesError(DataError, RunEndingError):
    """Messages have pictures, which the model or its chat template cannot take."""


def without_pictures(message: Message) -> Message:
    """The message with parts that say where pictures are, and hold none."""
    content = message.get("content")
    if not isinstance(content, list) or not inner_pictures([message]):
        return message
    return {**message, "content": [{"type": "image"} if part.get("type") == "image" else part for part in content]}


def expanded_tokens(
    tokens: list[int], messages: Sequence[Message], tokenizer: object
) -> tuple[list[int], OwnedLines | None]:
    """Rendered tokens of messages with those of their pictures, and the values of these; None: they have none.

    Args:
      tokens: with one placeholder for each picture.
      messages: that they are of.
      tokenizer: with the form in which its model takes pictures.

    Raises:
      UnseenPicturesError: the model reads text only, or the template has no place for pictures.
      DataError: a picture cannot be used, or there are other places than pictures.
    """
    form = picture_form_of(tokenizer)
    pictures = inner_pictures(list(messages))
    if form is None:
        if pictures:
            raise UnseenPicturesError("messages have pictures, and the model reads text only; give another model")
        return tokens, None
    if pictures and form.tower.placeholder not in tokens:
        shown = [dict(without_pictures(message)) for message in messages]
        raise UnseenPicturesError(
            f"the chat template has no place for the pictures of {shown!r:.200}; give one that has "
            "(--chat_template=FILE)"
        )
    ids, owned = expand_placeholders(tokens, pictures, form, together=_together(messages))
    return ids, None if owned.empty else owned


def _together(messages: Sequence[Message]) -> list[int]:
    """For each picture the number of those between the same replies: so many come at once in a conversation."""
    counts = []
    for _, run in itertools.groupby(messages, lambda message: message.get("role") == "assistant"):
        count = len(inner_pictures(list(run)))
        counts += [count] * count
    return counts


def collapsed_tokens(node: Node, tokenizer: object) -> Sequence[int]:
    """Tokens of a node with one placeholder for each picture, as the chat template has them."""
    form = picture_form_of(tokenizer)
    return node.tokens if form is None or node.owned is None else one_placeholder_each(node.tokens, node.owned, form)


def picture_content(value: object) -> list[JsonObject] | None:
    """Content of a message for what a tool returned, if that is a picture of Pillow or a list with one; else None."""
    pillow = sys.modules.get("PIL.Image")
    values = list(value) if isinstance(value, list | tuple) else [value]
    if pillow is None or not any(isinstance(x, pillow.Image) for x in values):
        return None
    return [
        {"type": "image", "image": x} if isinstance(x, pillow.Image) else {"type": "text", "text": str(x)}
        for x in values
    ]
