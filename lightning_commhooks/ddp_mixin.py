"""What the DDP strategies of `lightning` and `pytorch_lightning` share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.core.attach import Attachment, attach, registered_name, resolve_hook
from lightning_commhooks.core.hook import CommHook
from lightning_commhooks.hooks import HookName

logger = logging.getLogger(__name__)

_REPLACED = {
    "ddp_comm_hook": "pass it as hook=... (with hook_state=... for a function), or use a hook's name",
    "ddp_comm_state": "pass it as hook_state=..., or set the options of a hook: hook=PowerSGD(...)",
    "ddp_comm_wrapper": "use hook=Cast(hook, 'fp16') or hook=Cast(hook, 'bf16')",
    "model_averaging_period": "averaging of models is part of a hook here, not of the strategy; leave it out",
}


class CompressedDDPMixin:
    """Registers a communication hook on every accelerator; put before a `DDPStrategy` in a class's bases."""

    _misconfiguration: ClassVar[type[Exception]]

    def __init__(
        self, hook: HookName | CommHook | Callable[..., Any], hook_state: object | None = None, **kwargs: Any
    ) -> None:
        for argument, replacement in _REPLACED.items():
            if kwargs.get(argument) is not None:
                raise self._misconfiguration(
                    f"{type(self).__name__} does not take {argument}={kwargs[argument]!r}: {replacement}"
                )
        try:
            self._hook = resolve_hook(hook, hook_state)
        except ValueError as error:
            raise self._misconfiguration(f"{type(self).__name__}: {error}") from error
        self._hook_state = hook_state
        self._attachment: Attachment | None = None
        super().__init__(**kwargs)

    @property
    def attachment(self) -> Attachment | None:
        """The hook at work in the last `fit` of this process, for `metrics()`; `None` before the first.

        With `start_method` "spawn", "fork" or "forkserver" training happens in other processes: read it there,
        in a callback or the module.
        """
        return self._attachment

    def _register_ddp_hooks(self) -> None:
        # Lightning forgets to reset this: a second fit with static_graph and manual optimization would not
        # synchronize at all.
        self._pl_static_graph_delay_done = False
        model = self.model  # type: ignore[attr-defined]
        assert isinstance(model, DistributedDataParallel)
        self._attachment = attach(model, self._hook, hook_state=self._hook_state)
        if self._attachment.name not in registered_name(model):
            raise self._misconfiguration(
                f"DDP reports the hook {registered_name(model)!r} instead of {self._attachment.name!r}; another "
                "plugin or a configure_model() that registers a communication hook is in the way"
            )
        logger.info("communication hook %r registered on %s", self._hook, self.root_device)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        """Close the hook, then tear the strategy down."""
        try:
            if self._attachment is not None:
                self._attachment.close()
        finally:
            super().teardown()  # type: ignore[misc]
