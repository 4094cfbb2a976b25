"""Llama whose logits are capped smoothly, as Gemma 2 does it: none is further from 0 than CAP."""

from __future__ import annotations

import torch

from ratoon.layers.adapters import AdapterRows
from ratoon.models.llama import LlamaForCausalLM

CAP = 30.0


class SoftcapForCausalLM(LlamaForCausalLM):
    def compute_logits(self, hidden: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return super().compute_logits(hidden, adapters).div_(CAP).tanh_().mul_(CAP)
