"""A resident engine: coroutines of one event loop ask for completions while the engine steps.

Under tensor parallelism the coroutines run on the first rank of a replica. Before each step of the engine, or each few
steps on a GPU, it tells the others which requests to submit and to cancel, so that all make the same calls of the
engine in the same order.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from funrl.mesh.collectives import from_first
from funrl.mesh.mesh import Mesh
from funrl.processes.heartbeat import beat
from funrl.rollout.engine import Engine, check_running
from funrl.rollout.requests import Completion, LogitsError, Request

_T = TypeVar("_T")
Listener = Callable[[list[int]], None]
_LISTENER: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("listener", default=None)
ORDERS_EVERY = {"cpu": 1}  # steps between orders to other tensor ranks; on a GPU (8) they make the host wait for it
BEAT_S = 1.0  # between two signs of life while there is nothing to compute
GROWTH = 4  # of the tokens that are reserved, as the cache of a native engine begins anew when it grows
CANCEL_S = 10.0  # for a program to clean up when the engine has failed


@contextlib.contextmanager
def tokens_heard(listener: Listener | None) -> Iterator[None]:
    """Give a listener the new token ids of the completions that are asked for in this context.

    It is called after an iteration of the engine that has sampled some, but not with the last ones, which the
    completion has; an engine that completes whole requests tells nothing.
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


class FirstRankError(RuntimeError):
    """The program beside the engine has failed on the first rank of a replica; raised on the others."""


class _Orders(NamedTuple):
    """Calls of the engine before it is stepped.

    Attributes:
      submit, cancel, reserve: arguments of its calls.
      idle: whether there is nothing to step.
      end: whether this was the last iteration: "", "done", or the problem that ended it.
    """

    submit: Sequence[Request] = ()
    cancel: Sequence[int] = ()
    reserve: int | None = None
    idle: bool = False
    end: str = ""


class ResidentEngine:
    """The engine as coroutines see it, on a replica's first rank."""

    def __init__(self, engine: Engine, lasting: bool = False):
        """Make it. Args: as of `run_beside`."""
        self._lasting = lasting
        self._engine = engine
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._new: dict[int, Request] = {}
        self._cancelled: list[int] = []
        self._listeners: dict[int, tuple[Listener, int]] = {}  # and the tokens that it knows
        self._count = 0
        self._page_tokens = max(1, engine.cost().page_tokens)
        self._kept: dict[object, int] = {}
        self._reserved = 0
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()

    async def ask(self, request: Request) -> Completion:
        """Complete a request, whose number is replaced. If the caller is cancelled, so is the request.

        Raises:
          ValueError: as in `Engine.submit`; other requests are not affected.
        """
        number = self._count
        request = request._replace(number=number)
        self._engine.check([request])
        self._count += 1
        self._new[number] = request
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        listener = _LISTENER.get()
        if listener is not None:
            self._listeners[number] = listener, 0
        self._wake.set()
        try:
            return await future
        finally:
            self._listeners.pop(number, None)
            if self._waiting.pop(number, None) is not None and self._new.pop(number, None) is None:
                self._cancelled.append(number)
                self._wake.set()

    async def ask_all(
        self, requests: Sequence[Request], ended: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Complete requests, which keep their numbers; `ended` receives each completion as soon as it is there."""

        async def ask(request: Request) -> Completion:
            done = (await self.ask(request))._replace(number=request.number)
            if ended is not None:
                ended(done)
            return done

        return list(await asyncio.gather(*map(ask, requests)))

    def keep(self, key: object, tokens: int) -> None:
        """Keep the keys and values of so many tokens for later requests, instead of those kept for this key before.

        Nothing is kept before the first request that continues an earlier one.

        Args:
          key: of a conversation.
          tokens: that it has or may soon have; 0: it has ended.
        """
        self._kept.pop(key, None)
        if tokens:
            self._kept[key] = -(-tokens // self._page_tokens) * self._page_tokens

    def room(self) -> int:
        """Estimated number of further requests that would begin at once."""
        return self._engine.room() - len(self._new)

    async def progress(self, timeout_s: float | None = None) -> None:
        """Wait until a request has ended since the last call, `notify` was called, or the time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._progress.wait(), timeout_s)
        self._progress.clear()

    def notify(self) -> None:
        """End the waiting for progress."""
        self._progress.set()

    def start(self, program: Coroutine[object, object, _T]) -> asyncio.Task[_T]:
        """Begin a task whose end counts as progress."""
        task = asyncio.create_task(program)
        task.add_done_callback(lambda _: self.notify())
        return task

    async def lead(self, program: Awaitable[_T], mesh: Mesh) -> _T:
        """Step the engine until a program ends that runs beside it; cancels what is then unfinished."""
        task = asyncio.ensure_future(program)
        task.add_done_callback(lambda _: self._wake.set())
        try:
            while not task.done():
                await self.iterate(mesh)
        except BaseException:  # of the engine, which fails on the other ranks too
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            self._engine.cancel([*self._waiting, *self._cancelled])
            raise
        unfinished = [*self._waiting, *self._cancelled]
        problem = "cancelled" if task.cancelled() else "" if task.exception() is None else repr(task.exception())
        from_first(_Orders(cancel=unfinished, end=problem or "done"), mesh, "tensor")
        self._engine.cancel(unfinished)
        return task.result()

    async def iterate(self, mesh: Mesh, idle_s: float = BEAT_S) -> None:
        """Submit and cancel what the coroutines ask for, step the engine, and let them run.

        Args:
          mesh: of the engine.
          idle_s: seconds that this may wait where there is nothing to compute.
        """
        orders = self._take_orders()
        if not orders.submit and not orders.cancel and not self._engine.unfinished():
            beat()
            from_first(_Orders(idle=True), mesh, "tensor")
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), idle_s)
            return
        from_first(orders if orders.submit or orders.cancel else None, mesh, "tensor")
        for outcomes in _iterations(self._engine, orders, mesh, self._lasting):
            for number, outcome in outcomes:
                self._end(number, outcome)
            for number, (listener, known) in self._listeners.items():
                tokens = self._engine.sampled(number, known)
                if tokens:
                    listener(tokens)
                    self._listeners[number] = listener, known + len(tokens)
            await asyncio.sleep(0)

    def _end(self, number: int, outcome: Completion | LogitsError) -> None:
        """Deliver a completion, or raise an error, where it is waited for."""
        self._listeners.pop(number, None)
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if isinstance(outcome, LogitsError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        self._progress.set()

    def _take_orders(self) -> _Orders:
        continues = any(request.computed for request in self._new.values())
        kept = sum(self._kept.values()) if continues else 0
        reserve = GROWTH * kept if kept > self._reserved else None
        self._reserved = reserve or self._reserved
        orders = _Orders(list(self._new.values()), self._cancelled, reserve)
        self._new = {}
        self._cancelled = []
        return orders


def follow(engine: Engine, mesh: Mesh, lasting: bool = False) -> _Orders:
    """Take part in one `ResidentEngine.iterate` of the replica's first rank, on another tensor rank."""
    beat()
    orders = from_first(None, mesh, "tensor") or _Orders()
    if not orders.idle and not orders.end:
        for _ in _iterations(engine, orders, mesh, lasting):
            pass
    return orders


def run_beside(
    engine: Engine,
    mesh: Mesh,
    program: Callable[[ResidentEngine], Awaitable[_T]],
    loop: asyncio.AbstractEventLoop | None = None,
    lasting: bool = False,
) -> _T | None:
    """Run a program beside the engine's steps. Collective over "tensor".

    Args:
      engine: awake, without unfinished requests.
      mesh: of the engine.
      program: its coroutine runs on the first rank of a replica.
      loop: an event loop that is not running, on which it runs; None: one of its own.
      lasting: whether non-finite logits fail only their own request, and the engine continues.

    Returns: the program's result on the first rank; None on the others.

    Raises:
      RuntimeError, FloatingPointError: as the engine raises them.
      FirstRankError: on a rank that follows, where the program has failed.
    """
    engine.check([])  # a native engine measures its free memory now, on all ranks
    engine.reserve(0)
    if mesh.index("tensor") == 0:
        resident = ResidentEngine(engine, lasting)
        return run_coroutine(resident.lead(program(resident), mesh), loop)
    while not (orders := follow(engine, mesh, lasting)).end:
        pass
    engine.cancel(orders.cancel)
    if orders.end != "done":
        raise FirstRankError(f"the first rank of this replica has failed: {orders.end}")
    return None


def _iterations(
    engine: Engine, orders: _Orders, mesh: Mesh, lasting: bool = False
) -> Iterator[list[tuple[int, Completion | LogitsError]]]:
    """Carry out orders and step the engine, several times where orders make the host wait; yields what has ended."""
    if orders.cancel:
        engine.cancel(orders.cancel)
    if orders.reserve is not None:
        engine.reserve(orders.reserve)
    if orders.submit:
        engine.submit(orders.submit)
    for _ in range(1 if mesh.size("tensor") == 1 else ORDERS_EVERY.get(mesh.device.type, 8)):
        if engine.unfinished():
            yield _step(engine, lasting)


def _step(engine: Engine, lasting: bool) -> list[tuple[int, Completion | LogitsError]]:
    """Completions of a step by their numbers, or errors of those that are then cancelled, if the engine outlasts it."""
    check_running(engine)
    beat()
    try:
        return [(done.number, done) for done in engine.step()]
    except LogitsError as error:
        if not lasting:
            raise
        engine.cancel(error.numbers)
        return [(number, LogitsError(str(error))) for number in error.numbers]


def run_coroutine(program: Coroutine[object, object, _T], loop: asyncio.AbstractEventLoop | None = None) -> _T:
    """Run a coroutine: in a thread if this one has a running event loop, as in a notebook.

    Args:
      loop: an event loop that is not running, which stays open; None: one of its own.
    """
    run = functools.partial(_run, program, loop)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def _run(program: Coroutine[object, object, _T], loop: asyncio.AbstractEventLoop | None) -> _T:
    if loop is not None:
        return loop.run_until_complete(program)
    results: list[_T] = []

    async def keep_result() -> None:  # asyncio.run formats its task twice at the end, with all of the task's result
        results.append(await program)

    asyncio.run(keep_result())
    return results[0]
