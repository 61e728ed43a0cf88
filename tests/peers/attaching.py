"""Set-ups, and the hook that every DDP model gets while a peer's test runs."""

import contextlib
import weakref
from unittest import mock

from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc

# They lose nothing, so that a peer's test has no reason to fail. Full rank: Q spans all columns.
SETUPS = {
    "none": None,
    "allreduce": lc.AllReduce(),
    "allgather": lc.AllGather(),
    "powersgd": lc.PowerSGD(matrix_approximation_rank=2000, start_powerSGD_iter=0, min_compression_rate=1e-9),
    "post_localsgd": lc.PostLocalSGD(start_localSGD_iter=10**9, post_local_gradient_allreduce=False),
}


@contextlib.contextmanager
def attaching(hook, late=False):
    """Attach `hook` to every DDP model, and close all at the end.

    Args:
        hook: the hook; `None`: none.
        late: attach in a model's first forward, for tests that register a hook of their own with some models, which
            keep theirs. If not, a model keeps the hook attached to it, and does not get the test's.

    Yields:
        the list of attachments.
    """
    attachments, waiting = [], weakref.WeakSet()
    construct, register, forward = (
        getattr(DistributedDataParallel, name) for name in ("__init__", "register_comm_hook", "forward")
    )

    def attach(model):
        if hook is not None:
            attachments.append(lc.attach(model, hook))

    def __init__(self, *args, device_ids=None, output_device=None, **options):
        construct(self, *args, **options)  # without devices, which are an error on CPU
        waiting.add(self) if late else attach(self)

    def register_comm_hook(self, state, hook):
        waiting.discard(self)
        if not any(attachment.is_attached_to(self) for attachment in attachments):
            register(self, state, hook)

    def first_forward(self, *inputs, **options):
        if self in waiting:
            waiting.discard(self)
            attach(self)
        return forward(self, *inputs, **options)

    patched = {"__init__": __init__, "register_comm_hook": register_comm_hook}
    if late:
        patched["forward"] = first_forward
    try:
        with mock.patch.multiple(DistributedDataParallel, **patched):
            yield attachments
    finally:
        for attachment in attachments:
            attachment.close()
