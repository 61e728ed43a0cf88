"""Files with the state of a hook between replicas of a sharded model, one for each shard."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_commhooks.runtime.attachment import Attachment


def shard_file(attachment: Attachment, folder: str | Path, name: str) -> Path:
    """The file for the shard that this rank has."""
    index, size = attachment.shard
    return Path(folder, f"{name}-{index}-of-{size}.pt")


def save_shard(attachment: Attachment, file: Path) -> None:
    """Let one of the ranks with the same shard write the state; raises on all if it cannot. Collective."""
    state = attachment.state_dict()
    with attachment._runtime.source.agreeing("saving the state of the hook"):
        if attachment.is_first_replica:
            torch.save(state, file)


def load_shard(attachment: Attachment, file: Path) -> str | None:
    """Load the state that [`save_shard`][] has written. Collective.

    Returns:
        that the hook begins anew, where no rank has a file.

    Raises:
        HookError: the file of another rank cannot be read.
        ValueError: some ranks have a file, and some do not.
    """
    with attachment._runtime.source.agreeing("loading the state of the hook") as same:
        state = torch.load(file, weights_only=True) if file.exists() else None
        same["whether there is a file for the rank's shard"] = state is not None
    if state is None:
        return f"hook {attachment.name!r} begins anew: the checkpoint has no state of these shards, {file}"
    attachment.load_state_dict(state)
    return None
