"""What tests share of models whose gradients they choose: see `lightning_commhooks.testing.model`."""

import warnings

import torch
from hooks_under_test import CASES, POWERSGD  # noqa: F401  # for tests to have from here

import lightning_commhooks as lc
from lightning_commhooks.testing.model import (  # noqa: F401  # for tests to have from here
    SHAPES,
    SMALL_BUCKETS,
    Params,
    attached,
    backward,
    distance,
    full_rank_gradients,
    low_rank_gradients,
    mean_gradients,
    norm,
    outputs,
    same,
)

HOOKS = {label: case.hook for label, case in CASES.items()} | {"noop": lc.Noop()}

NOT_AVERAGING = "hook='noop' does not average"
TOO_EARLY = "training ended after"


def owes(hook):
    """Whether a hook has error feedback: its own field or that of a hook inside says so."""
    return getattr(hook, "use_error_feedback", False) or any(owes(inner) for inner in hook.inner_hooks)


def mean_residuals(state, shapes):
    """Mean residual by name, wherever it is in a state; zero where there is none."""
    if state["per_rank"] == "exact":
        ranks = [{**_of_rank(state, rank), "per_rank": "mean"} for rank in range(state["world_size"])]
        parts = [mean_residuals(rank, shapes) for rank in ranks]
        return {name: sum(part[name] for part in parts) / len(parts) for name in shapes}
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def visit(part):
        for key, value in part.items():
            if key == "entries":
                for name, entry in value.items():
                    if "residual" in entry:
                        total[name] += entry["residual"].view(shapes[name])
            elif isinstance(value, dict):
                visit(value)

    visit(state["hook"])
    return total


def _of_rank(part, rank):
    """One rank's part of an exact state."""
    if not isinstance(part, dict):
        return part
    own = {key: _of_rank(value, rank) for key, value in part.items()}
    if "residual" in part:
        own["residual"] = part["residual"][rank]
    return own


def residuals_of(attachment):
    """Mean residuals of a low-rank hook by name."""
    entries = attachment.state_dict()["hook"]["state"]["entries"]
    return {name: entry["residual"] for name, entry in entries.items() if "residual" in entry}


def closing_texts(attachment):
    """Close, and return the warnings given: rank 0's, the others have none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attachment.close()
    return [str(warning.message) for warning in caught]
