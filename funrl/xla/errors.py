"""The error of programs that cannot be lowered."""


class XlaError(RuntimeError):
    """A program that cannot be lowered to XLA; the message names the operator, the function and the line."""
