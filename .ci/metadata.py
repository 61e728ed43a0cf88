"""Adds the project's addresses to the metadata of a distribution: a hook of hatchling.

The environment variable `PROJECT_URL` is the address of the repository, such as that of a page on GitHub; the release
workflow sets it. Links of the README to files of the repository then lead to this version's files there, since an index
of packages shows the README by itself. Without the variable there are no addresses, and the README stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# The target of a link or image that is neither an address nor a heading of the page.
_RELATIVE = re.compile(r"(?P<text>!?\[[^\]]*\])\((?!\w+:|#)(?P<path>[^)\s]+)\)")


class ProjectMetadata(MetadataHookInterface):
    """Sets `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """See `MetadataHookInterface.update`."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = os.environ.get("PROJECT_URL", "").rstrip("/")
        if address:
            files = f"{address}/blob/v{metadata['version']}"
            text = _RELATIVE.sub(
                lambda link: f"{link['text']}({files}/{link['path']}{'?raw=true' if link['text'][0] == '!' else ''})",
                text,
            )
            metadata["urls"] = {
                "Documentation": f"{files}/docs/index.md",
                "Source": address,
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
