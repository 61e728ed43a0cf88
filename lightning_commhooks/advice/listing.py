"""All hooks and wrappers: options, and what each sends."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from lightning_commhooks import wrappers
from lightning_commhooks.advice.candidates import Candidate, candidate
from lightning_commhooks.advice.emulated import Emulated, emulated_group
from lightning_commhooks.advice.step_time import amortized
from lightning_commhooks.advice.task import Task
from lightning_commhooks.collectives.link import Link
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.python_code import documented_arguments
from lightning_commhooks.interface.registry import available_hooks, get_hook, get_hook_class
from lightning_commhooks.sources.attach import attach_emulated

# Numbers of ranks for which it is said what hooks send.
WORLDS = (2, 8)


@dataclass(frozen=True)
class Option:
    """A field of a hook; `default` is Python code, `None` where a value must be given."""

    name: str
    type: str
    default: str | None
    doc: str


@dataclass(frozen=True)
class Listed:
    """A hook, or a wrapper.

    Attributes:
        name: by which users choose it; of a wrapper, how it is written.
        class_name: its class.
        aliases: other names.
        summary: what it does.
        sends: by number of ranks, bytes per step over those of dense averaging in float32; empty for wrappers.
        options: its fields.
        is_wrapper: whether it is made of hooks.
    """

    name: str
    class_name: str
    aliases: tuple[str, ...]
    summary: str
    sends: dict[int, float]
    options: list[Option]
    is_wrapper: bool


def listed(only: str | None = None) -> list[Listed]:
    """All hooks, then wrappers; or the one of a name.

    Raises:
        ValueError: there is none of that name.
    """
    classes = {wrappers.__dict__[name].name: wrappers.__dict__[name] for name in wrappers.__all__}
    if only is not None:
        lowered = only.lower()
        by_class = {cls.__name__.lower(): cls for cls in classes.values()}
        wrapper = classes.get(lowered) or by_class.get(lowered)
        return [_wrapper(wrapper) if wrapper is not None else _hook(only)]
    return [*(_hook(name) for name in available_hooks()), *(_wrapper(cls) for cls in classes.values())]


def _hook(name: str) -> Listed:
    sends = {}
    with contextlib.suppress(ValueError):  # of others, which cannot be made without options
        hook = get_hook(name)
        # One that uses several hooks sends what those send.
        sends = {} if hook.inner_hooks else fractions_sent(hook)
    return _listed(get_hook_class(name), sends, False)


def _wrapper(cls: type[CommHook]) -> Listed:
    return _listed(cls, {}, True)


def _listed(cls: type[CommHook], sends: dict[int, float], is_wrapper: bool) -> Listed:
    return Listed(cls.name, cls.__name__, cls.aliases, _summary(cls), sends, _options(cls), is_wrapper)


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def _options(cls: type[CommHook]) -> list[Option]:
    docs = documented_arguments(cls)
    return [
        Option(field.name, _type(field.type), _default(field), docs.get(field.name, ""))
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.init
    ]


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return None if field.default is dataclasses.MISSING else repr(field.default)


def fractions_sent(hook: CommHook) -> dict[int, float]:
    """Bytes that a rank sends in a step over those of dense averaging, by number of ranks; counted in a short run."""
    # Uncompiled: only bytes count.
    with _alone() as group, torch._dynamo.config.patch(disable=True):
        return {world: _fraction_sent(candidate(hook.name, hook), world, group) for world in WORLDS}


def _fraction_sent(candidate: Candidate, world: int, group: dist.ProcessGroup) -> float:
    task = _task()
    link = Link.given(bandwidth=1e15, latency=0, world_size=world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = task.wrap(group)
        attachment = attach_emulated(
            model,
            candidate.emulated,
            lambda counters: emulated_group(Emulated(link), counters, task.device),
            task.optimizers,
        )
        sent, dense = [0.0], 0.0
        for _ in range(max(2, candidate.period)):
            task.step(model)
            sent.append(attachment.metrics()["bytes_sent"])
            dense = attachment.metrics()["bytes_dense"]
        attachment.close()
    steps = [after - before for before, after in itertools.pairwise(sent)]
    return amortized(steps, steps, candidate.period_factor) / (dense / len(steps))


def _task() -> Task:
    module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(module.parameters(), lr=1e-4)]
    return Task(module, torch.randn(2, 512), lambda output: output.square().mean(), optimizers, {}, torch.device("cpu"))


@contextlib.contextmanager
def _alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
