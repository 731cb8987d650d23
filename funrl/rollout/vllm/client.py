"""An engine over vLLM in a server process (`server`), whose state can be restored.

If the server does not answer, the client waits for it. A restarted server, which has no model and refuses requests, is
sent the model, the current weights and all unfinished requests with their tokens so far, so that only time is lost.

Weights of 16 bits of which few numbers have changed are sent as patches of those that the server has in files; if it
has others, all are sent.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from funrl.mesh.mesh import SINGLE, Mesh, MeshError
from funrl.mesh.patches import INDEXED, LARGEST_SHARE, LostPatches, encode_patch
from funrl.mesh.pools.transfer import NARROW
from funrl.mesh.reshard import BUCKET_BYTES
from funrl.models.huggingface.config import config_to_hf
from funrl.models.huggingface.weight_files import split_shards
from funrl.models.model import Model
from funrl.rollout.vllm.contract import VLLM_DEFAULTS, CacheCounts, CoreRequest, SampledTokens, VLLMOptions
from funrl.rollout.vllm.engine import VLLMEngine, vllm_weights
from funrl.rollout.vllm.server import NUMBER, SCALE, factor_digest, plain_requests

RETRY_S = 0.5  # between requests to a server that does not answer
STATUS_S = 10.0  # timeout of a status request


class EngineServerError(RuntimeError):
    """A server does not answer, or cannot do what it is asked; the message names it."""


class RemoteCore:
    """A `Core` in a server.

    Attributes:
      url: of the server.
      generation: number of times that the server has lost all requests.
      sent: bytes of the newest weights that were sent, as patches or whole, or of the newest adapter.
      note: receives remarks.

    Args:
      url: such as http://127.0.0.1:8100.
      sizes: the message "open".
      timeout_s: bound on the time to answer, and to come back after a restart.

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
        self._asleep = self._loaded = False  # whether the server sleeps; whether it has loaded all weights
        self._weights: list[Path] = []
        self._adapters: dict[int, bytes] = {}  # as they were sent
        self.sent = 0
        self.note: Callable[[str], None] = lambda text: None
        self._lost = LostPatches()
        self._folder = tempfile.TemporaryDirectory(prefix="funrl-weights-")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._reach(None)

    def add(self, requests: Sequence[CoreRequest]) -> None:
        """Begin requests; see `Core`."""
        if requests:
            self._send("add", {"requests": plain_requests(requests)})

    def step(self) -> list[SampledTokens]:
        """Run one pass; [] if the server was lost meanwhile. See `Core`."""
        return [SampledTokens(*fields) for fields in self._send("step").get("sampled", ())]

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget requests; see `Core`."""
        if listed := list(numbers):
            self._send("drop", {"numbers": listed})

    def forget(self) -> None:
        """Forget all requests; see `Core`."""
        self._send("forget")

    def reload(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Store all weights in files, for a restarted server, and send them or patches of them; see `Core`."""
        base = self._weights if self._loaded and not self._lost.ended else []
        room = LARGEST_SHARE * sum(file.stat().st_size for file in base)
        patches: list[bytes] = []
        self._weights = []
        self._adapters.clear()
        self._loaded = False
        for number, bucket in enumerate(split_shards(named_weights, BUCKET_BYTES)):
            file = Path(self._folder.name) / f"{number:06}"
            patch = bucket_patch(number, load_safetensors(file.read_bytes()), bucket) if file in base else None
            file.write_bytes(save_safetensors(bucket))
            self._weights.append(file)
            room -= len(patch or b"")
            if patch is None or room <= 0:
                base = []
                patches = []
            else:
                patches.append(patch)
        try:
            if len(patches) < len(self._weights) or not self._send_patches(patches):
                self._send_weights()
        except OSError as error:
            self._reach(error)
        except EngineServerError:
            if not self._is_restarted():
                raise
            self._reach(None)

    def held(self) -> Iterator[tuple[str, int | None]]:
        """Digests of the weights that the server holds, as it reads them; see `Core`.

        Raises:
          EngineServerError: a weight of the server has another form.
        """
        answer = self._send("digests") or self._send("digests")  # a server that was lost has the weights again
        yield from answer["digests"].items()

    def load_adapter(self, number: int, scale: float, factors: Mapping[str, Tensor]) -> None:
        """Send an adapter, which is kept for a restarted server; see `Core`."""
        own = {name: x.detach().cpu().contiguous() for name, x in factors.items()}
        described = {NUMBER: torch.tensor(number), SCALE: torch.tensor(scale, dtype=torch.float64)}
        body = self._adapters[number] = save_safetensors(own | described)
        self.sent = len(body)
        self._send("adapter", body)  # a server that was lost has it when it is back

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter; see `Core`."""
        self._adapters.pop(number, None)
        self._send("drop_adapter", {"number": number})

    def held_adapter(self, number: int) -> Iterator[tuple[str, Tensor | None]]:
        """Factors that the server has by its digests of them; NaN where it has others. See `Core`."""
        digests = self._send("held_adapter", {"number": number}) or self._send("held_adapter", {"number": number})
        for name, x in load_safetensors(self._adapters[number]).items():
            if name not in (NUMBER, SCALE):
                same = digests.get(name) == factor_digest(x)
                yield name, x if same else torch.full_like(x, torch.nan)

    def sleep(self) -> None:
        """Free the memory of keys and values; see `Core`."""
        self._asleep = True
        self._send("sleep")

    def wake(self) -> bool:
        """Allocate it again; see `Core`."""
        self._asleep = False
        return self._send("wake").get("moved", True)

    def counts(self) -> CacheCounts:
        """Pages of its cache, as last reported by the server; see `Core`."""
        return self._counts

    def _send(self, what: str, message: Mapping[str, Any] | bytes | None = None) -> Mapping[str, Any]:
        """Send a message and return the server's answer; {} if the server was lost and is back."""
        body = message if isinstance(message, bytes) else json.dumps(message or {}).encode()
        try:
            answer = self._ask(what, body, self._timeout_s)
        except OSError as error:
            self._reach(error)
            return {}
        except EngineServerError:
            if not self._is_restarted():
                raise
            self._reach(None)
            return {}
        if "counts" in answer:
            self._counts = CacheCounts(*answer["counts"])
        return answer

    def _ask(self, what: str, body: bytes, timeout_s: float) -> Mapping[str, Any]:
        """Send a message once and return the server's answer.

        Raises:
          OSError: there is no answer.
          EngineServerError: the server refuses.
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
        """Wait until the server answers, and restore its state except the requests.

        Raises:
          EngineServerError: it does not answer in time.
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
            time.sleep(min(RETRY_S, self._timeout_s))
        self.generation += 1

    def _is_restarted(self) -> bool:
        """True if another server answers than the one that has this engine's state, or none."""
        try:
            return self._ask("status", b"", min(STATUS_S, self._timeout_s))["instance"] != self._instance
        except OSError:
            return True

    def _restore(self, instance: str) -> None:
        self._ask("open", json.dumps(self._sizes).encode(), self._timeout_s)  # it forgets all requests
        if self._weights and (instance, True) != (self._instance, self._loaded):
            self._send_weights()
        for adapter in self._adapters.values():
            self._ask("adapter", adapter, self._timeout_s)
        self._ask("sleep" if self._asleep else "wake", b"{}", self._timeout_s)
        self._instance = instance

    def _send_patches(self, patches: Sequence[bytes]) -> bool:
        """Send patches of all buckets; False: the server has other weights than these are patches of."""
        try:
            for patch in patches:
                self._ask("patch", patch, self._timeout_s)
            self._ask_reload()
        except EngineServerError:
            if self._is_restarted():
                raise
            if remark := self._lost.add(intact=False):
                self.note(remark)
            return False
        self._lost.add(intact=True)
        self.sent = sum(map(len, patches))
        return True

    def _send_weights(self) -> None:
        self.sent = sum(file.stat().st_size for file in self._weights)
        for file in self._weights:
            self._ask("bucket", file.read_bytes(), self._timeout_s)
        self._ask_reload()

    def _ask_reload(self) -> None:
        self._ask("reload", json.dumps({"buckets": len(self._weights)}).encode(), self._timeout_s)
        self._loaded = True


def bucket_patch(number: int, base: Mapping[str, Tensor], bucket: Mapping[str, Tensor]) -> bytes | None:
    """Patch of the `number`-th bucket, as a server takes it.

    None: its weights are others, not of 16 bits, or too many for a patch's indices.
    """
    forms = [{name: (x.dtype, x.shape) for name, x in weights.items()} for weights in (base, bucket)]
    if forms[0] != forms[1] or not any(x.element_size() == NARROW for x in bucket.values()):
        return None
    if any(x.numel() >= INDEXED for x in bucket.values()):
        return None
    patches = {name: encode_patch(x.view(-1), base[name].view(-1)) for name, x in bucket.items()}
    return save_safetensors({NUMBER: torch.tensor(number), **patches})


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
      url: of this replica's own server.
      timeout_s: bound on the time to answer, and to come back after a restart.
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
        "options": options._replace(decode=None)._asdict(),
    }
    core = RemoteCore(url, sizes, timeout_s)
    weights = vllm_weights(model, mesh, dtype)
    return VLLMEngine(model, weights, core, options)
