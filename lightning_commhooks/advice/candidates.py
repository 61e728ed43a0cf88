"""The hooks to compare: from the command line, as they are measured, and as the user writes them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_commhooks.hooks import AllReduce, DiLoCo, HierarchicalLocalSGD, Noop, PostLocalSGD
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.registry import get_hook, get_hook_class
from lightning_commhooks.wrappers.late_start import at_once, late_starts

DENSE = "dense"
NOOP = "noop"
# What people read in their place.
TITLES = {DENSE: "dense (no hook)", NOOP: "noop (sends nothing)"}
# What is compared unless the user chooses.
DEFAULT = {
    "allreduce": "allreduce",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "powersgd, rank 4": "powersgd:matrix_approximation_rank=4",
    "post_localsgd": "post_localsgd:post_local_gradient_allreduce=False",
    "diloco": "diloco:post_local_gradient_allreduce=False",
}

# A period of local steps is measured at no more steps than this.
_LONGEST_PERIOD = 8
_SHORT_PERIOD = 4


@dataclass(frozen=True)
class Candidate:
    """One way to average gradients.

    Attributes:
        label: name of the hook, as the user gave it.
        hook: the configuration; `None` for DDP without any hook.
        measured: what is measured in its place: without warm-up, and with a shorter period.
        period_factor: how many times shorter its period is.
    """

    label: str
    hook: CommHook | None
    measured: CommHook | None
    period_factor: int = 1

    @property
    def emulated(self) -> CommHook:
        """What stands for it where there is no network."""
        return self.measured if self.measured is not None else AllReduce()

    @property
    def period(self) -> int:
        """Steps after which `measured` has averaged all that it averages, and sent each of what it sends in turn."""
        return self.measured.repeats_after() if self.measured is not None else 1

    @property
    def code(self) -> str:
        """The hook as the user writes it: `"bf16"`, or `PowerSGD(matrix_approximation_rank=4)`."""
        return "None" if self.hook is None else code(self.hook)

    @property
    def notes(self) -> list[str]:
        """How what was measured differs from what the user gave, in sentences."""
        if self.hook is None or self.hook == self.measured:
            return []
        starts = {name: steps for _, name, steps in late_starts(self.hook)}
        notes = [f"measured from the first compressed step on ({k}={v} steps come before)" for k, v in starts.items()]
        if self.period_factor > 1:
            period = self.period * self.period_factor
            notes.append(f"measured with a period of {self.period} and calculated for one of {period} steps")
        return notes


def candidates(specs: Iterable[str] | None) -> list[Candidate]:
    """Dense, noop and the hooks of some command-line options, each once.

    Args:
        specs: each one or several hooks with commas between them: see [`parse`][]. `None`: the usual ones.

    Raises:
        ValueError: see [`parse`][].
    """
    if specs is None:
        chosen = [(label, hook) for label, spec in DEFAULT.items() for _, hook in parse(spec)]
    else:
        chosen = [pair for spec in specs for pair in parse(spec)]
    found = {DENSE: Candidate(DENSE, None, None), NOOP: Candidate(NOOP, Noop(), Noop())}
    for label, hook in chosen:
        if label not in found:
            found[label] = candidate(label, hook)
    return list(found.values())


def candidate(label: str, hook: CommHook) -> Candidate:
    """A hook that is measured from its first compressed step on, with a period of few steps."""
    measured, factor = shortened(at_once(hook))
    return Candidate(label, hook, measured, factor)


def parse(spec: str) -> list[tuple[str, CommHook]]:
    """Hooks of a command-line option.

    Each is a name, `bf16`; a name with options, `powersgd:matrix_approximation_rank=4,start_powerSGD_iter=0`; or an
    object in a module, `my_module:MY_HOOK`, for hooks with wrappers. `dense` and `noop` are measured anyway.

    Raises:
        ValueError: an unknown hook or option, or a value that does not fit.
    """
    texts: list[str] = []
    for token in filter(None, (token.strip() for token in spec.split(","))):
        key = token.partition("=")[0]
        if "=" in token and ":" not in key:
            if not texts:
                raise ValueError(f"--hooks {spec}: {token!r} is an option of no hook; write hook:{token}")
            texts[-1] += ("," if ":" in texts[-1] else ":") + token
        else:
            texts.append(token)
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
        raise ValueError(f"--hooks {text}: {error}") from error
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
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        try:
            get_hook_class(module)
        except ValueError:
            raise ValueError(f"--hooks {module}:{attribute}: {error}") from error
        raise ValueError(f"--hooks {module}:{attribute}: write options as {module}:name=value") from error
    if not isinstance(found, CommHook):
        raise ValueError(f"--hooks {module}:{attribute} must be a configured CommHook, is {found!r}")
    return found


def shortened(hook: CommHook) -> tuple[CommHook, int]:
    """The hook with a period of few steps, and by what factor that period is shorter; others' hooks as they are."""
    if hook.repeats_after() <= _LONGEST_PERIOD:
        return hook, 1
    if isinstance(hook, (PostLocalSGD, DiLoCo)):
        factor = hook.period // max(_SHORT_PERIOD, getattr(hook, "fragments", 1))
        return (dataclasses.replace(hook, period=hook.period // factor), factor) if factor > 1 else (hook, 1)
    if isinstance(hook, HierarchicalLocalSGD):
        levels = hook.period_group_size_dict
        common, wanted = math.gcd(*levels), max(levels) // _LONGEST_PERIOD
        factor = max(d for d in range(1, common + 1) if common % d == 0 and d <= max(1, wanted))
        short_levels = {period // factor: size for period, size in levels.items()}
        return dataclasses.replace(hook, period_group_size_dict=short_levels), factor
    return hook, 1
