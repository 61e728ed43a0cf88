"""A wrapper that chooses a hook for each parameter by name."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.averages_models import AveragesModels, averages_models, common_choice_of_buffers
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hook import BoundHook, CommHook, reduce_with
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.precision import all_finite
from lightning_commhooks.interface.registry import get_hook, get_inner_hook
from lightning_commhooks.interface.wrapper import BoundWrapper, after_optimizer_step
from lightning_commhooks.wrappers.hook_name import HookName


@dataclass(frozen=True)
class PerParameter(CommHook):
    """Use different hooks for different parameters, by patterns of their names.

    For example, `PerParameter({"*embed*": "bf16", "*norm*": "allreduce", "*": "int8"})`. Patterns are shell patterns
    (`fnmatch`: `*`, `?`, `[...]`); case matters, `*` also matches dots, and the first match counts. Names are the keys
    of `model.state_dict()`, without the prefixes of DDP, `torch.compile` and other wrappers. Parameters with the same
    hook are averaged together, in one pass for each bucket.

    Args:
        hooks: hooks by pattern, in order; each hook is a name or a `CommHook`.

    Raises:
        ValueError: there is no pattern, or a hook is unknown. When attached: no pattern matches a parameter.
    """

    name: ClassVar[str] = "per_parameter"

    hooks: Mapping[str, CommHook | HookName]

    def __post_init__(self) -> None:
        is_mapping = isinstance(self.hooks, Mapping) and all(isinstance(pattern, str) for pattern in self.hooks)
        if not is_mapping or not self.hooks:
            raise ValueError(f"hooks must be a dict of hooks by pattern, such as {{'*': 'int8'}}, got {self.hooks!r}")
        hooks = {p: get_inner_hook(hook, f"hooks: for pattern {p!r}: ") for p, hook in self.hooks.items()}
        object.__setattr__(self, "hooks", hooks)

    def __hash__(self) -> int:
        return hash(tuple(self.hooks.items()))

    def __eq__(self, other: object) -> bool:
        # The order matters.
        return isinstance(other, PerParameter) and list(self.hooks.items()) == list(other.hooks.items())

    @property
    def inner_hooks(self) -> tuple[CommHook, ...]:
        hooks = [get_hook(hook) for hook in self.hooks.values()]
        return tuple(hook for i, hook in enumerate(hooks) if hook not in hooks[:i])

    def pattern_of(self, name: str) -> str:
        """Return the first pattern that matches a parameter.

        Raises:
            ValueError: no pattern matches.
        """
        for pattern in self.hooks:
            if fnmatch.fnmatchcase(name, pattern):
                return pattern
        raise ValueError(
            f"PerParameter has no hook for parameter {name!r}, only for {', '.join(map(repr, self.hooks))}; add a "
            "pattern for it, or '*': 'allreduce' at the end for all remaining parameters"
        )

    def check_parameters(self, names: Sequence[str]) -> list[str]:
        patterns = {name: self.pattern_of(name) for name in names}
        texts = []
        for pattern in self.hooks:
            if pattern in patterns.values() or not names:
                continue
            matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            why = f"matches no parameter; there are {names[0]!r} and {len(names) - 1} more"
            if matched:
                why = f"comes after {patterns[matched[0]]!r}, which matches {matched[0]!r} too; put it first"
            texts.append(f"PerParameter: the pattern {pattern!r} {why}. Its hook does nothing")
        for hook in self.inner_hooks:
            texts += hook.check_parameters([name for name in names if self.hooks[patterns[name]] == hook])
        return texts

    def bind(self, group: Group) -> BoundHook:
        return _BoundPerParameter(self, group)


class _BoundPerParameter(BoundWrapper):
    def __init__(self, config: PerParameter, group: Group) -> None:
        self._config = config
        self._configs = config.inner_hooks
        self._hooks = [hook.bind(group) for hook in self._configs]
        super().__init__(self._hooks, dict(enumerate(self._configs)))
        self.mixes_averages = self.mixes_averages or len({hook.averages_models for hook in self._hooks}) > 1
        self.average_buffers = common_choice_of_buffers(self._hooks, "PerParameter")
        self._found: dict[str, int] = {}
        # Parameters with averaged gradients in steps in which other parameters were local. Ranks clip gradients by
        # different norms in such steps, so these parameters drift apart as well.
        self._drifting = self.numbers["drifting"] = {}

    def change_inner(self, change: Callable[[BoundHook], BoundHook]) -> None:
        self._hooks = [change(hook) for hook in self._hooks]

    def _index(self, name: str) -> int:
        """Return the place of a parameter's hook."""
        if name not in self._found:
            hook = get_hook(self._config.hooks[self._config.pattern_of(name)])
            self._found[name] = self._configs.index(hook)
        return self._found[name]

    def _by_hook(self, slots: Sequence[Slot]) -> dict[BoundHook, list[Slot]]:
        # In the order of the configuration, which is the same on all ranks.
        groups = [[slot for slot in slots if self._index(slot.name) == i] for i in range(len(self._hooks))]
        return {hook: slots for hook, slots in zip(self._hooks, groups, strict=True) if slots}

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        flat, verdicts = bucket.flat, []
        for hook, slots in self._by_hook(bucket.slots).items():
            numel = sum(slot.numel for slot in slots)
            first, last = slots[0].offset, slots[-1].offset + slots[-1].numel
            is_apart = last - first != numel
            own = bucket.gather(slots) if is_apart else flat[first:last]
            part = dataclasses.replace(bucket, flat=own, slots=_moved_together(slots))
            verdicts.append((own, (yield from reduce_with(hook, part, ranks))))
            if is_apart:
                bucket.scatter_(slots, own)
        if all(finite is None for _, finite in verdicts):
            return None
        # A hook's verdict may say more than its gradients, which it may have clipped.
        return torch.stack([all_finite(own) if finite is None else finite for own, finite in verdicts]).all()

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        (hook,) = self._by_hook(bucket.slots)
        return hook.reduce_sparse(grad, bucket, ranks)

    def is_local(self, step: int) -> bool:
        return any(hook.is_local(step) for hook in self._hooks)

    def after_optimizer_step(self, stepped: OptimizerStep) -> None:
        parts = []
        for i, hook in enumerate(self._hooks):
            own = {name: p for name, p in stepped.parameters.items() if self._index(name) == i}
            if own:
                parts.append((hook, dataclasses.replace(stepped, parameters=own)))
        models, step = stepped.models, stepped.step
        is_local = step >= 0 and self.is_local(step)
        applies = is_local and any(averages_models(hook) and hook.applies_average_after(part) for hook, part in parts)
        for hook, part in parts:
            # Parameters that differ because of an earlier phase of a schedule are averaged now.
            is_known = models.diverged.intersection(part.parameters) <= self._drifting.keys()
            if is_local and is_known and not hook.is_local(step):
                if isinstance(hook, AveragesModels):
                    hook.after_optimizer_step(part)
                models.diverge(part)
                self._drifting.update(dict.fromkeys(part.parameters, 1))
            else:
                after_optimizer_step(hook, part)
                for name in part.parameters:
                    self._drifting.pop(name, None)
        if applies:
            models.average_others_(models.diverged.intersection(self._drifting))

    def flush_(self, bucket: Bucket) -> None:
        for hook, slots in self._by_hook(bucket.slots).items():
            hook.flush_(dataclasses.replace(bucket, slots=tuple(slots)))

    def inactive_reason(self, step: int) -> str | None:
        return "; ".join(dict.fromkeys(text for hook in self._hooks if (text := hook.inactive_reason(step)))) or None

    def _has(self, key: str, name: str) -> bool:
        try:
            return str(self._index(name)) == key
        except ValueError:
            return False  # a frozen parameter that no pattern matches

    def _at_work(self) -> Sequence[BoundHook]:
        return self._hooks


def _moved_together(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Return the slots with offsets in a flat tensor that holds only them."""
    moved, offset = [], 0
    for slot in slots:
        moved.append(dataclasses.replace(slot, offset=offset))
        offset += slot.numel
    return tuple(moved)
