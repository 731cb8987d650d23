"""vLLM in a server (`vllm_server`) as an engine here: what the server has been told can be told to it again.

A server that does not answer is waited for. One that has been started again is given the model, the current weights
and all requests in flight with what they have written, so nothing is lost but the time.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor

from funrl.mesh.mesh import SINGLE, Mesh, MeshError
from funrl.mesh.reshard import BUCKET_BYTES
from funrl.models.huggingface.config import config_to_hf
from funrl.models.model import Model
from funrl.rollout.vllm.core import CacheCounts, CoreRequest, SampledTokens
from funrl.rollout.vllm.engine import VLLM_DEFAULTS, VLLMEngine, VLLMOptions, vllm_weights
from funrl.rollout.vllm.server import plain_requests

ASK_AGAIN_S = 0.5  # between questions to a server that does not answer
STATUS_S = 10.0  # that it may take to say that it is there


class EngineServerError(RuntimeError):
    """A server that does not answer, or cannot do what it is asked; the message names it."""


class RemoteCore:
    """A `Core` in a server.

    Attributes:
      url: of the server.
      generation: how often the server has lost all requests.

    Args:
      url: such as http://127.0.0.1:8100.
      sizes: message of "open".
      timeout_s: that the server may take to answer, and to come back when it is gone.

    Raises:
      EngineServerError: there is no such server.
    """

    def __init__(self, url: str, sizes: Mapping[str, Any], timeout_s: float):
        self.url = url.rstrip("/")
        self.generation = 0
        self._sizes = sizes
        self._timeout_s = timeout_s
        self._instance = ""
        self._counts = CacheCounts(0, 0, 0, used_pages=0, preempted=0)
        self._asleep = self._loaded = False  # the server; all weights by the server
        self._weights: list[Path] = []
        self._folder = tempfile.TemporaryDirectory(prefix="funrl-weights-")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._reach(None)

    def add(self, requests: Sequence[CoreRequest]) -> None:
        """Begin requests; see `Core`."""
        if requests:
            self._tell("add", {"requests": plain_requests(requests)})

    def step(self) -> list[SampledTokens]:
        """One pass; nothing where the server was lost meanwhile. See `Core`."""
        return [SampledTokens(*fields) for fields in self._tell("step").get("sampled", ())]

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget requests; see `Core`."""
        if listed := list(numbers):
            self._tell("drop", {"numbers": listed})

    def forget(self) -> None:
        """Forget all requests; see `Core`."""
        self._tell("forget")

    def reload(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep all weights in files, for a server that is started again, and send them; see `Core`."""
        self._weights = []
        self._loaded = False
        for number, bucket in enumerate(_buckets(named_weights)):
            file = Path(self._folder.name) / f"{number:06}"
            file.write_bytes(save_safetensors(bucket))
            self._weights.append(file)
        try:
            self._send_weights()
        except OSError as error:
            self._reach(error)

    def held(self) -> Iterator[tuple[str, Tensor | None]]:
        """Nothing is read back from a server; see `Core`."""
        return iter(())

    def sleep(self) -> None:
        """Give back the memory of keys and values; see `Core`."""
        self._asleep = True
        self._tell("sleep")

    def wake(self) -> None:
        """Take it again; see `Core`."""
        self._asleep = False
        self._tell("wake")

    def counts(self) -> CacheCounts:
        """Pages of its cache, as the server last told; see `Core`."""
        return self._counts

    def _tell(self, what: str, message: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """The server's answer; an empty one where it was lost and is back again."""
        try:
            answer = self._ask(what, json.dumps(message or {}).encode(), self._timeout_s)
        except OSError as error:
            self._reach(error)
            return {}
        if "counts" in answer:
            self._counts = CacheCounts(*answer["counts"])
        return answer

    def _ask(self, what: str, body: bytes, timeout_s: float) -> Mapping[str, Any]:
        """The server's answer.

        Raises:
          OSError: there is none.
          EngineServerError: it says that it cannot do this.
        """
        request = urllib.request.Request(f"{self.url}/{what}", body, method="POST")
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise EngineServerError(f"{self.url} answers to {what}: {error.read().decode()}") from None
        except http.client.HTTPException as error:  # it ended in the middle of its answer
            raise ConnectionError(repr(error)) from error

    def _reach(self, error: OSError | None) -> None:
        """Wait until the server is there and knows what it must, but for the requests.

        Raises:
          EngineServerError: it does not come in time.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._restore(self._ask("status", b"", min(STATUS_S, self._timeout_s))["instance"])
                break
            except OSError as problem:
                error = problem
            if time.monotonic() > deadline:
                raise EngineServerError(
                    f"the server {self.url} has not answered for {self._timeout_s:g} s ({error}); start it again "
                    "(python -m funrl.rollout.vllm.server), or check --engine_url; --engine_timeout says how long it "
                    "is waited for"
                )
            time.sleep(min(ASK_AGAIN_S, self._timeout_s))
        self.generation += 1

    def _restore(self, instance: str) -> None:
        self._ask("open", json.dumps(self._sizes).encode(), self._timeout_s)  # it forgets all requests
        if self._weights and (instance, True) != (self._instance, self._loaded):
            self._send_weights()
        self._ask("sleep" if self._asleep else "wake", b"{}", self._timeout_s)
        self._instance = instance

    def _send_weights(self) -> None:
        for file in self._weights:
            self._ask("bucket", file.read_bytes(), self._timeout_s)
        self._ask("reload", b"{}", self._timeout_s)
        self._loaded = True


def vllm_client(
    url: str,
    model: Model,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype = torch.float32,
    options: VLLMOptions = VLLM_DEFAULTS,
    timeout_s: float = 600.0,
) -> VLLMEngine:
    """An engine over a server, without weights yet.

    Args:
      url: of this replica's server, which no other uses.
      timeout_s: seconds that it may take to answer, and to come back when it is gone.
      model, mesh, dtype, options: as in `vllm_engine`; "tensor" has size 1.

    Raises:
      EngineServerError: there is no such server, or it has another model.
      MeshError: the mesh has a tensor axis.
    """
    if mesh.size("tensor") > 1:
        raise MeshError(f"a server of vLLM holds a whole model; generate on a mesh without tp instead of {mesh}")
    sizes = {
        "config": config_to_hf(model.config),
        "dtype": str(dtype).removeprefix("torch."),
        "max_rows": options.max_rows,
        "cache_bytes": options.cache_bytes,
        "compiled": options.compiled,
    }
    core = RemoteCore(url, sizes, timeout_s)
    weights = vllm_weights(model, mesh, dtype)
    return VLLMEngine(model.config, weights, core, max_rows=options.max_rows, decode=options.decode)


def _buckets(named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Weights in groups of at most `BUCKET_BYTES`; a larger one is a group by itself."""
    bucket: dict[str, Tensor] = {}
    for name, x in named_weights:
        if bucket and sum(weight.nbytes for weight in bucket.values()) + x.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = {}
        bucket[name] = x.cpu().contiguous()
    if bucket:
        yield bucket
