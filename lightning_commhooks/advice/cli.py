"""The command line: which hooks there are, and whether one would make a training of yours faster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_commhooks.advice import launch, report
from lightning_commhooks.advice.candidates import DEFAULT, Candidate, candidates
from lightning_commhooks.advice.launch import Failed, Place
from lightning_commhooks.advice.listing import listed
from lightning_commhooks.advice.load import load_task
from lightning_commhooks.advice.measure import Bench, UnfitError
from lightning_commhooks.advice.plot import save_plot
from lightning_commhooks.advice.study import Result, WhatIf, advised, measured
from lightning_commhooks.advice.task import Tell, try_task

app = typer.Typer(
    name="lightning-commhooks",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Communication hooks for PyTorch DDP: which there are, and whether one would make your training faster.",
)


class Device(str, Enum):
    """Where the model is."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


_FACTORY = (
    "A function without arguments that makes the model, as my_module:make or train.py:make. It returns (model, batch) "
    "if the model's output is the loss or has it as .loss; (model, (inputs, target), loss_fn); or a dict with model, "
    "batch and, if need be, loss_fn, optimizer and ddp (arguments of DistributedDataParallel). A LightningModule is "
    "asked for training_step(batch, 0) and configure_optimizers()."
)

Factory = Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help=_FACTORY, show_default=False)]
Hooks = Annotated[
    list[str] | None,
    typer.Option(
        "--hooks",
        help="Hooks to compare, with commas between them: names, names with options as "
        "powersgd:matrix_approximation_rank=2,warm_start=false, or configured hooks as my_module:MY_HOOK. "
        f"Default: {', '.join(DEFAULT.values())}.",
        show_default=False,
    ),
]
NumProcesses = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, help="Processes to start on this machine, unless torchrun has started them; 2 by default."
    ),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="auto: CUDA if there is a device for each process.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Rounds in which the hooks take turns.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Plot = Annotated[str | None, typer.Option("--plot", metavar="PATH", help="Draw the result, as in out.png.")]


@app.command("list")
def list_hooks(
    name: Annotated[str | None, typer.Argument(metavar="[HOOK]", help="One hook, with its options explained.")] = None,
    as_json: AsJson = False,
) -> None:
    """List hooks and wrappers: what each sends, its options and their defaults."""
    with _usage_errors(), launch.nothing_on_stdout():
        found = listed(name)
    if as_json:
        print(json.dumps([dataclasses.asdict(hook) for hook in found], indent=2))
    else:
        report.print_list(found, report.make_console(), with_docs=name is not None)


@app.command()
def headroom(
    factory: Factory,
    nproc: NumProcesses = None,
    device: DeviceOption = Device.auto,
    rounds: Rounds = 5,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Measure how much communication costs at most: your model with dense averaging against one that sends nothing."""
    chosen = candidates([])
    turns = rounds * len(chosen)
    _run(factory, nproc, device, as_json, plot, turns, lambda b, t: measured(b, chosen, rounds, "headroom", t))


@app.command()
def bench(
    factory: Factory,
    hooks: Hooks = None,
    nproc: NumProcesses = None,
    device: DeviceOption = Device.auto,
    rounds: Rounds = 3,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Measure hooks on your model: step time, what of it is waiting, bytes sent, error of the gradient."""
    chosen = _chosen(hooks)
    turns = rounds * len(chosen)
    _run(factory, nproc, device, as_json, plot, turns, lambda b, t: measured(b, chosen, rounds, "bench", t))


@app.command()
def advise(
    factory: Factory,
    hooks: Hooks = None,
    max_error: Annotated[
        float, typer.Option("--max-error", min=0, help="Error of one step's gradient, relative to its norm, to accept.")
    ] = 0.3,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", help="What if each rank could send so much: 1gbit, 100mbit, 1.2GB/s.")
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option("--latency", help="What if a message took so long to the next rank: 0.1ms, 50us."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=2, help="What if there were so many ranks, each on its own host.")
    ] = None,
    nproc: NumProcesses = None,
    device: DeviceOption = Device.auto,
    rounds: Rounds = 3,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Measure link and model, predict and measure step times of hooks, and say which to use, or none.

    With --bandwidth, --latency or --world-size it predicts steps over that network and measures none over this one, in
    one process unless --nproc or torchrun says otherwise. Several processes measure the link between them first: what
    it costs processors is taken from it, and so are bandwidth and latency that are not given; where it is the slower
    one, predictions are as slow.
    """
    chosen = _chosen(hooks)
    what_if = None
    if bandwidth is not None or latency is not None or world_size is not None:
        with _usage_errors():
            what_if = WhatIf(parse_bandwidth(bandwidth), parse_latency(latency), world_size)
            if launch.launched_place() is None:
                nproc = nproc or 1
    turns = rounds * len(chosen) * (1 if what_if else 2) + 1
    turns += len(chosen) - 2 if what_if else 0  # errors of all but dense and noop
    _run(factory, nproc, device, as_json, plot, turns, lambda b, t: advised(b, chosen, rounds, what_if, max_error, t))


# Only the case of the b tells bits from bytes; in capitals throughout it does not.
_BANDWIDTH = re.compile(
    r"(?P<number>\d*\.?\d+(?:[eE]\d+)?)\s*(?P<prefix>[kmgtKMGT]?)"
    r"(?:(?i:bit(?:/s)?)|bps|b/s|(?P<bytes>Bps|B/s)|(?P<unclear>(?i:b(?:ps|/s)?)))"
)


def parse_bandwidth(text: str | None) -> float | None:
    """Bytes per second of `1gbit`, `100 Mbit/s`, `10Gbps` or `1.2GB/s`.

    Raises:
        ValueError: it is none of these, or may mean bits as well as bytes.
    """
    if text is None:
        return None
    found = _BANDWIDTH.fullmatch(text.strip())
    if found is None or float(found["number"]) <= 0:
        raise ValueError(f"--bandwidth must be like 1gbit, 100mbit or 1.2GB/s, is {text!r}")
    if found["unclear"]:
        amount = found["number"] + found["prefix"]
        raise ValueError(f"--bandwidth {text!r} is ambiguous: write {amount}bit/s for bits, {amount}B/s for bytes")
    scale = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[found["prefix"].lower()]
    return float(found["number"]) * scale / (1 if found["bytes"] else 8)


def parse_latency(text: str | None) -> float | None:
    """Seconds of `0.1ms`, `50us` or `1s`.

    Raises:
        ValueError: it is none of these.
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9.]+)\s*(us|ms|s)\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"--latency must be like 0.1ms or 50us, is {text!r}")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2].lower()]


def _chosen(hooks: list[str] | None) -> list[Candidate]:
    # What a module with a hook prints does not belong in the output.
    with _usage_errors(), launch.nothing_on_stdout():
        return candidates(hooks or None)


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """One line, and exit code 2."""
    try:
        yield
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(launch.USAGE_ERROR) from error


def _run(
    factory: str,
    nproc: int | None,
    device: Device,
    as_json: bool,
    plot: str | None,
    num_turns: int,
    study: Callable[[Bench, Tell], Result],
) -> None:
    """Do a study in all processes, and print it in the first."""
    with _usage_errors():
        place = launch.launched_place()
        if place is not None and nproc is not None and not place.is_spawned and nproc != place.world_size:
            raise ValueError(
                f"--nproc {nproc}: a launcher has started {place.world_size} processes already; leave it out"
            )
    if place is None and (nproc or 2) > 1:
        raise typer.Exit(launch.spawn(nproc or 2, sys.argv[1:]))
    place = place or Place(0, 0, 1, True)
    try:
        result = _study(factory, device, place, num_turns, study)
    except Failed as failed:
        # Not through the interpreter's end: threads may wait for ranks that are gone.
        sys.stdout.flush()
        os._exit(failed.code)
    if not place.is_first:
        return
    if as_json:
        print(json.dumps(result.as_dict(), indent=2, allow_nan=False))
    else:
        report.print_result(result, report.make_console())
    if plot is not None:
        with _usage_errors():
            save_plot(result, plot)


def _study(
    factory: str, device: Device, place: Place, num_turns: int, study: Callable[[Bench, Tell], Result]
) -> Result:
    own, wrong = torch.device("cpu"), None
    try:
        own = launch.choose_device(device.value, place)
    except ValueError as error:
        wrong = error
    # What a factory prints does not belong in the output.
    with launch.nothing_on_stdout(), launch.joined(place, own):
        with launch.agreed(place, ValueError):
            if wrong is not None:
                raise wrong
            task = load_task(factory, own, place.rank)
        with launch.agreed(place, ValueError):
            try_task(factory, task)
        with _progress(place, num_turns) as tell, warnings.catch_warnings():
            if not place.is_first:
                warnings.simplefilter("ignore")
            with launch.agreed(place, UnfitError):
                bench = Bench(task)
                result = study(bench, tell)
                bench.close()
                return result


@contextlib.contextmanager
def _progress(place: Place, num_turns: int) -> Iterator[Tell]:
    console = report.make_console(stderr=True)
    if not place.is_first or not console.is_terminal:
        yield lambda what, label: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=num_turns)
        count = iter(range(num_turns + 1))

        def tell(what: str, label: str) -> None:
            progress.update(bar, completed=next(count, num_turns), description=f"{what} {label}".strip())

        yield tell
