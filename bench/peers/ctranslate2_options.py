"""What the workers of CTranslate2 have in common: how it is set up, and its prompts, which are tokens as text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from peers.protocol import TokenIds


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """For a Generator, a Translator or a model for speech: fp32 unless the settings have another compute_type, and all
    threads for one call."""
    return {
        "device": "cpu",
        "compute_type": args.settings.get("compute_type", "float32"),
        "inter_threads": 1,
        "intra_threads": args.threads,
    }


class Vocabulary:
    """Of a converted model."""

    def __init__(self, model: str, name: str) -> None:
        self._texts: list[str] = json.loads((Path(model) / name).read_text(encoding="utf-8"))
        self._ids = {text: token for token, text in enumerate(self._texts)}

    def texts(self, prompts: TokenIds) -> list[list[str]]:
        return [[self._texts[token] for token in prompt] for prompt in prompts]

    def ids(self, texts: list[str]) -> list[int]:
        return [self._ids[text] for text in texts]
