import gc
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

# Put there by pytest; folders in it have names of packages, which are not to be found where those are not installed.
sys.path.remove(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent / "support"))
# Lightning 2.6 calls jsonargparse in a way that it deprecates, also when it is imported.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
# Ranks that more processes than processors slow down might seem far from each other, and add up in another order.
os.environ.setdefault("COMMHOOKS_LATENCY_MS", "0")

import record
from forks import FOLDER, FOLDERS, FORKS, alone, run_alone
from pool import Pool, check_no_leaks, read_environment

RECORD = record.take()

sys.path.extend(FOLDERS)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As shells start what is in the background. The processes of tests would ignore Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files of tests that take longest.
SLOW = (
    *("test_ray", "test_contract", "test_examples", "test_lightning", "test_docs", "test_elastic", "test_cuda_dry_run"),
    *("test_failure", "test_hierarchy", "test_demo", "test_cli_command", "test_advice", "test_distribution"),
    *("test_lightning_state", "test_codecs_compiled"),
)


def pytest_addoption(parser):
    parser.addoption("--two-ranks", action="store_true", help="leave out tests that have been told to use four ranks")
    parser.addoption("--part", default="0/1", metavar="i/n", help="every n-th test, from the i-th on")


def pytest_configure(config):
    # The processes of `pytest -n`.
    if getattr(config.option, "tx", None):
        FORKS.share()
        forked = f"popen//python={shlex.quote(sys.executable)} {shlex.quote(str(FOLDER / 'forked_python.py'))}"
        config.option.tx = [forked if how == "popen" else how for how in config.option.tx]


def pytest_unconfigure(config):
    FORKS.close()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    record.of_pytest(RECORD, config, terminalreporter.stats, exitstatus)


def pytest_collection_modifyitems(config, items):
    # One process of `pytest -n` runs a whole file: the longest first, so that none is left alone at the end.
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))
    if config.getoption("two_ranks"):
        items[:] = [item for item in items if not hasattr(item, "callspec") or item.callspec.params.get("world") != 4]
    part, num_parts = map(int, config.getoption("part").split("/"))
    items[:] = items[part::num_parts]


@pytest.fixture(scope="session")
def _pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def run(_pool):
    """`run(function, *args, world=2, timeout=60)`: results of `function(rank, world, *args)` by rank."""
    return _pool.run


@pytest.fixture
def run_code(tmp_path):
    """`run_code(code)`: standard output of a process that finds the modules of this folder."""

    def run_code(code):
        script = tmp_path / "script.py"
        script.write_text(code)
        return run_alone(script, environment=alone(ACCELERATE_USE_CPU="true"))[0]

    return run_code


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
