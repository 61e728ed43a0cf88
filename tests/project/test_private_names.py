"""Private names of others: each that we use exists in what is installed, and does what we think."""

import ast
import contextlib
import importlib
import importlib.util
import inspect

import private_scan
import pytest
from private_names import ACCELERATE, LIGHTNING, TORCH, TORCHFT, TRANSFORMERS, failures, failures_on_ranks, resolve

for framework in ("lightning.pytorch", "pytorch_lightning", "accelerate", "transformers.trainer"):
    with contextlib.suppress(ImportError):
        importlib.import_module(framework)  # here, since they set environment variables

CHECKS = {**TORCH, **LIGHTNING, **ACCELERATE, **TRANSFORMERS, **TORCHFT}
FOUND = private_scan.private_names(private_scan.sources())


def test_every_private_attribute_has_a_check():
    unchecked = {name: files for name, files in FOUND.items() if name.startswith(".") and name not in CHECKS}
    assert not unchecked, "enter it in tests/support/private_names.py; in private_scan.OURS if it is ours"


def test_every_check_is_for_a_name_that_is_used():
    text = "".join(map(ast.unparse, private_scan.sources().values())).replace("'", '"')
    is_private = {name: any(map(private_scan.is_private, name.split("."))) for name in CHECKS}
    gone = [name for name in CHECKS if name not in (FOUND if is_private[name] else text)]
    assert not gone, "nothing uses these any more: delete their checks"


@pytest.mark.parametrize("path", [name for name in FOUND if not name.startswith(".")])
def test_every_path_exists(path):
    if importlib.util.find_spec(path.split(".")[0]) is None:
        pytest.skip("needs its package")
    resolve(path)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch\ntorch.cuda._lazy_init()", "torch.cuda._lazy_init"),
        ("import torch.distributed as dist\ndist._functional_collectives.wait", None),
        ("from torch._utils import _flatten", "torch._utils._flatten"),
        ("def f(model): return model.module._buffers", "._buffers"),
        ("def f(model): return getattr(model, '_buffers', {})", "._buffers"),
        ("class A(B):\n    def __init__(self): self._of_base = 1", "._of_base"),
        ("class A(B):\n    def _event(self): pass", "._event"),
        ("class A(B):\n    def _event(self): super()._event()\n    def f(self): self._event()", "._event"),
        ("class A:\n    def __init__(self): self._own = 1\n    def f(self): return self._own", ""),
    ],
)
def test_scan(code, name):
    name = "torch.distributed._functional_collectives.wait" if name is None else name
    assert private_scan.private_names({"file.py": ast.parse(code)}) == ({name: {"file.py"}} if name else {})


def test_torch(run):
    assert run(failures_on_ranks) == [[], []]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning(package, monkeypatch):
    pytest.importorskip(package.split(".")[0])
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # what a `Trainer` does
    assert failures(LIGHTNING, package) == []


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        assert failures(ACCELERATE, accelerate.Accelerator(cpu=True)) == []
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


def test_transformers():
    transformers = pytest.importorskip("transformers")
    assert failures(TRANSFORMERS, inspect.getsource(inspect.getmodule(transformers.Trainer))) == []


def test_torchft():
    pytest.importorskip("torchft")
    assert failures(TORCHFT) == []
