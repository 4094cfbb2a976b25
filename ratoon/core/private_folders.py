"""Folders whose content only the user that runs the engine may read, such as the one that `kv_files` names."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

PRIVATE_FOLDER = 0o700
OF_OTHERS = 0o077  # the bits of a mode that let other users in


def make_private_folder(named: Path, *below: str) -> Path:
    """Makes the folder that a setting names and those below it, each in the one before, and returns the last one.

    All that are missing, also those above the named one, are made for this user alone. If one of them is there, from
    the named one on, and belongs to this user, other users lose their access to it. A sticky folder, such as /tmp, is
    meant for several users and stays as it is. Raises OSError for a folder that can't be made."""
    folder = named
    make_missing_folders(folder)
    _close_to_others(folder)
    for name in below:
        folder = folder / name
        make_missing_folders(folder)
        _close_to_others(folder)
    return folder


def make_missing_folders(folder: Path) -> None:
    """Makes a folder and those above it, if they are missing, for this user alone. The `parents` of Path.mkdir would
    get the mode of the umask."""
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_missing_folders(folder.parent)
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def _close_to_others(folder: Path) -> None:
    facts = os.stat(folder)
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid != os.geteuid() or mode & stat.S_ISVTX or not mode & OF_OTHERS:
        return
    try:
        os.chmod(folder, mode & ~OF_OTHERS)
    except OSError as error:  # of a file system that is read-only or has no modes
        logger.warning("%s is open to other users, and its mode can't be changed: %s", folder, error)
    else:
        logger.warning("%s was open to other users (mode %o): it is not any more", folder, mode)
