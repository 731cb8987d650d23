"""vLLM in a process of its own, for a trainer elsewhere:

    python -m funrl.rollout.vllm_server --port=8100

It begins without a model. The trainer, whose --engine_url names it, tells it the model's sizes, gives it weights and
has it draw. Requests are HTTP: JSON to and fro, weights as safetensors. It answers one request at a time and asks no
one who they are, so it listens to this machine alone unless --host says otherwise: then the network must be trusted.

vLLM's own server is not used: its ways to take weights need NCCL or shared memory of a GPU, its log-probabilities are
of one kind, and its truncation has another order than `Sampling`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from funrl.mesh.launch import device_type
from funrl.mesh.mesh import single
from funrl.models import decoder_model
from funrl.models.config import config_from_hf
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm_core import Core, CoreRequest, start_vllm

Answer = Mapping[str, Any]
Start = Callable[[Answer], Core]


class CoreServer(HTTPServer):
    """An HTTP server of one vLLM.

    Args:
      address: to listen at; port 0: any.
      start: the message of "open" -> vLLM.
    """

    def __init__(self, address: tuple[str, int], start: Start):
        self.start, self.instance = start, secrets.token_hex(8)
        self.core: Core | None = None
        self.sizes: Answer = {}
        self.buckets = tempfile.TemporaryDirectory(prefix="funrl-weights-")
        super().__init__(address, CoreHandler)

    def answer(self, what: str, body: bytes) -> Answer:
        """The answer to a request.

        Raises:
          ValueError: it makes no sense, or not now.
        """
        if what == "bucket":
            folder = Path(self.buckets.name)
            (folder / f"{len(list(folder.iterdir())):06}").write_bytes(body)
            return {}
        message = json.loads(body) if body else {}
        if what == "status":
            return {"instance": self.instance, "open": self.core is not None}
        if what == "open":
            return self._open(message)
        if self.core is None:
            raise ValueError(f"{what}: there is no model yet: open comes first")
        return self._of_core(self.core, what, message)

    def _open(self, message: Answer) -> Answer:
        if self.core is None:
            self.core, self.sizes = self.start(message), message
        elif message != self.sizes:
            raise ValueError("this server has another model; start it again for this one")
        self._empty()
        self.core.forget()
        return {}

    def _of_core(self, core: Core, what: str, message: Answer) -> Answer:
        match what:
            case "add":
                core.add([request_of(fields) for fields in message["requests"]])
            case "step":
                return {"drawn": core.step(), "counts": core.counts()}
            case "drop":
                core.drop(message["numbers"])
            case "forget":
                core.forget()
            case "reload":
                core.reload(self._weights())
                self._empty()
            case "sleep":
                core.sleep()
            case "wake":
                core.wake()
            case _:
                raise ValueError(f"{what} is not a request of this server")
        return {"counts": core.counts()}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for file in sorted(Path(self.buckets.name).iterdir()):
            yield from load_safetensors(file.read_bytes()).items()

    def _empty(self) -> None:
        for file in Path(self.buckets.name).iterdir():
            file.unlink()


class CoreHandler(BaseHTTPRequestHandler):
    """One request of a `CoreServer`: POST /WHAT."""

    server: CoreServer

    def do_POST(self) -> None:
        """Answer with JSON, or with the text of what went wrong."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            code, text = 200, json.dumps(self.server.answer(self.path.strip("/"), body))
        except ValueError as error:
            code, text = 400, str(error)
        except Exception:
            code, text = 500, traceback.format_exc()
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: there is a request for every token."""


def plain_requests(requests: Sequence[CoreRequest]) -> list[dict[str, Any]]:
    """Requests as JSON takes them."""
    return [one._asdict() | {"sampling": dataclasses.asdict(one.sampling)} for one in requests]


def request_of(fields: Answer) -> CoreRequest:
    """A request from what `plain_requests` made of it."""
    how: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields["sampling"].items()}
    return CoreRequest(**{**fields, "sampling": Sampling(**how)})


def start_here(message: Answer, device: str) -> Core:
    """vLLM on this machine's device, for a model of the sizes of a message."""
    model = decoder_model(config_from_hf(message["config"]))
    mesh = single("cuda:0" if device == "cuda" else "cpu")
    dtype = getattr(torch, message["dtype"])
    return start_vllm(model, mesh, dtype, message["max_rows"], message["cache_bytes"], message["compiled"])


def serve() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m funrl.rollout.vllm_server", description="vLLM for a trainer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all of this machine")
    parser.add_argument("--port", type=int, default=8100, help="0: any that is free")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device_type())
    given = parser.parse_args()
    server = CoreServer((given.host, given.port), lambda message: start_here(message, given.device))
    print(f"listening at http://{given.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve()
