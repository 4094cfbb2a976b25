"""The load of structured.py on vLLM's CPU build: a process of its own, stopped while Ratoon is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from export_hf import CACHE_FOLDER, DEFAULT_FOLDER, MODEL, export_model
from peers.machine import usable_cores
from peers.process import EngineProcess, engine_python


def float_folder(model: str) -> str:
    """A folder in float32, which both engines load: the embedded model is a file of 4 bits."""
    return str(export_model(MODEL, DEFAULT_FOLDER)) if model == MODEL else model


class VllmPeer:
    def __init__(self, python: str, model: str, threads: int | None) -> None:
        self._engine = EngineProcess(
            "vllm",
            engine_python("vllm", python),
            Path(model),
            threads or len(usable_cores()),
            CACHE_FOLDER / "logs" / "vllm-structured.log",
            settings={"enable_prefix_caching": False},
        )

    def start(self, prompt: list[int]) -> None:
        self._engine.start(prompt)

    @property
    def versions(self) -> dict[str, str]:
        return self._engine.versions

    def measure_round(self, schemas: list[Any], asked: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """As `measure_round` of structured.py: with schemas, then free answers with the same numbers of tokens."""
        structured = self._engine.call("structured", prompts=asked, schemas=schemas, most_tokens=num_tokens)
        lengths = structured.value["lengths"]
        free = self._engine.call("sample", prompts=asked, lengths=lengths)
        assert free.value == lengths, (free.value, lengths)
        return {
            "structured_seconds": structured.seconds,
            "free_seconds": free.seconds,
            "tokens": sum(lengths),
            "ended": structured.value["ended"],
        }

    def close(self) -> None:
        self._engine.close()
