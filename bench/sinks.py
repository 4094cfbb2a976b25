"""A mixture of experts with attention sinks on a CPU: the comparison of cpu_peers.py, in float32 against transformers,
with a random model of gpt-oss-20B's shape, cut to two of its layers, one of which has a window.

    .venv/bin/python bench/sinks.py --json result.json
    .venv/bin/python bench/sinks.py --tiny          # does it work at all?

Options and tables are those of cpu_peers.py. transformers attends by its own torch code here: torch's function for
attention has no sinks. The folder takes seven gigabytes, in the cache of models, and each engine holds it in memory.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, ClassVar

from cpu_parts.engines import FLOAT32
from cpu_parts.folders import FolderModels
from cpu_peers import CpuPeers

WORKLOADS = "single,many-8,many-32,prefill"
# Of the scaling of positions, and of the limit of gates, transformers has the published values.
SHAPE: dict[str, Any] = {
    "vocab_size": 32768, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 2,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"],
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
TINY_SHAPE: dict[str, Any] = SHAPE | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8, "initializer_range": 0.2,
}  # fmt: skip


class SinkModels(FolderModels):
    settings: ClassVar[dict[str, Any]] = {"transformers": {"attn_implementation": "eager"}}  # torch's has no sinks

    def __init__(self, tiny: bool) -> None:
        super().__init__(*(("tiny-sinks", TINY_SHAPE) if tiny else ("gpt-oss-20b", SHAPE)))

    @property
    def num_product_weights(self) -> int:
        """Counts the weights that a token reads: of the experts, those that are chosen for it."""
        hidden, heads = self.sizes["hidden_size"], self.sizes["num_attention_heads"]
        attention = 2 * hidden * self.sizes["head_dim"] * (heads + self.sizes["num_key_value_heads"])
        experts = self.sizes["num_experts_per_tok"] * 3 * hidden * self.sizes["intermediate_size"]
        return int(self.sizes["num_hidden_layers"] * (attention + experts))

    def make(self) -> Any:
        import torch
        import transformers

        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**self.sizes))
        for name, tensor in model.state_dict().items():
            if name.endswith("_bias"):  # of experts, in which a new model has zeros
                torch.nn.init.normal_(tensor, std=0.02)
        return model


class Sinks(CpuPeers):
    doc = __doc__
    parts = (FLOAT32,)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.set_defaults(workloads=WORKLOADS, engines="ratoon,transformers")

    def check_options(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        super().check_options(parser, args)
        self.models = SinkModels(args.tiny)


if __name__ == "__main__":
    sys.exit(Sinks().run())
