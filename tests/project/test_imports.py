"""`import lightning_commhooks` needs neither Lightning nor Accelerate, and does not import them.

Orders of import are in test_lightning.py.
"""

import ast
import importlib.util
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import private_scan
import pytest

FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "ray", "torchft")


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
try:
    from lightning_commhooks.torchft import start_manager
except ImportError as error:
    print(error)
"""
    printed = python(code)
    assert "\n1\nTrue False\n" in f"\n{printed}"
    for extra, count in {"lightning": 1, "ray": 1, "accelerate": 4, "torchft": 1}.items():
        assert printed.count(f"pip install 'lightning-commhooks[{extra}]'") == count


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
    assert {*lightning_commhooks.__all__} <= {*dir(lightning_commhooks)}


def modules_of(tree, known):
    """The modules among `known` that a file imports: also in functions and by name, but not for type checkers alone."""
    conditions = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    for_checkers = [part for node in conditions if "TYPE_CHECKING" in ast.unparse(node.test) for part in node.body]
    left_out = {id(node) for part in for_checkers for node in ast.walk(part)}
    for node in (node for node in ast.walk(tree) if id(node) not in left_out):
        if isinstance(node, ast.ImportFrom):
            parts = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from known & {part if part in known else node.module for part in parts}
        elif isinstance(node, ast.Import):
            yield from known & {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from known & {getattr(argument, "value", None) for argument in node.args}


def circle(trees):
    """Modules that import each other, by their syntax trees; `None` where there are none."""
    graph = {name: {*modules_of(tree, trees.keys())} - {name} for name, tree in trees.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_circle_of_imports_with_those_in_functions():
    paths = private_scan.sources().items()
    assert not circle({path[:-3].replace("/", ".").removesuffix(".__init__"): tree for path, tree in paths})


@pytest.mark.parametrize(
    ("code", "is_circle"),
    [
        ("def f():\n    from b import name", True),
        ("def f():\n    import b", True),
        ("def f():\n    importlib.import_module('b')", True),
        ("if TYPE_CHECKING:\n    from b import Name", False),
    ],
)
def test_a_circle_of_imports_is_found(code, is_circle):
    assert bool(circle({"a": ast.parse(code), "b": ast.parse("import a")})) is is_circle
