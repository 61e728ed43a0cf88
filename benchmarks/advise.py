"""Is `advise` right? Where compression pays and where it does not, and how far its predictions are off.

Two hosts (network namespaces) or four, one process on each, pinned to one core. On them runs
`python -m lightning_commhooks advise` as under torchrun, on the models of `examples/advise/models.py`:

- `mlp` over 1 Gbit/s and `gpt` over 100 Mbit/s: a step is mostly communication, compression pays;
- `conv` over 10 Gbit/s: a step is mostly compute, it does not;
- `gpt` over 1 Gbit/s, 10 ms away, on two hosts and on four (`far`, `far4`): delay is what costs, and it says so.

Exits with 1 when advice is wrong, or a predicted step time is off by more than 20% of the measured one for any hook.
Afterwards `--bandwidth` predicts for the same network without it, from two processes on this machine; how far that is
off what was measured over it is printed, too.

Writes the numbers and the picture of each to `benchmarks/results/advise_*.{json,png}`.

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
from records import RESULTS

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 0.20


class Scenario(NamedTuple):
    """A model, a link, and what advice is right."""

    model: str
    rate: str
    pays: bool
    hosts: int = 2
    delay_ms: float = 0.0

    @property
    def factory(self) -> str:
        """The model, as the command line takes it."""
        return f"{ROOT / 'examples' / 'advise' / 'models.py'}:{self.model}"


SCENARIOS = {
    "mlp": Scenario("mlp", "1gbit", True),
    "gpt": Scenario("gpt", "100mbit", True),
    "conv": Scenario("conv", "10gbit", False),
    "far": Scenario("gpt", "1gbit", True, 2, 10.0),
    "far4": Scenario("gpt", "1gbit", True, 4, 10.0),
}


def work(name: str, folder: Path, rounds: int) -> None:
    """One host's process: the command line as it is, which also leaves its numbers in a file."""
    rank = os.environ["RANK"]
    os.environ["GROUP_RANK"] = rank  # the namespaces share a host name
    pin(int(rank))
    torch.set_num_threads(1)
    from lightning_commhooks.advice import cli, report

    show = report.print_result

    def show_and_keep(result: Any, console: Any) -> None:
        (folder / f"advise_{name}.json").write_text(json.dumps(result.as_dict(), indent=2) + "\n")
        show(result, console)

    report.print_result = show_and_keep
    plot = str(folder / f"advise_{name}.png")
    cli.app(["advise", SCENARIOS[name].factory, "--device", "cpu", "--rounds", str(rounds), "--plot", plot])


def check(name: str, found: dict[str, Any]) -> bool:
    """Print whether advice and predictions hold."""
    choice = found["verdict"]["choice"]
    says_delay = any(note.startswith("Delay, not bandwidth") for note in found["notes"])
    is_right = (choice is not None) == SCENARIOS[name].pays and says_delay == (SCENARIOS[name].delay_ms > 0)
    print(f"advice: {choice or 'do not compress'}: {'right' if is_right else 'WRONG'}")
    off = {row["label"]: abs(row["prediction_error"]) for row in found["hooks"]}
    worst = max(off, key=lambda label: off[label])
    holds = off[worst] <= TOLERANCE
    print(
        f"predictions: off by at most {off[worst]:.0%} ({worst}), limit {TOLERANCE:.0%}: {'ok' if holds else 'MISSED'}"
    )
    return is_right and holds


def without_the_network(name: str, found: dict[str, Any]) -> None:
    """Print what `--bandwidth` says of the network, against what was measured over it."""
    scenario = SCENARIOS[name]
    command = [sys.executable, "-m", "lightning_commhooks", "advise", scenario.factory, "--device", "cpu", "--json"]
    command += ["--nproc", "2", "--world-size", str(scenario.hosts), "--bandwidth", scenario.rate]
    command += ["--latency", f"{scenario.delay_ms}ms"] if scenario.delay_ms else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    supposed = json.loads(done.stdout)
    predicted = {row["label"]: row["predicted_ms"] for row in supposed["hooks"]}
    pairs = {row["label"]: (predicted[row["label"]], row["measured_ms"]) for row in found["hooks"]}
    options, choice = shlex.join(command[command.index("--world-size") :]), supposed["verdict"]["choice"]
    print(f"from afar, {options}: {choice or 'do not compress'}")
    print("; ".join(f"{label} {a:.0f} ms ({a / b - 1:+.0%})" for label, (a, b) in pairs.items()))


def main() -> None:
    """Make the networks, run `advise` on both hosts of each, check what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SCENARIOS), help=f"some of {', '.join(SCENARIOS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where numbers and pictures go")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.names[0], args.folder, args.rounds)
        return
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, a core for each host, or half of one")
    ok = True
    for name in args.names:
        scenario = SCENARIOS[name]
        where = f", {scenario.hosts} hosts, {scenario.delay_ms:g} ms one way"
        print(f"\n## {scenario.model} over {scenario.rate}/s{where}\n", flush=True)
        options = ["--rounds", str(args.rounds), "--folder", str(args.folder)]
        with hosts(scenario.hosts, rate=scenario.rate, delay_ms=scenario.delay_ms) as network:
            print(network.launch([__file__, "--worker", name, *options], timeout=900)[0])
        found = json.loads((args.folder / f"advise_{name}.json").read_text())
        ok &= check(name, found)
        if scenario.hosts == 2:  # four of them share cores, which processes here would not
            without_the_network(name, found)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
