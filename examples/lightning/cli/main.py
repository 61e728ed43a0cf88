"""Lightning CLI: the communication hook is a line in a YAML file.

Train, or list the options of a hook:

    python examples/lightning/cli/main.py fit --config examples/lightning/cli/powersgd.yaml
    python examples/lightning/cli/main.py fit --trainer.strategy=lightning_commhooks.CompressedDDPStrategy \
        --trainer.strategy.hook.help=lightning_commhooks.PowerSGD
"""

import sys
from pathlib import Path

from lightning.pytorch.cli import LightningCLI

import lightning_commhooks  # noqa: F401  # registers the strategy names: --trainer.strategy=ddp_powersgd

sys.path.insert(0, str(Path(__file__).parents[1]))
from digits import Digits, DigitsData

if __name__ == "__main__":
    LightningCLI(Digits, DigitsData, seed_everything_default=0, save_config_kwargs={"overwrite": True})
