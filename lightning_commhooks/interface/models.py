"""Models whose ranks step alone: what differs between ranks, and how to make it the same."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commhooks.codecs.ranges import named
from lightning_commhooks.collectives.averaging import average_, check_same
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.looks import Look, count_up, digest, put_back
from lightning_commhooks.interface.optimizer_state import common_states, floating_points
from lightning_commhooks.interface.state import StateReader, StateWriter

# Of the model itself, among the keys of optimizers.
_MODEL = ""


@dataclass(frozen=True)
class OptimizerStep:
    """A step of an optimizer that has just changed the model.

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
        hook: name of the hook, for the traces of profilers.

    Attributes:
        layout: names of the parameters.
        average_buffers: whether buffers belong to what is averaged.
        drifted: names of the parameters that diverged: ranks changed them alone since the last average over all ranks.
        is_swapped: whether the averages stand in the place of each rank's own model for a while.
        is_shown: whether that is until training goes on, not within a `with`.
    """

    def __init__(self, group: Group, optimizers: dict[str, Optimizer], hook: str) -> None:
        self._group = group
        self._hook = hook
        self._optimizers = optimizers
        self.layout = Layout(nn.Module())
        self.average_buffers = False
        self.drifted: set[str] = set()
        self._buffers_drifted = False
        # Names of the parameters whose optimizer state has diverged, as `drifted`.
        self._states_drifted: set[str] = set()
        # Averages that are in their place, or kept until training goes on, of the model and of optimizers' state.
        self._looks: dict[str, Look] = {}
        self.is_swapped = False
        self.is_shown = False

    def stepped(self, optimizer: Optimizer, step: int) -> OptimizerStep | None:
        """The step of an optimizer of this model; `None` if the optimizer has none of its parameters.

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
        self.forget()
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
        with self.averaging():
            check_same(f"average {len(names)} parameters from {next(iter(sorted(names)), None)!r} on", group)
            average_(self._tensors(names), group)
        self.averaged(names, group)
        if group.size == self._group.size:
            self._buffers_drifted = False

    def averaging(self) -> AbstractContextManager[object]:
        """For what averages models or states of optimizers: a range in the traces of profilers."""
        return named(self._hook, "average")

    def averaged(self, names: Iterable[str], group: Group | None = None) -> None:
        """Note that these parameters were averaged, or set to the same values on all ranks."""
        self._group.counters.averagings += 1
        if group is None or group.size == self._group.size:
            self.drifted.difference_update(names)

    def average_buffers_(self) -> None:
        """Average buffers, where they are to be averaged, and nothing else."""
        if buffers := self._tensors(()):
            with self.averaging():
                average_(buffers, self._group)
        self._buffers_drifted = False

    def average_drifted_(self, everything: bool = False) -> None:
        """Average what differs between ranks, or everything. Averages that stand in its place, or are kept, stay."""
        with self._group.counters.evaluating():
            if everything:
                self.keep_averages()
                with self.averaging():
                    self._average_everything()
            elif self.is_swapped or self.drifted or self._buffers_drifted:
                names = set(self.drifted)
                if not self.is_swapped:
                    with self.averaging():
                        if not self._look_again(_MODEL, self._tensors(names), "average"):
                            self._average_now(names)
                self.keep_averages()
                self.averaged(names)
                self._buffers_drifted = False

    def _average_everything(self) -> None:
        # Usually ranks are equal, at the end of training.
        tensors = self._tensors(self.layout.trained)
        if len(set(check_same("average all parameters", self._group, digest(tensors)))) > 1:
            self._average_now(self.layout.trained)
            self.averaged(self.layout.trained)
        self.drifted.clear()
        self._buffers_drifted = False

    def _average_now(self, names: Container[str]) -> None:
        tensors = self._tensors(names)
        average_(tensors, self._group)
        for tensor in tensors:
            count_up(tensor)

    def buffers_drift(self) -> None:
        """Note that a forward has changed each rank's own buffers."""
        self.forget()
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
        with self.averaging():
            states = common_states(stepped.parameters, stepped.state, group)
            average_([tensor for state in states.values() for tensor in state.values()], group)
        if group.size == self._group.size:
            self._states_drifted.difference_update(stepped.parameters)

    def average_state_drifted_(self, stepped: OptimizerStep) -> None:
        """Average an optimizer's state, as `average_state_`, for good. Averages that are in place, or kept, stay."""
        key, among = stepped.optimizer, floating_points(stepped.parameters, stepped.state)
        with self._group.counters.evaluating():
            if not self._is_in(key) and not self._look_again(key, among, "average"):
                self.average_state_(stepped)
        self._looks.pop(key, None)
        self._states_drifted.difference_update(stepped.parameters)

    def reset_state_(self, stepped: OptimizerStep) -> None:
        """Let an optimizer forget its state of the parameters."""
        for parameter in stepped.parameters.values():
            stepped.state.pop(parameter, None)
        self._states_drifted.difference_update(stepped.parameters)

    def swap_in(self) -> None:
        """Put the averages in the place of each rank's own model until `swap_out`."""
        if not self.is_swapped and (self.drifted or self._buffers_drifted):
            tensors = self._tensors(self.drifted)
            with self._group.counters.evaluating(), self.averaging():
                if not self._look_again(_MODEL, tensors):
                    self._looks[_MODEL] = Look(tensors, tensors, self._group)
        self.is_swapped = True

    def swap_out(self, keep: bool) -> None:
        """Put each rank's own model back, but for what somebody else has changed meanwhile, as by loading weights.

        Args:
            keep: whether to keep the averages for `swap_in`, until training goes on.
        """
        self._take_out(_MODEL, keep)
        self.is_swapped = self.is_shown = False

    def keep_averages(self) -> None:
        """Let go of each rank's own model."""
        self._looks.pop(_MODEL, None)
        self.is_swapped = self.is_shown = False

    def forget(self) -> None:
        """Let go of averages that were kept, as training goes on; those that are in place will not be."""
        for key in [*self._looks]:
            self._looks[key].is_void = True
            if not self._is_in(key):
                del self._looks[key]

    @property
    def has_looks(self) -> bool:
        """Whether averages are in place or kept."""
        return self.is_swapped or bool(self._looks)

    def _is_in(self, key: str) -> bool:
        return key in self._looks and self._looks[key].is_in

    def _look_again(self, key: str, among: Sequence[Tensor], purpose: str = "evaluate or save the average of") -> bool:
        """Put averages of some tensors that were kept in their place, if all ranks have them. Collective."""
        is_kept = key in self._looks and self._looks[key].is_kept(among)
        what = f"the state of optimizer {key!r}" if key else f"{len(self.drifted)} parameters"
        everywhere = all(check_same(f"{purpose} {what}", self._group, int(is_kept)))
        if not (is_kept and everywhere):
            self._looks.pop(key, None)
            return False
        self._looks[key].put_in()
        return True

    def _take_out(self, key: str, keep: bool) -> None:
        if self._is_in(key) and not self._looks[key].take_out(keep):
            del self._looks[key]

    def swap_state_in(self, stepped: OptimizerStep) -> bool:
        """Put the averages in the place of each rank's own state of an optimizer; returns whether to swap out again."""
        if self._is_in(stepped.optimizer) or not self.state_drifted(stepped):
            return False
        among = floating_points(stepped.parameters, stepped.state)
        with self._group.counters.evaluating():
            if not self._look_again(stepped.optimizer, among):
                with self.averaging():
                    states = common_states(stepped.parameters, stepped.state, self._group)
                    tensors = [tensor for state in states.values() for tensor in state.values()]
                    self._looks[stepped.optimizer] = Look(tensors, among, self._group)
        return True

    def swap_state_out(self, stepped: OptimizerStep) -> None:
        """Put each rank's own state of an optimizer back, as `swap_out`."""
        self._take_out(stepped.optimizer, keep=True)

    def state_drifted(self, stepped: OptimizerStep) -> bool:
        """Whether an optimizer's state differs between ranks."""
        return not self._states_drifted.isdisjoint(stepped.parameters)

    def _tensors(self, names: Container[str]) -> list[Tensor]:
        # In the order of the model: that of a set differs between ranks.
        parameters = [p for name, p in self.layout.trained.items() if name in names]
        return parameters + (list(self.layout.float_buffers().values()) if self.average_buffers else [])

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        """Each rank's own model and state of optimizers, as far as they differ; empty unless the state is exact."""
        if writer.kind != "exact" or not (self.drifted or self._buffers_drifted or self._states_drifted):
            return {}
        # Averages may stand in its place.
        own = {id(t): value for look in self._looks.values() for t, value in look.own()}
        parameters = {n: own.get(id(p), p.data) for n, p in self.layout.trained.items() if n in self.drifted}
        float_buffers = self.layout.float_buffers() if self.average_buffers else {}
        buffers = {name: own.get(id(b), b.data) for name, b in float_buffers.items()}
        states = {}
        for key, optimizer in self._optimizers.items():
            named = self.layout.trained_among(parameters_of(optimizer))
            drifted = {name: p for name, p in named.items() if name in self._states_drifted}
            if drifted:
                common = common_states(drifted, optimizer.state, self._group)
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
        self._looks.clear()
        put_back(staged)
        self.drifted = set(saved.get("parameters", {}))
        self._buffers_drifted = bool(saved.get("buffers", {}))
        self._states_drifted = {name for states in saved.get("optimizers", {}).values() for name in states}


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


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]
