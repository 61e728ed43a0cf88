"""`import lightning_commhooks` needs neither Lightning nor Accelerate, and does not import them.

Orders of import are in test_lightning.py.
"""

import importlib.util
import subprocess
import sys

import pytest

FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "ray")
STRATEGIES = [
    "CommHookMonitor",
    "CompressedDDPFabricStrategy",
    "CompressedDDPStrategy",
    "CompressedFSDPStrategy",
    "CompressedModelParallelStrategy",
]


def python(code):
    """Standard output of a new process; fails with its errors."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_no_framework():
    code = f"import sys, lightning_commhooks; print([m for m in {FRAMEWORKS} if m in sys.modules])"
    expected = ["[]"]
    if importlib.util.find_spec("accelerate") is not None:
        others = [name for name in FRAMEWORKS if name not in ("accelerate", "ray")]
        code += f"\nimport accelerate_integration\nprint([m for m in {others} if m in sys.modules])"
        expected.append("[]")
    assert python(code).split() == expected


def test_works_without_frameworks():
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({FRAMEWORKS}))  # None: import fails
import torch, torch.distributed as dist
import lightning_commhooks as lc
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
attachment = lc.attach(ddp, "bf16")
ddp(torch.ones(2, 8)).sum().backward()
print(attachment.metrics()["steps"])
attachment.close()
dist.destroy_process_group()
from lightning_commhooks import *
print("attach" in globals(), "CompressedDDPStrategy" in globals())
for name in ("CompressedDDPStrategy", "CompressedRayDDPStrategy"):
    try:
        getattr(lc, name)
    except ImportError as error:
        print(error)
for module in ("", ".fsdp", ".kwargs", ".monitor"):
    try:
        importlib.import_module("accelerate_integration" + module)
    except ImportError as error:
        print(error)
"""
    printed = python(code)
    assert "\n1\nTrue False\n" in f"\n{printed}"
    for extra, count in {"lightning": 1, "ray": 1, "accelerate": 4}.items():
        assert printed.count(f"pip install 'lightning-commhooks[{extra}]'") == count


def test_star_import(run_code):
    names = {"lightning": STRATEGIES, "pytorch_lightning": [name + "PL" for name in STRATEGIES if "Fabric" not in name]}
    expected = [name for package, own in names.items() if importlib.util.find_spec(package) for name in own]
    if all(importlib.util.find_spec(package) for package in ("ray", "pyarrow")):
        expected.append("CompressedRayDDPStrategy")
    code = f"from lightning_commhooks import *; print([name for name in {expected} if name not in globals()])"
    assert run_code(code).strip() == "[]"


def test_star_import_with_half_of_ray(tmp_path, monkeypatch):
    # `pip install ray` leaves out what Ray Train refuses to be imported without.
    code = """
import sys
sys.modules["pyarrow"] = None
import lightning_commhooks
print("CompressedRayDDPStrategy" in lightning_commhooks.__all__)
"""
    assert python(code).strip() == "False"
    import lightning_commhooks

    (tmp_path / "folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("folder") is not None
    assert not lightning_commhooks._found("folder")
    assert lightning_commhooks._found("torch")


def test_unknown_attribute():
    import lightning_commhooks

    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = lightning_commhooks.Nothing
