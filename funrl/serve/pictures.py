"""Pictures in bodies, as each dialect has them; they become parts of messages that hold them.

| dialect | a part |
|---|---|
| OpenAI's chat completions | {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}} |
| OpenAI's responses | {"type": "input_image", "image_url": "data:image/png;base64,..."} |
| Anthropic's messages | {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ...}} |
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from funrl.serve.asks import BadRequest, plain_content

PICTURE_KINDS = ("image_url", "input_image", "image")


def message_content(content: Any, field: str, kinds: Collection[str] = ("text",)) -> str | list[dict[str, Any]]:
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


def is_picture(part: Any) -> bool:
    """True of a part that is a picture."""
    return isinstance(part, dict) and part.get("type") in PICTURE_KINDS


def _data_url(part: dict[str, Any], field: str) -> str:
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
