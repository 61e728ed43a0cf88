"""Models whose ranks step alone: what differs between ranks, and how to make it the same."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Collection, Container, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commhooks.codecs.ranges import named
from lightning_commhooks.collectives.averaging import average_, check_same, flat_view, own_part
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.state import StateReader, StateWriter
from lightning_commhooks.interface.swap import Swap, count_up

# Of the model itself, among the keys of optimizers.
_MODEL = ""


def digest_of(tensors: Iterable[Tensor]) -> int:
    """A number of 56 bits that tells whether tensors are the same, bit for bit; of sharded ones, this rank's parts."""
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        on_host = flat_view(tensor).cpu().contiguous()
        # Not `ctypes.string_at`: its length is a C int, and tensors may have more than 2 GiB.
        if on_host.nbytes:
            digest.update((ctypes.c_char * on_host.nbytes).from_address(on_host.data_ptr()))
    return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True)
class OptimizerStep:
    """A step of an optimizer that has just changed the model.

    Attributes:
        optimizer: key of the state that a hook keeps for this optimizer: the name of its first parameter.
        step: number of the last synchronized backward, from 0 on; -1 before the first.
        parameters: its parameters by name, without those that have been frozen all the time.
        state: the optimizer's own state, by parameter.
        models: to average them with, and the rest of the model.
        num_steps: how many steps count now; equal on all ranks. 0: it is not known yet whether this one changed
            anything. Above 1: this one, and earlier ones that were not counted then.
    """

    optimizer: str
    step: int
    parameters: dict[str, Tensor]
    state: MutableMapping[Tensor, Any]
    models: Models
    num_steps: int = 1


class Models:
    """The ranks' copies of one model. Methods that average are collective and run in turn with the hook.

    Args:
        group: all ranks.
        optimizers: those that change the model, by the name of the first parameter of each; grows as they are seen.
        hook: name of the hook, for the traces of profilers.

    Attributes:
        layout: names of the parameters.
        average_buffers: whether buffers belong to the model that is averaged.
        diverged: names of parameters that ranks have changed alone since the last average over all ranks.
        num_steps: steps that optimizers have taken since the beginning of training, by optimizer; equal on all ranks.
        begin: begins a computation of a group of `Group.beside` that goes on while training does, in a channel of its
            own, and returns what waits for its end.
        is_swapped: whether the averages stand in the place of each rank's own model for a while.
        is_shown: whether that is until training goes on, not within a `with`.
    """

    def __init__(self, group: Group, optimizers: dict[str, Optimizer], hook: str) -> None:
        self._group = group
        self._hook = hook
        self._optimizers = optimizers
        self.layout = Layout(nn.Module())
        self.average_buffers = False
        self.diverged: set[str] = set()
        self.num_steps: dict[str, int] = {}
        self.begin: Callable[[Group, Callable[[Group], Steps[None]]], Callable[[], None]]
        self._buffers_diverged = False
        # Names of parameters whose optimizer state differs between ranks.
        self._states_diverged: set[str] = set()
        # Averages of the model and of optimizers' state, in place or kept until training goes on.
        self._swaps: dict[str, Swap] = {}
        self.is_swapped = self.is_shown = False

    def stepped(self, optimizer: Optimizer, step: int) -> OptimizerStep | None:
        """The step of an optimizer of this model, after a backward; `None` if it has none of the parameters."""
        parameters = parameters_of(optimizer)
        key = next((name for p in parameters if (name := self.layout.name_of(p)) is not None), None)
        if key is None:
            return None
        self._optimizers[key] = optimizer
        return OptimizerStep(key, step, self.layout.trained_among(parameters), optimizer.state, self)

    def diverge(self, stepped: OptimizerStep) -> None:
        """Note that each rank changed its own model."""
        self.buffers_diverge()
        self.diverged.update(stepped.parameters)
        self.diverge_state(stepped)

    def diverge_state(self, stepped: OptimizerStep) -> None:
        """Note that the state of an optimizer differs between ranks."""
        self._states_diverged.update(stepped.parameters)

    def buffers_diverge(self) -> None:
        """Note that a forward has changed each rank's own buffers."""
        self.forget()
        self._buffers_diverged = True

    def regroup(self, group: Group) -> None:
        """Go on among other ranks."""
        self._group = group

    @property
    def differ(self) -> bool:
        """Whether each rank has a model of its own in place now; the same on all ranks."""
        return not self.is_swapped and bool(self.diverged or (self._buffers_diverged and self.average_buffers))

    def state_diverged(self, stepped: OptimizerStep) -> bool:
        """Whether an optimizer's state differs between ranks."""
        return not self._states_diverged.isdisjoint(stepped.parameters)

    def _tensors(self, names: Container[str]) -> list[Tensor]:
        # In the order of the model: that of a set differs between ranks.
        return [p for name, p in self.layout.trained.items() if name in names] + [*self._buffers().values()]

    def _buffers(self) -> dict[str, Tensor]:
        return self.layout.float_buffers() if self.average_buffers else {}

    def average_(self, names: Collection[str] = (), group: Group | None = None) -> None:
        """Average parameters of these names, and buffers where they are to be averaged; over all ranks by default."""
        group = group or self._group
        if tensors := self._tensors(names):
            with self.averaging():
                check_same(f"average {len(names)} parameters from {next(iter(sorted(names)), None)!r} on", group)
                average_(tensors, group)
        self.averaged(names, group)
        if group.size == self._group.size:
            self._buffers_diverged = False

    def averaging(self) -> AbstractContextManager[object]:
        """For what averages models or states of optimizers: a range in the traces of profilers."""
        return named(self._hook, "average")

    def averaged(self, names: Collection[str], group: Group | None = None) -> None:
        """Note that these parameters were averaged, or set to the same values on all ranks."""
        self._group.counters.averagings += bool(names)
        if group is None or group.size == self._group.size:
            self.diverged.difference_update(names)

    def average_state_(self, stepped: OptimizerStep, group: Group | None = None) -> None:
        """Average the floating-point tensors in an optimizer's state, apart from its step count.

        Leaves what some rank has not got, because its optimizer has not changed the parameter yet.
        """
        group = group or self._group
        with self.averaging():
            average_(_state_of(stepped, group), group)
        if group.size == self._group.size:
            self._states_diverged.difference_update(stepped.parameters)

    def reset_state_(self, stepped: OptimizerStep) -> None:
        """Let an optimizer forget its state of the parameters."""
        for parameter in stepped.parameters.values():
            stepped.state.pop(parameter, None)
        self._states_diverged.difference_update(stepped.parameters)

    def average_diverged_(self, everything: bool = False) -> None:
        """Average for good what differs between ranks; with `everything`, also what others than optimizers changed."""
        if everything and self._is_any_bit_different():
            self.keep_averages()
            self.diverged.update(self.layout.trained)
        self.swap_in()
        self.averaged(set(self.diverged))
        self._buffers_diverged = False
        self.keep_averages()

    def _is_any_bit_different(self) -> bool:
        own = digest_of(self._tensors(self.layout.trained))
        return len(set(check_same("average all parameters", self._group, own))) > 1

    def average_what_differs_(self) -> None:
        """Average weights and optimizers' state that ranks have changed alone, unless all have the same again."""
        if not (self.diverged or self._states_diverged):
            return
        stepped = [one for o in self._optimizers.values() if (one := self.stepped(o, -1)) and self.state_diverged(one)]
        states = [tensor for one in stepped for tensor in _state_of(one, self._group)]
        own = digest_of([*self._tensors(self.diverged), *states])
        if len(set(check_same("begin again with the same model", self._group, own))) > 1:
            self.average_diverged_()
            for one in stepped:
                self.average_state_diverged_(one)

    def swap_in(self) -> None:
        """Put the averages in the place of each rank's own model until `swap_out`."""
        if self.differ:
            tensors = self._tensors(self.diverged)
            self._put_in(_MODEL, f"{len(self.diverged)} parameters", tensors, lambda: tensors)
        self.is_swapped = True

    def swap_out(self, key: str = _MODEL) -> None:
        """Put each rank's own model or optimizer state back, but for what has changed, as by loading weights."""
        swap = self._swaps.get(key)
        if swap is not None and swap.is_in:
            swap.exchange()
            if swap.is_outdated:
                del self._swaps[key]
        if key == _MODEL:
            self.is_swapped = self.is_shown = False

    def keep_averages(self) -> None:
        """Let go of each rank's own model."""
        self._swaps.pop(_MODEL, None)
        self.is_swapped = self.is_shown = False

    def average_state_diverged_(self, stepped: OptimizerStep) -> None:
        """Average an optimizer's state, as `average_state_`, for good."""
        self.swap_state_in(stepped)
        self._swaps.pop(stepped.optimizer, None)
        self._states_diverged.difference_update(stepped.parameters)

    def swap_state_in(self, stepped: OptimizerStep) -> bool:
        """Put the averages in the place of an optimizer's state; returns whether to `swap_out` again."""
        swap = self._swaps.get(stepped.optimizer)
        if not self.state_diverged(stepped) or (swap is not None and swap.is_in):
            return False
        among = [tensor for p in stepped.parameters.values() for tensor in stepped.state.get(p, {}).values()]
        what = f"the state of optimizer {stepped.optimizer!r}"
        self._put_in(stepped.optimizer, what, among, lambda: _state_of(stepped, self._group))
        return True

    def paused(self) -> list[Callable[[], None]]:
        """Do not take for a change of models what happens until these functions are called."""
        return [swap.paused() for swap in self._swaps.values()]

    def forget(self) -> None:
        """Let go of averages that were kept, as training goes on; those that are in place will not be kept."""
        self._swaps = {key: swap for key, swap in self._swaps.items() if swap.is_in}
        for swap in self._swaps.values():
            swap.is_outdated = True

    def _put_in(self, key: str, what: str, among: list[Any], tensors: Callable[[], list[Tensor]]) -> None:
        """Put averages of `tensors` in place: those that were kept, if all of them are still `among` these."""
        swap = self._swaps.get(key)
        with self._group.counters.evaluating(), self.averaging():
            is_kept = check_same(f"average {what}", self._group, swap is not None and swap.is_kept(among))
            if swap is not None and all(is_kept):
                swap.exchange()
            else:
                self._swaps.pop(key, None)
                self._swaps[key] = Swap(tensors(), self._group)

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        """Each rank's own model and state of optimizers, as far as they differ; empty unless the state is exact."""
        if writer.kind != "exact" or not (self.diverged or self._buffers_diverged or self._states_diverged):
            return {}
        # Averages may stand in its place.
        own = {key: tensor for swap in self._swaps.values() for key, tensor in swap.own().items()}

        def of_ranks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            parts = {name: own_part(tensor) for name, tensor in tensors.items()}
            return {name: writer.per_rank(own.get(id(part), part.data)) for name, part in parts.items()}

        states = {}
        for key, optimizer in self._optimizers.items():
            parameters = self.layout.trained_among(parameters_of(optimizer))
            if diverged := {name: p for name, p in parameters.items() if name in self._states_diverged}:
                common = common_states(diverged, optimizer.state, self._group)
                states[key] = {name: of_ranks(state) for name, state in common.items()}
        return {
            "parameters": of_ranks({name: p for name, p in self.layout.trained.items() if name in self.diverged}),
            "buffers": of_ranks(self._buffers()),
            "optimizers": states,
        }

    def stage(self, saved: Mapping[str, Any], reader: StateReader) -> list[tuple[Tensor, Tensor]]:
        """Tensors and what to copy to them to `restore` what `state_dict` returned; changes nothing yet."""
        parameters = self.layout.trained
        staged = _matching("parameter", saved["parameters"], parameters, reader)
        staged += _matching("buffer", saved["buffers"], self.layout.float_buffers(), reader)
        for key, states in saved["optimizers"].items():
            if key not in self._optimizers:
                reader.differs(f"there is no optimizer whose first parameter is {key!r}; attach it before loading")
                continue
            for name, state in states.items():
                own = self._optimizers[key].state.get(parameters[name], {}) if name in parameters else {}
                staged += _matching(f"optimizer state of {name!r}:", state, own, reader)
        return staged

    def restore(self, staged: list[tuple[Tensor, Tensor]], saved: Mapping[str, Any]) -> None:
        """Give each rank its own model back, or note that there is none: the same was loaded on all ranks."""
        self.keep_averages()
        self._swaps.clear()
        for tensor, value in staged:
            tensor.data.copy_(value)
        count_up(tensor for tensor, _ in staged)
        self.diverged = set(saved.get("parameters", {}))
        self._buffers_diverged = bool(saved.get("buffers", {}))
        self._states_diverged = {name for states in saved.get("optimizers", {}).values() for name in states}


def _state_of(stepped: OptimizerStep, group: Group) -> list[Tensor]:
    states = common_states(stepped.parameters, stepped.state, group)
    return [tensor for state in states.values() for tensor in state.values()]


def _matching(
    what: str, saved: Mapping[str, Tensor], own: Mapping[str, Tensor], reader: StateReader
) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for name, tensor in saved.items():
        if name not in own or own_part(own[name]).shape != tensor.shape[1:]:
            reader.differs(f"{what} {name!r} is not there or has another shape")
        else:
            pairs.append((own_part(own[name]), reader.per_rank(tensor)))
    return pairs


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def common_states(
    parameters: Mapping[str, Tensor], state: Mapping[Tensor, Any], group: Group
) -> dict[str, dict[str, Tensor]]:
    """Floating-point tensors of an optimizer's state by parameter and key, without what some rank has not got."""
    own = {name: _floating_point(state.get(p, {})) for name, p in parameters.items()}
    gathered = group.all_gather_numbers([len(tensors) for tensors in own.values()], torch.int32)
    everywhere = [len(set(numbers)) == 1 for numbers in zip(*gathered, strict=True)]
    return {name: tensors for (name, tensors), is_common in zip(own.items(), everywhere, strict=True) if is_common}


def _floating_point(state: Mapping[str, Any]) -> dict[str, Tensor]:
    if any(isinstance(v, Tensor) and v.numel() > 1 and not _is_continuous(v) for v in state.values()):
        return {}  # quantized: the mean of scales means nothing without that of the codes
    # Sorted: the order in which an optimizer makes them is its own business.
    tensors = {k: v for k, v in sorted(state.items()) if isinstance(v, Tensor) and k != "step"}
    return {k: v for k, v in tensors.items() if _is_continuous(v)}


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
