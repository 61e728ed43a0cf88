"""The private and undocumented names of PyTorch that we use, and what breaks without them."""

import contextlib
import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from packaging.version import Version
from torch.nn.parallel import DistributedDataParallel

PACKAGE = "lightning_commhooks"
GROUPS = "lightning_commhooks/collectives/process_groups.py"
AGREEMENT = f"{PACKAGE}/collectives/agreement.py"
AVERAGING = "lightning_commhooks/collectives/averaging.py"
TORCHFT = "lightning_commhooks/torchft/manager.py"
GATHER = "lightning_commhooks/sources/gather.py"
FSDP2 = "lightning_commhooks/sources/fsdp2.py"
REPLICAS = "lightning_commhooks/sources/replicas.py"
MICRO_BATCHES = "lightning_commhooks/runtime/micro_batches.py"
PASSES = "lightning_commhooks/runtime/passes.py"


@dataclass(frozen=True)
class Use:
    """One name.

    Args:
        name: path from a module, or `.attribute` of an object. Without an underscore: undocumented.
        where: files that use it.
        breaks: what happens when it is gone or means something else; "silent" where nobody would be told.
        check: whether it is there and means what we think; paths need none.
        since: distribution and version that has it, where not every supported one does.
    """

    name: str
    where: tuple[str, ...]
    breaks: str
    check: Callable[..., object] | None = None
    since: tuple[str, str] | None = None


def resolve(path):
    """The object at a path of modules and attributes."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            return functools.reduce(getattr, parts[length:], importlib.import_module(".".join(parts[:length])))
    raise ImportError(path)


def fails(use, *args):
    """What is wrong with a name; empty for nothing, and where it is too new to be there."""
    if use.since and Version(importlib.metadata.version(use.since[0])) < Version(use.since[1]):
        return ""
    try:
        if use.check is None:
            resolve(use.name)
        elif not use.check(*args):
            return f"{use.name} is not what it was: {use.breaks}"
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        return f"{use.name} ({type(error).__name__}: {error}): {use.breaks}"
    return ""


def missing_on_ranks(rank, world):
    """What is wrong with the names of PyTorch, in a process of a gloo group."""
    return list(filter(None, map(fails, TORCH)))


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


@functools.cache
def _fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, model._get_fsdp_state()


def _fsdp2_has(name):
    def has():
        model, state = _fsdp2()
        several = getattr(state, "_fsdp_param_groups", None)
        group = several[0] if several else state._fsdp_param_group
        return any(hasattr(one, name) for one in (model, state, model.weight, group, group.fsdp_params[0]))

    return has


def _fsdp2_makes_parameters_later():
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return "_unsharded_param" in FSDPParam.__annotations__


def _reduce(state, grad, output=None):
    """A hook for FSDP."""


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


def _premultiplies():
    return dist._make_nccl_premul_sum(0.25).__getstate__()[1] == 0.25


def _process_group_takes_backends():
    return all(hasattr(dist.ProcessGroup, name) for name in ("_register_backend", "_set_default_backend"))


IMPORTED = "import of the package fails"
SPARSE = (
    MICRO_BATCHES,
    f"{PACKAGE}/runtime/runtime.py",
    f"{PACKAGE}/sources/ddp.py",
    "lightning_commhooks/wrappers/auto.py",
    "lightning_commhooks/wrappers/cast.py",
    "lightning_commhooks/wrappers/scale.py",
)
RANGES = "lightning_commhooks/basics/ranges.py"
LAUNCH = "lightning_commhooks/advice/launch.py"

TORCH = [
    Use(
        "torch._C._distributed_c10d.GradBucket",
        (
            f"{PACKAGE}/sources/ddp.py",
            f"{PACKAGE}/sources/ddp_model.py",
            f"{PACKAGE}/torchft/ddp.py",
            f"{PACKAGE}/interface/user_function.py",
        ),
        IMPORTED,
    ),
    Use("torch._C._distributed_c10d.HashStore", (LAUNCH,), "`advise` fails"),
    Use("torch._C._distributed_c10d.TCPStore", (LAUNCH, TORCHFT), "`--nproc` fails"),
    Use("torch._C._distributed_c10d.Store", (LAUNCH, GROUPS, AGREEMENT), IMPORTED),
    Use("torch._C._distributed_c10d.PrefixStore", (GROUPS, TORCHFT), IMPORTED),
    Use(
        "torch._C._current_graph_task_id",
        (f"{PACKAGE}/runtime/steps.py",),
        "every backward with a hook fails",
        _task_has_an_id,
    ),
    Use("torch._dynamo.config.disable", (f"{PACKAGE}/codecs/codec.py",), "quantized hooks fail"),
    Use(
        "torch._dynamo.utils.counters",
        (f"{PACKAGE}/codecs/codec.py",),
        "quantized hooks run uncompiled, with a warning",
        lambda: isinstance(resolve("torch._dynamo.utils.counters")["inductor"]["fxgraph_cache_miss"], int),
    ),
    Use("torch._dynamo.mark_dynamic", (f"{PACKAGE}/codecs/codec.py",), "codecs are not compiled, with a warning"),
    Use("torch._dynamo.mark_static", (f"{PACKAGE}/codecs/codec.py",), "codecs are not compiled, with a warning"),
    Use(
        "torch.autograd.profiler._is_profiler_enabled",
        (RANGES,),
        "silent: no ranges, or with a new meaning ranges all the time",
        _says_whether_it_profiles,
    ),
    Use("torch._foreach_add_", (f"{PACKAGE}/interface/precision.py",), "bad steps fail"),
    Use("torch._foreach_norm", (MICRO_BATCHES,), "accumulation cannot tell cleared gradients"),
    Use(
        "torch.autograd.Variable._execution_engine.queue_callback",
        (f"{PACKAGE}/runtime/engine.py",),
        "the end of a step is never seen",
    ),
    Use("torch.cuda._sleep", (f"{PACKAGE}/advice/emulated.py",), "`advise` on CUDA fails"),
    Use(
        "torch.distributed.distributed_c10d._get_default_store",
        (LAUNCH, GROUPS),
        "`advise`, hooks on subgroups",
    ),
    Use("torch.distributed.distributed_c10d._world.pg_map", (GROUPS,), "closing an attachment fails"),
    Use("torch.distributed.fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2", (f"{PACKAGE}/sources/fsdp1.py",), IMPORTED),
    Use(
        "threading._register_atexit",
        (f"{PACKAGE}/runtime/thread_engine.py",),
        "a process that failed waits for peers at exit",
    ),
    Use(
        "sys._getframe",
        ("accelerate_integration/kwargs.py", f"{PACKAGE}/lightning/averaging.py", f"{PACKAGE}/runtime/optimizers.py"),
        "as documented",
    ),
    Use("os._exit", (LAUNCH, f"{PACKAGE}/testing/processes.py"), "as documented"),
    Use("._comm_hooks", (f"{PACKAGE}/sources/ddp_model.py",), "a second hook is not refused", _tells_its_hook),
    Use(
        "._get_ddp_logging_data",
        (f"{PACKAGE}/sources/ddp_model.py",),
        "silent: nobody sees that DDP has no hook",
        _tells_its_hook,
    ),
    Use(
        "._use_python_reducer",
        (f"{PACKAGE}/sources/ddp_model.py",),
        "silent: under torch.compile hooks get gradients instead of buckets",
        _says_python_reducer,
    ),
    Use("._join_config", (f"{PACKAGE}/sources/ddp.py",), "local steps fail; within join() they hang", _joins),
    Use(
        "._divide_by_initial_world_size",
        (f"{PACKAGE}/sources/ddp.py",),
        "silent: nobody is told that hooks ignore join(divide_by_initial_world_size=False)",
        _joins_and_tells_by_what_it_divides,
    ),
    Use(
        "._in_backward_optimizers",
        (f"{PACKAGE}/sources/ddp_model.py",),
        "refused later, without saying what to do",
        _marks_optimizers,
    ),
    Use("._get_backend", (GROUPS,), "no attachment can be made", _group_keeps_its_timeout),
    Use("._timeout", (GROUPS, TORCHFT), "silent: hooks wait 30 minutes, whatever was set", _group_keeps_its_timeout),
    Use("._Options", (GROUPS,), "no hook can be attached to far ranks or to subgroups", _gloo_takes_devices),
    Use("._devices", (GROUPS,), "silent: one connection between far ranks", _gloo_takes_devices),
    Use("._threads", (GROUPS,), "hooks on subgroups fail", _gloo_takes_devices),
    Use("._register_backend", (GROUPS,), "hooks on subgroups fail", _process_group_takes_backends),
    Use("._set_default_backend", (GROUPS,), "hooks on subgroups fail", _process_group_takes_backends),
    Use("._comm_hook", (f"{PACKAGE}/sources/fsdp1.py",), "FSDP 1 is refused", _fsdp_keeps_its_hook),
    Use("._comm_hook_state", (f"{PACKAGE}/sources/fsdp1.py",), "FSDP 1 is refused after close()", _fsdp_keeps_its_hook),
    Use("._nnz", (f"{PACKAGE}/collectives/group.py",), "sparse gradients fail", lambda: _sparse()._nnz() == 1),
    Use("._values", SPARSE, "sparse gradients fail", lambda: _sparse()._values().tolist() == [2.0]),
    Use(
        "._version",
        (MICRO_BATCHES, PASSES, f"{PACKAGE}/interface/swap.py", f"{PACKAGE}/runtime/optimizers.py"),
        "accumulation fails",
        _counts_changes,
    ),
    Use("._base", (PASSES,), "every forward with a hook fails", lambda: (t := torch.ones(2)).view(2, 1)._base is t),
    Use(
        "._orig_mod",
        (f"{PACKAGE}/interface/layout.py",),
        "silent: state of compiled models is not that of the others",
        lambda: next(torch.compile(torch.nn.Linear(1, 1)).named_parameters())[0] == "_orig_mod.weight",
    ),
    Use(
        "._found_inf_per_device",
        (f"{PACKAGE}/runtime/optimizers.py",),
        "steps that optimizers with a grad_scaler argument skip count",
        lambda: hasattr(torch.amp.GradScaler, "_found_inf_per_device"),
    ),
    Use(
        "._checkpoint_wrapped_module",
        (f"{PACKAGE}/interface/layout.py",),
        "silent: state of models with activation checkpointing is not that of the others",
        _checkpoint_wrapper_has_its_module,
    ),
    Use(
        "._fsdp_wrapped_module",
        (f"{PACKAGE}/interface/layout.py",),
        "silent: old states of such models do not load",
        lambda: isinstance(torch.distributed.fsdp.FullyShardedDataParallel.module, property),
    ),
    Use(
        "._scale", (f"{PACKAGE}/runtime/runtime.py",), "silent: memory in units of a scaled loss", _scaler_has_its_scale
    ),
    Use("__getstate__", (f"{PACKAGE}/sources/fsdp2.py",), "FSDP2 with an even divisor fails", _premultiplies),
    Use("torch._foreach_copy_", (REPLICAS,), "hooks between replicas fail where shares are filled up"),
    Use("torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather", (GATHER, FSDP2), IMPORTED),
    Use("torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultReduceScatter", (FSDP2,), IMPORTED),
    Use("torch.distributed.fsdp._fully_shard._fsdp_common.DDPMeshInfo", (REPLICAS,), IMPORTED),
    Use("torch.distributed.fsdp._fully_shard._fsdp_common.HSDPMeshInfo", (REPLICAS,), IMPORTED),
    Use("._local_tensor", (AVERAGING,), "silent: shares taken for whole gradients", _fsdp2_has("_local_tensor")),
    Use("._unsharded_param", (REPLICAS,), "hooks between replicas fail", _fsdp2_makes_parameters_later),
    Use(
        "._fsdp_param_groups",
        (FSDP2,),
        "silent: parameters on a mesh of their own have no hook",
        _fsdp2_has("_fsdp_param_groups"),
        since=("torch", "2.12"),
    ),
    *(
        Use(name, places, "hooks between replicas are refused or fail", _fsdp2_has(name.lstrip(".")))
        for places, names in {
            (FSDP2,): (
                "._get_fsdp_state",
                "._fsdp_param_group",
                "._reduce_scatter_comm",
                "._all_gather_comm",
                "._state_ctx",
            ),
            (REPLICAS,): ("mesh_info", "post_forward_mesh_info", "post_backward", "sharded_size"),
            (REPLICAS, FSDP2): ("fsdp_params", "sharded_param", "padded_sharded_param_size"),
        }.items()
        for name in names
    ),
    Use(
        "set_custom_reduce_scatter",
        (f"{PACKAGE}/sources/fsdp2.py",),
        "FSDP2 is refused",
        lambda: resolve("torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter"),
    ),
]
