"""Gradients as matrices, with what a rank owes of them: read, multiplied and written in as few passes as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from lightning_commhooks.hooks._low_rank import factor_dtype, sent_is_finite
from lightning_commhooks.interface.accumulation import is_one
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.by_parameter import Entry
from lightning_commhooks.interface.memory import Memory
from lightning_commhooks.interface.precision import add_unscaled, to_gradient, work_dtype

# 1 MB of float32: half of what a core's second-level cache holds on common servers.
_BLOCK_NUMEL = 2**18


def settled(entry: Mapping[str, Tensor]) -> Tensor:
    """What is owed of one gradient: a copy of the residual, after what was sent is taken from it.

    What was sent has the rows of the gradient.
    """
    residual = entry["residual"].clone(memory_format=torch.contiguous_format)
    if "sent_p" in entry:
        residual.view(residual.shape[0], -1).addmm_(entry["sent_p"].t(), entry["sent_q"], alpha=-1)
    return residual


def keys_of(gradients: Sequence[tuple[Slot, ...]]) -> list[str]:
    """Names of matrices in what is stored: those of their parameters."""
    return ["\n".join(slot.name for slot in slots) for slots in gradients]


def _blocks(tensor: Tensor, length: int, dim: int = 0) -> Sequence[Tensor]:
    """Parts of that length along a dimension; most matrices are one."""
    return (tensor,) if tensor.shape[dim] <= length else tensor.split(length, dim)


class WarmStart:
    """A factor that a later step goes on from: that of an earlier one, and a random one where that is worth nothing.

    Args:
        fresh: the random one, shape `(k, r, n)` or `(k, r, m)`.
    """

    def __init__(self, fresh: Tensor) -> None:
        self.fresh = fresh
        self.memory = Memory(fresh.clone())


class Matrices:
    """The k matrices of one shape `(n, m)` in a bucket, and what is remembered of them.

    What was sent in a step, P^T Q, is taken from the memory in the next one, when the memory passes through the
    processor's cache anyway; at once in 16 bit, to which P^T Q is rounded, and where a matrix is not one gradient.

    Args:
        gradients: those of each matrix, neighbours in the bucket; the matrix has zeros after the last.
        shape: `(n, m)`.
        fresh_q: random Q, shape `(k, r, m)`.
        fresh_p: random P, shape `(k, r, n)`, if steps begin with P, too.
        dtype: of the gradients.
        has_feedback: whether what is left out is owed.
        at_once: whether matrices are multiplied together.

    Attributes:
        keys: names of the parameters of each matrix.
        slots: all gradients.
        q: what steps that begin with Q go on from.
        p: what steps that begin with P go on from, if there are such.
        wire_dtype: dtype in which factors travel.
    """

    def __init__(
        self,
        gradients: Sequence[tuple[Slot, ...]],
        shape: tuple[int, int],
        fresh_q: Tensor,
        fresh_p: Tensor | None,
        dtype: torch.dtype,
        has_feedback: bool,
        at_once: bool,
    ) -> None:
        (k, r, m), n = fresh_q.shape, shape[0]
        self._gradients, self._shape, self._at_once = gradients, shape, at_once
        self.keys = keys_of(gradients)
        self.slots = list(chain.from_iterable(gradients))
        self.q = WarmStart(fresh_q)
        self.p = WarmStart(fresh_p) if fresh_p is not None else None
        self.wire_dtype = factor_dtype(dtype)
        self._loaded: Tensor | None = None
        # What is owed, before what was sent in the last step is taken from it.
        self._residual: Memory | None = None
        self._sent: tuple[Memory, Memory] | None = None
        if has_feedback:
            self._residual = Memory(fresh_q.new_zeros((k, n, m)))
            # One gradient each, with the rows of the matrix.
            whole = all(len(slots) == 1 and slots[0].shape[:1] == (n,) for slots in gradients)
            if dtype == work_dtype(dtype) and whole and all(slot.numel == n * m for slot in self.slots):
                self._sent = Memory(fresh_q.new_zeros((k, r, n))), Memory(fresh_q.new_zeros((k, r, m)))

    @property
    def value(self) -> Tensor:
        """What is to be sent, shape `(k, n, m)`, from `load_and_multiply` on."""
        assert self._loaded is not None
        return self._loaded

    @property
    def memories(self) -> list[Memory]:
        """All memory."""
        starts = [start.memory for start in self._starts.values()]
        return [*starts, *(memory for memory in (self._residual, *(self._sent or ())) if memory is not None)]

    @property
    def _starts(self) -> dict[str, WarmStart]:
        """By their keys in what is stored."""
        return {"factor": self.q} if self.p is None else {"factor": self.q, "factor_p": self.p}

    def _flat(self, i: int, matrices: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """Each gradient of the i-th matrix with its place, in the gradient's shape."""
        first = self._gradients[i][0].offset
        for slot in self._gradients[i]:
            yield slot, matrices[i].view(-1)[slot.offset - first :][: slot.numel].view(slot.shape)

    def _of_bucket(self, flat: Tensor) -> Iterator[Tensor]:
        """The gradients of each matrix, one behind the other, as a view of a flat bucket."""
        for slots in self._gradients:
            yield flat[slots[0].offset : slots[-1].offset + slots[-1].numel]

    def restore(self, take: Callable[..., Entry]) -> None:
        """Go on from what is stored, which `take(name, *kinds)` gives."""
        for i, key in enumerate(self.keys):
            for kind, factor in take(key, *self._starts).items():
                self._starts[kind].memory.value[i] = factor
            for slot, place in self._flat(i, self._residual.value) if self._residual is not None else ():
                entry = take(slot.name, "residual", "sent_p", "sent_q")
                if "sent_p" in entry and self._sent is not None:
                    place.copy_(entry["residual"])
                    self._sent[0].value[i], self._sent[1].value[i] = entry["sent_p"], entry["sent_q"]
                elif "residual" in entry:
                    place.copy_(settled(entry))

    def entries(self) -> dict[str, Entry]:
        """What is remembered, by names of parameters."""
        entries: dict[str, Entry] = {}
        for i, key in enumerate(self.keys):
            for slot, place in self._flat(i, self._residual.value) if self._residual is not None else ():
                entries[slot.name] = {"residual": place}
            for kind, start in self._starts.items():
                entries.setdefault(key, {})[kind] = start.memory.value[i]
            if self._sent is not None:
                entries[key] |= {"sent_p": self._sent[0].value[i], "sent_q": self._sent[1].value[i]}
        return entries

    def load_and_multiply(self, flat: Tensor, start: Tensor, bucket: Bucket, transposed: bool = False) -> Tensor:
        """Add the gradients to what is owed, which is `value` then: M, shape `(k, n, m)`.

        On CPU in blocks of rows that stay in the cache until they are multiplied.

        Args:
            flat: the bucket.
            start: shape `(k, r, m)`, or `(k, r, n)` if `transposed`.
            bucket: its metadata.
            transposed: whether M is multiplied, and not M^T.

        Returns:
            the products of `start` with M^T, shape `(k, r, n)`, or with M, shape `(k, r, m)`.
        """
        (k, r, _), (n, m) = start.shape, self._shape
        matrices = self._loaded = start.new_empty((k, n, m)) if self._residual is None else self._residual.next()
        product = start.new_zeros((k, r, m)) if transposed else start.new_empty((k, r, n))
        owed = start.new_zeros(()).expand(k, n, m) if self._residual is None else self._residual.value
        if not self._at_once:
            for i, gradients in enumerate(self._of_bucket(flat)):
                self._load_in_blocks(i, owed[i], gradients.view(n, m), start[i], product[i], bucket, transposed)
            return product
        for old, new, gradients in zip(owed, matrices, self._of_bucket(flat), strict=True):
            places = new.view(-1)
            add_unscaled(old.reshape(-1)[: len(gradients)], gradients, bucket.divisor, out=places[: len(gradients)])
            places[len(gradients) :].zero_()
        if self._sent is not None:
            matrices.baddbmm_(self._sent[0].value.mT, self._sent[1].value, alpha=-1)
        torch.bmm(start, matrices if transposed else matrices.mT, out=product)
        return product

    @property
    def _block_rows(self) -> int:
        return max(1, _BLOCK_NUMEL // self._shape[1])

    def _load_in_blocks(
        self, i: int, old: Tensor, gradient: Tensor, start: Tensor, product: Tensor, bucket: Bucket, transposed: bool
    ) -> None:
        """The i-th matrix, whose other arguments have no batch dimension."""
        rows = self._block_rows
        sent_p, sent_q = (None, None) if self._sent is None else (memory.value[i] for memory in self._sent)
        along_rows = start if transposed else product
        loaded = _blocks(self.value[i], rows)
        for owed, block, new, p, factor in zip(
            _blocks(old, rows),
            _blocks(gradient, rows),
            loaded,
            [None] * len(loaded) if sent_p is None else _blocks(sent_p, rows, 1),
            _blocks(along_rows, rows, 1),
            strict=True,
        ):
            add_unscaled(owed, block, bucket.divisor, out=new)
            if p is not None and sent_q is not None:
                new.addmm_(p.t(), sent_q, alpha=-1)
            if transposed:
                product.addmm_(factor, new)
            else:
                torch.mm(start, new.t(), out=factor)

    def send(self, flat: Tensor, p: Tensor, q: Tensor, used: Tensor | None, bucket: Bucket) -> Tensor:
        """Write P^T Q to the gradients, and owe the rest.

        Args:
            flat: the bucket.
            p: shape `(k, r, n)`; of `p` and `q` one has orthonormal rows.
            q: shape `(k, r, m)`.
            used: boolean, for each of `slots`, whether any rank used it. DDP throws away what a hook returns for those
                that none did: they get 0, and are owed as before. `None`: all are used.
            bucket: metadata.

        Returns:
            whether the gradients are finite, boolean, one element.
        """
        self.q.memory.stage(q)
        if self.p is not None:
            self.p.memory.stage(p)
        if self._sent is not None:
            q = q if used is None else q * used.view(-1, 1, 1)
            for memory, factor in zip(self._sent, (p, q), strict=True):
                memory.stage(factor)
        scaled = q if is_one(bucket.loss_scale) else q * bucket.loss_scale
        for i, gradients in enumerate(self._of_bucket(flat)):
            self._multiply(i, p[i], scaled[i], gradients, bucket.loss_scale)
        if used is not None:
            self._keep_what_no_rank_uses(flat, used, bucket)
        self._loaded = None
        return sent_is_finite(p, scaled, flat.dtype)

    def _multiply(self, i: int, p: Tensor, q: Tensor, gradients: Tensor, loss_scale: float | Tensor) -> None:
        """Write the i-th P^T Q to the gradients, and take it from what is owed unless that is done later."""
        n, m = self._shape
        takes = self._residual is not None and self._sent is None
        if not takes and gradients.dtype == q.dtype and gradients.numel() == n * m:
            # Of one row, a product of matrices takes a third longer.
            multiply = torch.mul if len(q) == 1 else torch.mm
            multiply(p.t(), q, out=gradients.view(n, m))
            return
        rows = self._block_rows if gradients.is_cpu else n
        buffer = q.new_empty((rows, m))
        for first in range(0, n, rows):
            written = gradients[first * m : (first + rows) * m]
            some = p[:, first : first + rows].t()
            product = torch.mm(some, q, out=buffer[: len(some)]).view(-1)
            written.copy_(to_gradient(product[: written.numel()], written.dtype))
            if takes:
                sent = written.to(q.dtype)
                owed = self.value[i].view(-1)[first * m :][: written.numel()]
                owed.sub_(sent if is_one(loss_scale) else sent / loss_scale)

    def _keep_what_no_rank_uses(self, flat: Tensor, used: Tensor, bucket: Bucket) -> None:
        """In the place of gradients that this rank has not got in this backward are those of an earlier one."""
        # Where what was sent is kept as factors, Q was 0 already.
        for slot, is_used in zip(self.slots, used if self._sent is None else (), strict=False):
            slot.view(flat).mul_(is_used)
        if self._residual is None:
            return
        entries = self.entries()
        places = chain.from_iterable(self._flat(i, self.value) for i in range(len(self._gradients)))
        for (slot, new), is_used in zip(places, used, strict=True):
            if slot.name in (bucket.unused or ()):
                new.copy_(torch.where(is_used, new, settled(entries[slot.name])))
