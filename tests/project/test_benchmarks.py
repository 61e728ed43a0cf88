"""Reports and plots of benchmarks, from the committed records."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / name).read_text())["rows"]


def reported() -> list[dict[str, Any]]:
    return [row for row in rows("time_to_loss.json") if not row["tuning"]]


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_time_to_loss_table_is_that_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    from time_to_loss_report import low_rank_verdict, report, verdict

    assert report(reported(), verdict)
    committed = (RESULTS / "time_to_loss.txt").read_text()
    assert capsys.readouterr().out.strip() in committed
    assert committed.startswith("$ python benchmarks/time_to_loss.py")
    report(rows("time_to_loss_low_rank.json"), low_rank_verdict)
    assert capsys.readouterr().out.strip() in (RESULTS / "time_to_loss_low_rank.txt").read_text()


def test_limits_are_missed_when_dense_is_fast(capsys: pytest.CaptureFixture[str]) -> None:
    from time_to_loss_report import report, verdict

    changed = copy.deepcopy(reported())
    for row in changed:
        if row["method"] == "dense":
            row["curve"] = [[steps, seconds / 10, sent, loss] for steps, seconds, sent, loss in row["curve"]]
    assert not report(changed, verdict)
    assert "MISSED" in capsys.readouterr().out


def test_one_slow_seed_misses_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    from time_to_loss_report import verdict

    seconds = {"dense": [20.0, 40.0], "stock fp16": [10.0, 20.0], "stock bf16": [10.0, 20.0], "int4": [1.0, 2.0]}
    assert verdict(seconds, {})
    assert not verdict({**seconds, "dense": [14.0, 60.0]}, {})


def test_low_rank_has_to_get_to_the_lower_target_with_all_seeds() -> None:
    from time_to_loss_report import low_rank_verdict

    seconds = {"stock powersgd": [3.0, 3.0], "stock powersgd, rank 8": [2.0, 4.0], "powersgd": [2.0, 2.0]}
    assert low_rank_verdict(seconds, {**seconds})
    assert not low_rank_verdict(seconds, {**seconds, "powersgd": [3.0, math.inf]})
    assert not low_rank_verdict({**seconds, "powersgd": [2.5, 2.5]}, seconds)


def test_target_is_interpolated() -> None:
    from time_to_loss_report import TARGET, reached

    curve = [[0, 0.0, 0, 5.0], [10, 1.0, 0, TARGET + 1], [20, 3.0, 0, TARGET - 1], [30, 4.0, 0, TARGET - 2]]
    assert reached(curve) == pytest.approx((15, 2.0))
    assert reached(curve[:2]) == (math.inf, math.inf)


def test_plots_of_time_to_loss(tmp_path: Path) -> None:
    from time_to_loss_report import draw

    draw(reported(), tmp_path)
    assert is_png(tmp_path / "time_to_loss.png")
    assert is_png(tmp_path / "bytes_and_loss.png")


def test_network_tables_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import network_report

    network_report.tables(rows("network.json"))
    assert capsys.readouterr().out.strip() in (RESULTS / "network.txt").read_text()
    network_report.draw(rows("network.json"), tmp_path)
    assert is_png(tmp_path / "network.png")
    assert is_png(tmp_path / "network_delay.png")


def test_floor_is_the_wire_or_noop() -> None:
    from network_report import floor_ms

    row = {"bytes": 1e6, "gbit": 0.1, "delay_ms": 10.0, "period": 1}
    assert floor_ms(row, 20.0) == pytest.approx(90.0)
    assert floor_ms(row, 100.0) == 100.0
    assert floor_ms({**row, "period": 5}, 20.0) == pytest.approx(82.0)


def test_records_replace_and_keep(tmp_path: Path) -> None:
    from records import Records

    path = tmp_path / "some.json"
    records = Records(path, ("hook", "seed"))
    records.put({"hook": "int8", "seed": 0, "ms": 1.0})
    records.put({"hook": "int8", "seed": 1, "ms": 2.0})
    records.put({"hook": "int8", "seed": 0, "ms": 3.0})
    again = Records(path, ("hook", "seed"))
    assert sorted((row["seed"], row["ms"]) for row in again.rows) == [(0, 3.0), (1, 2.0)]
    assert again.has(seed=1)
    assert not again.has(seed=2)


PING = """
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server(("10.0.0.1", 5000)) as server:
        other, _ = server.accept()
        with other:
            for _ in range(5):
                other.sendall(other.recv(1))
else:
    time.sleep(0.5)
    with socket.create_connection(("10.0.0.1", 5000)) as other:
        took = []
        for _ in range(5):
            start = time.perf_counter()
            other.sendall(b"x")
            other.recv(1)
            took.append(1e3 * (time.perf_counter() - start))
    print(min(took))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2")
def test_packets_are_delayed_both_ways(tmp_path: Path) -> None:
    from netns import hosts

    script = tmp_path / "ping.py"
    script.write_text(PING)
    try:
        with hosts(2, rate="1gbit", delay_ms=10) as network:
            milliseconds = float(network.launch([str(script)], timeout=20)[1])
    except RuntimeError as error:
        if "needs root" in str(error):
            pytest.skip(f"no network namespaces here: {error}")
        raise
    assert 20 <= milliseconds < 30


def test_results_name_no_machine() -> None:
    for name in ("time_to_loss.json", "network.json", "time_to_loss.txt", "network.txt"):
        text = (RESULTS / name).read_text()
        assert "/tmp" not in text, name
        assert str(BENCHMARKS.parent) not in text, name
