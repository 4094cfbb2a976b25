"""Models of which cpu_peers.py has the folder in float32 alone: transformers makes them, with random weights."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from export_hf import CACHE_FOLDER
from random_models import LAST_NORM_STD, SEED, _random_name, whole_folder

from cpu_parts.engines import FOLDER, Models


class FolderModels(Models):
    forms = (FOLDER,)

    def __init__(self, shape: str, sizes: dict[str, Any]) -> None:
        super().__init__(shape, None)
        self.sizes = sizes
        self._folder_name = _random_name(shape, [sizes, SEED, LAST_NORM_STD])

    @cached_property
    def folder(self) -> Path:
        """It is made if it is not there."""
        folder = CACHE_FOLDER / self._folder_name
        if not (folder / "config.json").is_file():
            import torch

            torch.manual_seed(SEED)
            with whole_folder(folder) as partial:
                self.make().save_pretrained(partial)
        return folder

    def make(self) -> Any:
        """Returns a new model of transformers."""
        raise NotImplementedError
