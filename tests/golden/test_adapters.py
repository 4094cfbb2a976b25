"""Adapters act as PEFT applies them, in any batch, and leave the rows of others alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.golden.adapter_driver import AdapterDriver, Answer
from tests.golden.peft_oracle import PeftAdapter, logits_of
from tests.golden.tiny_models import (
    TinyModel,
    random_token_ids,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)
from tests.unit.execution.test_model_runner import NATIVE

FAMILIES = {
    "llama": tiny_llama,
    "llama, tied": lambda: tiny_llama(tied=True, attention_bias=True, mlp_bias=True),
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": lambda: tiny_qwen3(tied=False, head_dim=32),
    "gpt2": tiny_gpt2,
}
COUNT = 6
PROMPTS = [random_token_ids(length, seed=length) for length in (5, 17, 2, 9, 12, 3, 8, 20, 4)]


def check(answer: Answer, prompt: list[int], logits: torch.Tensor) -> None:
    """The oracle's logits are of the prompt and the answer: the same tokens, and their log-probabilities."""
    expected = logits.log_softmax(-1)[len(prompt) - 1 :]
    assert answer.tokens == expected.argmax(-1).tolist()[: len(answer.tokens)]
    for row, (_, found) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        ids, numbers = found.token_ids[0], found.logprobs[0]
        torch.testing.assert_close(torch.tensor(numbers), expected[row][list(ids)], atol=1e-4, rtol=0)


def check_all(
    driver: AdapterDriver, tiny: TinyModel, batch: list[tuple[list[int], int]], adapters: dict[int, PeftAdapter]
) -> list[Answer]:
    answers = driver.generate(batch, COUNT)
    for (prompt, slot), answer in zip(batch, answers, strict=True):
        text = prompt + answer.tokens[:-1]
        check(answer, prompt, logits_of(tiny.oracle, text) if slot < 0 else adapters[slot].logits(text))
    return answers


@pytest.mark.parametrize("backend", ["torch", *NATIVE])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_gets_what_peft_gives_each_request(family: str, backend: str, tmp_path: Path) -> None:
    """All linear layers; low ranks and odd ones, numbers by layer, and rank-stable scaling."""
    tiny = FAMILIES[family]()
    layer = "c_attn" if family == "gpt2" else "q_proj"
    adapters = {
        0: PeftAdapter(tiny, tmp_path / "0", 0, r=1, lora_alpha=2),
        2: PeftAdapter(tiny, tmp_path / "2", 2, r=20, use_rslora=True, lora_alpha=3, size=0.15),
        3: PeftAdapter(tiny, tmp_path / "3", 3, target_modules=[layer]),
        5: PeftAdapter(tiny, tmp_path / "5", 5, r=4, rank_pattern={layer: 7}, alpha_pattern={layer: 30}, size=0.15),
    }
    driver = AdapterDriver(tiny, backend)
    report = driver.load({slot: adapter.inspect(tiny) for slot, adapter in adapters.items()})
    assert sorted(report.loaded) == [0, 2, 3, 5] and not report.failed
    batch = list(zip(PROMPTS, [0, -1, 2, 3, -1, 5, 0]))
    check_all(driver, tiny, batch, adapters)
