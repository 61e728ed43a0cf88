"""What an attachment does, as values to log while training and one line at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_commhooks.core.attachment import Attachment
from lightning_commhooks.core.error_sample import DEFAULT_NUMEL
from lightning_commhooks.core.fsdp import FSDPAttachment
from lightning_commhooks.core.link import Link

PREFIX = "comm/"
# In the order in which they are shown.
NAMES = (
    "bytes_sent",
    "compression_ratio",
    "relative_error",
    "residual_norm",
    "exposed_ms",
    "codec_ms",
    "averagings",
    "nonfinite_steps",
)
_LINK_BUDGET = 0.5


class Monitor:
    """Asks one attachment now and then what it did.

    Collective: make it on all ranks with the same arguments, outside of a backward.

    Args:
        attachment: of `attach` or `attach_fsdp`.
        error_every: see `Attachment.sample_error`; 0: no errors.
        error_numel: see there.
        measure_link: whether to measure, once and for about half a second, what the network can do, for the seconds
            saved in `summary`.

    Raises:
        ValueError: see `Attachment.sample_error`.
    """

    def __init__(
        self,
        attachment: Attachment | FSDPAttachment,
        *,
        error_every: int = 100,
        error_numel: int | None = DEFAULT_NUMEL,
        measure_link: bool = True,
    ) -> None:
        self.attachment = attachment
        self._link: Link | None = None
        if isinstance(attachment, Attachment) and attachment.bound is not None:
            attachment.sample_error(error_every, error_numel)
            if measure_link and attachment.bound.group.size > 1:
                self._link = attachment.measure_link(_LINK_BUDGET)
        self._first = self._last = attachment.metrics()

    def values(self) -> dict[str, float]:
        """What to log, on any rank alone, outside of a backward; what is not known yet, or never, is left out.

        `comm/bytes_sent`, `comm/averagings` and `comm/nonfinite_steps` so far. `comm/compression_ratio`, and
        `comm/exposed_ms` and `comm/codec_ms` per step, since the last call. `comm/relative_error` of the last sampled
        step. `comm/residual_norm` now. Those of hooks that have no such thing are 0. See `Attachment.metrics`.
        """
        now, last = self.attachment.metrics(), self._last
        self._last = now
        values = {name: now.get(name, math.nan) for name in NAMES}
        values["compression_ratio"] = _ratio(now, last)
        for name in ("exposed_ms", "codec_ms"):
            values[name] = _per_timed_step(name, now, last)
        if isinstance(self.attachment, Attachment) and not self.attachment.is_closed:
            values["residual_norm"] = self.attachment.residual_norm()
        return {PREFIX + name: float(value) for name, value in values.items() if math.isfinite(value)}

    def summary(self) -> str:
        """One line on all of training; also after the attachment was closed. Not collective."""
        now, first = self.attachment.metrics(), self._first
        steps = int(now["steps"] - first["steps"])
        sent, dense = now["bytes_sent"] - first["bytes_sent"], now["bytes_dense"] - first["bytes_dense"]
        name = self.attachment.name
        if not steps or math.isnan(sent):
            return f"hook {name!r}: {steps:,} steps, {'bytes unknown' if steps else 'nothing sent'}"
        text = f"hook {name!r}: {_size(sent)} sent in {steps:,} steps instead of {_size(dense)}"
        text += f" ({dense / sent:.3g} times fewer)" if sent else ""
        saved = self._seconds_saved(steps, dense, now, first)
        if saved is not None:
            text += f"; about {abs(saved):,.1f} s {'saved' if saved >= 0 else 'lost'} against plain DDP"
        if isinstance(self.attachment, Attachment):
            reasons = self.attachment.steps_not_compressed()
            if reasons:
                text += f"; {sum(reasons.values()):,} steps not compressed ({', '.join(reasons)})"
        if now.get("nonfinite_steps", 0) - first.get("nonfinite_steps", 0):
            text += f"; {int(now['nonfinite_steps'] - first['nonfinite_steps']):,} steps with inf or NaN"
        return text

    def _seconds_saved(
        self, steps: int, dense: float, now: Mapping[str, float], first: Mapping[str, float]
    ) -> float | None:
        """Time that plain DDP would have waited, less that of the hook, both without waiting for slower ranks."""
        exposed, overlap, codec = (_per_timed_step(k, now, first) for k in ("exposed_ms", "overlap_ms", "codec_ms"))
        num = (now["collectives"] - first["collectives"]) / steps
        if self._link is None or math.isnan(exposed):
            return None
        dense_ms = 1e3 * self._link.cost("all_reduce", dense / steps).seconds
        sent = (now["bytes_sent"] - first["bytes_sent"]) / steps
        wire_ms = 1e3 * num * self._link.cost("all_reduce", sent / num).seconds if num else 0.0
        # Of what was waited, some was for slower ranks, for which plain DDP would have waited too.
        return steps * (max(0.0, dense_ms - overlap) - min(exposed, codec + wire_ms)) / 1e3


def _ratio(now: Mapping[str, float], last: Mapping[str, float]) -> float:
    sent, dense = (now[key] - last[key] for key in ("bytes_sent", "bytes_dense"))
    return dense / sent if sent else math.nan


def _per_timed_step(name: str, now: Mapping[str, float], last: Mapping[str, float]) -> float:
    steps = now.get("timed_steps", 0) - last.get("timed_steps", 0)
    return (now[name] - last[name]) / steps if steps else math.nan


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            return f"{num_bytes:.3g} {unit}" if num_bytes < 1000 else f"{num_bytes:,.0f} {unit}"
        num_bytes /= 1000
    raise AssertionError
