"""Communication hooks for Hugging Face Accelerate.

`Accelerator(kwargs_handlers=[CommHookKwargs(hook="powersgd")])`
"""

from accelerate_integration.kwargs import CommHookKwargs

__all__ = ["CommHookKwargs"]
