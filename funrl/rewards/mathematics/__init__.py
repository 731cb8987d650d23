"""Answers as mathematics: numbers, units, and the structures that people write with them."""
