"""What `powersgd` and `batched_powersgd` remember of one matrix, in memory and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.interface.by_parameter import Entry
from lightning_commhooks.interface.state import StateReader, StateWriter

# An entry has "residual", what is owed, before "sent_p"^T "sent_q" is taken from it if there is such; "factor", the
# last Q.


def settled(entry: Mapping[str, Tensor]) -> Tensor:
    """What is owed: a copy of the residual after what was sent is taken from it."""
    residual = entry["residual"].clone(memory_format=torch.contiguous_format)
    if "sent_p" in entry:
        residual.view(residual.shape[0], -1).addmm_(entry["sent_p"].t(), entry["sent_q"], alpha=-1)
    return residual


def saved(entry: Entry, writer: StateWriter) -> Entry:
    """A copy for a checkpoint."""
    # The mean over ranks of what is sent depends on the mean residual alone: one for all ranks will do.
    exact = writer.kind == "exact"
    shared = ("factor", "sent_p", "sent_q") if exact else ("factor",)
    copies = {part: writer.shared(entry[part]) for part in shared if part in entry}
    if "residual" in entry and writer.kind != "none":
        copies["residual"] = writer.per_rank(entry["residual"] if exact else settled(entry))
    return copies


def loaded(key: str, saved: Any, expected: Mapping[str, tuple[int, ...]], reader: StateReader) -> Entry:
    """Take over what fits of one saved entry."""
    saved = reader.section({key: saved}, key)
    entry = {part: reader.shared(tensor) for part, tensor in saved.items() if part != "residual"}
    if "residual" in saved:
        entry["residual"] = reader.per_rank(saved["residual"])
        if "sent_p" in entry and (not reader.is_exact or entry["sent_q"].shape != expected["factor"]):
            entry = {"residual": settled(entry), "factor": entry["factor"]}
    if "residual" in expected and "residual" not in entry and reader.has_per_rank:
        reader.differs(f"it has no error feedback of {key!r}")
    for part in [part for part in ("factor", "residual") if part in entry]:
        if part not in expected:
            reader.differs(f"it has error feedback of {key!r}")
        elif entry[part].shape != expected[part]:
            shapes = f"{list(entry[part].shape)} in the state and {list(expected[part])} now"
            reader.differs(f"the {part} of {key!r} has shape {shapes}")
        else:
            continue
        del entry[part]
    return entry
