"""The two base classes of every communication method.

* [`CommHook`][]: the configuration that a user writes. Frozen, picklable, without a process group.
* [`BoundHook`][]: the runtime object. Owns buffers, random numbers and memory.
"""

from __future__ import annotations

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, checked
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.options import check_options
from lightning_commhooks.interface.state import Memory, Shapes, StateReader, StateWriter

# A hook that compresses, or saves, at most this fraction of the gradients is almost useless.
NEXT_TO_NOTHING = 0.03
# The step for which `inactive_reason` returns reasons that do not depend on the length of the run.
ANY_LATER_STEP = sys.maxsize


class _Signature:
    """The signature of a hook's constructor, for tools that would show the signature of `CommHook.__new__`."""

    def __get__(self, hook: object, cls: type) -> inspect.Signature | None:
        if cls.__init__ is object.__init__:  # type: ignore[misc]
            return None
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:], return_annotation=signature.empty)


class CommHook(ABC):
    """Configuration of a communication method: a frozen dataclass, validated on creation.

    Subclasses are `@dataclass(frozen=True, kw_only=True)`, set `name`, validate in `__post_init__` with a `ValueError`
    that names field, value and allowed range, and return their runtime object from `bind`.

    Attributes:
        name: the string by which users choose the hook.
        aliases: other accepted spellings, such as Accelerate's.
        is_outermost: whether this is a wrapper that no other hook may contain.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    is_outermost: ClassVar[bool] = False

    if not TYPE_CHECKING:
        __signature__ = _Signature()

        def __new__(cls, *args: Any, **options: Any) -> CommHook:
            # Without arguments, this may be `copy` or `pickle`, which set the fields later.
            if args or options:
                check_options(cls, args, options)
            return super().__new__(cls)

    @property
    def inner_hooks(self) -> tuple[CommHook, ...]:
        """The hooks inside this one; none unless it is a wrapper."""
        return ()

    @property
    def is_uneven(self) -> bool:
        """Whether ranks take different numbers of steps, so that no other part of a step may be collective."""
        return False

    def check_parameters(self, names: Sequence[str]) -> list[str]:
        """Check the model's parameters when the hook is attached.

        Args:
            names: names of the trained parameters.

        Returns:
            warnings for the user.

        Raises:
            ValueError: the hook does not fit the parameters.
        """
        return [text for hook in self.inner_hooks for text in hook.check_parameters(names)]

    def changes_at(self) -> set[int]:
        """Return the steps at which the hook changes its communication, such as `start_powerSGD_iter`.

        Between them, communication repeats every `repeats_after()` steps. A forecast names the next change and measures
        whole periods after each.
        """
        return {step for hook in self.inner_hooks for step in hook.changes_at()}

    def repeats_after(self) -> int:
        """Return the number of steps after which communication repeats, such as the period of averaging models."""
        return math.lcm(*(hook.repeats_after() for hook in self.inner_hooks))

    def measured_from(self) -> int:
        """Return how many steps after a change forecasts start to measure; the first step is measured separately.

        More than 1 for a hook with communication in flight, which may be counted in the step before or after.
        """
        return max([1, *(hook.measured_from() for hook in self.inner_hooks)])

    @abstractmethod
    def bind(self, group: Group) -> BoundHook:
        """Create the runtime object for one model and one process group.

        Args:
            group: the collectives the hook may use.

        Returns:
            a new runtime object with fresh state.
        """


class BoundHook(ABC):
    """Runtime state of a communication method for one model.

    The engine calls `reduce` for each bucket, in the same order on every rank, and `end_step` after the last bucket of
    a step. `reduce` is a generator that reads like a blocking function: it gets the results of collectives by
    `yield from`, and while it waits for other ranks, the engine continues with other buckets. Two buckets have no
    parameter in common; any other state that they share must not depend on their order.

    A hook whose results depend on earlier steps has memory. It sets `has_memory`, and `end_step` reports whether a step
    was finite; a step that was not must leave no trace in the memory. The engine sets all gradients of such a step to
    NaN on all ranks, on CUDA the first element of each, so that a `GradScaler` or the user's own check skips the step
    everywhere.

    A hook with error feedback is an [`ErrorFeedback`][]; a hook with local steps, which averages models instead of
    gradients, is an [`AveragesModels`][].

    Args:
        group: the collectives the hook may use.

    Attributes:
        memory: the hook's memory, `{parameter: {kind: tensor}}`. The kind `"residual"` differs between ranks: the part
            of the gradients that this rank has not sent yet, in units of the loss. All other kinds are rank-uniform.
        numbers: rank-uniform integers, `{section: {key: number}}`, that are saved with the memory.
        has_memory: whether results depend on the gradients of earlier steps. `end_step` is called, and memory saved,
            only if they do. A class with `end_step` has to set it.
        own_kinds: kinds of memory that differ between ranks.
        scales_gradients: whether `reduce` multiplies gradients by `Bucket.scale`, in a pass over them that it makes
            anyway. If not, they are multiplied before.
        averages_models: whether it is an `AveragesModels`, or a wrapper of one.
    """

    has_memory: bool = False
    scales_gradients: bool = False
    averages_models: bool = False
    own_kinds: frozenset[str] = frozenset({"residual"})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        is_stated = any("has_memory" in vars(base) for base in cls.__mro__ if base is not BoundHook)
        if "end_step" in vars(cls) and not is_stated:
            raise TypeError(
                f"{cls.__name__} has an end_step(), called only for hooks with memory: write `has_memory = True` in "
                "the class, which an instance may set to False"
            )

    def __init__(self, group: Group) -> None:
        self.group = group
        self.memory: Memory = {}
        self.numbers: dict[str, dict[str, int]] = {}

    @abstractmethod
    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        """Replace the gradients of a bucket, `bucket.flat`, by their average over all ranks, in place.

        The method is a generator; if it sends nothing, it needs a `yield` after its `return`.

        Args:
            bucket: the gradients and their layout.
            ranks: the collectives for this bucket: the collectives of `self.group`, in the bucket's own channel. For a
                subgroup, call `ranks.split(...)` with subgroups that `bind` has created.

        Returns:
            whether the result is finite, as a boolean of one element on the device of the gradients, rank-uniform. If
            the result is `None`, the engine checks the gradients. Another result is useful for hooks with memory that
            can derive it from a smaller tensor.
        """

    def end_step(self, finite: Tensor) -> None:  # noqa: B027  # optional to override
        """Discard the traces that the step's calls of `reduce` left in the memory, unless the step was finite.

        Args:
            finite: whether all gradients of the step are finite on all ranks: boolean, one element, on CPU,
                rank-uniform. With gradients on CUDA, the method is called once the value has arrived, at the latest
                when the next step begins.
        """

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        """Average a sparse COO gradient over all ranks; its values are never compressed.

        Args:
            grad: this rank's sparse gradient of the only parameter in `bucket`.
            bucket: metadata with one slot.
            ranks: see `reduce`.

        Returns:
            the averaged sparse gradient, coalesced.
        """
        return (yield from ranks.all_reduce_sparse_mean(grad))

    def flush_(self, bucket: Bucket) -> None:  # noqa: B027  # optional to override
        """Add the residuals of the parameters in `bucket`, times the loss scale, to its gradients, and clear them.

        Called once for each parameter when another hook replaces this one (`Schedule`). The default does nothing, which
        suits hooks without error feedback.
        """

    def is_local(self, step: int) -> bool:
        """Return whether the gradients of a step may differ between ranks after `reduce`; rank-uniform.

        Args:
            step: number of synchronized backwards before it; one that has not begun yet is a guess.
        """
        return False

    def averages_gradients(self, step: int) -> bool:
        """Return whether `reduce` averages any gradients of a step, if only over some of the ranks."""
        return not self.is_local(step)

    def residuals(self) -> Iterator[Tensor]:
        """Return an iterator over this rank's residuals."""
        return (entry["residual"] for entry in self.memory.values() if "residual" in entry)

    def inactive_reason(self, step: int) -> str | None:
        """Return why this hook does not compress a step, and what to do about it; `None` if it compresses.

        Shown for steps that are not compressed, and as a warning if training ends with such a step. If the end can be
        foreseen, the warning is given after the first steps: the method is then called for the last step, if
        `changes_at()` has no step before it. Otherwise it is given at the end. The method is called between steps, so
        it may depend on the buckets so far; `None` if there are none yet, as after `load_state_dict`. The text is a
        clause that names the hook, and optionally a semicolon and advice:
        `"hook='powersgd' compresses from start_powerSGD_iter=1000 on; let it begin earlier"`.

        Args:
            step: number of synchronized backwards before that step; `ANY_LATER_STEP` asks for reasons that do not
                depend on the length of the run.
        """
        return None

    def kept(self, shapes: list[tuple[int, ...]]) -> Shapes:
        """Describe the memory of a parameter, or of several parameters together: its kinds and their shapes.

        Args:
            shapes: shapes of the parameters, in memory order.

        Returns:
            shapes by kind, `None` for any shape; empty if the hook has no memory of these parameters.
        """
        return {}

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        """Return the state as tensors and primitives. Collective; the result is rank-uniform.

        Args:
            writer: copies tensors, and combines tensors that differ between ranks.
        """
        return {
            "entries": writer.memory(self.memory, self.own_kinds),
            "own_kinds": sorted(self.own_kinds),
            **{what: dict(own) for what, own in self.numbers.items()},
        }

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        """Load a state of the same hook, perhaps with different options or from a different world size.

        Not collective: ranks agree afterwards whether the state fits on all of them.

        Args:
            state: the state.
            reader: returns this rank's part of a saved tensor, and records the parts that do not fit and are skipped.
        """
        if self.has_memory or "entries" in state:
            # A hook with a `state_dict` of its own need not save the kinds.
            entries, saved_kinds = reader.section(state, "entries"), state.get("own_kinds", self.own_kinds)
            self.memory = reader.memory(entries, self.kept, self.own_kinds, saved_kinds)
        for what, own in self.numbers.items():
            own.clear()
            own.update(reader.section(state, what))

    def release(self) -> None:
        """Free large memory; called once, after the last use of the hook."""
        self.memory = {}


def reduce_with(hook: BoundHook, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
    """Reduce a bucket with a hook; raise a `TypeError` if its average is lost, because it is returned, or not there."""
    before = ranks.tally.under_way
    finite: Any = yield from checked(hook.reduce(bucket, ranks), hook, "reduce")
    num = ranks.tally.under_way - before
    is_verdict = isinstance(finite, Tensor) and finite.dtype == torch.bool and finite.numel() == 1
    if num or not (finite is None or is_verdict):
        while isinstance(inner := getattr(hook, "inner", None), BoundHook):
            hook = inner
        problem = (
            f"has ended without waiting for {num} of its collectives: wait for each by `yield from`, as in `yield from "
            "ranks.all_reduce_mean_(bucket.flat)`"
            if num
            else f"returned {type(finite).__name__}: write the average to bucket.flat, and return nothing, or whether "
            "it is finite, as a boolean tensor of one element"
        )
        raise TypeError(f"{type(hook).__name__}.reduce {problem}")
    return finite  # type: ignore[no-any-return]
