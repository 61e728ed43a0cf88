"""Ranks over NCCL, one for each GPU of the machine; and models with one of our hooks or PyTorch's."""

from __future__ import annotations

import datetime
import functools
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stock
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from records import command
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.advice.emulated import Emulated, Network, emulated_group
from lightning_commhooks.sources.attach import attach_emulated

# Bytes of a GPU's memory from which on models are large.
_LARGE = 30e9


def run(function: Callable[..., None], *args: Any) -> None:
    """Call `function(rank, world, *args)` on a rank for each GPU."""
    world = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (world, str(Path(folder) / "store"), function, args), nprocs=world)


def _work(rank: int, world: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    warnings.filterwarnings("ignore", "hook=.noop. does not average")  # that is what it is for
    function(rank, world, *args)
    torch.cuda.synchronize()
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


def make(hook: lc.CommHook | str | None, size: int, layers: int, device: torch.device) -> DistributedDataParallel:
    """A wrapped model of `layers` matrices; a text that begins with `stock ` is a hook of PyTorch's, `None` no hook."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(layers)]).to(device)
    ids = [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if isinstance(hook, str) and hook.startswith("stock "):
        stock.register(ddp, hook.removeprefix("stock "))
    elif hook is not None and dist.get_world_size() > 1:
        lc.attach(ddp, hook)
    elif hook is not None:
        # A hook does nothing on one rank. What a rank computes needs another one, whose messages take no time.
        transport = Emulated(Network(math.inf, 0.0, world_size=2), on_stream=device.type == "cuda")
        attach_emulated(ddp, lc.get_hook(hook), functools.partial(emulated_group, transport, device=device))
    return ddp


def step(model: DistributedDataParallel, data: torch.Tensor) -> None:
    """Forward and backward, no optimizer."""
    model.zero_grad(set_to_none=True)
    model(data).square().mean().backward()


def size() -> int:
    """Rows and columns of matrices such that a score of models fits on this machine's GPUs."""
    return 2048 if torch.cuda.get_device_properties(0).total_memory > _LARGE else 1024


def head(world: int, what: str) -> str:
    """The first lines of a table."""
    ranks = "one rank" if world == 1 else f"{world} ranks"
    name = torch.cuda.get_device_name(0)
    return f"$ {command()}\n# torch {torch.__version__}, {datetime.date.today()}, {name}, {ranks}; {what}\n"
