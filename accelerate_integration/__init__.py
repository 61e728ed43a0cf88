"""Communication hooks for Hugging Face Accelerate and `transformers.Trainer`.

`Accelerator(kwargs_handlers=[CommHookKwargs(hook="powersgd")])`
`use_comm_hook(trainer, "powersgd")`
`use_comm_hook(accelerator, "bf16")` with FSDP, after `prepare`
"""

from accelerate_integration.fsdp import FSDPCommHook
from accelerate_integration.kwargs import CommHookKwargs
from accelerate_integration.trainer import CommHookTrainerMixin, use_comm_hook

__all__ = ["CommHookKwargs", "CommHookTrainerMixin", "FSDPCommHook", "use_comm_hook"]
