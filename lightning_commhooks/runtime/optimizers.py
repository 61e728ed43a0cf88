"""Optimizers that support local steps, and detection of their steps."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.interface.models import parameters_of, version_of
from lightning_commhooks.runtime.finite_steps import OnHost

_DYNAMO = os.path.join("torch", "_dynamo")
_SHARDED = "keeps its state in shards and exchanges parameters itself at every step, so ranks cannot step alone"
_REFUSED = {
    "ZeroRedundancyOptimizer": f"{_SHARDED}; use the optimizer that it wraps",
    "DistributedOptimizer": f"{_SHARDED}; use an optimizer of torch.optim",
    "PostLocalSGDOptimizer": "averages models itself; use the optimizer that it wraps",
}


def check_optimizer(optimizer: object) -> None:
    """Require an optimizer that can take local steps."""
    # A user of these optimizers has imported the module; importing it here would take a second and give a warning.
    theirs = sys.modules.get("torch.distributed.optim")
    for name, reason in _REFUSED.items():
        if isinstance(optimizer, getattr(theirs, name, ())):
            raise ValueError(f"hooks that average models do not work with {type(optimizer).__name__}: it {reason}")
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise ValueError(f"not an optimizer: {optimizer!r}")


def register_step_hooks(
    optimizer: Optimizer,
    before: Callable[[Optimizer, FrameType], None],
    after: Callable[[Optimizer, Mapping[str, Any]], None],
) -> list[RemovableHandle]:
    """Call `before` with the frame of each step of an optimizer, and `after` with its keyword arguments."""
    if not hasattr(optimizer, "register_step_post_hook"):
        raise ValueError(
            f"{type(optimizer).__name__} has no register_step_post_hook, because it is no torch.optim.Optimizer; "
            "call Attachment.after_optimizer_step(optimizer) after each of its steps instead"
        )
    if callable(getattr(optimizer, "eval", None)):
        warnings.warn(
            f"{type(optimizer).__name__}.eval() replaces the model's weights by its own, which are not averaged over "
            "ranks: call Attachment.average_weights() before eval()",
            stacklevel=3,
        )
    # A step may be compiled.
    return [
        optimizer.register_step_pre_hook(torch.compiler.disable(lambda stepping, *_: before(stepping, _caller()))),
        optimizer.register_step_post_hook(
            torch.compiler.disable(lambda stepping, args, options: after(stepping, options))
        ),
    ]


def _caller() -> FrameType:
    """Return the frame that called the hook that calls this function, not a frame of `torch.compiler.disable`."""
    frame = sys._getframe(2)
    while _DYNAMO in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return frame


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that this one wraps: optimizers in its attributes that share its parameters."""
    own, found = _ids(optimizer), []
    for value in vars(optimizer).values():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, Optimizer) and one is not optimizer and own & _ids(one):
                found.append(one)
    return found


def _ids(optimizer: Optimizer) -> set[int]:
    return set(map(id, parameters_of(optimizer)))


# Whether a step changed anything; on CUDA an object that knows once the device has reached this point.
Verdict = bool | OnHost


class ObservedSteps:
    """Finds out which optimizers have stepped, and whether a step changed anything.

    Steps may be nested: an optimizer may wrap other optimizers, or call the step of its base class. Fused optimizers
    skip steps under a `GradScaler`, and some optimizers skip steps themselves.

    Args:
        is_scaled: whether a known `GradScaler` skips the same steps on all ranks.
    """

    def __init__(self, is_scaled: bool) -> None:
        self._is_scaled = is_scaled
        # The frame of the step is stored as its `id` and code: the frame itself would keep the model alive.
        self._under_way: list[tuple[Optimizer, tuple[int, CodeType]]] = []
        self._ended: dict[Optimizer, Verdict] = {}
        # Autograd's versions of parameters before a step, by the parameter's `id`.
        self._versions: dict[int, int] = {}
        # Optimizers whose changes autograd notices. An optimizer's own kernels may change parameters unnoticed.
        self._are_seen: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._have_unknown_scaler: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def begin(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Record the parameters before a step, which begins in a Python frame."""
        if self._under_way:
            # Drop steps that raised an exception: `end` was not called for them.
            running = {(id(one), one.f_code) for one, _ in traceback.walk_stack(frame.f_back)}
            while self._under_way and self._under_way[-1][1] not in running:
                self._under_way.pop()
        if not self._under_way:
            self._ended = {}
        self._under_way.append((optimizer, (id(frame), frame.f_code)))
        if not _is_stock(optimizer):
            self.before_any(parameters_of(optimizer))

    def end(self, optimizer: Optimizer, options: Mapping[str, Any]) -> list[tuple[Optimizer, Verdict]]:
        """Record that a step ends; if it is the outermost, return the optimizers that have stepped, each once.

        Skips a wrapper whose parameters were all updated by inner optimizers.
        """
        verdict = self.after(optimizer, options)
        while self._under_way and self._under_way.pop()[0] is not optimizer:
            pass
        self._ended[optimizer] = verdict
        if self._under_way:
            return []
        ended, self._ended = [*self._ended.items()], {}
        stepped: set[int] = set()
        innermost = []
        for one, own in ended:
            if not (ids := _ids(one)) <= stepped:
                innermost.append((one, own))
            stepped |= ids
        return innermost

    def before_any(self, parameters: Iterable[Tensor]) -> None:
        """Record parameters before a possible step of an unknown optimizer."""
        self._versions.update((id(p), version_of(p)) for p in parameters)

    def after(self, optimizer: Optimizer, options: Mapping[str, Any]) -> Verdict:
        """Return whether the step that has just ended, with these keyword arguments, changed anything."""
        found_inf = _found_inf(optimizer, options.get("grad_scaler"))
        if found_inf is not None:
            if not self._is_scaled and optimizer not in self._have_unknown_scaler:
                self._have_unknown_scaler[optimizer] = True
                warnings.warn(
                    f"{type(optimizer).__name__} is stepped by a GradScaler that the hook does not know, so ranks may "
                    "skip different steps: attach(..., grad_scaler=scaler)",
                    stacklevel=2,
                )
            moved = found_inf == 0
            return OnHost(moved) if moved.is_cuda else bool(moved)
        if _is_stock(optimizer):
            return True
        if any(self._versions.get(id(p)) != version_of(p) for p in parameters_of(optimizer)):
            return self._are_seen.setdefault(optimizer, True)
        return optimizer not in self._are_seen

    def differ(self, optimizer: Optimizer) -> bool:
        """Return whether ranks may skip different steps of an optimizer."""
        return not _is_stock(optimizer) or optimizer in self._have_unknown_scaler


def _is_stock(optimizer: Optimizer) -> bool:
    """Return whether the step is PyTorch's own, which never skips."""
    return getattr(getattr(type(optimizer), "step", None), "__module__", "").startswith("torch.optim.")


def _found_inf(optimizer: Optimizer, grad_scaler: Any) -> Tensor | None:
    """Return a `GradScaler`'s flag for an optimizer that skips steps itself: above 0 to skip the step."""
    given: object = getattr(optimizer, "found_inf", None)
    if given is None and isinstance(grad_scaler, torch.amp.GradScaler):
        per_device = grad_scaler._found_inf_per_device(optimizer)
        given = sum(per_device.values()) if per_device else None
    return given if isinstance(given, Tensor) else None


# Hooks that warn of further steps, for optimizers whose state differed between ranks when their hook was closed.
_closed: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


def warn_if_it_steps_on(optimizer: Optimizer, hook: str) -> None:
    """Warn once if an optimizer steps after its hook was closed, when its state differed between ranks."""
    if not any(isinstance(v, Tensor) and v.numel() > 1 for state in optimizer.state.values() for v in state.values()):
        return

    def warn(stepping: Optimizer, *_: object) -> None:
        if not state_differs_since_closed(stepping):
            return
        warnings.warn(
            f"the state of {type(stepping).__name__} differs between ranks since they stepped alone with "
            f"hook={hook!r}, which is closed: weights drift apart even if gradients are averaged. Before closing, call "
            "Attachment.average_optimizer_state(optimizer); or make a new optimizer",
            stacklevel=3,
        )

    _closed[optimizer] = optimizer.register_step_pre_hook(warn)


def state_differs_since_closed(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's state differed when its hook was closed, and clear that record."""
    handle = _closed.pop(optimizer, None)
    if handle is not None:
        handle.remove()
    return handle is not None
