"""Adapters (LoRA) as data: what engines, schedulers and runners tell each other of them.

An adapter is known by the digest of its files: two names with the same files are one adapter, and files that change
under the same name are another one. Block hashes, roots, leases and the balancer go by the digest.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec


class Adapter(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An adapter that an engine may be asked for. Its files have been read once, and fit the model."""

    digest: str  # of the files: 32 hexadecimal digits
    path: str  # the folder, or the GGUF file
    rank: int


class BaseModel(enum.Enum):
    """What a request names that is to have no adapter, and not that of the request which it goes on from."""

    BASE = "the base model"


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter as vLLM's requests name it. The path decides; the number is not used."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class AdapterLoad(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An adapter that is to be read into a slot, in the background: steps go on. No row of a step uses the slot before
    the result of this one, or of a later one, has said that the adapter is there. No step in flight reads the slot. A
    load that is announced again (a step failed, and reports with it) is not begun again, but reported again."""

    slot: int
    adapter: Adapter


class AdapterReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What became of adapters that were to be loaded, since the last report."""

    loaded: list[int] = []  # slots
    failed: dict[int, str] = {}  # slots, and why
