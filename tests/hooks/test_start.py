"""When a hook begins: `"auto"`, which a name stands for, differs from the default of the class, and shows it."""

from dataclasses import dataclass
from typing import Literal

import pytest

import lightning_commhooks as lc
from lightning_commhooks.interface.python_code import code
from lightning_commhooks.interface.start import auto_starts, late_starts, started, started_at, started_at_once

BY_CLASS = {
    "powersgd": (lc.PowerSGD, "start_powerSGD_iter", 1000),
    "batched_powersgd": (lc.BatchedPowerSGD, "start_powerSGD_iter", 1000),
    "post_localsgd": (lc.PostLocalSGD, "start_localSGD_iter", 100),
    "hierarchical_localsgd": (lc.HierarchicalLocalSGD, "start_localSGD_iter", 100),
}


@pytest.mark.parametrize("name", BY_CLASS)
def test_a_name_is_auto_and_a_class_is_a_step(name):
    hook_class, option, default = BY_CLASS[name]
    by_name, by_class = lc.get_hook(name), hook_class()
    assert by_name == hook_class(**{option: "auto"}) != by_class
    assert len({by_name, by_class, lc.get_hook(name)}) == 2
    assert f"{option}='auto'" in repr(by_name)
    assert f"{option}={default}" in repr(by_class)
    assert code(by_name) == f'"{name}"'
    assert code(by_class) == f"{hook_class.__name__}()"
    for hook in (by_name, by_class):
        assert eval(repr(hook), vars(lc)) == hook
    assert lc.get_hook(name, **{option: default}) == by_class


@pytest.mark.parametrize(("num_steps", "start"), [(200, 20), (40_000, 1000), (5, 0)])
def test_auto_is_a_tenth_of_the_run_or_the_default(num_steps, start):
    hook = lc.Cast("powersgd", "bf16")
    assert started(hook, num_steps) == lc.Cast(lc.PowerSGD(start_powerSGD_iter=start), "bf16")
    assert started(lc.Cast(lc.PowerSGD(), "bf16"), num_steps) == lc.Cast(lc.PowerSGD(), "bf16")


def test_where_the_length_is_not_known_auto_is_the_default():
    assert lc.get_hook("powersgd").changes_at() == {1000}
    assert lc.get_hook("post_localsgd").changes_at() == {100}


def test_diloco_begins_at_once():
    assert lc.get_hook("diloco") == lc.DiLoCo()
    hook = lc.DiLoCo(start_localSGD_iter="auto")
    assert (hook.changes_at(), [*late_starts(hook)], started(hook, 200)) == ({0}, [], hook)


@dataclass(frozen=True)
class OfOthers:
    start_one_iter: int = 50
    start_other_iter: int | Literal["auto"] = 60


def test_a_name_is_auto_where_the_type_of_the_option_allows_it():
    assert auto_starts(OfOthers) == {"start_other_iter": "auto"}
    assert auto_starts(lc.Int8) == {}


@dataclass(frozen=True)
class MayNeverStart(lc.CommHook):
    name = "may_never_start"

    start_iter: int | None = None
    start_other_iter: int | None = None

    def bind(self, group):
        return lc.BF16().bind(group)


def test_a_start_may_be_none():
    assert [*late_starts(MayNeverStart())] == []
    assert (
        started_at_once(MayNeverStart())
        == started(MayNeverStart(), 100)
        == started_at(MayNeverStart(), 7)
        == MayNeverStart()
    )


def test_any_option_from_start_to_iter_is_a_start():
    hook = MayNeverStart(start_iter=5)
    assert [*late_starts(hook)] == [(hook, "start_iter", 5)]
    assert started_at_once(hook) == MayNeverStart(start_iter=0)
