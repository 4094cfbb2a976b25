"""transformers' `generate`. Prompts of a batch have one length, so nothing is padded."""

from __future__ import annotations

from peers.protocol import Generate, TokenIds, serve


def load(model: str, threads: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    causal_lm.generation_config.eos_token_id = None  # never stops early
    causal_lm.generation_config.pad_token_id = 0  # unused, but it warns without one

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        input_ids = torch.tensor(prompts)  # [requests, tokens]
        with torch.inference_mode():
            output = causal_lm.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=num_tokens
            )
        return output[:, input_ids.shape[1] :].tolist()

    return generate


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
