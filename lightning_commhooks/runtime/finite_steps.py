"""Ends steps, with one verdict on all ranks: whether the step was finite."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.precision import all_finite, spoil_unless_

if TYPE_CHECKING:
    from lightning_commhooks.runtime.runtime import Runtime


class OnHost:
    """An asynchronous copy of a boolean of one element, which does not block later work of the device."""

    def __init__(self, value: Tensor) -> None:
        self._copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(value, non_blocking=True)
        self._arrived = torch.cuda.current_stream(value.device).record_event()

    def wait(self) -> Tensor:
        """Wait for the copy and return the boolean, on CPU."""
        self._arrived.synchronize()
        return self._copy


def _on_its_way(finite: Tensor) -> OnHost | None:
    return OnHost(finite) if finite.is_cuda else None


class FiniteSteps:
    """Ends the steps of a hook with memory, and local steps under a gradient scaler, in the same way on all ranks.

    On CUDA, the end of a step does not wait to learn whether the step was finite: the hook is told when the next step
    begins (`commit`). By then the device has usually finished the step long ago; if not, it has at least the forward of
    the next step to run while the host waits. So a hook's memory can be rolled back without a pass over it.

    Attributes:
        pending: whether a step was finite that has ended except for the hook; `None`: there is no such step.
    """

    def __init__(self, runtime: Runtime, grad_scaler: torch.amp.GradScaler | None) -> None:
        self._runtime = runtime
        self._grad_scaler = grad_scaler
        self._is_local = False
        self._finite: list[Tensor] = []
        self._reduced: list[tuple[Tensor, Bucket]] = []
        self.pending: OnHost | None = None
        # Whether a step that replicas have not voted on yet is finite on this rank: a rank whose step has failed does
        # not take part in a comparison with the ranks of other shards.
        self._undecided: Tensor | None = None
        # Shared state may be read in any thread, or in a signal handler of this one.
        self._settling = threading.RLock()

    def forget(self) -> None:
        """Release the buckets of the present step."""
        self._finite, self._reduced = [], []

    def drop(self) -> None:
        """Release the present step and the pending one, for good."""
        self.forget()
        self.pending = None

    def decide(self, committed: bool) -> None:
        """Commit or discard the step that ranks have voted on."""
        finite, self._undecided = self._undecided, None
        self.forget()
        if not committed:
            self._runtime.bound.end_step(torch.tensor(False, device="cpu"))
        elif finite is not None:
            finite = self._runtime.source.smallest(finite)
            spoil_unless_(finite, self._runtime.source.gradients([]))
            self._take_over(finite.cpu())

    def add(
        self, reduced: Tensor, finite: Tensor | None, bucket: Bucket, is_local: bool, is_late: bool, ranks: Group
    ) -> Steps[None]:
        """Note the averaged gradients of a bucket, and whether they are finite if that is known.

        DDP has not given them to the parameters yet. With `is_late` it will have when the step ends. With `is_local`
        ranks step alone.
        """
        has_memory = self._runtime.bound.has_memory
        may_skip = self._grad_scaler is not None and self._grad_scaler.is_enabled()
        self._is_local = is_local and (has_memory or may_skip)
        if has_memory or self._is_local:
            finite = all_finite(reduced) if finite is None else finite
            if self._is_local and is_late:
                finite = yield from self._agreed(finite, ranks)
                spoil_unless_(finite, [reduced])
            self._finite.append(finite)
            self._reduced.append((reduced, bucket))

    def _agreed(self, finite: Tensor, ranks: Group) -> Steps[Tensor]:
        """Whether gradients are finite on all ranks; one scalar all-reduce."""
        num_bad = finite.logical_not().to(torch.float32).view(1)
        return (yield from ranks.all_reduce_(num_bad)).eq(0).view(())

    def end(self, in_time: bool) -> None:
        """Commit the hook's new memory, or make the gradients of the step NaN.

        Unless `in_time`, the next step has begun and may use the buckets.
        """
        if not self._finite:
            return
        with self._runtime.bound.group.counters.timing.work():
            finite, reduced = torch.stack(self._finite).all(), self._reduced
            if self._is_local:
                group = self._runtime.bound.group
                finite = group.finish(self._agreed(finite, group))
            if self._runtime.source.quorum is None:
                finite = self._runtime.source.smallest(finite)
            self.forget()
            if in_time:
                parts = [part for gradients, bucket in reduced for part in _parts(gradients, bucket)]
                spoil_unless_(finite, self._runtime.source.gradients(parts))
            if self._runtime.source.quorum is not None:
                self._undecided = finite
                return
            self.pending = _on_its_way(finite)
            if self.pending is None:
                self._take_over(finite)

    def commit(self) -> None:
        """Tell the hook whether the last step was finite, if that is pending. Waits for that step, not for peers."""
        with self._settling:
            pending = self.pending
            if pending is None:
                return
            finite = pending.wait()
            # A signal handler may have been here meanwhile.
            if self.pending is pending:
                self.pending = None
                self._take_over(finite)

    def _take_over(self, finite: Tensor) -> None:
        self._runtime.bound.end_step(finite)
        self._runtime.counters.nonfinite_steps += int(not finite)


def _parts(gradients: Tensor, bucket: Bucket) -> list[Tensor]:
    """Return the parts of a bucket's averaged gradients that become NaN after a bad step: on CPU, all of them.

    On CUDA, where the host does not know whether a step is bad, the first element of each gradient: that is enough for
    a check for non-finite gradients and for a gradient norm, and saves a pass over all gradients in each step.
    """
    if not gradients.is_cuda or gradients.numel() != bucket.numel:
        return [gradients]
    return [gradients[slot.offset : slot.offset + 1] for slot in bucket.slots if slot.numel]
