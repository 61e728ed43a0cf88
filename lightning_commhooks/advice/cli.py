"""List the hooks, or find out whether one of them makes the training of your model faster."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from lightning_commhooks.advice import launch
from lightning_commhooks.advice.candidates import DEFAULT, Candidate, candidates
from lightning_commhooks.advice.listing import listed, text_of_list
from lightning_commhooks.advice.study import has_network, study, text_of
from lightning_commhooks.advice.task import load_task

_COMMANDS = {
    "headroom": "measure how much a hook can save at most: dense averaging against a hook that sends nothing",
    "bench": "measure hooks on your model: step time, time spent waiting, bytes sent, error of the gradient",
    "advise": "measure hooks and recommend one, or none. With --bandwidth, --latency or --world-size, step times are "
    "predicted for that network instead of measured on this one. A prediction runs in one process unless --nproc or "
    "torchrun sets another number; with several, the properties of the network that are not given are measured",
}
_FACTORY = (
    "a function without arguments that makes the model, as my_module:make or train.py:make. It returns (model, batch) "
    "if the model's output is the loss or has a .loss; (model, (inputs, target), loss_fn); or a dict with model, "
    "batch and optionally loss_fn, optimizer and ddp (arguments of DistributedDataParallel). A LightningModule "
    "supplies training_step(batch, 0) and configure_optimizers()"
)
_HOOKS = (
    "hooks to compare, separated by commas: names, names with options such as "
    "powersgd:matrix_approximation_rank=2,warm_start=false, or configured hooks such as my_module:MY_HOOK; "
    f"default: {', '.join(DEFAULT.values())}"
)
# Only the case of the b distinguishes bits from bytes; "MBPS" may mean either.
_BANDWIDTH = re.compile(
    r"(?P<number>\d*\.?\d+(?:[eE]\d+)?)\s*(?P<prefix>[kmgtKMGT]?)"
    r"(?:(?i:bit(?:/s)?)|bps|b/s|(?P<bytes>Bps|B/s)|(?P<unclear>(?i:b(?:ps|/s)?)))"
)


class _Parser(ArgumentParser):
    """Prints errors on rank 0 only, if a launcher has started several processes."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(launch.USAGE_ERROR)
        super().error(message)


def parser() -> ArgumentParser:
    """Return the parser of all commands."""
    whole = _Parser(prog="lightning-commhooks", description=__doc__)
    commands = whole.add_subparsers(dest="command", required=True)
    as_json: dict[str, Any] = {"action": "store_true", "help": "print only JSON on standard output"}
    listing = commands.add_parser("list", help="list hooks, wrappers and their options")
    listing.add_argument("hook", nargs="?", help="name of one hook, to explain its options")
    listing.add_argument("--json", **as_json)
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(hooks=None, bandwidth=None, latency=None, world_size=None, max_error=0.3)
        command.add_argument("factory", metavar="MODULE:FACTORY", help=_FACTORY)
        if name != "headroom":
            command.add_argument("--hooks", action="append", help=_HOOKS)
        if name == "advise":
            _add_network(command)
        command.add_argument(
            "--nproc", type=_count, help="number of processes to start; default: 2, or 1 for predictions"
        )
        command.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
        command.add_argument(
            "--rounds",
            type=_count,
            default=3,
            help="rounds, in each of which all hooks are timed; default: 3. One or two show no noise",
        )
        command.add_argument("--json", **as_json)
    return whole


def _add_network(command: ArgumentParser) -> None:
    error = "largest error of one step's gradient to accept, relative to its norm; default: 0.3"
    command.add_argument("--max-error", type=_magnitude, help=error)
    bandwidth = "predict for this bandwidth of each rank: 1gbit, 100mbit, 1.2GB/s"
    command.add_argument("--bandwidth", type=parse_bandwidth, help=bandwidth)
    latency = "predict for this latency of a message between two ranks: 0.1ms, 50us"
    command.add_argument("--latency", type=parse_latency, help=latency)
    ranks = "predict for this number of ranks, each on its own host"
    command.add_argument("--world-size", type=functools.partial(_count, least=2), help=ranks)


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
    return int(text)


def _magnitude(text: str) -> float:
    if not (number := float(text)) >= 0:
        raise ArgumentTypeError(f"must be at least 0, got {text!r}")
    return number


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of `1gbit`, `100 Mbit/s`, `10Gbps` or `1.2GB/s`; reject ambiguous units."""
    found = _BANDWIDTH.fullmatch(text.strip())
    if found is None or not 0 < float(found["number"]) < math.inf:
        raise ArgumentTypeError(f"must be like 1gbit, 100mbit or 1.2GB/s, got {text!r}")
    if found["unclear"]:
        amount = found["number"] + found["prefix"]
        raise ArgumentTypeError(f"{text!r} is ambiguous: write {amount}bit/s for bits, {amount}B/s for bytes")
    scale = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[found["prefix"].lower()]
    return float(found["number"]) * scale / (1 if found["bytes"] else 8)


def parse_latency(text: str) -> float:
    """Return the seconds of `0.1ms`, `50us` or `1s`."""
    found = re.fullmatch(r"\s*(\d*\.?\d+)\s*(us|ms|s)\s*", text, re.IGNORECASE)
    if found is None:
        raise ArgumentTypeError(f"must be like 0.1ms or 50us, got {text!r}")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2].lower()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    whole = parser()
    args = whole.parse_args(arguments)
    try:
        if args.command == "list":
            hooks = listed(args.hook)
            print(json.dumps(hooks, indent=2) if args.json else text_of_list(hooks))
            return
        num_processes = _num_processes(args)
        with launch.nothing_on_stdout():  # imported modules may print
            chosen = candidates([] if args.command == "headroom" else args.hooks)
        if num_processes > 1:
            sys.exit(launch.spawn(num_processes, sys.argv[1:] if arguments is None else arguments))
        device = launch.choose_device(args.device)
    except ValueError as error:
        whole.error(str(error))
    _run(args, chosen, device)


def _num_processes(args: Namespace) -> int:
    """Return the number of processes to start; 1: run in this process."""
    launched, is_what_if = int(os.environ.get("WORLD_SIZE", 0)), has_network(args)
    if launched and args.nproc not in (None, launched):
        raise ValueError(f"--nproc {args.nproc}: a launcher has started {launched} processes already; omit --nproc")
    num = launched or args.nproc or (1 if is_what_if else 2)
    if num == 1 and not is_what_if:
        raise ValueError("one process sends nothing: use --nproc or torchrun, or predict with `advise --bandwidth`")
    if num == 1 and args.bandwidth is None:
        raise ValueError("one process has no network to measure: give --bandwidth")
    return 1 if launched else num


def _run(args: Namespace, chosen: list[Candidate], device: torch.device) -> None:
    is_first = os.environ.get("RANK", "0") == "0"

    def tell(what: str) -> None:
        if is_first and sys.stderr.isatty():
            print(f"{what} ...", file=sys.stderr)

    # The factory may print; only the result belongs on standard output.
    with launch.nothing_on_stdout(), launch.joined(device), warnings.catch_warnings():
        if not is_first:
            warnings.simplefilter("ignore")
        task = load_task(args.factory, device, int(os.environ.get("RANK", "0")))
        found = study(args, task, chosen, tell)
    if is_first:
        print(json.dumps(found, indent=2) if args.json else text_of(found))
