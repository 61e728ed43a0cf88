"""`accumulation` in YAML and on the command line. The real `Trainer` has it in test_accumulation_hosts.py."""

# ruff: noqa: F811  # fixtures of test_cli.py

import re

import pytest

pytest.importorskip("lightning")
pytest.importorskip("jsonargparse")

from test_cli import STRATEGY, _no_arguments, cli, config, output_of  # noqa: F401

import lightning_commhooks as lc

# Lightning calls jsonargparse in a way that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
WRAPPED = """
hook:
  class_path: lightning_commhooks.ScaleByGradAccumulation
  init_args: {hook: bf16, accumulation: weighted}
"""


@pytest.mark.parametrize("value", ["mean", "sum", "weighted", 4])
def test_from_yaml(config, value):
    strategy = cli(config(f"hook: powersgd\naccumulation: {value}")).trainer.strategy
    assert strategy._hook == lc.ScaleByGradAccumulation("powersgd", value)


def test_framework_is_the_default(config):
    for text in ("hook: powersgd", "hook: powersgd\naccumulation: framework"):
        assert cli(config(text)).trainer.strategy._hook == lc.PowerSGD()


def test_wrapper_from_yaml(config):
    assert cli(config(WRAPPED)).trainer.strategy._hook == lc.ScaleByGradAccumulation("bf16", "weighted")


def test_from_the_command_line():
    args = [STRATEGY, "--trainer.strategy.hook=bf16", "--trainer.strategy.accumulation=4", "--trainer.accelerator=cpu"]
    assert cli(*args).trainer.strategy._hook == lc.ScaleByGradAccumulation("bf16", 4)


def test_prints_what_it_reads(config, capsys, tmp_path):
    printed = output_of(capsys, config("hook: bf16\naccumulation: 4"), "--print_config")
    assert re.search(r"^ *accumulation: 4$", printed, re.MULTILINE)
    (tmp_path / "printed.yaml").write_text(printed)
    again = cli(f"--config={tmp_path / 'printed.yaml'}").trainer.strategy._hook
    assert again == lc.ScaleByGradAccumulation("bf16", 4)


@pytest.mark.parametrize("value", ["maen", "4.5", "[4]"])
def test_mistakes_fail_while_parsing(config, capsys, value):
    with pytest.raises(SystemExit) as stopped:
        cli(config(f"hook: bf16\naccumulation: {value}"))
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert re.search(
        r"\"accumulation\":\s+.*typing\.Literal\['framework', 'mean', 'sum', 'weighted'\]", text, re.DOTALL
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hook: bf16\naccumulation: 0", "accumulation must be one of 'framework', 'mean', 'sum', 'weighted' or an int"),
        (f"accumulation: mean\n{WRAPPED}", "accumulation='mean': the hook has an accumulation already"),
    ],
)
def test_values_out_of_range_fail_before_training(config, text, message):
    with pytest.raises(ValueError, match=message):
        cli(config(text))
