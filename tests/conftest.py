"""Tests keep their warm starts to themselves: nothing is read from or left in the user's cache."""

import os
import tempfile

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="funrl-test-cache-")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
