"""What newer versions have, for tests that run with older ones too."""

import importlib.metadata

from packaging.version import Version


def has(distribution, version):
    """Whether a distribution is installed, and not older."""
    try:
        return Version(importlib.metadata.version(distribution)) >= Version(version)
    except importlib.metadata.PackageNotFoundError:
        return False
