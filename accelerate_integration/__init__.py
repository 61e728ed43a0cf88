"""Communication hooks for Hugging Face Accelerate and `transformers.Trainer`.

`Accelerator(kwargs_handlers=[CommHookKwargs(hook="powersgd")])`
`use_comm_hook(trainer, "powersgd")`
"""

from accelerate_integration.kwargs import CommHookKwargs
from accelerate_integration.trainer import CommHookTrainerMixin, use_comm_hook

__all__ = ["CommHookKwargs", "CommHookTrainerMixin", "use_comm_hook"]
