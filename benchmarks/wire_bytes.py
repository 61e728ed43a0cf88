"""Do hooks send the bytes they say? Our count against the counter of the network interface, on 2 and 4 hosts.

Each hook trains 8.4 M parameters under DDP on hosts of `netns.py`. Printed for each, per step and rank:

- counted: `attachment.metrics()["bytes_sent"]`, payload without any header.
- interface: difference of `/sys/class/net/*/statistics/tx_bytes` around the same steps. Nothing is subtracted.
- difference: of the two, in percent of counted, on the rank where it is largest.
- headers: the part of the difference that is known to be headers and acknowledgements.
- vs dense: what a float32 ring all-reduce of the gradients must send, over what the interface sent.

Construction of DDP, rendezvous of our process group and the rebuild of DDP's buckets happen before the measured
steps. Inside them are two barriers (all-reduces of one number, 500 bytes each).

Expected headers: Ethernet, IP and TCP take 66 bytes of each packet, and an acknowledgement is such a packet
without content. Packets hold up to 64 KB, since segmentation is left to the (virtual) network card, and a real
one segments after the host has counted: 0.2 to 0.3% of a large message in all. gloo adds 144 bytes to each
message (three preambles of 48 bytes: ready to send, ready to receive, data), and sends 4(w-1) messages for an
all-reduce, 2(w-1) for an all-gather, w-1 for an all-to-all among w ranks, at least. So one all-reduce costs about
1.6 KB of headers on 2 hosts and 4.8 KB on 4, however little it carries.

Exits with 1 when a difference is above 3%. A hook that sends less than 0.5 MB per step passes above 3%, marked
`headers`, if what headers leave of the difference is within 3%; every low-rank hook is run at rank 32, too, where
it sends enough to be held to the 3% without any allowance.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from netns import hosts, own_tx_bytes, own_tx_packets

if TYPE_CHECKING:
    import lightning_commhooks as lch

NUM_LAYERS = 8
WIDTH = 1024
BATCH_SIZE = 8
WARM_UP_STEPS = 3

# Of what a float32 ring all-reduce sends, by the interface's counter.
LIMITS = {"int8": 0.27, "int4": 0.15}
TOLERANCE = 0.03
MEASURABLE = 0.5e6  # bytes per step and rank
SILENT = 2e3  # bytes per step and rank that a hook without communication may cause

PACKET_HEADER = 66
MESSAGE_HEADER = 144


@dataclasses.dataclass
class Sent:
    """What one rank sent, per step.

    Attributes:
        hook: label.
        counted: bytes, by our own count.
        interface: bytes, by the interface's.
        packets: by the interface's count.
        collectives: by our own count.
        dense: bytes of plain DDP in float32.
    """

    hook: str
    counted: float
    interface: float
    packets: float
    collectives: float
    dense: float

    @property
    def difference(self) -> float:
        """Relative to the count."""
        return self.interface / self.counted - 1

    def headers(self, num: int) -> float:
        """Relative to the count, were all collectives all-reduces among `num` ranks."""
        messages = 4 * (num - 1) * self.collectives
        return (PACKET_HEADER * self.packets + MESSAGE_HEADER * messages) / self.counted


def cases() -> Iterator[tuple[str, lch.CommHook]]:
    """Hooks to measure, with labels."""
    import lightning_commhooks as lch

    # Ranks begin to step alone before the measured steps, which are a multiple of the periods.
    alone = {"start_localSGD_iter": 1, "post_local_gradient_allreduce": False}
    local_sgd = {
        "post_localsgd": {"period": 5},
        "hierarchical_localsgd": {"period_group_size_dict": {5: None}},
        "diloco": {"period": 5, "pseudo_gradient": "bf16"},
    }
    for name in lch.available_hooks():
        hook = lch.get_hook(name, **({**alone, **local_sgd[name]} if name in local_sgd else {}))
        if hasattr(hook, "start_powerSGD_iter"):
            hook = dataclasses.replace(hook, start_powerSGD_iter=0)
            yield name, hook
            yield f"{name}, rank 32", dataclasses.replace(hook, matrix_approximation_rank=32)
        else:
            yield name, hook
    # Nothing is under way when the measured steps begin and end.
    yield "diloco, delay 2", lch.DiLoCo(**alone, period=5, delay=2, pseudo_gradient="int4")
    yield "diloco, topk", lch.DiLoCo(**alone, period=5, pseudo_gradient="topk")
    yield "fp16, float32 sums", lch.FP16(accumulate_dtype="float32")
    yield "bf16(powersgd)", lch.Cast(lch.PowerSGD(start_powerSGD_iter=0), "bf16")
    low_rank = lch.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=32)
    yield "bf16(powersgd), rank 32", lch.Cast(low_rank, "bf16")
    yield "int8(powersgd), rank 32", lch.Cast(low_rank, "int8")
    yield "per_tensor, all_gather", lch.QuantizePerTensor(protocol="all_gather")


def work(steps: int, low_rank_steps: int, only: list[str]) -> None:
    """Measure all cases on this host; rank 0 prints a line of JSON for each, a list over ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for label, hook in cases():
        if only and not any(part in label for part in only):
            continue
        sent = measure(label, hook, low_rank_steps if "powersgd" in label else steps)
        of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, dataclasses.asdict(sent))
        if dist.get_rank() == 0:
            print(json.dumps(of_ranks), flush=True)
    dist.destroy_process_group()


def measure(label: str, hook: lch.CommHook, steps: int) -> Sent:
    """Train, and count what this rank sends in the steps after the warm-up."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import lightning_commhooks as lch

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    attachment = lch.attach(model, hook, optimizers=[optimizer])
    generator = torch.Generator().manual_seed(dist.get_rank())

    def train(num: int) -> None:
        for _ in range(num):
            optimizer.zero_grad()
            model(torch.randn(BATCH_SIZE, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()

    def read() -> tuple[float, float, float, float]:
        dist.all_reduce(torch.zeros(1))  # all that was sent before has arrived
        metrics = attachment.metrics()
        values = metrics["bytes_sent"], own_tx_bytes(), own_tx_packets(), metrics["collectives"]
        dist.all_reduce(torch.zeros(1))  # nobody sends before all have read
        return values

    train(WARM_UP_STEPS)
    before = read()
    train(steps)
    per_step = [(new - old) / steps for new, old in zip(read(), before, strict=True)]
    attachment.close()
    w = dist.get_world_size()
    dense = 2 * (w - 1) / w * 4 * sum(p.numel() for p in model.parameters())
    return Sent(label, *per_step, dense)


def report(num: int, of_ranks: list[Sent]) -> str:
    """Print one line of the table; returns its verdict."""
    counted = sum(sent.counted for sent in of_ranks) / num / 1e6
    interface = sum(sent.interface for sent in of_ranks) / num / 1e6
    start = f"{of_ranks[0].hook:<26} {num:>5} {counted:>12.4f} {interface:>12.4f}"
    if not counted:
        verdict = "ok" if max(sent.interface for sent in of_ranks) < SILENT else "FAIL"
        print(f"{start} {'-':>11} {'-':>9} {'-':>9}  {verdict}", flush=True)
        return verdict
    worst = max(of_ranks, key=lambda sent: abs(sent.difference))
    difference, headers = worst.difference, worst.headers(num)
    if abs(difference) <= TOLERANCE:
        verdict = "ok"
    elif worst.counted < MEASURABLE and abs(difference - headers) <= TOLERANCE:
        verdict = "headers"
    else:
        verdict = "FAIL"
    ratio = of_ranks[0].dense / 1e6 / interface
    if 1 / ratio > LIMITS.get(of_ranks[0].hook, 1e9):
        verdict = "FAIL"
    print(f"{start} {difference:>+11.2%} {headers:>9.2%} {ratio:>8.2f}x  {verdict}", flush=True)
    return verdict


def main() -> None:
    """Run on 2 and on 4 hosts, print the table, exit with 1 if a count is wrong."""
    parser = argparse.ArgumentParser(description="Counted bytes against the network interface's own counter.")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of hooks that send a lot")
    parser.add_argument("--low-rank-steps", type=int, default=50, help="measured steps of the powersgd hooks")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--only", nargs="*", default=[], help="hooks whose label contains one of these")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.steps, args.low_rank_steps, args.only)
        return

    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {importlib.metadata.version('torch')}, {datetime.date.today()}, links of {args.rate}")
    print("# MB (1e6 bytes) sent per step and rank; see benchmarks/wire_bytes.py for the columns\n")
    print(
        f"{'hook':<26} {'hosts':>5} {'counted MB':>12} {'interface MB':>12} {'difference':>11} {'headers':>9} "
        f"{'vs dense':>9}  verdict",
        flush=True,
    )
    steps = ["--steps", str(args.steps), "--low-rank-steps", str(args.low_rank_steps), "--only", *args.only]
    verdicts = []
    for num in (2, 4):
        with hosts(num, rate=args.rate) as network:
            output = network.launch([__file__, "--worker", *steps], timeout=400)[0]
        for line in output.splitlines():
            verdicts.append(report(num, [Sent(**sent) for sent in json.loads(line)]))
    print(
        f"\n{len(verdicts)} rows: {verdicts.count('ok')} within {TOLERANCE:.0%} of the interface; "
        f"{verdicts.count('headers')} above it by headers alone, sending less than {MEASURABLE / 1e6} MB per step; "
        f"{verdicts.count('FAIL')} wrong"
    )
    sys.exit("FAIL" in verdicts)


if __name__ == "__main__":
    main()
