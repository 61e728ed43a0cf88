"""DiLoCo: ranks take local steps; an outer optimizer updates the common model by the mean of their changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_commhooks.collectives.averaging import average_, flat_view
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks._local_sgd import BoundLocalSGD, LocalSGDConfig
from lightning_commhooks.hooks._pseudo_gradients import (
    Pace,
    PseudoGradient,
    PseudoGradients,
    at_least_float32,
    pseudo_gradient_hook,
    pseudo_gradients_of,
)
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.hook import ANY_LATER_STEP, BoundHook, CommHook
from lightning_commhooks.interface.hook_state import load_hook, save_hook
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.registry import register
from lightning_commhooks.interface.state import Shapes, StateReader, StateWriter


@register
@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGDConfig):
    """Take local steps on each rank, and give the ranks' mean change to an outer Nesterov optimizer as its gradient.

    DiLoCo, Douillard et al. 2023, https://arxiv.org/abs/2311.08105, algorithm 1: every `period` steps of the inner
    optimizer, which is the user's, the ranks compute the mean change of their models, the pseudo-gradient. From it,
    `torch.optim.SGD(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)` updates the common model, from which all
    ranks continue. Inner optimizers keep their state, as in the paper.

    With `fragments` above 1, `delay` and `mixing` it is Streaming DiLoCo, Douillard et al. 2025,
    https://arxiv.org/abs/2501.18512, section 2: the model is averaged in parts, at different steps, and while ranks
    continue to train; as in torchft, a pseudo-gradient is the difference from the common model. With `eager` it is the
    variant of Kale et al. 2025, https://arxiv.org/abs/2502.12996. With `pseudo_gradient="topk"`, `outer_momentum=0` and
    `outer_lr=1` it is SparseLoCo, Sarfi et al. 2025, https://arxiv.org/abs/2508.15706: see [`ChunkedTopK`][].

    Sends 2(w-1)/w times the parameters every `period` steps, half of that with `"bf16"`, a quarter with `"int8"`, a
    seventh with `"int4"`, a fourteenth with `"int2"`; with `"topk"` a 137th for two ranks. Needs memory for the common
    model and the outer momentum, at least float32 each, and as much again for a fragment while it is averaged; with
    `eager` or error feedback once more.

    Args:
        period: number of steps of the inner optimizer between outer ones. 50 to 500 is usual.
        outer_lr: learning rate of the outer optimizer; 1 without momentum averages models.
        outer_momentum: momentum of the outer optimizer.
        nesterov: whether to use Nesterov momentum.
        pseudo_gradient: format in which a rank's pseudo-gradient is sent. `"fp32"`: the parameters' precision, at least
            float32. `"bf16"`: each rank's numbers are rounded once, summed in float32 and rounded once more. `"int8"`,
            `"int4"` or `"int2"`: the same in blocks (`Int8Codec` and so on), except for parameters that do not fill a
            block. `"topk"`: only the largest numbers. Also takes a hook that averages gradients, such as
            `PowerSGD(start_powerSGD_iter=0)` or `ChunkedTopK(k=128)`, with its own options, which count outer steps as
            steps.
        error_feedback: with integer formats, add the rounding error to the next pseudo-gradient. Needs memory of the
            size of the parameters. `"topk"` always has error feedback.
        fragments: number of parts, of about the same size, into which the parameters of an optimizer are divided; each
            part is averaged once per period. At most `period`. A single parameter is not divided, so there are fewer
            parts if one parameter is larger than a part should be.
        delay: number of steps for which an average is in flight while ranks continue to train: it begins that many
            steps before it is applied. At most `period`. 0: ranks wait for it. An average in flight when training ends
            is not applied: models are averaged instead. With `delay=period` they do not contain its changes, so what
            ranks have learned in its period is lost.
        mixing: weight of a rank's own model in the model with which the rank continues; the rest is the common model
            (`alpha` in the paper). `None`: 0.5 with a `delay` below the period, as in the paper; otherwise 0, which
            means that ranks continue from the common model. With 0, the ranks' steps within `delay` are lost, unless
            `delay` is the period.
        eager: apply 1/w of a rank's own change at once, and the other ranks' changes a period later. `delay` is the
            period. At the end of training (w-1)/w of the changes in the last period are lost.
        period_seconds: for ranks of different speeds: a rank's period has as many steps as the rank can take in that
            time, and its pseudo-gradient is weighted by its number of steps, as in dynamic local updates, Liu et al.
            2024, https://arxiv.org/abs/2401.09135, section 5. The first period has `period` steps, from which a rank
            learns how long a step takes. With this option, all ranks evaluate, save and end after the same outer step,
            not after the same step: `metrics()["averagings"]` counts outer steps. Does not work with `fragments`,
            `delay` or `eager`, in the Trainer or Accelerate, or with a `GradScaler` or several optimizers. `None`:
            `period` steps on all ranks.
        start_localSGD_iter: number of initial steps of each optimizer during which gradients are averaged over all
            ranks; or a fraction of the run, such as 0.1, if its length is known. `"auto"` means the default, 0.
        post_local_gradient_allreduce: average gradients over the subgroup at every step, so that a node is one worker
            in the paper's sense. If not, each rank is a worker.
        subgroup_size: number of ranks in a subgroup that averages gradients; `None`: the ranks of one node.
        average_buffers: see `PostLocalSGD`. Buffers are averaged at the end of a period, whatever `fragments` is.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "diloco"
    together_from_start: ClassVar[str | None] = "models are averaged too"

    start_localSGD_iter: int | float | Literal["auto"] = 0
    period: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    pseudo_gradient: PseudoGradient | CommHook = "fp32"
    error_feedback: bool = False
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    eager: bool = False
    period_seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("period", self.period, 1)
        check_integer("fragments", self.fragments, 1)
        check_integer("delay", self.delay, 0)
        for field in ("fragments", "delay"):
            if getattr(self, field) > self.period:
                raise ValueError(f"{field} must be at most period={self.period}, got {getattr(self, field)}")
        if not isinstance(self.outer_lr, (int, float)) or not self.outer_lr > 0:
            raise ValueError(f"outer_lr must be above 0, got {self.outer_lr!r}")
        if not isinstance(self.outer_momentum, (int, float)) or not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum!r}")
        if self.mixing is not None and (not isinstance(self.mixing, (int, float)) or not 0 <= self.mixing <= 1):
            raise ValueError(f"mixing must be None or in [0, 1], got {self.mixing!r}")
        for field in ("nesterov", "error_feedback", "eager"):
            check_bool(field, getattr(self, field))
        if self.eager and (self.delay not in (0, self.period) or self.mixing):
            defaults = {"delay": 0, "mixing": None}
            given = [f"{name}={getattr(self, name)}" for name in defaults if getattr(self, name) != defaults[name]]
            raise ValueError(
                f"eager=True means delay={self.period}, the period, and mixing=0: leave out {' and '.join(given)}"
            )
        pseudo_gradient_hook(self.pseudo_gradient, self.error_feedback)
        if self.period_seconds is not None:
            self._check_period_seconds()

    def _check_period_seconds(self) -> None:
        seconds = self.period_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ValueError(f"period_seconds must be None or above 0, got {seconds!r}")
        check_integer("period, the first one with period_seconds,", self.period, 2)
        for field, default in (("fragments", 1), ("delay", 0), ("eager", False)):
            if getattr(self, field) != default:
                raise ValueError(f"{field}={getattr(self, field)} does not go with period_seconds={seconds}")

    @property
    def is_uneven(self) -> bool:
        return self.period_seconds is not None

    def repeats_after(self) -> int:
        return self.period

    def measured_from(self) -> int:
        if not self.delay and not self.eager:
            return 1
        begin = {((k + 1) * self.period // self.fragments - self.delay) % self.period for k in range(self.fragments)}
        # Not after a step at which an average begins; preferably not after the following step either.
        quiet = [step for step in range(1, self.period + 1) if step % self.period not in begin]
        later = [step for step in quiet if (step - 1) % self.period not in begin]
        return next(iter(later + quiet), 1)

    def bytes_of_averages(self, num_ranks: int) -> float:
        sent = {"fp32": 1, "bf16": 1 / 2, "int8": 1 / 4, "int4": 1 / 7, "int2": 1 / 14, "topk": 1 / 137}
        known = self.pseudo_gradient if isinstance(self.pseudo_gradient, str) else ""
        return sent.get(known, 0.0) / self.period

    def bind(self, group: Group) -> BoundHook:
        return _BoundDiLoCo(self, group)


class _BoundDiLoCo(BoundLocalSGD):
    _config: DiLoCo
    keeps_common_model = True

    def __init__(self, config: DiLoCo, group: Group) -> None:
        super().__init__(config, group)
        self._delay = config.period if config.eager else config.delay
        default = 0.5 if 0 < self._delay < config.period else 0.0
        self._mixing = default if config.mixing is None else config.mixing
        self._encoding = pseudo_gradient_hook(config.pseudo_gradient, config.error_feedback)
        self._pseudo_gradients = PseudoGradients(group, self._encoding, in_background=self._delay > 0)
        self._pace: Pace | None = None
        if config.period_seconds is not None:
            self._pace = Pace(group, self._own_subgroup(), config.period, config.period_seconds)
        if config.eager:
            self.own_kinds = self.own_kinds | {"anchor", "momentum", "share"}

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        self._drop_anchors(bucket)
        return super().reduce(bucket, ranks)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        self._drop_anchors(bucket)
        return super().reduce_sparse(grad, bucket, ranks)

    def _drop_anchors(self, bucket: Bucket) -> None:
        if not self.has_started(bucket.step):
            return
        # In the backward before the first local step, the ranks' models are equal.
        for slot in bucket.slots:
            if slot.name not in self.memory:
                assert slot.parameter is not None
                # The parameter before local steps, flat in memory order.
                self.memory[slot.name] = {"anchor": at_least_float32(slot.parameter).clone()}

    def after_optimizer_step(self, stepped: OptimizerStep) -> None:
        if self.has_started(stepped.step) and stepped.optimizer not in self._num_steps:
            # After a phase of a `Schedule` with local steps, the ranks begin with different models.
            apart = [name for name in stepped.parameters if name in self.memory and name in stepped.models.diverged]
            average_([self.memory[name]["anchor"] for name in apart], self.group)
        super().after_optimizer_step(stepped)

    def _averages_after(self, num_steps: int, stepped: OptimizerStep) -> bool:
        if self._pace is not None:
            return self._pace.is_over(stepped.num_steps)
        return any(self._fragments_after(num_steps))

    def applies_average_after(self, stepped: OptimizerStep) -> bool:
        is_over = self._pace is not None or bool(self._fragments_after(self._steps_with(stepped))[1])
        return is_over and self.communicates_after(stepped)

    def _fragments_after(self, num_steps: int) -> tuple[list[int], list[int]]:
        """Return the fragments whose average begins after that many steps, and those whose average ends then."""
        period, fragments = self._config.period, self._config.fragments
        # Averages end at steps spread over the period; the last one ends with the period.
        left = [((k + 1) * period // fragments - num_steps) % period for k in range(fragments)]
        begin = [k for k in range(fragments) if left[k] == self._delay % period]
        return begin, [k for k in range(fragments) if left[k] == 0]

    def _after_local_step(self, num_steps: int, stepped: OptimizerStep) -> None:
        if self._pace is not None:
            self._after_step_of(self._pace, stepped)
            return
        period, fragments = self._config.period, self._config.fragments
        begin, end = self._fragments_after(num_steps)
        groups = _fragments(stepped.parameters, fragments) if begin or end else []
        for k in sorted({*begin, *end}):
            part = dataclasses.replace(stepped, parameters={name: stepped.parameters[name] for name in groups[k]})
            if part.parameters:
                with stepped.models.averaging():
                    self._average_fragment(k, (num_steps - 1) // period, part, k in begin, k in end)
        if num_steps % period == 0:
            stepped.models.average_()

    def _after_step_of(self, pace: Pace, stepped: OptimizerStep) -> None:
        if len({*self._num_steps, stepped.optimizer}) > 1:
            raise ValueError("period_seconds works with one optimizer, and the model has several")
        pace.step(stepped.num_steps)
        if pace.is_over():
            with stepped.models.averaging():
                self._average_fragment(0, self.group.counters.averagings, stepped, True, True)
            stepped.models.average_()

    def _average_fragment(self, k: int, outer: int, stepped: OptimizerStep, begins: bool, ends: bool) -> None:
        stepped.models.layout.check_orders(stepped.parameters)
        mixing = self._mixing
        if stepped.models.ranks_change and self._delay:
            # An average in flight is lost when ranks change. Then one of the present changes takes its place: they
            # include those that were in flight, and later ones, so that there is nothing to mix in.
            begins = begins and self.group.size > 1
            if ends and (stepped.optimizer, k) not in self._pseudo_gradients.under_way:
                begins, mixing = True, 0.0
        self._finish(stepped.optimizer, k)
        shares = self._begin(k, outer, stepped) if begins else {}
        if not self._delay or (begins and ends and stepped.models.ranks_change):
            self._finish(stepped.optimizer, k)
        if ends:
            has_average = any("average" in self.memory.get(name, {}) for name in stepped.parameters)
            self._pseudo_gradients.note_buffers(k, stepped, has_average=has_average)
            self._outer_step(stepped, shares, mixing)

    def _begin(self, k: int, outer: int, stepped: OptimizerStep) -> dict[str, Tensor]:
        """Begin to average the ranks' pseudo-gradients; with `eager`, return this rank's share of the mean."""
        anchors = {name: self.memory[name]["anchor"] for name in stepped.parameters if name in self.memory}
        buckets = pseudo_gradients_of(stepped.parameters, anchors, outer)
        shares: dict[str, Tensor] = {}
        if self._config.eager:
            shares = {s.name: s.view(b.flat).reshape(-1) / self.group.size for b in buckets for s in b.slots}
        self._pseudo_gradients.begin(k, buckets, stepped, self._pace.end if self._pace else None)
        return shares

    def _finish(self, optimizer: str, k: int) -> None:
        """Wait for an average in flight, and store it in `memory` until it is applied."""
        for name, mean in self._pseudo_gradients.end(optimizer, k):
            self.memory[name]["average"] = mean

    def _outer_step(self, stepped: OptimizerStep, shares: dict[str, Tensor], mixing: float) -> None:
        for name, p in stepped.parameters.items():
            entry = self.memory.get(name, {})
            gradient = entry.pop("average", None)
            if name in shares:
                # The mean of a period ago, in which this rank's current share replaces its old one.
                before = entry.get("share")
                gradient = shares[name].clone() if gradient is None else gradient.add_(shares[name])
                entry["share"] = shares[name]
                if before is not None:
                    gradient.sub_(before)
            if gradient is not None:
                self._step_anchor(entry, gradient)
            # With a delay of a whole period, no change may be sent twice, not even the first one, which is still in
            # flight.
            if gradient is not None or (entry and self._delay == self._config.period):
                self._continue_from(entry["anchor"], flat_view(p), mixing)
        average_([p for name, p in stepped.parameters.items() if name not in self.memory], self.group)
        stepped.models.averaged(stepped.parameters, are_equal=not (mixing or self._config.eager))
        self._follow_up_optimizer(stepped, self.group)

    def _continue_from(self, anchor: Tensor, own: Tensor, mixing: float) -> None:
        anchor = anchor.view(own.shape)
        if not mixing:
            own.copy_(anchor)
        elif own.dtype == anchor.dtype:
            torch.lerp(anchor, own, mixing, out=own)
        else:
            own.copy_(torch.lerp(anchor, own.to(anchor.dtype), mixing))

    def _step_anchor(self, entry: dict[str, Tensor], gradient: Tensor) -> None:
        """Take the outer optimizer's step, which may overwrite `gradient`."""
        if self._config.outer_momentum:
            old = entry.get("momentum")
            momentum = gradient.clone() if old is None else old.mul_(self._config.outer_momentum).add_(gradient)
            entry["momentum"] = momentum
            is_nesterov, factor = self._config.nesterov, self._config.outer_momentum
            gradient = gradient.add_(momentum, alpha=factor) if is_nesterov else momentum
        entry["anchor"].sub_(gradient, alpha=self._config.outer_lr)

    def kept(self, shapes: list[tuple[int, ...]]) -> Shapes:
        # Any shape, because a complex parameter has twice as many numbers.
        return dict.fromkeys(("anchor", "momentum", "average", "share"))

    def common_model(self) -> Mapping[str, Tensor]:
        return {name: entry["anchor"] for name, entry in self.memory.items() if "anchor" in entry}

    def residuals(self) -> Iterator[Tensor]:
        return self._pseudo_gradients.inner.residuals()

    def inactive_reason(self, step: int) -> str | None:
        averagings = self.group.counters.averagings
        asked = ANY_LATER_STEP if step == ANY_LATER_STEP else averagings - 1
        inner = self._pseudo_gradients.inner.inactive_reason(asked) if averagings else None
        sent = None if inner is None else f"hook={self._config.name!r} sends pseudo-gradients as they are: {inner}"
        return super().inactive_reason(step) or sent

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        # A replica that saves alone leaves out the averages in flight, whose other ranks may be gone.
        is_alone = writer.kind in ("own", "joining")
        for optimizer, k in () if is_alone else list(self._pseudo_gradients.under_way):
            self._finish(optimizer, k)
        state, inner = super().state_dict(writer), self._pseudo_gradients.inner
        return {**state, "pseudo_gradient": save_hook(self._encoding, inner, writer)} if inner.has_memory else state

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        super().load_state_dict(state, reader)
        if self._pseudo_gradients.inner.has_memory:
            load_hook(state.get("pseudo_gradient"), self._encoding, self._pseudo_gradients.inner, reader)

    def release(self) -> None:
        super().release()
        self._pseudo_gradients.release()


def _fragments(parameters: dict[str, Tensor], num: int) -> list[list[str]]:
    """Divide the names, in order, into `num` lists with about equally many elements; some may be empty."""
    total = sum(p.numel() for p in parameters.values())
    fragments: list[list[str]] = [[] for _ in range(num)]
    before = 0
    for name, p in parameters.items():
        # By the position of its middle element.
        fragments[min(num - 1, int((before + p.numel() / 2) * num / max(total, 1)))].append(name)
        before += p.numel()
    return fragments
