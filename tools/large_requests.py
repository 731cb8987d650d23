"""Large requests to `funrl serve`: how long their answers take, how long `/health` waits meanwhile, and memory.

funrl serve MODEL --port=8000 --api_key=KEY &
python tools/large_requests.py http://127.0.0.1:8000 KEY --pid=PID
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--pid", type=int, help="process of the server, whose memory is shown")
    args = parser.parse_args()
    address = urlsplit(args.url).netloc
    cases = {
        "0.25 MB of one letter": one("a" * 250_000),
        "1 MB of words": one("word " * 200_000),
        "4 MB of one letter": one("a" * 4_000_000),
        "50,000 messages of a letter": [{"role": "user", "content": "a"}] * 50_000,
        "63 MB of one letter": one("a" * 63_000_000),
        "63 MB of line ends": one("\n" * 31_000_000),
    }
    rows = [(f"{PATHS[0]}, {name}", PATHS[0], {"messages": messages}) for name, messages in cases.items()]
    text = "a" * 63_000_000
    rows += [
        ("/v1/completions, 63 MB of one letter", PATHS[1], {"prompt": text}),
        ("/v1/completions, 20 million token ids", PATHS[1], {"prompt": [5] * 20_000_000}),
        ("/v1/messages, 63 MB of one letter", PATHS[2], {"max_tokens": 5, "messages": one(text)}),
        ("/v1/responses, 63 MB of one letter", PATHS[3], {"input": text}),
        ("/v1/chat/completions, a stream, 63 MB", PATHS[0], {"stream": True, "messages": one(text)}),
    ]
    print(f"memory before: {memory(args.pid)}")
    print("| request | answer | `/health` waits |\n|---|---|---|")
    for name, path, body in rows:
        status, answer_s, health_s = ask(address, args.key, path, json.dumps(body).encode())
        print(f"| {name} | {status} after {answer_s:.1f} s | {health_s:.2f} s |", flush=True)
    print(f"memory after: {memory(args.pid)}")


def one(text: str) -> list[dict[str, str]]:
    """A message of a user."""
    return [{"role": "user", "content": text}]


def ask(address: str, key: str, path: str, body: bytes) -> tuple[int, float, float]:
    """Status and seconds of an answer, and the longest that `/health` took meanwhile."""
    done = threading.Event()
    waits: list[float] = []

    def watch() -> None:
        while not done.is_set():
            begin = time.perf_counter()
            connection = http.client.HTTPConnection(address, timeout=900)
            connection.request("GET", "/health")
            connection.getresponse().read()
            connection.close()
            waits.append(time.perf_counter() - begin)
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(address, timeout=900)
    connection.request("POST", path, body, {"authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    answer.read()
    took = time.perf_counter() - begin
    connection.close()
    done.set()
    thread.join()
    return answer.status, took, max(waits)


def memory(pid: int | None) -> str:
    """Resident memory of a process."""
    if pid is None:
        return "unknown, give --pid"
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return f"{int(fields['VmRSS'].split()[0]) / 1e6:.2f} GB, at most {int(fields['VmHWM'].split()[0]) / 1e6:.2f} GB"


if __name__ == "__main__":
    main()
