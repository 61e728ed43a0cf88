"""Run by `test_topk_plugin.py` where examples/topk_plugin is installed; prints what finds the hook by its name."""

import json
import tempfile
import warnings

import yaml

import lightning_commhooks as lc


def strategies():
    """The hooks of a strategy's name, and of configurations with a name and with options."""
    from lightning.pytorch import Trainer

    trainer = Trainer(strategy="ddp_topk", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    options = {"class_path": "topk_plugin.TopK", "init_args": {"ratio": 0.5}}
    return [repr(found.strategy.hook) for found in (trainer, *map(configured, ("topk", options)))]


def configured(hook):
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    strategy = {"class_path": "lightning_commhooks.CompressedDDPStrategy", "init_args": {"hook": hook}}
    config = {"trainer": {"strategy": strategy, "logger": False, "accelerator": "cpu", "devices": 2}}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file, warnings.catch_warnings():
        # Lightning calls jsonargparse in a way that it deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        yaml.safe_dump(config, file)
        file.flush()
        arguments = [f"--config={file.name}"]
        options = {"run": False, "save_config_callback": None, "seed_everything_default": False}
        return LightningCLI(BoringModel, **options, args=arguments).trainer


if __name__ == "__main__":
    print(json.dumps({"names": lc.available_hooks(), "hooks": strategies()}))
