"""Lightning CLI: hooks in YAML. Training from YAML is tested in test_examples.py."""

import dataclasses
import re
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("jsonargparse")

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lightning_commhooks as lc

# Lightning calls jsonargparse in a way that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXAMPLES = Path(__file__).parents[2] / "examples" / "lightning" / "cli"
STRATEGY = "--trainer.strategy=lightning_commhooks.CompressedDDPStrategy"


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py"])


def cli(*args):
    args = ["--trainer.logger=false", *args]
    return LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False, args=args)


@pytest.fixture
def config(tmp_path):
    """Writes a configuration; its argument is what comes below `init_args:` of the strategy."""

    def write(init_args, class_path="lightning_commhooks.CompressedDDPStrategy"):
        head = f"trainer:\n  accelerator: cpu\n  devices: 2\n  strategy:\n    class_path: {class_path}\n"
        path = tmp_path / "config.yaml"
        path.write_text(f"{head}    init_args:\n" + textwrap.indent(textwrap.dedent(init_args), " " * 6))
        return f"--config={path}"

    return write


@pytest.mark.parametrize("environment", [False, True])
def test_replica(config, monkeypatch, environment):
    """Which one it is, from the file or the environment."""
    pytest.importorskip("torchft")
    for name, value in {"REPLICA_GROUP_ID": "1", "NUM_REPLICA_GROUPS": "3"}.items() if environment else ():
        monkeypatch.setenv(name, value)
    given = "{timeout: 5}" if environment else "{replica_rank: 1, num_replica_groups: 3, timeout: 5}"
    strategy = cli(config(f"hook: int8\nfault_tolerance: {given}"), "--trainer.devices=1").trainer.strategy
    assert strategy._fault_tolerance == lc.FaultTolerance(1, 3, timeout=5)
    assert strategy._ddp_kwargs["find_unused_parameters"]


POWERSGD_4 = """
    hook:
      class_path: lightning_commhooks.PowerSGD
      init_args: {matrix_approximation_rank: 4}
"""
CAST = """
    hook:
      class_path: lightning_commhooks.Cast
      init_args:
        dtype: fp16
        hook:
          class_path: lightning_commhooks.PowerSGD
          init_args: {matrix_approximation_rank: 4}
"""
SCHEDULE = """
    hook:
      class_path: lightning_commhooks.Schedule
      init_args:
        hooks:
          0: bf16
          3:
            class_path: lightning_commhooks.PowerSGD
            init_args: {matrix_approximation_rank: 4}
"""
HIERARCHICAL = """
    hook:
      class_path: lightning_commhooks.HierarchicalLocalSGD
      init_args:
        period_group_size_dict: {4: 2, 16: null}
"""
PER_PARAMETER = """
    hook:
      class_path: lightning_commhooks.PerParameter
      init_args:
        hooks:
          "*norm*": allreduce
          "*":
            class_path: lightning_commhooks.Int8
            init_args: {block_size: 256}
"""
SCALED = """
    hook:
      class_path: lightning_commhooks.ScaleByGradAccumulation
      init_args: {hook: bf16, accumulation: weighted}
"""
FUNCTION = "hook: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook"
POWERSGD = lc.PowerSGD(matrix_approximation_rank=4)
GOOD = {
    "name": ("hook: powersgd", lc.PowerSGD(start_powerSGD_iter="auto")),
    "options": (POWERSGD_4, lc.PowerSGD(matrix_approximation_rank=4)),
    "class": ("hook: PowerSGD", lc.PowerSGD()),
    "auto": (POWERSGD_4.replace("4", "4, start_powerSGD_iter: auto"), lc.PowerSGD(rank=4, start="auto")),
    "cast": (CAST, lc.Cast(lc.PowerSGD(matrix_approximation_rank=4), "fp16")),
    "schedule": (SCHEDULE, lc.Schedule({0: lc.BF16(), 3: POWERSGD})),
    "keys_of_json": (SCHEDULE.replace("0: ", "'0': ").replace("3:", "'3':"), lc.Schedule({0: "bf16", 3: POWERSGD})),
    "hierarchical": (HIERARCHICAL, lc.HierarchicalLocalSGD(period_group_size_dict={4: 2, 16: None})),
    "per_parameter": (PER_PARAMETER, lc.PerParameter({"*norm*": "allreduce", "*": lc.Int8(block_size=256)})),
    "function": (FUNCTION, default_hooks.fp16_compress_hook),
    "accumulation": ("hook: powersgd\naccumulation: weighted", lc.ScaleByGradAccumulation("powersgd", "weighted")),
    "integer": ("hook: powersgd\naccumulation: 4", lc.ScaleByGradAccumulation("powersgd", 4)),
    "framework": ("hook: powersgd\naccumulation: framework", lc.PowerSGD(start_powerSGD_iter="auto")),
    "scaled": (SCALED, lc.ScaleByGradAccumulation("bf16", "weighted")),
}


@pytest.mark.parametrize("yaml", GOOD)
def test_makes_the_hook(config, yaml):
    text, expected = GOOD[yaml]
    strategy = cli(config(text)).trainer.strategy
    assert type(strategy) is lc.CompressedDDPStrategy
    assert strategy._hook == expected


def test_standalone_package_has_the_same_options(config):
    pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.cli import LightningCLI as StandaloneCLI
    from pytorch_lightning.demos.boring_classes import BoringModel as StandaloneModel

    made = StandaloneCLI(
        StandaloneModel,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args=["--trainer.logger=false", config(POWERSGD_4, "lightning_commhooks.CompressedDDPStrategyPL")],
    )
    assert made.trainer.strategy._hook == lc.PowerSGD(matrix_approximation_rank=4)


def test_arguments_of_ddp_go_beside_the_hook(config):
    text = "hook: bf16\nfind_unused_parameters: true\nbucket_cap_mb: 10\nstatic_graph: true\nstart_method: spawn\n"
    strategy = cli(config(text)).trainer.strategy
    passed_on = {"find_unused_parameters": True, "bucket_cap_mb": 10, "static_graph": True}
    assert passed_on.items() <= strategy._ddp_kwargs.items()
    assert strategy._start_method == "spawn"


def test_strategy_name_on_the_command_line():
    trainer = cli("--trainer.strategy=ddp_powersgd", "--trainer.accelerator=cpu", "--trainer.devices=2").trainer
    assert trainer.strategy._hook == lc.PowerSGD(start_powerSGD_iter="auto")


def test_options_on_the_command_line():
    hook = "--trainer.strategy.hook"
    args = [STRATEGY, f"{hook}=PowerSGD", f"{hook}.matrix_approximation_rank=3", "--trainer.accelerator=cpu"]
    made = cli(*args, "--trainer.strategy.accumulation=4").trainer.strategy._hook
    assert made == lc.ScaleByGradAccumulation(lc.PowerSGD(matrix_approximation_rank=3), 4)


NAMES = re.escape(", ".join(repr(name) for name in lc.available_hooks()))
ACCUMULATION = r"(?s)\"accumulation\":\s+.*typing\.Literal\['framework', 'mean', 'sum', 'weighted'\]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hook: powersdg", rf"Expected a typing\.Literal\[{NAMES}\]"),
        (POWERSGD_4.replace("matrix_approximation_rank", "rank"), r"Option 'rank' is not accepted"),
        (POWERSGD_4.replace("4", "four"), r'"matrix_approximation_rank":\s+Expected a <class \'int\'>'),
        (POWERSGD_4.replace("PowerSGD", "PowerSDG"), r"PowerSDG"),
        (
            CAST.replace("dtype: fp16", "dtype: fp61"),
            r'"dtype":\s+Expected a typing\.Literal\[\'fp16\', \'bf16\', \'int8\'\]',
        ),
        (SCHEDULE.replace("bf16", "bf61"), rf"Expected a typing\.Literal\[{NAMES}\]"),
        (SCHEDULE.replace("matrix_approximation_rank", "rank"), r"Option 'rank' is not accepted"),
        ("hook: bf16\nfind_unused: true", r"Option 'find_unused' is not accepted"),
        ("find_unused_parameters: true", r"hook"),
        *((f"hook: bf16\naccumulation: {value}", ACCUMULATION) for value in ("maen", "4.5", "[4]")),
    ],
)
def test_mistakes_fail_while_parsing(config, capsys, text, message):
    with pytest.raises(SystemExit) as stopped:
        cli(config(text))
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


BLOCK = r"hook:\n\s+class_path: lightning_commhooks.PowerSGD\n\s+init_args:\n\s+matrix_approximation_rank: 4"


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("hook: powersgd", "--trainer.strategy.hook.matrix_approximation_rank=4"),
        ("hook: powersgd", "--trainer.strategy.hook.init_args.matrix_approximation_rank=4"),
        ("hook: {name: powersgd, matrix_approximation_rank: 4}", "--trainer.devices=2"),
        ("hook: PowerSGD(matrix_approximation_rank=4)", "--trainer.devices=2"),
        (POWERSGD_4.replace("lightning_commhooks.PowerSGD", "powersgd"), "--trainer.devices=2"),
        (CAST.replace("lightning_commhooks.PowerSGD", "powersgd"), "--trainer.devices=2"),
    ],
)
def test_options_of_a_name_fail_with_the_block_to_write(config, capsys, text, option):
    with pytest.raises(SystemExit) as stopped:
        cli(config(text), option)
    assert stopped.value.code == 2
    assert re.search(BLOCK, capsys.readouterr().err)


@pytest.mark.parametrize("text", [POWERSGD_4, CAST, SCHEDULE])
def test_an_unknown_option_is_the_first_thing_that_is_wrong_with_the_hook(config, capsys, text):
    """Not behind all names that it is not either."""
    with pytest.raises(SystemExit):
        cli(config(text.replace("matrix_approximation_rank", "matrix_approximation_rnk")))
    _, _, wrong = capsys.readouterr().err.partition("Errors:")
    assert "Option 'matrix_approximation_rnk' is not accepted" in wrong.partition("- Expected a typing.Literal")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (POWERSGD_4.replace("4", "0"), "matrix_approximation_rank must be an integer of at least 1, got 0"),
        (SCHEDULE.replace("0: bf16", "1: bf16"), "no hook for step 0"),
        (SCHEDULE.replace("3:", "0.3:"), "steps must be integers of at least 0, got 0.3"),
        (HIERARCHICAL.replace("4:", "4.5:"), "a period in period_group_size_dict must be an integer of at least 1"),
        ("hook: bf16\naccumulation: 0", "accumulation must be one of 'framework', 'mean', 'sum', 'weighted' or an int"),
        (f"accumulation: mean\n{textwrap.dedent(SCALED)}", "accumulation='mean': the hook has an accumulation already"),
    ],
)
def test_values_out_of_range_fail_before_training(config, text, message):
    with pytest.raises(ValueError, match=message):
        cli(config(text))


def test_replaced_argument_fails_before_training(config):
    with pytest.raises(ValueError, match="use hook=PostLocalSGD"):
        cli(config("hook: bf16\nmodel_averaging_period: 2"))


def output_of(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        cli(*args)
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("hook", [lc.PowerSGD, lc.BatchedPowerSGD, lc.BF16, lc.FP16, lc.Cast, lc.Schedule])
def test_help_documents_each_option(capsys, hook):
    text = output_of(capsys, STRATEGY, f"--trainer.strategy.hook.help=lightning_commhooks.{hook.__name__}")
    assert re.sub(r"\s+", " ", hook.__doc__.splitlines()[0].rstrip(".")) in re.sub(r"\s+", " ", text)
    _, *options = re.split(r"^  --hook\.", text[text.index("Help for") :], flags=re.MULTILINE)
    documented = {}
    for option in options:
        name, _, rest = option.partition(" ")
        documented[name] = rest.split("(type")[0].split("(required")[0].split(maxsplit=1)[-1]
    for field in dataclasses.fields(hook):
        assert len(documented[field.name].split()) > 3, f"{field.name} has no description"


def test_help_of_the_strategy_lists_the_choices(capsys):
    text = re.sub(r"\s+", " ", output_of(capsys, "--trainer.strategy.help=lightning_commhooks.CompressedDDPStrategy"))
    assert re.search(rf"Union\[CommHook, Literal\[{NAMES}\]", text)
    assert "lightning_commhooks.Schedule" in text
    assert "--trainer.strategy.find_unused_parameters" in text


@pytest.mark.parametrize("yaml", GOOD)
def test_print_config_round_trips(config, capsys, tmp_path, yaml):
    text, expected = GOOD[yaml]
    printed = output_of(capsys, config(text), "--print_config")
    again = tmp_path / "printed.yaml"
    again.write_text(printed)
    assert output_of(capsys, f"--config={again}", "--print_config") == printed
    assert cli(f"--config={again}").trainer.strategy._hook == expected


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_parses(path):
    assert cli(f"--config={path}").trainer.strategy._hook.name in {"powersgd", "schedule"}
