"""What is raised when communication fails."""

from __future__ import annotations


class HookError(RuntimeError):
    """A communication hook failed; the message names hook, step and bucket, `__cause__` is the reason."""
