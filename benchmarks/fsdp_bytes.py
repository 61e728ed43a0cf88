"""Are gradients of sharded models halved on the wire? FSDP 1 and 2, by the network interface, on 2 and 4 hosts.

8.4 M parameters in 8 units, on hosts of `netns.py`. Printed for each hook and way to shard, per step and rank:

- counted: `attachment.metrics()["bytes_sent"]`, payload without any header; of FSDP by itself, unknown.
- interface: what the interface sent, less what it sent in the same steps of a model whose gradients FSDP hands to a
  function that sends nothing: there FSDP gathers the same parameters.
- difference: of the two, in percent of counted, on the rank where it is largest.
- of float32: interface over what a float32 reduction must send: (w-1)/w of the gradients, twice that if they are not
  sharded.
- of FSDP's own: interface over that of FSDP by itself, in float32.

Exits with 1 when a difference is above 3%, or a hook sends more of float32 than it may: 0.52 in 16 bit, 0.27 for int8.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import shlex
import sys
import warnings
from typing import Any

from netns import hosts, own_tx_bytes

NUM_LAYERS = 8
WIDTH = 1024
BATCH_SIZE = 8
WARM_UP_STEPS = 2

WAYS = ("FSDP1 FULL_SHARD", "FSDP1 SHARD_GRAD_OP", "FSDP1 NO_SHARD", "FSDP2")
# FSDP by itself, in float32 and with its own reduce_dtype; and hooks.
HOOKS = ("none", "reduce_dtype", "allreduce", "bf16", "fp16", "int8")
LIMITS = {"bf16": 0.52, "fp16": 0.52, "int8": 0.27}
TOLERANCE = 0.03


@dataclasses.dataclass
class Sent:
    """What one rank sent for gradients, per step, in bytes.

    Attributes:
        way: how the model is sharded.
        hook: label.
        counted: by our own count.
        interface: by the interface's.
        dense: of a float32 reduction.
    """

    way: str
    hook: str
    counted: float
    interface: float
    dense: float


def work(steps: int) -> None:
    """Measure all cases on this host; rank 0 prints a line of JSON for each, a list over ranks."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # NO_SHARD is deprecated
    dist.init_process_group("gloo")
    for way in WAYS:
        parameters = measure(way, "silent", steps).interface
        for hook in HOOKS:
            sent = measure(way, hook, steps)
            sent.interface -= parameters
            of_ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
            dist.all_gather_object(of_ranks, dataclasses.asdict(sent))
            if dist.get_rank() == 0:
                print(json.dumps(of_ranks), flush=True)
    dist.destroy_process_group()


def make_model(way: str, hook: str) -> Any:
    """A sharded model, without a hook."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        MixedPrecision,
        MixedPrecisionPolicy,
        ShardingStrategy,
        fully_shard,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    dtype = torch.bfloat16 if hook == "reduce_dtype" else None
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    if way == "FSDP2":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        return model
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[way.split()[1]],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=MixedPrecision(reduce_dtype=dtype),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


class Silent:
    """A reduce-scatter for FSDP2 that sends nothing."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        """Memory for gradients."""
        import torch

        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Make all gradients zero."""
        output_tensor.zero_()


def silence(way: str, model: Any) -> None:
    """Have gradients reduced by a function that sends nothing."""
    if way == "FSDP2":
        for module in (*model, model):
            module.set_custom_reduce_scatter(Silent())
    else:
        model.register_comm_hook(None, lambda state, grad, output=None: (grad if output is None else output).zero_())


def measure(way: str, hook: str, steps: int) -> Sent:
    """Train, and count what this rank sends in the steps after the warm-up, parameters included."""
    import torch
    import torch.distributed as dist

    import lightning_commhooks as lch

    model = make_model(way, hook)
    attachment = lch.attach(model, hook) if hook not in ("none", "reduce_dtype", "silent") else None
    if hook == "silent":
        silence(way, model)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def train(num: int) -> None:
        for _ in range(num):
            model(torch.randn(BATCH_SIZE, WIDTH, generator=generator)).square().mean().backward()
            model.zero_grad()

    def read() -> tuple[float, float]:
        dist.all_reduce(torch.zeros(1))  # all that was sent before has arrived
        values = attachment.metrics()["bytes_sent"] if attachment else 0.0, own_tx_bytes()
        dist.all_reduce(torch.zeros(1))  # nobody sends before all have read
        return values

    train(WARM_UP_STEPS)
    start = read()
    train(steps)
    counted, interface = ((new - old) / steps for new, old in zip(read(), start, strict=True))
    w = dist.get_world_size()
    numel = NUM_LAYERS * (WIDTH * WIDTH + WIDTH)
    dense = (2 if way.endswith("NO_SHARD") else 1) * (w - 1) / w * 4 * numel
    return Sent(way, hook, counted, interface, dense)


def report(num: int, of_ranks: list[Sent], own: float) -> bool:
    """Print one line of the table; returns whether it is as it should be."""
    first = of_ranks[0]
    interface = sum(sent.interface for sent in of_ranks) / num
    ratio = interface / first.dense
    line = f"{first.way:<20} {first.hook:<13} {num:>5}"
    tail = f"{ratio:>10.3f} {interface / own:>14.3f}"
    if not first.counted:
        print(f"{line} {'-':>11} {interface / 1e6:>13.3f} {'-':>11} {tail}", flush=True)
        return True
    counted = sum(sent.counted for sent in of_ranks) / num
    worst = max((sent.interface / sent.counted - 1 for sent in of_ranks), key=abs)
    is_right = abs(worst) <= TOLERANCE and ratio <= LIMITS.get(first.hook, 1.03)
    verdict = "ok" if is_right else "FAIL"
    print(f"{line} {counted / 1e6:>11.3f} {interface / 1e6:>13.3f} {worst:>+11.2%} {tail}  {verdict}", flush=True)
    return is_right


def main() -> None:
    """Run on 2 and on 4 hosts, print the table, exit with 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description="Gradients of sharded models on the wire.")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.steps)
        return
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {importlib.metadata.version('torch')}, {datetime.date.today()}, links of {args.rate}")
    print("# MB (1e6 bytes) sent for gradients per step and rank; see benchmarks/fsdp_bytes.py for the columns\n")
    print(
        f"{'sharded by':<20} {'hook':<13} {'hosts':>5} {'counted MB':>11} {'interface MB':>13} {'difference':>11} "
        f"{'of float32':>10} {'of FSDPs own':>14}",
        flush=True,
    )
    is_right = []
    for num in (2, 4):
        with hosts(num, rate=args.rate) as network:
            output = network.launch([__file__, "--worker", "--steps", str(args.steps)], timeout=540)[0]
        own = 0.0
        for line in output.splitlines():
            of_ranks = [Sent(**sent) for sent in json.loads(line)]
            if of_ranks[0].hook == "none":
                own = sum(sent.interface for sent in of_ranks) / num
            is_right.append(report(num, of_ranks, own))
    print(f"\n{len(is_right)} rows, {is_right.count(False)} wrong")
    sys.exit(not all(is_right))


if __name__ == "__main__":
    main()
