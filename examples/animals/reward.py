"""A reward of your own: the share of a story's sentences that name an animal, from 0 to 1."""

import re

ANIMALS = """
animal ant bear bee bird bug bunny butterfly cat chicken cow crab crow deer dinosaur dog dolphin donkey duck elephant
fish fly fox frog giraffe goat goose hen hippo horse kitten kitty ladybug lion lizard monkey mouse octopus owl panda
parrot penguin pig pony puppy rabbit rat seal shark sheep snail snake spider squirrel swan tiger turtle whale wolf worm
zebra
"""
NAMES = re.compile(rf"\b({'|'.join(ANIMALS.split())}|puppies|bunnies|butterflies|mice)(s|es)?\b", re.IGNORECASE)


def score(prompt: str, completion: str) -> float:
    sentences = [s for s in re.split(r"[.!?\n]+", completion) if s.strip(' "')]
    return sum(bool(NAMES.search(s)) for s in sentences) / max(len(sentences), 1)
