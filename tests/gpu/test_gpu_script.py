"""`make gpu` and what it runs, as far as that goes without a GPU."""

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


@pytest.fixture
def without_gpu():
    import gpu

    if gpu.devices():
        pytest.skip("this machine has a GPU")


def run(*command, **environment):
    # As not started by `make test`.
    outer = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "GPU_"))}
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**outer, **environment},
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("options", [[], ["--check"], ["--only", "tests", "--minutes", "4"], ["--only", "quality"]])
def test_without_a_gpu_it_says_so_in_one_line(options):
    # Without installed packages: nothing is there yet.
    code, output, errors = run(sys.executable, "-S", SCRIPT, *options)
    assert (code, errors) == (3, "")
    assert re.fullmatch(r"No NVIDIA GPU on this machine: .+\n", output)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_nothing_without_a_gpu(tmp_path):
    venv = tmp_path / "venv"
    code, output, errors = run("make", "gpu", f"VENV={venv}", f"PYTHON={sys.executable}")
    assert code == 2  # make's own
    assert re.fullmatch(r"No NVIDIA GPU on this machine: .+\n", output)
    assert re.fullmatch(r"make.*: \*\*\* \[.*gpu\] Error 3\n", errors)
    assert not venv.exists()


def a_gpu(folder):
    """A folder with a program that lists one."""
    program = folder / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: Some GPU (UUID: GPU-0)"\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch can use this one")
def test_a_pytorch_that_cannot_use_the_gpu(tmp_path):
    code, output, _ = run(sys.executable, SCRIPT, PATH=a_gpu(tmp_path))
    assert code == 4
    assert re.fullmatch(r"There is a GPU, but this Python has PyTorch \d.+finds no GPU.+GPU_PYTHON=.+\n", output)
    assert run(sys.executable, SCRIPT, "--check", PATH=a_gpu(tmp_path))[:2] == (0, "")


def test_devices_without_nvidia_smi(tmp_path, monkeypatch):
    import gpu

    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.devices(tmp_path) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpu.devices(tmp_path) == ["nvidia0", "nvidia1"]


TESTS = """
import os
import pytest

def test_good(): pass
def test_bad(): raise ValueError("first\\nsecond")
@pytest.mark.skip(reason="a reason")
def test_skipped(): pass
def test_fatal(): os._exit(9)
"""
FACTS = {"torch": "1", "CUDA": None, "devices": ["Some GPU, 8 GiB"]}


def test_page(tmp_path, monkeypatch, capsys):
    """From tests of which one ends the process, a benchmark that is fine, one that fails and one that is too slow."""
    import gpu
    import gpu_parts

    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "fine.py").write_text("print('$ python benchmarks/fine.py'); print('a table')")
    tests = ["-m", "pytest", "-q", "-p", "outcomes", "-c", os.devnull, f"--rootdir={tmp_path}", "test_some.py"]
    monkeypatch.setattr(gpu_parts, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    monkeypatch.setattr(gpu_parts, "tests", lambda cores: [gpu_parts.Part(tests)])
    late = gpu_parts.Part(["-c", "import time; time.sleep(600)"], weight=0.02)
    bad = gpu_parts.Part(["-c", "raise SystemExit('no memory')"])
    monkeypatch.setattr(gpu_parts, "benchmarks", lambda: [late, gpu_parts.Part(["fine.py"]), bad])
    output = tmp_path / "results" / "gpu.txt"
    args = argparse.Namespace(output=output, minutes=3, only=None)
    assert gpu.run(args, FACTS) == 1
    page = output.read_text()
    assert capsys.readouterr().out.startswith(page)
    assert "torch 1, CUDA unknown\n1 device:\n  0: Some GPU, 8 GiB\n" in page
    assert re.search(r"^Tests: 1 passed, 1 failed, 1 skipped, in \d+ s$", page, re.MULTILINE)
    assert "  failed: test_some.py::test_bad\n    ValueError: first ... second\n" in page
    assert "  skipped, 1: a reason\n" in page
    assert "  exit code 9: python -m pytest" in page
    assert "\n\n$ python benchmarks/fine.py\na table\n\n" in page
    assert page.endswith("no memory\n(failed, exit code 1)\n")
    assert re.search(r"\n\(took too long: ended after \d+ s\)\n", page)
    log = output.with_suffix(".log").read_text()
    assert log.count("\n(took too long, ") == 1


def test_only_quality_runs_that_alone(tmp_path, monkeypatch):
    import gpu
    import gpu_parts

    monkeypatch.setattr(gpu_parts, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_parts, "tests", None)
    monkeypatch.setattr(gpu_parts, "benchmarks", None)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "gpu_quality.py").write_text("import sys; print('$', *sys.argv[1:])")
    output = tmp_path / "results" / "gpu.txt"
    assert gpu.run(argparse.Namespace(output=output, minutes=2, only="quality"), FACTS) == 0
    assert f"$ --device cuda --minutes 1.7 --output {tmp_path}/results/gpu_quality.txt\n" in output.read_text()


def test_tests_that_would_begin_too_late_are_skipped(tmp_path):
    import gpu_parts

    (tmp_path / "test_some.py").write_text("def test_good(): pass")
    options = ["-q", "-p", "outcomes", "-c", os.devnull, f"--rootdir={tmp_path}", str(tmp_path / "test_some.py")]
    environment = {
        "PYTHONPATH": str(ROOT / "tests" / "support"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        gpu_parts.OUTCOMES: str(tmp_path / "outcomes"),
    }
    code, output, _ = run(sys.executable, "-m", "pytest", *options, **environment, **{gpu_parts.LAST_BEGIN: "1.0"})
    assert code == 0, output
    assert json.loads((tmp_path / "outcomes").read_text()) == ["test_some.py::test_good", "skipped", "no time left"]


def test_quality_at_a_small_size(tmp_path):
    """All methods train on CPU, for a period of DiLoCo, and none costs the loss much but for what is sent seldom."""
    table = tmp_path / "quality.txt"
    code, _, errors = run(
        sys.executable,
        SCRIPT.parent / "gpu_quality.py",
        "--small",
        "--steps",
        16,
        "--output",
        table,
        OMP_NUM_THREADS="1",
    )
    assert code == 0, errors
    rows = {row["name"]: row for row in json.loads(table.with_suffix(".json").read_text())}
    assert len(rows) == 9
    for name, row in rows.items():
        assert row["steps"] == [0, 16], name
        assert row["losses"][1] < row["losses"][0], name
        assert 0 < row["bytes"][1] <= rows["dense"]["bytes"][1], name
    assert abs(rows["int8"]["losses"][1] - rows["dense"]["losses"][1]) < 0.02
    assert rows["diloco/16, int2"]["bytes"][1] < rows["diloco/16, int4"]["bytes"][1]
    assert len(table.read_text().splitlines()) == 3 + 1 + len(rows)


def test_facts_of_this_machine():
    code, output, errors = run(sys.executable, SCRIPT.parent / "gpu_facts.py")
    assert code == 0, errors
    facts = json.loads(output)
    assert facts["torch"] == torch.__version__
    assert len(facts["devices"]) == torch.cuda.device_count()


def test_tests_on_gpus_are_found_and_all_benchmarks_are_there():
    import gpu_parts

    for part in gpu_parts.benchmarks():
        assert (ROOT / part.arguments[0]).is_file()
    files = {word for part in gpu_parts.tests(16) for word in part.arguments if word.endswith(".py")}
    marked = {path.name for path in (ROOT / "tests").glob("*/test_*.py") if "pytest.mark.gpu" in path.read_text()}
    assert {Path(file).name for file in files} == marked - {Path(__file__).name}


def event(category, stream, begin, duration):
    return {"cat": category, "name": "some", "ts": begin, "dur": duration, "args": {"stream": stream}}


def test_work_beside_a_models():
    from cuda_trace import beside, parsed

    events = [
        *(event("kernel", 7, 1000, 1000), event("kernel", 7, 2500, 1000)),
        *(event("kernel", 20, 1500, 1000), event("gpu_memcpy", 20, 2000, 250), event("kernel", 21, 4000, 500)),
        *({"cat": "cuda_runtime", "ts": 0, "dur": 9000}, event("gpu_user_annotation", 7, 0, 9000), {"ph": "M"}),
    ]
    work = parsed({"traceEvents": events})
    assert [one.stream for one in work] == [7, 20, 20, 7, 21]
    assert beside(work) == (1.5, 0.5)
    assert beside([]) == (0, 0)


@pytest.mark.filterwarnings("ignore:hook=|training ended after")
def test_models_of_benchmarks_train_on_cpu(tmp_path, capsys):
    """What of them needs no GPU; and hooks do something, also with one rank."""
    import cuda_ranks
    import cuda_step
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    data = torch.randn(2, 64)
    gradients = []
    for hook in (None, "stock fp16", "stock powersgd-1", "bf16", cuda_step.low_rank(1, num_iters=1)):
        model = cuda_ranks.make(hook, 64, 2, torch.device("cpu"))
        for _ in range(4):
            cuda_ranks.step(model, data)
        gradients.append(model.module[0].weight.grad.clone())
        del model
        gc.collect()
    assert not any(torch.equal(gradients[0], changed) for changed in gradients[1:])
    dist.destroy_process_group()
    times = {name: [2.0 if "stock" in name else 1.5, 0.5] for name in cuda_step.VARIANTS} | {"noop": [1.0, 0.5]}
    cuda_step.report(times, dict.fromkeys(times, (3, "no")))
    rows = {line[:20].strip(): line[20:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["powersgd-4, half"] == ["1.500", "0.500", "0.50", "0.500", "3", "no"]
    assert rows["noop"] == ["1.000", "0.000", "0.500", "3", "no"]
