"""Loss of a language model of useful size with each of some hooks: 8 ranks in one process, on one GPU.

A GPT of 50 M parameters learns the Python sources of the packages that are installed here, byte by byte. Each rank has
batches of its own, and hooks exchange messages in memory; only the time of a network is missing. All methods
have the same data, first weights, optimizer and number of steps, and take their steps by turns until the time is over.
DiLoCo is algorithm 1 of its paper, with ranks that step alone, and sends its moves by a hook.

    python benchmarks/gpu_quality.py --device cuda --minutes 4
    python benchmarks/gpu_quality.py --small --steps 48

`MB` is the number of megabytes that a rank sends in a step, `as good` the number that it has sent when its loss first
reaches the loss of dense gradients at half of the run. With `--output` all losses are written as JSON too, and drawn
where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import json
import math
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Compiling takes a minute of the few.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import torch
from language_model import LanguageModel
from records import command
from torch import Tensor, nn

import lightning_commhooks as lc
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.in_memory import groups_in_memory, run_together
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hook import BoundHook

RANKS, PERIOD, WARM_UP = 8, 16, 20
BUCKET_BYTES = 25 * 2**20
MOVES = {"compress_1d": True, "min_bytes": 0, "use_error_feedback": True}
HOOKS: dict[str, lc.CommHook] = {
    "dense": lc.AllReduce(),
    "bf16": lc.BF16(),
    "int8": lc.Int8(min_bytes=0),
    "int4": lc.Int4(min_bytes=0),
    "powersgd-4": lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=0),
    "powersgd-16": lc.PowerSGD(matrix_approximation_rank=16, start_powerSGD_iter=0),
    "chunked top-k": lc.ChunkedTopK(),
    f"diloco/{PERIOD}, int4": lc.Int4(**MOVES),
    f"diloco/{PERIOD}, int2": lc.Int2(**MOVES),
}


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its batches."""

    width: int
    num_layers: int
    num_heads: int
    length: int
    batch: int
    text_bytes: int


LARGE = Size(width=1024, num_layers=4, num_heads=16, length=512, batch=8, text_bytes=2**26)
SMALL = Size(width=32, num_layers=1, num_heads=2, length=32, batch=2, text_bytes=2**19)


class Text:
    """Python sources, of which every tenth file is for validation.

    Args:
        size: how much of them.
        device: of the batches.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        self._size, self._device = size, device
        parts: tuple[list[bytes], list[bytes]] = [], []
        num_bytes = 0
        for number, path in enumerate(_sources()):
            content = path.read_bytes()
            parts[number % 10 == 9].append(content)
            num_bytes += len(content)
            if num_bytes > size.text_bytes:
                break
        both = [torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts]
        self.training, self.validation = both

    def batch(self, step: int, rank: int) -> Tensor:
        """Shape `(batch, length + 1)`, always the same one for a step and rank; step -1 is for validation."""
        text = self.training if step >= 0 else self.validation
        chance = torch.Generator().manual_seed(1000 * step + rank + 1000)
        first = torch.randint(len(text) - self._size.length - 1, (self._size.batch,), generator=chance)
        places = first[:, None] + torch.arange(self._size.length + 1)
        return text[places].to(self._device, torch.int64)


def _sources() -> Iterator[Path]:
    """Files in an order that does not depend on the file system."""
    for root in (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]):
        for folder, folders, files in os.walk(root):
            folders.sort()
            yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean loss in nats for each byte, computed in bfloat16 on CUDA."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        loss: Tensor = model(batch[:, :-1], batch[:, 1:])
        return loss


def buckets_of(model: nn.Module) -> list[tuple[Slot, ...]]:
    """Places of parameters in buckets, the last ones first, about as DDP makes them."""
    buckets: list[tuple[Slot, ...]] = []
    end = BUCKET_BYTES
    for name, p in reversed(list(model.named_parameters())):
        if 4 * end >= BUCKET_BYTES:
            buckets.append(())
            end = 0
        buckets[-1] += (Slot(name, tuple(p.shape), end, p),)
        end += p.numel()
    return buckets


class Averaging:
    """A hook on each of the ranks; their tensors are averaged in memory.

    Args:
        hook: the hook.
        model: has the parameters whose tensors are averaged.
        device: of the tensors.
        num_ranks: number of ranks.
    """

    def __init__(self, hook: lc.CommHook, model: nn.Module, device: torch.device, num_ranks: int = RANKS) -> None:
        self._slots = buckets_of(model)
        self._groups = groups_in_memory(num_ranks, device)
        self._bound = [hook.bind(group) for group in self._groups]
        self._step = 0

    @property
    def bytes_sent(self) -> float:
        """Bytes that the first rank has sent."""
        return self._groups[0].counters.bytes_sent

    def __call__(self, tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The mean over ranks, as the hook makes it, by name of the parameter."""
        buckets = [list(self._filled(own)) for own in tensors]
        lives = zip(self._bound, self._groups, buckets, strict=True)
        run_together([functools.partial(_live, *life) for life in lives])
        self._step += 1
        return {slot.name: slot.view(bucket.flat) for bucket in buckets[0] for slot in bucket.slots}

    def _filled(self, tensors: dict[str, Tensor]) -> Iterator[Bucket]:
        for number, slots in enumerate(self._slots):
            flat = torch.cat([tensors[slot.name].reshape(-1) for slot in slots])
            yield Bucket(flat, number, number == len(self._slots) - 1, self._step, slots)


def _live(bound: BoundHook, group: Group, buckets: list[Bucket]) -> Steps[None]:
    for bucket in buckets:
        yield from bound.reduce(bucket, group)
    if bound.has_memory:
        bound.end_step(torch.tensor(True))


@dataclass
class Run:
    """A method, and what became of its training.

    Attributes:
        name: of the method.
        averaging: of its gradients or moves.
        models: one for all ranks, or with DiLoCo one for each.
        optimizers: of the models.
        steps: after which its loss was measured.
        losses: on the text for validation, then.
        sent: bytes that a rank had sent, then.
        problem: why it ended early.
    """

    name: str
    averaging: Averaging
    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    problem: str = ""
    _outer: tuple[nn.Module, torch.optim.Optimizer] | None = None

    @classmethod
    def of(cls, name: str, model: nn.Module, device: torch.device) -> Run:
        """A run that begins with a copy of a model."""
        is_local = name.startswith("diloco")
        models = [copy.deepcopy(model) for _ in range(RANKS if is_local else 1)]
        fused = device.type == "cuda"
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(one.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
            for one in models
        ]
        run = cls(name, Averaging(HOOKS[name], models[0], device), models, optimizers)
        if is_local:
            common = copy.deepcopy(model)
            run._outer = common, torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return run

    def step(self, step: int, batches: list[Tensor], lr: float) -> None:
        """Train all ranks for a step."""
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr
        if self._outer is not None:
            for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            if (step + 1) % PERIOD == 0:
                self._outer_step(*self._outer)
            return
        (model,) = self.models
        gradients = []
        for batch in batches:
            model.zero_grad()
            loss_of(model, batch).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        means = self.averaging(gradients)
        for name, p in model.named_parameters():
            p.grad = means[name]
        self.optimizers[0].step()

    def _outer_step(self, common: nn.Module, outer: torch.optim.Optimizer) -> None:
        before = dict(common.named_parameters())
        with torch.no_grad():
            moves = [{name: before[name] - p for name, p in model.named_parameters()} for model in self.models]
        means = self.averaging(moves)
        for name, p in before.items():
            p.grad = means[name].clone()
        outer.step()
        with torch.no_grad():
            for model in self.models:
                for name, p in model.named_parameters():
                    p.copy_(before[name])

    def look(self, step: int, batches: list[Tensor]) -> None:
        """Measure the loss after a step."""
        with torch.no_grad():
            loss = sum(loss_of(self.models[0], batch).item() for batch in batches) / len(batches)
        self.steps.append(step)
        self.losses.append(loss)
        self.sent.append(self.averaging.bytes_sent)
        if not math.isfinite(loss):
            self.problem = "the loss is not finite"


def train(args: argparse.Namespace, device: torch.device) -> tuple[list[Run], int]:
    """Train all of them by turns; the runs, and how many steps each has taken."""
    begin = time.monotonic()
    size = SMALL if args.small else LARGE
    text = Text(size, device)
    torch.manual_seed(0)
    model = LanguageModel(256, size.width, size.num_layers, size.num_heads, size.length).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", file=sys.stderr, flush=True)
    validation = [text.batch(-1, number) for number in range(2 if args.small else 16)]
    runs = [Run.of(name, model, device) for name in HOOKS]
    del model
    num_steps, step, timed = args.steps or 10**9, 0, begin
    for run in runs:
        run.look(0, validation)
    while step < num_steps:
        if step == 3:
            timed = time.monotonic()
        if step == 3 + PERIOD and not args.steps:
            # With as much again for losses, and for rounds that take longer.
            left = 60 * args.minutes - (time.monotonic() - begin)
            a_round = (time.monotonic() - timed) / PERIOD
            num_steps = max(2 * PERIOD, int(0.9 * left / a_round) // PERIOD * PERIOD + step // PERIOD * PERIOD)
            print(f"{num_steps} steps, {a_round:.2f} s each for all methods", file=sys.stderr, flush=True)
        if step % PERIOD == 0 and time.monotonic() - begin > 60 * args.minutes:
            print(f"ended by the time, after {step} steps", file=sys.stderr)
            break
        batches = [text.batch(step, rank) for rank in range(RANKS)]
        lr = args.lr * min(1.0, (step + 1) / WARM_UP)
        if num_steps < 10**9 and step > WARM_UP:
            lr *= 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, num_steps - WARM_UP)))
        step += 1
        for run in runs:
            if run.problem:
                continue
            try:
                run.step(step - 1, batches, lr)
                if step % PERIOD == 0:
                    run.look(step, validation)
            except Exception as error:
                traceback.print_exc()
                run.problem = f"failed in step {step}: {type(error).__name__}: {error}".splitlines()[0]
    return runs, step


def table(runs: list[Run]) -> list[str]:
    """Lines: loss against steps, and against bytes."""
    dense = runs[0]
    half = dense.losses[len(dense.losses) // 2]
    parts = [1 / 4, 1 / 2, 1.0]
    steps = [dense.steps[round(part * (len(dense.steps) - 1))] for part in parts]
    lines = [f"{'method':<18}{'MB':>9}{'fewer':>8}" + "".join(f"{f'step {step}':>11}" for step in steps)]
    lines[0] += f"{'to dense':>10}{'as good, MB':>13}"
    for run in runs:
        if run.problem or dense.problem or len(run.steps) < 2:
            lines.append(f"{run.name:<18}  {run.problem or dense.problem or 'no loss was measured'}")
            continue
        each, of_dense = (one.sent[-1] / one.steps[-1] for one in (run, dense))
        losses = [run.losses[run.steps.index(step)] if step in run.steps else math.nan for step in steps]
        line = f"{run.name:<18}{each / 1e6:>9.3f}{of_dense / each if each else math.inf:>7.1f}x"
        line += "".join(f"{loss:>11.4f}" for loss in losses) + f"{losses[-1] - dense.losses[-1]:>+10.4f}"
        as_good = next((sent for loss, sent in zip(run.losses, run.sent, strict=True) if loss <= half), None)
        lines.append(line + (f"{as_good / 1e6:>13,.1f}" if as_good is not None else f"{'never':>13}"))
    return lines


def draw(runs: list[Run], path: Path) -> bool:
    """Loss against steps and bytes; false without matplotlib."""
    try:
        from plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Line, curves, grid, log_axis, save
    except ImportError:
        return False
    colours = (BLACK, GREY, SKY, BLUE, ORANGE, RED, PURPLE, GREEN, GREEN)
    figure, ((by_steps, by_bytes),) = grid(1, 2, (11, 4.5))
    for run, colour in zip(runs, colours, strict=True):
        line = Line(colour, "--" if run.name.endswith("int2") else "-")
        curves(by_steps, [([float(step) for step in run.steps[1:]], run.losses[1:])], line, run.name)
        seen = [(sent / 1e6, loss) for sent, loss in zip(run.sent, run.losses, strict=True) if sent]
        curves(by_bytes, [([sent for sent, _ in seen], [loss for _, loss in seen])], line, run.name)
    by_steps.set(xlabel="steps", ylabel="loss, nats for each byte")
    by_bytes.set(xlabel="MB that a rank has sent")
    log_axis(by_bytes.xaxis, (1,))
    by_steps.legend()
    save(figure, path)
    return True


def main() -> None:
    """Parse arguments, train, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--minutes", type=float, default=4.0, help="that all may take, about")
    parser.add_argument("--steps", type=int, help="number of steps; by default as many as there is time for")
    parser.add_argument("--small", action="store_true", help="a small model and little text")
    parser.add_argument("--lr", type=float, default=1e-3, help="largest learning rate")
    parser.add_argument(
        "--output", type=Path, help="a file for the table; losses and plot go to the same name with other endings"
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch finds no GPU here; leave it out, and use --small")
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    runs, num_steps = train(args, device)
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU"
    size = SMALL if args.small else LARGE
    numel = sum(p.numel() for p in runs[0].models[0].parameters())
    head = f"# torch {torch.__version__}, {datetime.date.today()}, {name}; GPT of {numel / 1e6:.1f} M parameters, "
    head += f"{RANKS} ranks with {size.batch} x {size.length} bytes each, {num_steps} steps"
    report = "\n".join([f"$ {command()}", head, "", *table(runs)]) + "\n"
    print(report, end="")
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(report)
        rows = [{"name": run.name, "steps": run.steps, "losses": run.losses, "bytes": run.sent} for run in runs]
        args.output.with_suffix(".json").write_text(json.dumps(rows))
        if not draw(runs, args.output.with_suffix(".png")):
            print("no plot: matplotlib is not installed", file=sys.stderr)
    if any(run.problem for run in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
