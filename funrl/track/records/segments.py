"""Segments of config.json: one for each start of a run, with the step after which it began and its flags.

The newest one stands at the top too, so that whoever repeats the run reads its flags there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SEGMENTS = "segments"


class SegmentError(ValueError):
    """A config.json whose segments cannot be read."""


def segments_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The starts in a config.json, oldest first; a config.json without segments is a single start.

    Raises:
      SegmentError: they are not as a run writes them.
    """
    if SEGMENTS not in config:
        return [{"step": 0, **config}]
    segments = config[SEGMENTS]
    are_list = isinstance(segments, list) and bool(segments)
    if not are_list or not all(isinstance(start, dict) and type(start.get("step")) is int for start in segments):
        raise SegmentError(f"its {SEGMENTS} are not as a run writes them")
    return segments


def config_of(segments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Content of config.json."""
    newest = {name: value for name, value in segments[-1].items() if name != "step"}
    return {**newest, SEGMENTS: list(segments)}


def standing_segments(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The starts whose steps may still count, by step: a later start makes all steps after its own again.

    Raises:
      SegmentError: as `segments_of`.
    """
    standing: list[dict[str, Any]] = []
    for start in segments_of(config):
        standing = [*(earlier for earlier in standing if earlier["step"] < start["step"]), start]
    return standing


def segment_of_step(config: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The start that made a step. Raises: SegmentError."""
    segments = standing_segments(config)
    return next((start for start in reversed(segments) if start["step"] < step), segments[0])


def values_over_time(config: Mapping[str, Any], kind: str = "flags") -> dict[str, list[tuple[int, object]]]:
    """Values of each flag over a run: the step after which each value began to hold, and the value.

    Args:
      config: content of config.json.
      kind: "flags", or "inputs", the digests of files.

    Raises:
      SegmentError: as `segments_of`.
    """
    segments = [(start["step"], start.get(kind) or {}) for start in standing_segments(config)]
    changes: dict[str, list[tuple[int, object]]] = {name: [] for _, values in segments for name in values}
    for name, history in changes.items():
        for step, values in segments:
            if not history or history[-1][1] != values.get(name):
                history.append((step, values.get(name)))
    return changes


def in_words(values: Sequence[tuple[int, object]] | None) -> str:
    """Values of a flag over a run, such as "0.001, 0.002 after step 4"."""
    texts = [
        f"{value} after step {step}" if number else str(value) for number, (step, value) in enumerate(values or ())
    ]
    return ", ".join(texts) or "None"
