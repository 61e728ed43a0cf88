"""What the command line decides and understands, without processes."""

import dataclasses
import io
import math
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_commhooks as lc
from lightning_commhooks.advice.candidates import DEFAULT, at_once, candidate, candidates, code, parse, shortened
from lightning_commhooks.advice.load import load_task
from lightning_commhooks.advice.ranking import Row, decide, headroom, ranked
from lightning_commhooks.advice.step_time import amortized, undisturbed
from lightning_commhooks.advice.study import Result, WhatIf, _delay_notes, _notes, _setting
from lightning_commhooks.advice.task import try_task
from lightning_commhooks.collectives.backend import Backend
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.link import Cost, Link

CPU = torch.device("cpu")


def of_world():
    return Group(Backend(dist.group.WORLD), process_group=dist.group.WORLD)


def row(label, step, error=0.0, averages_models=False, spread=0.5, predicted=None):
    return Row(
        label=label,
        code=f'"{label}"',
        predicted_ms=predicted,
        measured_ms=step,
        spread_ms=spread,
        exposed_ms=0.0,
        codec_ms=0.0,
        bytes_sent=1.0,
        bytes_dense=4.0,
        error=error,
        averages_models=averages_models,
    )


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
        assert verdict.gain == pytest.approx(0.45)
        assert verdict.headroom == pytest.approx(0.6)
        assert verdict.line == 'CompressedDDPStrategy(hook="int8")'
        assert list(verdict.apart) == ["powersgd"]
        assert "an error of 0.80 in one step is above --max-error 0.3" in verdict.apart["powersgd"]
        assert decide(rows, max_error=0.9).choice == "powersgd"

    def test_of_equally_fast_ones_the_most_exact(self):
        rows = [DENSE, NOOP, row("int4", 50, 0.08), row("int8", 52, 0.01), row("bf16", 60, 0.003)]
        assert decide(rows, 0.3).choice == "int8"

    def test_averaging_models_is_not_recommended_but_told_of(self):
        rows = [DENSE, NOOP, row("int8", 55, 0.01), row("diloco", 42, math.nan, averages_models=True)]
        verdict = decide(rows, 0.3)
        assert verdict.choice == "int8"
        assert verdict.alternative == "diloco"
        assert "another algorithm" in verdict.apart["diloco"]
        rows[-1] = row("diloco", 52, math.nan, averages_models=True)
        assert decide(rows, 0.3).alternative is None  # not faster by much

    @pytest.mark.parametrize(
        ("rows", "reason"),
        [
            ([DENSE, row("noop", 95), row("bf16", 80, 0.01)], "sends nothing takes 5% less time .* no hook can save"),
            ([DENSE, NOOP, row("int8", 97, 0.01)], "compressing costs what sending less saves"),
            ([DENSE, NOOP, row("int8", 120, 0.01)], "compressing costs what sending less saves"),
            ([DENSE, NOOP, row("int8", 85, 0.01, spread=30)], "saves 15.0 ms a step, but step times vary by 30.5 ms"),
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

    def test_predicted_where_not_measured(self):
        rows = [
            row("dense", None, predicted=100.0),
            row("noop", None, predicted=40.0),
            row("bf16", None, 0, predicted=60.0),
        ]
        assert decide(rows, 0.3).choice == "bf16"

    def test_headroom_is_never_negative(self):
        assert headroom([DENSE, row("noop", 103)]) == 0

    def test_ranked(self):
        order = ranked([DENSE, row("slow", 120), NOOP, row("fast", 39)])
        assert [r.label for r in order] == ["noop", "fast", "dense", "slow"]

    def test_prediction_error(self):
        assert row("x", 100.0, predicted=90.0).prediction_error == pytest.approx(-0.1)
        assert math.isnan(row("x", 100.0).prediction_error)


class TestAmortized:
    @pytest.mark.parametrize(("rounds", "kept"), [([3.0], [3.0]), ([5.0, 3.0], [3.0]), ([5.0, 9.0, 3.0], [3.0, 5.0])])
    def test_the_faster_half_counts(self, rounds, kept):
        assert undisturbed(rounds) == kept

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
            ("power_sgd:warm_start=false", [lc.PowerSGD(warm_start=False)]),
            ("post_localsgd:subgroup_size=none", [lc.PostLocalSGD()]),
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
        with pytest.raises(ValueError, match="my_hooks_of_a_test:NUMBER must be a configured CommHook, is 3"):
            parse("my_hooks_of_a_test:NUMBER")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("bf17", "--hooks bf17: unknown hook 'bf17'; did you mean 'bf16'"),
            ("rank=4", "'rank=4' is an option of no hook; write hook:rank=4"),
            ("auto", "auto uses several hooks in one run; compare those"),
            ("powersgd:rank=4", "PowerSGD: unknown option 'rank'; its options are: matrix_approximation_rank"),
            (
                "powersgd:matrix_approximation_rnk=4",
                "PowerSGD: unknown option 'matrix_approximation_rnk'; did you mean 'matrix_approximation_rank'",
            ),
            ("powersgd:warm_start", "write options as powersgd:name=value"),
            ("powersgd:matrix_approximation_rank=0", "matrix_approximation_rank .* at least 1, is 0"),
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
            (lc.Cast(lc.PowerSGD(), "fp16"), 'Cast(hook="powersgd", dtype="fp16")'),
            (
                lc.Schedule({0: "bf16", 9: lc.Int8(block_size=64)}),
                'Schedule(hooks={0: "bf16", 9: Int8(block_size=64)})',
            ),
        ],
    )
    def test_code(self, hook, expected):
        assert code(hook) == expected
        assert eval(expected, vars(lc)) in (hook, hook.name)

    def test_at_once(self):
        assert at_once(lc.BF16()) == lc.BF16()
        assert at_once(lc.PowerSGD()) == lc.PowerSGD(start_powerSGD_iter=0)
        assert at_once(lc.Cast(lc.PowerSGD(), "bf16")) == lc.Cast(lc.PowerSGD(start_powerSGD_iter=0), "bf16")
        assert at_once(lc.PerParameter({"a*": "powersgd", "*": "bf16"})) == lc.PerParameter(
            {"a*": lc.PowerSGD(start_powerSGD_iter=0), "*": "bf16"}
        )
        assert at_once(lc.Schedule({0: "bf16", 5: lc.PostLocalSGD()})) == lc.PostLocalSGD(start_localSGD_iter=0)

    @pytest.mark.parametrize(
        ("hook", "expected", "factor"),
        [
            (lc.BF16(), lc.BF16(), 1),
            (lc.PostLocalSGD(period=8), lc.PostLocalSGD(period=8), 1),
            (lc.DiLoCo(period=100), lc.DiLoCo(period=4), 25),
            (lc.DiLoCo(period=100, fragments=5), lc.DiLoCo(period=5, fragments=5), 20),
            (
                lc.HierarchicalLocalSGD(period_group_size_dict={16: 2, 64: None}),
                lc.HierarchicalLocalSGD(period_group_size_dict={2: 2, 8: None}),
                8,
            ),
        ],
    )
    def test_shortened(self, hook, expected, factor):
        assert shortened(hook) == (expected, factor)

    def test_others_hooks_say_themselves_after_how_many_steps_they_repeat(self):
        hook = Stranger()
        assert shortened(hook) == (hook, 1)
        assert candidate("stranger", hook).period == 12

    def test_notes(self):
        *_, powersgd, diloco = candidates(["powersgd", "diloco"])
        assert powersgd.notes == [
            "measured from the first compressed step on (start_powerSGD_iter=1000 steps come before)"
        ]
        assert diloco.notes == ["measured with a period of 4 and calculated for one of 100 steps"]
        assert diloco.code == '"diloco"'


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
    "loader": lambda: (Task(), torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2)),
}
BAD = {
    "nothing": (lambda: 3, "returned int; it must return"),
    "no_batch": (lambda: (Task(), None), "returned no batch"),
    "no_module": (lambda: (3, X), "returned int as the model, no torch.nn.Module"),
    "frozen": (lambda: (nn.ReLU(), X), "a model without parameters that are trained"),
    "unknown_key": (lambda: {"model": Task(), "data": X}, r"a dict with \['data'\]; known are"),
    "no_loss": (lambda: (nn.Linear(4, 3), X), r"no loss came out, but a tensor of shape \(2, 3\)"),
    "target_missing": (
        lambda: (nn.Linear(4, 3), (X,), nn.MSELoss()),
        r"a batch of 1, .* \(inputs, target\)",
    ),
    "no_function": (lambda: (nn.Linear(4, 3), X, 3), "loss_fn must be a function"),
    "not_fitting": (lambda: (Task(), torch.ones(2, 5)), "a forward and backward of the model on the batch failed"),
    "raises": (lambda: 1 / 0, r"raises\(\) failed: ZeroDivisionError"),
    "no_optimizer": (lambda: {"model": Task(), "batch": X, "optimizer": 3}, "must be of torch.optim, is 3"),
    "ddp": (lambda: {"model": Task(), "batch": X, "ddp": 3}, "ddp must be a dict of arguments"),
}


@pytest.fixture
def load(monkeypatch):
    """`load(factory)`: the task that a function makes."""

    def of(factory, name="make"):
        monkeypatch.setitem(globals(), name, factory)
        task = load_task(f"{__name__}:{name}", CPU, seed=1)
        try_task(name, task)
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
        assert all(next(task.further).equal(expected[seed]) for seed in (2, 3))
        batches = torch.utils.data.DataLoader(torch.arange(6.0).view(6, 1), batch_size=2)
        task = load(lambda: (nn.Linear(1, 1), batches, torch.sum))
        found = [task.batch, *(next(task.further) for _ in range(3))]
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
            ("module", "given as module:factory, as in my_module:make, is 'module'"),
            ("no_such_module:make", "there is no module 'no_such_module' in"),
            ("math:make", "module 'math' has no 'make'"),
            ("math:pi", "'pi' is no function without arguments"),
        ],
    )
    def test_bad_specs(self, spec, message):
        with pytest.raises(ValueError, match=message):
            load_task(spec, CPU, 0)


def setting_on_two_nodes(rank, world):
    os.environ["NODE_RANK"] = str(rank // 2)
    try:
        setting = _setting(SimpleNamespace(group=of_world()), None)
    finally:
        del os.environ["NODE_RANK"]
    return setting.link.world_size, setting.nodes, setting.node_link.world_size


def test_links_within_and_between_nodes(run):
    assert run(setting_on_two_nodes, world=4) == [(4, [[0, 1], [2, 3]], 2)] * 4


def what_if(rank, world):
    setting = _setting(SimpleNamespace(group=of_world()), WhatIf(1e6, 0.001, 8))
    return setting.link, setting.nodes


def test_what_if_is_no_faster_than_this_machine(run):
    (link, nodes), other = run(what_if)
    assert other == (link, nodes)
    assert (link.world_size, nodes) == (8, [[rank] for rank in range(8)])
    assert link.cost("all_reduce", 1e6).seconds >= 1 + 14 * 0.001
    assert link.cost("all_reduce", 1e6).cpu_seconds > 0


def world_size_of_what_if(rank, world):
    return _setting(SimpleNamespace(group=of_world()), WhatIf(bandwidth=1e6)).link.world_size


def test_what_if_is_of_as_many_ranks_as_there_are(run, world):
    assert run(world_size_of_what_if, world=world) == [world] * world


def test_what_if_of_one_process_is_of_two_ranks():
    setting = _setting(SimpleNamespace(group=Group(None)), WhatIf(bandwidth=1e6))
    assert (setting.link.world_size, setting.nodes) == (2, [[0], [1]])


GIVEN = Link.given(bandwidth=1e9, latency=0, world_size=2)
MEASURED = Link(2, {"all_reduce": (Cost(0, 1.0), Cost(100, 2.0, 1.0))})


@pytest.mark.parametrize(
    ("link", "device", "is_noted"), [(GIVEN, "cpu", True), (GIVEN, "cuda", False), (MEASURED, "cpu", False)]
)
def test_processor_time_that_is_left_out_is_told_of(link, device, is_noted):
    assert bool(_notes(link, torch.device(device))) == is_noted


@pytest.mark.parametrize(
    ("latency", "bandwidth", "is_noted"), [(0.01, 1e6, True), (0.0, 1e6, False), (0.01, 20.0, False)]
)
def test_delay_is_told_of(latency, bandwidth, is_noted):
    """A dense step of 100 ms, 60 more than without communication, that sends a byte."""
    link = Link.given(bandwidth=bandwidth, latency=latency, world_size=2)
    notes = _delay_notes(Result("advise", [DENSE, NOOP], 1, 2, "CPU", link))
    assert bool(notes) == is_noted
    if is_noted:
        assert "of the 60.0 ms that communication adds to a dense step, sending takes 0.0 ms" in notes[0]


def test_notes_are_printed():
    pytest.importorskip("rich")
    from rich.console import Console

    from lightning_commhooks.advice.report import print_result

    printed = io.StringIO()
    notes = _notes(GIVEN, CPU)
    print_result(Result("advise", [DENSE, NOOP], 1, 2, "CPU", notes=notes), Console(file=printed, width=120))
    assert notes[0] in printed.getvalue().splitlines()


@pytest.mark.parametrize(
    ("dense_ms", "text"),
    [(50.4, "Do not compress: no hook can save more than that."), (100, "Without it a step would be 2.00 times as")],
)
def test_headroom_in_words(dense_ms, text):
    pytest.importorskip("rich")
    from rich.console import Console

    from lightning_commhooks.advice.report import print_result

    printed = io.StringIO()
    rows = [row("dense", dense_ms), row("noop", 50)]
    print_result(Result("headroom", rows, 1, 2, "CPU"), Console(file=printed, width=120))
    assert text in printed.getvalue()
