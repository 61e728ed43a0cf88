"""Models whose ranks step alone: what differs between ranks, and how to make it the same."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_commhooks.collectives.averaging import average_, check_same
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.state import StateReader, StateWriter


@dataclass(frozen=True)
class OptimizerStep:
    """What an optimizer has just changed.

    Attributes:
        optimizer: key of the state that a hook keeps for this optimizer: the name of its first parameter.
        step: number of the last synchronized backward, from 0 on; -1 before the first.
        parameters: its parameters by name, without those that have been frozen all the time.
        state: the optimizer's own state, by parameter.
        models: to average them with, and the rest of the model.
    """

    optimizer: str
    step: int
    parameters: dict[str, Tensor]
    state: MutableMapping[Tensor, Any]
    models: Models


class Models:
    """The ranks' copies of one model. Methods that average are collective and run in turn with the hook.

    Args:
        group: all ranks.
        optimizers: those that change the model, by the name of the first parameter of each; grows as they are seen.

    Attributes:
        layout: names of the parameters.
        average_buffers: whether buffers belong to what is averaged.
        drifted: names of the parameters that ranks changed alone since they were last averaged over all ranks.
        is_swapped: whether the averages stand in the place of each rank's own model for a while.
        is_shown: whether that is until training goes on, not within a `with`.
    """

    def __init__(self, group: Group, optimizers: dict[str, Optimizer]) -> None:
        self._group = group
        self._optimizers = optimizers
        self.layout = Layout(nn.Module())
        self.average_buffers = False
        self.drifted: set[str] = set()
        self._buffers_drifted = False
        # Names of the parameters of which optimizers' state differs, as `drifted`.
        self._states_drifted: set[str] = set()
        # While swapped: tensors of the model and what each rank has in them; versions that autograd counts.
        self._own: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        # The same for the state of optimizers, by key.
        self._own_states: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.is_swapped = False
        self.is_shown = False

    def stepped(self, optimizer: Optimizer, step: int) -> OptimizerStep | None:
        """What an optimizer has to do with this model; `None` if nothing.

        Args:
            optimizer: the optimizer.
            step: number of the last synchronized backward.
        """
        parameters = parameters_of(optimizer)
        key = next((name for p in parameters if (name := self.layout.name_of(p)) is not None), None)
        if key is None:
            return None
        self._optimizers[key] = optimizer
        return OptimizerStep(key, step, self.layout.trained_among(parameters), optimizer.state, self)

    def drift(self, stepped: OptimizerStep) -> None:
        """Note that each rank changed its own model."""
        self.drifted.update(stepped.parameters)
        self._buffers_drifted = True
        self._states_drifted.update(stepped.parameters)

    def average_(self, names: Collection[str], group: Group | None = None) -> None:
        """Average parameters, and buffers where they are to be averaged.

        Args:
            names: of the parameters; those that the model has not got are left out.
            group: the ranks; `None` for all.
        """
        group = group or self._group
        check_same(f"average {len(names)} parameters from {next(iter(sorted(names)), None)!r} on", group)
        average_(self._tensors(names), group)
        self.averaged(names, group)
        if group.size == self._group.size:
            self._buffers_drifted = False

    def averaged(self, names: Iterable[str], group: Group | None = None) -> None:
        """Note that these parameters were averaged, or set to the same values on all ranks."""
        self._group.counters.averagings += 1
        if group is None or group.size == self._group.size:
            self.drifted.difference_update(names)

    def average_buffers_(self) -> None:
        """Average buffers, where they are to be averaged, and nothing else."""
        average_(self._tensors(()), self._group)
        self._buffers_drifted = False

    def average_drifted_(self, everything: bool = False) -> None:
        """Average what differs between ranks, or everything. Averages that stand in its place stay."""
        if everything:
            self.keep_averages()
            self._average_now(self.layout.trained)
        elif self.is_swapped:
            self.keep_averages()
            self.averaged(set(self.drifted))
            self._buffers_drifted = False
        elif self.drifted or self._buffers_drifted:
            self._average_now(set(self.drifted))

    def _average_now(self, names: Collection[str]) -> None:
        self.average_(names)
        for tensor in self._tensors(names):
            _count_up(tensor)

    def buffers_drift(self) -> None:
        """Note that a forward has changed each rank's own buffers."""
        self._buffers_drifted = True

    @property
    def differ(self) -> bool:
        """Whether each rank has a model of its own in place now; the same on all ranks."""
        return not self.is_swapped and bool(self.drifted or (self._buffers_drifted and self.average_buffers))

    def average_state_(self, stepped: OptimizerStep, group: Group | None = None) -> None:
        """Average the floating-point tensors in an optimizer's state, apart from its step count.

        What some rank has not got, because its optimizer has not changed the parameter yet, is left as it is.

        Args:
            stepped: the optimizer and the parameters.
            group: the ranks; `None` for all.
        """
        group = group or self._group
        states = _common_states(stepped.parameters, stepped.state, group)
        average_([tensor for state in states.values() for tensor in state.values()], group)
        if group.size == self._group.size:
            self._states_drifted.difference_update(stepped.parameters)

    def reset_state_(self, stepped: OptimizerStep) -> None:
        """Let an optimizer forget its state of the parameters."""
        for parameter in stepped.parameters.values():
            stepped.state.pop(parameter, None)
        self._states_drifted.difference_update(stepped.parameters)

    def swap_in(self) -> None:
        """Put the averages in the place of each rank's own model until `swap_out`."""
        if not self.is_swapped and (self.drifted or self._buffers_drifted):
            check_same(f"evaluate or save the average of {len(self.drifted)} parameters", self._group)
            self._own = self._averaged(self._tensors(self.drifted))
            for tensor, _ in self._own:
                # So that autograd refuses a backward of what was computed with the parameters before.
                _count_up(tensor)
            self._versions = [_version(tensor) for tensor, _ in self._own]
        self.is_swapped = True

    def swap_out(self) -> None:
        """Put each rank's own model back, but for what somebody else has changed meanwhile, as by loading weights."""
        versions = zip(self._own, self._versions, strict=True)
        put_back([own for own, version in versions if _version(own[0]) == version])
        self.keep_averages()

    def keep_averages(self) -> None:
        """Let go of each rank's own model."""
        self._own, self._versions = [], []
        self.is_swapped = self.is_shown = False

    def swap_state_in(self, stepped: OptimizerStep) -> bool:
        """Put the averages in the place of each rank's own state of an optimizer; returns whether to swap out again."""
        if stepped.optimizer in self._own_states or not self.state_drifted(stepped):
            return False
        states = _common_states(stepped.parameters, stepped.state, self._group)
        tensors = [tensor for state in states.values() for tensor in state.values()]
        self._own_states[stepped.optimizer] = self._averaged(tensors)
        return True

    def swap_state_out(self, stepped: OptimizerStep) -> None:
        """Put each rank's own state of an optimizer back."""
        put_back(self._own_states.pop(stepped.optimizer))

    def state_drifted(self, stepped: OptimizerStep) -> bool:
        """Whether an optimizer's state differs between ranks."""
        return not self._states_drifted.isdisjoint(stepped.parameters)

    def _averaged(self, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        own = [(tensor, tensor.data.clone()) for tensor in tensors]
        average_(tensors, self._group)
        return own

    def _tensors(self, names: Container[str]) -> list[Tensor]:
        # In the order of the model: that of a set differs between ranks.
        parameters = [p for name, p in self.layout.trained.items() if name in names]
        return parameters + (list(self.layout.float_buffers().values()) if self.average_buffers else [])

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        """Each rank's own model and state of optimizers, as far as they differ; empty unless the state is exact."""
        if writer.kind != "exact" or not (self.drifted or self._buffers_drifted or self._states_drifted):
            return {}
        # Averages may stand in its place.
        own = {id(t): value for t, value in itertools.chain(self._own, *self._own_states.values())}
        parameters = {n: own.get(id(p), p.data) for n, p in self.layout.trained.items() if n in self.drifted}
        float_buffers = self.layout.float_buffers() if self.average_buffers else {}
        buffers = {name: own.get(id(b), b.data) for name, b in float_buffers.items()}
        states = {}
        for key, optimizer in self._optimizers.items():
            named = self.layout.trained_among(parameters_of(optimizer))
            drifted = {name: p for name, p in named.items() if name in self._states_drifted}
            if drifted:
                common = _common_states(drifted, optimizer.state, self._group)
                states[key] = {
                    name: {k: writer.per_rank(own.get(id(t), t)) for k, t in state.items()}
                    for name, state in common.items()
                }
        return {
            "parameters": {name: writer.per_rank(p) for name, p in parameters.items()},
            "buffers": {name: writer.per_rank(b) for name, b in buffers.items()},
            "optimizers": states,
        }

    def stage(self, saved: Mapping[str, Any], reader: StateReader) -> list[tuple[Tensor, Tensor]]:
        """Tensors and what to copy to them to `restore` what `state_dict` returned; changes nothing yet."""
        parameters = self.layout.trained
        staged = _matching("parameter", saved["parameters"], parameters, reader)
        staged += _matching("buffer", saved["buffers"], self.layout.float_buffers(), reader)
        for key, states in saved["optimizers"].items():
            optimizer = self._optimizers.get(key)
            if optimizer is None:
                reader.differs(f"there is no optimizer whose first parameter is {key!r}; attach it before loading")
                continue
            for name, state in states.items():
                own = optimizer.state.get(parameters[name], {}) if name in parameters else {}
                staged += _matching(f"optimizer state of {name!r}:", state, own, reader)
        return staged

    def restore(self, staged: list[tuple[Tensor, Tensor]], saved: Mapping[str, Any]) -> None:
        """Give each rank its own model back, or note that there is none: the same was loaded on all ranks."""
        self.keep_averages()
        put_back(staged)
        self.drifted = set(saved.get("parameters", {}))
        self._buffers_drifted = bool(saved.get("buffers", {}))
        self._states_drifted = {name for states in saved.get("optimizers", {}).values() for name in states}


def put_back(own: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first."""
    for tensor, value in own:
        tensor.data.copy_(value)
        _count_up(tensor)


def _count_up(tensor: Tensor) -> None:
    # A buffer that was made in inference mode has no version.
    if not tensor.is_inference():
        increment_version(tensor)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _matching(
    what: str, saved: Mapping[str, Tensor], own: Mapping[str, Tensor], reader: StateReader
) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for name, tensor in saved.items():
        if name not in own or own[name].shape != tensor.shape[1:]:
            reader.differs(f"{what} {name!r} is not there or has another shape")
        else:
            pairs.append((own[name], reader.per_rank(tensor)))
    return pairs


def _common_states(
    parameters: Mapping[str, Tensor], state: Mapping[Tensor, Any], group: Group
) -> dict[str, dict[str, Tensor]]:
    """Floating-point tensors of an optimizer's state by parameter and key, without what some rank has not got."""
    own = {name: _floating_point(state.get(p, {})) for name, p in parameters.items()}
    num_tensors = torch.tensor([len(tensors) for tensors in own.values()], dtype=torch.int32, device=group.device)
    gathered = group.all_gather(num_tensors)
    everywhere = (gathered == gathered[0]).all(dim=0).tolist()
    return {name: tensors for (name, tensors), is_common in zip(own.items(), everywhere, strict=True) if is_common}


def _floating_point(state: Mapping[str, Any]) -> dict[str, Tensor]:
    if any(isinstance(v, Tensor) and v.numel() > 1 and not _is_continuous(v) for v in state.values()):
        return {}  # quantized: the mean of scales means nothing without that of the codes
    # Sorted: the order in which an optimizer makes them is its own business.
    tensors = {k: v for k, v in sorted(state.items()) if isinstance(v, Tensor) and k != "step"}
    return {k: v for k, v in tensors.items() if _is_continuous(v)}


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]
