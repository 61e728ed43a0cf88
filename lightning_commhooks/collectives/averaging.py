"""Means over ranks of a model's tensors, in place."""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps

# What is copied together for one collective; larger tensors go alone, without a copy.
CHUNK_BYTES = 2**25


def average_(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace tensors by their means over ranks, bit-identical on all of them.

    Parameters keep their storage and layout, unlike with PyTorch's `average_parameters`, which moves them all into
    one buffer. 16-bit tensors are summed, and sent, in float32.

    Args:
        tensors: floating-point or complex ones, in the same order on every rank; may require gradients.
        group: the ranks.
    """
    if group.size == 1:
        return
    for views in _chunks([flat_view(tensor) for tensor in tensors if own_part(tensor).numel()]):
        wire = torch.promote_types(views[0].dtype, torch.float32)
        # Divided before the sum: buffers may have the largest number there is, as masks do.
        if len(views) == 1 and views[0].dtype == wire and views[0].is_contiguous():
            group.finish(group.all_reduce_(views[0].div_(group.size)))  # no copy
            continue
        flat = torch.cat([view.reshape(-1).to(wire) for view in views])
        mean = group.finish(group.all_reduce_(flat.div_(group.size)))
        for view, own in zip(views, mean.split([view.numel() for view in views]), strict=True):
            view.copy_(own.view(view.shape))


def check_same(what: str, group: Group, number: int = 0) -> list[int]:
    """Fail on all ranks alike when they are not about to average the same.

    Args:
        what: this rank is about to do.
        group: the ranks.
        number: this rank's, to tell the others with it.

    Returns:
        the numbers of all ranks.

    Raises:
        HookError: some rank averages something else, or for another reason.
    """
    begin = time.perf_counter()
    told = group.all_gather_quietly([zlib.crc32(what.encode()), number])
    if not group.counters.is_evaluating:
        group.counters.waited_ms += (time.perf_counter() - begin) * 1e3
    _raise_unless_same([digest for digest, _ in told], what, group)
    return [number for _, number in told]


def check_same_beside(what: str, group: Group) -> Steps[Callable[[], None]]:
    """As `check_same`, in a group of `Group.beside`. On CUDA, where the host does not wait, what is returned raises."""
    own = torch.full((1,), zlib.crc32(what.encode()), device=group.device)
    told = yield from group.quiet().all_gather(own)

    def check() -> None:
        _raise_unless_same(told.flatten().tolist(), what, group)

    if not told.is_cuda:
        check()
    return check


def _raise_unless_same(digests: list[int], what: str, group: Group) -> None:
    if any(digest != digests[0] for digest in digests):
        raise HookError(
            f"ranks do not average the same: rank {group.global_rank} is about to {what}. All ranks must take the same "
            "steps, and evaluate and save together; on one rank alone only after a barrier that shows the average"
        )


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of what is sharded between ranks, a `DTensor`; everything else as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of a tensor in memory order, shape `(numel,)`, as a view that autograd ignores.

    Twice as many elements for a complex one; of a sharded one, those of this rank. A tensor that is not dense has no
    such view; it keeps its shape.
    """
    data = own_part(tensor).data
    if data.is_complex():
        data = torch.view_as_real(data)
    if torch.ops.aten.is_non_overlapping_and_dense(data):
        return data.as_strided((data.numel(),), (1,), data.storage_offset())
    return data


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of tensors of one dtype and device, each at most `CHUNK_BYTES` large or a single tensor."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.device, tensor.dtype].append(tensor)
    for same in kinds.values():
        chunk: list[Tensor] = []
        size = 0
        for tensor in same:
            num_bytes = tensor.numel() * tensor.element_size()
            if num_bytes >= CHUNK_BYTES:
                yield [tensor]
                continue
            if size + num_bytes > CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(tensor)
            size += num_bytes
        if chunk:
            yield chunk
