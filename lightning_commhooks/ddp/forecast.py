"""What will this training send? Told after its first steps, by a dry run of the others."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass

import torch

from lightning_commhooks.ddp.dry_run import DryRun, Sent, Training
from lightning_commhooks.ddp.runtime import Runtime
from lightning_commhooks.ddp.stretches import Stretch, go_through
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING, CommHook
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.user_function import UserFunction
from lightning_commhooks.wrappers.auto import Auto
from lightning_commhooks.wrappers.late_start import late_starts

# Synchronized backwards before: DDP rebuilds its buckets after the first, and two optimizers take turns.
FIRST_STEPS = 3
# A hook with more options is told by its name.
_LONGEST_NAME = 80
_FEWER = " fewer bytes"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forecast:
    """What a training sends, made by `Attachment.forecast`. `str()` gives it as one line.

    Attributes:
        hook: the hook, as Python code.
        first_step: number of the first step in this process, from 0 on; above 0 when training was resumed.
        num_steps: number of steps of the training, counted from its beginning; `None`: unknown.
        stretches: what is sent when.
        total: what this process sends in all its steps; `None` if their number is unknown.
        warnings: why it is nothing or next to nothing that is compressed, and what to set.
    """

    hook: str
    first_step: int
    num_steps: int | None
    stretches: tuple[Stretch, ...]
    total: Sent | None
    warnings: tuple[str, ...]

    @property
    def bytes_sent(self) -> float | None:
        """Payload bytes that this rank sends in this process, as in `Attachment.metrics`; `None` if that is unknown."""
        return None if self.total is None else self.total.bytes_sent

    @property
    def compression_ratio(self) -> float | None:
        """Bytes plain DDP would send, over `bytes_sent`; `None` if that is unknown."""
        if self.total is None:
            return None
        return self.total.bytes_dense / self.total.bytes_sent if self.total.bytes_sent else math.inf

    def __str__(self) -> str:
        parts = _merged([each for each in self.stretches if each.last is None or each.last > self.first_step])
        what, when, times = _what(parts[-1]), self._when(parts[-1]), _times(parts[-1].usual)
        if len(parts) == 1:
            text = f"{what} {when}; {times}" if what else f"{times} {when}"
        elif len(parts) == 2 and what:
            text = f"{what} {when}; {times} then"
        else:
            text = "; ".join(f"{self._when(each)} {_times(each.usual)}" for each in parts)
        if self.total is not None and (len(parts) > 1 or abs(self.total.saved - parts[0].usual.saved) > 0.02):
            over = _times(self.total)
            # As in "25x fewer bytes then, 1.2x over the run".
            over = over.removesuffix(_FEWER) if times.endswith(_FEWER) else over
            text += f", {over} over the {'rest of the ' if self.first_step else ''}run"
        if parts[-1].usual.is_between_nodes:
            text += "; of those that leave a node"
        return f"Forecast for communication hook {self.hook}: {text}"

    def _when(self, part: Stretch) -> str:
        first, last = max(part.first, self.first_step), self.num_steps
        if part.first <= self.first_step and part.last == last:
            if last is None:
                return "from the first step on" if not first else f"from step {first:,} on"
            return f"in all {last:,} steps" if not first else f"from step {first:,} to {last:,}"
        if part.last != last:
            return f"until step {part.last:,}"
        return f"from step {first:,} on" if last is None else f"from step {first:,} of {last:,} on"


def _merged(parts: Sequence[Stretch]) -> list[Stretch]:
    """Without steps at which nothing changes after all. There is a part."""
    merged = [parts[0]]
    for part in parts[1:]:
        before = merged[-1]
        if before.is_local == part.is_local and abs(before.usual.saved - part.usual.saved) < 0.005:
            merged[-1] = Stretch(before.first, part.last, part.period, part.is_local, part.steps)
        else:
            merged.append(part)
    return merged


def _what(part: Stretch) -> str:
    """What is done to send less, if anything."""
    if part.is_local:
        return "ranks step alone"
    if not part.usual.numel_compressed:
        return ""
    return f"{100 * part.usual.share_compressed:.3g}% of the gradients are compressed"


def _times(sent: Sent) -> str:
    ratio = sent.ratio
    if math.isinf(ratio):
        return "nothing is sent"
    if abs(ratio - 1) < 0.005:
        return "as many bytes as plain DDP"
    return f"{_number(ratio)}x{_FEWER}" if ratio > 1 else f"{_number(1 / ratio)}x as many bytes as plain DDP"


def _number(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def is_due(run: Runtime) -> bool:
    """Whether the first steps are over, and nobody was told yet. Equal on all ranks."""
    steps = run.counters.steps - run.steps_before
    return not run.has_forecast and steps >= FIRST_STEPS and _config(run) is not None


def _config(run: Runtime) -> CommHook | None:
    """The hook that is used from now on, if it is known what it sends."""
    if isinstance(run.method, UserFunction):
        return None
    if isinstance(run.method, Auto):
        chosen: CommHook | None = getattr(run.bound, "chosen", None)
        return chosen
    return run.config


def tell(run: Runtime, say: Callable[[str], None] | None, num_left: int | None) -> None:
    """Say once what training will do, and warn, on the first rank."""
    run.has_forecast = True
    forecast = make_forecast(run, None if num_left is None else run.clock.steps + num_left)
    if forecast is None:
        return
    run.has_warned = bool(forecast.warnings)
    if run.bound.group.rank != 0:
        return
    if say is not None:
        say(str(forecast))
    for text in forecast.warnings:
        warnings.warn(text, stacklevel=4)


def make_forecast(run: Runtime, num_steps: int | None) -> Forecast | None:
    """The forecast; `None` if the hook cannot run dry. Neither collective nor waits for a device."""
    config, group = _config(run), run.bound.group
    if config is None or group.size == 1 or not run.seen.buckets or run.seen.num_sparse:
        return None
    now = run.clock.steps
    if num_steps is not None and num_steps < now:
        num_steps = None
    first = now - (run.counters.steps - run.steps_before)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user got them when the hook was attached
            stretches, reason = _dry_run(run, config, num_steps)
        total = None
        if num_steps is not None:
            total = Sent.until_now(run.counters)
            for stretch in stretches:
                total += stretch.sent(now, num_steps)
        texts = _warnings(config, stretches, num_steps, total, reason)
        forecast = Forecast(_name(run, config), first, num_steps, tuple(stretches), total, texts)
        str(forecast)
    except Exception as error:  # of a hook that reads numbers, of which there are none, or has others than we know
        logger.info("no forecast for communication hook %r: %s", run.name, error)
        return None
    return forecast


def _name(run: Runtime, config: CommHook) -> str:
    """The hook as a user would write it, unless that is long."""
    name = code(run.method).replace('"', "'") if is_dataclass(run.method) else ""
    if isinstance(run.method, Auto):
        name = f"'auto', which is {code(config)} now".replace('"', "'")
    return name if 0 < len(name) <= _LONGEST_NAME else f"'{run.name}'"


def _dry_run(run: Runtime, config: CommHook, num_steps: int | None) -> tuple[list[Stretch], str | None]:
    """Stretches, and what keeps the hook from what it is for until the last step."""
    optimizers = run.local.steps_of_optimizers()
    first, cycle = run.local.seen.cycle()
    cycle = cycle or [list(optimizers)]
    accumulated = run.micro_batches is not None
    group = run.bound.group
    training = Training(group, run.seen.buckets, accumulated, run.layout, optimizers, cycle, first)
    dry = DryRun(config, training)
    period = config.repeats_after() * (len(cycle) or 1)
    stretches = go_through(dry, sorted(config.changes_at()), num_steps, period)
    last = stretches[-1].first + len(stretches[-1].steps) if num_steps is None else num_steps
    return stretches, dry.bound.not_begun(last - 1)


def _warnings(
    config: CommHook, stretches: Sequence[Stretch], num_steps: int | None, total: Sent | None, reason: str | None
) -> tuple[str, ...]:
    """What the user should change."""
    run = "" if num_steps is None else f"training ends after {num_steps:,} steps, and "
    if reason is not None:
        return (f"{run}{reason}",)
    last = stretches[-1]
    if last.usual.saved < NEXT_TO_NOTHING:
        if not any(stretch.usual.numel_compressed for stretch in stretches):
            return ()  # a hook that is not for that
        if total is None or total.saved < NEXT_TO_NOTHING:
            return (
                f"hook={config.name!r} compresses {last.usual.share_compressed:.2%} of the gradients, and of the bytes "
                f"that plain DDP sends it saves {last.usual.saved:.1%}; use another hook, or none",
            )
        return ()
    if total is None or total.saved >= NEXT_TO_NOTHING:
        return ()
    assert num_steps is not None
    return (
        f"{run}hook={config.name!r} saves {total.saved:.1%} of the bytes that plain DDP sends, because it begins to at "
        f"step {last.first:,} only; {_advice(config, last.first, num_steps)}",
    )


def _advice(config: CommHook, first: int, num_steps: int) -> str:
    for _, option, value in late_starts(config):
        if value == first:
            return f"set {option} to about a tenth of training, {num_steps // 10:,}"
    return f"let it begin after about a tenth of training, {num_steps // 10:,} steps"
