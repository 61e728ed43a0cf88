"""Step times, measured for real or over an emulated link, of hooks that take turns."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.advice.candidates import Candidate
from lightning_commhooks.advice.emulated import Emulated, emulated_group
from lightning_commhooks.advice.errors import errors_among, num_averaged
from lightning_commhooks.advice.step_time import StepTime, Turn, own_step_time
from lightning_commhooks.advice.task import Task, Tell
from lightning_commhooks.collectives.backend import Backend
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.link import Link
from lightning_commhooks.collectives.process_groups import OwnGroup, backend_for, destroy, own_group
from lightning_commhooks.collectives.timing import DeviceTiming, HostTiming, Timing
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.sources.attach import attach, attach_emulated

# DDP makes its final buckets after the first backward, and hooks their memory in the first step with those. Of steps
# that take long, one must do.
_WARM_UP_STEPS = 2
_LONG_MS = 700
# Seconds of one hook's turn, and the most steps in it.
_TURN_SECONDS = 0.4
_MAX_STEPS = 12
_ERROR_STEPS = 2
_BURN_IN_MS = 1000.0


class UnfitError(ValueError):
    """What was asked for does not fit the model or the ranks; raised on all of them."""


@dataclass(frozen=True)
class Setting:
    """The link that hooks are emulated over.

    Attributes:
        link: what collectives cost.
        nodes: ranks by node.
        node_link: what they cost within a node, if that is known.
    """

    link: Link
    nodes: list[list[int]]
    node_link: Link | None = None


class Bench:
    """Runs the steps of one task, the same on all ranks, with one hook after another. All methods are collective."""

    def __init__(self, task: Task) -> None:
        self.task = task
        world = dist.group.WORLD
        assert world is not None
        self._on_stream = backend_for(world, task.device) == dist.Backend.NCCL
        # As a hook has it.
        self._own = OwnGroup(world, Backend(world)) if self._on_stream else own_group(world, task.device)
        self.group = Group.of(self._own, None, task.device)
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._clock: Timing[Any] = DeviceTiming(task.device) if task.device.type == "cuda" else HostTiming()
        task.wrap(make_equal=True)
        task.save()
        self._seconds_per_batch = self._slowest(task.load_seconds) + self._burn_in() / 1e3

    def close(self) -> None:
        """Let go of process groups. After a failure the process ends, which others notice."""
        self._own.connections.abort()
        destroy([*self.group.release(), None if self._on_stream else self._own.process_group, self._alone])

    def times(
        self,
        chosen: list[Candidate],
        rounds: int,
        over: Sequence[Setting | None],
        tell: Tell,
    ) -> list[dict[str, StepTime]]:
        """Time steps, hook by hook in each of some rounds.

        Args:
            chosen: the hooks.
            rounds: how many.
            over: links to emulate, `None` for the real one. Each hook takes its turns over all of them one behind the
                other, so that a machine that changes its pace does not tell between them. Errors of gradients are
                those among real ranks if the last is the real one, else those of `errors_among`.
            tell: called before each turn, with what is done and the label of the hook.

        Returns:
            for each of `over`, what a step takes, by label.
        """
        turns: dict[tuple[int, str], list[Turn]] = defaultdict(list)
        guesses: dict[str, float] = {}
        for index, candidate, place in itertools.product(range(rounds), chosen, range(len(over))):
            # In every other round the other way round: who comes second finds the caches filled.
            place = place if index % 2 == 0 else len(over) - 1 - place
            label, setting = candidate.label, over[place]
            tell("measuring" if setting is None else "predicting", label)
            turn = self._turn(candidate, setting, guesses.get(label))
            turns[place, label].append(turn)
            guesses[label] = self._slowest(statistics.median(turn.seconds)) * 1e3
        self.task.restore()
        last = over[-1]
        if last is not None:
            for label, errors in self._errors_among(chosen, last.link.world_size, tell).items():
                turns[len(over) - 1, label][0].errors = errors
        return [
            {c.label: self._agreed(own_step_time(turns[place, c.label], c.period_factor)) for c in chosen}
            for place in range(len(over))
        ]

    def num_averaged(self, world_size: int) -> int:
        """Among how many of `world_size` emulated ranks errors are measured."""
        return num_averaged(world_size, self.task.gradient_bytes, self._seconds_per_batch)

    def _errors_among(self, chosen: list[Candidate], world_size: int, tell: Tell) -> dict[str, list[float]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                num_ranks = self.num_averaged(world_size)
                return errors_among(num_ranks, world_size, self.task, self._alone, chosen, tell)
            except ValueError as error:
                raise UnfitError(str(error)) from error

    def _burn_in(self) -> float:
        """Milliseconds of a step. Before, times say little: memory is new, and processors may have been asleep."""
        left_ms, steps = _BURN_IN_MS, 1
        while left_ms > 0:  # on all ranks alike: a model may have collectives of its own
            step_ms = self._warm_up(self.task.module, steps)
            left_ms -= step_ms * steps
            steps = max(1, round(left_ms / step_ms))
        self.task.restore()
        return step_ms

    def _slowest(self, seconds: float) -> float:
        own = torch.tensor([seconds], dtype=torch.float64, device=self.task.device)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own.item()

    def _turn(self, candidate: Candidate, setting: Setting | None, expected_ms: float | None) -> Turn:
        self.task.restore()
        torch.manual_seed(0)
        gc.collect()
        dist.barrier()
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that noop does not train, and the like
            model, attachment = self._attached(candidate, setting)
            with contextlib.closing(attachment) if attachment is not None else contextlib.nullcontext():
                setup_ms = (time.perf_counter() - begin) * 1e3
                if expected_ms is None:
                    expected_ms = self._warm_up(model, 1)
                self._warm_up(model, _WARM_UP_STEPS if expected_ms < _LONG_MS else 1)
                turn = self._steps(model, attachment, _num_steps(expected_ms, candidate.period))
                turn.setup_ms = setup_ms
                if setting is None:
                    turn.errors = self._errors(model, attachment)
                return turn

    def _warm_up(self, model: nn.Module, steps: int) -> float:
        """Milliseconds of one of so many steps, on the slowest rank."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.task.step(model)
        self._wait()
        return self._slowest(time.perf_counter() - begin) / steps * 1e3

    def _steps(self, model: DistributedDataParallel, attachment: Attachment | None, steps: int) -> Turn:
        before = attachment.metrics() if attachment is not None else {}
        sent, moments = [_sent(attachment)], [self._clock.now()]
        for _ in range(steps):
            self.task.step(model)
            moments.append(self._clock.now())
            sent.append(_sent(attachment))
        self._wait()
        seconds = [self._clock.ms(begin, end) / 1e3 for begin, end in itertools.pairwise(moments)]
        if attachment is None:
            dense = 2 * (self.group.size - 1) / self.group.size * self.task.gradient_bytes
            return Turn(seconds, [dense] * steps, dense)
        gained = {key: value - before[key] for key, value in attachment.metrics().items()}
        turn = Turn(seconds, [end - begin for begin, end in itertools.pairwise(sent)], gained["bytes_dense"] / steps)
        if timed := gained["timed_steps"]:
            turn.exposed_ms, turn.codec_ms = gained["exposed_ms"] / timed, gained["codec_ms"] / timed
        return turn

    def _errors(self, model: DistributedDataParallel, attachment: Attachment | None) -> list[float]:
        """Relative errors of the averaged gradient in some more steps; NaN where ranks step alone."""
        if attachment is None:
            return [0.0]
        attachment.sample_error(every=1)
        errors = []
        for _ in range(_ERROR_STEPS):
            self.task.step(model)
            errors.append(attachment.metrics()["relative_error"])
        return errors

    def _wait(self) -> None:
        if self.task.device.type == "cuda":
            torch.cuda.synchronize(self.task.device)

    def _attached(
        self, candidate: Candidate, setting: Setting | None
    ) -> tuple[DistributedDataParallel, Attachment | None]:
        try:
            if setting is not None:
                model = self.task.wrap(self._alone)
                return model, self._emulated(model, candidate, setting)
            model = self.task.wrap()
            if candidate.measured is None:
                return model, None
            return model, attach(model, candidate.measured, optimizers=self.task.optimizers)
        except ValueError as error:
            raise UnfitError(f"hook {candidate.label}: {error}") from error

    def _emulated(self, model: DistributedDataParallel, candidate: Candidate, setting: Setting) -> Attachment:
        transport = Emulated(
            setting.link if candidate.measured is not None else setting.link.without_hook,
            dist.get_rank() % setting.link.world_size,
            nodes=setting.nodes,
            node_link=setting.node_link,
            on_stream=self._on_stream,
        )
        device = self.task.device
        make_group = functools.partial(emulated_group, transport, device=device)
        attachment = attach_emulated(model, candidate.emulated, make_group, self.task.optimizers)
        buffers = sum(b.numel() * b.element_size() for b in self.task.module.buffers())

        def broadcast_buffers(model: DistributedDataParallel, inputs: object) -> None:
            if model.will_sync_module_buffers():
                transport.spend("all_gather", buffers, device)

        model.register_forward_pre_hook(broadcast_buffers)
        return attachment

    def _agreed(self, own: StepTime) -> StepTime:
        """The step of the slowest rank: all wait for it, or would if they were trained together, with noop as well."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        slowest: StepTime = max(every, key=lambda timing: timing.step_ms)
        return slowest


def _sent(attachment: Attachment | None) -> float:
    return attachment.bound.group.counters.bytes_sent if attachment is not None and attachment.bound else 0.0


def _num_steps(expected_ms: float, period: int) -> int:
    steps = max(1, min(_MAX_STEPS, round(_TURN_SECONDS * 1e3 / max(expected_ms, 1e-3))))
    return -(-steps // period) * period
