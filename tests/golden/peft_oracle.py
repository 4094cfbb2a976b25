"""Adapters that PEFT makes, saves and applies: the oracle of ours. Their matrices are random, so that they act."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from ratoon.core.adapters import Adapter
from ratoon.models.adapters import inspect
from tests.golden.tiny_models import TinyModel

Tensor = torch.Tensor


class PeftAdapter:
    """An adapter over a small model, and the folder that PEFT has saved it to."""

    def __init__(self, tiny: TinyModel, folder: Path, seed: int = 0, size: float = 0.3, **config: Any) -> None:
        torch.manual_seed(seed)
        settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model: peft.PeftModel = peft.get_peft_model(copy.deepcopy(tiny.oracle), peft.LoraConfig(**settings))
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.data.normal_(0, size)
                elif "modules_to_save" in name:
                    parameter.data.add_(torch.randn_like(parameter) * size)
            self.model.save_pretrained(str(folder))
        self.model.eval()
        self.folder = folder

    def inspect(self, tiny: TinyModel) -> Adapter:
        return inspect(self.folder, tiny.source.shapes())

    @torch.inference_mode()
    def logits(self, token_ids: list[int], **inputs: Any) -> Tensor:
        """[tokens, vocabulary] of a decoder; with an encoder's inputs, of its decoder."""
        if inputs:
            found = self.model(decoder_input_ids=torch.tensor([token_ids]), **inputs)
        else:
            found = self.model(torch.tensor([token_ids]), use_cache=False)
        logits: Tensor = found.logits
        return logits[0].float()


def logits_of(model: transformers.PreTrainedModel, token_ids: list[int], **inputs: Any) -> Tensor:
    """The same of the model alone."""
    with torch.inference_mode():
        if inputs:
            logits: Tensor = model(decoder_input_ids=torch.tensor([token_ids]), **inputs).logits
        else:
            logits = model(torch.tensor([token_ids]), use_cache=False).logits
        return logits[0].float()
