"""Messages of gathers and scatters that small weights have of their own, as large ones do."""

import contextlib

from funrl.models import gather_buffers


@contextlib.contextmanager
def own_messages(elements):
    """Inside, leaves of shards of as many elements are messages of their own."""
    before = gather_buffers.OWN_MESSAGE
    gather_buffers.OWN_MESSAGE = elements
    gather_buffers.buffers_of.cache_clear()
    try:
        yield
    finally:
        gather_buffers.OWN_MESSAGE = before
        gather_buffers.buffers_of.cache_clear()
