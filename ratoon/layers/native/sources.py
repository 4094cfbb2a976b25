"""The digest of the C sources in this folder. The build hook puts it into a library (build.c), and the loader compares
it: a library that was built from other sources may have other signatures. Imports nothing of the package, so that the
build hook can run this file alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

MACRO = "RATOON_SOURCES"


def digest_of(folder: Path) -> str:
    """Returns a digest of all C files and headers; it is empty where there are none, as in an installation without
    them."""
    files = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]
