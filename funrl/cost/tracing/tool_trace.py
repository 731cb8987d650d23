"""Seconds for which episodes wait for their environment, from a trace.

A trace is a file of JSON lines. A line is an episode, `{"waits": [0.3, 1.2]}`, with the seconds of the environment
before each reply but the first; or spans of OpenTelemetry in the JSON form of OTLP, as a collector writes them to a
file: a run with --report_to=otel exports them. There an episode waits while none of its turns is under way.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from funrl.trainer.settings.declaration import SettingsError

NANOSECONDS = 1e9  # of a second
LONGEST_WAITS_S = 1e9  # seconds of an episode's waits, about 30 years
TIMES = range(2**64)  # of a span: OTLP has 64 bits for them


class EpisodeWaits(NamedTuple):
    """Waits of an episode.

    Attributes:
      replies: of the policy.
      seconds: for which it waited for its environment.
    """

    replies: int
    seconds: float


class TraceSpan(NamedTuple):
    """A span of a trace.

    Attributes:
      name: such as "episode" or "turn".
      key: its trace and itself.
      parent: its trace and the span that it is in.
      interval: its start and end in nanoseconds.
    """

    name: str
    key: tuple[str, str]
    parent: tuple[str, str]
    interval: tuple[int, int]


def read_trace(path: Path) -> list[EpisodeWaits]:
    """The episodes of a trace. Blank lines are skipped.

    Raises:
      SettingsError: a line is neither form, or there is no episode.
    """
    episodes: list[EpisodeWaits] = []
    spans: list[TraceSpan] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            message = json.loads(line)
            if "resourceSpans" in message:
                spans += _spans(message)
            else:
                episodes.append(_episode(message["waits"]))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            forms = '{"waits": [SECONDS, ...]} or spans of OTLP'
            raise SettingsError(f"--tool_trace={path}:{number}: each line has to be {forms}: {error!r}") from error
    episodes += _traced_episodes(spans)
    if not episodes:
        raise SettingsError(f"--tool_trace={path}: it has no episode with turns")
    return episodes


def _episode(waits: object) -> EpisodeWaits:
    """The episode of a line. Raises: ValueError, the waits are not a list of seconds, or too long."""
    if not isinstance(waits, list) or not all(type(seconds) in (int, float) and seconds >= 0 for seconds in waits):
        raise ValueError(f"waits={waits!r}"[:100])
    if not sum(waits) <= LONGEST_WAITS_S:
        raise ValueError(f"waits of more than {LONGEST_WAITS_S:g} seconds")
    return EpisodeWaits(len(waits) + 1, float(sum(waits)))


def _spans(message: Mapping[str, Any]) -> Iterator[TraceSpan]:
    for resource in message["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                name, trace = span["name"], str(span["traceId"])
                parent = span["parentSpanId"] if name == "turn" else ""
                interval = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                if interval[0] not in TIMES or interval[1] not in TIMES:
                    raise ValueError(f"times {interval}")
                yield TraceSpan(name, (trace, str(span["spanId"])), (trace, str(parent)), interval)


def _traced_episodes(spans: Iterable[TraceSpan]) -> Iterator[EpisodeWaits]:
    """Episodes with at least one turn among the spans of a trace."""
    turns: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    episodes = {}
    for span in spans:
        if span.name == "turn":
            turns[span.parent].append(span.interval)
        elif span.name == "episode":
            episodes[span.key] = span.interval
    for key, (begin, end) in episodes.items():
        waited = end - begin
        last = begin
        for first, until in sorted(turns[key]):  # those of several agents overlap
            waited -= max(0, until - max(first, last))
            last = max(last, until)
        if turns[key]:
            yield EpisodeWaits(len(turns[key]), max(0, waited) / NANOSECONDS)
