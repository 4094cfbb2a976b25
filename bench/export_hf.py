"""Writes a model as a Hugging Face folder in fp32, through Ratoon's own loader: the same weights for the peers.

    .venv/bin/python bench/export_hf.py

The embedded model is a GGUF file; transformers and vLLM are at their best with safetensors. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from ratoon.models.source import ModelSource, resolve_model

MODEL = "smollm2-135m"
CACHE_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "bench"
DEFAULT_FOLDER = CACHE_FOLDER / f"{MODEL}-hf"


def export_model(name: str, folder: Path) -> Path:
    """Make the folder if it is not there. It appears in one moment and complete, or not at all."""
    if (folder / "config.json").is_file():
        return folder
    source = resolve_model(name)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_weights(source, partial / "model.safetensors")
    write_tokenizer(source, partial)
    write_json(partial / "generation_config.json", token_ids(source))
    write_json(partial / "config.json", {**source.raw_config, **token_ids(source), "dtype": "float32"})
    partial.rename(folder)
    return folder


def write_weights(source: ModelSource, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        name: source.tensors.read(name).floats().to(torch.float32).contiguous() for name in source.tensors.shapes()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def write_tokenizer(source: ModelSource, folder: Path) -> None:
    tokenizer = source.load_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.config.max_position,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    if source.chat_template is not None:
        settings["chat_template"] = source.chat_template
    write_json(folder / "tokenizer_config.json", settings)


def token_ids(source: ModelSource) -> dict[str, Any]:
    eos = list(source.config.eos_token_ids)
    ids = {"bos_token_id": source.config.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    return {name: value for name, value in ids.items() if value is not None}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=MODEL, help=f"what Ratoon can load (default {MODEL})")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where to (default .cache/bench/…)")
    parser.add_argument("--force", action="store_true", help="write it again if it is there")
    args = parser.parse_args()
    if args.force:
        shutil.rmtree(args.folder, ignore_errors=True)
    print(export_model(args.model, args.folder))


if __name__ == "__main__":
    main()
