"""Values of an attachment to log during training, and a closing line at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Literal, get_args

from lightning_commhooks.collectives.link import Link
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.error_sample import DEFAULT_NUMEL
from lightning_commhooks.interface.start import text_of_steps
from lightning_commhooks.runtime.attachment import Attachment

PREFIX = "comm/"
MetricName = Literal[
    "bytes_sent",
    "compression_ratio",
    "bytes_sent_between_nodes",
    "compression_ratio_between_nodes",
    "relative_error",
    "residual_norm",
    "exposed_ms_per_step",
    "codec_ms_per_step",
    "averagings",
    "nonfinite_steps",
]
# In display order.
NAMES: tuple[MetricName, ...] = get_args(MetricName)
# Names that are omitted if nodes have one rank each, or there is one node.
NAMES_OF_NODES: tuple[MetricName, ...] = ("bytes_sent_between_nodes", "compression_ratio_between_nodes")
_LINK_BUDGET = 0.5
_BETWEEN = "bytes_sent_between_nodes", "bytes_dense_between_nodes"


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Options of the frameworks' users, checked before the model exists. `CommHookMonitor` documents the fields."""

    every_n_steps: int = 50
    error_every_n_steps: int = 100
    error_numel: int | None = DEFAULT_NUMEL
    closing_line: bool = True
    measure_link: bool = True

    def __post_init__(self) -> None:
        check_integer("every_n_steps", self.every_n_steps, 1)
        check_integer("error_every_n_steps", self.error_every_n_steps, 0)
        numel = self.error_numel
        if numel is not None and (isinstance(numel, bool) or not isinstance(numel, int) or numel < 1):
            raise ValueError(f"error_numel must be an integer of at least 1, or None for all elements, got {numel!r}")
        check_bool("closing_line", self.closing_line)
        check_bool("measure_link", self.measure_link)

    def monitor(self, attachment: Attachment) -> Monitor:
        """Monitor an attachment. Collective."""
        return Monitor(
            attachment,
            error_every_n_steps=self.error_every_n_steps,
            error_numel=self.error_numel,
            # Only the closing line shows the seconds saved.
            measure_link=self.measure_link and self.closing_line,
        )


class Monitor:
    """Reports the communication of one attachment during training.

    Collective: create it on all ranks with the same arguments, outside of a backward. Its methods are not collective.

    Args:
        attachment: the result of `attach`.
        error_every_n_steps: `every` of `Attachment.sample_error`; 0: do not change it.
        error_numel: `numel` of `Attachment.sample_error`.
        measure_link: whether to measure the network once, for about half a second, to report the seconds saved in
            `summary`.

    Raises:
        ValueError: see `Attachment.sample_error`; or `attachment` is none.
    """

    def __reduce__(self) -> tuple[Callable[..., None], tuple[()]]:
        return NoneType, ()  # like the attachment

    def __init__(
        self,
        attachment: Attachment,
        *,
        error_every_n_steps: int = 100,
        error_numel: int | None = DEFAULT_NUMEL,
        measure_link: bool = True,
    ) -> None:
        if not isinstance(attachment, Attachment):
            raise ValueError(f"Monitor needs what attach(model, hook) returned, got {type(attachment).__name__}")
        self.attachment = attachment
        attachment.is_monitored = True
        self._link: Link | None = None
        if attachment.bound is not None:
            if error_every_n_steps:
                attachment.sample_error(error_every_n_steps, error_numel)
            if measure_link and attachment.bound.group.size > 1:
                self._link = attachment.measure_link(_LINK_BUDGET)
        self._begin = self._last = self._last_sent = attachment.metrics()
        self._not_compressed_before = attachment.steps_not_compressed()
        self._sampled = self._sampled_step()

    @property
    def num_new_steps(self) -> int:
        """Synchronized backwards since the last call of `values`. Does not synchronize with a device."""
        # Without metrics(), which synchronizes on CUDA.
        return self.attachment.num_steps - int(self._last["steps"])

    def values(self) -> dict[str, float]:
        """Return values to log. Not collective; call it outside of a backward. Unknown values are omitted.

        * Since `attach`: `comm/bytes_sent`, `comm/nonfinite_steps` and, for hooks that average models,
          `comm/averagings`.
        * Since the last call: `comm/compression_ratio`, `comm/exposed_ms_per_step`, `comm/codec_ms_per_step`.
        * If nodes have several ranks: `comm/bytes_sent_between_nodes`, `comm/compression_ratio_between_nodes`.
        * If sampled since the last call, in a step without inf or NaN: `comm/relative_error`.
        * Current: `comm/residual_norm`, 0 without error feedback.

        A user's own function has no values, and sharded gradients have only bytes and ratio. See `Attachment.metrics`.
        """
        now, last = self.attachment.metrics(), self._last
        self._last = now
        if math.isnan(now["bytes_sent"]):
            return {}
        values: dict[str, float] = {name: now.get(name, math.nan) for name in NAMES}
        values["compression_ratio"] = _ratio(now, self._last_sent)
        values["compression_ratio_between_nodes"] = _ratio(now, self._last_sent, *_BETWEEN)
        if not _are_apart(now):
            values.update(dict.fromkeys(NAMES_OF_NODES, math.nan))
        if now["bytes_sent"] > self._last_sent["bytes_sent"]:
            # Local steps may send nothing; their dense bytes then count towards the next averaging.
            self._last_sent = now
        values["exposed_ms_per_step"] = _mean_of_timed_steps("exposed_ms", now, last)
        values["codec_ms_per_step"] = _mean_of_timed_steps("codec_ms", now, last)
        sampled, self._sampled = self._sampled, self._sampled_step()
        if sampled == self._sampled:
            values["relative_error"] = math.nan
        if self.attachment.bound is not None and not self.attachment.is_closed:
            values["residual_norm"] = self.attachment.residual_norm()
        return {PREFIX + name: float(value) for name, value in values.items() if math.isfinite(value)}

    def summary(self) -> str:
        """Summarize training in one line, also after the attachment was closed. Not collective."""
        return _summary(self.attachment, self._begin, self._not_compressed_before, self._link)

    def _sampled_step(self) -> int:
        sampler = self.attachment.runtime.sampler
        return -1 if sampler is None else sampler.last_finite()[0]


def closing_line(attachment: Attachment) -> str | None:
    """Summarize a training that has ended, for a framework whose user has no [`Monitor`][]. Not collective.

    Returns `None` if the line is redundant or unknown: there is a monitor, no step was made since the line was shown
    before, training runs in one process, or the hook is a user's own function.
    """
    if attachment.is_monitored or attachment.is_alone or attachment.num_steps == attachment.steps_told:
        return None
    attachment.steps_told, now = attachment.num_steps, attachment.metrics()
    # Count from the attachment of the hook.
    return None if math.isnan(now["bytes_sent"]) else _summary(attachment, dict.fromkeys(now, 0.0), {}, None)


def _summary(
    attachment: Attachment, first: Mapping[str, float], reasons_before: Mapping[str, int], link: Link | None
) -> str:
    """Summarize the steps since the metrics `first`."""
    now = attachment.metrics()
    steps = int(now["steps"] - first["steps"])
    sent, dense = now["bytes_sent"] - first["bytes_sent"], now["bytes_dense"] - first["bytes_dense"]
    text = f"Communication hook {attachment.name!r}: "
    if math.isnan(sent):
        return f"{text}{text_of_steps(steps)}; the bytes of a hook function are not known"
    if not dense:
        return f"{text}nothing to send in {text_of_steps(steps)}"
    text += f"{_size(sent)} sent in {text_of_steps(steps)} instead of {_size(dense)}{_times(sent, dense)}"
    if _are_apart(now):
        sent, dense = (now[key] - first[key] for key in _BETWEEN)
        text += f", of which {_size(sent)} left the node instead of {_size(dense)}{_times(sent, dense)}"
    if evaluated := now.get("bytes_evaluation", 0) - first.get("bytes_evaluation", 0):
        text += f"; evaluation and checkpoints sent {_size(evaluated)} more"
    saved = None if link is None else _seconds_saved(link, steps, now, first)
    if saved is not None:
        text += f"; about {abs(saved):,.1f} s {'saved' if saved >= 0 else 'lost'} against plain DDP"
    reasons = {reason: num - reasons_before.get(reason, 0) for reason, num in attachment.steps_not_compressed().items()}
    reasons = {reason: num for reason, num in reasons.items() if num}
    if reasons:
        why = [reason if len(reasons) == 1 else f"{num:,}: {reason}" for reason, num in reasons.items()]
        text += f"; {text_of_steps(sum(reasons.values()))} not compressed ({'; '.join(why)})"
    if nonfinite := now.get("nonfinite_steps", 0) - first.get("nonfinite_steps", 0):
        text += f"; {text_of_steps(int(nonfinite))} with inf or NaN"
    return text


def _seconds_saved(link: Link, steps: int, now: Mapping[str, float], first: Mapping[str, float]) -> float | None:
    """Return plain DDP's waiting time minus the hook's, both without waiting for slower ranks."""
    exposed, overlap, codec = (_mean_of_timed_steps(k, now, first) for k in ("exposed_ms", "overlap_ms", "codec_ms"))
    num, dense = ((now[key] - first[key]) / steps for key in ("collectives", "bytes_dense"))
    # The link is measured among all ranks, without a distinction between nodes.
    if math.isnan(exposed) or _are_apart(now):
        return None
    dense_ms = 1e3 * link.seconds(dense)
    sent = (now["bytes_sent"] - first["bytes_sent"]) / steps
    wire_ms = 1e3 * num * link.seconds(sent / num) if num else 0.0
    # Exposed time includes waits for slower ranks, which plain DDP would have too.
    return steps * (max(0.0, dense_ms - overlap) - min(exposed, codec + wire_ms)) / 1e3


def _are_apart(now: Mapping[str, float]) -> bool:
    """Return whether bytes between nodes differ from all bytes: there are several nodes with several ranks."""
    return 0 < now.get("bytes_dense_between_nodes", 0.0) < 0.999 * now["bytes_dense"]


def _ratio(
    now: Mapping[str, float], last: Mapping[str, float], of: str = "bytes_sent", to: str = "bytes_dense"
) -> float:
    sent, dense = (now.get(key, 0.0) - last.get(key, 0.0) for key in (of, to))
    return dense / sent if sent else math.nan


def _mean_of_timed_steps(name: str, now: Mapping[str, float], last: Mapping[str, float]) -> float:
    steps = now.get("timed_steps", 0) - last.get("timed_steps", 0)
    return (now[name] - last[name]) / steps if steps else math.nan


def _times(sent: float, dense: float) -> str:
    if not sent or abs(dense / sent - 1) <= 0.005:
        return ""
    return f" ({dense / sent:.3g} times fewer)" if sent < dense else f" ({sent / dense:.3g} times as many)"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB" if num_bytes < 999.5 else f"{num_bytes:,.0f} TB"
