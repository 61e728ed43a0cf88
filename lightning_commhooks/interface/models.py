"""Models with local steps: tracks the tensors that differ between ranks, and averages them."""

from __future__ import annotations

import ctypes
import hashlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_commhooks.basics.ranges import named
from lightning_commhooks.collectives.averaging import (
    alike,
    average_,
    check_same,
    flat_view,
    kind_of,
    kinds_of,
    number_of,
    own_part,
    share_,
)
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.layout import Layout, is_continuous, is_count_of_steps, is_statistic
from lightning_commhooks.interface.state import StateReader, StateWriter

# Key of the model itself, among the keys of optimizers.
_MODEL = ""
# Number of elements of a large buffer to sample for changes that autograd does not count.
_SAMPLE = 512
# Number that announces buffers which every average includes.
_STATISTICS = 1


def digest_of(tensors: Iterable[Tensor]) -> int:
    """Return a 56-bit digest of tensors, bit for bit; for sharded tensors, of this rank's parts."""
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        on_host = flat_view(tensor).cpu().contiguous()
        # `ctypes.string_at` is limited to the range of a C int, and tensors may exceed 2 GiB.
        if on_host.nbytes:
            digest.update((ctypes.c_char * on_host.nbytes).from_address(on_host.data_ptr()))
    return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True)
class OptimizerStep:
    """A step of an optimizer that has just changed the model.

    Attributes:
        optimizer: key of the hook's state for this optimizer: the name of its first parameter, or of the next one if
            an optimizer of partly other parameters has that key.
        step: number of the last synchronized backward, from 0 on; -1 before the first.
        parameters: its parameters by name, except parameters that have always been frozen.
        state: the optimizer's own state, by parameter.
        models: averages these parameters and the rest of the model.
        num_steps: number of steps to count now; rank-uniform. 0: whether this step changed anything is not known yet.
            Above 1: this step, and earlier steps that were not counted at the time.
    """

    optimizer: str
    step: int
    parameters: dict[str, Tensor]
    state: MutableMapping[Tensor, Any]
    models: Models
    num_steps: int = 1


class Models:
    """The ranks' copies of one model. Methods that average are collective and run in turn with the hook.

    Each rank has either its own model in place, or the averages. A rank's own actions, such as a forward, never decide
    whether it takes part in a collective: models are averaged again each time that averages are shown.

    Args:
        group: all ranks.
        optimizers: the optimizers of the model, by `OptimizerStep.optimizer`; `stepped` adds to them.
        hook: name of the hook, for messages and profiler traces.

    Attributes:
        layout: names of the parameters.
        average_buffers: whether averages of the model include running statistics.
        broadcasts_buffers: whether averages copy the first rank's other buffers to all ranks, as with DDP's
            `broadcast_buffers`.
        diverged: names of parameters that local steps have changed since the last average over all ranks.
        num_steps: steps since the start of training, by optimizer; rank-uniform.
        num_undecided: later steps that may turn out to have changed nothing; rank-uniform.
        may_differ: whether there has been any local step; rank-uniform.
        begin: begins a computation in a separate group, which runs during training in its own channel, and returns a
            function that waits for it.
        shows_averages: whether the averages temporarily replace this rank's own model.
        ranks_change: whether ranks come and go. An average in flight is lost when they do.
        beside: optimizers that the user has given together last.
    """

    def __init__(self, group: Group, optimizers: dict[str, Optimizer], hook: str) -> None:
        self._group = group
        self._hook = hook
        self._optimizers = optimizers
        self.layout = Layout(nn.Module())
        self.average_buffers = self.broadcasts_buffers = False
        self.diverged: set[str] = set()
        self.num_steps: dict[str, int] = {}
        self.num_undecided: dict[str, int] = {}
        self.may_differ = False
        self.begin: Callable[[Group, Callable[[Group], Steps[None]]], Callable[[], None]]
        # Whether a forward has changed this rank's own buffers.
        self._buffers_diverged = False
        # Whether ranks have to compare buffers at the next average, and whether to include those that are not
        # statistics.
        self._compares_buffers = self._compares_others = True
        self._counts_of_steps: set[str] = set()
        self._contents: dict[str, tuple[weakref.ref[Tensor], int, bytes, int]] = {}
        self._warned: set[str] = set()
        # Names of parameters whose optimizer state differs between ranks.
        self._states_diverged: set[str] = set()
        # Number of averages of the model after the last average of each optimizer's parameters, by the optimizer's key.
        self._num_averages: dict[str, int] = {}
        # This rank's own model and optimizers' state, while averages are in place.
        self._own: dict[str, OwnValues] = {}
        self.shows_averages = self.ranks_change = False
        self.beside: WeakSet[Optimizer] = WeakSet()

    def stepped(self, optimizer: Optimizer, step: int) -> OptimizerStep | None:
        """Describe a step of an optimizer of this model; `None` if the optimizer has no parameter of the model."""
        parameters = parameters_of(optimizer)
        key = next((key for key, known in self._optimizers.items() if known is optimizer), None)
        if key is None and (key := self._new_key(optimizer, parameters)) is None:
            return None
        self._optimizers[key] = optimizer
        return OptimizerStep(key, step, self.layout.trained_among(parameters), optimizer.state, self)

    def note_given(self, optimizers: Iterable[object]) -> None:
        """Note optimizers, and perhaps objects that will be refused, that the user has given together."""
        self.beside = WeakSet(one for one in optimizers if isinstance(one, Optimizer))

    def _new_key(self, optimizer: Optimizer, parameters: Collection[Tensor]) -> str | None:
        """The key of an optimizer that has none: the name of its first parameter.

        An optimizer that wraps or replaces another one takes over its key. If both are in `beside` and each trains
        parameters that the other does not, such as two heads on a common trunk, it gets the name of a later parameter.
        """
        own, together = {*parameters}, {*self.beside}
        names = [name for p in parameters if (name := self.layout.name_of(p)) is not None]
        for name in names:
            owner = self._optimizers.get(name)
            if owner is None or not {owner, optimizer} <= together:
                return name
            theirs = {*parameters_of(owner)}
            if own <= theirs or theirs <= own:
                return name
        return names[0] if names else None

    def diverge(self, stepped: OptimizerStep) -> None:
        """Record that each rank changed its own model."""
        self.may_differ = True
        self.buffers_diverge()
        self.diverged.update(stepped.parameters)
        self.diverge_state(stepped)

    def diverge_state(self, stepped: OptimizerStep) -> None:
        """Record that the state of an optimizer differs between ranks."""
        self._states_diverged.update(stepped.parameters)

    def buffers_diverge(self) -> None:
        """Record that a forward has changed this rank's own buffers."""
        self._buffers_diverged = True

    def regroup(self, group: Group) -> None:
        """Continue with a new group of ranks."""
        self._group = group
        self._compares_buffers = self._compares_others = True

    @property
    def differ(self) -> bool:
        """Whether this rank's own model is in place and may differ, as known without communication."""
        return not self.shows_averages and bool(self.diverged or (self._buffers_diverged and self._buffers()[0]))

    def state_diverged(self, stepped: OptimizerStep) -> bool:
        """Return whether an optimizer's state differs between ranks."""
        return not self._states_diverged.isdisjoint(stepped.parameters)

    def _buffers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return running statistics, and the other buffers that ranks compare."""
        statistics: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, buffer, owner, own in self.layout.buffers() if self.average_buffers else ():
            is_count = is_count_of_steps(owner, buffer)
            if is_statistic(owner, own, buffer):
                statistics[name] = buffer
            elif self.broadcasts_buffers or (self._compares_others and not is_count):
                others[name] = buffer
            self._counts_of_steps.update([name] if is_count else [])
        return statistics, others

    def average_(self, names: Collection[str] = (), group: Group | None = None) -> None:
        """Average the parameters with these names and the running statistics, over all ranks by default.

        Over all ranks, the first rank's other buffers are also copied to all ranks if `broadcasts_buffers` is set.
        """
        group = group or self._group
        if names or (self.average_buffers and self._compares_buffers):
            with self.averaging():
                what = f"average {len(names)} parameters from {next(iter(sorted(names)), None)!r} on"
                tensors, shared = self._agree(what, names, group)
                average_(tensors, group)
                share_(shared, group)
                count_up(shared)
        self.averaged(names, group)
        if group.size == self._group.size:
            self._buffers_diverged = self._compares_buffers = False

    def average_others_(self, names: Collection[str]) -> None:
        """Average parameters over all ranks, as a part of an average of the model."""
        parameters = {name: p for name, p in self.layout.parameters.items() if name in names}
        if parameters:
            with self.averaging():
                told = check_same(f"average {len(parameters)} other parameters", self._group, kinds_of(parameters))
                found = self._alike(parameters, self._group, [kinds for kinds, *_ in told])
                average_([*found.values()], self._group)
        self.diverged.difference_update(names)

    def _agree(
        self, what: str, names: Collection[str], group: Group, *, compares: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors to average and the buffers to copy from the first rank, equal on all ranks. Collective.

        If it `compares`, running statistics without parameters are averaged only if they differ between ranks.
        """
        statistics, others = self._buffers()
        # In the order of the model: a set's order differs between ranks.
        parameters = {name: p for name, p in self.layout.parameters.items() if name in names}
        tensors, others = parameters | statistics, others if group.size == self._group.size else {}
        compares = compares and not names
        content = self._content_of(statistics) if compares else 0
        told = check_same(what, group, kinds_of(tensors), content, self._content_of(others))
        kinds, contents, contents_of_others = zip(*told, strict=True)
        found = {} if compares and len(set(contents)) == 1 else self._alike(tensors, group, kinds)
        return [*found.values()], self._differing(others, contents_of_others)

    def digest_of_buffers(self) -> int:
        """Return a number to exchange, from which all ranks know whether to compare buffers at the next average.

        Does not synchronize with a device unless autograd has counted a change.
        """
        statistics, others = self._buffers()
        return _STATISTICS if statistics else self._content_of(others, samples=False)

    def note_digests_of_buffers(self, told: Collection[int]) -> None:
        """Process the results of `digest_of_buffers` on all ranks."""
        self._compares_buffers |= _STATISTICS in told or len(set(told)) > 1

    def averaging(self) -> AbstractContextManager[object]:
        """Return a profiler range for averages of models and optimizer states."""
        return named(self._hook, "average")

    def averaged(self, names: Collection[str], group: Group | None = None, *, are_equal: bool = True) -> None:
        """Record that these parameters were averaged or set to the same values; if not `are_equal`, only partly.

        Optimizers that average in turn count as one average of the model. An optimizer that is two or more averages
        behind another one no longer averages in turn with it, so its next average counts.
        """
        before = max(self._num_averages.values(), default=0)
        for key, optimizer in self._optimizers.items():
            if not self.layout.trained_among(parameters_of(optimizer)).keys().isdisjoint(names):
                own = self._num_averages.get(key, 0)
                self._num_averages[key] = (own if own + 1 >= before else before) + 1
        self._group.counters.averagings += max(self._num_averages.values(), default=0) - before
        if are_equal and (group is None or group.size == self._group.size):
            self.diverged.difference_update(names)

    def _alike(
        self, tensors: Mapping[str, Tensor], group: Group, told: Collection[int], owner_of: Any = None
    ) -> Mapping[str, Tensor]:
        """Return the tensors that all ranks can average, in one order. Collective if `told` differs between ranks."""
        if len(set(told)) == 1:
            return tensors
        found = alike(tensors, group, owner_of)
        if found.first_left == group.rank:
            self._warn_once(
                "left",
                f"{len(found.left)} tensors, {' '.join(found.left[0].split())!r} first, have another shape, dtype or "
                "order in memory on some other rank, or are missing there. They are not averaged: each rank keeps its "
                "own. Give all ranks the same model and optimizer",
            )
        return {name: tensors[name] for name in found.names}

    def _differing(self, others: Mapping[str, Tensor], told: Collection[int]) -> list[Tensor]:
        """Return the buffers to copy from the first rank. Collective if `told` differs between ranks."""
        if len(set(told)) == 1:
            return []
        found = alike(others, self._group, numbers=_contents(others, self._contents))
        differ = [name for name in found.differ if name not in self._counts_of_steps]
        named = differ or (found.left if found.first_left == self._group.rank else [])
        if named and (self._group.rank == 0 or not differ):
            what_is_done = "each rank keeps its own, and a checkpoint has the buffers of the rank that saves it"
            if differ and self.broadcasts_buffers:
                what_is_done = "all ranks get the first rank's at each average, as with DDP's broadcast_buffers=True"
            self._warn_once(
                "buffers",
                f"{len(named)} buffers, {named[0]!r} first, differ between ranks and are not averaged, because they "
                f"are not running statistics of normalization layers: {what_is_done}",
            )
        self._compares_others = False
        return [others[name] for name in found.differ] if self.broadcasts_buffers else []

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"hook {self._hook!r}: {text}", stacklevel=2)

    def _content_of(self, buffers: Mapping[str, Tensor], samples: bool = True) -> int:
        found = _contents(buffers, self._contents, samples)
        return number_of(repr([(kind_of(name, b), found[name]) for name, b in buffers.items()])) if buffers else 0

    def average_state_(self, stepped: OptimizerStep, group: Group | None = None) -> None:
        """Average the floating-point tensors in an optimizer's state, except its step count.

        Skips tensors that some rank lacks because its optimizer has not changed the parameter yet.
        """
        group = group or self._group
        with self.averaging():
            average_(self._agree_on_state(stepped, group), group)
        if group.size == self._group.size:
            self._states_diverged.difference_update(stepped.parameters)

    def _agree_on_state(self, stepped: OptimizerStep, group: Group) -> list[Tensor]:
        """Return the tensors of an optimizer's state to average, equal on all ranks. Collective."""
        states = _states_of(stepped.parameters, stepped.state)
        told = check_same(f"average the state of optimizer {stepped.optimizer!r}", group, kinds_of(states))
        return [*self._alike(states, group, [kinds for kinds, *_ in told], _owner_of).values()]

    def reset_state_(self, stepped: OptimizerStep) -> None:
        """Delete an optimizer's state of its parameters."""
        for parameter in stepped.parameters.values():
            stepped.state.pop(parameter, None)
        self._states_diverged.difference_update(stepped.parameters)

    def average_permanently_(self, everything: bool = False) -> None:
        """Average the tensors that differ; with `everything`, also those that no optimizer has changed."""
        self.hide()
        if everything and self._any_bit_differs("average all parameters", self.layout.trained.values()):
            self.diverged.update(self.layout.trained)
        self.show_()
        self.averaged(set(self.diverged))
        self._buffers_diverged = False
        self.keep_averages()

    def _any_bit_differs(self, what: str, tensors: Iterable[Tensor]) -> bool:
        """Return whether tensors, or running statistics, differ between ranks. Collective."""
        own = digest_of([*tensors, *self._buffers()[0].values()])
        return len({digest for digest, *_ in check_same(what, self._group, own)}) > 1

    def average_what_differs_(self) -> None:
        """Average the weights and optimizer state that local steps have changed, unless they are equal on all ranks."""
        if not (self.diverged or self._states_diverged):
            return
        stepped = [
            one for o in [*self._optimizers.values()] if (one := self.stepped(o, -1)) and self.state_diverged(one)
        ]
        states = [tensor for one in stepped for tensor in _states_of(one.parameters, one.state).values()]
        parameters = [p for name, p in self.layout.parameters.items() if name in self.diverged]
        if self._any_bit_differs("begin again with the same model", [*parameters, *states]):
            self.average_permanently_()
            for one in stepped:
                self.average_state_permanently_(one)

    def show_(self, stepped: OptimizerStep | None = None) -> None:
        """Replace each rank's own model, or its state of an optimizer, by the averages until `hide`.

        Collective; for the model after the first local step.
        """
        key = _MODEL if stepped is None else stepped.optimizer
        self.hide(key)
        if stepped is not None or self.may_differ or self.diverged:
            with self._group.counters.evaluating(), self.averaging():
                if stepped is None:
                    what = f"average {len(self.diverged)} parameters to show the model"
                    tensors, shared = self._agree(what, self.diverged, self._group, compares=True)
                else:
                    tensors, shared = self._agree_on_state(stepped, self._group), []
                own = OwnValues([*tensors, *shared])
                try:
                    average_(tensors, self._group)
                    share_(shared, self._group)
                except BaseException:
                    own.note_change()
                    own.restore()
                    raise
                own.note_change()
                self._own[key] = own
        self.shows_averages |= stepped is None

    def show_common_(self, common: Mapping[str, Tensor], permanently: bool) -> None:
        """Replace parameters that local steps have changed by the common ones that the hook keeps, until `hide`.

        Sends nothing. Buffers stay this rank's own.

        Args:
            common: parameters by name, flat in memory order.
            permanently: whether training continues from the common model.
        """
        self.hide()
        shown = self.diverged.intersection(common)
        parameters = {name: p for name, p in self.layout.parameters.items() if name in shown}
        own = OwnValues(parameters.values())
        for name, p in parameters.items():
            view = flat_view(p)
            view.copy_(common[name].view(view.shape))
        own.note_change()
        if permanently:
            self.diverged.clear()
            self._buffers_diverged = False
        else:
            self._own[_MODEL], self.shows_averages = own, True

    def shows_state(self, stepped: OptimizerStep) -> bool:
        """Return whether averages temporarily replace this rank's own state of an optimizer."""
        return stepped.optimizer in self._own

    def hide(self, key: str = _MODEL) -> None:
        """Restore each rank's own model or optimizer state, except tensors changed meanwhile, as by loading."""
        if (own := self._own.get(key)) is not None:
            own.restore()
        self.keep_averages(key)

    def keep_averages(self, key: str = _MODEL) -> None:
        """Make averages that are shown permanent: drop each rank's own model or optimizer state."""
        self._own.pop(key, None)
        self.shows_averages &= key != _MODEL

    def average_state_permanently_(self, stepped: OptimizerStep) -> None:
        """Average an optimizer's state as `average_state_` does, but count the bytes as for evaluation."""
        self.hide(stepped.optimizer)
        with self._group.counters.evaluating():
            self.average_state_(stepped)

    def ignoring_changes(self) -> list[Callable[[], None]]:
        """Ignore changes of averages that are shown, until the returned functions are called."""
        return [own.ignoring_changes() for own in self._own.values()]

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        """Return each rank's own model and optimizer state as far as they differ; empty unless the state is exact."""
        if writer.kind != "exact" or not (self.may_differ or self.diverged):
            return {}
        named = {("parameters", name): p for name, p in self.layout.parameters.items() if name in self.diverged}
        if self.average_buffers:
            named |= {("buffers", name): buffer for name, buffer in self.layout.float_buffers().items()}
        for key, optimizer in self._optimizers.items():
            names = [(self.layout.name_of(p), p) for p in parameters_of(optimizer)]
            diverged = {name: p for name, p in names if name is not None and name in self._states_diverged}
            named |= {(key, name): tensor for name, tensor in _states_of(diverged, optimizer.state).items()}
        by_name = {"\n".join(path): tensor for path, tensor in named.items()}
        told = check_same("save the models of ranks", self._group, kinds_of(by_name), self._buffers_diverged)
        if not (self.diverged or self._states_diverged or any(diverged for _, diverged, *_ in told)):
            return {}
        found = self._alike(by_name, self._group, [kinds for kinds, *_ in told], lambda name: name.rpartition("\n")[0])
        own = {key: tensor for values in self._own.values() for key, tensor in values.by_id().items()}
        saved: dict[str, Any] = {
            "parameters": {},
            "buffers": {},
            "optimizers": {},
            "compares_buffers": self._compares_buffers,
        }
        for path, tensor in found.items():
            part = own_part(tensor)
            copies = writer.per_rank(own.get(id(part), part.data))
            section, name, *kind = path.split("\n")
            if kind:
                saved["optimizers"].setdefault(section, {}).setdefault(name, {})[kind[0]] = copies
            else:
                saved[section][name] = copies
        return saved

    def stage(self, saved: Mapping[str, Any], reader: StateReader) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a tensor and its saved value, for `restore`; changes nothing yet."""
        # A parameter that was unfrozen later is still frozen when a run resumes.
        parameters = self.layout.parameters
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
        """Restore each rank's own model, or record that all ranks have loaded the same one."""
        self.keep_averages()
        self._own.clear()
        for tensor, value in staged:
            tensor.data.copy_(value)
        count_up(tensor for tensor, _ in staged)
        self.diverged = set(saved.get("parameters", {}))
        self._buffers_diverged = bool(saved.get("buffers", {}))
        self._compares_buffers = saved.get("compares_buffers", True)
        self.may_differ = bool(saved)
        self._states_diverged = {name for states in saved.get("optimizers", {}).values() for name in states}


class OwnValues:
    """A copy of each rank's own values of tensors that are about to hold averages."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [*tensors]
        self._copies = [own_part(tensor).data.clone() for tensor in self._tensors]

    def note_change(self) -> None:
        """Tell autograd that the tensors now hold averages, to notice later changes, such as loaded weights."""
        count_up(self._tensors)
        self._versions = [version_of(tensor) for tensor in self._tensors]

    def by_id(self) -> dict[int, Tensor]:
        """Return the copies by the `id` of the tensor."""
        return {id(own_part(tensor)): copy for tensor, copy in zip(self._tensors, self._copies, strict=True)}

    def restore(self) -> None:
        """Restore the values, except in tensors that were changed meanwhile."""
        restored = [
            (tensor, copy)
            for tensor, copy, version in zip(self._tensors, self._copies, self._versions, strict=True)
            if version_of(tensor) == version and own_part(tensor).shape == copy.shape
        ]
        for tensor, copy in restored:
            own_part(tensor).data.copy_(copy)
        count_up(tensor for tensor, _ in restored)

    def ignoring_changes(self) -> Callable[[], None]:
        """Ignore changes until the returned function is called."""
        same = [version_of(tensor) == version for tensor, version in zip(self._tensors, self._versions, strict=True)]

        def note_again() -> None:
            noted = zip(self._tensors, self._versions, same, strict=True)
            self._versions = [version_of(tensor) if is_same else version for tensor, version, is_same in noted]

        return note_again


def count_up(tensors: Iterable[Tensor]) -> None:
    """Tell autograd of a change, so that it rejects a backward through earlier computations."""
    # A buffer that was created in inference mode has no version.
    increment_version([own_part(tensor) for tensor in tensors if not tensor.is_inference()])


def version_of(tensor: Tensor) -> int:
    """Return autograd's count of changes to a tensor and to this rank's part of it; -1 if it does not count."""
    if tensor.is_inference():
        return -1
    # An operation of a sharded tensor, as in `load_state_dict`, counts for that tensor only.
    part = own_part(tensor)
    return part._version if part is tensor else part._version + tensor._version


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
    """Return all parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _states_of(parameters: Mapping[str, Tensor], state: Mapping[Tensor, Any]) -> dict[str, Tensor]:
    """Return the floating-point tensors of an optimizer's state, by parameter name and key, joined by a newline."""
    states = ((name, _floating_point(state.get(p, {}))) for name, p in parameters.items())
    return {f"{name}\n{key}": tensor for name, tensors in states for key, tensor in tensors.items()}


def _owner_of(name: str) -> str:
    """Return the name of the parameter that a tensor of an optimizer's state belongs to."""
    return name.partition("\n")[0]


def _contents(
    buffers: Mapping[str, Tensor],
    known: dict[str, tuple[weakref.ref[Tensor], int, bytes, int]],
    samples: bool = True,
) -> dict[str, int]:
    """Return a digest of each buffer.

    Buffers are read again only if autograd or a sample shows a change from `known`, the previous digests.
    """
    found: dict[str, int] = {}
    for name, buffer in buffers.items():
        before, version, _, number = known.get(name, (None, 0, b"", 0))
        if before is not None and before() is buffer and version == version_of(buffer):
            found[name] = number
    read = [name for name in buffers if samples or name not in found]
    for name, sample in zip(read, _samples([buffers[name] for name in read]), strict=True):
        buffer = buffers[name]
        if name not in found or known[name][2] != sample:
            found[name] = digest_of([buffer])
            known[name] = weakref.ref(buffer), version_of(buffer), sample, found[name]
    return found


def _samples(tensors: list[Tensor]) -> list[bytes]:
    """Return some elements of each tensor as bytes, with one copy from each device."""
    some = []
    for tensor in tensors:
        flat = flat_view(tensor).reshape(-1)
        some.append(flat[:: max(1, flat.numel() // _SAMPLE)].contiguous().view(torch.uint8))
    found: dict[int, bytes] = {}
    for device in {part.device for part in some}:
        here = {i: part for i, part in enumerate(some) if part.device == device}
        on_host = torch.cat([*here.values()]).cpu()
        whole = ctypes.string_at(on_host.data_ptr(), on_host.numel())
        for i, part in here.items():
            found[i], whole = whole[: part.numel()], whole[part.numel() :]
    return [found[i] for i in range(len(some))]


def _floating_point(state: Mapping[str, Any]) -> dict[str, Tensor]:
    if any(isinstance(v, Tensor) and v.numel() > 1 and not is_continuous(v) for v in state.values()):
        return {}  # quantized: averaging the scales without the codes is meaningless
    # Sorted: the order may differ between ranks.
    tensors = {k: v for k, v in sorted(state.items()) if isinstance(v, Tensor) and k != "step"}
    return {k: v for k, v in tensors.items() if is_continuous(v)}
