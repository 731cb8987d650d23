"""Display of a run: an aligned line for each step.

    progress = Progress(total=100)
    progress.update(1, {"reward/mean": 0.31, "time_s/step": 1.7})

Steps count from 1; step 0 is the state before the first.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from funrl.environments.conversation import short_text
from funrl.track.records.samples import Sample
from funrl.track.records.trackers import StepMetrics

HEADER_EVERY = 20  # lines between two repetitions of the header
SHOWN_PIECES = 3  # of a conversation, at its begin and at its end
PACE_STEPS = 20  # from which the remaining time is estimated


class Column(NamedTuple):
    """One column of the table: the key of its metric, its heading, its width, and the format of its numbers."""

    key: str
    heading: str
    width: int
    number_format: str


COLUMNS = (  # the order on screen; a narrow terminal cuts off the last ones
    Column("reward/mean", "reward", 7, number_format=".3f"),
    Column("train/loss", "loss", 7, number_format=".4f"),
    Column("eval/loss", "held out", 8, number_format=".4f"),
    Column("eval/accuracy", "accuracy", 8, number_format=".3f"),
    Column("preference/margin", "margin", 7, number_format=".3f"),
    Column("actor/ppo_kl", "KL", 8, number_format=".1e"),
    Column("actor/kl_loss", "KL ref", 8, number_format=".1e"),
    Column("actor/reward_kl_penalty", "KL ref", 8, number_format=".1e"),
    Column("actor/entropy", "entropy", 7, number_format=".3f"),
    Column("actor/pg_clipfrac", "clip", 6, number_format=".3f"),
    Column("response_length/mean", "length", 6, number_format=".1f"),
    Column("episodes/turns", "turns", 5, number_format=".1f"),
    Column("rollout/logprob_gap_max", "gap", 7, number_format=".0e"),
    Column("perf/tokens_per_s", "tok/s", 6, number_format=".0f"),
    Column("time_s/step", "s/step", 6, number_format=".2f"),
)


class Progress:
    """The display of one run."""

    def __init__(self, total: int, console: Console | None = None, sample_seconds: float = 10.0) -> None:
        """Begin with a run of `total` steps.

        Args:
          total: the last step.
          console: where to; None: standard output.
          sample_seconds: the shortest time between two samples that are shown.
        """
        self._total = total
        self._console = console or Console()
        self._sample_seconds = sample_seconds
        self._step = 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)
        self._columns: tuple[Column, ...] = ()  # of the metrics so far
        self._lines_since_header = HEADER_EVERY
        self._next_sample = -math.inf

    def update(self, step: int, metrics: StepMetrics) -> None:
        """Show the metrics of a step that has just ended. Keys that the display does not know are left out."""
        values = {key: float(value) for key, value in metrics.items()}
        columns = tuple(column for column in COLUMNS if column in self._columns or column.key in values)
        if columns != self._columns:
            self._columns = columns
            self._lines_since_header = HEADER_EVERY
        self._step = step
        now = time.monotonic()
        if not self._ends or step != self._ends[-1][0] + 1:  # what comes before the first step is done once
            self._ends.clear()
            if "time_s/step" in values:
                self._ends.append((step - 1, now - values["time_s/step"]))
        self._ends.append((step, now))
        width = max(4, 2 * len(str(self._total)) + 1)
        if self._lines_since_header >= HEADER_EVERY:
            heads = "  ".join(column.heading.rjust(column.width) for column in columns)
            self._print(Text(f"{'step':>{width}}  {heads}  {'left':>7}  time by phase"), cut=True)
            self._lines_since_header = 0
        texts = (format(values[x.key], x.number_format) if x.key in values else "-" for x in columns)
        cells = "  ".join(text.rjust(column.width) for text, column in zip(texts, columns, strict=True))
        seconds = self._seconds_left()
        left = "-" if seconds is None else _duration(seconds)
        place = f"{step:>{len(str(self._total))}}/{self._total}"
        self._print(Text(f"{place:>{width}}  {cells}  {left:>7}  {_shares(values)}".rstrip()), cut=True)
        self._lines_since_header += 1

    def sample(self, sample: Sample) -> None:
        """Print a sample, unless one was printed a moment ago.

        Of an episode the start and the end are printed, what the policy sampled in bold.
        """
        if time.monotonic() < self._next_sample:
            return
        self._next_sample = time.monotonic() + self._sample_seconds
        text = Text("sample ", style="dim")
        text.append(f"step {sample.step}  ", style="dim")
        if sample.reward is not None:
            text.append(f"reward {sample.reward:.3g}", style="green" if sample.reward > 0 else "red")
        text.append(sample.missing, style="red")
        encoding = self._console.encoding
        for picture in sample.pictures:
            text.append(f"  [{_one_line(str(picture), encoding, keep_end=True)}]", style="dim")
        pieces = [(False, sample.prompt), (True, sample.completion)]
        if sample.conversation:
            pieces = short_text(sample.conversation)
        if len(pieces) > 2 * SHOWN_PIECES:
            left_out = f"({len(pieces) - 2 * SHOWN_PIECES} more)"
            pieces = [*pieces[:SHOWN_PIECES], (False, left_out), *pieces[-SHOWN_PIECES:]]
        for number, (sampled, piece) in enumerate(pieces):
            # Where there are no colours, a bar separates the pieces.
            text.append(" | " if number else "  ", style="dim")
            text.append(_one_line(piece, encoding, keep_end=not number), style="bold" if sampled else "dim")
        self._print(text)

    def note(self, text: str) -> None:
        """Print a line."""
        self._print(Text(_one_line(text, self._console.encoding, limit=10_000)))

    def _print(self, text: Text, cut: bool = False) -> None:
        # Where programs read the output, a long line stays one line.
        terminal = self._console.is_terminal
        overflow = "ellipsis" if cut and terminal else None
        self._console.print(text, soft_wrap=not terminal, no_wrap=cut, overflow=overflow, highlight=False)

    def _seconds_left(self) -> float | None:
        """Seconds that remain at the pace of the last steps; None before the pace is known."""
        (first, begin), (last, end) = self._ends[0], self._ends[-1]
        if last <= first:
            return None
        pace = (end - begin) / (last - first)
        return max(0.0, pace * (self._total - self._step) - (time.monotonic() - end))


def _shares(values: StepMetrics) -> str:
    """Share of each phase in the time of a step, the four largest first."""
    phases = {key.removeprefix("time_s/"): value for key, value in values.items() if key.startswith("time_s/")}
    whole = phases.pop("step", 0.0)
    phases = {name: value for name, value in phases.items() if math.isfinite(value) and value > 0}
    whole = max(sum(phases.values()), whole if math.isfinite(whole) else 0.0)
    largest = sorted(phases, key=lambda name: -phases[name])[:4]
    return " ".join(f"{name} {phases[name] / whole:.0%}" for name in largest)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _one_line(text: str, encoding: str, *, limit: int = 160, keep_end: bool = False) -> str:
    """The text on one line of at most `limit` characters; characters that the terminal cannot show are escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    shown = shown.encode(encoding, "backslashreplace").decode(encoding)
    if len(shown) <= limit:
        return shown
    return "..." + shown[-limit:] if keep_end else shown[:limit] + "..."
