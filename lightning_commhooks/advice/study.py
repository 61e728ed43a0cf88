"""The studies of the command line, with their measurements or predictions and conclusions."""

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
from lightning_commhooks.advice.ranking import MIN_GAIN, Row, decide, headroom, headroom_interval, ranked, row_of
from lightning_commhooks.advice.task import Task

# Payload's share of the nominal bandwidth; the rest is Ethernet, IP and TCP headers.
_PAYLOAD = 0.94


def study(args: Namespace, task: Task, chosen: list[Candidate], tell: Callable[[str], None]) -> dict[str, Any]:
    """Time hooks over the real network or the one of the options; for `advise`, recommend one. Collective.

    Args:
        args: the command line.
        task: the model.
        chosen: the hooks.
        tell: called with the name of each part of the work before it begins.

    Returns:
        the findings, ready for JSON: unknown numbers are `None`.
    """
    is_what_if, world_size, network = has_network(args), dist.get_world_size(), None
    if args.command == "advise" and world_size > 1:
        tell("network")
        network = measured_network(task)
    if is_what_if:
        network = network_of(args, network)
        world_size = network.world_size
    rows = ranked(Bench(task, network if is_what_if else None, tell).rows(chosen, args.rounds))
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
