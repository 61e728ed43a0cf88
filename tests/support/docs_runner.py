"""Run by `test_docs.py` in each of two processes: all blocks of code in the pages, results as a file.

A page whose code calls `init_process_group` brings all that it needs. Other pages find a process group and what their
readers have at hand: see `GIVEN`. Each block gets these anew, unless the page has made something of that name itself.
A block that begins with `# <name>.py` is that file: later ones import it. One that begins with the command to start it
is a script: `test_readme.py` runs it.
"""

import ast
import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import docs_shell
import lightning.pytorch
import torch
import torch.distributed as dist
import torch.distributed.optim  # warns when it is imported
import transformers
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from docs_pages import PAGES, ROOT, blocks
from fsdp_accelerate_runner import VERSIONS, with_fsdp
from lightning.fabric import Fabric
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import accelerate_integration
import lightning_commhooks as lc
from lightning_commhooks.codecs import codec
from lightning_commhooks.collectives import group

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IGNORED = (
    "hook='noop' does not average",
    "hook='.+localsgd': gradients go on being averaged",  # on a single node
    "hook='diloco': gradients go on being averaged",
    "torch.cuda.amp.GradScaler is enabled",
    ".*Profiler clears events at the end of each cycle",  # of PyTorch 2.10, always
    # Trainings of two steps, of small models.
    "training ended after",
    "training ends after",
    "hook='.+' compresses nothing",
    "You're resuming from a checkpoint that ended before the epoch ended",
    "Checkpoint directory .* exists and is not empty",
    "The 'train_dataloader' does not have many workers",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # used by Lightning
)


class Tiny(torch.nn.Module):
    """Takes what the loops in the pages give a model, and what `transformers.Trainer` does."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(64, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.head = torch.nn.Linear(64, 64)

    def forward(self, x, labels=None):
        y = self.head(self.norm(self.embed(x)))
        return y if labels is None else {"loss": torch.nn.functional.mse_loss(y, labels)}


def arguments():
    folder = tempfile.mkdtemp()
    return transformers.TrainingArguments(folder, max_steps=2, use_cpu=True, report_to=[], save_strategy="no")


DATA = [{"x": torch.randn(64), "labels": torch.randn(64)} for _ in range(64)]
FABRIC = {"accelerator": "cpu", "devices": WORLD_SIZE}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
TRAINER = {**FABRIC, **QUIET, "max_steps": 2}


def sharded():
    model = Tiny()
    if VERSIONS[-1] == 1:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    for block in (model.embed, model.head, model):
        fully_shard(block)
    return model


def sharding_accelerator():
    accelerator = with_fsdp(VERSIONS[-1])
    model = Tiny()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator


MODULES = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "dist": dist, "transformers": transformers}
MADE = {
    "model": Tiny,
    "ddp_model": lambda: DistributedDataParallel(Tiny()),
    "optimizer": lambda: torch.optim.SGD(Tiny().parameters(), lr=0.1),
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "module": BoringModel,
    "args": arguments,
    "data": lambda: DATA,
    "accelerator": lambda: Accelerator(cpu=True),
    "trainer": lambda: transformers.Trainer(Tiny(), arguments(), train_dataset=DATA),
    "path": lambda: tempfile.mktemp(),
}
# In blocks about FSDP.
SHARDED = {**MADE, "model": sharded, "accelerator": sharding_accelerator, "Block": lambda: torch.nn.Linear}


class Recorder:
    """`attach`, for models that have a hook already, too: they are wrapped anew. Closes what frameworks leave open."""

    def __init__(self):
        self._attach, self._attachments = lc.attach, []
        self._module = importlib.import_module("lightning_commhooks.sources.attach")
        self._attachment_class = self._module.Attachment
        self._module.Attachment = self._record

    def attach(self, model, *args, **kwargs):
        if getattr(model, "_comm_hooks", None):
            model = DistributedDataParallel(model.module)
        return self._attach(model, *args, **kwargs)

    def _record(self, *args):
        self._attachments.append(self._attachment_class(*args))
        return self._attachments[-1]

    def close(self):
        with warnings.catch_warnings():
            # Short trainings end before a hook begins to compress.
            warnings.simplefilter("ignore")
            for attachment in self._attachments:
                attachment.close()
        self._attachments = []


class Groups:
    """`init_process_group`, again and again in one process."""

    def __init__(self):
        self._store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self._original, self._page, self._numbers = dist.init_process_group, "", itertools.count()

    def begin(self, page):
        """Count groups anew, as on a page before a rank may have met an error before the others did.

        PyTorch counts them too, and its count is part of a key in the store; a group that could not be made stays
        counted on the rank where it failed, and only there.
        """
        self._page, self._numbers = page, itertools.count()
        torch.distributed.distributed_c10d._world.group_count = 0

    def init(self, *_, **__):
        store = dist.PrefixStore(f"{self._page}/{next(self._numbers)}", self._store)
        timeout = timedelta(seconds=30)
        self._original("gloo", store=store, rank=RANK, world_size=WORLD_SIZE, timeout=timeout)

    def exchange(self, key, text):
        """What each rank has to say."""
        keys = [f"{self._page}/{key}/{rank}" for rank in range(WORLD_SIZE)]
        self._store.set(keys[RANK], text)
        return [self._store.get(key).decode() for key in keys]


def run_page(path, recorder, groups):
    """Run all blocks of a page; returns the first error, empty for none."""
    page = blocks(path)
    brings_all = any("init_process_group" in block.text for block in page if block.language == "python")
    namespace = {"__name__": "page"} if brings_all else given_names()
    made = {} if brings_all else MADE
    files = Files(groups.exchange("folder", tempfile.mkdtemp())[0])
    try:
        if not brings_all:
            groups.init()
        for block in page:
            if block.command:
                docs_shell.check(block.command)
            elif block.not_run is None:
                torch.manual_seed(0)
                if files.name(block):
                    checking_prints(block, lambda block=block: files.import_(block))
                else:
                    run_block(path, block, namespace, made)
        return ""
    except BaseException:
        return f"{path.relative_to(ROOT)}, rank {RANK}:\n{traceback.format_exc()}"
    finally:
        files.close()
        recorder.close()
        namespace.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


class Files:
    """Blocks that are files: each rank has its own of them, and all the same working directory.

    Args:
        folder: the working directory.
    """

    def __init__(self, folder):
        self._folder, self._before, self._imported = tempfile.mkdtemp(), os.getcwd(), []
        os.chdir(folder)
        sys.path.insert(0, self._folder)

    @staticmethod
    def name(block):
        found = re.match(r"# (\w+)\.py\n", block.text) if block.language == "python" else None
        return found and found[1]

    def import_(self, block):
        Path(self._folder, f"{self.name(block)}.py").write_text(block.text)
        importlib.invalidate_caches()
        self._imported.append(self.name(block))
        importlib.import_module(self.name(block))

    def close(self):
        os.chdir(self._before)
        sys.path.remove(self._folder)
        for name in self._imported:
            sys.modules.pop(name, None)


def given_names():
    names = {name: getattr(lc, name) for name in (*lc.__all__, *lc._LAZY)}
    names |= {name: getattr(accelerate_integration, name) for name in accelerate_integration.__all__}
    defaults = {"Trainer": (lightning.pytorch.Trainer, TRAINER), "Fabric": (Fabric, FABRIC)}
    for name, (function, options) in defaults.items():
        # The machines in the pages have more devices than this one.
        names[name] = lambda function=function, options=options, **kwargs: function(
            **{**options, **kwargs, **FABRIC, "num_nodes": 1}
        )
    return {**names, **MODULES, "Accelerator": Accelerator, "DistributedDataParallel": DistributedDataParallel}


def run_block(path, block, namespace, made):
    if block.language == "python":
        run_python(path, block, namespace, made)
    elif block.language == "yaml":
        check_yaml(block.text)
    elif block.language in ("", "bash"):
        docs_shell.check(block.text)
    else:
        assert block.language in ("diff", "text", "console"), f"line {block.line}: nothing runs {block.language!r}"


def run_python(path, block, namespace, made):
    tree = ast.parse(block.text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = namespace.setdefault("__own__", set())
    is_sharded = made and {"attach", "CompressedFSDPStrategy"} <= used
    wanted = used if is_sharded else used - own
    given = {name: make() for name, make in (SHARDED if is_sharded else made).items() if name in wanted}
    # Hooks are closed when their model is gone, which a later block may not have.
    namespace.setdefault("__given__", []).append(given)
    namespace |= given
    code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
    checking_prints(block, lambda: exec(code, namespace))
    if is_sharded:
        AcceleratorState._reset_state(reset_partial_state=True)
    own |= set(names_made(tree))


def checking_prints(block, run):
    """Run a block, which prints what it says."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run()
    expected = set(re.findall(r"^ *print\(.*  # prints (.+)$", block.text, re.MULTILINE))
    if expected and RANK == 0:
        found = set(printed.getvalue().splitlines())
        assert found == expected, f"it prints {sorted(found)}, not {sorted(expected)}"


def names_made(tree):
    """Names that code gives something to, but in functions of its own."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield from names_made(node)


def check_yaml(text):
    """Read a configuration with Lightning's CLI: a whole one, or what is below `init_args` of the strategy."""
    config = yaml.safe_load(text)
    if "trainer" not in config:
        strategy = {"class_path": "lightning_commhooks.CompressedDDPStrategy", "init_args": config}
        config = {"trainer": {"strategy": strategy}}
    config["trainer"] = {**config["trainer"], "logger": False, "accelerator": "cpu", "devices": WORLD_SIZE}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file, warnings.catch_warnings():
        # Lightning calls jsonargparse in a way that it deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        yaml.safe_dump(config, file)
        file.flush()
        arguments = [f"--config={file.name}"]
        LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False, args=arguments)


def main():
    """Results of all pages, or of those whose names are given, go to the file that is named first."""
    torch.set_num_threads(1)
    sys.argv, (_, result_file, *names) = sys.argv[:1], sys.argv
    os.environ["ACCELERATE_USE_CPU"] = "true"
    # A rank that has no collective on a page must not close its connection before the other rank has opened it.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    set_seed(0)
    logging.disable(logging.INFO)
    recorder, groups = Recorder(), Groups()
    lc.attach = recorder.attach
    dist.init_process_group = groups.init
    # Compiling takes seconds.
    group.compiled = lambda hook_codec, *_: codec.Kernels(hook_codec)
    results = {}
    for path in [ROOT / "README.md", *PAGES]:
        name = str(path.relative_to(ROOT))
        if names and name not in names:
            continue
        for attempt in range(2):
            groups.begin(f"{name}:{attempt}")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for message in IGNORED:
                    warnings.filterwarnings("ignore", message=message)
                error = run_page(path, recorder, groups)
            results[name] = "".join(groups.exchange("error", error))
            # Connecting a new group's ranks, gloo gives up at the first connection that is refused.
            if "connectFullMesh" not in results[name]:
                break
    if RANK == 0:
        Path(result_file).write_text(json.dumps(results))
    groups.exchange("end", "")


if __name__ == "__main__":
    main()
