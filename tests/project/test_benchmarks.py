"""Reports and plots of benchmarks, from the committed records."""

from __future__ import annotations

import json
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
