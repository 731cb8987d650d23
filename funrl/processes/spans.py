"""Spans of OpenTelemetry: phases, transfers of weights, groups, episodes and their turns. None before `spans_exported`.

Each rank exports its own, with its number as an attribute of the resource. The exporter's variables, such as
OTEL_EXPORTER_OTLP_ENDPOINT, say where they go.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SERVICE = "funrl"  # name of the service, where OTEL_SERVICE_NAME gives no other
EXPORT_S = 5.0
NO_SPAN = contextlib.nullcontext()
_tracer: Any = None
_step = 0


def span(name: str, **attributes: str | int) -> contextlib.AbstractContextManager[Any]:
    """A context that is exported as a span, a child of the current one of this task or thread.

    Args:
      attributes: exported as "funrl.NAME", beside the step.
    """
    if _tracer is None:
        return NO_SPAN
    return _tracer.start_as_current_span(name, attributes=_named(attributes))


def _named(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    """Attributes as they are exported, beside the step."""
    return {f"funrl.{key}": value for key, value in attributes.items()} | {"funrl.step": _step}


class GroupSpans:
    """Spans of groups in a loop that has no context for each: from its begin to the end of its last member.

    Example:
      >>> groups = GroupSpans()
      >>> groups.begin([0, 1])
      >>> groups.end(1), groups.end(0)
      (None, None)
    """

    def __init__(self) -> None:
        """Begin without groups."""
        self._open: dict[int, tuple[Any, set[int]]] = {}

    def begin(self, numbers: Sequence[int]) -> None:
        """Begin the span of a group whose members have these numbers, as a child of the current span."""
        if _tracer is None:
            return
        group = _tracer.start_span("group", attributes=_named({"first": numbers[0]})), set(numbers)
        self._open |= dict.fromkeys(numbers, group)

    def end(self, number: int) -> None:
        """Note the end of a member."""
        if number not in self._open:
            return
        group, members = self._open.pop(number)
        members.discard(number)
        if not members:
            group.end()


def set_span_step(number: int) -> None:
    """Give spans from now on the number of a step."""
    global _step
    _step = number


def resource_of(rank: int, run: str | None) -> Any:
    """The resource whose spans and metrics a rank exports.

    Args:
      run: directory of the run.
    """
    from opentelemetry.sdk.resources import Resource

    name = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
    return Resource.create({"service.name": name, "funrl.rank": rank, "funrl.run": run or ""})


def close_provider(provider: Any) -> None:
    """Export what is left and close, in `EXPORT_S` seconds at most: a collector may not answer."""
    thread = threading.Thread(target=provider.shutdown, daemon=True)
    thread.start()
    thread.join(EXPORT_S)


@contextlib.contextmanager
def spans_exported(rank: int, run: str | None, exporter: Any = None) -> Iterator[None]:
    """Export the spans of this process inside the context; closing waits `EXPORT_S` seconds at most for the last ones.

    Args:
      rank, run: as of `resource_of`.
      exporter: of OpenTelemetry; None: by OTLP over HTTP.

    Raises:
      ImportError: its packages are not installed.
    """
    global _tracer
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if exporter is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=resource_of(rank, run), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer(SERVICE)
    try:
        yield
    finally:
        _tracer = None
        close_provider(provider)
