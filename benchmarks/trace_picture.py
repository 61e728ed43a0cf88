"""The picture of a profiler's trace in `docs/monitoring.md`: steps of two real ranks, as PyTorch's profiler saw them.

Two processes train 8 x Linear(1024, 1024) on one machine, over gloo; a plain `torch.profiler.profile` records some
steps of each, and writes a trace for Chrome (kept with `--traces`). The picture has the shortest of them: first the
training thread of a rank, then its communication threads. Needs matplotlib.

    python benchmarks/trace_picture.py --out docs/images/trace.png
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import lightning_commhooks as lc

WORLD, LEAD_IN, RECORDED = 2, 5, 20
PHASES = {"forward": "#9ecae1", "backward": "#6baed6", "optimizer": "#c6dbef"}
COLORS = {"reduce": "#e6e6e6", "average": "#e6e6e6", "encode": "#dd8452", "decode": "#8172b3"}
WAITS = {"all_reduce": "#2f7d4f", "all_gather": "#7cc68d", "all_to_all": "#7cc68d"}


@dataclass(frozen=True)
class Event:
    """One range of a trace; times in milliseconds."""

    name: str
    thread: int
    begin: float
    end: float

    @property
    def kind(self) -> str:
        """The last part of its name."""
        return self.name.rsplit("::", 1)[-1]

    @property
    def color(self) -> str | None:
        """What it is drawn in, if at all."""
        return {**PHASES, **COLORS, **WAITS}.get(self.kind)


def train(rank: int, hook: str, folder: str) -> None:
    """One rank: steps, the last of them recorded."""
    warnings.simplefilter("ignore")  # of a hook that is closed early
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=9)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    attachment = lc.attach(ddp, hook, optimizers=[optimizer])
    data = torch.randn(64, 1024)
    when = schedule(wait=LEAD_IN - 1, warmup=1, active=RECORDED, repeat=1)
    options = {"schedule": when, "on_trace_ready": _save(folder, rank)}
    all_threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads, **options) as profiler:  # type: ignore[arg-type]
        for _ in range(LEAD_IN + RECORDED):
            dist.barrier()
            with record_function("forward"):
                loss = ddp(data).square().mean()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
    attachment.close()
    dist.destroy_process_group()


def _save(folder: str, rank: int):  # type: ignore[no-untyped-def]
    return lambda profiler: profiler.export_chrome_trace(f"{folder}/rank{rank}.json")


def read(path: Path) -> list[Event]:
    """What a trace has of the phases of a step and of communication."""
    trace = json.loads(path.read_text())
    base = trace.get("baseTimeNanoseconds", 0) / 1e6
    return [
        Event(e["name"], e["tid"], base + e["ts"] / 1e3, base + (e["ts"] + e["dur"]) / 1e3)
        for e in trace["traceEvents"]
        if e.get("cat") == "user_annotation" and (e["name"] in PHASES or e["name"].startswith("commhooks::"))
    ]


def shortest_step(ranks: list[list[Event]]) -> list[list[Event]]:
    """Of each rank the events from the forward to the optimizer of the step that took least time on all of them."""
    steps = []
    for number in range(RECORDED):
        step = []
        for events in ranks:
            begin = [event.begin for event in events if event.name == "forward"][number]
            end = [event.end for event in events if event.name == "optimizer"][number]
            step.append([event for event in events if begin <= event.begin and event.end <= end])
        steps.append(step)
    return min(steps, key=lambda step: max(_milliseconds(events) for events in step))


def _milliseconds(events: list[Event]) -> float:
    return max(event.end for event in events) - min(event.begin for event in events)


def by_thread(rank: int, events: list[Event]) -> list[tuple[str, list[Event]]]:
    """The events of each thread, with a title, in the order in which the threads begin."""
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    training = next(event.thread for event in events if event.name == "forward")
    first = (f"rank {rank}\ntraining thread", threads.pop(training))
    lanes = sorted(threads.values(), key=lambda own: min(event.begin for event in own))
    return [first, *((f"communication thread {i}", own) for i, own in enumerate(lanes, 1))]


def draw(ranks: list[list[Event]], hook: str, path: Path) -> None:
    """Draw one row for each thread of each rank."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    origin = min(event.begin for events in ranks for event in events)
    rows = [row for rank, events in enumerate(ranks) for row in by_thread(rank, events)]
    plt.rcParams.update({"font.size": 9})
    figure, axes = plt.subplots(figsize=(13, 0.8 + 0.62 * len(rows)), layout="constrained")
    shown: dict[str, str] = {}
    longest = max(event.end for events in ranks for event in events) - origin
    for row, (_, events) in enumerate(rows):
        # The outer ones first.
        for event in sorted(events, key=lambda each: each.begin - each.end):
            color = event.color
            if color is None:
                continue
            outer = event.name in PHASES or event.kind in ("reduce", "average")
            width = event.end - event.begin
            height = 0.8 if outer else 0.44
            axes.barh(row, width, left=event.begin - origin, height=height, color=color, edgecolor="#606060", lw=0.3)
            if event.name in PHASES:
                inside = width > 0.08 * longest
                axes.text(event.begin - origin if inside else event.end - origin, row, f" {event.name}", va="center")
            else:
                shown.setdefault(event.name, color)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"one step with hook={hook!r}: PyTorch's profiler on two ranks", loc="left", fontsize=10)
    handles = [mpl.patches.Patch(facecolor=color, edgecolor="#606060", lw=0.3) for color in shown.values()]
    figure.legend(handles, list(shown), frameon=False, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Train, record, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="int8", choices=lc.available_hooks())
    parser.add_argument("--out", type=Path, default=Path("docs/images/trace.png"))
    parser.add_argument("--traces", type=Path, help="folder to keep the traces in, to open them in Perfetto or Chrome")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.traces or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "store").unlink(missing_ok=True)
        mp.spawn(train, (args.hook, str(folder)), nprocs=WORLD)
        (folder / "store").unlink(missing_ok=True)
        ranks = [read(folder / f"rank{rank}.json") for rank in range(WORLD)]
        draw(shortest_step(ranks), args.hook, args.out)
    print(f"drawn: {args.out}")


if __name__ == "__main__":
    main()
