"""Messages of gathers and scatters that small weights have of their own, as large ones do."""

import contextlib

from funrl.models import gather_buffers


@contextlib.contextmanager
def own_messages(elements):
    """Inside, leaves of shards of as many elements are messages of their own."""
    before = gather_buffers.OWN_MESSAGE, gather_buffers.GROUPED_MESSAGE
    gather_buffers.OWN_MESSAGE = gather_buffers.GROUPED_MESSAGE = elements
    try:
        yield
    finally:
        gather_buffers.OWN_MESSAGE, gather_buffers.GROUPED_MESSAGE = before
