"""PyTorch's own communication hooks, made to run on CPU where they do not: what ours are measured against."""

# Without postponed annotations: DDP looks at those of hooks.
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's `bf16_compress_hook`; DDP refuses a function of that name on CPU, though gloo sums bfloat16."""
    return default_hooks.bf16_compress_hook(state, bucket)


def waiting_powersgd(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook, finished before the next bucket: it aborts on gloo otherwise as soon as there are two."""
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def side_by_side(groups: list[dist.ProcessGroup], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What torchft's `ParallelProcessGroup` does (pull request 199, never released): a piece in each of many groups."""
    flat = bucket.buffer().div_(dist.get_world_size())
    pieces = flat.tensor_split(len(groups))
    works = [dist.all_reduce(piece, group=group, async_op=True) for piece, group in zip(pieces, groups, strict=True)]
    return torch.futures.collect_all([work.get_future() for work in works]).then(lambda _: flat)


def register(ddp: DistributedDataParallel, name: str) -> None:
    """Give a model the stock hook of that name: `fp16`, `bf16`, or `powersgd-<rank>`, from step 2 on."""
    kind, _, rank = name.partition("-")
    if kind == "powersgd":
        on_cuda = next(ddp.parameters()).is_cuda
        state = PowerSGDState(None, int(rank), start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook if on_cuda else waiting_powersgd)
    else:
        ddp.register_comm_hook(None, {"fp16": default_hooks.fp16_compress_hook, "bf16": bf16_hook}[kind])
