"""How engines get weights in few bits: models in CTranslate2's format, made by its own environment where they are
missing, and settings."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from peers.process import BENCH_FOLDER, EngineFailedError, engine_environment, engine_python

FLOATS = "float32"


def quantization_settings(engine: str, quantization: str) -> dict[str, Any]:
    """Returns the settings of an engine for weights in so many bits; transformers has floats alone."""
    if engine == "ctranslate2":
        return {"compute_type": quantization}
    return {} if engine == "transformers" else {"quantization": "none" if quantization == FLOATS else quantization}


def converted_model(folder: Path, python: str | None, quantization: str = FLOATS) -> Path:
    """Beside the Hugging Face folder."""
    suffix = "" if quantization == FLOATS else f"-{quantization}"
    output = folder.parent / f"{folder.name.removesuffix('-hf')}-ct2{suffix}"
    if not (output / "model.bin").exists():
        command = [engine_python("ctranslate2", ctranslate2_python=python), "-m", "peers.ctranslate2_convert"]
        done = subprocess.run(
            [*command, str(folder.resolve()), str(output.resolve()), quantization],
            cwd=BENCH_FOLDER,
            env=engine_environment("ctranslate2", 1),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise EngineFailedError(f"the model can't be converted for CTranslate2:\n{done.stderr[-2000:]}")
    return output
