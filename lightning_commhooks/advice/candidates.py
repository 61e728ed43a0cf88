"""The hooks to compare: parsed from the command line, prepared for measuring, and printed as code."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_commhooks.advice.task import imported
from lightning_commhooks.hooks import DiLoCo, Noop, PostLocalSGD
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.interface.start import started_at_once

DENSE = "dense"
NOOP = "noop"
# Hooks that are compared by default, by label.
DEFAULT = {
    "allreduce": "allreduce",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "powersgd, rank 4": "powersgd:matrix_approximation_rank=4",
    "post_localsgd": "post_localsgd:post_local_gradient_allreduce=False",
    "diloco": "diloco:post_local_gradient_allreduce=False",
}

# A longer period of local steps is measured with about `_SHORT_PERIOD` steps instead.
_LONGEST_PERIOD = 8
_SHORT_PERIOD = 4


@dataclass(frozen=True)
class Candidate:
    """One way to average gradients.

    Attributes:
        hook: the configuration; `None` for DDP without a hook.
        measured: the configuration that is measured instead: without warm-up, and with a shorter period.
        period_factor: how many times shorter the measured period is.
    """

    label: str
    hook: CommHook | None
    measured: CommHook | None
    period_factor: int = 1

    @property
    def period(self) -> int:
        """Steps after which `measured` has averaged and sent everything at least once."""
        return self.measured.repeats_after() if self.measured is not None else 1

    @property
    def code(self) -> str:
        """The hook as Python code: `"bf16"`, or `PowerSGD(matrix_approximation_rank=4)`."""
        return "None" if self.hook is None else code(self.hook)

    @property
    def note(self) -> str:
        """How the measured hook differs from the user's; empty if they are the same."""
        if self.measured is None or self.hook == self.measured:
            return ""
        longer = f", calculated for a period {self.period_factor} times as long" if self.period_factor > 1 else ""
        return f"measured as {code(self.measured)}{longer}"


def candidates(specs: Iterable[str] | None) -> list[Candidate]:
    """Return dense, noop and the hooks of these command-line options, each once; `None`: the default hooks."""
    usual = [(label, hook) for label, spec in DEFAULT.items() for _, hook in parse(spec)]
    chosen = usual if specs is None else [pair for spec in specs for pair in parse(spec)]
    found = {label: candidate(label, hook) for label, hook in chosen}
    return [Candidate(DENSE, None, None), candidate(NOOP, Noop()), *found.values()]


def candidate(label: str, hook: CommHook) -> Candidate:
    """Return a candidate without warm-up steps; PostLocalSGD and DiLoCo also get a shorter period."""
    measured, factor = started_at_once(hook), 1
    if isinstance(measured, (PostLocalSGD, DiLoCo)) and measured.repeats_after() > _LONGEST_PERIOD:
        factor = max(1, measured.period // max(_SHORT_PERIOD, getattr(measured, "fragments", 1)))
        measured = dataclasses.replace(measured, period=measured.period // factor)
    return Candidate(label, hook, measured, factor)


def parse(spec: str) -> list[tuple[str, CommHook]]:
    """Parse the hooks of one command-line option; raise a `ValueError` if a hook, an option or its value is invalid.

    Each hook is a name, `bf16`; a name with options, `powersgd:matrix_approximation_rank=4,start_powerSGD_iter=0`; or
    an object in a module, `my_module:MY_HOOK`, for hooks with wrappers. `dense` and `noop` are always measured.
    """
    texts: list[str] = []
    for token in filter(None, (token.strip() for token in spec.split(","))):
        key = token.partition("=")[0]
        if "=" in token and ":" not in key:
            if not texts:
                raise ValueError(f"--hooks {spec}: {token!r} is an option without a hook; write hook:{token}")
            texts[-1] += ("," if ":" in texts[-1] else ":") + token
        else:
            texts.append(token)
    if not texts:
        raise ValueError(
            f"--hooks {spec!r} names no hook: write --hooks int8,powersgd, or leave it out for the usual ones"
        )
    return [(text, _hook(text)) for text in texts if text not in (DENSE, NOOP)]


def _hook(text: str) -> CommHook:
    name, colon, rest = text.partition(":")
    if colon and "=" not in rest:
        return _imported(name, rest)
    options = {}
    for option in filter(None, rest.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--hooks {text}: write options as {name}:name=value, not {option!r}")
        options[key.strip()] = _value(value.strip())
    try:
        hook = get_hook(name, **options)
    except ValueError as error:
        own = "; write your own hook as my_module:MY_HOOK" if str(error).startswith("unknown hook") else ""
        raise ValueError(f"--hooks {text}: {error}{own}") from error
    if hook.is_outermost and hook.inner_hooks:
        raise ValueError(f"--hooks {text}: {hook.name} uses several hooks in one run; compare those")
    return hook


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _imported(module: str, attribute: str) -> CommHook:
    try:
        found = imported(module, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--hooks {module}:{attribute}: {error}; options are {module}:name=value") from error
    if not isinstance(found, CommHook):
        raise ValueError(f"--hooks {module}:{attribute} must be a configured CommHook, got {found!r}")
    return found
