"""Errors of models. Nothing here imports torch."""


class ModelError(ValueError):
    """A model that cannot be used; the message names the file or field, its value and what is supported."""
