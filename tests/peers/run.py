"""`make peers`: PyTorch's and Accelerate's own tests with each lossless hook, compared with those without.

    python tests/peers/run.py [--setup NAME ...] [--test PART ...]

Exits with 1 on a difference that `expected.py` does not list, and on one listed there that has gone.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import accelerate_tests
import record
import torch_tests
from attaching import SETUPS
from expected import NO_HOOK, WITHOUT, expected_failure
from processes import Pair

RECORD = record.take()


def main():
    arguments = _arguments()
    tests = {f"accelerate {name}": (accelerate_tests.run_test, name) for name in accelerate_tests.NAMES}
    tests |= {name: (torch_tests.run_test, name) for name in torch_tests.names()}
    tests = {name: test for name, test in tests.items() if any(part in name for part in arguments.test)}
    setups = [WITHOUT, *(name for name in SETUPS if name in arguments.setup and name != WITHOUT)]
    table, problems, pair, start = {}, [], Pair(), time.monotonic()
    for name, (function, test) in tests.items():
        row = table[name] = {}
        for setup in setups:
            if setup != WITHOUT and row[WITHOUT] != "pass":
                row[setup] = "-"
                continue
            outcome, num_hooks = pair.run(function, test, setup)
            row[setup], problem = judge(name, setup, outcome, num_hooks)
            if problem:
                problems.append(problem)
        print(_line(name, row.values()), f"{time.monotonic() - start:6.0f} s", flush=True)
    pair.close()
    _summarize(table, setups, problems)
    counts = Counter(cell for row in table.values() for cell in row.values())
    suite = " ".join(["only tests/peers/run.py", *sys.argv[1:]]) if sys.argv[1:] else "make peers"
    skipped = sum(counts[word] for word in ("no hook", "expected", "skip"))
    record.write(RECORD, suite, counts["pass"], counts["FAIL"] + counts["STALE"], skipped)
    return 1 if problems else 0


def judge(test, setup, outcome, num_hooks):
    """What the table says, and what is wrong about it, if anything.

    Args:
        test: name of the test.
        setup: name of the set-up.
        outcome: "passed", "skipped: ..." or "failed: ...".
        num_hooks: number of models that got a hook.
    """
    expected = expected_failure(test, setup)
    if outcome.startswith("failed"):
        known = expected is not None and expected.says in outcome
        return ("expected", None) if known else ("FAIL", f"{test} with {setup}: {outcome}")
    if outcome.startswith("skipped"):
        return ("skip", None) if setup == WITHOUT else ("FAIL", f"{test} with {setup}: {outcome}")
    if expected is not None:
        return "STALE", f"{test} with {setup} passed: remove it from expected.py ({expected.reason})"
    if setup == WITHOUT:
        return "pass", None
    if (num_hooks == 0) != (test in NO_HOOK):
        return "FAIL", f"{test} with {setup}: {num_hooks} models got a hook, see NO_HOOK in expected.py"
    return ("pass" if num_hooks else "no hook"), None


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--setup", nargs="+", choices=SETUPS, default=list(SETUPS), help="compared with none, always")
    parser.add_argument("--test", nargs="+", default=[""], help="parts of tests' names; the default is all tests")
    return parser.parse_args()


def _line(name, cells):
    return f"{name:<75.75}" + "".join(f"{cell:>15}" for cell in cells)


def _summarize(table, setups, problems):
    print("", _line("", setups), *(_line(name, row.values()) for name, row in table.items()), sep="\n")
    for word in ("pass", "no hook", "expected", "skip", "-", "FAIL", "STALE"):
        print(_line(f"total: {word}", [str(sum(row[setup] == word for row in table.values())) for setup in setups]))
    for problem in problems:
        print("", problem, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
