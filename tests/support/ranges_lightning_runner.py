"""Lightning's `PyTorchProfiler` of all threads, with hooks; started by test_ranges_hosts.py.

    python ranges_lightning_runner.py PACKAGE OUT

PACKAGE is `lightning.pytorch` or `pytorch_lightning`. Each rank leaves its trace in `OUT/<label>`.
"""

import importlib
import sys
import warnings

import torch
from lightning_runner import OUT, Classifier, CompressedDDP, data, pl

import lightning_commhooks as lc

ALL_THREADS = torch.profiler._ExperimentalConfig(profile_all_threads=True)
PyTorchProfiler = importlib.import_module(f"{sys.argv[1]}.profilers").PyTorchProfiler
HOOKS = {
    "int8": lc.Int8(min_bytes=0, block_size=16),
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=0, post_local_gradient_allreduce=False, period=2),
}


def fit(label, hook):
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=CompressedDDP(hook=hook, bucket_cap_mb=0.001),
        profiler=PyTorchProfiler(dirpath=OUT / label, filename="trace", experimental_config=ALL_THREADS),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), data())
    summary = trainer.profiler.summary()
    (OUT / f"{label}.{trainer.global_rank}.txt").write_text(summary)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"lightning\.|pytorch_lightning\.|lightning_fabric\.")
    for label, hook in HOOKS.items():
        fit(label, hook)
