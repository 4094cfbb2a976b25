"""Which files of adapters a request may have loaded: those below the folders that `--adapter-root` allows.

Links are followed before the comparison, of the path and of the files in the folder that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratoon.api.server.errors import ApiError, refused
from ratoon.models.damage import shorten

MAX_PATH = 4096
MAX_SHOWN = 200


def allowed_path(path: str, roots: Sequence[str]) -> str:
    """Returns the path without links. ApiError: it is not below one of the folders, whether it exists or not."""
    if not roots:
        message = "lora_path: no folder of adapters is allowed; start the server with --adapter-root DIR"
        raise ApiError(403, message, param="lora_path", code="adapters_not_allowed")
    if not path or "\0" in path or len(path) > MAX_PATH:
        raise refused("lora_path", f"{shorten(path, MAX_SHOWN)!r} is not a path", "the folder of an adapter")
    try:
        folders = [Path(root).expanduser().resolve() for root in roots]
        found = Path(path).resolve()
        if not _is_below(found, folders):
            raise _not_allowed(path)
        files = list(found.iterdir()) if found.is_dir() else []
        if not all(_is_below(file.resolve(), folders) for file in files):
            raise _not_allowed(path)
    except (OSError, RuntimeError) as error:  # a loop of links, or a folder that can't be read
        raise refused("lora_path", f"can't be read: {error}", "the folder of an adapter") from None
    return str(found)


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) and path != folder for folder in folders)


def _not_allowed(path: str) -> ApiError:
    message = f"lora_path: {shorten(path, MAX_SHOWN)!r} is not below a folder that --adapter-root allows"
    return ApiError(403, message, param="lora_path", code="adapters_not_allowed")
