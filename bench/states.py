"""A hybrid of state-space layers and attention on a CPU: the comparison of cpu_peers.py, with a file in Q4_0 against
llama.cpp and in float32 against transformers, for a random model of about the shape of Granite 4 h-350m (32 layers,
four of which attend).

    .venv/bin/python bench/states.py --json result.json
    .venv/bin/python bench/states.py --tiny          # does it work at all?

Options and tables are those of cpu_peers.py. transformers runs its own torch code here, too: its kernels for these
layers need a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from cpu_parts.engines import FLOAT32, FOLDER, GGUF, QUANTISED
from cpu_parts.folders import FolderModels
from cpu_parts.state_files import write_state_file
from cpu_peers import CpuPeers
from random_models import LAST_NORM_STD, vocabulary_of

WORKLOADS = "single,many-8,many-32,prefill"
SHAPE: dict[str, Any] = {
    "vocab_size": 100352, "hidden_size": 768, "intermediate_size": 2048, "shared_intermediate_size": 2048,
    "num_hidden_layers": 32, "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 0,
    "num_experts_per_tok": 0, "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "layer_types": ["full_attention" if layer % 8 == 5 else "linear_attention" for layer in range(32)],
}  # fmt: skip
TINY_SHAPE: dict[str, Any] = SHAPE | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "shared_intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_heads": 4, "mamba_d_head": 32,
    "mamba_d_state": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


class StateModels(FolderModels):
    forms = (FOLDER, GGUF)

    def __init__(self, tiny: bool) -> None:
        super().__init__(*(("tiny-hybrid", TINY_SHAPE) if tiny else ("granite-4-h-350m", SHAPE)))

    def make(self) -> Any:
        import torch
        import transformers

        model = transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**self.sizes))
        # Head and embedding are one: with a norm of ones, a token is followed by itself.
        torch.nn.init.normal_(model.model.norm.weight, std=LAST_NORM_STD)
        return model

    def find(self, form: str, name: str) -> Path:
        """The GGUF file is made of the folder if it is not there."""
        if form == FOLDER:
            return self.folder
        path = self.folder / f"{name}.gguf"
        if not path.is_file():
            import gguf
            import transformers

            model = transformers.GraniteMoeHybridForCausalLM.from_pretrained(self.folder)
            partial = write_state_file(
                model, path.with_suffix(".partial"), gguf.GGMLQuantizationType[name],
                vocabulary=vocabulary_of(self.sizes["vocab_size"]),
            )  # fmt: skip
            partial.rename(path)
        return path


class States(CpuPeers):
    doc = __doc__
    parts = (QUANTISED, FLOAT32)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.set_defaults(workloads=WORKLOADS, engines="ratoon,llama.cpp,transformers")

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        super().check_options(parser, args)
        self.models = StateModels(args.tiny)


if __name__ == "__main__":
    sys.exit(States().run())
