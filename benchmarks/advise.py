"""Is `advise` right? Where compression pays and where it does not, and how far its predictions are off.

Two hosts (network namespaces) or four, one process on each, pinned to one core. On them runs
`python -m lightning_commhooks advise` as under torchrun, on the models of `examples/advise/models.py`:

- `mlp` over 1 Gbit/s and `gpt` over 100 Mbit/s: a step is mostly communication, compression pays;
- `conv` over 10 Gbit/s: a step is mostly compute, it does not;
- `gpt` over 1 Gbit/s, 10 ms away, on two hosts and on four (`far`, `far4`): delay is what costs, and it says so.

Then `--bandwidth` predicts for the same network without it, in one process on one core, as a host has. Exits with 1
when advice is wrong, or between two hosts a predicted step time is off by more than 20% of the measured one for any
hook; plain DDP over 10 ms by more than 30%, since TCP begins slowly after each pause. Four hosts share two cores here,
which predictions do not know.

    python benchmarks/advise.py
    python benchmarks/advise.py conv
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from netns import hosts, pin

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE, TOLERANCE_OF_FAR_DENSE = 0.20, 0.30


class Scenario(NamedTuple):
    """A model, a link, and what advice is right."""

    model: str
    rate: str
    pays: bool
    hosts: int = 2
    delay_ms: float = 0.0

    def command(self, rounds: int) -> list[str]:
        """`advise` for the model."""
        model = f"{ROOT / 'examples' / 'advise' / 'models.py'}:{self.model}"
        return [__file__, "--worker", "advise", model, "--device", "cpu", "--rounds", str(rounds), "--json"]


SCENARIOS = {
    "mlp": Scenario("mlp", "1gbit", True),
    "gpt": Scenario("gpt", "100mbit", True),
    "conv": Scenario("conv", "10gbit", False),
    "far": Scenario("gpt", "1gbit", True, 2, 10.0),
    "far4": Scenario("gpt", "1gbit", True, 4, 10.0),
}


def work(arguments: list[str]) -> None:
    """The command line as it is, on one core."""
    pin(int(os.environ.get("RANK", "0")))
    torch.set_num_threads(1)
    from lightning_commhooks.advice.cli import main as command_line

    command_line(arguments)


def is_right(scenario: Scenario, found: dict[str, Any]) -> bool:
    """Print whether advice is."""
    choice = found["verdict"]["choice"]
    says_delay = any(note.startswith("Delay, not bandwidth") for note in found["notes"])
    right = (choice is not None) == scenario.pays and says_delay == (scenario.delay_ms > 0)
    print(f"advice: {choice or 'do not compress'}: {'right' if right else 'WRONG'}")
    return right


def holds(scenario: Scenario, found: dict[str, Any], rounds: int) -> bool:
    """Print what `--bandwidth` says of the network, against what was measured over it."""
    options = ["--world-size", str(scenario.hosts), "--bandwidth", scenario.rate]
    options += ["--latency", f"{scenario.delay_ms}ms"] if scenario.delay_ms else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *scenario.command(rounds), *options]
    supposed = json.loads(
        subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    print(f"predicted with {shlex.join(options)}: {supposed['verdict']['choice'] or 'do not compress'}")
    predicted = {row["label"]: row["step_ms"] for row in supposed["hooks"]}
    off = {row["label"]: predicted[row["label"]] / row["step_ms"] - 1 for row in found["hooks"]}
    print("; ".join(f"{label} {predicted[label]:.0f} ms ({by:+.0%})" for label, by in off.items()))
    if scenario.hosts > 2:
        return True
    if scenario.delay_ms:
        off["dense"] *= TOLERANCE / TOLERANCE_OF_FAR_DENSE
    return max(map(abs, off.values())) <= TOLERANCE


def main() -> None:
    """Make the networks, run `advise` on all hosts of each, check what it says."""
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SCENARIOS), help=f"some of {', '.join(SCENARIOS)}")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from lightning_commhooks.advice.study import text_of

    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, a core for each host, or half of one")
    ok = True
    for scenario in (SCENARIOS[name] for name in args.names):
        where = f", {scenario.hosts} hosts, {scenario.delay_ms:g} ms one way"
        print(f"\n## {scenario.model} over {scenario.rate}/s{where}\n", flush=True)
        with hosts(scenario.hosts, rate=scenario.rate, delay_ms=scenario.delay_ms) as network:
            found = json.loads(network.launch(scenario.command(args.rounds), timeout=900)[0])
        print(text_of(found), end="\n\n")
        ok &= is_right(scenario, found) & holds(scenario, found, args.rounds)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
