"""How many micro-batches a gradient is the sum of: the one counter, for every way to accumulate gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.collectives.averaging import flat_view
from lightning_commhooks.ddp.copies import NotCopied
from lightning_commhooks.ddp.engine import call_at_end_of_backward
from lightning_commhooks.interface.accumulation import Accumulated, Held, Number, is_one, is_positive, is_weight, scale_
from lightning_commhooks.interface.bucket import Slot


class MicroBatches:
    """Counts the micro-batches of one DDP model.

    A micro-batch begins with a forward of the model that trains, and counts when a gradient of it arrives: so it does
    not matter whether gradients are synchronized, how many times a loss is differentiated, and whether activations are
    computed again for that. The count begins anew after each synchronized backward, and when gradients were cleared. It
    goes on for parameters whose `.grad` was not cleared after a synchronized backward; their `.grad` gets back what it
    was before it was scaled, so that all micro-batches count the same. In one more backward after the same forward, as
    of a second network, the micro-batch counts for the parameters that do not have it yet.

    What the loss is divided by is asked for in each synchronized backward.
    """

    def __init__(self, divided_by: Callable[[], float]) -> None:
        self._divided_by = divided_by
        self._handles: list[RemovableHandle] = []
        self._nodes: list[torch.autograd.graph.Node] = []
        self._parameters: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Forget what was counted."""
        self._has_begun = False
        self._step = -1
        self._last: Accumulated | None = None
        # Weights of the next micro-batch and of the present one.
        self._pending: Number | None = None
        self._present: Number | None = None
        self._clear()

    def _clear(self) -> None:
        self._count, self._num_weightless = 0, 0
        # Whether a synchronized backward has ended, and whether one more of the same micro-batch has begun.
        self._is_over = self._is_within = False
        self._weight: Number = 0.0
        self._held: dict[str, Held] = {}
        self._stale: set[str] = set()
        # Stale gradients as they were before one more backward of the same micro-batch.
        self._before: dict[str, Tensor] = {}
        self._used: set[str] = set()
        # The last gradient that arrived.
        self._witness: tuple[Tensor, int] | None = None

    def watch(self, model: DistributedDataParallel, parameters: Mapping[str, Tensor]) -> None:
        """Count the micro-batches of this model from now on, by its trained parameters."""
        self._remove_hooks()
        self._parameters = dict(parameters)

        def before_forward(module: object, inputs: object) -> None:
            if torch.is_grad_enabled():
                self._has_begun = True

        self._handles.append(model.register_forward_pre_hook(NotCopied(torch.compiler.disable(before_forward))))
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
        """Give the next micro-batch, whose gradients have not arrived yet, more weight; nothing without gradients."""
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise ValueError(f"a weight must be a number, is a tensor of shape {list(weight.shape)}")
            weight = weight.detach().to(torch.float64).view(()) if weight.is_cuda else weight.item()
        if not torch.is_grad_enabled():
            return
        if isinstance(weight, Tensor) or is_weight(weight):
            weight = weight if isinstance(weight, Tensor) else float(weight)
            self._pending = weight if self._pending is None else self._pending + weight
            return
        raise ValueError(f"a weight must be a finite number of at least 0, is {weight!r}")

    def of_step(self, step: int) -> Accumulated:
        """What the gradients of a synchronized backward are the sum of; called for each of its buckets."""
        if self._step != step or self._last is None:
            divided_by = self._divided_by()
            if not is_positive(divided_by):
                raise ValueError(f"loss_divided_by must return a positive number, returned {divided_by!r}")
            if self._last is not None:
                self._clear()  # a rank out of data, under join(): this backward is not its own
            self._step = step
            self._last = Accumulated(
                max(self._count, 1), self._weight, self._num_weightless, divided_by, self._held, self._stale
            )
            if self._held:
                last = self._last
                # In two steps, or DDP would come later.
                call_at_end_of_backward(lambda: call_at_end_of_backward(lambda: self._scale_unused(last)))
        return self._last

    def end_step(self) -> None:
        """Called when a synchronized backward has ended."""
        self._is_over = self._last is not None

    def _scale_unused(self, last: Accumulated) -> None:
        """Scale what DDP has left alone, because no rank used it, like the rest."""
        for name in last.held.keys() & last.factors.keys() & self._parameters.keys():
            gradient, held = self._parameters[name].grad, last.held[name]
            if gradient is not None and gradient._version == held.version:
                with torch.no_grad():
                    scale_(gradient, last.factors[name] / held.factor)

    def _arrival(self, name: str, parameter: Tensor) -> Callable[[Sequence[Tensor]], None]:
        def arrives(gradients: Sequence[Tensor]) -> None:
            if self._has_begun:
                self._has_begun = False
                self._begin()
            elif self._is_over:
                self._go_on_within()
            self._used.add(name)
            if name in self._stale:
                self._unscale(name, parameter)

        return arrives

    def _unscale(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self._is_within and not gradient.is_sparse:
            # This backward may be of a penalty that is not synchronized: then nothing is to change.
            self._before[name] = gradient.detach().clone()
            return
        self._stale.remove(name)
        with torch.no_grad():
            scale_(gradient, 1 / self._held[name].factor)

    def unscale_(self, slots: Sequence[Slot], flat: Tensor) -> None:
        """Let a bucket have unscaled what was in `.grad` before one more backward of the same micro-batch."""
        for slot in slots:
            before = self._before.pop(slot.name, None)
            if before is not None and slot.name in self._stale:
                assert slot.parameter is not None
                self._stale.remove(slot.name)
                in_order = flat_view(torch.empty_like(slot.parameter, dtype=before.dtype).copy_(before))
                slot.view(flat).view(-1).add_(in_order * (1 / self._held[slot.name].factor - 1))

    def _has_arrived(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._witness = parameter, parameter.grad._version

    def _begin(self) -> None:
        if self._last is not None:
            self._go_on_after(self._last)
        elif self._was_cleared():
            self._clear()
        self._is_within = False
        self._present, self._pending = self._pending, None
        self._count_present()

    def _count_present(self) -> None:
        self._count += 1
        if self._present is None:
            self._num_weightless += 1
        else:
            self._weight = self._weight + self._present

    def _was_cleared(self) -> bool:
        if self._witness is None:
            return True
        parameter, version = self._witness
        if parameter.grad is None:
            return True
        # Scaled or clipped, or set to zero.
        return parameter.grad._version != version and not _nonzero(self._parameters)

    def _go_on_within(self) -> None:
        """Begin one more backward of the present micro-batch, after a synchronized one."""
        assert self._last is not None
        self._go_on_after(self._last)
        self._held = {name: dataclasses.replace(held, has_present=True) for name, held in self._held.items()}
        self._is_within = True
        # After DDP is done; see above.
        call_at_end_of_backward(lambda: call_at_end_of_backward(lambda: self._before.clear()))
        self._count_present()

    def _go_on_after(self, last: Accumulated) -> None:
        """Begin anew after a synchronized backward, but for gradients that were not cleared."""
        used = self._used
        self._clear()
        self._last = None
        kept = _nonzero(self._parameters)
        if not kept:
            return
        for name in kept:
            self._held[name] = last.after(name, _version(self._parameters[name]))
        self._stale = {name for name, held in self._held.items() if not is_one(held.factor)}
        most = max(self._held.values(), key=lambda held: held.num_micro_batches)
        for name, parameter in self._parameters.items():
            # Without gradients so far, and so with nothing to clear.
            if name not in kept and (parameter.grad is not None or name not in used):
                self._held[name] = Held(most.num_micro_batches, most.weight)


def _version(parameter: Tensor) -> int:
    assert parameter.grad is not None
    return parameter.grad._version


def _nonzero(parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters that have a gradient other than zero. Waits for the device unless all have none."""
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    values = {name: grad._values() if grad.is_sparse else grad for name, grad in grads.items()}
    names = [name for name, value in values.items() if value.numel()]
    if not names:
        return []
    norms = torch._foreach_norm([values[name].detach() for name in names], ord=math.inf)
    return [name for name, norm in zip(names, torch.stack([n.double() for n in norms]).tolist(), strict=True) if norm]
