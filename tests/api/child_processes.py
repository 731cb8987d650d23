"""The processes that a test has started."""

import glob


def children():
    """Ids of the processes that this one has started and that are still there."""
    return {pid for file in glob.glob("/proc/self/task/*/children") for pid in open(file).read().split()}
