"""Blocks of the KV cache as files of a folder, which outlive the engine: one file a block, named by its key, with a
checksum in front. Nothing is ever deleted. Importing this module does not import torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_connector import BlockIndex, BlockMover, KVConnector

CHECKSUM_BYTES = 32


class FolderConnector(KVConnector):
    def __init__(self, options: Mapping[str, Any]) -> None:
        if set(options) != {"folder"} or not isinstance(options["folder"], str):
            raise ValueError('{"folder": PATH} is needed, and nothing else')
        self._folder = Path(options["folder"])

    def open_index(self, fingerprint: KVFingerprint) -> FolderIndex:
        return FolderIndex(self._folder_for(fingerprint))

    def open_mover(self, fingerprint: KVFingerprint) -> FolderMover:
        return FolderMover(self._folder_for(fingerprint))

    def _folder_for(self, fingerprint: KVFingerprint) -> Path:
        """Blocks of other models, or of the same one in another layout, lie in another folder."""
        folder = self._folder / fingerprint.digest
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder


class FolderIndex(BlockIndex):
    def __init__(self, folder: Path) -> None:
        self._keys = {bytes.fromhex(file.stem) for file in folder.glob("*.block")}

    def find(self, key: bytes) -> bool:
        return key in self._keys

    def offer(self, key: bytes) -> bool:
        """A block counts as there from now on: it is saved before any later plan could load it."""
        if key in self._keys:
            return False
        self._keys.add(key)
        return True


class FolderMover(BlockMover):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """The file gets its name once it is complete."""
        handle, name = tempfile.mkstemp(dir=self._folder)  # which only the owner may read
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_checksum(parts))
                file.writelines(parts)
            os.replace(name, self._folder / f"{key.hex()}.block")
        except BaseException:
            os.unlink(name)
            raise

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        with open(self._folder / f"{key.hex()}.block", "rb") as file:
            checksum = file.read(CHECKSUM_BYTES)
            is_whole = all(file.readinto(part) == part.nbytes for part in parts) and not file.read(1)
        return is_whole and _checksum(parts) == checksum


def _checksum(parts: Sequence[memoryview]) -> bytes:
    digest = blake2b(digest_size=CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
