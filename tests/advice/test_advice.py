"""What the command line decides and understands, without processes."""

import collections
import dataclasses
import math
import re
import sys
from argparse import Namespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lightning_commhooks as lc
from lightning_commhooks.advice import study
from lightning_commhooks.advice.candidates import DEFAULT, candidate, candidates, code, parse
from lightning_commhooks.advice.emulated import Network
from lightning_commhooks.advice.ranking import Row, amortized, decide, headroom, merged, unsettled
from lightning_commhooks.advice.study import text_of
from lightning_commhooks.advice.task import _moved, imported, load_task

CPU = torch.device("cpu")


def row(label, step, error=0.0, spread=0.5):
    return Row(label, f'"{label}"', step, 1.0, 4.0, spread_ms=spread, exposed_ms=0.0, error=error)


DENSE, NOOP = row("dense", 100.0), row("noop", 40.0, math.nan)


@dataclasses.dataclass(frozen=True)
class Stranger(lc.CommHook):
    """A hook of somebody else, with an option that happens to be named as one of ours."""

    name = "stranger"
    period: int = 300

    def repeats_after(self):
        return 12

    def bind(self, group):
        raise NotImplementedError


class TestVerdict:
    def test_fastest_within_the_error(self):
        rows = [DENSE, NOOP, row("bf16", 70, 0.003), row("int8", 55, 0.01), row("powersgd", 45, 0.8)]
        verdict = decide(rows, max_error=0.3)
        assert verdict.choice == "int8"
        assert "45% less" in verdict.reason
        assert verdict.line == 'CompressedDDPStrategy(hook="int8")'
        assert list(verdict.apart) == ["powersgd"]
        assert "an error of 0.8 in one step is above --max-error 0.3" in verdict.apart["powersgd"]
        assert decide(rows, max_error=0.9).choice == "powersgd"

    def test_of_equally_fast_ones_the_most_exact(self):
        rows = [DENSE, NOOP, row("int4", 50, 0.08), row("int8", 52, 0.01), row("bf16", 60, 0.003)]
        assert decide(rows, 0.3).choice == "int8"

    def test_averaging_models_is_not_recommended(self):
        verdict = decide([DENSE, NOOP, row("int8", 55, 0.01), row("diloco", 42, math.nan)], 0.3)
        assert verdict.choice == "int8"
        assert "different algorithm" in verdict.apart["diloco"]

    @pytest.mark.parametrize(
        ("rows", "reason"),
        [
            ([DENSE, row("noop", 95), row("bf16", 80, 0.01)], "sends nothing takes 5% less time .* no hook can save"),
            ([DENSE, NOOP, row("int8", 97, 0.01)], "compression costs as much as it saves"),
            ([DENSE, NOOP, row("int8", 120, 0.01)], "compression costs as much as it saves"),
            ([DENSE, NOOP, row("int8", 85, 0.01, spread=30)], "saves 15.0 ms of 100.0 ms a step, give or take 60.0 ms"),
            ([DENSE, NOOP, row("int4", 50, 0.4)], "no hook is within the error"),
            ([DENSE, NOOP], "no hook is within the error"),
        ],
    )
    def test_do_not_compress(self, rows, reason):
        verdict = decide(rows, 0.3)
        assert verdict.choice is None
        assert verdict.line == ""
        with pytest.raises(ValueError, match=reason):
            raise ValueError(verdict.reason)

    @pytest.mark.parametrize(
        "rows",
        [
            [DENSE, row("noop", 95, spread=5), row("int8", 97, 0.01)],
            [DENSE, NOOP, row("int8", 97, 0.01, spread=10)],
            [DENSE, NOOP, row("int8", 85, 0.01, spread=30)],
            [row("dense", 161, spread=24), row("noop", 66, spread=40), row("int8", 140, 0.01, spread=20)],
        ],
    )
    def test_no_conclusion_from_what_is_within_the_noise(self, rows):
        verdict = decide(rows, 0.3)
        assert verdict.choice is None
        assert verdict.is_noisy
        assert "with more --rounds" in verdict.reason
        assert unsettled(rows) >= {"dense"}

    def test_of_hooks_that_differ_within_the_noise_the_most_exact_one(self):
        rows = [DENSE, NOOP, row("int4", 50, 0.08, spread=5), row("int8", 60, 0.01, spread=5), row("bf16", 80, 0.003)]
        assert decide(rows, 0.3).choice == "int8"
        rows = [DENSE, NOOP, row("int4", 50, 0.08), row("int8", 60, 0.01), row("bf16", 80, 0.003)]
        assert decide(rows, 0.3).choice == "int4"
        # But not one that need not be faster than dense averaging.
        rows = [DENSE, NOOP, row("int4", 60, 0.08, spread=5), row("bf16", 95, 0.003, spread=30)]
        assert decide(rows, 0.3).choice == "int4"

    def test_more_rounds_of_what_is_not_conclusive(self):
        assert unsettled([row("dense", 161, spread=24), row("noop", 66, spread=40)]) == {"dense", "noop"}
        assert unsettled([DENSE, row("noop", 91)]) == {"dense", "noop"}
        assert unsettled([DENSE, row("noop", 95)]) == unsettled([DENSE, NOOP]) == set()
        assert unsettled([DENSE, NOOP, row("int4", 89.5), row("int8", 120, spread=60)]) == {"dense", "int4"}
        assert unsettled([DENSE, NOOP, row("int4", 60), row("int8", 120, spread=60)]) == set()

    def test_headroom_is_never_negative(self):
        assert headroom([DENSE, row("noop", 103)]) == 0


class TestAmortized:
    def test_the_faster_half_of_rounds_counts(self):
        found = merged([row("x", 5.0, 0.1), row("x", 9.0, 0.2), row("x", 3.0, 0.3)])
        assert (found.step_ms, found.spread_ms, found.error) == (4.0, 1.0, 0.2)
        assert merged([row("x", 5.0), row("x", 3.0)]).step_ms == 3.0

    def test_more_rounds_make_less_noise(self):
        """Of rounds that vary as much."""
        few, many = (merged([row("x", 5.0 + i % 2) for i in range(num)]) for num in (4, 16))
        assert few.spread_ms == 0 == many.spread_ms
        few, many = (merged([row("x", 5.0 + i % 4) for i in range(num)]) for num in (4, 16))
        assert many.spread_ms < 0.6 * few.spread_ms

    def test_every_step_alike(self):
        assert amortized([1.0, 3.0, 2.0], [5.0, 5.0, 5.0], 1) == 2

    def test_steps_that_average_models(self):
        """2 of 4 steps cost 8 more; in a period 5 times as long, 2 of 20."""
        seconds, sent = [1.0, 9.0, 1.0, 9.0], [0.0, 7.0, 0.0, 7.0]
        assert amortized(seconds, sent, 1) == 5
        assert amortized(seconds, sent, 5) == pytest.approx(1 + 2 * 8 / 20)
        assert amortized(sent, sent, 5) == pytest.approx(14 / 20)


class TestCandidates:
    def test_default(self):
        labels = [candidate.label for candidate in candidates(None)]
        assert labels[:3] == ["dense", "noop", "allreduce"]
        assert len(labels) == 2 + len(DEFAULT)

    @pytest.mark.parametrize(
        ("text", "hooks"),
        [
            ("bf16", [lc.BF16()]),
            (" bf16, int8,", [lc.BF16(), lc.Int8()]),
            ("dense,noop,bf16", [lc.BF16()]),
            (
                "powersgd:matrix_approximation_rank=4,start_powerSGD_iter=0,int8:rounding=stochastic,fp16",
                [
                    lc.PowerSGD(matrix_approximation_rank=4, start_powerSGD_iter=0),
                    lc.Int8(rounding="stochastic"),
                    lc.FP16(),
                ],
            ),
            ("power_sgd:warm_start=false", [lc.PowerSGD(warm_start=False, start="auto")]),
            ("post_localsgd:subgroup_size=none", [lc.PostLocalSGD(start_localSGD_iter="auto")]),
        ],
    )
    def test_parse(self, text, hooks):
        assert [hook for _, hook in parse(text)] == hooks

    def test_configured_elsewhere(self, monkeypatch, tmp_path):
        (tmp_path / "my_hooks_of_a_test.py").write_text(
            "import lightning_commhooks as lc\nHOOK = lc.Cast(lc.PowerSGD(), 'bf16')\nNUMBER = 3\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", [])
        ((label, hook),) = parse("my_hooks_of_a_test:HOOK")
        assert label == "my_hooks_of_a_test:HOOK"
        assert hook == lc.Cast(lc.PowerSGD(), "bf16")
        with pytest.raises(ValueError, match="my_hooks_of_a_test:NUMBER must be a configured CommHook, got 3"):
            parse("my_hooks_of_a_test:NUMBER")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("bf17", "--hooks bf17: unknown hook 'bf17'; did you mean 'bf16'"),
            ("rank=4", "'rank=4' is an option without a hook; write hook:rank=4"),
            ("auto", "auto uses several hooks in one run; compare those"),
            (
                "powersgd:ranks=4",
                "PowerSGD has no option 'ranks'; did you mean 'rank'\\? Options of PowerSGD: m",
            ),
            (
                "powersgd:matrix_approximation_rnk=4",
                "PowerSGD has no option 'matrix_approximation_rnk'; did you mean 'matrix_approximation_rank'",
            ),
            ("powersgd:warm_start", "options are powersgd:name=value"),
            ("powersgd:matrix_approximation_rank=0", "matrix_approximation_rank .* at least 1, got 0"),
            ("no_such_module:HOOK", "No module named 'no_such_module'"),
        ],
    )
    def test_bad_specs(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse(text)

    @pytest.mark.parametrize(
        ("hook", "expected"),
        [
            (lc.BF16(), '"bf16"'),
            (lc.PowerSGD(matrix_approximation_rank=4), "PowerSGD(matrix_approximation_rank=4)"),
            (lc.Cast(lc.PowerSGD(), "fp16"), 'Cast(hook=PowerSGD(), dtype="fp16")'),
            (lc.Cast("powersgd", "fp16"), 'Cast(hook="powersgd", dtype="fp16")'),
            (
                lc.Schedule({0: "bf16", 9: lc.Int8(block_size=64)}),
                'Schedule(hooks={0: "bf16", 9: Int8(block_size=64)})',
            ),
        ],
    )
    def test_code(self, hook, expected):
        assert code(hook) == expected
        assert eval(expected, vars(lc)) in (hook, hook.name)

    @pytest.mark.parametrize(
        ("hook", "expected", "factor"),
        [
            (lc.BF16(), lc.BF16(), 1),
            (lc.PowerSGD(), lc.PowerSGD(start_powerSGD_iter=0), 1),
            (lc.PostLocalSGD(period=8), lc.PostLocalSGD(start_localSGD_iter=0, period=8), 1),
            (lc.DiLoCo(period=100), lc.DiLoCo(period=4), 25),
            (lc.DiLoCo(period=100, fragments=5), lc.DiLoCo(period=5, fragments=5), 20),
        ],
    )
    def test_measured_in_the_long_run_with_a_short_period(self, hook, expected, factor):
        found = candidate("x", hook)
        assert (found.measured, found.period_factor) == (expected, factor)

    def test_others_hooks_say_themselves_after_how_many_steps_they_repeat(self):
        found = candidate("stranger", Stranger())
        assert (found.measured, found.period_factor, found.period) == (Stranger(), 1, 12)

    def test_note(self):
        *_, bf16, powersgd, diloco = candidates(["bf16", "powersgd", "diloco"])
        assert bf16.note == ""
        assert powersgd.note == "measured as PowerSGD(start_powerSGD_iter=0)"
        assert diloco.note == "measured as DiLoCo(period=4), calculated for a period 25 times as long"
        assert diloco.code == '"diloco"'


class Pair(NamedTuple):
    x: torch.Tensor
    y: list


@dataclasses.dataclass
class Both:
    pair: Pair
    name: str


def test_batches_keep_their_types():
    class Encoding(collections.UserDict):
        def to(self, device):
            return Encoding({key: value.to(device) for key, value in self.data.items()})

    batch = Both(Pair(torch.ones(2), [torch.ones(1), (torch.ones(1), Encoding(z=torch.ones(3)))]), "name")
    moved = _moved(batch, torch.device("meta"))
    assert (moved.name, moved.pair.x.is_meta, moved.pair.y[0].is_meta) == ("name", True, True)
    assert type(moved.pair.y[1]) is tuple
    assert type(moved.pair.y[1][1]) is Encoding
    assert moved.pair.y[1][1]["z"].is_meta


class Task(nn.Module):
    def __init__(self, returns_dict=False):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.returns_dict = returns_dict

    def forward(self, x=None, y=None):
        loss = self.linear(x).sum() + (0 if y is None else y.sum())
        return {"loss": loss} if self.returns_dict else loss


class Lightning(Task):
    def training_step(self, batch, index):
        return {"loss": self(batch) * 2}

    def configure_optimizers(self):
        return [torch.optim.Adam(self.parameters())], []


X = torch.ones(2, 4)
GOOD = {
    "loss": lambda: (Task(), X),
    "two_inputs": lambda: (Task(), (X, X)),
    "keywords": lambda: (Task(returns_dict=True), {"x": X, "y": X}),
    "loss_fn": lambda: (nn.Linear(4, 3), (X, torch.ones(2, 3)), nn.MSELoss()),
    "loss_fn_of_output": lambda: (nn.Linear(4, 3), X, torch.sum),
    "dict": lambda: {"model": (m := Task()), "batch": X, "optimizer": torch.optim.AdamW(m.parameters())},
    "lightning": lambda: (Lightning(), X),
    "complex": lambda: (nn.Linear(4, 3, dtype=torch.complex64), X.to(torch.complex64), lambda y: y.abs().sum()),
    "loader": lambda: (Task(), torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2)),
}
BAD = {
    "nothing": (lambda: 3, "returned int; it must return"),
    "no_batch": (lambda: (Task(), None), "returned no batch"),
    "no_module": (lambda: (3, X), "returned int as the model, not a bare nn.Module"),
    "frozen": (lambda: (nn.ReLU(), X), "a model without trainable parameters"),
    "unknown_key": (lambda: {"model": Task(), "data": X}, r"a dict with \['data'\]; known keys are"),
    "no_loss": (lambda: (nn.Linear(4, 3), X), r"the model returned a tensor of shape \(2, 3\), not a loss"),
    "target_missing": (
        lambda: (nn.Linear(4, 3), (X,), nn.MSELoss()),
        r"a batch of 1, .* \(inputs, target\)",
    ),
    "no_function": (lambda: (nn.Linear(4, 3), X, 3), "loss_fn must be a function"),
    "ddp": (lambda: {"model": Task(), "batch": X, "ddp": 3}, "ddp must be a dict of arguments"),
    "raises": (lambda: 1 / 0, r"raises\(\) failed, ZeroDivisionError"),
    "no_optimizer": (lambda: {"model": Task(), "batch": X, "optimizer": 3}, "must be a torch.optim.Optimizer, got 3"),
}


@pytest.fixture
def load(monkeypatch):
    """`load(factory)`: the task that a function makes."""

    def of(factory, name="make"):
        monkeypatch.setitem(globals(), name, factory)
        task = load_task(f"{__name__}:{name}", CPU, seed=1)
        task.gradients(task.module)
        return task

    return of


class TestTask:
    @pytest.mark.parametrize("name", GOOD)
    def test_step_changes_the_model_and_restore_takes_it_back(self, load, name):
        task = load(GOOD[name])
        task.save()
        before = [p.detach().clone() for p in task.module.parameters()]
        task.step(task.module)
        assert not any(torch.equal(p, old) for p, old in zip(task.module.parameters(), before, strict=True))
        task.restore()
        assert all(torch.equal(p, old) for p, old in zip(task.module.parameters(), before, strict=True))

    def test_restore_takes_back_what_the_optimizer_remembers(self, load):
        task = load(GOOD["dict"])
        task.save()
        steps = []
        for factor in (1, 1e30, 1):
            task.restore()
            task.batch = X * factor
            task.step(task.module)
            task.step(task.module)
            steps.append([p.detach().clone() for p in task.module.parameters()])
        assert all(map(torch.equal, steps[0], steps[2]))

    def test_further_batches_are_those_of_further_ranks(self, load):
        seeds = {seed: torch.Generator().manual_seed(seed) for seed in (1, 2, 3)}
        expected = {seed: torch.randn(2, 4, generator=generator) for seed, generator in seeds.items()}
        task = load(lambda: {"batch": torch.randn(2, 4), "model": Task()})
        assert task.batch.equal(expected[1])
        assert all(next(task.later_batches).equal(expected[seed]) for seed in (2, 3))
        batches = torch.utils.data.DataLoader(torch.arange(6.0).view(6, 1), batch_size=2)
        task = load(lambda: (nn.Linear(1, 1), batches, torch.sum))
        found = [task.batch, *(next(task.later_batches) for _ in range(3))]
        assert [batch.view(-1).tolist() for batch in found] == [[0, 1], [2, 3], [4, 5], [0, 1]]

    def test_optimizers(self, load):
        assert [type(o) for o in load(GOOD["lightning"]).optimizers] == [torch.optim.Adam]
        assert [type(o) for o in load(GOOD["dict"]).optimizers] == [torch.optim.AdamW]
        assert [type(o) for o in load(GOOD["loss"]).optimizers] == [torch.optim.SGD]

    @pytest.mark.parametrize("name", BAD)
    def test_bad_factories(self, load, name):
        factory, message = BAD[name]
        with pytest.raises(ValueError, match=message):
            load(factory, name)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("module", "must be given as module:factory, such as my_module:make, got 'module'"),
            ("no_such_module:make", "importing it failed, ModuleNotFoundError: No module named 'no_such_module'"),
            ("math:make", "module 'math' has no attribute 'make'"),
            ("math:pi", r"math:pi\(\) failed, TypeError"),
        ],
    )
    def test_bad_specs(self, spec, message):
        with pytest.raises(ValueError, match=message):
            load_task(spec, CPU, 0)


def test_a_file_is_looked_for_where_it_is(tmp_path, monkeypatch):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twins_of_a_test.py").write_text(f"WHERE = {folder!r}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "first"), str(tmp_path / "second"), *sys.path])
    assert imported(str(tmp_path / "second" / "twins_of_a_test.py"), "WHERE") == "second"


REAL = Network(1e6, 0.0001, 2)


@pytest.mark.parametrize(
    ("options", "real", "expected"),
    [
        ({"bandwidth": 1e9}, None, Network(0.94e9, 0.0, 2)),
        ({"bandwidth": 1e9}, REAL, Network(0.94e9, 0.0001, 2)),
        ({"latency": 0.0}, REAL, Network(1e6, 0.0, 2)),
        ({"world_size": 16}, REAL, Network(1e6, 0.0001, 16)),
    ],
)
def test_network_of_the_options(monkeypatch, options, real, expected):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1 if real is None else 2)
    args = Namespace(**{"bandwidth": None, "latency": None, "world_size": None, **options})
    assert study.has_network(args)
    assert study.network_of(args, real) == expected


@pytest.mark.parametrize(
    ("latency", "bandwidth", "is_noted"), [(0.01, 1e6, True), (0.0, 1e6, False), (0.01, 20.0, False)]
)
def test_delay_is_told_of(latency, bandwidth, is_noted):
    """A dense step of 100 ms, 60 more than without communication, that sends a byte."""
    notes = list(study.notes([DENSE, NOOP], Network(bandwidth, latency, 2), None))
    assert bool(notes) == is_noted
    if is_noted:
        assert (
            "adds 60.0 ms to a dense step, of which sending takes 0.0 ms and waiting for messages the rest" in notes[0]
        )


def test_what_predictions_leave_out_is_told_of():
    notes = list(study.notes([DENSE, NOOP], Network(1e6, 0.0, 64), 16))
    assert notes[0].startswith("Predictions exclude the processor time of sending")
    assert notes[1:] == ["Errors are measured with an average over 16 of the 64 ranks."]
    assert len(list(study.notes([DENSE, NOOP], Network(1e6, 0.0, 16), 16))) == 1


@pytest.fixture
def find(monkeypatch):
    """`find(command, *rows)`: what a study finds that measures these, over 1 Mbit/s."""

    def of(command, *rows):
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
        monkeypatch.setattr(study, "measured_network", lambda task: Network(125_000, 0.002, 2))
        monkeypatch.setattr(study, "Bench", lambda *_: Namespace(rows=lambda *_: [DENSE, NOOP, *rows]))
        args = Namespace(command=command, rounds=1, max_error=0.3, bandwidth=None, latency=None, world_size=None)
        return study.study(args, Namespace(device=CPU, gradient_bytes=4_000_000), [], lambda what: None)

    return of


def test_advice_in_words(find):
    found = find("advise", row("int8", 55.0, 0.01), row("diloco", 42.0, math.nan))
    assert found["hooks"][0]["error"] is None  # of noop: JSON has no NaN
    text = text_of(found)
    assert "link (measured): 1.0 Mbit/s of payload per rank, 2.00 ms for a message" in text
    assert re.search(r"^int8 +55\.0 +0\.5 +0\.55x +0\.0 +- +1e-06 +4 +0\.01$", text, re.MULTILINE)
    assert "Not recommended by default: diloco; averaging models" in text
    assert text.endswith('instead of 100.0 ms, 45% less.\n    CompressedDDPStrategy(hook="int8")')
    assert text_of(find("advise", row("int8", 99.0))).splitlines()[-1].startswith("Do not compress: the best hook")
    noisy = text_of(find("advise", row("int8", 85.0, spread=30.0))).splitlines()[-1]
    assert noisy.startswith(
        "No conclusion: the best hook, int8, saves 15.0 ms of 100.0 ms a step, give or take 60.0 ms"
    )


def test_headroom_in_words(find):
    text = text_of(find("headroom"))
    assert "Communication costs 60.0 ms of 100.0 ms a step: 60% (59% to 61%).\nNo hook can save more" in text


def test_a_noisy_headroom_in_words(find, monkeypatch):
    rows = [row("dense", 161.0, spread=24.0), row("noop", 66.0, spread=40.0)]
    find("headroom")  # replaces the processes
    monkeypatch.setattr(study, "Bench", lambda *_: Namespace(rows=lambda *_: rows))
    args = Namespace(command="headroom", rounds=3, max_error=0.3, bandwidth=None, latency=None, world_size=None)
    found = study.study(args, Namespace(device=CPU, gradient_bytes=4_000_000), [], lambda what: None)
    last = text_of(found).splitlines()[-1]
    assert last.startswith(
        "Communication costs between 1.7 ms and 161.0 ms of 161.0 ms a step, 1% to 100%: the measurement is too"
    )
    assert "59%" not in last
