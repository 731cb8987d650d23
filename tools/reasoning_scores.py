"""What the data sets of reasoning-gym pay for texts that answer nothing.

    pip install 'funrl[environments]'
    python tools/reasoning_scores.py

For each data set: the least score of any of `TEXTS` on any question, the text with the largest mean score and that
mean, and the errors that its scorer raises. Only those with something to say are printed.
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
MEAN = 0.3  # of one text


def main() -> None:
    """Print a table."""
    import reasoning_gym  # type: ignore[import-not-found]
    from reasoning_gym.factory import DATASETS  # type: ignore[import-not-found]

    names = sorted(name for name in DATASETS if name != "composite")  # which has no questions of its own
    print(f"reasoning-gym {importlib.metadata.version('reasoning-gym')}, {len(names)} data sets")
    print(f"{'data set':30} {'every text':>10} {'best mean':>10}  text, errors")
    for name in names:
        data = reasoning_gym.create_dataset(name, size=QUESTIONS, seed=0)
        entries = [data[n] for n in range(QUESTIONS)]
        scores = collections.defaultdict(list)
        errors = collections.Counter()
        for entry in entries:
            for text in TEXTS:
                try:
                    scores[text].append(float(data.score_answer(text, entry)))
                except Exception as error:  # of any scorer
                    errors[type(error).__name__] += 1
        least = 0.0 if errors else min(min(x) for x in scores.values())
        means = {text: sum(x) / QUESTIONS for text, x in scores.items()}
        best = max(means, key=lambda text: means[text])
        if least >= LEAST or means[best] >= MEAN or errors:
            print(f"{name:30} {least:10.2f} {means[best]:10.2f}  {best[:30]!r} {dict(errors) or ''}", flush=True)


if __name__ == "__main__":
    main()
