"""Means over ranks of a model's tensors, in place."""

from __future__ import annotations

import hashlib
import itertools
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps

# Size of the tensors that are copied together for one collective; larger tensors are sent separately, without a copy.
CHUNK_BYTES = 2**25
# Numbers that ranks exchange before they average.
_NUM_TOLD = 3


def average_(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace tensors by their means over ranks, bit-identical on all ranks.

    Parameters keep their storage and layout, unlike with PyTorch's `average_parameters`, which moves them all into one
    buffer. 16-bit tensors are summed, and sent, in float32. The tensors are floating-point or complex, in the same
    order on every rank, on any device (NAdam keeps `mu_product` on CPU), and may require gradients.
    """
    if group.size == 1:
        return
    for views in _chunks([flat_view(tensor) for tensor in tensors if own_part(tensor).numel()]):
        wire = torch.promote_types(views[0].dtype, torch.float32)
        # Divide before the sum: buffers may hold the largest number of their dtype, as masks do.
        if len(views) == 1 and (views[0].device, views[0].dtype) == (group.device, wire) and views[0].is_contiguous():
            group.finish(group.all_reduce_(views[0].div_(group.size)))  # no copy
            continue
        flat = torch.cat([view.reshape(-1).to(group.device, wire) for view in views])
        mean = group.finish(group.all_reduce_(flat.div_(group.size)))
        for view, own in zip(views, mean.split([view.numel() for view in views]), strict=True):
            view.copy_(own.view(view.shape))


def share_(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace tensors, in the same order on all ranks, by the first rank's tensors, bit for bit; any dtype and device.

    Sends them as bytes, to which the remaining ranks add zeros: no dtype is rounded, and each rank sends as many bytes
    as for an average.
    """
    if group.size == 1:
        return
    own = {id(tensor): tensor for tensor in tensors if own_part(tensor).numel()}
    views = [flat_view(tensor) for tensor in own.values()]
    sent = [view.contiguous().reshape(-1).view(torch.uint8) for view in views]
    places = {id(part): view for part, view in zip(sent, views, strict=True)}
    for parts in _chunks(sent):
        flat = torch.cat(parts) if group.rank == 0 else parts[0].new_zeros(sum(part.numel() for part in parts))
        first = group.finish(group.all_reduce_(flat.to(group.device)))
        for part, theirs in zip(parts, first.split([part.numel() for part in parts]), strict=True):
            view = places[id(part)]
            view.copy_(theirs.clone().view(view.dtype).view(view.shape))  # a clone is aligned


def number_of(text: str) -> int:
    """Return a 56-bit digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def kind_of(name: str, tensor: Tensor) -> int:
    """Return a digest of a tensor's name, shape, dtype and order in memory, which must agree for averaging."""
    own = own_part(tensor)
    strides = own.stride()
    order = sorted((dim for dim, size in enumerate(own.shape) if size > 1), key=lambda dim: -strides[dim])
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(own)
    return number_of(f"{name} {tuple(own.shape)} {own.dtype} {own.device.type} {order} {is_dense}")


def kinds_of(named: Mapping[str, Tensor]) -> int:
    """Return a digest of all tensors' kinds, which must agree for averaging."""
    return number_of(repr([kind_of(name, tensor) for name, tensor in named.items()]))


@dataclass(frozen=True)
class Alike:
    """The tensors that ranks can average, in one order.

    Attributes:
        names: names of the tensors that all ranks have, with the same shape, dtype and order in memory.
        differ: names of the tensors among them whose number differs between ranks.
        left: names of this rank's remaining tensors.
        first_left: the first rank with remaining tensors; -1: there is none.
    """

    names: list[str]
    differ: list[str]
    left: list[str]
    first_left: int


def alike(
    named: Mapping[str, Tensor],
    group: Group,
    owner_of: Callable[[str], str] | None = None,
    numbers: Mapping[str, int] | None = None,
) -> Alike:
    """Find the tensors that have the same kind on all ranks. Collective, for ranks that know of a difference.

    A rank without any tensors of an owner, which `owner_of` returns by a tensor's name, is no difference. `numbers` has
    an additional number for each tensor, to compare.
    """
    kinds = {name: kind_of(name, tensor) for name, tensor in named.items()}
    rows = [(kinds[name], number_of(owner_of(name)) if owner_of else 0, (numbers or {}).get(name, 0)) for name in named]
    lengths = [length for (length,) in group.all_gather_numbers([len(rows)])]
    padded = [*itertools.chain(*rows), *[0] * 3 * (max(lengths) - len(rows))]
    told = group.all_gather_numbers(padded) if padded else [[] for _ in lengths]
    of_ranks = [
        {theirs[3 * i]: (theirs[3 * i + 1], theirs[3 * i + 2]) for i in range(length)}
        for theirs, length in zip(told, lengths, strict=True)
    ]
    common = set.intersection(*map(set, of_ranks))
    owners = set.intersection(*({owner for owner, _ in theirs.values()} for theirs in of_ranks))
    left = [
        {kind for kind, (owner, _) in theirs.items() if kind not in common and (owner in owners or owner_of is None)}
        for theirs in of_ranks
    ]
    names = {kind: name for name, kind in kinds.items()}
    ordered = [kind for kind in of_ranks[0] if kind in common]
    return Alike(
        [names[kind] for kind in ordered],
        [names[kind] for kind in ordered if len({theirs[kind] for theirs in of_ranks}) > 1],
        [name for name, kind in kinds.items() if kind in left[group.rank]],
        next((rank for rank, theirs in enumerate(left) if theirs), -1),
    )


def check_same(what: str, group: Group, *numbers: int) -> list[list[int]]:
    """Exchange numbers; raise a `HookError` on all ranks if they are about to call different averaging operations.

    Args:
        what: this rank's operation.
        group: the ranks.
        numbers: this rank's numbers; the same count on all ranks.
    """
    begin = time.perf_counter()
    # The same length for every operation, so that ranks with different operations can compare them.
    filled = [*numbers, *[0] * (_NUM_TOLD - len(numbers))]
    told = group.all_gather_quietly([zlib.crc32(what.encode()), *filled])
    if not group.counters.is_evaluating:
        group.counters.waited_ms += (time.perf_counter() - begin) * 1e3
    _raise_unless_same([digest for digest, *_ in told], what, group)
    return [theirs[: len(numbers)] for _, *theirs in told]


def check_same_in_background(what: str, group: Group, number: int = 0) -> Steps[Callable[[], list[int]]]:
    """Run `check_same` with one number in a group for computations during training.

    On CUDA, the host does not wait; the returned function raises the error or returns the numbers.
    """
    own = torch.cat([torch.full((1,), one, device=group.device) for one in (zlib.crc32(what.encode()), number)])
    told = yield from group.quiet().all_gather(own)

    def check() -> list[int]:
        digests, numbers = told.t().tolist()
        _raise_unless_same(digests, what, group)
        return numbers  # type: ignore[no-any-return]

    if not told.is_cuda:
        check()
    return check


def _raise_unless_same(digests: list[int], what: str, group: Group) -> None:
    if any(digest != digests[0] for digest in digests):
        raise HookError(
            f"ranks called different averaging operations: rank {group.global_rank} is about to {what}. All ranks must "
            "take the same steps, and evaluate and save together; one rank alone may evaluate after a barrier only, "
            "which shows the average"
        )


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, a `DTensor`; other tensors unchanged."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def flat_view(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor in memory order, shape `(numel,)`, as a view that autograd ignores.

    A complex tensor gives twice as many elements, and a sharded one gives this rank's part. A tensor that is not dense
    has no such view and keeps its shape.
    """
    data = own_part(tensor).data
    if data.is_complex():
        data = torch.view_as_real(data)
    if torch.ops.aten.is_non_overlapping_and_dense(data):
        return data.as_strided((data.numel(),), (1,), data.storage_offset())
    return data


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype and device, each at most `CHUNK_BYTES` large or a single tensor."""
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
