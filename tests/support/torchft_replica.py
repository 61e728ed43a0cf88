"""One replica of a run with torchft, a process of its own; started by test_torchft.py. Frameworks share its parts.

    python torchft_replica.py FOLDER NAME OPTIONS

`OPTIONS` are those of [`Options`][], in JSON. Appends a line of JSON to `FOLDER/NAME.steps` for each committed step, as
many as `FOLDER/last` says, once it is there, and writes `FOLDER/NAME.end`.
"""

import json
import os
import signal
import sys
import threading
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha1
from pathlib import Path
from time import sleep, time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft import Manager

import lightning_commhooks as lc
from lightning_commhooks.collectives.averaging import own_part
from lightning_commhooks.hooks._pseudo_gradients import PseudoGradients
from lightning_commhooks.interface.models import Models
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.torchft import DistributedDataParallel, ProcessGroupGloo

DTYPE = torch.float64
# Parameters in several buckets.
BUCKET_CAP_MB = 0.01
# Steps between averages of models.
PERIOD = 4
NAMES = ("one", "two", "three")


@dataclass
class Options:
    """What a run is about.

    Attributes:
        hook: name of one of `HOOKS`.
        dies: where this process ends, `[step, bucket]`; of several in a replica the last one.
        stops: where it is stopped in the same way, as by SIGSTOP.
        far: whether replicas count as far from each other, which send each other numbered messages.
        divided_by: number of replicas that the loss is divided by, also when some are away; 0: those that are there.
        processes: of a replica; with several of them the model is sharded.
        spoils: whether one number of a gradient of this replica is inf in the step `bad`, in which nobody steps whose
            gradients are not finite.
        begins_with: names of replicas that are to be there before the first step.
        loses: the average, by its number, that this replica loses in its last moment; others may have committed it.
        pause: seconds before each local step.
        differs: whether it begins with other weights than the others.
        parts: whether each replica uses parts of the model, has batch norms, several micro-batches and a scaler.
        micros: of a framework: batches whose gradients are accumulated.
        scaler: of a framework: whether the loss is scaled.
        checkpoint: of a framework: begin from that one.
        saves: of a framework: after how many steps a checkpoint is written.
    """

    hook: str = "allreduce"
    dies: list = field(default_factory=list)
    stops: list = field(default_factory=list)
    begins_with: list = field(default_factory=list)
    parts: bool = False
    far: bool = False
    divided_by: int = 0
    processes: int = 1
    spoils: bool = False
    differs: bool = False
    loses: int = -1
    pause: float = 0.005
    bad: int = -1
    micros: int = 1
    scaler: bool = False
    checkpoint: str | None = None
    saves: list = field(default_factory=list)

    @property
    def is_local(self):
        return self.hook.startswith(("diloco", "post_localsgd"))


HOOKS = {
    "allreduce": lc.AllReduce(),
    "int8": lc.Int8(min_bytes=0, block_size=64, compress_1d=True),
    "powersgd": lc.PowerSGD(start_powerSGD_iter=3, min_compression_rate=1),
    "bf16": lc.BF16(),
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=0, period=PERIOD, post_local_gradient_allreduce=False),
    "diloco": lc.DiLoCo(period=PERIOD, post_local_gradient_allreduce=False),
    "diloco in fragments": lc.DiLoCo(period=PERIOD, fragments=2, post_local_gradient_allreduce=False),
    # Each of these begins before a vote on the other fragment.
    "diloco with a delay": lc.DiLoCo(period=PERIOD, fragments=2, delay=3, post_local_gradient_allreduce=False),
    "diloco in int8": lc.DiLoCo(
        period=PERIOD, post_local_gradient_allreduce=False, pseudo_gradient="int8", error_feedback=True
    ),
}


class Parts(nn.Module):
    """A model of which a replica uses one half or the other, or both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4)) for _ in range(2)
        )
        self.never = nn.Linear(2, 2)

    def forward(self, x, which):
        halves = {0: [self.first], 1: [self.second], 2: [self.first, self.second]}[which]
        return sum(half(x) for half in halves)


def make_model(parts=False):
    torch.manual_seed(0)
    if parts:
        return Parts().to(DTYPE)
    return nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(DTYPE)


def make_optimizer(model, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)


def batch(name, step, micro=0):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step} {micro}".encode()))
    x = torch.randn(8, 12, generator=generator, dtype=DTYPE)
    return x, x[:, :4].sin()


def loss_of(model, x, y, *which):
    return (model(x, *which) - y).square().mean()


def factor_of(options, manager):
    """Of the loss."""
    return manager.num_participants() / options.divided_by if options.divided_by else 1


def fault_tolerance(name):
    """Of a framework's process."""
    place = {"replica_rank": NAMES.index(name), "num_replica_groups": 3, "min_replica_size": 2}
    return lc.FaultTolerance(**place, timeout=5, hostname="127.0.0.1")


class Notes:
    """Writes what a replica was like: a line for each committed step, and one file in the end; reads when that is.

    Args:
        folder: where to.
        name: of the replica.
        is_first: whether this process writes; the others of a replica have the same to say.
    """

    def __init__(self, folder, name, is_first=True):
        self.folder, self.name = folder, name
        self.file = (folder / f"{name}.steps" if is_first else Path(os.devnull)).open("a")

    def meet(self, others):
        """Wait for the replicas that are to be there before the first step."""
        (self.folder / f"{self.name}.up").touch()
        while not all((self.folder / f"{other}.up").exists() for other in others):
            sleep(0.01)

    @property
    def num_steps(self):
        path = self.folder / "last"
        return int(path.read_text()) if path.exists() else 10**6

    def write(self, step, parameters, attachment, **more):
        line = {
            "step": step,
            "hash": sha1(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest(),
            "time": time(),
            "names": [NAMES[int(name[-1])] if "_" in name else name for name in names_of(attachment)],
            "lost": attachment.metrics()["steps_not_committed"],
            "quorums": attachment.metrics()["quorums"],
            "process": os.getpid(),
            "sum": sum(p.sum().item() for p in parameters),
        }
        self.file.write(json.dumps(line | more) + "\n")
        self.file.flush()

    def end(self, parameters, attachment, buckets, **more):
        end = {"parameters": [p.tolist() for p in parameters], "metrics": attachment.metrics()}
        (self.folder / f"{self.name}.end").write_text(json.dumps({**end, "buckets": [*buckets.values()], **more}))


def run_replica(main):
    """Run `main` with the folder, the name and the options of the command line."""
    main(Path(sys.argv[1]), sys.argv[2], Options(**json.loads(sys.argv[3])))
    sys.stdout.flush()
    os._exit(0)  # threads of torchft may wait for a lighthouse


def watch_buckets(options):
    """Names in each bucket, as they are handed over; ends or stops the process while buckets are under way."""
    submit, buckets = Runtime.submit, {}

    def submitted(self, bucket, is_late):
        buckets[bucket.index] = bucket.names
        for place, how in ((options.dies, signal.SIGKILL), (options.stops, signal.SIGSTOP)):
            is_last_process = int(os.environ.get("RANK", 0)) == options.processes - 1
            if place == [bucket.step, bucket.index] and is_last_process:
                Path(sys.argv[1], f"{sys.argv[2]}.ended").touch()
                threading.Timer(0.001, os.kill, (os.getpid(), how)).start()
        return submit(self, bucket, is_late)

    Runtime.submit = submitted
    return buckets


def main(folder, name, options):
    buckets = watch_buckets(options)
    if options.far:
        os.environ["COMMHOOKS_LATENCY_MS"] = "10"
    spoils = []
    model, is_local = make_model(options.parts), options.is_local
    rank = 0
    if options.processes > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        rank = dist.get_rank()
        model[-1].register_forward_hook(lambda last, _, out: out + Spoiled.apply(last.bias, spoils))
        for layer in (*model[::2], model):
            fully_shard(layer)
    if options.differs:
        with torch.no_grad():
            model[0].bias[0] += 1
    # Whose state who joins would get is up to the manager.
    optimizer = make_optimizer(model, 0 if is_local else 0.9)
    if is_local and options.dies and rank == options.processes - 1:
        die_in_average(options.dies[0], lambda: manager)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=options.parts)

    def load(state):
        for one in ("model", "optimizer", "scaler"):
            {"model": model, "optimizer": optimizer, "scaler": scaler}[one].load_state_dict(state[one])

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}

    store = None
    if options.processes == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=not is_local,
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=10),
        rank=rank,
        world_size=options.processes,
        store_addr="127.0.0.1",
        store_port=store.port if store is not None else int(os.environ["MASTER_PORT"]),
        replica_id=name,
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=50),
    )
    if options.loses >= 0:
        lose_average(manager, options.loses)
    notes = Notes(folder, name, is_first=rank == 0)
    notes.meet(options.begins_with)
    hook = HOOKS[options.hook]
    if options.processes > 1:
        wrapped, attachment = model, lc.attach(model, hook, manager=manager)
    else:
        options_of_ddp = {"grad_scaler": scaler, "bucket_cap_mb": BUCKET_CAP_MB}
        wrapped = DistributedDataParallel(manager, model, hook=hook, **options_of_ddp)
        attachment = wrapped.attachment
    if is_local:
        attachment.add_optimizer(optimizer)
        for step, num_local in train_alone(wrapped, optimizer, manager, notes, options.pause):
            with attachment.averaged_weights():
                notes.write(step, whole(model), attachment, local=num_local)
    while manager.current_step() < notes.num_steps:
        sleep(0.03)  # a process starts in a few dozen steps
        manager.start_quorum()
        optimizer.zero_grad()
        step, micros = manager.current_step(), 2 if options.parts else 1
        spoils[:] = [None] if options.spoils and step == options.bad else []
        for micro in range(micros):
            which = [(zlib.crc32(f"{name} {step} {micro}".encode()) >> 7) % 3] if options.parts else []
            with wrapped.no_sync() if micro < micros - 1 else nullcontext():
                loss = loss_of(wrapped, *batch(name, step, rank + micro), *which)
                scaler.scale(loss * factor_of(options, manager)).backward()
        if manager.should_commit():
            is_skipped = step == options.bad and not all(own_part(p.grad).isfinite().all() for p in model.parameters())
            if not is_skipped:
                scaler.step(optimizer)
                scaler.update()
            notes.write(step, whole(model), attachment, local=0, skipped=is_skipped)
    parameters = whole(model)
    if rank == 0:
        notes.end(parameters, attachment, buckets)
    manager.shutdown(wait=False)
    attachment.close()


def whole(model):
    """Parameters; with shards a collective of the replica."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


class Spoiled(torch.autograd.Function):
    """Zeros for a bias, the first of whose gradients is inf while a list is not empty."""

    @staticmethod
    def forward(ctx, bias, spoils):
        ctx.spoils = spoils
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx, grad):
        spoiled = torch.zeros_like(grad)
        spoiled[0] = float("inf") if ctx.spoils else 0
        return spoiled, None


def die_in_average(step, manager):
    """Kill this process when it begins an average after so many that were committed; `manager` returns that."""

    def dying(method):
        def run(*args, **kwargs):
            if manager().current_step() == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        return run

    PseudoGradients.begin = dying(PseudoGradients.begin)
    Models.average_ = dying(Models.average_)


def lose_average(manager, step):
    """Let this process miss the end of the average after so many that were committed."""
    vote, lost = manager.should_commit, []

    def voted(*args, **kwargs):
        if manager.current_step() == step and not lost:
            lost.append(step)
            manager.report_error(ConnectionError("lost in the last moment"))
        return vote(*args, **kwargs)

    manager.should_commit = voted


def train_alone(wrapped, optimizer, manager, notes, pause):
    """Steps of local SGD, whose averages are the manager's steps; yields their numbers and those of local steps."""
    num_local, rank = 0, int(os.environ.get("RANK", 0))
    while manager.current_step() < notes.num_steps:
        sleep(pause)
        optimizer.zero_grad()
        step = manager.current_step()
        loss_of(wrapped, *batch(notes.name, step, num_local + 1000 * rank)).backward()
        optimizer.step()
        num_local += 1
        if manager.current_step() != step:
            yield manager.current_step() - 1, num_local
            num_local = 0


def names_of(attachment):
    return attachment.runtime.source.quorum.names


if __name__ == "__main__":
    try:
        run_replica(main)
    except ValueError:
        sleep(1)  # until the others have heard why, too
        raise
