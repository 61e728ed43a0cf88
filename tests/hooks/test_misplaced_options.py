"""Options of hooks in the wrong place: every way in says which line to write."""

import collections
import copy
import dataclasses
import inspect
import pickle
import re

import pytest

import lightning_commhooks as lc
from lightning_commhooks.interface.misplaced import explained, in_yaml
from lightning_commhooks.interface.names import WRAPPERS

RANK_4 = "hook=PowerSGD(matrix_approximation_rank=4)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theirs(lc.CommHook):
    name = "theirs"
    level: int = 1

    def bind(self, group):
        raise NotImplementedError


class Plain(lc.CommHook):
    """Not a dataclass, and without options."""

    name = "plain"

    def bind(self, group):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lc.PowerSGD(block_size=64), "PowerSGD has no option 'block_size'. Options of PowerSGD: matrix_app"),
        (
            lambda: lc.PowerSGD(4),
            "4 was given without a name; write for example matrix_approximation_rank=4. Options of",
        ),
        (
            lambda: lc.PostLocalSGD(8),
            "PostLocalSGD takes options by name only: 8 was given without a name; write for e",
        ),
        (lambda: lc.PostLocalSGD(8), "write for example period=8. Options of PostLocalSGD: "),
        (lambda: lc.PowerSGD(start_powersgd_itr=4), "did you mean 'start_powerSGD_iter'? Options of Po"),
        (lambda: lc.PowerSGD(ranks=4), "did you mean 'rank'?"),
        (lambda: dataclasses.replace(lc.Int8(), rank=4), "Int8 has no option 'rank'"),
        (lambda: lc.AllReduce(3), "Options of AllReduce: none"),
        (lambda: lc.Cast(dtype="bf16"), "Cast needs hook=. Options of Cast: hook, dtype"),
        (lambda: lc.Cast("int8", "bf16", 3), "Cast takes hook, dtype, and all others by name: 3 was given wi"),
        (lambda: lc.Cast("powersgd", rank=4), "it is an option of the hook inside, PowerSGD(rank=...)"),
        (lambda: lc.Schedule({0: lc.Int8()}, block_size=8), "an option of the hook inside, Int8(block_size=...)"),
        (lambda: lc.Auto(candidates=["int8"], block_size=8), "an option of the hook inside, Int8(block_size=...)"),
        (lambda: Theirs(levl=2), "Theirs has no option 'levl'; did you mean 'level'? Options of Theirs: level"),
        (lambda: Plain(2), "Plain takes options by name only: 2 was given without a name"),
        (lambda: lc.get_hook({"name": "powersgd", "rank": 4}), f"write {RANK_4}"),
        (lambda: lc.get_hook(("powersgd", {"rank": 4})), f"write {RANK_4}"),
        (lambda: lc.get_hook("powersgd(rank=4)"), f"options are no part of a name: write {RANK_4}"),
        (lambda: lc.get_hook("powersgd:4"), "options are no part of a name: write hook=PowerSGD(...)"),
        (lambda: lc.get_hook("powersgd()"), "options are no part of a name: write hook=PowerSGD()"),
        (
            lambda: lc.get_hook("Cast"),
            "unknown hook 'Cast': Cast goes around another hook; write hook=Cast('powersgd',",
        ),
        (lambda: lc.get_hook("schedule"), "write hook=Schedule({0: 'bf16', 1000: 'powersgd'})"),
        (lambda: lc.get_hook("per_parameter"), "write hook=PerParameter("),
        (lambda: lc.get_hook("ScaleByGradAccumulation"), "write hook=ScaleByGradAccumulation('bf16', 'mean')"),
        (lambda: lc.get_hook("reduce_scatter"), "use 'allreduce' between replicas"),
        (lambda: lc.get_hook(lc.PowerSGD(), rank=4), f"write {RANK_4}"),
        (lambda: lc.get_hook(lc.Cast), "did you mean Cast(...)?"),
        (lambda: lc.attach(None, "powersgd", rank=4), "attach() has no option 'rank': it is an option of the hook. W"),
        (lambda: lc.attach(None, "powersgd", rank=4), f"Write {RANK_4}, with `from lightning_commhooks import PowerSG"),
        (lambda: lc.attach(None, "powersgd", matrix_aproximation_rank=4), "'matrix_approximation_rank' of the hook? W"),
        (
            lambda: lc.attach(None, "int8", rank=4),
            "an option of PowerSGD and BatchedPowerSGD, and hook is 'int8'",
        ),
        (
            lambda: lc.attach(None, lc.Cast("powersgd"), rank=4),
            'Write PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter="auto") in its pl',
        ),
        (lambda: lc.attach(None, "powersgd", strict_state=False), "an argument of attachment.load_state_dict()"),
        (lambda: lc.attach(None, "powersgd", resync=True), "averaged([optimizer], permanently=True)"),
        (lambda: lc.attach(None, "powersgd", fault_tolerance=3), "give attach() a manager="),
        (lambda: lc.attach(None, "powersgd", replicas=2), "takes their number from the device mesh"),
        (lambda: lc.attach(None, "int8", acumulation="mean"), "did you mean 'accumulation'?"),
        (lambda: lc.attach(None, "int8", 4), "attach() takes model, hook, and all others by name: 4 was given w"),
        (
            lambda: lc.attach(None),
            "attach() needs hook=, the name of a hook or a configured one, such as hook='power",
        ),
    ],
)
def test_says_what_to_write(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("example", WRAPPERS.values())
def test_examples_of_wrappers_are_hooks(example):
    assert isinstance(eval(example, vars(lc).copy()), lc.CommHook)


@pytest.mark.parametrize("hook", [lc.PowerSGD(rank=3), lc.Cast("powersgd"), lc.Schedule({0: "bf16"}), Theirs(level=2)])
def test_hooks_are_still_copied_and_looked_at(hook):
    assert pickle.loads(pickle.dumps(hook)) == copy.deepcopy(hook) == copy.copy(hook) == hook
    assert list(inspect.signature(type(hook)).parameters) == [field.name for field in dataclasses.fields(hook)]


def test_other_type_errors_are_not_hidden():
    @explained
    def fails(hook):
        raise TypeError("of its own code")

    with pytest.raises(TypeError, match="of its own code"):
        fails("int8")


BLOCK = "hook:\n  class_path: lightning_commhooks.PowerSGD\n  init_args:\n    matrix_approximation_rank: 4"


@pytest.mark.parametrize(
    "value",
    [
        {"name": "powersgd", "rank": 4},
        {"powersgd": {"rank": 4}},
        {"class_path": "powersgd", "init_args": {"matrix_approximation_rank": 4}},
        {"matrix_approximation_rank": 4},
        "PowerSGD(rank=4)",
    ],
)
def test_block_of_a_configuration_file(value):
    assert in_yaml(value) == f"a hook with options is written by its class:\n{BLOCK}"


def test_wrong_options_in_a_configuration_file():
    assert in_yaml("powersdg") == "'powersdg' is no hook; did you mean 'powersgd'?"
    right = {"class_path": "lightning_commhooks.PowerSGD", "init_args": {"matrix_approximation_rank": "four"}}
    assert in_yaml(right) == "an option of PowerSGD is missing or has a wrong value", "without the block"
    short = {"class_path": "lightning_commhooks.PowerSGD", "init_args": {"rank": 4}}
    assert in_yaml(short).endswith(BLOCK)
    nested = collections.namedtuple("NestedArg", "key val")("rounding", "foo")  # as of jsonargparse
    assert in_yaml(nested).startswith("'rounding' is an option of FP8, Int4 and Int8: its value 'foo' is wrong, or the")
    assert in_yaml({"name": "powersgd", "ranks": 4}) == "PowerSGD has no option 'ranks'; did you mean 'rank'?"
