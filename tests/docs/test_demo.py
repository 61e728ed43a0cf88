"""What `make demo` runs, briefly; of a file of its own, since it takes long."""

import pytest
from test_examples import EXAMPLES, check_page, launched, needs


@needs("lightning", "sklearn", "rich")
def test_demo(tmp_path):
    script = EXAMPLES / "lightning" / "demo.py"
    stdout, stderr = launched(script, "--epochs", "4", cwd=tmp_path, TORCH_COMPILE_DISABLE="0")
    # Of Triton, in a build of PyTorch for CUDA.
    leaks = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind.")
    assert not [line for line in stderr.splitlines() if not line.startswith(leaks)], "no noise"
    assert "Warning" not in stdout
    check_page("lightning/demo.py", stdout)
    rows = {}
    for line in stdout.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) == 8:
            rows[cells[1]] = [float(cell.rstrip("%x").replace(",", "")) for cell in cells[3:7]]
    assert list(rows) == ["dense", "bf16", "int8", "powersgd"]
    assert {method: rows[method][2] for method in ("dense", "bf16", "int8")} == {"dense": 1, "bf16": 2, "int8": 3.9}
    assert rows["powersgd"][2] > 7
    assert rows["dense"][1] == pytest.approx(1204.3)
    for accuracy, *_ in rows.values():
        assert accuracy > 80
