"""funrl: reinforcement learning for language models as pure functions over trees on a named device mesh."""

__version__ = "0.1.0"
