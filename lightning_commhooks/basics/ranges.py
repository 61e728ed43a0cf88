"""Named ranges in the traces of PyTorch's profilers: the operations of a hook, and their durations.

* `commhooks::<hook>::reduce`: the reduction of a bucket, from one wait to the next, with FSDP of a unit.
* `commhooks::<hook>::average`: an averaging of models, or of optimizers' states.
* `commhooks::<codec>::encode`, `commhooks::<codec>::decode`: the work of a codec.
* `commhooks::all_reduce`, `::all_gather`, `::all_to_all`, `::reduce_scatter`: the wait for a collective; the same with
  `::begin`: the work to begin it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NOTHING = nullcontext()


def named(*names: str) -> AbstractContextManager[object]:
    """A range for a `with`, `commhooks::` and the names: nothing but the look at a variable when no profiler runs.

    Not for use within functions that `torch.compile` compiles.
    """
    return profiler.record_function("::".join(("commhooks", *names))) if profiler._is_profiler_enabled else _NOTHING
