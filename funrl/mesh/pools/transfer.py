"""Send weights from trainer ranks to generator ranks while both compute, by threads beside their programs.

A transfer has a number. Each trainer rank sends a copy of its shards, so that the next update does not wait; each
generator rank receives into a second buffer, and its program takes the weights between two iterations of its engine.
Peers and bytes are those of the plan.

Of weights of 16 bits a trainer rank keeps the copy that it has sent. The policy's next transfer is patches of it, of
the numbers that have changed, where these have less than a fifth of the bytes; the ranks add up their counts in the
store. A generator rank whose patched weights do not have the checksums of the trainer's says so in the store, and after
all have ended, another transfer follows with everything.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.mesh.patches import LARGEST_SHARE, LostPatches, changed_bytes, reshard_patches
from funrl.mesh.plan import Plan, sent_bytes
from funrl.mesh.pools.channel import ProgressLimit, read_value, remove_value, run_store, wait_until, write_value
from funrl.mesh.reshard import reshard
from funrl.processes import spans
from funrl.processes.heartbeat import beat, beside_the_program, entered, left

TRANSFERS_KEY = "funrl/transfers"
KEPT_TRANSFERS = 4  # whose entries stay in the store for ranks that have not seen them yet
COUNTS = ("ended", "lost", "patched", "sent", "ranks-sent", "changed", "patches", "numbers", "bytes", "ranks-bytes")
NARROW = 2  # bytes of a number: few numbers as narrow change in a step, all wider ones do


TransferGroup = dist.ProcessGroup | int | None  # as `torch.distributed.new_group` gives it


class SentWeights(NamedTuple):
    """Weights of a model on their way to the generator ranks.

    Attributes:
      tree: this rank's shards.
      plan: to those ranks.
      version: of the weights.
    """

    tree: trees.Tree
    plan: Plan
    version: int


class WeightDelivery(NamedTuple):
    """Weights in the second buffer, of one or several models by name; "" is the policy.

    Attributes:
      versions: of the weights.
      trees: this rank's shards.
    """

    versions: Mapping[str, int]
    trees: Mapping[str, trees.Tree]


class WeightForm(NamedTuple):
    """The form in which a model's weights are received.

    Attributes:
      plan: from the trainer ranks.
      prepare: this rank's shards -> what the engine takes.
      held: () -> this rank's shards of the weights that the engine has, in layouts and dtypes of the plan; None: they
        cannot be read.
    """

    plan: Plan
    prepare: Callable[[trees.Tree], trees.Tree]
    held: Callable[[], trees.Tree] = lambda: None


def transfer_group(mesh: Mesh) -> TransferGroup:
    """Process group of the transfers; None: that of the run. Called by every rank of the run.

    A GPU carries out the messages of a group in the order in which they were started, which differs between the ranks
    where two threads start some.
    """
    return dist.new_group() if mesh.device.type == "cuda" else None


def _key(number: int, name: str) -> str:
    """Key of a count of a transfer."""
    return f"{TRANSFERS_KEY}/{number}/{name}"


class WeightSender:
    """Sends weights, on every rank that trains.

    Attributes:
      sent_s: seconds of the last complete transfer, up to the last rank that received it.
      waited_s: seconds of it in which the program waited for it.
      policy: metrics of its policy: bytes that the trainer ranks sent, the share of its numbers that had changed since
        the transfer before, and the number of transfers so far whose patches were lost, so that everything was sent;
        empty where its weights are not of 16 bits, or none were sent before.
      remark: for the user; "": there is none.
    """

    def __init__(self, mesh: Mesh, receivers: int, group: TransferGroup = None, *, patches: bool = False) -> None:
        """Begin before the first transfer.

        Args:
          mesh: of the trainer ranks.
          receivers: number of generator ranks.
          group: of `transfer_group`.
          patches: whether the engines can be sent patches.
        """
        self.mesh = mesh
        self.receivers = receivers
        self.group = group
        self.sent_s = self.waited_s = 0.0
        self.policy: dict[str, float] = {}
        self.remark = ""
        self._resent = 0
        self._patches = patches
        self._lost = LostPatches()
        self._base: trees.Tree = None  # the policy's shards as they were sent
        self._next = 0
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def begin(self, models: Mapping[str, SentWeights]) -> None:
        """Begin to send weights, after the transfer before has ended. Every rank calls it.

        Args:
          models: weights by name, the same names in one order on every rank. The shards may change as soon as this
            returns.
        """
        self.wait()
        copies = {name: _copied(own) for name, own in models.items()}
        stream = _stream_beside(self.mesh.device)
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._send, args=(copies, stream), name="weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the newest transfer has ended. Raises: MeshError: it has failed."""
        if self._thread is None:
            return
        begin = time.perf_counter()
        entered("the generators to receive weights")
        self._thread.join()
        left()
        self._thread = None
        self.waited_s = time.perf_counter() - begin
        if self._problem is not None:
            raise self._problem

    @property
    def hidden_share(self) -> float:
        """Share of the last transfer's seconds in which the program did not wait for it."""
        return 1.0 if self.sent_s <= 0 else max(0.0, 1.0 - self.waited_s / self.sent_s)

    def _send(self, models: Mapping[str, SentWeights], stream: torch.cuda.Stream | None) -> None:
        begin = time.perf_counter()
        try:
            with beside_the_program(), _on_stream(stream), spans.span("send_weights"):
                self._exchange(models)
        except BaseException as error:  # raised where the program waits
            self._problem = error
        self.sent_s = time.perf_counter() - begin

    def _exchange(self, models: Mapping[str, SentWeights]) -> None:
        """Send weights, and wait until all ranks have received them."""
        policy = models.get("")
        patches, share = (False, None) if policy is None or self._base is None else self._measure(policy.tree)
        sent = self._send_once(models, patches)
        if patches:
            is_lost = run_store().add(_key(self._next - 1, "lost"), 0) > 0
            self.remark = self._lost.add(intact=not is_lost)
            self._patches &= not self._lost.ended
            if is_lost:
                self._resent += 1
                sent += self._send_once(models, False)
        if not self._patches:
            self._base = None
        if self._patches and policy is not None and any(dtype.itemsize == NARROW for dtype in policy.plan.dtypes):
            self._base = policy.tree
        self.policy = {}
        if share is not None:
            resent = float(self._resent)
            self.policy = {"sync/sent_bytes": float(sent), "sync/changed_share": share, "sync/resent": resent}

    def _measure(self, tree: trees.Tree) -> tuple[bool, float]:
        """Decide whether to send patches of the base, and measure the share of changed numbers: of all ranks."""
        changed, nbytes = changed_bytes(tree, self._base)
        own = {"changed": changed, "patches": nbytes, "numbers": trees.count(tree), "bytes": trees.nbytes(tree)}
        totals = self._add_up(own)
        patches = totals["patches"] < LARGEST_SHARE * totals["bytes"]
        return patches, totals["changed"] / max(1, totals["numbers"])

    def _add_up(self, own: Mapping[str, int]) -> dict[str, int]:
        """Sums over the trainer ranks, by the store: collectives belong to the program."""
        store = run_store()
        for name, value in own.items():
            store.add(_key(self._next, name), value)
        ranks = _key(self._next, f"ranks-{min(own)}")
        store.add(ranks, 1)
        self._await(lambda: store.add(ranks, 0) >= self.mesh.world, "the trainer ranks")
        return {name: store.add(_key(self._next, name), 0) for name in own}

    def _send_once(self, models: Mapping[str, SentWeights], patches: bool) -> int:
        """Send weights in one transfer, and wait until all ranks have received them.

        Args:
          models: as of `begin`.
          patches: whether the policy's are patches of the base.

        Returns: bytes that the trainer ranks have sent of the policy.
        """
        number = self._next
        store = run_store()
        if self.mesh.rank == 0:
            versions = {name: own.version for name, own in models.items()}
            write_value(f"{TRANSFERS_KEY}/{number}", (versions, patches))
            forgotten = number - KEPT_TRANSFERS  # which all ranks have ended
            for name in COUNTS:
                store.delete_key(_key(forgotten, name))
            remove_value(f"{TRANSFERS_KEY}/{forgotten}")
        sent = 0
        for name, own in models.items():
            if patches and not name:
                sent = reshard_patches(own.tree, self._base, own.plan, self.mesh, group=self.group).sent
                continue
            reshard(own.tree, own.plan, self.mesh, group=self.group)
            if not name:
                sent = sent_bytes(own.plan)[self.mesh.process]
        total = self._add_up({"sent": sent})["sent"]
        ended = _key(number, "ended")
        self._await(lambda: store.add(ended, 0) >= self.receivers, "the generators to receive weights")
        self._next += 1
        return total

    def _await(self, look: Callable[[], bool], text: str) -> None:
        """Wait until `look` is true. Raises: MeshError: for too long."""
        wait_until(look, self.mesh.world, ProgressLimit(self.mesh.timeout, text))


class WeightReceiver:
    """Receives weights, on every rank that generates."""

    def __init__(
        self,
        mesh: Mesh,
        form: WeightForm,
        further: WeightForm,
        group: TransferGroup = None,
    ) -> None:
        """Begin before the first transfer; `receiving` begins to receive.

        Args:
          mesh: of the generator ranks.
          form: of the policy's weights.
          further: form of those of each further model.
          group: of `transfer_group`.
        """
        self.mesh = mesh
        self._group = group
        self._form = form
        self._further = further
        self._next = 0
        self._ended = threading.Event()
        self._arrived: WeightDelivery | None = None
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._receive, name="weights", daemon=True)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Receive while the context lasts."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join(timeout=1.0)  # it may be in an exchange with a rank that has failed

    def arrived(self) -> WeightDelivery | None:
        """The weights that all generator ranks have received and this one has not taken.

        Raises:
          MeshError: a rank that sends has failed.
        """
        if self._problem is not None:
            raise self._problem
        if self._arrived is None or run_store().add(_key(self._next - 1, "ended"), 0) < self.mesh.world:
            return None
        return self._arrived

    def release(self) -> None:
        """Release weights that the engine has, so that others may arrive."""
        self._arrived = None

    def _receive(self) -> None:
        stream = _stream_beside(self.mesh.device)
        try:
            with beside_the_program(), _on_stream(stream):
                while True:
                    self._wait(lambda: self._arrived is None and run_store().check([f"{TRANSFERS_KEY}/{self._next}"]))
                    if self._ended.is_set():
                        return
                    with spans.span("receive_weights"):
                        self._receive_next()
        except BaseException as error:  # raised where the program looks for weights
            self._problem = error

    def _wait(self, look: Callable[[], bool]) -> None:
        """Wait until `look` is true, or no transfer follows."""
        wait_until(lambda: self._ended.is_set() or look(), self.mesh.world)

    def _receive_next(self) -> None:
        number = self._next
        if self.mesh.device.type == "cuda":  # loads of the program may still read memory that this transfer reuses
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        versions, patches = read_value(f"{TRANSFERS_KEY}/{number}")
        arrived = {}
        intact = True
        for name in versions:
            form = self._further if name else self._form
            if patches and not name:
                tree, intact, _ = reshard_patches(None, form.held(), form.plan, self.mesh, group=self._group)
            else:
                tree = reshard(None, form.plan, self.mesh, group=self._group)
            arrived[name] = form.prepare(tree)
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        store = run_store()
        if not intact:
            store.add(_key(number, "lost"), 1)
        if patches:
            store.add(_key(number, "patched"), 1)
            self._wait(lambda: store.add(_key(number, "patched"), 0) == self.mesh.world)
            intact = not store.add(_key(number, "lost"), 0)
        self._next += 1
        if intact:
            self._arrived = WeightDelivery(versions, arrived)
        store.add(_key(number, "ended"), 1)
        beat()


def _copied(weights: SentWeights) -> SentWeights:
    """A copy in the dtypes that are sent."""
    names = [name for name, _ in trees.named(weights.tree)]
    dtypes = dict(zip(names, weights.plan.dtypes, strict=True))
    copy = trees.map_named(lambda name, x: x.detach().to(dtypes[name], copy=True), weights.tree)
    return weights._replace(tree=copy)


def _stream_beside(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for exchanges beside the program's kernels, which begins after those so far; None on a CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
