"""The two types that every communication method is made of.

* [`CommHook`][]: what a user writes. Frozen, picklable, no process group inside.
* [`BoundHook`][]: what runs. Owns buffers, random numbers and memory.
"""

from __future__ import annotations

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.options import check_options
from lightning_commhooks.interface.state import Memory, Shapes, StateReader, StateWriter

# A hook that compresses, or saves, no more than this part of the gradients does next to nothing.
NEXT_TO_NOTHING = 0.03
# The step of which `inactive_reason` is asked for what keeps a hook from its work however long the run is.
ANY_LATER_STEP = sys.maxsize
# Methods of hooks, by their names before.
_RENAMED = {"drain_": "flush_", "not_begun": "inactive_reason", "owed": "residuals"}


class _Signature:
    """The signature of a hook's constructor, for tools that would show the one of `CommHook.__new__`."""

    def __get__(self, hook: object, cls: type) -> inspect.Signature | None:
        if cls.__init__ is object.__init__:  # type: ignore[misc]
            return None
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:], return_annotation=signature.empty)


class CommHook(ABC):
    """Configuration of a communication method: a frozen dataclass, validated when it is made.

    Subclasses are `@dataclass(frozen=True, kw_only=True)`, set `name`, validate in `__post_init__` with
    `ValueError` naming field, value and allowed range, and return their runtime object from `bind`.

    Attributes:
        name: the string by which users choose the hook.
        aliases: other accepted spellings, such as Accelerate's.
        is_outermost: whether this is a wrapper that others do not go around.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    is_outermost: ClassVar[bool] = False

    if not TYPE_CHECKING:
        __signature__ = _Signature()

        def __new__(cls, *args: Any, **options: Any) -> CommHook:
            # Without any arguments a copy is made, which gets its fields later.
            if args or options:
                check_options(cls, args, options)
            return super().__new__(cls)

    @property
    def inner_hooks(self) -> tuple[CommHook, ...]:
        """The hooks that this one is made of; none unless it is a wrapper."""
        return ()

    @property
    def is_uneven(self) -> bool:
        """Whether ranks take different numbers of steps, so that nothing else in a step may be collective."""
        return False

    def check_parameters(self, names: Sequence[str]) -> list[str]:
        """Called when the hook is attached to a model.

        Args:
            names: of the parameters that are trained.

        Returns:
            what the user should know, one text each.

        Raises:
            ValueError: the hook does not fit them.
        """
        return [text for hook in self.inner_hooks for text in hook.check_parameters(names)]

    def changes_at(self) -> set[int]:
        """Steps from which on the hook sends otherwise than before, such as `start_powerSGD_iter`.

        Between them, what it sends repeats after every `repeats_after()` steps. A forecast names the next such step,
        and measures whole periods after each.
        """
        return {step for hook in self.inner_hooks for step in hook.changes_at()}

    def repeats_after(self) -> int:
        """Number of steps after which what the hook sends repeats, such as the period in which it averages models."""
        return math.lcm(*(hook.repeats_after() for hook in self.inner_hooks))

    def measured_from(self) -> int:
        """Steps after such a change from which on forecasts measure what is sent; the first step is by itself.

        More than 1 for a hook that has something under way then, which may be counted before or after.
        """
        return max([1, *(hook.measured_from() for hook in self.inner_hooks)])

    @abstractmethod
    def bind(self, group: Group) -> BoundHook:
        """Make the runtime object for one model and one process group.

        Args:
            group: the collectives the hook may use.

        Returns:
            a new runtime object with fresh state.
        """


class BoundHook(ABC):
    """Runtime state of a communication method for one model.

    The engine calls `reduce` for one bucket after another, in the same order on every rank, and `end_step` when all of
    a step are done. `reduce` is a generator that reads like a blocking function: it gets results of collectives by
    `yield from`, and while it waits for other ranks the engine goes on with other buckets. Two buckets have no
    parameter in common; what they share otherwise must not depend on which comes first.

    A hook whose result depends on earlier steps has memory. It says so (`has_memory`), and `end_step` tells it of a
    step that was not finite, of which nothing may be left in its memory. The engine makes all gradients of other steps
    NaN, on CUDA the first element of each, on all ranks, so that a `GradScaler` or the user's own check skips them
    everywhere.

    A hook with error feedback is an [`ErrorFeedback`][], one that lets ranks step alone and averages their models
    instead an [`AveragesModels`][].

    Args:
        group: the collectives the hook may use.

    Attributes:
        memory: what the hook remembers, `{parameter: {kind: tensor}}`. The kind `"residual"` differs between ranks:
            what this one has not sent yet, in units of the loss. All others are equal on them.
        numbers: whole numbers, equal on all ranks, `{what: {of what: number}}`, that are saved with it.
        has_memory: whether results depend on the gradients of earlier steps.
        own_kinds: kinds of memory that differ between ranks.
        scales_gradients: whether `reduce` multiplies gradients by `Bucket.scale`, in a pass over them that it makes
            anyway. If not, they are multiplied before.
    """

    has_memory: bool = False
    scales_gradients: bool = False
    own_kinds: frozenset[str] = frozenset({"residual"})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for before, now in _RENAMED.items():
            if before in vars(cls):
                raise TypeError(f"{cls.__name__}.{before}() would never be called: it is {now}() now")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.memory: Memory = {}
        self.numbers: dict[str, dict[str, int]] = {}

    @abstractmethod
    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        """Replace the gradients of a bucket by their average over all ranks: `bucket.flat`, in place.

        A generator; one that sends nothing has a `yield` after a `return`.

        Args:
            bucket: gradients, and what lies where in them.
            ranks: the collectives for this bucket: those of `self.group` in a channel of its own. Subgroups are
                `ranks.split(...)`, which `bind` has called before.

        Returns:
            whether the result is finite, boolean, one element on the device of the gradients, equal on all ranks;
            `None` to have them looked at. Of use to hooks with memory that know it from something smaller.
        """

    def end_step(self, finite: Tensor) -> None:  # noqa: B027  # optional to override
        """Let go of what the step's calls of `reduce` have left in the memory, unless the step was finite.

        Args:
            finite: boolean, one element, on CPU, equal on all ranks: whether all gradients of the step are finite on
                all ranks. With gradients on CUDA it is called when that is known there, at the latest when the next
                step begins.
        """

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        """Average a sparse COO gradient over all ranks; dense values of it are never compressed.

        Args:
            grad: this rank's sparse gradient of the only parameter in `bucket`.
            bucket: metadata with one slot.
            ranks: see `reduce`.

        Returns:
            the averaged sparse gradient, coalesced.
        """
        return (yield from ranks.all_reduce_sparse_mean(grad))

    def flush_(self, bucket: Bucket) -> None:  # noqa: B027  # optional to override
        """Add residuals of the parameters in `bucket`, times the loss scale, to its gradients, and forget them.

        Called once for each parameter when another hook takes over (`Schedule`). The default does nothing, right for
        hooks without error feedback.
        """

    def residuals(self) -> Iterator[Tensor]:
        """The residuals of this rank, one after another."""
        return (entry["residual"] for entry in self.memory.values() if "residual" in entry)

    def inactive_reason(self, step: int) -> str | None:
        """Say what keeps this hook from its work in a step, and what to do about it; `None` if nothing does.

        Shown for steps that are not compressed, and as a warning when training ends with such a step: after its first
        steps if that is foreseen, for which it is asked of the last step while `changes_at()` has no step in between,
        or else when it has ended. It is asked in each step, when the step's last bucket was reduced, so it may tell
        from the buckets that there are; `None` if there are none yet, as after `load_state_dict`. A clause that names
        the hook, and perhaps a semicolon and advice: `"hook='powersgd' compresses from start_powerSGD_iter=1000 on; let
        it begin earlier"`.

        Args:
            step: number of synchronized backwards before it; `ANY_LATER_STEP` asks for what does not depend on the
                length of the run.
        """
        return None

    def kept(self, shapes: list[tuple[int, ...]]) -> Shapes:
        """Name what the hook remembers of a parameter, or of several together: kinds, and shapes that they must have.

        Args:
            shapes: of the parameters, in memory order.

        Returns:
            shapes by kind, `None` for any shape; empty if nothing is remembered of them.
        """
        return {}

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        """State as tensors and primitives. Collective: every rank calls it, every rank gets the same.

        Args:
            writer: makes copies of tensors, and of those that differ between ranks one for all.
        """
        return {
            "entries": writer.memory(self.memory, self.own_kinds),
            **{what: dict(own) for what, own in self.numbers.items()},
        }

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        """Take over what `state_dict` of the same hook returned, with other options or on another world size even.

        Not collective: ranks agree afterwards whether it fits on all of them.

        Args:
            state: the state.
            reader: gives this rank's part of a saved tensor; is told of what does not fit and is left out.
        """
        if self.has_memory or "entries" in state:
            self.memory = reader.memory(reader.section(state, "entries"), self.kept, self.own_kinds)
        for what, own in self.numbers.items():
            own.clear()
            own.update(reader.section(state, what))

    def release(self) -> None:
        """Free large memory; called once, when the hook has been used for the last time."""
        self.memory = {}
