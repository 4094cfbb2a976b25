"""An embedded model as transformers has it: out of the same GGUF file, in float32."""

from __future__ import annotations

import functools
from typing import Any

import gguf
import pytest
import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ratoon.models.embedded import find_embedded_model


@functools.cache  # it takes many seconds
def load_oracle(name: str) -> Any:
    """Config and weights by transformers' own reader of GGUF files. `from_pretrained(folder, gguf_file=name)` would be
    shorter, but wants a further package (accelerate)."""
    path = find_embedded_model(name)
    with pytest.MonkeyPatch.context() as patch:
        # It reads the file twice, and makes the table of names anew for each of the model's modules.
        for function in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, function, functools.cache(getattr(gguf, function)))
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    model.tie_weights()
    return model.eval()
