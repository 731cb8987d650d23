"""Scores that the data sets of reasoning-gym give to texts that answer nothing.

    pip install 'funrl[environments]'
    python tools/reasoning_scores.py

For each data set: the least score of any of `TEXTS` on any question; the largest mean score of one of them, and which;
the mean score of the right answer with a digit more, which is wrong; and the errors that its scorer raises. Only data
sets with something to say are printed.
"""

from __future__ import annotations

import collections
import importlib.metadata

TEXTS = (
    "x",
    "no idea",
    "I do not know the answer.",
    "0",
    "1",
    "-1",
    "42",
    "yes",
    "no",
    "True",
    "False",
    "A",
    "[]",
    "{}",
)
TEXTS += ("[1, 2]", "[[0]]", '{"a": 1}', "1 2 3", "a, b", "None", "lorem ipsum " * 50)
QUESTIONS = 40
LEAST = 0.05  # of every text
MEAN = 0.3  # of one text, or of an answer with a digit more


def main() -> None:
    """Print a table."""
    import reasoning_gym  # type: ignore[import-not-found]
    from reasoning_gym.factory import DATASETS  # type: ignore[import-not-found]

    names = sorted(name for name in DATASETS if name != "composite")  # which has no questions of its own
    print(f"reasoning-gym {importlib.metadata.version('reasoning-gym')}, {len(names)} data sets")
    print(f"{'data set':30} {'every text':>10} {'one text':>10} {'near':>6}  text, errors")
    for name in names:
        data = reasoning_gym.create_dataset(name, size=QUESTIONS, seed=0)
        entries = [data[n] for n in range(QUESTIONS)]
        scores = collections.defaultdict(list)
        errors = collections.Counter()
        near = 0.0
        for entry in entries:
            answer = str(entry["answer"])
            if answer.lstrip("-").isdigit():
                near += float(data.score_answer(f"{answer}0" if int(answer) else "10", entry)) / QUESTIONS
            for text in TEXTS:
                try:
                    scores[text].append(float(data.score_answer(text, entry)))
                except Exception as error:  # of any scorer
                    errors[type(error).__name__] += 1
        least = 0.0 if errors else min(min(x) for x in scores.values())
        means = {text: sum(x) / QUESTIONS for text, x in scores.items()}
        best = max(means, key=lambda text: means[text])
        if least >= LEAST or max(means[best], near) >= MEAN or errors:
            print(
                f"{name:30} {least:10.2f} {means[best]:10.2f} {near:6.2f}  {best[:30]!r} {dict(errors) or ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
