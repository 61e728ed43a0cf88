"""DiLoCo: ranks step alone; an outer optimizer moves the common model by what they did."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_commhooks.codecs import Int4Codec, Int8Codec
from lightning_commhooks.collectives.averaging import average_, check_same, flat_view
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks._local_sgd import BoundLocalSGD, LocalSGDConfig
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.registry import register
from lightning_commhooks.interface.state import Shapes

_CODECS = {"int8": Int8Codec(), "int4": Int4Codec()}


@register
@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGDConfig):
    """Let ranks step alone, and let an outer Nesterov optimizer use the mean of what they did as its gradient.

    DiLoCo, Douillard et al. 2023, https://arxiv.org/abs/2311.08105, algorithm 1: every `period` steps of the inner
    optimizer, which is the user's, the pseudo-gradient is how far the ranks have moved on average, and
    `torch.optim.SGD(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)` moves the common model, from which all
    ranks go on. With `fragments` above 1, Streaming DiLoCo, Douillard et al. 2025, https://arxiv.org/abs/2501.18512,
    section 2.2: the model is averaged in parts, at different steps, so that no step carries all of it; without that
    paper's overlap and mixing. Inner optimizers keep their state, as in the papers.

    Sends 2(w-1)/w times the parameters every `period` steps, half of it with `"bf16"`, a quarter with `"int8"`,
    a seventh with `"int4"`. Needs memory for the common
    model and the outer momentum, at least float32 each, and in an outer step as much again for the fragment.

    Args:
        period: number of steps of the inner optimizer between outer ones. 50 to 500 is usual.
        outer_lr: learning rate of the outer optimizer; 1 without momentum averages models.
        outer_momentum: its momentum.
        nesterov: whether that is Nesterov momentum.
        pseudo_gradient: what a rank's move is sent as: `"fp32"`, in the parameters' precision, at least float32; or
            `"bf16"`, each rank's move rounded once, summed in float32 and rounded once more; or `"int8"` or `"int4"`,
            the same with blocks of integers (`Int8Codec`, `Int4Codec`), but for parameters that do not fill a block.
            What is rounded away is not made up for.
        fragments: parts, of about the same size, in which the parameters of an optimizer are averaged, each once in a
            period. At most `period`. A single parameter is not divided, so there are fewer parts when it is larger
            than they should be.
        start_localSGD_iter: number of first steps in which gradients are averaged over all ranks, or a fraction of the
            run, as 0.1, where its length is known: see [`PowerSGD`][].
        post_local_gradient_allreduce: average gradients over the subgroup at every step, so that a node is what the
            paper calls a worker; if not, each rank is one.
        subgroup_size: ranks in a subgroup that averages gradients; `None`: the ranks of one node.
        average_buffers: see `PostLocalSGD`. Buffers are averaged at the end of a period, whatever `fragments` is.
        optimizer_state: see `PostLocalSGD`.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "diloco"

    start_localSGD_iter: int | float = 0
    period: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    pseudo_gradient: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    fragments: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("period", self.period, 1)
        check_integer("fragments", self.fragments, 1)
        if self.fragments > self.period:
            raise ValueError(f"fragments must be at most period={self.period}, is {self.fragments}")
        if not isinstance(self.outer_lr, (int, float)) or not self.outer_lr > 0:
            raise ValueError(f"outer_lr must be above 0, is {self.outer_lr!r}")
        if not isinstance(self.outer_momentum, (int, float)) or not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), is {self.outer_momentum!r}")
        check_bool("nesterov", self.nesterov)
        if self.pseudo_gradient not in ("fp32", "bf16", *_CODECS):
            raise ValueError(
                f"pseudo_gradient must be one of {['fp32', 'bf16', *_CODECS]}, is {self.pseudo_gradient!r}"
            )

    def repeats_after(self) -> int:
        return self.period

    def bind(self, group: Group) -> BoundHook:
        return _BoundDiLoCo(self, group)


class _BoundDiLoCo(BoundLocalSGD):
    _config: DiLoCo

    def __init__(self, config: DiLoCo, group: Group) -> None:
        super().__init__(config, group)
        codec = _CODECS.get(config.pseudo_gradient)
        self._kernels = group.kernels(codec, feedback=False, two_shot=True) if codec is not None else None

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        self._drop_anchors(bucket)
        return super().reduce(bucket, ranks)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        self._drop_anchors(bucket)
        return super().reduce_sparse(grad, bucket, ranks)

    def _drop_anchors(self, bucket: Bucket) -> None:
        if bucket.step < self._config.start_localSGD_iter:
            return
        # In the backward before the first step alone, ranks are equal.
        for slot in bucket.slots:
            if slot.name not in self.memory:
                assert slot.parameter is not None
                # Where the ranks begin to move, flat in memory order.
                self.memory[slot.name] = {"anchor": _at_least_float32(slot.parameter).clone()}

    def after_optimizer_step(self, stepped: OptimizerStep) -> None:
        if stepped.step >= self._config.start_localSGD_iter and stepped.optimizer not in self._num_steps:
            # After a phase of a schedule in which ranks stepped alone they begin at different places.
            apart = [name for name in stepped.parameters if name in self.memory and name in stepped.models.diverged]
            average_([self.memory[name]["anchor"] for name in apart], self.group)
        super().after_optimizer_step(stepped)

    def _after_local_step(self, num_steps: int, stepped: OptimizerStep) -> None:
        period, fragments = self._config.period, self._config.fragments
        # Spread over the period, the last at its end.
        due = [k for k in range(fragments) if (num_steps - (k + 1) * period // fragments) % period == 0]
        groups = _fragments(stepped.parameters, fragments) if due else []
        for names in [groups[k] for k in due if groups[k]]:
            fragment = {name: stepped.parameters[name] for name in names}
            with stepped.models.averaging():
                self._outer_step(dataclasses.replace(stepped, parameters=fragment))
        if num_steps % period == 0:
            stepped.models.average_()

    def _outer_step(self, stepped: OptimizerStep) -> None:
        parameters = {name: flat_view(p) for name, p in stepped.parameters.items() if name in self.memory}
        check_same(f"take an outer step of {len(parameters)} parameters of {stepped.optimizer!r}", self.group)
        moves = {name: self.memory[name]["anchor"] - _at_least_float32(p) for name, p in parameters.items()}
        self._average_(list(moves.values()))
        for name, gradient in moves.items():
            entry = self.memory[name]
            if self._config.outer_momentum:
                old = entry.get("momentum")
                momentum = gradient.clone() if old is None else old.mul_(self._config.outer_momentum).add_(gradient)
                entry["momentum"] = momentum
                if self._config.nesterov:
                    gradient = gradient.add(momentum, alpha=self._config.outer_momentum)
                else:
                    gradient = momentum
            # Into the move, which nobody needs any more.
            entry["anchor"] = torch.sub(entry["anchor"], gradient, alpha=self._config.outer_lr, out=moves[name])
            parameters[name].copy_(entry["anchor"].view(parameters[name].shape))
        # What was in no backward has no anchor.
        average_([p for name, p in stepped.parameters.items() if name not in self.memory], self.group)
        stepped.models.averaged(stepped.parameters)
        self._follow_up_optimizer(stepped, self.group)

    def _average_(self, moves: list[Tensor]) -> None:
        if not moves:
            return
        if self._config.pseudo_gradient == "fp32":
            average_(moves, self.group)
            return
        if self._kernels is not None:
            fills_block = self._kernels.fills_block
            large = [move for move in moves if fills_block(move)]
            self.group.finish(self.group.average_tensors_encoded_(large, self._kernels))
            average_([move for move in moves if not fills_block(move)], self.group)
            return
        half = torch.cat([move.div(self.group.size).to(torch.bfloat16) for move in moves])
        mean = self.group.finish(self.group.all_reduce_in_float32(half))
        for move, own in zip(moves, mean.split([move.numel() for move in moves]), strict=True):
            move.copy_(own)

    def kept(self, shapes: list[tuple[int, ...]]) -> Shapes:
        # Twice as many numbers for a complex parameter.
        return {"anchor": None, "momentum": None}


def _at_least_float32(parameter: Tensor) -> Tensor:
    flat = flat_view(parameter)
    return flat.reshape(-1).to(torch.promote_types(flat.dtype, torch.float32))


def _fragments(parameters: dict[str, Tensor], num: int) -> list[list[str]]:
    """Names in order, in `num` lists of about the same number of elements; some may be empty."""
    total = sum(p.numel() for p in parameters.values())
    fragments: list[list[str]] = [[] for _ in range(num)]
    before = 0
    for name, p in parameters.items():
        # By where its middle lies.
        fragments[min(num - 1, int((before + p.numel() / 2) * num / max(total, 1)))].append(name)
        before += p.numel()
    return fragments
