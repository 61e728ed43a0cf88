"""Names, aliases and hooks of third parties."""

import dataclasses
import importlib
import sys
import warnings

import pytest

import lightning_commhooks as lc
from lightning_commhooks.advice import listing
from lightning_commhooks.interface import options, registry

BUILT_IN = {
    "allgather",
    "allreduce",
    "auto",
    "batched_powersgd",
    "bf16",
    "chunked_topk",
    "diloco",
    "fp16",
    "fp8",
    "hierarchical_localsgd",
    "int2",
    "int4",
    "int8",
    "noop",
    "post_localsgd",
    "powersgd",
    "quantize_per_channel",
    "quantize_per_tensor",
}

MODULE = """
from dataclasses import dataclass
import lightning_commhooks as lc

@dataclass(frozen=True, kw_only=True)
class Theirs(lc.CommHook):
    name = "theirs"
    level: int = 1

    def bind(self, group):
        raise NotImplementedError
"""


@pytest.fixture
def _third_party(tmp_path, monkeypatch):
    """A distribution that adds a hook, and one entry point that is none."""
    (tmp_path / "their_module.py").write_text(MODULE)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lightning_commhooks.hooks]\ntheirs = their_module:Theirs\nnothing = their_module:dataclass\n"
        "broken = module_that_is_not_there:Hook\nother = their_module:Theirs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("their_module", None)


def test_names():
    assert set(lc.available_hooks()) >= BUILT_IN
    assert lc.available_hooks() == sorted(lc.available_hooks())
    for name in BUILT_IN:
        assert lc.get_hook(name).name == name


def test_aliases():
    assert lc.get_hook("power_sgd", rank=3) == lc.PowerSGD(rank=3, start="auto")
    assert lc.get_hook("batched_power_sgd") == lc.BatchedPowerSGD(start="auto")
    assert "power_sgd" not in lc.available_hooks()


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_names_of_classes(name):
    hook_class = registry.get_hook_class(name)
    assert registry.get_hook_class(hook_class.__name__) is registry.get_hook_class(name.upper()) is hook_class


def test_a_name_as_it_is_comes_first(monkeypatch):
    class Other(lc.CommHook):
        name = "int_8"

    monkeypatch.setitem(options.registered, Other.name, Other)
    assert registry.get_hook_class("int8") is lc.Int8
    assert registry.get_hook_class("int_8") is Other


def test_configured_hook_is_returned_as_it_is():
    hook = lc.PowerSGD()
    assert lc.get_hook(hook) is hook


@pytest.mark.usefixtures("_third_party")
def test_entry_point():
    assert "theirs" in lc.available_hooks()
    assert lc.get_hook("theirs", level=2).level == 2
    with pytest.raises(ValueError, match=r"Theirs.*Options of Theirs: level"):
        lc.get_hook("theirs", depth=2)
    with pytest.raises(ValueError, match="did you mean 'theirs'"):
        lc.get_hook("their")
    with pytest.raises(ValueError, match=r"entry point 'nothing' of package 'theirs' must be a CommHook class"):
        lc.get_hook("nothing")
    with pytest.raises(ValueError, match=r"entry point 'broken' .* does not load: ModuleNotFoundError"):
        lc.get_hook("broken")
    with pytest.raises(ValueError, match=r"entry point 'other' .* the name 'theirs': both names have to be equal"):
        lc.get_hook("other")


@pytest.mark.usefixtures("_third_party")
def test_packages_that_are_broken_are_not_listed():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = [hook["name"] for hook in listing.listed()]
    assert {"theirs", "powersgd"} <= set(names)
    texts = [str(warning.message) for warning in caught]
    assert [text.split("'")[1] for text in texts] == ["broken", "nothing", "other"]


def test_name_is_taken():
    class Other(lc.CommHook):
        name = "power_sgd"

    with pytest.raises(ValueError, match=r"'power_sgd' is taken by lightning_commhooks\.hooks\.powersgd\.PowerSGD"):
        registry.register(Other)
    assert registry.register(lc.PowerSGD) is lc.PowerSGD


@pytest.mark.parametrize("kind", [lc.PowerSGD, lc.BatchedPowerSGD])
def test_short_names_of_options(kind):
    full = kind(matrix_approximation_rank=4, start_powerSGD_iter=10)
    assert kind(rank=4, start=10) == lc.get_hook(kind.name, rank=4, start=10) == full
    assert dataclasses.replace(kind(rank=4), start_powerSGD_iter=10) == full
    assert "start_powerSGD_iter=10" in repr(kind(start=10))
    with pytest.raises(ValueError, match="rank and matrix_approximation_rank are two names of one option"):
        kind(rank=4, matrix_approximation_rank=4)
    with pytest.raises(ValueError, match="has no option 'ranks'; did you mean 'rank'"):
        lc.get_hook(kind.name, ranks=4)


def test_names_differ_in_more_than_capitals_and_underscores():
    @dataclasses.dataclass(frozen=True)
    class Other(lc.CommHook):
        name = "Power_Sgd"

    with pytest.raises(ValueError, match=r"'Power_Sgd' is taken by .*PowerSGD; capitals and underscores"):
        lc.register(Other)


def test_a_class_that_is_defined_again_replaces_itself():
    """As by a cell of a notebook that runs twice."""

    def define():
        class Again(lc.CommHook):
            name = "again"

            def bind(self, group):
                raise NotImplementedError

        return lc.register(Again)

    try:
        define()
        second = define()
        assert type(lc.get_hook("again")) is second
    finally:
        del options.registered["again"]
