"""Named ranges in what the profilers of frameworks write, from two ranks, with those as users make them."""

import pytest
from forks import FOLDER
from traces import named, read

RUNNER = FOLDER / "ranges_lightning_runner.py"
# Of Lightning's default schedule.
ACTIVE = 3


@pytest.fixture(scope="module", params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request, tmp_path_factory):
    pytest.importorskip(request.param)
    from test_lightning import launch

    folder = tmp_path_factory.mktemp("ranges")
    return launch(folder, package=request.param, runner=RUNNER).out


def traces_of(folder):
    """Our ranges by rank, which each has left one trace of its first epoch's steps."""
    return [read(path)[0] for path in sorted(folder.glob("*.json"))]


def test_lightning_profiler_has_reductions_with_what_is_in_them(lightning):
    found = [ranges for ranges in traces_of(lightning / "int8") if named(ranges, "int8", "reduce")]
    assert len(found) >= 2
    for ranges in found:
        reductions, encoded = named(ranges, "int8", "reduce"), named(ranges, "int8", "encode")
        assert len(reductions) >= ACTIVE
        assert len(encoded) >= ACTIVE
        for kind in ("encode", "decode"):
            assert all(any(each.within(outer) for outer in reductions) for each in named(ranges, "int8", kind))
        assert len({each.thread for each in reductions}) == 1
    for rank in range(2):
        assert "commhooks::int8::reduce" in (lightning / f"int8.{rank}.txt").read_text()


def test_lightning_profiler_has_averagings(lightning):
    found = traces_of(lightning / "post_localsgd")
    averaged = [named(ranges, "post_localsgd", "average") for ranges in found]
    assert sum(map(bool, averaged)) >= 2
    for ranges, averages in zip(found, averaged, strict=True):
        # Those of the state of optimizers, of which there is none here, have nothing to reduce.
        reduced = [outer for outer in averages if any(each.within(outer) for each in named(ranges, "all_reduce"))]
        gathered = [outer for outer in averages if any(each.within(outer) for each in named(ranges, "all_gather"))]
        assert (bool(reduced), gathered) == (bool(averages), averages)
