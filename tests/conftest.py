import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool, check_no_leaks, read_environment


@pytest.fixture(scope="session")
def _pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def run(_pool):
    """`run(function, *args, world=2, timeout=60)`: results of `function(rank, world, *args)` by rank."""
    return _pool.run


@pytest.fixture(params=[2, 4])
def world(request):
    return request.param


@pytest.fixture(autouse=True)
def _no_leaks():
    """Fail a test that leaves threads, process groups or environment variables behind in this process."""
    before = read_environment()
    # Or collecting would look at all modules that were ever imported, a fifth of a second for each test.
    gc.freeze()
    yield
    gc.collect()
    check_no_leaks(num_groups=0)
    after = read_environment()
    changed = dict(after.items() ^ before.items())
    for key in changed:
        os.environ.pop(key, None)
        if key in before:
            os.environ[key] = before[key]
    assert not changed, f"leaked environment variables: {changed}"
