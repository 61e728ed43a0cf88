"""Each example runs briefly, as examples/README.md says, in two processes or more; that of Ray in test_ray.py."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from forks import DISTRIBUTED, FORKS, PATIENCE, ROOT, alone, free_port, run_alone, run_ranks

from lightning_commhooks.advice.task import load_task

EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
SCRIPTS = [path for path in sorted(EXAMPLES.rglob("*.py")) if path.parent.name != "topk_plugin"]
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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_page_has_each_example(script):
    name = str(script.relative_to(EXAMPLES))
    (row,) = re.findall(rf"^\| \[{re.escape(name)}\]\({re.escape(name)}\) \|.*\| (.+) \|$", PAGE, re.MULTILINE)
    assert re.match(r"\d+ s\b", row), "its time"
    assert f"examples/{name}" in script.read_text().replace("\n", " "), "its command, in its first lines"
    assert re.search(rf"^\$ (python|torchrun|lightning-commhooks) .*examples/{re.escape(name)}", PAGE, re.MULTILINE)


def check_page(name, output):
    """The lines that the page shows below the commands of an example are in its output, except for numbers."""
    blocks = re.findall(rf"^\$ .*examples/{re.escape(name)}.*\n((?:(?!\$ |```).*\n)*)", PAGE, re.MULTILINE)
    # Columns are as wide as their numbers, and hashes are numbers too. A busy machine's link has Mbit/s.
    numbers = r"(\b[0-9a-f]{8}\b|[\d.,]| |\b[MG](?=bit/s))+"
    shown, printed = (re.sub(numbers, "0", text) for text in ("".join(blocks), output))
    assert shown, f"the page shows nothing of {name}"
    assert not [line for line in shown.splitlines() if line not in printed], output


@needs("lightning", "sklearn")
def test_lightning_digits(tmp_path):
    script = EXAMPLES / "lightning" / "digits.py"
    stdout, _ = launched(script, "--hook", "powersgd", "--epochs", "4", cwd=tmp_path)
    assert len(re.findall("^powersgd: ", stdout, re.MULTILINE)) == 1, "one line, of rank 0"
    assert float(re.search(r"([\d.]+)x less than dense", stdout)[1]) > 5
    assert float(re.search(r"test_accuracy\D+(0\.\d+)", stdout)[1]) > 0.8
    check_page("lightning/digits.py", stdout)


@needs("lightning", "sklearn", "tensorboard")
def test_monitor_digits(tmp_path):
    stdout, stderr = on_two_ranks(EXAMPLES / "lightning" / "monitor.py", "--epochs", "4", cwd=tmp_path)
    check_page("lightning/monitor.py", (stdout + stderr).replace("s saved against", "s lost against"))
    line = r"Communication hook 'powersgd': [\d.]+ MB sent in 88 steps instead of .* start_powerSGD_iter=40 on\)"
    assert len(re.findall(line, stdout + stderr)) == 1, stdout + stderr
    assert list((tmp_path / "monitor_logs" / "powersgd").rglob("events.out.tfevents.*"))


@needs("lightning", "sklearn")
def test_fabric_digits(tmp_path):
    script = EXAMPLES / "fabric" / "digits.py"
    stdout, _ = on_two_ranks(script, "--hook", "post_localsgd", "--epochs", "6", cwd=tmp_path)
    check_line(stdout, "post_localsgd", 1.5)
    check_page("fabric/digits.py", stdout.replace("post_localsgd", "powersgd"))


@needs("accelerate", "sklearn")
def test_accelerate_digits_with_accelerate_launch_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMHOOKS_HOOK", "powersgd")
    monkeypatch.setenv("COMMHOOKS_OPTIONS", '{"start_powerSGD_iter": 10, "matrix_approximation_rank": 2}')
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no"]
    # Not 0: Accelerate 1.4 gives it to the ranks as it is, and they wait forever.
    launch += [f"--main_process_port={free_port()}"]
    stdout, _ = launched(*launch, EXAMPLES / "accelerate" / "digits.py", "--cpu", "--epochs", "6", cwd=tmp_path)
    check_line(stdout, "powersgd", 5)
    check_page("accelerate/digits.py", stdout)


@needs("accelerate", "sklearn")
def test_accelerate_digits_with_local_sgd(tmp_path):
    command = [EXAMPLES / "accelerate" / "digits.py", "--cpu", "--hook", "post_localsgd", "--epochs", "6"]
    check_line(on_two_ranks(*command, cwd=tmp_path)[0], "post_localsgd", 1.5)


def check_line(stdout, hook, least_ratio):
    """Rank 0 alone prints what was sent and how well the model does."""
    assert len(re.findall(f"^{hook}: ", stdout, re.MULTILINE)) == 1
    assert float(re.search(r"([\d.]+)x less than dense", stdout)[1]) > least_ratio
    assert float(re.search(r"accuracy ([\d.]+)%", stdout)[1]) > 80


@needs("transformers", "accelerate")
def test_language_model_of_transformers(tmp_path):
    script = EXAMPLES / "transformers" / "language_model.py"
    stdout, _ = on_two_ranks(script, "--hook", "powersgd", "--steps", "50", cwd=tmp_path)
    assert len(re.findall("^powersgd: ", stdout, re.MULTILINE)) == 1
    assert float(re.search(r"loss ([\d.]+) after", stdout)[1]) < 3.3, "4.8 at first"
    assert float(re.search(r"([\d.]+)x less than dense", stdout)[1]) > 1.5
    check_page("transformers/language_model.py", stdout)


@needs("lightning", "sklearn", "jsonargparse")
def test_cli(tmp_path):
    config = EXAMPLES / "lightning" / "cli" / "schedule.yaml"  # test_cli.py reads the others
    command = ["fit", "--config", config, "--trainer.max_epochs=6", "--trainer.enable_progress_bar=false"]
    _, stderr = on_two_ranks(EXAMPLES / "lightning" / "cli" / "main.py", *command, cwd=tmp_path)
    assert "Starting with 2 processes" in stderr
    assert "`max_epochs=6` reached" in stderr
    check_page("lightning/cli/main.py", stderr)
    # 6 epochs have 132 steps, more than the start in two of the files; the name begins after a tenth of them.
    assert "let it begin" not in stderr


@needs("sklearn")
@pytest.mark.parametrize(("hook", "ratio"), [("powersgd", 5), ("diloco", 1.8)])
def test_plain_ddp_on_digits(tmp_path, hook, ratio):
    script = EXAMPLES / "pytorch" / "digits.py"
    stdout, _ = on_two_ranks(script, "--hook", hook, "--steps", "100", cwd=tmp_path)
    check_line(stdout, hook, ratio)
    check_page("pytorch/digits.py", stdout.replace("diloco", "powersgd"))


@needs("sklearn")
def test_muloco_on_digits(tmp_path):
    stdout, _ = on_two_ranks(EXAMPLES / "pytorch" / "muloco.py", "--steps", "150", cwd=tmp_path)
    check_line(stdout, "diloco", 2.5)
    assert ", 4 averages of the model" in stdout
    check_page("pytorch/muloco.py", stdout)


@needs("sklearn")
def test_sharded_digits(tmp_path):
    outputs = run_ranks(EXAMPLES / "fsdp" / "digits.py", world=4, cwd=tmp_path, timeout=150)
    # PyTorch 2.10 prints what gloo connects.
    (line,) = re.findall("^loss .*", "".join(stdout for stdout, _ in outputs), re.MULTILINE)
    found = re.fullmatch(r"loss (\d\.\d+); (\d+\.\d)x fewer bytes between replicas", line)
    assert float(found[1]) < 1
    assert float(found[2]) > 5
    check_page("fsdp/digits.py", line)


@needs("lightning", "sklearn", "torchft")
def test_replicas_digits(tmp_path):
    stdout, stderr = launched(EXAMPLES / "torchft" / "digits.py", cwd=tmp_path)
    assert "replica 2 was killed at step 60, and is started again" in stdout
    # It may be back before others have missed it.
    left = "replica 'replica_2' left (at step 60: 2|and 'replica_2' joined at step 60: 3) go on"
    # All processes write to the same stream: lines may begin within each other.
    assert len(re.findall(left, stderr)) == 2, stderr
    found = re.findall(r"replica (\d): step 600, accuracy (0\.9\d|1\.00), weights ([0-9a-f]{8})", stdout)
    assert {rank for rank, *_ in found} == {"0", "1", "2"}, stdout + stderr
    assert len({weights for *_, weights in found}) == 1, stdout
    check_page("torchft/digits.py", stdout)


MODELS = EXAMPLES / "advise" / "models.py"


def test_advise(tmp_path):
    options = ["--bandwidth", "1gbit", "--hooks", "bf16", "--rounds", "1"]
    stdout, _ = launched("lightning_commhooks", "advise", f"{MODELS}:mlp", *options, cwd=tmp_path)
    assert "dense (no hook)" in stdout


@pytest.mark.parametrize("model", ["gpt", "conv"])
def test_models_for_advise(model):
    task = load_task(f"{MODELS}:{model}", torch.device("cpu"), seed=0)
    task.gradients(task.module)


def on_two_nodes(*arguments, cwd):
    """Standard output of both nodes of a command, each of one process under a torchrun of its own."""
    port = free_port()
    environment = {name: value for name, value in alone(**FORKS.launching()).items() if name not in DISTRIBUTED}
    words = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    nodes = [
        FORKS.start(
            "torch.distributed.run", *words, f"--node-rank={rank}", *arguments, environment=environment, cwd=cwd
        )
        for rank in range(2)
    ]
    outputs = []
    for node in nodes:
        with node:
            outputs.append(node.finish(150))
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return [stdout for stdout, _ in outputs]


@needs("lightning", "sklearn")
def test_two_machines(tmp_path):
    script = EXAMPLES / "two_machines" / "train.py"
    options = ["--hooks", "bf16", "--rounds", "1"]
    advice, nothing = on_two_nodes(
        "-m", "lightning_commhooks", "advise", f"{script}:make_model", *options, cwd=tmp_path
    )
    assert "2 ranks, each on CPU" in advice
    assert not nothing
    first, _ = on_two_nodes(script, "--hook", "int8", "--epochs", "1", cwd=tmp_path)
    second, nothing = on_two_nodes(script, "--hook", "int8", "--epochs", "2", "--resume", cwd=tmp_path)
    check_page("two_machines/train.py", advice + first + second)
    for output, steps in ((first, "int8: step 22, 22 of"), (second, "int8: step 44, 22 of")):
        assert steps in output
    assert not re.search("^int8: ", nothing, re.MULTILINE)
    logged = (tmp_path / "two_machines" / "logs" / "version_1" / "metrics.csv").read_text()
    assert "comm/compression_ratio" in logged


def test_plain_ddp_without_anything_but_torch(tmp_path):
    blocked = ("sklearn", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "rich")
    for name in blocked:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    script = EXAMPLES / "pytorch" / "digits.py"
    stdout, _ = in_new_processes(*TORCHRUN, script, "--hook", "bf16", "--steps", "20", cwd=tmp_path, path=path)
    assert "2.0x less than dense" in stdout
