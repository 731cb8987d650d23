"""Pictures in bodies, as each dialect has them; they become parts of messages that hold them.

| dialect | a part |
|---|---|
| OpenAI's chat completions | {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}} |
| OpenAI's responses | {"type": "input_image", "image_url": "data:image/png;base64,..."} |
| Anthropic's messages | {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ...}} |

Threads decode and resize them beside the event loop; how much one request may ask of them is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from funrl.data.json_lines import JsonObject
from funrl.data.pictures import inner_pictures, read_picture, stored_pixels
from funrl.data.processors.form import PictureForm, fitted
from funrl.rollout.episodes import Message
from funrl.serve.asks import BadRequest, plain_content

PICTURE_KINDS = ("image_url", "input_image", "image")
# of the pictures that a request shows for the first time, together
MOST_PICTURES = 256
MOST_ENCODED = 48 << 20  # characters of base64
MOST_PIXELS = 1 << 26
READERS = 2  # threads of an event loop
_READERS: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = WeakKeyDictionary()


def message_content(content: object, field: str, kinds: Collection[str] = ("text",)) -> str | list[JsonObject]:
    """The content of a message: its text, or parts of text and pictures where it has a picture.

    Args:
      content: as the client gives it.
      field: that it stands in, for errors.
      kinds: types of parts that hold text.

    Raises:
      BadRequest: a part is neither, or a picture is not in base64.
    """
    if not isinstance(content, list) or not any(map(is_picture, content)):
        return plain_content(content, field, kinds)
    return [
        {"type": "image", "image": _data_url(part, field)}
        if is_picture(part)
        else {"type": "text", "text": plain_content([part], field, kinds)}
        for part in content
    ]


def is_picture(part: object) -> bool:
    """True of a part that is a picture."""
    return isinstance(part, dict) and part.get("type") in PICTURE_KINDS


def _data_url(part: JsonObject, field: str) -> str:
    """The picture of a part in base64. Nothing else is read: neither files of this machine nor addresses."""
    source = part.get("source") if part["type"] == "image" else part.get("image_url")
    given = source.get("url") if isinstance(source, dict) else source
    if isinstance(source, dict) and source.get("type") == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type')};base64,{source['data']}"
    if isinstance(given, str) and given.startswith("data:"):
        return given
    raise BadRequest(
        f"{field} has the picture {given!r:.60}, and none is fetched: send it in base64, as a data: URL", field
    )


async def seen_messages(messages: Sequence[Message], form: PictureForm | None) -> list[Message]:
    """Messages whose parts hold their pictures decoded, in the size in which the model takes them; tiles are cut later.

    Args:
      messages: new ones of a conversation.
      form: of the model; None: it reads text only, and the messages stay as they are.

    Raises:
      BadRequest: they have more pictures, characters of base64 or pixels than a request may have.
      DataError: a picture cannot be used.
    """
    pictures = inner_pictures([*messages])
    if form is None or not pictures:
        return [*messages]
    encoded = sum(len(x) for x in pictures if isinstance(x, str))
    _check_bound(len(pictures), MOST_PICTURES, "pictures", "send fewer")
    _check_bound(encoded, MOST_ENCODED, "characters of pictures in base64", "send smaller pictures")
    loop = asyncio.get_running_loop()
    if loop not in _READERS:
        _READERS[loop] = ThreadPoolExecutor(READERS, thread_name_prefix="pictures")
    return await loop.run_in_executor(_READERS[loop], _read_all, messages, form)


def _read_all(messages: Sequence[Message], form: PictureForm) -> list[Message]:
    pixels = sum(map(stored_pixels, inner_pictures([*messages])))
    _check_bound(pixels, MOST_PIXELS, "pixels of pictures", "send smaller pictures")
    return [_read_message(message, form) for message in messages]


def _read_message(message: Message, form: PictureForm) -> Message:
    if not inner_pictures([message]):
        return message
    parts = [
        {**part, "image": fitted(read_picture(part["image"]), form)} if part.get("image") is not None else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _check_bound(value: int, most: int, what: str, way_out: str) -> None:
    if value > most:
        raise BadRequest(f"the request has {value} {what}; {most} are allowed: {way_out}", "messages")
