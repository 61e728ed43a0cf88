"""Resident memory that a hook adds, as multiples of the gradients' size, with this code and an earlier commit's.

Two processes on this machine, 12 x Linear(2048, 2048): 50.4 M parameters, 201 MB of gradients. Each row is a launch of
its own. Reported for rank 0 are what is resident after the last step and its peak since the third, each less that of
plain DDP, over the size of the gradients. Codecs are not compiled: the compiler itself takes some hundred MB, once,
whatever the model.

    python benchmarks/hook_memory.py 070c36d
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from old_and_new import NEW, OLD, ROOT, export
from torch.nn.parallel import DistributedDataParallel

HOOKS = {
    "powersgd, rank 4": ("PowerSGD", {"start_powerSGD_iter": 2, "matrix_approximation_rank": 4}),
    "int8": ("Int8", {}),
    "int4": ("Int4", {}),
}
NUM_LAYERS, SIZE, STEPS = 12, 2048, 8


def resident(field: str) -> int:
    """Bytes that the kernel says of this process: `VmRSS` now, `VmHWM` at most."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def work(library: str, hook: str) -> None:
    """Train for some steps; rank 0 prints what is resident, and its peak."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    ddp = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(SIZE, SIZE) for _ in range(NUM_LAYERS)]))
    imported = importlib.import_module(library)  # also for plain DDP, which takes memory too
    if hook:
        kind, options = HOOKS[hook]
        imported.attach(ddp, getattr(imported, kind)(**options))
    for step in range(STEPS):
        if step == 3:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        ddp(torch.randn(4, SIZE)).square().mean().backward()
        ddp.zero_grad(set_to_none=False)
    if dist.get_rank() == 0:
        print(resident("VmRSS"), resident("VmHWM"))
    dist.barrier()
    dist.destroy_process_group()


def measure(folder: str, library: str, hook: str) -> tuple[int, int]:
    """Bytes resident, and their peak, in rank 0 of two processes."""
    path = os.pathsep.join([str(ROOT), folder, str(ROOT / "benchmarks")])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "COMMHOOKS_LATENCY_MS": "0",
        "TORCH_COMPILE_DISABLE": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29517 + os.getpid() % 1000),
    }
    command = [sys.executable, __file__, "--work", library, hook]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=600)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"{library}, {hook or 'plain DDP'} failed")
    now, most = map(int, printed[0].split()[-2:])
    return now, most


def main() -> None:
    """Launch each hook with either code, print the table."""
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="of the earlier code")
    commit = parser.parse_args().commit
    gradients = NUM_LAYERS * (SIZE * SIZE + SIZE) * 4
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"# torch {torch.__version__}, {datetime.date.today()}, 2 processes, {gradients / 1e6:.0f} MB of gradients\n")
    print(f"{'hook':<20}{'old: resident':>14}{'peak':>7}{'new: resident':>15}{'peak':>7}")
    with tempfile.TemporaryDirectory() as folder:
        export(commit, Path(folder))
        plain = {library: measure(folder, library, "") for library in (OLD, NEW)}
        for hook in HOOKS:
            added = []
            for library in (OLD, NEW):
                found = measure(folder, library, hook)
                added += [(own - base) / gradients for own, base in zip(found, plain[library], strict=True)]
            print(f"{hook:<20}{added[0]:>13.2f}x{added[1]:>6.2f}x{added[2]:>14.2f}x{added[3]:>6.2f}x", flush=True)


if __name__ == "__main__":
    main()
