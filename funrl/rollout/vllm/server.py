"""vLLM in a process of its own, for a trainer elsewhere.

    python -m funrl.rollout.vllm.server --port=8100

It starts without a model. The trainer, whose --engine_url names it, sends the model's sizes, the weights and requests
over HTTP: JSON messages, and weights as safetensors. There is no authentication, so it listens on this machine only
unless --host says otherwise; then the network must be trusted. Requests from a page in a browser are refused. Each
connection has a thread and a time limit between its bytes; a single thread calls vLLM, for one request after another.

vLLM's own server is not used: its weight transfer needs NCCL or shared GPU memory, it returns one kind of
log-probabilities only, and it truncates in another order than `Sampling`.

It shares nothing with `funrl.serve`, whose bodies are texts of at most 64 MB, from clients with keys, read between the
engine's steps on one event loop. Here, bodies are weights of gigabytes that go to files while vLLM works.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import ipaddress
import json
import os
import queue
import re
import secrets
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from funrl.mesh.launch import device_type
from funrl.mesh.mesh import single
from funrl.mesh.patches import apply_patch
from funrl.models import decoder_model
from funrl.models.huggingface.config import config_from_hf
from funrl.models.model import Lora
from funrl.rollout.certificate import digest_parts
from funrl.rollout.engine import WeightSpec
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm.contract import Core, CoreRequest, VLLMOptions
from funrl.rollout.vllm.core import start_vllm
from funrl.rollout.vllm.engine import vllm_weights

IDLE_S = 10.0  # without a byte of a request, or before an answer is taken
PART_BYTES = 1 << 20  # of a body that are read at once, whatever it announces
LARGEST_MESSAGE = 1 << 30  # of the largest message, which is requests with their tokens
LARGEST_BUCKET = 1 << 36  # of the largest bucket, which is one tensor that is larger than usual
ARRIVING = "arriving-"  # of a bucket that is not whole yet
NUMBER = "#"  # name of the tensor with the number of the bucket that a patch is of, or of an adapter
SCALE = "#scale"  # name of the tensor with an adapter's scale

Answer = Mapping[str, Any]
Start = Callable[[Answer], Core]


class CoreCall(NamedTuple):
    """A request for the thread that calls vLLM."""

    what: str
    body: bytes
    future: Future[Answer]


class CoreServer(ThreadingHTTPServer):
    """An HTTP server of one vLLM.

    Args:
      address: to listen at; port 0: any.
      start: the message of "open" -> vLLM.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], start: Start):
        self.start = start
        self.instance = secrets.token_hex(8)
        self.core: Core | None = None
        self.sizes: Answer = {}
        self.buckets = tempfile.TemporaryDirectory(prefix="funrl-weights-")
        self.lock = threading.RLock()  # of the buckets' files and `loaded`
        self.loaded = False  # whether the buckets are those that vLLM has, to be patched
        self.loopback = is_loopback(address[0])
        self.jobs: queue.SimpleQueue[CoreCall | None] = queue.SimpleQueue()
        super().__init__(address, CoreHandler)

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Serve until `shutdown`. This thread alone calls vLLM, which need not be safe for several."""
        accept = functools.partial(super().serve_forever, poll_interval)
        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        while (job := self.jobs.get()) is not None:
            try:
                job.future.set_result(self._answer(job.what, job.body))
            except Exception as error:
                job.future.set_exception(error)
        acceptor.join()

    def shutdown(self) -> None:
        """End `serve_forever`."""
        super().shutdown()
        self.jobs.put(None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client has closed its connection."""

    def answer(self, what: str, body: bytes) -> Answer:
        """Answer a request; "status" is answered at once, even while vLLM works.

        Raises:
          ValueError: the request is invalid, or not possible now.
        """
        if what == "status":
            return {"instance": self.instance, "open": self.core is not None}
        job = CoreCall(what, body, Future())
        self.jobs.put(job)
        return job.future.result()

    def keep_bucket(self, content: Iterator[bytes]) -> Answer:
        """Keep weights for the next "reload", and let go of those of the last one."""
        with self.lock:
            if self.loaded:
                self._empty()
        with tempfile.NamedTemporaryFile(dir=self.buckets.name, prefix=ARRIVING, delete=False) as file:
            try:
                for part in content:
                    file.write(part)
            except BaseException:
                os.unlink(file.name)
                raise
        with self.lock:
            os.rename(file.name, Path(self.buckets.name, f"{len(self._arrived()):06}"))
        return {}

    def patch_bucket(self, body: bytes) -> Answer:
        """Patch a bucket of the last "reload" for the next one.

        Raises:
          ValueError: there is none, or the patch is of other weights.
        """
        patches = load_safetensors(body)
        number = int(patches.pop(NUMBER, torch.tensor(-1)))
        with self.lock:  # from the check to the new file: a bucket that comes meanwhile is not overwritten
            files = self._arrived()
            if not self.loaded or not 0 <= number < len(files):
                raise ValueError(f"patch: there is no bucket {number} to patch")
            weights = load_safetensors(files[number].read_bytes())
            for name, patch in patches.items():
                if name not in weights:
                    raise ValueError(f"patch: {name} is not in bucket {number}")
                patched, intact = apply_patch(weights[name].view(-1), patch)
                if not intact:
                    raise ValueError(f"patch: {name} is patched from other weights")
                weights[name] = patched.view(weights[name].shape)
            file = Path(self.buckets.name, f"{ARRIVING}{number:06}")
            file.write_bytes(save_safetensors(weights))
            file.replace(files[number])
        return {}

    def _arrived(self) -> list[Path]:
        return sorted(path for path in Path(self.buckets.name).iterdir() if not path.name.startswith(ARRIVING))

    def _answer(self, what: str, body: bytes) -> Answer:
        if what == "adapter" and self.core is not None:
            factors = load_safetensors(body)
            number, scale = (factors.pop(name).item() for name in (NUMBER, SCALE))
            self.core.load_adapter(int(number), scale, factors)
            return {}
        message = json.loads(body) if body and what != "adapter" else {}
        if not isinstance(message, dict):
            raise ValueError(f"{what}: an object with entries is needed, not {message!r:.60}")
        if what == "open":
            return self._open(message)
        if self.core is None:
            raise ValueError(f"{what}: there is no model yet: open comes first")
        return self._of_core(self.core, what, message)

    def _open(self, message: Answer) -> Answer:
        if self.core is None:
            self.core = self.start(message)
            self.sizes = message
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
                return {"sampled": core.step(), "counts": core.counts()}
            case "drop":
                core.drop(message["numbers"])
            case "forget":
                core.forget()
            case "reload":
                with self.lock:
                    self._check_buckets(message.get("buckets"))
                    core.reload(self._weights())
                    self.loaded = True
            case "drop_adapter":
                core.drop_adapter(message["number"])
            case "sleep":
                core.sleep()
            case "wake":
                return {"moved": core.wake(), "counts": core.counts()}
            case "digests" | "held_adapter":
                return self._digests_of(core, what, message)
            case _:
                raise ValueError(f"{what} is not a request of this server")
        return {"counts": core.counts()}

    def _digests_of(self, core: Core, what: str, message: Answer) -> Answer:
        if what == "digests":
            return {"digests": self._digests(core)}
        return {name: factor_digest(x) for name, x in core.held_adapter(message["number"]) if x is not None}

    def _digests(self, core: Core) -> Answer:
        """Digests of the weights that vLLM holds, by Hugging Face names; None of one that cannot be read.

        Raises:
          ValueError: a weight has another form than the model's.
        """
        spec = weight_spec_of(self.sizes)
        faults: list[str] = []
        parts = digest_parts(spec, core.held(), faults)
        if faults:
            raise ValueError(f"digests: {faults[0]}")
        return {there: int(parts[name]) if name in parts else None for name, (there, _) in spec.names.items()}

    def _check_buckets(self, expected: object) -> None:
        """Check the number of buckets. Raises: ValueError: it is another one; all are removed, to be sent again."""
        count = len(self._arrived())
        if count != expected:
            self._empty()
            raise ValueError(f"reload: {expected} buckets were sent, and {count} are here; send all again")

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for file in self._arrived():
            yield from load_safetensors(file.read_bytes()).items()

    def _empty(self) -> None:
        with self.lock:
            self.loaded = False
            for file in self._arrived():
                file.unlink()


class RefusedError(Exception):
    """A request that is not answered.

    Attributes:
      code: HTTP's number for the reason.
    """

    def __init__(self, code: int, reason: str):
        super().__init__(reason)
        self.code = code


class CoreHandler(BaseHTTPRequestHandler):
    """One request of a `CoreServer`: POST /WHAT."""

    server: CoreServer

    def setup(self) -> None:
        """Bound the time that a client may be silent."""
        super().setup()
        self.connection.settimeout(IDLE_S)

    def do_POST(self) -> None:
        """Answer with JSON, or with an error message."""
        what = self.path.strip("/")
        try:
            code = 200
            text = json.dumps(self._answered(what))
        except (ConnectionError, TimeoutError):
            return
        except RefusedError as refused:
            code = refused.code
            text = f"{what}: {refused}"
        except (ValueError, RecursionError) as error:
            code = 400
            text = str(error)
        except Exception as error:
            traceback.print_exc()  # for whoever runs this server; a client receives the message alone
            code = 500
            text = f"{type(error).__name__}: {error}"
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def _answered(self, what: str) -> Answer:
        host = host_name(self.headers.get("Host", ""))
        origin = self.headers.get("Origin")
        if origin is not None:
            raise RefusedError(403, f"Origin: {origin}: a page in a browser may not ask this server")
        if self.server.loopback and not is_loopback(host):
            raise RefusedError(403, f"Host: {host}: this server is for its own machine; --host makes it one for others")
        length = self._length(LARGEST_BUCKET if what in ("bucket", "adapter") else LARGEST_MESSAGE)
        if what == "bucket":
            if length > shutil.disk_usage(self.server.buckets.name).free:
                raise RefusedError(507, f"Content-Length: {length}: the disk has no room for it")
            return self.server.keep_bucket(self._content(length))
        body = b"".join(self._content(length))
        return self.server.patch_bucket(body) if what == "patch" else self.server.answer(what, body)

    def _length(self, most: int) -> int:
        """Length of the body in bytes. Raises: RefusedError, it is not a number, or too large."""
        text = self.headers.get("Content-Length", "0")
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
            raise RefusedError(400, f"Content-Length: {text:.60}: a number of bytes is needed")
        if int(text) > most:
            raise RefusedError(413, f"Content-Length: {text}: it must be at most {most}")
        return int(text)

    def _content(self, length: int) -> Iterator[bytes]:
        """Read the body. Raises: ConnectionError, it ends early."""
        while length:
            part = self.rfile.read1(min(length, PART_BYTES))
            if not part:
                raise ConnectionAbortedError
            length -= len(part)
            yield part

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log: there is a request for every token."""


def is_loopback(host: str) -> bool:
    """True for a name or an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The host in a Host header, without its port."""
    return header.rpartition("]")[0].removeprefix("[") if header.startswith("[") else header.partition(":")[0]


def factor_digest(x: Tensor) -> str:
    """Digest of the bits of a factor of an adapter, with its shape."""
    bits = x.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(repr(tuple(x.shape)).encode() + bits.tobytes()).hexdigest()


def plain_requests(requests: Sequence[CoreRequest]) -> list[dict[str, Any]]:
    """Requests as JSON values."""
    return [request._asdict() | {"sampling": dataclasses.asdict(request.sampling)} for request in requests]


def request_of(fields: Answer) -> CoreRequest:
    """Inverse of `plain_requests`, for one request."""
    parameters: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in fields["sampling"].items()
    }
    return CoreRequest(**{**fields, "sampling": Sampling(**parameters)})


def weight_spec_of(message: Answer) -> WeightSpec:
    """The form of the weights of the model whose sizes are in a message."""
    return vllm_weights(decoder_model(config_from_hf(message["config"])), single(), getattr(torch, message["dtype"]))


def start_here(message: Answer, device: str) -> Core:
    """Start vLLM on this machine's device, for the model sizes in a message."""
    model = decoder_model(config_from_hf(message["config"]))
    mesh = single("cuda:0" if device == "cuda" else "cpu")
    options = VLLMOptions(**message["options"])
    if options.lora is not None:  # a list, as JSON has it
        rank, alpha, targets = options.lora
        options = options._replace(lora=Lora(rank, alpha, tuple(targets)))
    return start_vllm(model, mesh, getattr(torch, message["dtype"]), options)


def serve() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser(prog="python -m funrl.rollout.vllm.server", description="vLLM for a trainer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all of this machine")
    parser.add_argument("--port", type=int, default=8100, help="0: any that is free")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device_type())
    given = parser.parse_args()
    server = CoreServer((given.host, given.port), lambda message: start_here(message, given.device))
    print(f"listening at http://{given.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve()
