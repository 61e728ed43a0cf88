"""Communication hooks for Hugging Face Accelerate and `transformers.Trainer`.

`Accelerator(kwargs_handlers=[CommHookKwargs(hook="powersgd")])`
`use_comm_hook(trainer, "powersgd")`
`use_comm_hook(accelerator, "bf16")` with FSDP, after `prepare`
`CommHookTracker(accelerator, handler)` logs the metrics of a hook
"""

try:
    import accelerate  # noqa: F401  # before the modules here, all of which import it
except ImportError as error:
    raise ImportError(
        "accelerate_integration needs Accelerate: pip install 'lightning-commhooks[accelerate]'"
    ) from error

from accelerate_integration.kwargs import CommHookKwargs, FSDPCommHook
from accelerate_integration.trackers import CommHookTracker
from accelerate_integration.trainer import CommHookTrainerMixin, use_comm_hook

__all__ = ["CommHookKwargs", "CommHookTracker", "CommHookTrainerMixin", "FSDPCommHook", "use_comm_hook"]
