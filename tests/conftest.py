"""Tests keep their warm starts to themselves: nothing is read from or left in the user's cache."""

import os
import tempfile

_CACHE = tempfile.TemporaryDirectory(prefix="funrl-test-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items):
    """JAX starts threads, and a process with threads is not safely forked: what compares with optax comes last."""
    items.sort(key=lambda item: item.path.parent.name == "optim")
