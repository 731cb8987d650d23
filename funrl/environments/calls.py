"""Calls of functions that may be plain or `async`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def call(function: Callable[..., object], *args: object, **named: object) -> Any:
    """Call a function: an `async` one on this event loop, any other in a thread beside the loop.

    A plain function that never returns keeps its thread until the process ends; the caller can be cancelled.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **named)
    value = await _in_thread(lambda: function(*args, **named))
    return await value if inspect.isawaitable(value) else value


async def _in_thread(function: Callable[[], object]) -> Any:
    """Call a function in a thread of its own. Threads of asyncio's pool would be waited for at the end."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def deliver(value: object, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value = error = None
        try:
            value = function()
        except StopIteration as stop:  # which a future does not take
            error = RuntimeError(f"the function raised {stop!r}")
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await future
