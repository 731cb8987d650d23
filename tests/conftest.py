"""Tests keep their warm starts and kernels to themselves: nothing is read from or left in the user's cache.

The workers of pytest-xdist share the cache of the process that starts them, and the parts of ./test share one.
"""

import gc
import importlib.util
import os
import signal
import tempfile

import pytest
from selection import XLA_FLAGS, in_order_of_length, starts_jax

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in ./test: last bits of products depend on it
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # libgomp reads it once; a thread that spins takes a worker's core

import funrl  # noqa: F401  # before any product of torch: it sets MKL_CBWR, which MKL reads once

if "FUNRL_TEST_CACHE" in os.environ:
    os.environ["XDG_CACHE_HOME"] = os.environ["FUNRL_TEST_CACHE"]
elif "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="funrl-test-cache-")
    os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or no run that a test starts could be interrupted

WITH_VLLM = importlib.util.find_spec("vllm") is not None

gc.disable()  # until all is imported and collected, which stays


def pytest_ignore_collect(collection_path, config):
    """Skip files that start JAX where `-m` excludes them: reading one imports JAX, into a process that forks."""
    excluded = "not xla" in config.option.markexpr and collection_path.suffix == ".py"
    return True if excluded and starts_jax(collection_path) else None


def pytest_collect_file(file_path):
    """Set the flags of XLA before a file starts JAX, which reads them once; programs of tests read them too."""
    compiles_for_tpu = importlib.util.find_spec("libtpu") is not None  # as for users
    if file_path.suffix == ".py" and starts_jax(file_path) and not compiles_for_tpu:
        os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=4 {XLA_FLAGS}")  # 4: for meshes


@pytest.hookimpl(trylast=True)  # after -m has deselected tests
def pytest_collection_modifyitems(items):
    """Order tests: workers begin with the longest, and vLLM's with the ones that fork before there is an engine."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = in_order_of_length(items)
    elif WITH_VLLM:
        items.sort(key=lambda item: item.get_closest_marker("gloo") is None and "server" not in item.fixturenames)


def pytest_collection_finish(session):
    """Leave what stays to no later collection of garbage, which would read all of it, and copy it in each fork."""
    if WITH_VLLM:  # here once, not in each fork
        importlib.import_module("funrl.rollout.vllm.process").import_vllm()
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray cluster of two nodes; see `ray_cluster.Cluster`."""
    from ray_cluster import open_cluster  # here, for most tests need none

    with open_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(ray_cluster):
    """Environment of a driver of the cluster."""
    return ray_cluster.environment
