"""Seconds until a language model reaches a fixed loss over a slow link: dense DDP, PyTorch's hooks, and ours.

    python benchmarks/time_to_loss.py --tune
    python benchmarks/time_to_loss.py > benchmarks/results/time_to_loss.txt
    python benchmarks/time_to_loss.py --low-rank > benchmarks/results/time_to_loss_low_rank.txt
    python benchmarks/time_to_loss.py --muon --tune
    python benchmarks/time_to_loss.py --muon > benchmarks/results/time_to_loss_muon.txt

The command in `time_to_loss_muon.txt` has `--methods` with six of the twelve.

Two hosts (network namespaces) joined by a link of 100 Mbit/s, one process and one core each. A transformer of 0.84 M
parameters (`language_model.py`) learns Python's documentation character by character with AdamW, whose learning rate
is constant after a warm-up. For a seed all methods get the same data in the same order, initial weights, batch and
number of steps.

`--tune` trains with every method and the same three learning rates for all, over a fast link and with a seed that is
not reported. A method's is the one with the lowest mean loss over that run.

The clock runs while training and stops for evaluations, which are at the same steps for all methods: multiples of all
periods, so that all ranks have the same model, or else of their average. It does not run while codecs are compiled,
which is once per machine. When the target is reached is interpolated between the last evaluation above it and the next.
Bytes are the network interface's own count. Recorded is also what other programs took of the machine meanwhile; runs
with more than 5% are measured again when the script is started again.

Runs that are in the JSON already are left out: `--again` repeats them, `--methods` and `--seeds` run some. Exits with 1
when the best of our hooks is less than 15 times as fast as dense, or 3 times as fast as the faster of stock fp16 and
bf16, in the mean over seeds or with any seed.

`--low-rank` compares low-rank hooks, ours and PyTorch's, and no others: one launch, in which they take turns, seed by
seed, always measured anew. Exits with 1 when the best of ours is less than 1.4 times as fast as PyTorch's best, or does
not get to 2.62 with every seed.

`--muon` compares optimizers in the same way: AdamW, and Muon for the matrices of the blocks with AdamW for the rest,
both with dense gradients and as the inner optimizer of DiLoCo (MuLoCo, Thérien et al. 2025). Muon's update is scaled to
the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so the same four learning rates are tried for both. DiLoCo has
`outer_lr=1` and no momentum. Exits with 1 unless MuLoCo in 2 and 4 bits ends below DiLoCo with AdamW in as many bits
with every seed. `torch.optim.Muon` iterates in bfloat16, which takes many CPUs ten times as long as float32; here it
iterates in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import language_model
import stock
import torch
import torch.distributed as dist
from netns import Network, hosts, own_tx_bytes, pin
from records import RESULTS, Records, command, machine
from time_to_loss_report import Judge, draw, low_rank_verdict, muon_verdict, report, verdict
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

STEPS = 256
EVALUATE_EVERY = 32
NUM_VALIDATION = 256  # pieces of text
WARM_UP_STEPS = 20
BATCH_SIZE = 1  # pieces of text per rank
SEEDS, TUNING_SEED = (0, 1, 2), 100
LEARNING_RATES, MORE_LEARNING_RATES = (3e-4, 6e-4, 1.2e-3), (3e-4, 6e-4, 1.2e-3, 2.4e-3)
# Half a millisecond of traffic: nothing that is sent is hidden in it.
SLOW, FAST = {"rate": "100mbit", "burst": "16kb"}, {"rate": "10gbit"}
RECORDS, LOW_RANK_RECORDS = RESULTS / "time_to_loss.json", RESULTS / "time_to_loss_low_rank.json"
MUON_RECORDS = RESULTS / "time_to_loss_muon.json"
KEYS = ("tuning", "method", "learning_rate", "seed")

# Share of the machine that other programs may take while a run lasts.
MOST_BY_OTHERS = 0.05
ALONE: dict[str, Any] = {"start_localSGD_iter": 0, "post_local_gradient_allreduce": False}
# DiLoCo whose outer optimizer moves to the average, as long as the run is short for momentum.
PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, **ALONE}


def low_rank(rank: int, num_iters_per_step: int = 2) -> lc.PowerSGD:
    """PowerSGD from the first step on."""
    return lc.PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0, num_iters_per_step=num_iters_per_step)


# A string is PyTorch's hook of that name, `None` DDP by itself.
METHODS: dict[str, str | lc.CommHook | None] = {
    "dense": None,
    "stock fp16": "fp16",
    "stock bf16": "bf16",
    "stock powersgd": "powersgd-4",
    "bf16": lc.BF16(),
    "int8": lc.Int8(),
    "int4": lc.Int4(),
    "powersgd": low_rank(4),
    "int8, then int8(powersgd)": lc.Schedule({0: "int8", 16: lc.Cast(low_rank(4), "int8")}),
    "post_localsgd, 8": lc.PostLocalSGD(period=8, **ALONE),
    "diloco, 16": lc.DiLoCo(period=16, **ALONE),
    "diloco, 16, int4": lc.DiLoCo(period=16, pseudo_gradient="int4", **ALONE),
    "diloco, 8, int4, no momentum": lc.DiLoCo(period=8, pseudo_gradient="int4", **PLAIN),
    "diloco, 16, int4, no momentum": lc.DiLoCo(period=16, pseudo_gradient="int4", **PLAIN),
    "diloco, 32, int4, no momentum": lc.DiLoCo(period=32, pseudo_gradient="int4", **PLAIN),
    "diloco, 8, int4, delay 4": lc.DiLoCo(period=8, pseudo_gradient="int4", delay=4, **PLAIN),
    "diloco, 16, int4, delay 4": lc.DiLoCo(period=16, pseudo_gradient="int4", delay=4, **PLAIN),
    "diloco, 16, int4, eager": lc.DiLoCo(period=16, pseudo_gradient="int4", eager=True, **PLAIN),
    "sparseloco, 8": lc.DiLoCo(period=8, pseudo_gradient="topk", **PLAIN),
    "sparseloco, 8, delay 2": lc.DiLoCo(period=8, pseudo_gradient="topk", delay=2, **PLAIN),
    "sparseloco, 8, k=128": lc.DiLoCo(period=8, pseudo_gradient=lc.ChunkedTopK(k=128, compress_1d=True), **PLAIN),
}
# For `--low-rank`, beside those of METHODS.
LOW_RANK: dict[str, str | lc.CommHook | None] = {
    **{method: hook for method, hook in METHODS.items() if "powersgd" in method},
    "stock powersgd, rank 8": "powersgd-8",
    "powersgd, rank 8": low_rank(8),
    "powersgd, rank 8, 1 iteration": low_rank(8, num_iters_per_step=1),
    "int8(powersgd), rank 8": lc.Cast(low_rank(8), "int8"),
    "int8(powersgd), rank 16": lc.Cast(low_rank(16), "int8"),
}

# For `--muon`: the same with either optimizer. "int2" has the error feedback of the paper, "int4" has none.
OPTIMIZERS: dict[str, lc.CommHook | None] = {
    "dense": None,
    "powersgd": low_rank(4),
    "int8": lc.Int8(),
    "diloco, 16": lc.DiLoCo(period=16, **PLAIN),
    "diloco, 16, int4": lc.DiLoCo(period=16, pseudo_gradient="int4", **PLAIN),
    "diloco, 16, int2": lc.DiLoCo(period=16, pseudo_gradient="int2", error_feedback=True, **PLAIN),
}
MUON = {f"{name}{hook}": OPTIMIZERS[hook] for hook in OPTIMIZERS for name in ("", "muon: ")}


def newton_schulz(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """The iterations of `torch.optim.Muon` in float32."""
    a, b, c = coefficients
    x = gradient.mT if gradient.shape[0] > gradient.shape[1] else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if gradient.shape[0] > gradient.shape[1] else x


class Clock:
    """Seconds, and bytes sent by this rank, while it runs."""

    def __init__(self) -> None:
        self.seconds, self.sent = 0.0, 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Until all ranks have got to the end."""
        dist.barrier()
        before, start = own_tx_bytes(), time.perf_counter()
        yield
        dist.barrier()
        self.seconds += time.perf_counter() - start
        self.sent += own_tx_bytes() - before


def seconds_of_others(own: float) -> float:
    """Processor seconds in user programs since the machine started, less those of all ranks."""
    user, nice = Path("/proc/stat").read_text().split(maxsplit=3)[1:3]
    ranks = torch.tensor([own])
    dist.all_reduce(ranks)
    return (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK") - ranks.item()


class Training:
    """One run on this rank: a method, a learning rate and a seed."""

    def __init__(self, method: str, learning_rate: float, seed: int) -> None:
        self.pieces, validation = language_model.text()
        self.validation = validation[:NUM_VALIDATION]
        self.generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(language_model.LanguageModel(), gradient_as_bucket_view=True)
        of_muon: list[torch.nn.Parameter] = []
        if method.startswith("muon: "):
            of_muon = [p for p in self.model.module.blocks.parameters() if p.dim() == 2]
        rest = [p for p in self.model.parameters() if all(p is not own for own in of_muon)]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=learning_rate, fused=True)]
        if of_muon:
            torch.optim._muon._zeropower_via_newtonschulz = newton_schulz  # type: ignore[attr-defined]
            scaled = {"lr": learning_rate, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
            self.optimizers.append(torch.optim.Muon(of_muon, **scaled))
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(own, lambda n: min(1, (n + 1) / WARM_UP_STEPS)) for own in self.optimizers
        ]
        hook = {**METHODS, **LOW_RANK, **MUON}[method]
        self.attachment: lc.Attachment | None = None
        if isinstance(hook, lc.CommHook):
            self.attachment = lc.attach(self.model, hook, optimizers=self.optimizers)
        elif hook is not None:
            stock.register(self.model, hook)

    def curve(self) -> list[tuple[int, float, int, float]]:
        """Train; steps, seconds, bytes sent and loss at each evaluation."""
        clock = Clock()
        points = [(0, 0.0, 0, self.evaluate())]
        for end in range(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY):
            with clock.running():
                for _ in range(EVALUATE_EVERY):
                    self.step()
            points.append((end, round(clock.seconds, 4), clock.sent, round(self.evaluate(), 5)))
        if self.attachment is not None:
            self.attachment.close()
        return points

    def step(self) -> None:
        """Of the optimizers, with a new batch."""
        batch = self.pieces[torch.randint(len(self.pieces), (BATCH_SIZE,), generator=self.generator)]
        self.model.zero_grad()
        self.model(batch[:, :-1], batch[:, 1:]).backward()
        for part in (*self.optimizers, *self.schedules):
            part.step()

    def evaluate(self) -> float:
        """Loss of the average of all ranks' models in nats on the validation pieces, of which each computes a share."""
        with self.attachment.averaged_weights() if self.attachment else contextlib.nullcontext():
            return self.loss_of_all()

    def loss_of_all(self) -> float:
        """The same, of models that are equal."""
        checksum = torch.stack([p.detach().double().sum() for p in self.model.parameters()])
        highest, lowest = checksum.clone(), checksum.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        assert highest.equal(lowest), "ranks must have the same model when it is evaluated"
        own = self.validation[dist.get_rank() :: dist.get_world_size()]
        with torch.no_grad():
            total = sum(self.model.module(some[:, :-1], some[:, 1:]) * len(some) for some in own.split(32))
        assert isinstance(total, torch.Tensor)
        dist.all_reduce(total)
        return total.item() / len(self.validation)


def work(runs: list[list[Any]]) -> None:
    """Train on this host, one run after another; rank 0 prints a line of JSON for each."""
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for method, learning_rate, seed in runs:
        training = Training(method, learning_rate, seed)
        before, start = seconds_of_others(os.times().user), time.perf_counter()
        curve = training.curve()
        others = seconds_of_others(os.times().user) - before
        share = max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))
        if dist.get_rank() == 0:
            print(json.dumps({"others": round(share, 3), "curve": curve}), flush=True)
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop their last tensors, or the interpreter's end aborts


def measure(records: Records, methods: list[str], seeds: list[int], tuning: bool, again: bool) -> None:
    """Run what is not in the records yet, one launch for each method."""
    with hosts(2, **(FAST if tuning else SLOW)) as network:
        for method in methods:
            all_rates = MORE_LEARNING_RATES if method in MUON and records.path == MUON_RECORDS else LEARNING_RATES
            rates = all_rates if tuning else [best_learning_rate(records, method)]
            runs = [(method, rate, seed) for seed in seeds for rate in rates]
            launch(network, records, [run for run in runs if again or not is_measured(records, tuning, run)], tuning)


def measure_in_turns(records: Records, tuned: Records, methods: list[str], seeds: list[int]) -> None:
    """Run all in one launch, seed by seed, with the learning rates of `tuned`."""
    with hosts(2, **SLOW) as network:
        runs = [(method, best_learning_rate(tuned, method), seed) for seed in seeds for method in methods]
        launch(network, records, runs, tuning=False)


def launch(network: Network, records: Records, runs: list[tuple[str, float, int]], tuning: bool) -> None:
    """Train on all hosts, and record it."""
    if not runs:
        return
    lines = network.launch([__file__, "--work", json.dumps(runs)], timeout=1800)[0]
    for run, line in zip(runs, lines.splitlines()[-len(runs) :], strict=True):
        row = {**dict(zip(KEYS, (tuning, *run), strict=True)), **json.loads(line)}
        records.put(row)
        _, seconds, _, loss = row["curve"][-1]
        print(f"{run}: {seconds:.1f} s, loss {loss:.3f}, others {row['others']:.1%}", file=sys.stderr)


def is_measured(records: Records, tuning: bool, run: tuple[str, float, int]) -> bool:
    """Whether there is such a run; for the reported ones, with a machine to itself."""
    found = [row for row in records.rows if [row[key] for key in KEYS] == [tuning, *run]]
    return any(tuning or row["others"] <= MOST_BY_OTHERS for row in found)


def best_learning_rate(records: Records, method: str) -> float:
    """The one with the lowest mean loss over the evaluations of its tuning run."""
    rows = [row for row in records.rows if row["tuning"] and row["method"] == method]
    if not rows:
        raise SystemExit(
            f"no learning rate is known for {method!r}: run {sys.argv[0]} --tune --methods {method!r} first"
        )
    best = min(rows, key=lambda row: statistics.mean(point[3] for point in row["curve"]))
    return float(best["learning_rate"])


def main() -> None:
    """Measure what is missing, print the table, draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="find the learning rates")
    parser.add_argument("--low-rank", action="store_true", help="compare low-rank hooks only")
    parser.add_argument("--muon", action="store_true", help="compare AdamW and Muon")
    parser.add_argument("--methods", nargs="*", help="some of them only")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--again", action="store_true", help="also what is in the records already")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return
    if args.low_rank:
        records = Records(LOW_RANK_RECORDS, KEYS)
        measure_in_turns(records, Records(RECORDS, KEYS), list(LOW_RANK), args.seeds)
        sys.exit(not print_table(records.rows, low_rank_verdict))
    if args.muon:
        records = Records(MUON_RECORDS, KEYS)
        if args.tune:
            measure(records, args.methods or list(MUON), [TUNING_SEED], True, args.again)
            return
        measure_in_turns(records, records, args.methods or list(MUON), args.seeds)
        sys.exit(not print_table([row for row in records.rows if not row["tuning"]], muon_verdict))
    records = Records(RECORDS, KEYS)
    measure(records, args.methods or list(METHODS), [TUNING_SEED] if args.tune else args.seeds, args.tune, args.again)
    if args.tune:
        return
    rows = [row for row in records.rows if not row["tuning"] and row["method"] in METHODS]
    for row in rows:
        if row["others"] > MOST_BY_OTHERS:
            raise SystemExit(f"no table yet: others disturbed {row['method']!r}, seed {row['seed']}; run this again")
    missing = [f"{m}, seed {s}" for m in METHODS for s in SEEDS if not records.has(tuning=False, method=m, seed=s)]
    if missing:
        raise SystemExit(f"no table yet: not measured are {'; '.join(missing)}")
    ok = print_table(rows, verdict)
    draw(rows, RESULTS)
    sys.exit(not ok)


def print_table(rows: list[dict[str, Any]], judge: Judge) -> bool:
    """Whether what is asked for holds."""
    print(f"$ {command()}")
    print(f"# {machine(rows)}; 2 hosts, 100 Mbit/s, one core each; {STEPS} steps\n")
    return report(rows, judge)


if __name__ == "__main__":
    main()
