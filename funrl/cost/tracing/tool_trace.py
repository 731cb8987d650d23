"""Seconds for which episodes wait for their environment, from a trace.

A trace is a file of JSON lines. A line is an episode, `{"waits": [0.3, 1.2]}`, with the seconds of the environment
before each reply but the first; or spans of OpenTelemetry in the JSON form of OTLP, as a collector writes them to a
file: those that a run with --report_to=otel exports. There an episode waits while none of its turns is under way.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from funrl.trainer.settings.declaration import SettingsError

NANOSECONDS = 1e9  # of a second


class EpisodeWaits(NamedTuple):
    """Waits of an episode.

    Attributes:
      replies: of the policy.
      seconds: for which it waited for its environment.
    """

    replies: int
    seconds: float


def read_trace(path: Path) -> list[EpisodeWaits]:
    """The episodes of a trace.

    Raises:
      SettingsError: a line is neither form, or there is no episode.
    """
    episodes: list[EpisodeWaits] = []
    spans: list[Mapping[str, Any]] = []
    try:
        for line in path.read_text().splitlines():
            message = json.loads(line)
            if "resourceSpans" in message:
                spans += _spans(message)
            else:
                waits = [float(seconds) for seconds in message["waits"]]
                if not all(math.isfinite(seconds) and seconds >= 0 for seconds in waits):
                    raise ValueError(waits)
                episodes.append(EpisodeWaits(len(waits) + 1, sum(waits)))
        episodes += _traced_episodes(spans)
    except (ValueError, TypeError, KeyError) as error:
        forms = '{"waits": [SECONDS, ...]} or spans of OTLP'
        raise SettingsError(f"--tool_trace={path}: each line has to be {forms}: {error!r}") from error
    if not episodes:
        raise SettingsError(f"--tool_trace={path}: it has no episode with turns")
    return episodes


def _spans(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for resource in message["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            yield from scope["spans"]


def _traced_episodes(spans: Iterable[Mapping[str, Any]]) -> Iterator[EpisodeWaits]:
    """Episodes with at least one turn among the spans of a trace."""
    turns: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    episodes = {}
    for span in spans:
        interval = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        if span["name"] == "turn":
            turns[span["traceId"], span["parentSpanId"]].append(interval)
        elif span["name"] == "episode":
            episodes[span["traceId"], span["spanId"]] = interval
    for key, (begin, end) in episodes.items():
        waited = end - begin
        last = begin
        for first, until in sorted(turns[key]):  # those of several agents overlap
            waited -= max(0, until - max(first, last))
            last = max(last, until)
        if turns[key]:
            yield EpisodeWaits(len(turns[key]), max(0, waited) / NANOSECONDS)
