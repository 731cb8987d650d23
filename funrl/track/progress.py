"""Display of a run: a live table on a terminal, aligned plain lines elsewhere.

    with open_progress(total=100, title="ppo, addition, dp4,tp2") as progress:
        progress.update(1, {"reward/mean": 0.31, "time_s/step": 1.7})

Steps count from 1; step 0 is the state before the first. The cursor is never hidden, so a process that is killed while
it draws leaves a terminal that works.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from funrl.environments.conversation import short_text
from funrl.track.records.samples import Sample
from funrl.track.records.trackers import StepMetrics

HEADER_EVERY = 20  # plain lines between two repetitions of the header
SHOWN_PIECES = 3  # of a conversation, at its begin and at its end
SHOWN_ROWS = 10  # of the live table
PACE_STEPS = 20  # from which the remaining time is estimated


class Column(NamedTuple):
    """One column of the table: the key of its metric, its heading, its width, and the format of its numbers."""

    key: str
    heading: str
    width: int
    number_format: str


COLUMNS = (  # the order on screen; a narrow terminal leaves out the last ones
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
CURVES = {"reward/mean": "reward", "train/loss": "loss"}  # the change of the first one reported is in the live display


class Progress:
    """The display of one run; made by `open_progress`, used as a context manager."""

    def __init__(self, title: str, total: int, console: Console, *, live: bool, sample_seconds: float) -> None:
        """Begin with a run of `total` steps."""
        self._title = title
        self._total = total
        self._console = console
        self._sample_seconds = sample_seconds
        self._began = time.monotonic()
        self._step = 0
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=SHOWN_ROWS)
        self._ends: deque[tuple[int, float]] = deque([(0, self._began)], maxlen=PACE_STEPS)
        self._columns: tuple[Column, ...] = ()  # of the metrics so far
        self._curve: dict[str, list[float]] = {}  # by metric: its first value and its newest
        self._lines_since_header = HEADER_EVERY
        self._next_sample = -math.inf
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2) if live else None

    def __enter__(self) -> Progress:
        """Begin to draw."""
        if self._live is not None:
            self._live.start()
            self._console.show_cursor(True)
        return self

    def __exit__(self, *_) -> None:
        """Leave the last frame as it is."""
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, metrics: StepMetrics) -> None:
        """Show the metrics of a step that has just ended. Keys that the display does not know are left out."""
        values = {key: float(value) for key, value in metrics.items()}
        columns = tuple(column for column in COLUMNS if column in self._columns or column.key in values)
        if columns != self._columns:
            self._columns = columns
            self._lines_since_header = HEADER_EVERY
        self._step = step
        if step != self._ends[-1][0] + 1:  # the first after a resumption
            self._ends.clear()
        self._ends.append((step, time.monotonic()))
        self._rows.append((step, values))
        for key in CURVES:
            if math.isfinite(values.get(key, math.nan)):
                self._curve.setdefault(key, [values[key]])[1:] = [values[key]]
        if self._live is not None:
            self._live.refresh()
        else:
            self._print_row(values)

    def sample(self, sample: Sample) -> None:
        """Print a sample above the table, unless one was printed a moment ago.

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
        """Print a line above the table."""
        self._print(Text(_one_line(text, self._console.encoding, limit=10_000)))

    def _print(self, text: Text) -> None:
        # Where programs read the output, a long line stays one line.
        self._console.print(text, soft_wrap=self._live is None, highlight=False)

    def _print_row(self, values: StepMetrics) -> None:
        width = max(4, 2 * len(str(self._total)) + 1)
        if self._lines_since_header >= HEADER_EVERY:
            heads = "  ".join(column.heading.rjust(column.width) for column in self._columns)
            self._print(Text(f"{'step':>{width}}  {heads}  {'left':>7}  time by phase"))
            self._lines_since_header = 0
        cells = "  ".join(_cell(values, column, "-").rjust(column.width) for column in self._columns)
        seconds = self._seconds_left()
        left = "-" if seconds is None else _duration(seconds)
        self._print(Text(f"{self._place():>{width}}  {cells}  {left:>7}  {_shares(values, most=4)}".rstrip()))
        self._lines_since_header += 1

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        width = max(10, min(40, self._console.width // 4))
        bar = ProgressBar(total=max(self._total, 1), completed=self._step, width=width)
        head.add_row(Text(self._title, style="bold", overflow="ellipsis", no_wrap=True), bar, Text(self._place()))
        seconds = self._seconds_left()
        left = "time left not known yet" if seconds is None else f"about {_duration(seconds)} left"
        elapsed = _duration(time.monotonic() - self._began)
        status = Text(f"{elapsed} gone, {'done' if self._step >= self._total else left}", style="dim")
        for key, values in itertools.islice(self._curve.items(), 1):
            status.append(f"   {CURVES[key]} {values[0]:.3f} to {values[-1]:.3f}")
        if not self._rows:
            return Group(Text(""), head, status)
        return Group(Text(""), head, status, self._table(), Text(_shares(self._rows[-1][1]), style="dim"))

    def _table(self) -> Table:
        columns = list(self._columns)
        step_width = max(4, len(str(self._total)))
        while columns and step_width + sum(column.width + 2 for column in columns) > self._console.width:
            columns.pop()
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
        table.add_column("step", justify="right", min_width=step_width, no_wrap=True)
        for column in columns:
            table.add_column(column.heading, justify="right", min_width=column.width, no_wrap=True)
        for step, values in list(self._rows)[-max(3, self._console.height - 9) :]:
            evaluated = {"eval/accuracy", "eval/loss"} & set(values)
            style = "bold" if step == self._step else "green" if evaluated else ""
            table.add_row(str(step), *(_cell(values, column, "") for column in columns), style=style)
        return table

    def _place(self) -> str:
        return f"{self._step:>{len(str(self._total))}}/{self._total}"

    def _seconds_left(self) -> float | None:
        """Seconds that remain at the pace of the last steps; None before the pace is known."""
        (first, begin), (last, end) = self._ends[0], self._ends[-1]
        if last <= first:
            return None
        pace = (end - begin) / (last - first)
        return max(0.0, pace * (self._total - self._step) - (time.monotonic() - end))


def open_progress(
    total: int,
    title: str,
    *,
    live: bool | None = None,
    console: Console | None = None,
    sample_seconds: float = 10.0,
) -> Progress:
    """The display of a run of `total` steps.

    Args:
      total: the last step.
      title: what runs, in a few words.
      live: a table that is redrawn in place; None: if standard output is a terminal.
      console: where to; None: standard output.
      sample_seconds: the shortest time between two samples that are shown.
    """
    if console is None:
        console = Console()
    if live is None:
        live = console.is_terminal and not console.is_dumb_terminal
    return Progress(title, total, console, live=live, sample_seconds=sample_seconds)


def _shares(values: StepMetrics, most: int | None = None) -> str:
    """Share of each phase in the time of a step, the largest first."""
    phases = {key.removeprefix("time_s/"): value for key, value in values.items() if key.startswith("time_s/")}
    whole = phases.pop("step", 0.0)
    phases = {name: value for name, value in phases.items() if math.isfinite(value) and value > 0}
    whole = max(sum(phases.values()), whole if math.isfinite(whole) else 0.0)
    largest = sorted(phases, key=lambda name: -phases[name])[:most]
    return " ".join(f"{name} {phases[name] / whole:.0%}" for name in largest)


def _cell(values: StepMetrics, column: Column, empty: str) -> str:
    return format(values[column.key], column.number_format) if column.key in values else empty


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
