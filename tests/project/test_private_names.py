"""Private names of others: every use is in a table with what breaks, and all of them are there as we know them."""

import ast
import contextlib
import importlib
import inspect

import private_names
import private_scan
import pytest
from private_names import TORCH, fails
from private_names_hosts import ACCELERATE, LIGHTNING, OF_TORCHFT, TRANSFORMERS

for framework in ("lightning.pytorch", "pytorch_lightning", "accelerate", "transformers.trainer"):
    with contextlib.suppress(ImportError):
        importlib.import_module(framework)  # here, since they set environment variables

TABLE = [*TORCH, *LIGHTNING, *ACCELERATE, *TRANSFORMERS, *OF_TORCHFT]
HINT = "enter it in tests/support/private_names*.py with what breaks without it; in private_scan.OURS if it is ours"


def test_every_use_is_in_the_table():
    found = private_scan.private_names(private_scan.sources())
    entered = {use.name: set(use.where) for use in TABLE if use.name in found}
    assert entered == found, HINT


def test_every_row_is_used():
    found = private_scan.private_names(private_scan.sources())
    public = [use for use in TABLE if use.name not in found]
    texts = {path: (private_scan.ROOT / path).read_text() for use in public for path in use.where}
    gone = [use.name for use in public for path in use.where if use.name not in texts[path]]
    private = [use.name for use in public if any(map(private_scan.is_private, use.name.split(".")))]
    assert (gone, private) == ([], []), "nothing uses these any more: delete their rows"


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
    assert run(private_names.missing_on_ranks) == [[], []]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning(package, monkeypatch):
    pytest.importorskip(package.split(".")[0])
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # what a `Trainer` does
    assert list(filter(None, (fails(use, package) for use in LIGHTNING))) == []


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        assert list(filter(None, (fails(use, accelerate.Accelerator(cpu=True)) for use in ACCELERATE))) == []
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


def test_transformers():
    transformers = pytest.importorskip("transformers")
    source = inspect.getsource(inspect.getmodule(transformers.Trainer))
    assert list(filter(None, (fails(use, source) for use in TRANSFORMERS))) == []


def test_torchft():
    pytest.importorskip("torchft")
    assert list(filter(None, map(fails, OF_TORCHFT))) == []
