"""Engines whose rows must not depend on the batch: the same log-probabilities alone and together, to the bit."""

from __future__ import annotations

import pytest
import torch

from ratoon.core.params import SamplingParams
from tests.golden.engines import engine, run
from tests.golden.tiny_models import random_token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [random_token_ids(length, seed=length) for length in (33, 1, 61, 5, 17)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=4, ignore_eos=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama with grouped heads", "qwen3 untied with heads that the native kernels take"])
def test_a_request_gets_the_same_numbers_alone_in_a_batch_and_in_chunks(family: str, dtype: str) -> None:
    settings = {"device": "cuda", "dtype": dtype, "batch_invariant": True}
    with engine(family, **settings) as llm:
        together = [output.outputs[0] for output in run(llm, PROMPTS, PARAMS)]
    with engine(family, enable_prefix_caching=False, **settings) as llm:
        alone = [run(llm, [prompt], PARAMS)[0].outputs[0] for prompt in PROMPTS]
    with engine(family, max_num_batched_tokens=11, max_num_seqs=4, **settings) as llm:
        in_chunks = [output.outputs[0] for output in run(llm, PROMPTS, PARAMS)]
    for one, other, third in zip(together, alone, in_chunks, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        assert one.logprobs == other.logprobs == third.logprobs
