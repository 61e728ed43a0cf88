"""The work of a collective that was run to its end where it was asked for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Finished(dist.Work):
    """A collective whose result is there, in the order of the stream that it was issued on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self, timeout: Any = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()
