"""A Trainer as one replica of several, of which some may die: replicas vote on its steps, or on averages of models."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.hooks import DiLoCo
from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.torchft.fault_tolerance import FaultTolerance
from lightning_commhooks.torchft.manager import start_replica
from lightning_commhooks.wrappers.scale import without_scale


class TrainerReplica:
    """The optimizer's steps of a Trainer that is a replica.

    Replicas vote on the gradients of each step, which is repeated until they commit it. A step of the Trainer is then
    a step of all replicas: no batch is lost, and schedulers count right. With a hook that averages models the Trainer
    steps alone, and the hook has replicas vote on averages.

    Args:
        options: the place among the replicas.
        strategy: the Trainer's.

    Attributes:
        manager: the `torchft.Manager`.
    """

    def __init__(self, options: FaultTolerance, strategy: Any) -> None:
        method = without_scale(strategy.hook)
        # Steps after which votes repeat, where those are on averages of models.
        self._period = method.repeats_after() if isinstance(method, LocalSGDConfig) else None
        # Votes in that many steps.
        self._votes = method.fragments if isinstance(method, DiLoCo) else 1
        self._strategy, self._has_begun = strategy, False
        # Whether the next batch begins a step that replicas vote on.
        self._is_due = self._period is None
        self.manager = start_replica(options, self._state, self._load)

    @property
    def attach_options(self) -> dict[str, Any]:
        """Options of `attach`. A replica that joins goes by the length that the run had from its beginning on."""
        length = self._trainer.max_steps
        return {"manager": self.manager, "num_steps": length if length > 0 else None}

    def check(self) -> None:
        """Refuse settings that make replicas step differently, end at different steps, or share one folder.

        Raises:
            ValueError: says what to set instead.
        """
        trainer, strategy, period = self._trainer, self._strategy, self._period
        if trainer.max_steps < 0 or trainer.max_epochs not in (None, -1):
            raise ValueError(
                "fault_tolerance= needs Trainer(max_steps=...) without max_epochs, is "
                f"max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs}: a replica that joins later has other "
                "epochs than those that are there"
            )
        if trainer.max_steps % (period or 1):
            raise ValueError(
                f"max_steps={trainer.max_steps} is no multiple of the hook's period={period}, and replicas have the "
                "same model after an average only: with fault_tolerance= choose one"
            )
        is_here = os.path.realpath(trainer.default_root_dir) == os.path.realpath(os.getcwd())
        if (trainer.checkpoint_callbacks or trainer.loggers) and is_here:
            raise ValueError(
                "with fault_tolerance= each replica saves and logs for itself, and in one folder they delete each "
                f"other's files: give each a Trainer(default_root_dir=...) of its own, not {os.getcwd()!r}"
            )
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError("fault_tolerance= counts and repeats steps, which it cannot in manual optimization")
        if period is None and any(isinstance(optimizer, LBFGS) for optimizer in strategy.optimizers):
            raise ValueError(
                "fault_tolerance= does not work with LBFGS, which runs several backwards in a step: use another "
                "optimizer, or a hook that averages models, such as DiLoCo"
            )
        if period is not None and getattr(strategy.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "a hook that averages models does not work with fault_tolerance= and precision='16-mixed', whose "
                "scaler has each replica skip other steps: use precision='bf16-mixed'"
            )
        for config in strategy.lr_scheduler_configs:
            if config.interval != "step" or config.frequency != 1 or config.reduce_on_plateau:
                raise ValueError(
                    f"the scheduler {type(config.scheduler).__name__} counts epochs or batches, whose number differs "
                    "between replicas: return {'scheduler': ..., 'interval': 'step'} from "
                    "configure_optimizers(), without 'frequency', and no ReduceLROnPlateau"
                )

    def begin_batch(self) -> None:
        """Continue from a checkpoint that the Trainer has loaded; meet the other replicas before a step."""
        if not self._has_begun:
            self._has_begun = True
            if self.is_between_averages:
                raise ValueError(
                    f"the checkpoint is of step {self._progress().completed}, between averages of models, which come "
                    f"after each {self._period} steps: resume from a checkpoint after an average"
                )
            num_votes = self._progress().completed // (self._period or 1) * self._votes
            self.manager.load_state_dict({"step": num_votes, "batches_committed": 0})
        if self._is_due:
            self.manager.start_quorum()
            self._is_due = False

    @property
    def is_between_averages(self) -> bool:
        """Whether no run resumes from a checkpoint of this step."""
        return bool(self._progress().completed % (self._period or 1))

    def committed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the step's closure.

        If replicas vote on the step, it has already run, as often as they needed to commit it.
        """

        def checked() -> Any:
            result = closure()
            if result is None:
                raise HookError("training_step returned None for a batch, which a replica cannot skip alone")
            return result

        if self._period is not None:
            return checked
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        accumulated = _copies(parameters) if self._trainer.accumulate_grad_batches > 1 else []
        while True:
            result = checked()
            if self.manager.should_commit():
                self._is_due = True
                return _once(result)
            step = self.manager.current_step()
            self.manager.start_quorum()
            for p, gradient in zip(parameters, accumulated, strict=False):
                # Those of weights that it has no more do not count.
                p.grad = gradient if self.manager.current_step() == step else None
            accumulated = _copies(parameters) if accumulated else []

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    def _progress(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total

    def _state(self) -> dict[str, Any]:
        strategy = self._strategy
        return {
            "module": strategy.lightning_module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in strategy.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in strategy.lr_scheduler_configs],
            "precision": strategy.precision_plugin.state_dict(),
            "steps": self._progress().completed,
        }

    def _load(self, state: dict[str, Any]) -> None:
        strategy, progress = self._strategy, self._progress()
        strategy.lightning_module.load_state_dict(state["module"])
        for optimizer, given in zip(strategy.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(given)
        for config, given in zip(strategy.lr_scheduler_configs, state["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(given)
        strategy.precision_plugin.load_state_dict(state["precision"])
        progress.ready += state["steps"] - progress.completed
        progress.completed = self._trainer.fit_loop.epoch_loop._batches_that_stepped = state["steps"]

    def close(self) -> None:
        """Leave the other replicas."""
        self.manager.shutdown()


def _once(result: Any) -> Callable[[], Any]:
    """A closure that has run; an optimizer that calls it twice would step by gradients without a vote."""
    left = [result]

    def closure() -> Any:
        if not left:
            raise HookError(
                "fault_tolerance= does not work with an optimizer that runs several backwards in a step: use another "
                "optimizer"
            )
        return left.pop()

    return closure


def _copies(parameters: list[Tensor]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters]
