"""versions: what must be the same on all hosts of a run."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def version() -> str:
    """The version of Shoal, followed by a digest of its code: clones of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    try:
        number = metadata.version("shoal")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        number = "unknown"
    return f"{number}, code {digest.hexdigest()[:8]}"


def digest_of(path: Path) -> str:
    """A digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
