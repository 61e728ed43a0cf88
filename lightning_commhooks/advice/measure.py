"""Step times of hooks, measured in turns over the real network or an emulated one. All functions are collective."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.advice.candidates import NOOP, Candidate
from lightning_commhooks.advice.emulated import RING_LATENCIES, Emulated, Network, emulated_group
from lightning_commhooks.advice.errors import errors_among
from lightning_commhooks.advice.ranking import Row, amortized, median, merged, unsettled
from lightning_commhooks.advice.task import Task
from lightning_commhooks.collectives.counters import DeviceTiming, Timing
from lightning_commhooks.collectives.steps import finish
from lightning_commhooks.hooks import AllReduce
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.sources.attach import attach, attach_emulated

# DDP makes its final buckets after the first backward, and hooks allocate their state in the step after it. Long steps
# get a single warm-up step.
_WARM_UP_STEPS = 2
_LONG_MS = 700
# Duration of one hook's turn, and the largest number of steps in it.
_TURN_SECONDS = 0.4
_MAX_STEPS = 12
_BURN_IN_MS = 1000.0
# Limits on the extra rounds while differences are within the noise: a multiple of `--rounds`, and a duration.
_MAX_ROUNDS = 6
_MAX_SECONDS = 90.0


def measured_network(task: Task) -> Network:
    """Measure the network between two or more ranks."""
    model = task.wrap()  # kept here: the attachment does not hold a reference
    attachment = attach(model, "allreduce")
    link = attachment.measure_link()
    attachment.close()
    in_a_row = 2 * (link.world_size - 1) * (RING_LATENCIES if task.device.type == "cpu" else 1)
    return Network(link.bandwidth, link.message_seconds or link.latency / in_a_row, link.world_size)


class Bench:
    """Runs the steps of one task with one hook after another, in the same order on all ranks.

    It emulates the network, or uses the real one if there is none.
    """

    def __init__(self, task: Task, network: Network | None, tell: Callable[[str], None]) -> None:
        self._task, self._network, self._report = task, network, tell
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._clock: Timing = DeviceTiming(task.device) if task.device.type == "cuda" else Timing()
        task.wrap(init_sync=True)
        task.save()
        self._burn_in()

    def rows(self, chosen: list[Candidate], rounds: int) -> list[Row]:
        """Time the steps of each hook in each round, and measure the errors of the gradients.

        Hooks whose differences are within the noise get more rounds, within limits. Over an emulated network only
        rank 0 gets the errors; see `errors_among`.
        """
        rounds_of: dict[str, list[Row]] = defaultdict(list)
        expected_ms: dict[str, float] = {}
        begin, turns = time.perf_counter(), chosen * rounds
        while turns:
            for candidate in turns:
                label = candidate.label
                self._report(label)
                rounds_of[label].append(self._turn(candidate, expected_ms.get(label)))
                expected_ms[label] = self._slowest(rounds_of[label][-1].step_ms)
            rows = {label: self._agreed(merged(rounds)) for label, rounds in rounds_of.items()}
            # One round gives no estimate of the noise.
            is_last = len(rounds_of[NOOP]) < 2 or self._slowest(time.perf_counter() - begin) > _MAX_SECONDS
            again = set() if is_last else unsettled([*rows.values()])
            turns = [one for one in chosen if one.label in again and len(rounds_of[one.label]) < _MAX_ROUNDS * rounds]
        self._task.restore()
        if self._network is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                errors = errors_among(self._network.world_size, self._task, chosen, self._report)
            for label, found in errors.items():
                rows[label].error = median(found)
        for row in rows.values():
            if math.isnan(row.exposed_ms):
                row.exposed_ms = max(0.0, row.step_ms - rows[NOOP].step_ms)
        dist.destroy_process_group(self._alone)
        return list(rows.values())

    def _agreed(self, own: Row) -> Row:
        """Return the row of the slowest rank, which all ranks wait for in training."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        slowest: Row = max(every, key=lambda row: row.step_ms)
        return slowest

    def _slowest(self, seconds: float) -> float:
        own = torch.tensor([seconds], dtype=torch.float64, device=self._task.device)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own.item()

    def _burn_in(self) -> None:
        """Run untimed steps first: fresh memory and sleeping processors distort the first times."""
        left_ms, steps = _BURN_IN_MS, 1
        while left_ms > 0:  # equally often on all ranks: the model may have its own collectives
            step_ms = self._warm_up(self._task.module, steps)
            left_ms -= step_ms * steps
            steps = max(1, round(left_ms / step_ms))
        self._task.restore()

    def _warm_up(self, model: nn.Module, steps: int) -> float:
        """Run some steps and return the milliseconds of one, on the slowest rank."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._task.step(model)
        self._wait()
        return self._slowest(time.perf_counter() - begin) / steps * 1e3

    def _turn(self, candidate: Candidate, expected_ms: float | None) -> Row:
        self._task.restore()
        torch.manual_seed(0)
        gc.collect()
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as noop's, that it does not train
            model, attachment = self._attached(candidate)
            with contextlib.closing(attachment) if attachment is not None else contextlib.nullcontext():
                if expected_ms is None:
                    expected_ms = self._warm_up(model, 1)
                self._warm_up(model, _WARM_UP_STEPS if expected_ms < _LONG_MS else 1)
                row = self._steps(candidate, model, attachment, _num_steps(expected_ms, candidate.period))
                if self._network is None and attachment is not None and candidate.label != NOOP:
                    attachment.sample_error(every=1)
                    self._warm_up(model, 1)
                    row.error = attachment.metrics()["relative_error"]
                return row

    def _steps(
        self, candidate: Candidate, model: DistributedDataParallel, attachment: Attachment | None, steps: int
    ) -> Row:
        before = attachment.metrics() if attachment is not None else {}
        totals, moments = [_sent(attachment)], [self._clock.now()]
        for _ in range(steps):
            self._task.step(model)
            moments.append(self._clock.now())
            totals.append(_sent(attachment))
        self._wait()
        milliseconds = [self._clock.ms(begin, end) for begin, end in itertools.pairwise(moments)]
        sent = [end - begin for begin, end in itertools.pairwise(totals)]
        factor = candidate.period_factor
        row = Row(candidate.label, candidate.code, amortized(milliseconds, sent, factor), 0.0, 0.0, note=candidate.note)
        if attachment is None:
            row.bytes_sent = row.bytes_dense = 2 * (1 - 1 / dist.get_world_size()) * self._task.gradient_bytes
            row.error = 0.0
            return row
        gained = {key: value - before[key] for key, value in attachment.metrics().items()}
        row.bytes_sent, row.bytes_dense = amortized(sent, sent, factor), gained["bytes_dense"] / steps
        if (timed := gained["timed_steps"]) and candidate.hook is not None:
            # With a shortened period, steps that average models are too frequent for a mean.
            row.exposed_ms = gained["exposed_ms"] / timed if factor == 1 else math.nan
            row.codec_ms = gained["codec_ms"] / timed / factor
        return row

    def _wait(self) -> None:
        if self._task.device.type == "cuda":
            torch.cuda.synchronize(self._task.device)

    def _attached(self, candidate: Candidate) -> tuple[DistributedDataParallel, Attachment | None]:
        try:
            if self._network is not None:
                model = self._task.wrap(self._alone)
                return model, self._emulated(model, candidate, self._network)
            model = self._task.wrap()
            if candidate.measured is None:
                return model, None
            return model, attach(model, candidate.measured, optimizers=self._task.optimizers)
        except ValueError as error:
            raise ValueError(f"hook {candidate.label}: {error}") from error

    def _emulated(self, model: DistributedDataParallel, candidate: Candidate, network: Network) -> Attachment:
        device, has_hook = self._task.device, candidate.measured is not None
        rank = dist.get_rank() % network.world_size
        transport = Emulated(network, rank, has_hook=has_hook, on_stream=device.type == "cuda")
        make_group = functools.partial(emulated_group, transport, device=device)
        attachment = attach_emulated(model, candidate.measured or AllReduce(), make_group, self._task.optimizers)
        buffers = sum(buffer.nbytes for buffer in self._task.module.buffers())
        # A broadcast takes as long as an all-gather of equal parts.
        part = torch.empty(-(-buffers // max(1, network.world_size - 1)), dtype=torch.uint8, device=device)

        def broadcast_buffers(model: DistributedDataParallel, inputs: object) -> None:
            if buffers and model.will_sync_module_buffers():
                finish(transport.gather(part))

        model.register_forward_pre_hook(broadcast_buffers)
        return attachment


def _sent(attachment: Attachment | None) -> float:
    return attachment.bound.group.counters.bytes_sent if attachment is not None and attachment.bound else 0.0


def _num_steps(expected_ms: float, period: int) -> int:
    steps = max(1, min(_MAX_STEPS, round(_TURN_SECONDS * 1e3 / max(expected_ms, 1e-3))))
    return -(-steps // period) * period
