"""`Monitor`: values to log and the closing line, of attachments in real processes."""

import dataclasses
import math
import re

import pytest
import torch
from driver import SHAPES, attached, backward, full_rank_gradients
from local_sgd_driver import ALONE, local
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lightning_commhooks as lc
from lightning_commhooks.collectives.link import Link
from lightning_commhooks.monitoring import NAMES, NAMES_OF_NODES, MonitorOptions, _size

POWERSGD = lc.PowerSGD(start_powerSGD_iter=2, matrix_approximation_rank=2)


def train(ddp, rank, steps):
    for step in steps:
        backward(ddp, full_rank_gradients(rank, step, SHAPES))


def asked_after(rank, world, hook, ends):
    """Values and metrics when asked after so many steps, and the closing line."""
    with attached(hook) as (ddp, attachment):
        monitor = lc.Monitor(attachment, error_every_n_steps=3, measure_link=False)
        results, first = [], 0
        for end in ends:
            train(ddp, rank, range(first, end))
            assert monitor.num_new_steps == end - first
            results.append((monitor.values(), attachment.metrics(), attachment.residual_norm()))
            assert monitor.num_new_steps == 0
            first = end
        return results, monitor.summary()


def test_values_are_those_of_the_attachment(run):
    for results, _ in run(asked_after, POWERSGD, [2, 5, 8]):
        assert [list(values) for values, *_ in results] == [
            [f"comm/{name}" for name in NAMES if name not in (*NAMES_OF_NODES, "averagings")]
        ] * 3
        before = dict.fromkeys(results[0][1], 0.0)
        for values, metrics, residual_norm in results:
            new = {key: value - before[key] for key, value in metrics.items()}
            expected = {
                **{name: metrics[name] for name in ("bytes_sent", "relative_error", "nonfinite_steps")},
                **{f"{name}_per_step": new[name] / new["steps"] for name in ("exposed_ms", "codec_ms")},
                "compression_ratio": new["bytes_dense"] / new["bytes_sent"],
                "residual_norm": residual_norm,
            }
            assert values == pytest.approx({f"comm/{name}": value for name, value in expected.items()})
            before = metrics
        ratios = [values["comm/compression_ratio"] for values, *_ in results]
        assert ratios[0] == 1, "before start_powerSGD_iter"
        assert ratios[1] == ratios[2] > 2


def test_an_error_is_a_value_once(run):
    for results, _ in run(asked_after, "bf16", [1, 2, 4]):
        assert ["comm/relative_error" in values for values, *_ in results] == [True, False, True]


def asked_after_a_bad_step(rank, world):
    with attached("bf16") as (ddp, attachment):
        monitor = lc.Monitor(attachment, error_every_n_steps=1, measure_link=False)
        results = []
        for step in range(3):
            gradients = full_rank_gradients(rank, step, SHAPES)
            if step == 1:
                gradients["first"][0, 0] = math.nan
            backward(ddp, gradients)
            results.append(monitor.values())
        return results


def test_a_step_with_nan_has_no_error_rather_than_the_last(run):
    for results in run(asked_after_a_bad_step):
        assert ["comm/relative_error" in values for values in results] == [True, False, True]


def test_the_closing_line_says_why(run):
    for _, line in run(asked_after, POWERSGD, [2, 8]):
        pattern = (
            r"Communication hook 'powersgd': [\d.]+ kB sent in 8 steps instead of [\d.]+ kB \([\d.]+ times fewer\); "
            r"2 steps not compressed \(hook='powersgd' compresses from start_powerSGD_iter=2 on\)"
        )
        assert re.fullmatch(pattern, line)


def test_a_hook_that_sends_nothing(run):
    for results, line in run(asked_after, "noop", [2]):
        assert "comm/compression_ratio" not in results[0][0], "would be infinite"
        assert results[0][0]["comm/bytes_sent"] == 0
        assert "0 B sent in 2 steps instead of" in line


def test_a_hook_that_sends_more(run):
    for _, line in run(asked_after, "allgather", [1], world=4):
        assert "(2 times as many)" in line


def ratio_of_local_sgd(rank, world):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with local(model, lc.PostLocalSGD(**ALONE, period=4), [optimizer]) as (ddp, attachment):
        monitor = lc.Monitor(attachment, measure_link=False)
        seen = []
        for _ in range(4):
            for _ in range(2):
                ddp(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            values = monitor.values()
            seen.append((values["comm/averagings"], values.get("comm/compression_ratio")))
        return seen


def test_ratio_of_steps_without_communication_belongs_to_the_next_averaging(run):
    for seen in run(ratio_of_local_sgd):
        assert seen == [(0, None), (1, 4), (1, None), (2, 4)]


def own_function(rank, world):
    with attached(default_hooks.allreduce_hook) as (ddp, attachment):
        monitor = lc.Monitor(attachment)
        train(ddp, rank, range(2))
        return monitor.num_new_steps, monitor.values(), monitor.summary()


def test_of_a_function_nothing_is_known(run):
    for steps, values, line in run(own_function):
        assert (steps, values) == (2, {})
        assert line.endswith("allreduce_hook': 2 steps; the bytes of a hook function are not known")


def several_monitors(rank, world):
    with attached(POWERSGD) as (ddp, attachment):
        train(ddp, rank, range(3))
        monitor = lc.Monitor(attachment, measure_link=False)
        empty = monitor.summary()
        bad = full_rank_gradients(rank, 3, SHAPES)
        bad["first"][0, 0] = math.nan
        backward(ddp, bad)
        train(ddp, rank, range(4, 6))
    return empty, monitor.summary()


def test_a_line_is_about_the_time_since_the_monitor_was_made(run):
    for empty, line in run(several_monitors):
        assert empty == "Communication hook 'powersgd': nothing to send in 0 steps"
        assert "in 3 steps" in line
        assert "not compressed" not in line
        assert line.endswith("; 1 step with inf or NaN")


def lines_with_links(rank, world):
    lines = []
    with attached("bf16") as (ddp, attachment):
        monitor = lc.Monitor(attachment)
        assert monitor._link is not None
        sent = attachment.metrics()["bytes_sent"]
        train(ddp, rank, range(4))
        for bandwidth in (1e3, 1e15):
            monitor._link = Link(world, ((0, 0.0), (bandwidth, 1.0)))
            lines.append(monitor.summary())
        return sent, attachment.metrics()["bytes_dense"], lines


def test_seconds_saved_depend_on_the_link(run):
    for sent, dense, (slow, fast) in run(lines_with_links):
        assert sent == 0, "what measuring sends is not counted"
        # It takes this long to send the gradients, and far less to send them for real.
        saved = float(re.search(r"about ([\d,.]+) s saved against plain DDP", slow)[1].replace(",", ""))
        assert saved == pytest.approx(dense / 1e3, rel=0.05)
        assert re.search(r"about [\d.]+ s lost against plain DDP", fast)


def test_nothing_to_send_alone(run):
    (result,) = run(asked_after, "bf16", [2], world=1)
    (values, *_), line = result[0][0], result[1]
    assert values["comm/bytes_sent"] == 0
    assert "comm/compression_ratio" not in values
    assert line == "Communication hook 'bf16': nothing to send in 2 steps"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999.7, "1 kB"), (1234, "1.23 kB"), (5e11, "500 GB"), (1.5e15, "1,500 TB")],
)
def test_sizes(num_bytes, text):
    assert _size(num_bytes) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an integer of at least 1, got 0"),
        ({"every_n_steps": True}, "every_n_steps must be an integer of at least 1, got True"),
        ({"error_every_n_steps": -1}, "error_every_n_steps must be an integer of at least 0, got -1"),
        ({"error_numel": 0}, "error_numel must be an integer of at least 1, or None for all elements, got 0"),
        ({"closing_line": "yes"}, "closing_line must be True or False, got 'yes'"),
        ({"measure_link": None}, "measure_link must be True or False, got None"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MonitorOptions(**options)
    with pytest.raises(ValueError, match=r"Monitor needs what attach\(model, hook\) returned, got str"):
        lc.Monitor("int8")
    assert dataclasses.asdict(MonitorOptions(error_numel=None, error_every_n_steps=0))["error_numel"] is None
