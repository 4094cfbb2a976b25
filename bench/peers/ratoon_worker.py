"""Ratoon, through its LLM class."""

from __future__ import annotations

from peers.protocol import MAX_MODEL_LEN, Generate, TokenIds, serve


def load(model: str, threads: int) -> Generate:
    from ratoon import LLM, SamplingParams

    llm = LLM(
        model, device="cpu", dtype="float32", num_threads=threads, max_model_len=MAX_MODEL_LEN, kv_memory="2GiB"
    )  # the memory is what vLLM gets

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load, ("ratoon", "torch"))
