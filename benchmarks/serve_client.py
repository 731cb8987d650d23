"""Clients of an endpoint, with nothing beside the standard library: what they cost is not the server's.

    python benchmarks/serve_client.py '{"url": "http://127.0.0.1:8000/v1", "keys": ["..."], "requests": 10, ...}'

Each key has one connection, over which one request follows another. It prints "ready", waits for a line, and prints a
JSON object: the seconds that it took, and the tokens of all replies.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any
from urllib.parse import urlsplit


async def main(task: dict[str, Any]) -> None:
    """Make all requests."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    begin = time.perf_counter()
    tokens = await asyncio.gather(*(converse(task, n, key) for n, key in enumerate(task["keys"])))
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "tokens": sum(tokens)}))


async def converse(task: dict[str, Any], number: int, key: str) -> int:
    """Make the requests of one connection; returns the number of tokens."""
    place = urlsplit(task["url"])
    assert place.hostname is not None and place.port is not None
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 24)
    tokens = 0
    for turn in range(task["requests"]):
        content = task.get("label", "") + f"question {turn} of {number}: " + "x" * task["prompt"]
        body = {
            "model": task["model"],
            "messages": [{"role": "user", "content": content}],
            "max_tokens": task["tokens"],
            **({"stream": True, "stream_options": {"include_usage": True}} if task["stream"] else {}),
            **task.get("further", {}),
        }
        data = json.dumps(body).encode()
        head = f"POST {place.path}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        answer = await answer_of(reader)
        counts = re.findall(rb'"completion_tokens": ?(\d+)', answer)
        if not counts:
            raise RuntimeError(f"the server answers {answer[:300]!r}")
        tokens += int(counts[-1])
    writer.close()
    return tokens


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer, of a given length or in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line)
    if b"content-length" in lines:
        return await reader.readexactly(int(lines[b"content-length"]))
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(parts)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
