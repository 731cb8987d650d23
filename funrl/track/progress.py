"""Display of a run that goes on: a live table on a terminal, aligned plain lines elsewhere.

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
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from funrl.environments.conversation import short_text
from funrl.track.records.samples import Sample
from funrl.track.records.trackers import StepMetrics

HEADER_EVERY = 20  # plain lines between two repetitions of the header
PHASE_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta", "bright_green")
SHOWN_PIECES = 3  # of a conversation, at its begin and at its end
SPARKS = "".join(chr(0x2581 + i) for i in range(8))  # eight bars of growing height


@dataclass(frozen=True)
class Column:
    """One column of the table: the key of its metric, its heading, its width, and the format of its numbers."""

    key: str
    heading: str
    width: int
    number_format: str


COLUMNS = (  # the order on screen
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
CURVES = {"reward/mean": "reward", "train/loss": "loss"}  # the first one reported is drawn above the live table
DROPPED_FIRST = (
    "episodes/turns",
    "actor/kl_loss",
    "actor/reward_kl_penalty",
    "time_s/step",
    "actor/pg_clipfrac",
    "rollout/logprob_gap_max",
    "actor/entropy",
)


@dataclass
class Steps:
    """Steps of a run and their latest metrics.

    Attributes:
      began: when, by the clock of `time.monotonic`.
      times: when the latest steps ended.
      curve: the metric that is drawn, and `drawn` its values.
    """

    name: str
    total: int
    began: float
    step: int = 0
    rows: deque[tuple[int, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=10))
    seen: set[str] = field(default_factory=set)
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))
    curve: str = ""
    drawn: list[float] = field(default_factory=list)

    @property
    def latest(self) -> dict[str, float]:
        """Metrics of the newest step."""
        return self.rows[-1][1] if self.rows else {}


class Progress:
    """The display of one run; made by `open_progress`, used as a context manager."""

    def __init__(self, run: Steps, console: Console, *, live: bool, sample_seconds: float) -> None:
        """Begin with a run."""
        self._console = console
        self._sample_seconds = sample_seconds
        self._run = run
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2) if live else None
        self._lines_since_header = 0
        self._header: tuple[Column, ...] = ()
        self._next_sample = -math.inf

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
        self.record(step, metrics, time.monotonic())
        self.show()

    def record(self, step: int, metrics: StepMetrics, end: float) -> None:
        """Take in a step that ended at `end`, by the clock of `time.monotonic`, without showing it."""
        run = self._run
        values = {key: float(value) for key, value in metrics.items()}
        run.step = step
        run.times.append((step, end))
        run.rows.append((step, values))
        run.seen |= set(values)
        run.curve = run.curve or next((key for key in CURVES if key in values), "")
        if math.isfinite(values.get(run.curve, math.nan)):
            run.drawn.append(values[run.curve])

    def show(self) -> None:
        """Draw the table anew, or print the newest step as a line."""
        if self._live is not None:
            self._live.refresh()
        else:
            self._print_row(self._run)

    def sample(self, sample: Sample) -> None:
        """Print a sample above the table, unless one was printed a moment ago.

        Of an episode the begin and the end are printed, what the policy sampled in bold.
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

    def _print_row(self, run: Steps) -> None:
        columns = tuple(c for c in COLUMNS if c.key in run.seen)
        width = 2 * len(str(run.total)) + 1
        if columns != self._header or self._lines_since_header >= HEADER_EVERY:
            heads = "  ".join(c.heading.rjust(c.width) for c in columns)
            self._print(Text(f"{'step':>{max(width, 4)}}  {heads}  {'left':>7}  time by phase"))
            self._header = columns
            self._lines_since_header = 0
        cells = "  ".join(_cell(run.latest, c).rjust(c.width) for c in columns)
        shares = " ".join(f"{name} {share:.0%}" for name, share in _shares(run.latest)[:4])
        self._print(Text(f"{_step_of(run):>{max(width, 4)}}  {cells}  {_left(run):>7}  {shares}".rstrip()))
        self._lines_since_header += 1

    def _render(self) -> RenderableType:
        run = self._run
        console = self._console
        head = Table.grid(padding=(0, 2))
        elapsed = _duration(time.monotonic() - run.began)
        bar = ProgressBar(total=max(run.total, 1), completed=run.step, width=max(10, min(40, console.width // 4)))
        head.add_row(Text(run.name, style="bold", overflow="ellipsis", no_wrap=True), bar, Text(_step_of(run)))
        parts: list[RenderableType] = [Text(""), head]
        status = Text(f"{elapsed} gone, {_remaining(run)}", style="dim")
        if not run.rows:
            return Group(*parts, status)
        if run.drawn:
            status.append(f"   {CURVES[run.curve]} {run.drawn[0]:.3f} to {run.drawn[-1]:.3f} ")
            status.append(_spark(run.drawn, 24, console), style="green")
        parts.append(status)
        parts.append(_table(run, console))
        parts.append(_phase_bar(_shares(run.latest), console.width))
        return Group(*parts)


def open_progress(
    total: int,
    title: str,
    *,
    live: bool | None = None,
    console: Console | None = None,
    sample_seconds: float = 10.0,
    began: float | None = None,
) -> Progress:
    """The display of a run of `total` steps.

    Args:
      total: the last step.
      title: what runs, in a few words.
      live: a table that is redrawn in place; None: if standard output is a terminal.
      console: where to; None: standard output.
      sample_seconds: the shortest time between two samples that are shown.
      began: when the run began, by the clock of `time.monotonic`; None: now.
    """
    if console is None:
        console = Console()
    if live is None:
        live = console.is_terminal and not console.is_dumb_terminal
    run = Steps(title, total, time.monotonic() if began is None else began)
    return Progress(run, console, live=live, sample_seconds=sample_seconds)


def _table(run: Steps, console: Console) -> Table:
    columns = [c for c in COLUMNS if c.key in run.seen]
    step_width = max(4, len(str(run.total)))
    for key in DROPPED_FIRST:  # a narrow terminal shows fewer columns rather than squeezed ones
        if step_width + sum(c.width + 2 for c in columns) > console.width:
            columns = [c for c in columns if c.key != key]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("step", justify="right", min_width=step_width, no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="right", min_width=column.width, no_wrap=True)
    rows = list(run.rows)[-max(3, console.height - 9) :]
    for number, (step, values) in enumerate(rows):
        style = "bold" if number == len(rows) - 1 else "green" if {"eval/accuracy", "eval/loss"} & set(values) else ""
        table.add_row(str(step), *(_cell(values, c, empty="") for c in columns), style=style)
    return table


def _phase_bar(shares: list[tuple[str, float]], width: int) -> Text:
    """One coloured stretch per phase, and the names in the same colours below it."""
    room = max(10, min(width, 80) - 1)
    bar = Text(no_wrap=True, overflow="crop")
    names = Text(overflow="fold")
    for number, (name, share) in enumerate(shares):
        colour = PHASE_COLOURS[number % len(PHASE_COLOURS)]
        bar.append(" " * round(share * room), style=f"on {colour}")
        names.append(f"{name} {share:.0%}  ", style=colour)
    return Text("\n").join([bar, names]) if shares else Text("")


def _shares(values: StepMetrics) -> list[tuple[str, float]]:
    """Share of each phase in the time of a step, the largest first."""
    phases = {key.removeprefix("time_s/"): value for key, value in values.items() if key.startswith("time_s/")}
    whole = phases.pop("step", 0.0)
    phases = {name: value for name, value in phases.items() if math.isfinite(value) and value > 0}
    whole = max(sum(phases.values()), whole if math.isfinite(whole) else 0.0)
    return sorted(((name, value / whole) for name, value in phases.items()), key=lambda pair: -pair[1])


def _cell(values: StepMetrics, column: Column, empty: str = "-") -> str:
    return format(values[column.key], column.number_format) if column.key in values else empty


def _step_of(run: Steps) -> str:
    return f"{run.step:>{len(str(run.total))}}/{run.total}"


def _seconds_left(run: Steps) -> float | None:
    """Seconds that remain at the pace of the last steps; None before the pace is known."""
    before = [(0, run.began)] if run.times and run.times[0][0] == 1 else []
    marks = before + list(run.times)
    if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
        return None
    pace = (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])
    return max(0.0, pace * (run.total - run.step) - (time.monotonic() - marks[-1][1]))


def _left(run: Steps) -> str:
    seconds = _seconds_left(run)
    return "-" if seconds is None else _duration(seconds)


def _remaining(run: Steps) -> str:
    seconds = _seconds_left(run)
    if run.step >= run.total:
        return "done"
    return "time left not known yet" if seconds is None else f"about {_duration(seconds)} left"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _spark(values: list[float], width: int, console: Console) -> str:
    """The values as a row of small bars, each a mean of neighbours; "" where the encoding has no bars."""
    if len(values) < 2 or not (console.encoding or "").lower().startswith("utf"):
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low = min(means)
    span = (max(means) - low) or 1.0
    return "".join(SPARKS[min(7, int(8 * (mean - low) / span))] for mean in means)


def _one_line(text: str, encoding: str, *, limit: int = 160, keep_end: bool = False) -> str:
    """The text on one line of at most `limit` characters; characters that the terminal cannot show are escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    shown = shown.encode(encoding, "backslashreplace").decode(encoding)
    if len(shown) <= limit:
        return shown
    return "..." + shown[-limit:] if keep_end else shown[:limit] + "..."
