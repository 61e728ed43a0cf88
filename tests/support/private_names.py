"""What the private and undocumented names of others that we use do, by framework.

A path from a module needs a check only if it could exist and mean something else; a private attribute always needs one.
"""

import contextlib
import functools
import importlib
import inspect
import sys
import warnings
from collections import namedtuple
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.nn.parallel import DistributedDataParallel
from versions import has


def resolve(path):
    """The object at a path of modules and attributes."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            return functools.reduce(getattr, parts[length:], importlib.import_module(".".join(parts[:length])))
    raise ImportError(path)


def failures(checks, *args):
    """What is wrong with some names, each with its check."""
    found = []
    for name, check in checks.items():
        try:
            if not check(*args):
                found.append(f"{name} is not what it was")
        except (AttributeError, ImportError, KeyError, TypeError) as error:
            found.append(f"{name} ({type(error).__name__}: {error})")
    return found


def failures_on_ranks(rank, world):
    """The same of PyTorch, in a process of a gloo group."""
    return failures(TORCH)


def _in_source(path, text):
    return lambda *_: text in inspect.getsource(resolve(path))


# PyTorch -----------------------------------------------------------------------------------------------------


def _hook(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _ddp():
    return DistributedDataParallel(torch.nn.Linear(2, 2))


def _tells_its_hook():
    model = _ddp()
    model.register_comm_hook(None, _hook)
    return "_hook" in model._get_ddp_logging_data()["comm_hook"] and len(model._comm_hooks) == 1


def _says_python_reducer():
    from torch._dynamo import config

    found = []
    for config.optimize_ddp in ("python_reducer", "ddp_optimizer"):
        found.append(_ddp()._use_python_reducer)
    return found == [True, False]


def _marks_optimizers():
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = torch.nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    return all(hasattr(p, "_in_backward_optimizers") for p in module.parameters())


def _joins():
    from torch.distributed.algorithms.join import Join

    model = _ddp()
    before = model._join_config.enable
    with Join([model]):
        return (before, model._join_config.enable) == (False, True)


def _joins_and_tells_by_what_it_divides():
    model = _ddp()
    with model.join(divide_by_initial_world_size=False):
        return model._divide_by_initial_world_size is False


def _gloo_takes_devices():
    options = dist.ProcessGroupGloo._Options()
    device = dist.ProcessGroupGloo.create_default_device()
    options._devices, options._threads, options._timeout = [device] * 2, 4, timedelta(seconds=5)
    return len(options._devices) == 2 and options._threads == 4


def _group_keeps_its_timeout():
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=77))
    found = group._get_backend(torch.device("cpu")).options._timeout
    dist.barrier(group)  # or this rank could close it while another still connects
    dist.destroy_process_group(group)
    return found == timedelta(seconds=77)


def _fsdp_keeps_its_hook():
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on CPU FSDP warns of much
        model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    before, state = model._comm_hook, object()
    model.register_comm_hook(state, _reduce)
    return before is None and model._comm_hook is _reduce and model._comm_hook_state is state


def _reduce(state, grad, output=None):
    """A hook for FSDP."""


@functools.cache
def _fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, model._get_fsdp_state()


def _fsdp2_has(name):
    def has_it():
        model, state = _fsdp2()
        several = getattr(state, "_fsdp_param_groups", None)
        group = several[0] if several else state._fsdp_param_group
        return any(hasattr(one, name) for one in (model, state, model.weight, group, group.fsdp_params[0]))

    return has_it


def _sparse():
    return torch.sparse_coo_tensor([[1]], [2.0], (3,)).coalesce()


def _checkpoint_wrapper_has_its_module():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return hasattr(checkpoint_wrapper(torch.nn.Linear(1, 1)), "_checkpoint_wrapped_module")


def _counts_changes():
    tensor = torch.ones(2)
    before = tensor._version
    return tensor.add_(1)._version == before + 1


def _says_whether_it_profiles():
    found = []
    for enabled in (False, True):
        with torch.autograd.profiler.profile(enabled=enabled):
            found.append(torch.autograd.profiler._is_profiler_enabled)
    return [*found, torch.autograd.profiler._is_profiler_enabled] == [False, True, False]


def _scaler_has_its_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = scaler._scale
    scaler.scale(torch.ones(()))
    return before is None and scaler._scale.item() == 8


def _task_has_an_id():
    inside = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: inside.append(torch._C._current_graph_task_id()))
    leaf.sum().backward()
    return torch._C._current_graph_task_id() == -1 and inside[0] >= 0


OF_FSDP2 = (
    *("._get_fsdp_state", "._fsdp_param_group", "._reduce_scatter_comm", "._all_gather_comm", "._state_ctx"),
    *("._local_tensor", "mesh_info", "post_forward_mesh_info", "post_backward", "sharded_size", "fsdp_params"),
    *("sharded_param", "padded_sharded_param_size", "._root_pre_forward"),
    "._register_root_post_backward_final_callback",
)
TORCH = {
    "torch._C._current_graph_task_id": _task_has_an_id,
    # Where the frame lies that calls a function of `torch.compiler.disable`.
    "._dynamo": lambda: "_dynamo" in torch.compiler.disable(lambda: sys._getframe(1).f_code.co_filename)(),
    "torch._dynamo.utils.counters": lambda: isinstance(
        resolve("torch._dynamo.utils.counters")["inductor"]["fxgraph_cache_miss"], int
    ),
    "torch.autograd.profiler._is_profiler_enabled": _says_whether_it_profiles,
    **dict.fromkeys(("._comm_hooks", "._get_ddp_logging_data"), _tells_its_hook),
    "._use_python_reducer": _says_python_reducer,
    "._join_config": _joins,
    "._divide_by_initial_world_size": _joins_and_tells_by_what_it_divides,
    "._in_backward_optimizers": _marks_optimizers,
    "._delay_all_reduce_params": lambda: _ddp()._delay_all_reduce_params == [],
    **dict.fromkeys(("._get_backend", "._timeout"), _group_keeps_its_timeout),
    **dict.fromkeys(("._Options", "._devices", "._threads"), _gloo_takes_devices),
    "._register_backend": lambda: hasattr(dist.ProcessGroup, "_register_backend"),
    "._set_default_backend": lambda: hasattr(dist.ProcessGroup, "_set_default_backend"),
    **dict.fromkeys(("._comm_hook", "._comm_hook_state"), _fsdp_keeps_its_hook),
    "._nnz": lambda: _sparse()._nnz() == 1,
    "._fields": lambda: namedtuple("Pair", "x y")._fields == ("x", "y"),
    "._values": lambda: _sparse()._values().tolist() == [2.0],
    "._indices": lambda: _sparse()._indices().tolist() == [[1]],
    "._version": _counts_changes,
    "._base": lambda: (t := torch.ones(2)).view(2, 1)._base is t,
    "._orig_mod": lambda: next(torch.compile(torch.nn.Linear(1, 1)).named_parameters())[0] == "_orig_mod.weight",
    "._found_inf_per_device": lambda: hasattr(torch.amp.GradScaler, "_found_inf_per_device"),
    "._checkpoint_wrapped_module": _checkpoint_wrapper_has_its_module,
    "._fsdp_wrapped_module": lambda: isinstance(torch.distributed.fsdp.FullyShardedDataParallel.module, property),
    "._scale": _scaler_has_its_scale,
    "__getstate__": lambda: dist._make_nccl_premul_sum(0.25).__getstate__()[1] == 0.25,
    "._unsharded_param": lambda: (
        "_unsharded_param" in resolve("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam").__annotations__
    ),
    "._fsdp_param_groups": lambda: not has("torch", "2.12") or _fsdp2_has("_fsdp_param_groups")(),
    **{name: _fsdp2_has(name.lstrip(".")) for name in OF_FSDP2},
    "iter_forward_root": lambda: _fsdp2()[1]._state_ctx.iter_forward_root is None,
    "set_custom_reduce_scatter": lambda: resolve("torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter"),
}

# Lightning: functions of the package, `lightning.pytorch` or `pytorch_lightning` -----------------------------

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)


def _trainer(package):
    return resolve(f"{package}.Trainer")(accelerator="cpu", **QUIET)


def _ddp_strategy(package, **kwargs):
    return resolve(f"{package}.strategies.DDPStrategy")(**kwargs)


def _has(path, name):
    return lambda package: hasattr(resolve(f"{package}.{path}"), name)


def _calls(name, path):
    """Whether a class calls one of its methods."""
    return lambda package: f"self.{name}(" in inspect.getsource(resolve(f"{package}.{path}"))


def _handles_slurm(package):
    name = f"{package}.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn"
    return resolve(name).__code__.co_name == "_slurm_sigusr_handler_fn"


def _waits_for_rank_0(package):
    """Whether Lightning broadcasts a SIGTERM before each batch, and in a handler that it looks up after `setup`."""
    signals, run = f"{package}.trainer.connectors.signal_connector._SignalConnector", f"{package}.Trainer._run"
    is_called = _calls("_broadcast_sigterm_tensor", "loops.training_epoch_loop._TrainingEpochLoop.advance")(package)
    handlers = inspect.getsource(resolve(f"{signals}.register_signal_handlers"))
    order = inspect.getsource(resolve(run))
    return (
        is_called
        and "[self._sigterm_notifier_fn]" in handlers
        and order.index("self.strategy.setup(self)") < order.index("self._signal_connector.register_signal_handlers()")
    )


def _delays_static_graph(package):
    name = "_pl_static_graph_delay_done"
    is_read = f"if self.{name}:" in inspect.getsource(resolve(f"{package}.strategies.DDPStrategy"))
    return is_read and getattr(_ddp_strategy(package), name) is False


LIGHTNING = {
    "._forward_module": lambda _: (
        resolve("lightning.fabric.wrappers._FabricModule")(torch.nn.Linear(1, 1), None)._forward_module
    ),
    "._batches_that_stepped": lambda package: _trainer(package).fit_loop.epoch_loop._batches_that_stepped == 0,
    "._broadcast_sigterm_tensor": _waits_for_rank_0,
    "._sigterm_notifier_fn": _waits_for_rank_0,
    "._signal_connector": lambda package: _trainer(package)._signal_connector.received_sigterm is False,
    "._LRCallback": _has("tuner.lr_finder", "_LRCallback"),
    "._slurm_sigusr_handler_fn": _handles_slurm,
    "._try_loop_run": lambda package: all(
        _has(f"tuner.{module}", "_try_loop_run")(package) for module in ("lr_finder", "batch_size_scaling")
    ),
    "interrupted": lambda package: _trainer(package).interrupted is False,
    "._start_method": lambda package: _ddp_strategy(package, start_method="fork")._start_method == "fork",
    "._pl_static_graph_delay_done": _delays_static_graph,
    "._register_ddp_hooks": _calls("_register_ddp_hooks", "strategies.DDPStrategy"),
    "._setup_model": _calls("_setup_model", "strategies.FSDPStrategy"),
    "._device_mesh": lambda package: (
        "_device_mesh" in inspect.getsource(resolve(f"{package}.strategies.ModelParallelStrategy"))
    ),
    "._state_dict_type": lambda package: (
        resolve(f"{package}.strategies.FSDPStrategy")(state_dict_type="sharded")._state_dict_type == "sharded"
    ),
    '"scaler"': lambda package: (
        resolve(f"{package}.plugins.precision.MixedPrecision")("bf16-mixed", "cpu").scaler is None
    ),
}

# Accelerate: functions of an `Accelerator` -------------------------------------------------------------------


def _keeps_models(accelerator):
    model = torch.nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return accelerator._models[-1] is model and isinstance(accelerator._optimizers[-1].optimizer, torch.optim.SGD)


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


ACCELERATE = {
    **dict.fromkeys(("._models", "._optimizers"), _keeps_models),
    "._dataloaders": _keeps_data_loaders,
    "._is_overflow": _tells_overflow,
    **dict.fromkeys(("__class__", "ddp_handler"), _reads_class_of_handlers),
}

# Of transformers: whether its `Trainer` calls or has it; of torchft, whether it is in the source of a class ------

CALLED = (
    *("._wrap_model", "._maybe_log_save_evaluate", "._save_optimizer_and_scheduler", "._load_optimizer_and_scheduler"),
    *("._load_best_model", "._save_checkpoint", "create_accelerator_and_postprocess"),
)
HAD = ("current_gradient_accumulation_steps", "model_accepts_loss_kwargs", "compute_loss_func", "loss_is_scaled_for_ga")
TRANSFORMERS = {
    **{name: lambda source, name=name: f"self.{name.lstrip('.')}(" in source for name in CALLED},
    **{
        name: lambda source, name=name: f"self.{name}" in source
        for name in HAD
        if name != "loss_is_scaled_for_ga" or has("transformers", "5.23")
    },
}
OF_MANAGER = ("._pg", "._group_rank", "._group_world_size", "._min_replica_size", "._use_async_quorum")
TORCHFT = {
    **{name: _in_source("torchft.Manager.__init__", f"self{name}") for name in OF_MANAGER},
    "._create_pg": _in_source("torchft.process_group.ProcessGroupWrapper", "self._create_pg("),
    "._replica_id": _in_source("torchft.process_group.ProcessGroupWrapper", "self._replica_id"),
}
