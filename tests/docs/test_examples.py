"""Each example runs in two processes, briefly, as its first lines say; that of Ray in test_ray.py."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

import pytest
from forks import FORKS, PATIENCE, ROOT, alone, free_port, run_alone, run_ranks

EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def needs(*packages):
    """Skip where one is missing; imports none, since Lightning and scikit-learn set environment variables."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {missing}")


def on_two_ranks(script, *arguments, cwd):
    """Stdout and stderr of a script on two ranks that torchrun has started."""
    outputs = run_ranks(script, *arguments, cwd=cwd, timeout=150, COLUMNS="80")
    return tuple("".join(texts) for texts in zip(*outputs, strict=True))


def launched(script, *arguments, cwd, **environment):
    """Stdout and stderr of a script, or module, that starts the ranks itself."""
    environment = alone(**FORKS.launching(), COLUMNS="80", **environment)
    return run_alone(script, *arguments, environment=environment, cwd=cwd)


def in_new_processes(*command, cwd, path):
    """Stdout and stderr of `python *command`, which must end well."""
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=120 * PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"hang\n{process.communicate()}")
    assert process.returncode == 0, stdout + stderr
    return stdout, stderr


@needs("lightning", "sklearn")
def test_lightning_digits(tmp_path):
    script = EXAMPLES / "lightning_digits.py"
    stdout, _ = launched(script, "--hook", "powersgd", "--epochs", "4", cwd=tmp_path)
    assert len(re.findall("^powersgd: ", stdout, re.MULTILINE)) == 1, "one line, of rank 0"
    assert float(re.search(r"([\d.]+)x less than dense", stdout)[1]) > 5
    assert float(re.search(r"test_accuracy\D+(0\.\d+)", stdout)[1]) > 0.8


@needs("lightning", "sklearn", "tensorboard")
def test_monitor_digits(tmp_path):
    stdout, stderr = on_two_ranks(EXAMPLES / "monitor_digits.py", "--epochs", "4", cwd=tmp_path)
    line = r"Communication hook 'powersgd': [\d.]+ MB sent in 88 steps instead of .* start_powerSGD_iter=40 on\)"
    assert len(re.findall(line, stdout + stderr)) == 1, stdout + stderr
    assert list((tmp_path / "monitor_logs" / "powersgd").rglob("events.out.tfevents.*"))


@needs("lightning", "sklearn")
def test_fabric_digits(tmp_path):
    stdout, _ = on_two_ranks(EXAMPLES / "fabric_digits.py", "--hook", "post_localsgd", "--epochs", "6", cwd=tmp_path)
    check_line(stdout, "post_localsgd", 1.5)


@needs("accelerate", "sklearn")
def test_accelerate_digits_with_accelerate_launch_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMHOOKS_HOOK", "powersgd")
    monkeypatch.setenv("COMMHOOKS_OPTIONS", '{"start_powerSGD_iter": 10, "matrix_approximation_rank": 2}')
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no"]
    # Not 0: Accelerate 1.4 gives it to the ranks as it is, and they wait forever.
    launch += [f"--main_process_port={free_port()}"]
    stdout, _ = launched(*launch, EXAMPLES / "accelerate_digits.py", "--cpu", "--epochs", "6", cwd=tmp_path)
    check_line(stdout, "powersgd", 5)


@needs("accelerate", "sklearn")
def test_accelerate_digits_with_local_sgd(tmp_path):
    command = [EXAMPLES / "accelerate_digits.py", "--cpu", "--hook", "post_localsgd", "--epochs", "6"]
    check_line(on_two_ranks(*command, cwd=tmp_path)[0], "post_localsgd", 1.5)


def check_line(stdout, hook, least_ratio):
    """Rank 0 alone prints what was sent and how well the model does."""
    assert len(re.findall(f"^{hook}: ", stdout, re.MULTILINE)) == 1
    assert float(re.search(r"([\d.]+)x less than dense", stdout)[1]) > least_ratio
    assert float(re.search(r"accuracy ([\d.]+)%", stdout)[1]) > 80


@needs("transformers", "accelerate")
def test_hf_trainer_tiny(tmp_path):
    script = EXAMPLES / "hf_trainer_tiny.py"
    stdout, _ = on_two_ranks(script, "--hook", "powersgd", "--steps", "50", cwd=tmp_path)
    assert len(re.findall("^powersgd: ", stdout, re.MULTILINE)) == 1
    assert float(re.search(r"loss ([\d.]+) after", stdout)[1]) < 3.3, "4.8 at first"
    assert float(re.search(r"([\d.]+)x less than dense", stdout)[1]) > 1.5


@needs("lightning", "sklearn", "jsonargparse")
@pytest.mark.parametrize("config", sorted((EXAMPLES / "cli").glob("*.yaml")), ids=lambda path: path.stem)
def test_cli(tmp_path, config):
    command = ["fit", "--config", config, "--trainer.max_epochs=6", "--trainer.enable_progress_bar=false"]
    _, stderr = on_two_ranks(EXAMPLES / "cli" / "main.py", *command, cwd=tmp_path)
    assert "Starting with 2 processes" in stderr
    assert "`max_epochs=6` reached" in stderr
    # 6 epochs have 132 steps, more than the start in two of the files; the name begins after a tenth of them.
    assert "let it begin" not in stderr


@needs("sklearn")
@pytest.mark.parametrize(("hook", "ratio"), [("powersgd", 5), ("diloco", 1.8)])
def test_ddp_plain(tmp_path, hook, ratio):
    script = EXAMPLES / "ddp_plain.py"
    stdout, _ = on_two_ranks(script, "--hook", hook, "--steps", "100", cwd=tmp_path)
    check_line(stdout, hook, ratio)


@needs("sklearn")
def test_sharded_digits(tmp_path):
    outputs = run_ranks(EXAMPLES / "sharded_digits.py", world=4, cwd=tmp_path, timeout=150)
    # PyTorch 2.10 prints what gloo connects.
    (line,) = re.findall("^loss .*", "".join(stdout for stdout, _ in outputs), re.MULTILINE)
    found = re.fullmatch(r"loss (\d\.\d+); (\d+\.\d)x fewer bytes between replicas", line)
    assert float(found[1]) < 1
    assert float(found[2]) > 5


@needs("lightning", "sklearn", "torchft")
def test_replicas_digits(tmp_path):
    stdout, stderr = launched(EXAMPLES / "replicas_digits.py", cwd=tmp_path)
    assert "replica 2 was killed at step 60, and is started again" in stdout
    # It may be back before others have missed it.
    left = "replica 'replica_2' left (at step 60: 2|and 'replica_2' joined at step 60: 3) go on"
    # All processes write to the same stream: lines may begin within each other.
    assert len(re.findall(left, stderr)) == 2, stderr
    found = re.findall(r"replica (\d): step 600, accuracy (0\.9\d|1\.00), weights ([0-9a-f]{8})", stdout)
    assert {rank for rank, *_ in found} == {"0", "1", "2"}, stdout + stderr
    assert len({weights for *_, weights in found}) == 1, stdout


def test_ddp_plain_without_anything_but_torch(tmp_path):
    blocked = ("sklearn", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "rich")
    for name in blocked:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    script = EXAMPLES / "ddp_plain.py"
    stdout, _ = in_new_processes(*TORCHRUN, script, "--hook", "bf16", "--steps", "20", cwd=tmp_path, path=path)
    assert "2.0x less than dense" in stdout
