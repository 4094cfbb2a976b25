"""A script for vLLM: the first line is the only one that differs from it (`from vllm import …`).

python examples/from_vllm.py [MODEL]
"""

from ratoon import LLM, SamplingParams  # isort: skip

import sys

prompts = ["The capital of France is", "The future of AI is"]
sampling_params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=16, seed=1)

llm = LLM(
    model=sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m",
    dtype="float32",
    tensor_parallel_size=1,
    gpu_memory_utilization=0.5,
    max_model_len=512,
    max_num_seqs=8,
    enforce_eager=True,
    trust_remote_code=False,
    enable_prefix_caching=True,
    seed=0,
)
for output in llm.generate(prompts, sampling_params, use_tqdm=False):
    print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")

conversations = [[{"role": "user", "content": "Name a river in Europe."}], [{"role": "user", "content": "Say hi."}]]
for output in llm.chat(conversations, sampling_params, use_tqdm=False, add_generation_prompt=True):
    print(f"Answer: {output.outputs[0].text!r}, {output.outputs[0].finish_reason}")
