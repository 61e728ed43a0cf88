"""Connects optimizers to a hook that averages models; called on the main thread, and runs in turn with the hook."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.averages_models import AveragesModels, averages_models
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.models import Models, OptimizerStep, parameters_of
from lightning_commhooks.interface.wrapper import after_optimizer_step, ends_local_steps
from lightning_commhooks.runtime.optimizers import (
    ObservedSteps,
    Verdict,
    check_optimizer,
    inner_optimizers,
    register_step_hooks,
    state_differs_since_closed,
    warn_if_it_steps_on,
)

# Number of backwards without an optimizer step before a warning; fewer may be gradient accumulation.
MANY_STEPS = 256
# Advice on where to evaluate the model.
_OF_ONE_RANK = (
    "evaluate within `with attachment.averaged_weights():` on all ranks, or after a barrier if that shows the average"
)
_OF_ONE_REPLICA = (
    "look at the model after an average of the hook, as when manager.current_step() has changed; it is the same on all "
    "replicas then"
)

_OF_COMMON = "evaluate within `with attachment.averaged_weights():`, which shows the common model"

if TYPE_CHECKING:
    from lightning_commhooks.runtime.runtime import Runtime


class LocalSteps:
    """Reports optimizer steps to a hook, and averages models for evaluation and saving.

    Attributes:
        models: the ranks' copies of the model.
        find_optimizers: returns the optimizers; called in each synchronized backward.
        reported_by_user: whether optimizers that are not known yet may step.
    """

    def __init__(self, runtime: Runtime, group: Group, is_scaled: bool = False) -> None:
        self._runtime = runtime
        # Handles of the optimizers that report their steps, and all known optimizers, by `OptimizerStep.optimizer`.
        # An optimizer that the user has replaced is freed.
        self._handles: WeakKeyDictionary[Optimizer, list[RemovableHandle]] = WeakKeyDictionary()
        self._optimizers: dict[str, Optimizer] = {}
        self._steps = ObservedSteps(is_scaled)
        # For steps that are not counted yet, by optimizer: whether they changed anything.
        self._verdicts: dict[str, list[Verdict]] = {}
        # Number of backwards at each optimizer's last step.
        self._stepped_at: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        # Whether the present step follows no synchronized backward, and whether any did since the last average.
        self._lacks_backward = self._unsynchronized = False
        # Functions that end ignoring a step that only creates state.
        self._end_ignoring: list[Callable[[], None]] = []
        self.models = Models(group, self._optimizers, runtime.name)
        self.models.ranks_change = runtime.source.ranks_change
        self.find_optimizers: Callable[[], Iterable[Optimizer]] = list
        self.reported_by_user = False
        # Whether the user reports steps, by `after_step`.
        self._reports = False
        self._warned: set[str] = set()
        self._last_reported = -1
        # Number of the optimizers' parameters when they were checked.
        self._num_checked = -1
        # Number of open `with` blocks that show the averages.
        self._num_blocks = 0

    def add(self, optimizer: Optimizer, num_steps: int = 0) -> None:
        """Watch an optimizer, which has taken `num_steps` steps before, and the optimizers that it wraps."""
        check_optimizer(optimizer)
        if optimizer not in self._handles:
            self._handles[optimizer] = register_step_hooks(optimizer, self._before_own_step, self._after_own_step)
            for inner in inner_optimizers(optimizer):
                self.add(inner, num_steps)
        stepped = self.models.stepped(optimizer, -1)  # registers its key, for loading a state
        if stepped is not None:
            self.models.num_steps.setdefault(stepped.optimizer, num_steps)
            if state_differs_since_closed(optimizer):
                self.models.diverge_state(stepped)
        self._num_checked = -1

    def begin_at(self, steps: int, num_steps: Mapping[str, int]) -> None:
        """Set the number of synchronized backwards, and of steps by optimizer, 0 for the remaining optimizers."""
        self._verdicts.clear()
        self.models.num_undecided.clear()
        # Leave out optimizers that no longer exist: they will never step.
        self.models.num_steps = {key: num_steps.get(key, 0) for key in self._optimizers}
        bound = self._runtime.bound
        if steps and averages_models(bound):
            before = {key: max(0, num - 1) for key, num in self.models.num_steps.items()}
            bound.begin_backward(steps - 1, before or {"": steps - 1})

    def set_optimizers(self, optimizers: Collection[Optimizer] | Callable[[], Iterable[Optimizer]] | None) -> None:
        """Process the argument `optimizers` of `attach`."""
        if callable(optimizers):
            self.find_optimizers = optimizers
        elif optimizers is not None:
            self.reported_by_user = self._reports = not optimizers
            self.models.note_given(optimizers)
            for optimizer in optimizers if self._runtime.bound.averages_models else ():
                self.add(optimizer)

    def _is_hooked(self, optimizer: Optimizer) -> bool:
        return any(optimizer.param_groups is hooked.param_groups for hooked in self._handles)

    def begin_backward(self, step: int) -> None:
        """Prepare for a synchronized backward, when it begins."""
        bound = self._runtime.bound
        if not isinstance(bound, AveragesModels) or not bound.averages_models:
            return
        found = list(self.find_optimizers())
        for optimizer in found:
            if not self._is_hooked(optimizer):
                self.models.note_given(found)
                self.add(optimizer, step)
        if self._reports:
            self._steps.before_any(self.models.layout.trained.values())
        bound.begin_backward(step, self.models.num_steps)
        is_local = bound.is_local(step)
        if is_local and bound.average_buffers:
            # Also where the optimizer skips the step.
            self.models.buffers_diverge()
        self._check_steps()
        # No step is local while there are no other replicas, but they may join.
        if is_local or self._runtime.source.ranks_change:
            self._check_optimizers()

    def _check_optimizers(self) -> None:
        name, optimizers = self._runtime.name, {*self._handles, *self._optimizers.values()}
        num = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
        if num == self._num_checked:
            return
        self._num_checked = num
        known = {p for optimizer in optimizers for p in parameters_of(optimizer)}
        unknown = [name for name, p in self.models.layout.trained.items() if p not in known]
        if added := self.models.layout.added(known):
            warnings.warn(
                f"{len(added)} parameters, {added[0]!r} first, are new in the model since hook {name!r} was attached, "
                "and are never averaged: wrap the module in DistributedDataParallel again, then Attachment.move_to()",
                stacklevel=2,
            )
        if self.reported_by_user or not unknown:
            return
        fix = f"attach(model, {name!r}, optimizers=[...]), or Attachment.add_optimizer()"
        if len(unknown) == len(self.models.layout.trained):
            raise HookError(f"hook {name!r} averages models after optimizer steps, and knows no optimizer: write {fix}")
        warnings.warn(
            f"{len(unknown)} trained parameters, {unknown[0]!r} first, are in no optimizer that hook {name!r} knows "
            f"and are never averaged. If an optimizer trains them, write {fix}; if it has stepped before, also "
            "Attachment.average_weights() on all ranks",
            stacklevel=2,
        )

    def _check_steps(self) -> None:
        steps = self._runtime.clock.steps
        if self._last_reported < 0:
            self._last_reported = steps
        if steps - self._last_reported > MANY_STEPS:
            self._warn_once(
                "steps",
                f"hook {self._runtime.name!r}: no optimizer that it knows has stepped in {MANY_STEPS} "
                "backwards, so models were not averaged. For an optimizer made since: Attachment.add_optimizer(). For "
                "one that steps otherwise than by step(): attach(model, hook, optimizers=[]), and "
                "Attachment.after_optimizer_step(optimizer) after each of its steps",
            )

    def _only_creates_state(self, optimizer: Optimizer) -> bool:
        """Return whether a step is one of `torch.distributed.checkpoint`, which creates an optimizer's state.

        Such a step follows no backward, and has a learning rate of 0.
        """
        if self._stepped_at.get(optimizer, 0) != self._runtime.counters.steps:
            return False
        return all(float(group.get("lr", 1)) == 0 for group in optimizer.param_groups)

    def _before_own_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        if self._only_creates_state(optimizer):
            self._end_ignoring = self.models.ignoring_changes()
            return
        self._steps.begin(optimizer, frame)
        if self.models.shows_averages and self.models.stepped(optimizer, -1) is not None:
            self.hide_average()
            self._refuse_within_block()

    def _refuse_within_block(self) -> None:
        if self.models.shows_averages:
            with self._runtime.aborting():
                raise HookError("an optimizer stepped within averaged_weights(), which is for evaluation and saving")

    def after_step(self, optimizer: Optimizer) -> None:
        """Process a step that the user reports."""
        check_optimizer(optimizer)
        if self._is_hooked(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} reports its steps by itself since it was given to the hook; call "
                "after_optimizer_step() for optimizers that were not"
            )
        self._reports = True
        self._lacks_backward = self._is_unsynchronized(optimizer)
        self._stepped_at[optimizer] = self._runtime.counters.steps
        self._after_step(optimizer, self._steps.after(optimizer, {}))

    def _after_own_step(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        if self._only_creates_state(optimizer):
            for end_ignoring in self._end_ignoring:
                end_ignoring()
            self._end_ignoring = []
            return
        if not (ended := self._steps.end(optimizer, options)):
            return  # it is within another step
        # Only now: the step may have called a closure with the backward.
        self._lacks_backward = self._is_unsynchronized(optimizer)
        self._stepped_at.update(dict.fromkeys((optimizer, *(one for one, _ in ended)), self._runtime.counters.steps))
        for one, verdict in ended:
            self._after_step(one, verdict)

    def _after_step(self, optimizer: Optimizer, verdict: Verdict) -> None:
        stepped = self.models.stepped(optimizer, self._runtime.clock.steps - 1)
        if stepped is None:
            return
        self._last_reported = self._runtime.clock.steps
        self._refuse_within_block()
        bound = self._runtime.bound
        is_local = stepped.step >= 0 and bound.is_local(stepped.step)
        if self._lacks_backward and not is_local and bound.group.size > 1:
            # Not averaged here: each rank decides by itself whether to take such a step.
            self._unsynchronized = True
            self._warn_once(
                "unsynchronized",
                f"hook {self._runtime.name!r}: an optimizer stepped after a backward in no_sync(), before a "
                "synchronized backward has begun local steps. Ranks differ, and the hook does not average them. Leave "
                "no_sync() out: the hook sends nothing in local steps",
            )
        with self._runtime.counters.timing.wait():
            with self._runtime.aborting():
                counted = dataclasses.replace(stepped, num_steps=self._num_counted(stepped, verdict))
            quorum = self._runtime.source.quorum
            if quorum is None:
                self._runtime.call(lambda: self._report(counted), True)
            else:
                quorum.average(counted, lambda: self._runtime.call(lambda: self._report(counted), True))

    def _is_unsynchronized(self, optimizer: Optimizer) -> bool:
        """Return whether no backward since this optimizer's last step was synchronized, and the last was not."""
        is_first = self._stepped_at.get(optimizer, 0) != self._runtime.counters.steps
        return not (is_first or self._runtime.passes.last_synchronizes)

    def _num_counted(self, stepped: OptimizerStep, verdict: Verdict) -> int:
        """Return the number of steps to count now, rank-uniform: 0 until a decision depends on it.

        A decision depends on it if the hook would communicate provided that every step changed something.
        """
        key, bound = stepped.optimizer, self._runtime.bound
        verdicts = self._verdicts.setdefault(key, [])
        verdicts.append(verdict)
        self.models.num_undecided[key] = len(verdicts)
        if not averages_models(bound):
            verdicts.clear()
            return 0
        most = dataclasses.replace(stepped, num_steps=len(verdicts))
        communicates = bound.communicates_after(most) or ends_local_steps(bound, most)
        if communicates and not bound.is_local(stepped.step):
            # Local steps may begin, and that depends on the steps of all optimizers.
            self._runtime.call(lambda: self.count(but=key), True)
        if not self._may_differ(key):
            is_known = all(isinstance(one, bool) for one in verdicts)
            return self._count(key) if communicates or is_known else 0
        if not communicates:
            return 0
        return self._runtime.call(lambda: self._count(key), True)

    def count(self, but: str = "") -> None:
        """Count the steps that are not counted yet, as before a state is saved. Collective."""
        for key in sorted(key for key, verdicts in self._verdicts.items() if verdicts and key != but):
            stepped = self.models.stepped(self._optimizers[key], self._runtime.clock.steps - 1)
            num = self._count(key)
            if stepped is not None:
                self._report(dataclasses.replace(stepped, num_steps=num))

    def _may_differ(self, key: str) -> bool:
        """Return whether ranks that average after the same step may have counted different numbers of steps."""
        return self._runtime.is_even and self._steps.differ(self._optimizers[key])

    def _count(self, key: str) -> int:
        """Count the steps that changed something; if ranks may differ, use the largest count."""
        verdicts, self._verdicts[key] = self._verdicts[key], []
        self.models.num_undecided[key] = 0
        num = sum(one if isinstance(one, bool) else bool(one.wait()) for one in verdicts)
        if self._may_differ(key):
            num = max(own for (own,) in self._runtime.bound.group.all_gather_quietly([num]))
        self.models.num_steps[key] = self.models.num_steps.get(key, 0) + num
        return num

    def _report(self, stepped: OptimizerStep) -> None:
        bound = self._runtime.bound
        try:
            with self._runtime.counters.timing.work():
                after_optimizer_step(bound, stepped)
        except Exception as error:
            where = f"after the optimizer's step {stepped.step} ({stepped.optimizer}, ...)"
            raise self._runtime.failed(bound.group, where, error) from error

    @property
    def num_optimizers(self) -> int:
        """Number of known optimizers of the model."""
        return len(self._optimizers)

    @property
    def keeps_own_buffers(self) -> bool:
        """Whether each rank had its own buffers in the last backward."""
        bound, step = self._runtime.bound, self._runtime.clock.steps - 1
        return averages_models(bound) and bound.average_buffers and step >= 0 and bound.is_local(step)

    def average(self, everything: bool = False) -> None:
        """Permanently average the tensors that differ between ranks, or the whole model."""
        self._begin("average_weights()", everything)
        if self.models.ranks_change:
            self.models.show_common_(self.common_model(), permanently=True)
        else:
            self._runtime.call(lambda: self.models.average_permanently_(everything))
            self._unsynchronized = False
        self._runtime.source.weights_replaced()

    def average_state(self, optimizer: Optimizer, everything: bool = False) -> None:
        """Permanently average the state of an optimizer; with `everything`, also if no local step changed it."""
        if everything and (changed := self.models.stepped(optimizer, -1)) is not None:
            self.models.diverge_state(changed)
        # Replicas that come and go keep their own.
        if not self.models.ranks_change and (stepped := self._with_own_state(optimizer)) is not None:
            self._runtime.begin_together("average_optimizer_state()")
            self._runtime.call(lambda: self.models.average_state_permanently_(stepped))

    @contextmanager
    def averaged(self, optimizers: Iterable[Optimizer] = (), *, model: bool = True) -> Iterator[None]:
        """Replace each rank's own model and state of optimizers by the averages within a `with`."""
        models, was_shown = self.models, self.models.shows_averages
        states: list[str] = []
        if model and not self._num_blocks:
            self._show("averaged_weights()")
        self._num_blocks += model
        try:
            for optimizer in () if models.ranks_change else optimizers:
                stepped = self._with_own_state(optimizer)
                if stepped is not None and not models.shows_state(stepped):
                    self._runtime.begin_together("averaged_optimizer_state()")
                    self._runtime.call(functools.partial(models.show_, stepped))
                    states.append(stepped.optimizer)
            yield
        finally:
            for key in states:
                models.hide(key)
            self._num_blocks -= model
            if model and not (self._num_blocks or was_shown):
                self._hide()

    def _with_own_state(self, optimizer: Optimizer) -> OptimizerStep | None:
        stepped = self.models.stepped(optimizer, -1)
        return stepped if stepped is not None and self.models.state_diverged(stepped) else None

    def show_average(self) -> None:
        """Replace each rank's own model by the averages until the next forward that trains."""
        if not self._num_blocks:
            self._show("show_average()")

    def _show(self, what: str) -> None:
        self._begin(what)
        if self.models.ranks_change:
            self.models.show_common_(self.common_model(), permanently=False)
        else:
            self._runtime.call(self.models.show_)
        self._runtime.source.weights_replaced()

    def _hide(self) -> None:
        if self.models.shows_averages:
            self.models.hide()
            self._runtime.source.weights_replaced()

    def common_model(self) -> Mapping[str, Tensor]:
        """Return the parameters as they were after the last average, by name, if the hook keeps them."""
        bound = self._runtime.bound
        return bound.common_model() if averages_models(bound) else {}

    def _begin(self, what: str, everything: bool = False) -> None:
        """End the last step, and wait for all ranks if models may have to be averaged."""
        models, ranks_change = self.models, self.models.ranks_change
        if ranks_change and models.differ and not self.common_model():
            raise ValueError(f"replicas that come and go do not average when one of them asks: {_OF_ONE_REPLICA}")
        step = self._runtime.clock.steps - 1
        is_local = step >= 0 and self._runtime.bound.is_local(step)
        models.may_differ |= is_local
        if is_local and 0 <= self._last_reported < step and not ranks_change:
            # Perhaps an optimizer that the hook does not know has stepped.
            models.diverged.update(models.layout.trained)
        if self._unsynchronized and not (is_local or ranks_change):
            for optimizer in self._optimizers.values():
                if (stepped := models.stepped(optimizer, step)) is not None:
                    models.diverge(stepped)
        if not ranks_change and (everything or models.may_differ or models.diverged):
            self._runtime.begin_together(what)
        else:  # nothing is sent
            self._runtime.clock.end()

    def hide_average(self) -> None:
        """Restore this rank's own model after `show_average`, unless it is within a `with` that shows averages."""
        if not self._num_blocks:
            self._hide()

    def before_forward(self, is_training: bool) -> None:
        """Process a forward of the DDP model before it begins."""
        if torch.is_grad_enabled():
            self.hide_average()
        elif not is_training and self.models.differ:
            fix = _OF_ONE_RANK
            if self.models.ranks_change:
                fix = _OF_COMMON if self.common_model() else _OF_ONE_REPLICA
            self._warn_once(
                "evaluated",
                f"hook {self._runtime.name!r}: a forward in eval mode sees this rank's own model, not the average of "
                f"all: {fix}",
            )
        if is_training and self.keeps_own_buffers:
            self.models.buffers_diverge()

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=2)

    def close(self) -> list[str]:
        """Release the model and the optimizers; return warnings for the user."""
        diverged = len(self.models.diverged)
        for optimizer in self._handles:
            if self._with_own_state(optimizer) is not None:
                warn_if_it_steps_on(optimizer, self._runtime.name)
        for handle in itertools.chain(*self._handles.values()):
            handle.remove()
        self._handles.clear()
        self._optimizers.clear()
        self._stepped_at.clear()
        self.models.layout = Layout(nn.Module())
        if not diverged or self.models.shows_averages:
            self.models.keep_averages()
            return []
        fix = "call Attachment.average_weights() at the end of training"
        if self.models.ranks_change and not self.common_model():
            fix = "end training after an average"
        return [f"hook={self._runtime.name!r} ended while {diverged} parameters differed between ranks; {fix}"]
