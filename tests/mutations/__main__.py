"""Breaks the library in one place after another and expects a test to fail each time: `python tests/mutations`."""

import argparse
import sys
import time

import of_core
import of_hooks
import of_wrappers
from runner import BrokenEntryError, copied_checkout, mutated, run, run_tests, selections

PARTS = (of_core, of_hooks, of_wrappers)
MUTATIONS = {mutation.name: mutation for part in PARTS for mutation in part.MUTATIONS}


def main():
    parser = argparse.ArgumentParser(prog="python tests/mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations to try; all by default")
    parser.add_argument("--list", action="store_true", help="say what there is, and whether each can be applied")
    parser.add_argument("--check-green", action="store_true", help="run the same tests without any mutation instead")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the tests of one mutation")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in MUTATIONS]:
        parser.error(f"there is no mutation {unknown[0]!r}; see --list")
    chosen = [MUTATIONS[name] for name in options.names or MUTATIONS]
    act = list_them if options.list else check_green if options.check_green else try_them
    return act(chosen, options.timeout)


def list_them(chosen, timeout):
    broken = 0
    for mutation in chosen:
        print(f"{mutation.name}: {mutation.wrong} [{mutation.file}; {mutation.tests}]")
        try:
            mutated(mutation)
        except BrokenEntryError as error:
            broken += 1
            print(f"    BROKEN: {error}")
    print(f"{len(chosen)} mutations, {broken} broken")
    return int(broken > 0)


def check_green(chosen, timeout):
    """The tests of all mutations, each file once."""
    num_bad = 0
    with copied_checkout() as folder:
        for file, arguments in selections(chosen).items():
            try:
                outcome = run_tests(folder, arguments, 5 * timeout)
            except BrokenEntryError as error:
                num_bad += 1
                print(f"broken {file}: {error}", flush=True)
                continue
            last = outcome.output.strip().splitlines()[-1]
            num_bad += outcome.failed
            print(f"{'RED   ' if outcome.failed else 'green '} {file}: {last} {outcome.first}", flush=True)
    print(f"{num_bad} files are not green without a mutation" if num_bad else "all green without a mutation")
    return int(num_bad > 0)


def try_them(chosen, timeout):
    red, survived, broken = [], [], []
    begin = time.monotonic()
    for mutation in chosen:
        try:
            outcome = run(mutation, timeout)
        except BrokenEntryError as error:
            broken.append(mutation.name)
            print(f"BROKEN    {mutation.name}: {error}", flush=True)
            continue
        (red if outcome.failed else survived).append(mutation.name)
        if outcome.failed:
            print(f"red       {mutation.name} {outcome.seconds:.0f} s: {outcome.first}", flush=True)
        else:
            print(f"SURVIVED  {mutation.name} {outcome.seconds:.0f} s: {mutation.wrong} {mutation.tests}", flush=True)
    print(f"{len(red)} red, {len(survived)} survived, {len(broken)} broken in {time.monotonic() - begin:.0f} s")
    return int(bool(survived or broken))


if __name__ == "__main__":
    sys.exit(main())
