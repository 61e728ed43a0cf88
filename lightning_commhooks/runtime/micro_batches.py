"""Counts the micro-batches that a gradient sums, for every way to accumulate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.interface.accumulation import Accumulated, Number, is_one, is_positive, is_weight, scale_
from lightning_commhooks.runtime.passes import Passes


class MicroBatches:
    """Counts the micro-batches of one DDP model.

    A micro-batch is a backward through forwards of the model that no earlier micro-batch includes. It counts when a
    gradient arrives, so synchronization of gradients, other forwards in between and recomputed activations do not
    matter. The count restarts after each synchronized backward, and after gradients were cleared. A further backward
    through the same forwards, as for a second network, belongs to the same micro-batch.

    A synchronized backward must not add to gradients that an earlier one has already averaged and scaled. With several
    networks, another network's gradients may exist, to be cleared before that network's own turn.

    In each synchronized backward, `divided_by` returns the divisor of the loss.
    """

    def __init__(self, divided_by: Callable[[], float], passes: Passes) -> None:
        self._divided_by = divided_by
        self._passes = passes
        self._handles: list[RemovableHandle] = []
        self._nodes: list[torch.autograd.graph.Node] = []
        self._parameters: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Reset all counts."""
        self._passes.restart()
        self._step = -1
        self._last: Accumulated | None = None
        # Weight set since the last micro-batch began, and the number of calls.
        self._pending: Number = 0.0
        self._num_pending = 0
        self._clear()

    def _clear(self) -> None:
        self._count, self._num_weightless = 0, 0
        self._weight: Number = 0.0
        # Calls that have set the weight of later micro-batches.
        self._num_spare = 0
        self._passes.is_ambiguous = False
        # Whether a synchronized backward has ended.
        self._is_over = False
        # Parameters with a gradient from the current backward, and from this window.
        self._used: set[str] = set()
        self._used_in_window: set[str] = set()
        # Parameters whose gradients an earlier synchronized backward has averaged and that were not cleared since.
        self._done: set[str] = set()
        # Parameters that it has averaged though they only had gradients from earlier micro-batches, and the factor.
        self._early: dict[str, Number] = {}
        # The last gradient that arrived.
        self._witness: tuple[Tensor, int] | None = None

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Count micro-batches by the gradients of these parameters from now on."""
        self._remove_hooks()
        self._parameters = dict(parameters)
        for name, parameter in self._parameters.items():
            # A hook on the accumulation node: torch.autograd.grad() would also call hooks on the parameter.
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._arrival(name, parameter)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._has_arrived))

    def close(self) -> None:
        """Release the model."""
        self._remove_hooks()
        self._parameters = {}
        self._clear()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def add_weight(self, weight: Number) -> None:
        """Add weight to the micro-batch whose gradients arrive next; ignored if gradients are disabled."""
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise ValueError(f"a weight must be a number, is a tensor of shape {list(weight.shape)}")
            weight = weight.detach().to(torch.float64).view(()) if weight.is_cuda else weight.item()
        if not torch.is_grad_enabled():
            return
        if isinstance(weight, Tensor) or is_weight(weight):
            self._pending = self._pending + (weight if isinstance(weight, Tensor) else float(weight))
            self._num_pending += 1
            return
        raise ValueError(f"a weight must be a finite number of at least 0, got {weight!r}")

    def of_step(self, step: int, is_last: bool) -> Accumulated:
        """Return the micro-batches of a synchronized backward; called for each of its buckets.

        Raises a `ValueError` if it is the second one since gradients were cleared, or the divisor of the loss is not a
        number.
        """
        if self._step != step or self._last is None:
            divided_by = self._divided_by()
            if not is_positive(divided_by):
                raise ValueError(f"loss_divided_by must return a positive number, returned {divided_by!r}")
            if self._last is not None:
                self._clear()  # a rank without data under join(): this backward is another rank's
            self._step = step
            count = None if self._passes.is_ambiguous else max(self._count, 1)
            self._last = Accumulated(count, self._weight, self._num_weightless, divided_by)
        if is_last and self._used and self._used <= self._done:
            raise ValueError(
                "accumulation: gradients were not cleared since the last synchronized backward, which has scaled and "
                "averaged them already. Synchronize only in the last backward of a window: put all earlier backwards, "
                "with their forwards, in no_sync(), in Lightning trainer.strategy.block_backward_sync(); in "
                "Accelerate, omit sync_each_batch. Or call zero_grad() before"
            )
        return self._last

    def end_step(self) -> None:
        """Record that a synchronized backward has ended."""
        self._is_over = self._last is not None

    def _arrival(self, name: str, parameter: Tensor) -> Callable[[Sequence[Tensor]], None]:
        def arrives(gradients: Sequence[Tensor]) -> None:
            if (num_left := self._passes.begin_micro_batch()) is not None:
                self._begin(num_left)
            elif self._is_over:
                self._begin_again()
            self._used.add(name)
            if (factor := self._early.pop(name, None)) is not None and parameter.grad is not None:
                with torch.no_grad():
                    scale_(parameter.grad, 1 / factor)

        return arrives

    def _has_arrived(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._witness = parameter, parameter.grad._version

    def _begin(self, num_left: int) -> None:
        if self._last is not None:
            done = _nonzero(self._parameters)
            self._clear()
            self._last, self._done = None, done
        elif self._was_cleared():
            self._clear()
        self._used_in_window |= self._used
        self._used = set()
        self._count += 1
        # Only the window's total matters: if all forwards come first, the weight of each micro-batch is unknown.
        self._weight = self._weight + self._pending
        num_calls = self._num_spare + self._num_pending
        self._num_weightless += num_calls == 0
        self._num_spare = min(max(num_calls - 1, 0), num_left)
        self._pending, self._num_pending = 0.0, 0

    def _begin_again(self) -> None:
        """Begin a further backward of the same forward, after a synchronized one."""
        assert self._last is not None
        kept, factor = _nonzero(self._parameters), self._last.factor
        self._done = kept & (self._done | self._used)
        early = kept & self._used_in_window - self._used
        self._early = {} if factor is None or is_one(factor) else dict.fromkeys(early, factor)
        self._last, self._is_over, self._used = None, False, set()

    def _was_cleared(self) -> bool:
        if self._witness is None:
            return True
        parameter, version = self._witness
        if parameter.grad is None:
            return True
        # It was changed: scaled, clipped, or set to zero.
        return parameter.grad._version != version and not _nonzero(self._parameters)


def _nonzero(parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters with a nonzero gradient. Synchronizes if there is a gradient."""
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    values = {name: grad._values() if grad.is_sparse else grad for name, grad in grads.items()}
    names = [name for name, value in values.items() if value.numel()]
    if not names:
        return set()
    norms = torch._foreach_norm([values[name].detach() for name in names], ord=math.inf)
    return {name for name, norm in zip(names, torch.stack([n.double() for n in norms]).tolist(), strict=True) if norm}
