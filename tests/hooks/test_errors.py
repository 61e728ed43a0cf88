"""Bad input: one clear error each."""

import pytest
import torch
from driver import SHAPES, Params, attached
from torch.nn.parallel import DistributedDataParallel

import lightning_commhooks as lc
from lightning_commhooks.sources.ddp import resolve_hook


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lc.get_hook("powersdg"), "unknown hook 'powersdg'; did you mean 'powersgd'\\? available hooks: all"),
        (lambda: lc.get_hook("zzz"), "unknown hook 'zzz'; available hooks"),
        (lambda: lc.get_hook(lc.PowerSGD), r"did you mean PowerSGD\(\)\?"),
        (lambda: lc.get_hook(3), "hook must be a name or a CommHook, got 3"),
        (lambda: resolve_hook(lc.PowerSGD), r"did you mean PowerSGD\(\)\?"),
        (lambda: resolve_hook("bf16", hook_state={}), "hook_state={} belongs to a hook function"),
        (lambda: resolve_hook(lc.BF16(), hook_state=1), "set its options instead"),
        (lambda: lc.attach(torch.nn.Linear(2, 2), "bf16"), "DistributedDataParallel, not to Linear; wrap the model"),
        (lambda: lc.attach(None, "bf16"), "not to NoneType"),
        (lambda: resolve_hook(3), "hook must be a name, a CommHook or a callable"),
    ],
)
def test_message(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def attach_twice(rank, world):
    with attached("bf16") as (ddp, _):
        for hook in ("bf16", lambda state, bucket: None):
            with pytest.raises(ValueError, match="has the communication hook 'lightning_commhooks:bf16' already"):
                lc.attach(ddp, hook)
    return True


def test_attach_twice(run):
    assert all(run(attach_twice))


def python_reducer(rank, world):
    ddp = DistributedDataParallel(Params(SHAPES))
    ddp._use_python_reducer = True
    with pytest.raises(ValueError, match="set it to 'ddp_optimizer'"):
        lc.attach(ddp, "bf16")
    return True


def test_python_reducer(run):
    assert all(run(python_reducer))
