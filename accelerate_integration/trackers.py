"""Values of communication hooks in the trackers of an `Accelerator` and the log of a `transformers.Trainer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import DistributedType

from accelerate_integration.kwargs import CommHookKwargs, FSDPCommHook
from lightning_commhooks.basics.announce import announce
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL
from lightning_commhooks.monitoring import PREFIX, MonitorOptions
from lightning_commhooks.runtime.attachment import Attachment

_TRAINER_OPTIONS = [field.name for field in dataclasses.fields(MonitorOptions) if field.name != "every_n_steps"]


class CommHookTracker:
    """Logs the metrics of communication hooks with `accelerator.log`, to all trackers.

    For example::

        handler = CommHookKwargs(hook="int8")
        accelerator = Accelerator(log_with="tensorboard", kwargs_handlers=[handler])
        accelerator.init_trackers("run")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        tracker = CommHookTracker(accelerator, handler)
        for step, batch in enumerate(loader):
            ...
            tracker.log(step)
        accelerator.end_training()

    Collective: make it on all ranks, after `prepare`. The values are those of `lightning_commhooks.Monitor.values`, of
    the main process. With several models each has a number, `comm/0/bytes_sent`. In a single process there is nothing
    to log. After the first steps, one line reports the hook's expected effect, and a warning follows if next to nothing
    will be compressed. `accelerator.end_training` logs the remaining values and prints the closing line.

    Args:
        accelerator: after `prepare`.
        handler: the accelerator's `CommHookKwargs`, or the handler that `use_comm_hook` returned.
        every_n_steps: interval between log entries, in synchronized backwards; with several models, of any of them.
        error_every_n_steps: interval between samples of the error of averaged gradients, at the cost of an all-reduce
            of `error_numel` numbers; 0: never.
        error_numel: number of gradient elements to estimate the error from; `None`: all.
        closing_line: whether `end_training` prints one line: bytes sent and saved, seconds saved against plain DDP (an
            estimate), and steps that were not compressed, with the reason.
        measure_link: whether to measure the network for that estimate now, for half a second.
        num_steps: number of a model's synchronized backwards from now on, for the line after the first steps.
            Accelerate does not know it.

    Raises:
        ValueError: a value is out of range, or no model was prepared.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        handler: CommHookKwargs | FSDPCommHook,
        *,
        every_n_steps: int = 50,
        error_every_n_steps: int = 100,
        error_numel: int | None = DEFAULT_NUMEL,
        closing_line: bool = True,
        measure_link: bool = True,
        num_steps: int | None = None,
    ) -> None:
        if not isinstance(accelerator, Accelerator) or not isinstance(handler, (CommHookKwargs, FSDPCommHook)):
            raise ValueError(
                "CommHookTracker needs an Accelerator and its handler, CommHookKwargs(...) or the result of "
                f"use_comm_hook; got {type(accelerator).__name__} and {type(handler).__name__}"
            )
        if num_steps is not None:
            check_integer("num_steps", num_steps, 1)
        self._options = MonitorOptions(
            every_n_steps=every_n_steps,
            error_every_n_steps=error_every_n_steps,
            error_numel=error_numel,
            closing_line=closing_line,
            measure_link=measure_link,
        )
        attachments = open_attachments(handler)
        if not attachments and accelerator.distributed_type != DistributedType.NO:
            raise ValueError(
                "CommHookTracker: no model has a communication hook yet. Make it after accelerator.prepare(...), with "
                "the handler that the accelerator was made with"
            )
        self._accelerator = accelerator
        self._monitors = [self._options.monitor(attachment) for attachment in attachments]
        self._step: int | None = None
        # Synchronized backwards of each model at the end of training.
        self._ends = [num_steps and attachment.num_steps + num_steps for attachment in attachments]
        if attachments:
            self._events = handler.events(accelerator)
            self._events.tells_forecast = False
            self._events.at_end.append(self._end)

    def log(self, step: int | None = None) -> None:
        """Log, if it is time to; call it on all ranks, after each step.

        Args:
            step: as in `accelerator.log`.
        """
        self._step = step
        for monitor, end in zip(self._monitors, self._ends, strict=True):
            attachment = monitor.attachment
            attachment.tell_forecast(announce, None if end is None else max(0, end - attachment.num_steps))
        self._log_after(self._options.every_n_steps)

    def summary(self) -> list[str]:
        """The closing line of each model so far. Not collective."""
        return [monitor.summary() for monitor in self._monitors]

    def _log_after(self, num_steps: int) -> None:
        """Log on the main process, if some model had so many steps since it was logged last."""
        is_time = any(monitor.num_new_steps >= num_steps for monitor in self._monitors)
        if is_time and self._accelerator.is_main_process and (values := self._values()):
            self._accelerator.log(values, step=self._step)

    def _values(self) -> dict[str, float]:
        if len(self._monitors) == 1:
            return self._monitors[0].values()
        return {
            f"{PREFIX}{index}/{name.removeprefix(PREFIX)}": value
            for index, monitor in enumerate(self._monitors)
            for name, value in monitor.values().items()
        }

    @contextmanager
    def _end(self) -> Iterator[None]:
        self._log_after(1)
        yield
        if self._options.closing_line:
            self._events.tell(self.summary())


def trainer_options(options: object) -> MonitorOptions:
    """Options that `use_comm_hook(trainer, hook, monitor=...)` stands for."""
    if options is True:
        return MonitorOptions()
    if not isinstance(options, Mapping) or options.keys() - set(_TRAINER_OPTIONS):
        raise ValueError(
            f"monitor must be True or a dict with some of {', '.join(_TRAINER_OPTIONS)}, got {options!r}; "
            "TrainingArguments(logging_steps=...) says how often values are logged"
        )
    return MonitorOptions(**options)


def open_attachments(handler: CommHookKwargs | FSDPCommHook) -> list[Attachment]:
    """Attachments of models in use."""
    return [attachment for attachment in handler.attachments if not attachment.is_closed]
