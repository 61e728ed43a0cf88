"""Refusals of Lightning's strategies, and how they say it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

# Arguments of Lightning's strategies that are refused, and what to write in their place.
REPLACED = {
    "ddp_comm_hook": "pass it as hook=... (with hook_state=... for a function), or use a hook's name",
    "ddp_comm_state": "pass it as hook_state=..., or set the options of a hook: hook=PowerSGD(...)",
    "ddp_comm_wrapper": "use hook=Cast(hook, 'fp16') or hook=Cast(hook, 'bf16')",
    "model_averaging_period": "use hook=PostLocalSGD(period=...)",
}


def options_of(*classes: type) -> set[str]:
    """Names of the arguments that classes are made with; some of them pass on whatever they get."""
    parameters = (p for made in classes for p in inspect.signature(made).parameters.values())
    return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


@contextmanager
def refusals_as(misconfiguration: type[Exception], strategy: object) -> Iterator[None]:
    """Raise a `ValueError` as Lightning's own exception, which names the strategy."""
    try:
        yield
    except ValueError as error:
        raise misconfiguration(f"{type(strategy).__name__}: {error}") from error
