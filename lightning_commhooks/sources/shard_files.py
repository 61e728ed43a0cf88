"""Files with the state of a hook between replicas of a sharded model, one for each shard."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from lightning_commhooks.runtime.attachment import Attachment

logger = logging.getLogger(__name__)


def shard_file(attachment: Attachment, folder: str | Path, name: str) -> Path:
    """The file for the shard that this rank has."""
    index, size = attachment.shard
    return Path(folder, f"{name}-{index}-of-{size}.pt")


def save_shard(attachment: Attachment, file: Path) -> None:
    """Write the state on one of the ranks with the same shard; raises on all if that fails. Collective."""
    state = attachment.state_dict()
    with attachment._runtime.source.agreeing("saving the state of the hook"):
        if attachment.is_first_replica:
            torch.save(state, file)


def load_shard(attachment: Attachment, file: Path) -> str | None:
    """Load the state that [`save_shard`][] has written, on this or another number of shards. Collective.

    Returns:
        a message that the hook's state is reset, if no rank has a file; otherwise `None`.

    Raises:
        HookError: the file of another rank cannot be read.
        ValueError: some ranks have a file, and some do not.
    """
    _, size = attachment.shard
    states: list[dict[str, Any]] = []
    with attachment._runtime.source.agreeing("loading the state of the hook") as same:
        files = [file] if file.exists() else _files_of_other_shards(file)
        same["the number of files with the state"] = len(files)
        states = [torch.load(path, weights_only=True, mmap=True) for path in files]
    if not states:
        return f"hook {attachment.name!r} begins anew: the checkpoint has no state of these shards, {file}"
    is_whole = files == [file]
    if not is_whole and attachment._runtime.source.process_group.rank() == 0:
        logger.info("state of hook %r: saved on %d shards, cut anew for %d", attachment.name, len(files), size)
    attachment.load_state_dict(states[0] if is_whole else states, strict_state=is_whole)
    return None


def _files_of_other_shards(file: Path) -> list[Path]:
    """Those of all shards of another number, in order; the newest if there are several."""
    name = file.name.rsplit("-", 3)[0]
    first_files = sorted(file.parent.glob(f"{name}-0-of-*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for count in (int(path.stem.rpartition("-")[2]) for path in first_files):
        files = [file.with_name(f"{name}-{i}-of-{count}.pt") for i in range(count)]
        if all(path.exists() for path in files):
            return files
    return []
