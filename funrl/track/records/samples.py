"""Samples of what the policy says, as lines of samples.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from funrl.data.processors.thumbnails import ShownPicture
from funrl.track.records.run_directory import open_lines, read_lines
from funrl.track.records.shown_pictures import read_shown


class Sample(NamedTuple):
    """One completion of a prompt.

    Attributes:
      step: after which it was sampled.
      reward: None where nothing rewards it, and of an episode that failed or is unscored.
      rewards: where several functions reward it, the name and the reward of each that applies.
      conversation: of an episode, as `conversation_of` makes it; None: a completion.
      pictures: that the prompt has.
    """

    step: int
    prompt: str
    completion: str
    reward: float | None
    rewards: tuple[tuple[str, float], ...] = ()
    conversation: Mapping[str, Any] | None = None
    pictures: tuple[ShownPicture, ...] = ()

    @property
    def pictures_above(self) -> tuple[ShownPicture, ...]:
        """Pictures to show before the words; () where a conversation shows its own."""
        branches = (self.conversation or {}).get("branches") or ()
        own = any(entry.get("pictures") for branch in branches for entry in branch.get("says") or ())
        return () if own else self.pictures

    @property
    def question(self) -> tuple[str, ...]:
        """The prompt and the digests of its pictures: the same of samples that answer the same."""
        return (self.prompt, *(picture.digest for picture in self.pictures))

    @property
    def missing(self) -> str:
        """Reason that an episode has no reward, "failed" or "unscored"; "" where it has one, and of a completion."""
        if self.reward is not None or not self.conversation:
            return ""
        return "failed" if self.conversation.get("status") in ("failed", "cancelled") else "unscored"


class SampleWriter(NamedTuple):
    """An open samples.jsonl: `write(sample)` adds a line at once."""

    write: Callable[[Sample], None]
    close: Callable[[], None]


def open_samples(path: Path) -> SampleWriter:
    """Open samples.jsonl to add to it."""
    lines = open_lines(path)

    def write(sample: Sample) -> None:
        further = {"rewards": dict(sample.rewards), "conversation": sample.conversation}
        further |= {"pictures": [picture._asdict() for picture in sample.pictures]}
        always = {name: x for name, x in sample._asdict().items() if name not in further}
        lines.write(always | {name: x for name, x in further.items() if x})

    return SampleWriter(write, lines.close)


def read_samples(path: Path) -> list[Sample]:
    """All samples of a run in the order in which they were written; none where there is no file."""
    return [_sample(line) for line in read_lines(path)] if path.exists() else []


def _sample(line: dict[str, Any]) -> Sample:
    """The sample that a line of samples.jsonl holds."""
    conversation = line.get("conversation")
    for branch in conversation["branches"] if conversation else ():
        for entry in branch["says"]:
            if "pictures" in entry:
                entry["pictures"] = read_shown(entry["pictures"])
    return Sample(
        step=line.get("step", 0),
        prompt=line.get("prompt", ""),
        completion=line.get("completion", ""),
        reward=line.get("reward"),
        rewards=tuple(line.get("rewards", {}).items()),
        conversation=conversation,
        pictures=read_shown(line.get("pictures", ())),
    )


def first_and_last(samples: list[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """Up to `count` of the earliest samples, and the newest of the same prompts, or the newest samples."""
    in_order = sorted(samples, key=lambda sample: sample.step)
    early = in_order[: min(count, max(1, len(in_order) // 2))]
    newest = {sample.question: sample for sample in in_order}
    pairs = [newest[question] for question in dict.fromkeys(sample.question for sample in early)]
    late = [sample for sample in pairs if sample.step > early[0].step]
    return early, late or in_order[len(early) :][-count:]
