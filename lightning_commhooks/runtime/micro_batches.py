"""How many micro-batches a gradient is the sum of: the one counter, for every way to accumulate gradients."""

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

    A micro-batch is a backward through forwards of the model that are in no other yet, and counts when a gradient
    arrives: so it does not matter whether gradients are synchronized, whether other forwards come in between, and
    whether activations are computed again. The count begins anew after each synchronized backward, and when gradients
    were cleared. One more backward through the same forwards, as of a second network, is of the same micro-batch.

    A synchronized backward must not go on with gradients that an earlier one has averaged and scaled already. With
    several networks those of another one may be there, to be cleared before its own turn.

    Args:
        divided_by: returns the divisor of the loss, called in each synchronized backward.
        passes: forwards and backwards of the model.
    """

    def __init__(self, divided_by: Callable[[], float], passes: Passes) -> None:
        self._divided_by = divided_by
        self._passes = passes
        self._handles: list[RemovableHandle] = []
        self._nodes: list[torch.autograd.graph.Node] = []
        self._parameters: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Forget what was counted."""
        self._passes.restart()
        self._step = -1
        self._last: Accumulated | None = None
        # Weight that was given since the last micro-batch began, and in how many calls.
        self._pending: Number = 0.0
        self._num_pending = 0
        self._clear()

    def _clear(self) -> None:
        self._count, self._num_weightless = 0, 0
        self._weight: Number = 0.0
        # Calls that have given weight to micro-batches which are still to come.
        self._num_spare = 0
        self._passes.is_ambiguous = False
        # Whether a synchronized backward has ended.
        self._is_over = False
        # Parameters with a gradient from the present backward, and from this window.
        self._used: set[str] = set()
        self._used_in_window: set[str] = set()
        # Those that an earlier synchronized backward has averaged, and nobody has cleared.
        self._done: set[str] = set()
        # Those that it has averaged though they only had gradients of earlier micro-batches, and by what it has
        # multiplied them.
        self._early: dict[str, Number] = {}
        # The last gradient that arrived.
        self._witness: tuple[Tensor, int] | None = None

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Count micro-batches by the gradients of these parameters from now on."""
        self._remove_hooks()
        self._parameters = dict(parameters)
        for name, parameter in self._parameters.items():
            # A hook of the node that accumulates: those of the parameter are called by torch.autograd.grad() too.
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._arrival(name, parameter)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._has_arrived))

    def close(self) -> None:
        """Let go of the model."""
        self._remove_hooks()
        self._parameters = {}
        self._clear()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def add_weight(self, weight: Number) -> None:
        """Give weight to a micro-batch whose gradients have not arrived yet; nothing without gradients."""
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
        raise ValueError(f"a weight must be a finite number of at least 0, is {weight!r}")

    def of_step(self, step: int, is_last: bool) -> Accumulated:
        """The sum that the gradients of a synchronized backward are; called for each of its buckets.

        Raises:
            ValueError: it is the second one since gradients were cleared; what the loss is divided by is no number.
        """
        if self._step != step or self._last is None:
            divided_by = self._divided_by()
            if not is_positive(divided_by):
                raise ValueError(f"loss_divided_by must return a positive number, returned {divided_by!r}")
            if self._last is not None:
                self._clear()  # a rank out of data, under join(): this backward is not its own
            self._step = step
            count = None if self._passes.is_ambiguous else max(self._count, 1)
            self._last = Accumulated(count, self._weight, self._num_weightless, divided_by)
        if is_last and self._used and self._used <= self._done:
            raise ValueError(
                "accumulation: gradients were not cleared since the last synchronized backward, which has scaled and "
                "averaged them already. Let only the last backward of a window synchronize: put the others, with their "
                "forwards, in no_sync(), in Lightning trainer.strategy.block_backward_sync(); in Accelerate leave out "
                "sync_each_batch. Or call zero_grad() before"
            )
        return self._last

    def end_step(self) -> None:
        """Called when a synchronized backward has ended."""
        self._is_over = self._last is not None

    def _arrival(self, name: str, parameter: Tensor) -> Callable[[Sequence[Tensor]], None]:
        def arrives(gradients: Sequence[Tensor]) -> None:
            if (num_left := self._passes.begin_micro_batch()) is not None:
                self._begin(num_left)
            elif self._is_over:
                self._go_on()
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
        # The window's total is what matters: where forwards come first, whose weight is whose is not.
        self._weight = self._weight + self._pending
        num_calls = self._num_spare + self._num_pending
        self._num_weightless += num_calls == 0
        self._num_spare = min(max(num_calls - 1, 0), num_left)
        self._pending, self._num_pending = 0.0, 0

    def _go_on(self) -> None:
        """One more backward of the same forward begins, after a synchronized one."""
        assert self._last is not None
        kept, factor = _nonzero(self._parameters), self._last.factor
        self._done |= kept & self._used
        early = kept & self._used_in_window - self._used
        self._early = {} if factor is None or is_one(factor) else dict.fromkeys(early, factor)
        self._last, self._is_over, self._used = None, False, set()

    def _was_cleared(self) -> bool:
        if self._witness is None:
            return True
        parameter, version = self._witness
        if parameter.grad is None:
            return True
        # Scaled or clipped, or set to zero.
        return parameter.grad._version != version and not _nonzero(self._parameters)


def _nonzero(parameters: Mapping[str, Tensor]) -> set[str]:
    """Names of the parameters that have a gradient other than zero. Waits for the device unless all have none."""
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    values = {name: grad._values() if grad.is_sparse else grad for name, grad in grads.items()}
    names = [name for name, value in values.items() if value.numel()]
    if not names:
        return set()
    norms = torch._foreach_norm([values[name].detach() for name in names], ord=math.inf)
    return {name for name, norm in zip(names, torch.stack([n.double() for n in norms]).tolist(), strict=True) if norm}
