"""The private and undocumented names of Lightning, Accelerate, transformers and torchft that we use."""

import importlib
import inspect
import sys

import torch
from private_names import IMPORTED, Use, resolve

MIXIN, TRAINER = "lightning_commhooks/lightning/ddp.py", "accelerate_integration/trainer.py"
AVERAGING = "lightning_commhooks/lightning/averaging.py"
FSDP = "lightning_commhooks/lightning/fsdp_strategies.py"
MONITOR, FABRIC = "lightning_commhooks/lightning/monitor_callback.py", "lightning_commhooks/lightning/fabric.py"


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}


def _counts_batches(package):
    return resolve(f"{package}.Trainer")(**QUIET).fit_loop.epoch_loop._batches_that_stepped == 0


def _ddp_strategy(package, **kwargs):
    return resolve(f"{package}.strategies.DDPStrategy")(**kwargs)


def _handles_slurm(package):
    name = f"{package}.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn"
    return resolve(name).__code__.co_name == "_slurm_sigusr_handler_fn"


def _called(name, path):
    """Whether a class or module calls one of its methods."""
    return lambda package: f"self.{name}(" in inspect.getsource(resolve(f"{package}.{path}"))


def _delays_static_graph(package):
    name = "_pl_static_graph_delay_done"
    is_read = f"if self.{name}:" in inspect.getsource(resolve(f"{package}.strategies.DDPStrategy"))
    return is_read and getattr(_ddp_strategy(package), name) is False


def _fsdp_says_how_it_saves(package):
    return resolve(f"{package}.strategies.FSDPStrategy")(state_dict_type="sharded")._state_dict_type == "sharded"


def _was_interrupted(package):
    return resolve(f"{package}.Trainer")(**QUIET).interrupted is False


LIGHTNING = [
    Use("lightning.fabric.wrappers._FabricModule", (FABRIC,), IMPORTED),
    Use(
        "._forward_module",
        (FABRIC,),
        "fabric.strategy.add_weight fails",
        lambda _: resolve("lightning.fabric.wrappers._FabricModule")(torch.nn.Linear(1, 1), None)._forward_module,
    ),
    Use(
        "._batches_that_stepped",
        (MONITOR, "lightning_commhooks/torchft/trainer.py"),
        "CommHookMonitor fails in manual optimization; a replica that joins logs at other steps",
        _counts_batches,
    ),
    Use(
        "._LRCallback",
        (AVERAGING,),
        "what Lightning's search for a learning rate sends is told as if it were a training",
        lambda package: hasattr(__import__(f"{package}.tuner.lr_finder", fromlist=["_LRCallback"]), "_LRCallback"),
    ),
    Use(
        "._slurm_sigusr_handler_fn",
        (AVERAGING,),
        "silent: SLURM's signal hangs the job, as its handler averages what differs",
        _handles_slurm,
    ),
    Use(
        "._try_loop_run",
        (AVERAGING,),
        "a closing line after each search for a learning rate or a batch size",
        lambda package: all(
            hasattr(importlib.import_module(f"{package}.tuner.{module}"), "_try_loop_run")
            for module in ("lr_finder", "batch_size_scaling")
        ),
    ),
    Use("interrupted", (AVERAGING,), "saving fails", _was_interrupted),
    Use(
        "._start_method",
        (MIXIN,),
        "silent: a false warning, or none, on state in other processes",
        lambda package: _ddp_strategy(package, start_method="fork")._start_method == "fork",
    ),
    Use(
        "._pl_static_graph_delay_done",
        (MIXIN,),
        "silent: a second fit with static_graph does not synchronize",
        _delays_static_graph,
        since=("lightning", "2.6"),
    ),
    Use(
        "._register_ddp_hooks",
        (MIXIN,),
        "no hook is attached, and setup_optimizers fails",
        _called("_register_ddp_hooks", "strategies.DDPStrategy"),
    ),
    Use(
        "._setup_model",
        (MIXIN, FSDP),
        "FSDP on CPU fails; unfrozen parameters are not reduced",
        _called("_setup_model", "strategies.FSDPStrategy"),
    ),
    Use(
        "._device_mesh",
        (FSDP,),
        "hooks between replicas fail in Lightning",
        lambda package: "_device_mesh" in inspect.getsource(resolve(f"{package}.strategies.ModelParallelStrategy")),
    ),
    Use(
        "._state_dict_type",
        (FSDP,),
        "saving fails",
        _fsdp_says_how_it_saves,
    ),
    Use(
        '"scaler"',
        (MIXIN, FABRIC),
        "silent: memory in units of a scaled loss",
        lambda package: resolve(f"{package}.plugins.precision.MixedPrecision")("bf16-mixed", "cpu").scaler is None,
    ),
]


def _keeps_models(accelerator):
    model = torch.nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    (wrapped,) = accelerator._optimizers
    return accelerator._models == [model] and isinstance(wrapped.optimizer, torch.optim.SGD)


def _reads_class_of_handlers(accelerator):
    """Whether `Accelerator.__init__` itself looks at `handler.__class__`, before it can prepare anything."""
    base, seen = resolve("accelerate.utils.DistributedDataParallelKwargs"), []

    class Handler(base):
        @property
        def __class__(self):
            seen.append(sys._getframe(1).f_code)
            return base

    handler = Handler()
    made = type(accelerator)(cpu=True, kwargs_handlers=[handler])
    return type(accelerator).__init__.__code__ in seen and made.ddp_handler is handler


def _keeps_data_loaders(accelerator):
    data = accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
    return accelerator._dataloaders == [data]


def _tells_overflow(accelerator):
    optimizer = accelerator.prepare(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))
    optimizer._is_overflow = True
    return optimizer.step_was_skipped and accelerator.optimizer_step_was_skipped


KWARGS, REPLICA = "accelerate_integration/kwargs.py", "accelerate_integration/replica.py"

ACCELERATE = [
    Use("._models", ("accelerate_integration/kwargs.py",), "FSDP: no model is found", _keeps_models),
    Use("._optimizers", ("accelerate_integration/accelerator_events.py",), "hooks are not attached", _keeps_models),
    Use("._dataloaders", (REPLICA,), "fault_tolerance: a prepare() fails", _keeps_data_loaders),
    Use("._is_overflow", (REPLICA,), "silent, fault_tolerance: schedulers go on in a lost step", _tells_overflow),
    Use(
        "__class__",
        (KWARGS,),
        "silent: no refusal of FSDP, DeepSpeed, Megatron-LM, XLA, no warning in one process",
        _reads_class_of_handlers,
    ),
    Use("ddp_handler", (TRAINER,), "silent: a Trainer trains without the hook", _reads_class_of_handlers),
]


def _trainer_calls(name):
    return lambda source: f"self.{name}(" in source


def _trainer_has(name):
    return lambda source: f"self.{name}" in source


TRANSFORMERS = [
    Use(
        "._wrap_model", (TRAINER,), "silent: the hook may be replaced by another handler", _trainer_calls("_wrap_model")
    ),
    Use(
        "._maybe_log_save_evaluate",
        (TRAINER,),
        "silent: models of single ranks are evaluated and saved",
        _trainer_calls("_maybe_log_save_evaluate"),
    ),
    Use(
        "._save_optimizer_and_scheduler",
        (TRAINER,),
        "silent: checkpoints have no state of the hook",
        _trainer_calls("_save_optimizer_and_scheduler"),
    ),
    Use(
        "._load_optimizer_and_scheduler",
        (TRAINER,),
        "silent: the state of the hook is not loaded",
        _trainer_calls("_load_optimizer_and_scheduler"),
    ),
    Use("._load_best_model", (TRAINER,), "silent: models differ after train()", _trainer_calls("_load_best_model")),
    Use(
        "create_accelerator_and_postprocess",
        (TRAINER,),
        "silent: from the second trial of a search on there is no hook",
        _trainer_calls("create_accelerator_and_postprocess"),
    ),
    Use(
        "current_gradient_accumulation_steps",
        (TRAINER,),
        "accumulation other than 'framework' fails",
        _trainer_has("current_gradient_accumulation_steps"),
    ),
    Use(
        "model_accepts_loss_kwargs",
        (TRAINER,),
        "accumulation='sum' and 'weighted' fail",
        _trainer_has("model_accepts_loss_kwargs"),
    ),
    Use(
        "compute_loss_func",
        (TRAINER,),
        "accumulation='sum' and 'weighted' fail",
        _trainer_has("compute_loss_func"),
    ),
    Use(
        "loss_is_scaled_for_ga",
        (TRAINER,),
        "silent: 'sum' and 'weighted' of a loss that is divided by tokens",
        _trainer_has("loss_is_scaled_for_ga"),
        since=("transformers", "5.23"),
    ),
]


def _manager_has(name):
    def check():
        return f"self.{name}" in inspect.getsource(resolve("torchft.Manager.__init__"))

    return check


def _torchft_group_has(name):
    def check():
        return f"{name}" in inspect.getsource(resolve("torchft.process_group.ProcessGroupWrapper"))

    return check


MANAGED, OURS = "lightning_commhooks/torchft/quorum.py", "lightning_commhooks/torchft/manager.py"

OF_TORCHFT = [
    Use("._pg", (MANAGED,), "`manager=` is refused", _manager_has("_pg")),
    Use("._group_rank", (MANAGED,), "`manager=` is an error", _manager_has("_group_rank")),
    Use("._group_world_size", (MANAGED,), "`manager=` is an error", _manager_has("_group_world_size")),
    Use("._min_replica_size", (MANAGED,), "a step that fails is an error", _manager_has("_min_replica_size")),
    Use("._use_async_quorum", (MANAGED,), "silent: steps are lost", _manager_has("_use_async_quorum")),
    Use("._create_pg", (OURS,), "hooks find no members", _torchft_group_has("self._create_pg(")),
    Use("._replica_id", (OURS,), "a backward fails", _torchft_group_has("self._replica_id")),
]
