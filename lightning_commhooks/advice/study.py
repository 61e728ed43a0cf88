"""The studies of the command line: their measurements or predictions and conclusions, also as text."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from lightning_commhooks.advice.candidates import DENSE, NOOP, Candidate
from lightning_commhooks.advice.emulated import Network
from lightning_commhooks.advice.errors import num_averaged
from lightning_commhooks.advice.measure import Bench, measured_network
from lightning_commhooks.advice.ranking import (
    MIN_GAIN,
    Row,
    decide,
    headroom,
    headroom_interval,
    is_conclusive,
    row_of,
)
from lightning_commhooks.advice.task import Task

# Payload's share of the nominal bandwidth; the rest is Ethernet, IP and TCP headers.
_PAYLOAD = 0.94
_TITLES = {DENSE: "dense (no hook)", NOOP: "noop (sends nothing)"}


def study(args: Namespace, task: Task, chosen: list[Candidate], tell: Callable[[str], None]) -> dict[str, Any]:
    """Time hooks over the real network or the one of the options; for `advise`, recommend one. Collective.

    Returns the findings, ready for JSON: unknown numbers are `None`. `tell` gets the name of each part of the work.
    """
    is_what_if, world_size, network = has_network(args), dist.get_world_size(), None
    if args.command == "advise" and world_size > 1:
        tell("network")
        network = measured_network(task)
    if is_what_if:
        network = network_of(args, network)
        world_size = network.world_size
    rows = Bench(task, network if is_what_if else None, tell).rows(chosen, args.rounds)
    # First noop, which does not train, then the fastest hooks.
    rows.sort(key=lambda row: (row.label != NOOP, row.step_ms))
    found = {
        "command": args.command,
        "is_what_if": is_what_if,
        "world_size": world_size,
        "device": torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "gradient_bytes": task.gradient_bytes,
        "link": network and asdict(network),
        "compute_ms": row_of(NOOP, rows).step_ms,
        "headroom": headroom(rows),
        "headroom_interval": headroom_interval(rows),
        "hooks": [{**asdict(row), "ratio": row.ratio, "averages_models": row.averages_models} for row in rows],
        "notes": list(notes(rows, network, num_averaged(world_size, task.gradient_bytes) if is_what_if else None)),
        "verdict": network and asdict(decide(rows, args.max_error)),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found), parse_constant=lambda name: None)
    return plain


def has_network(args: Namespace) -> bool:
    """Return whether the options describe a network to predict for."""
    return any(value is not None for value in (args.bandwidth, args.latency, args.world_size))


def network_of(args: Namespace, real: Network | None) -> Network:
    """Return the network of the options, completed from `real` or, without it, with no latency and two ranks."""
    bandwidth, latency = args.bandwidth and _PAYLOAD * args.bandwidth, args.latency
    if real is not None:
        bandwidth = real.bandwidth if bandwidth is None else bandwidth
        latency = real.latency if latency is None else latency
    return Network(bandwidth, latency or 0.0, args.world_size or max(2, dist.get_world_size()))


def notes(rows: list[Row], network: Network | None, num_ranks: int | None) -> Iterator[str]:
    """Yield remarks on the network and, for a prediction, whose errors are among `num_ranks`, on its limits."""
    if network is None:
        return
    if num_ranks is not None:
        yield "Predictions exclude the processor time of sending: on CPU, they are optimistic above 1 Gbit/s."
        if num_ranks < network.world_size:
            yield f"Errors are measured with an average over {num_ranks} of the {network.world_size} ranks."
    dense = row_of(DENSE, rows)
    exposed_ms = dense.step_ms - row_of(NOOP, rows).step_ms
    sending_ms = 1e3 * dense.bytes_sent / network.bandwidth
    if network.is_far and headroom(rows) >= MIN_GAIN and sending_ms <= exposed_ms / 2:
        yield (
            f"Delay, not bandwidth, is the bottleneck: communication adds {exposed_ms:.1f} ms to a dense step, of "
            f"which sending takes {sending_ms:.1f} ms and waiting for messages the rest. Hooks with few rounds of "
            "messages and larger buckets (bucket_cap_mb) save more than fewer bytes do."
        )


def text_of(found: dict[str, Any]) -> str:
    """Return the findings of a study as text: a table and its conclusions."""
    return "\n".join([*_heading(found), "", *_table(found), "", *_conclusions(found)])


def _heading(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['world_size']} ranks, each on {found['device']}; {found['gradient_bytes'] / 1e6:.3g} MB of gradients"
    if link := found["link"]:
        bits, kind = 8 * link["bandwidth"], "given" if found["is_what_if"] else "measured"
        rate = f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
        yield f"link ({kind}): {rate} of payload per rank, {1e3 * link['latency']:.2f} ms for a message"
    yield f"compute: {found['compute_ms']:.1f} ms a step that sends nothing"


def _dense_ms(found: dict[str, Any]) -> float:
    return next(float(row["step_ms"]) for row in found["hooks"] if row["label"] == DENSE)


def _table(found: dict[str, Any]) -> Iterator[str]:
    dense_ms = _dense_ms(found)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "predicted ms" if found["is_what_if"] else "step ms": lambda row: f"{row['step_ms']:.1f}",
        "±": lambda row: f"{row['spread_ms']:.1f}",
    }
    if found["command"] != "headroom":
        columns |= {
            "of dense": lambda row: f"{row['step_ms'] / dense_ms:.2f}x",
            "exposed ms": lambda row: _number(row["exposed_ms"], ".1f"),
            "codec ms": lambda row: _number(row["codec_ms"], ".1f"),
            "MB sent": lambda row: f"{row['bytes_sent'] / 1e6:.3g}",
            "fewer bytes": lambda row: _number(row["ratio"], ".3g"),
            "error": lambda row: _number(row["error"], ".2g"),
        }
    lines = [["hook", *columns]]
    lines += [
        [_TITLES.get(row["label"], row["label"]), *(of(row) for of in columns.values())] for row in found["hooks"]
    ]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for first, *cells in lines:
        yield "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _conclusions(found: dict[str, Any]) -> Iterator[str]:
    yield from (f"{row['label']}: {row['note']}" for row in found["hooks"] if row["note"])
    yield from found["notes"]
    if found["command"] == "headroom":
        dense_ms, room, (low, high) = _dense_ms(found), found["headroom"], found["headroom_interval"]
        if not is_conclusive((low, high)):
            yield (
                f"Communication costs between {low * dense_ms:.1f} ms and {high * dense_ms:.1f} ms of {dense_ms:.1f} "
                f"ms a step, {low:.0%} to {high:.0%}: the measurement is too noisy for a conclusion. Repeat it on a "
                "quiet machine, or with more --rounds."
            )
            return
        costs = f"Communication costs {room * dense_ms:.1f} ms of {dense_ms:.1f} ms a step"
        yield f"{costs}: {room:.0%} ({low:.0%} to {high:.0%})."
        yield "Do not compress." if room < MIN_GAIN else "No hook can save more; `advise` finds how much each saves."
    if verdict := found["verdict"]:
        for reason in dict.fromkeys(verdict["apart"].values()):
            labels = " and ".join(label for label, own in verdict["apart"].items() if own == reason)
            yield f"Not recommended by default: {labels}; {reason}."
        choice = verdict["choice"]
        against = "No conclusion" if verdict["is_noisy"] else "Do not compress"
        yield f"\n{against if choice is None else f'Use {choice}'}: {verdict['reason']}."
        if choice is not None:
            yield f"    {verdict['line']}"
