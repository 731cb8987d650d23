"""A taskset of verifiers: write a letter often."""

import verifiers.v1 as vf

__all__ = ["CountLetters"]


class LetterData(vf.TaskData):
    letter: str


class LetterTask(vf.Task[LetterData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def count(self, trace) -> float:
        return float(sum((message.content or "").count(self.data.letter) for message in trace.assistant_messages))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class CountLettersConfig(vf.TasksetConfig):
    letters: str = "abc"


class CountLetters(vf.Taskset[LetterTask, CountLettersConfig]):
    def load(self):
        for letter in self.config.letters:
            yield LetterTask(LetterData(prompt=f"write {letter}", letter=letter), self.config.task)
