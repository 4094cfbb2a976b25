"""Folders that quantisers write, in engines: log-probabilities are those of the weights that the folder stands for, by
the format's definition and computed by transformers, whether weights are kept in their bits or decoded."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratoon import LLM, SamplingParams
from tests.golden.engines import write_word_tokenizer
from tests.golden.tiny_models import random_token_ids, tiny_llama
from tests.unit.models.test_packed_source import compressed, config_of, words

Tensor = torch.Tensor
GROUP = 32  # inputs; where it does not divide them, as those of down_proj, the whole row is one group
PROMPT = random_token_ids(24, seed=5)


def in_groups(numbers: Tensor) -> Tensor:
    return numbers.unflatten(1, (-1, numbers.shape[1] if numbers.shape[1] % GROUP else GROUP))


def rounded(weight: Tensor, bits: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Codes [out, in], zero points and scales [out, groups]."""
    groups = in_groups(weight.double())
    least, most = groups.amin(-1), groups.amax(-1)
    if symmetric:
        most = torch.maximum(most, -least)
        least = -most
    scales = ((most - least) / (2**bits - 1)).float()
    zeros = (-least / scales).round() if not symmetric else torch.full_like(least, 2 ** (bits - 1))
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1).flatten(1)
    return codes.long().numpy(), zeros.long().clamp(0, 2**bits - 1).numpy(), scales


def stored_as(method: str, bits: int, codes: np.ndarray, zeros: np.ndarray, scales: Tensor) -> dict[str, Tensor]:
    middle = 2 ** (bits - 1)
    match method:
        case "gptq":
            return {"qweight": words(codes.T, bits, 0), "qzeros": words((zeros.T - 1) % 2**bits, bits, 1),
                    "scales": scales.t().contiguous()}  # fmt: skip
        case "awq":
            order = np.arange(len(codes)).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
            return {"qweight": words(codes.T[:, order], 4, 1), "qzeros": words(zeros.T[:, order], 4, 1),
                    "scales": scales.t().contiguous()}  # fmt: skip
        case "pack-quantized":
            return {"weight_packed": words(codes, bits, 1), "weight_scale": scales,
                    "weight_zero_point": words(zeros, bits, 0), "weight_shape": torch.tensor(codes.shape)}  # fmt: skip
    signed = [torch.from_numpy(numbers - middle).to(torch.int8) for numbers in (codes, zeros)]
    return {"weight": signed[0], "weight_zero_point": signed[1], "weight_scale": scales}


def write_folder(folder: Path, method: str, bits: int, symmetric: bool) -> Any:
    """Returns transformers' model with the numbers that the folder stands for."""
    from safetensors.torch import save_file

    tiny = tiny_llama()
    tiny.oracle.save_pretrained(folder)
    write_word_tokenizer(folder)
    tensors, weights = {}, {}
    for name, tensor in tiny.source.tensors.items():
        if not name.endswith("proj.weight"):
            tensors[name] = tensor.contiguous()
            continue
        codes, zeros, scales = rounded(tensor, bits, symmetric)
        differences = in_groups(torch.from_numpy(codes)) - torch.from_numpy(zeros)[..., None]
        weights[name] = (differences.double() * scales[..., None]).flatten(1).float()
        parts = stored_as(method, bits, codes, zeros, scales)
        tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= config_of(method, bits) if method in ("gptq", "awq") else compressed(method, bits, symmetric)
    (folder / "config.json").write_text(json.dumps(config))
    oracle = copy.deepcopy(tiny.oracle)
    missing = oracle.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and len(weights) == 7 * tiny.config.num_layers
    return oracle


def prompt_logprobs(folder: Path, **settings: Any) -> list[float]:
    with LLM(str(folder), device="cpu", num_blocks=16, num_threads=1, skip_tokenizer=True, **settings) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([PROMPT], params, progress=False)
    assert output.error is None and output.prompt_logprobs is not None
    found = zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
    return [of_place[token].logprob for token, of_place in found if of_place is not None]


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize(
    ("method", "bits"),
    [
        ("gptq", 4), ("gptq", 8), ("awq", 4), ("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 4),
        ("int-quantized", 8), ("naive-quantized", 4),
    ],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_log_probabilities_are_those_of_the_weights(method: str, bits: int, symmetric: bool, tmp_path: Path) -> None:
    oracle = write_folder(tmp_path, method, bits, symmetric)
    with torch.inference_mode():
        logits = oracle(torch.tensor([PROMPT]), use_cache=False).logits[0].double()
    expected = torch.log_softmax(logits[:-1], -1)[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])].tolist()
    assert prompt_logprobs(tmp_path, quantization="none") == pytest.approx(expected, abs=1e-4)
    assert prompt_logprobs(tmp_path) == pytest.approx(expected, abs=0.1)  # activations have 8 bits
