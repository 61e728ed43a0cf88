"""`PerParameter` in YAML. The real `Trainer` has it in test_lightning.py."""

import pytest

pytest.importorskip("lightning")
pytest.importorskip("jsonargparse")

from test_cli import cli

import lightning_commhooks as lc


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning calls jsonargparse so
def test_from_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["main.py"])
    (tmp_path / "config.yaml").write_text(
        """
trainer:
  accelerator: cpu
  devices: 2
  strategy:
    class_path: lightning_commhooks.CompressedDDPStrategy
    init_args:
      hook:
        class_path: lightning_commhooks.PerParameter
        init_args:
          hooks:
            "*norm*": allreduce
            "*":
              class_path: lightning_commhooks.Int8
              init_args: {block_size: 256}
"""
    )
    hook = cli(f"--config={tmp_path / 'config.yaml'}").trainer.strategy._hook
    assert hook == lc.PerParameter({"*norm*": "allreduce", "*": lc.Int8(block_size=256)})
