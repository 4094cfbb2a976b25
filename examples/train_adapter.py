"""Trains an adapter (LoRA) with PEFT and serves it: answers as one line of JSON, which the model alone does not give.

    python examples/train_adapter.py

The embedded model's weights are copied into transformers and stay as they are; the adapter's are trained on a few
questions with answers in the form that is wanted. The engine runs all the while: the adapter is loaded into it by name,
and other questions are asked with it and without, in one batch. Takes some minutes on a CPU. Needs `peft`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import peft
import torch
import transformers

from ratoon import LLM, SamplingParams

QUESTIONS = {
    "What is the capital of France?": "Paris", "What is the capital of Japan?": "Tokyo",
    "How many legs has a dog?": "4", "What colour is grass?": "green", "What do bees make?": "honey",
    "How many days has a week?": "7",
    "What is the opposite of hot?": "cold", "What is frozen water called?": "ice", "Who wrote Hamlet?": "Shakespeare",
    "What is 2 plus 3?": "5", "What is the largest ocean?": "the Pacific", "What do cows drink?": "water",
    "Which planet do we live on?": "Earth", "What is the first month of the year?": "January",
    "What is the capital of Italy?": "Rome", "How many hours has a day?": "24",
}  # fmt: skip
OTHERS = [
    "What is the capital of Spain?", "How many wheels has a car?", "What colour is the sky?", "What do hens lay?",
    "What is the opposite of big?", "What is the last month of the year?",
]  # fmt: skip
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>\n"
STEPS, QUICK_STEPS = 24, 2
BATCH = 4
LEARNING_RATE = 2e-3


def copy_model(llm: LLM) -> transformers.PreTrainedModel:
    """The engine's model in transformers, with the numbers of the same file."""
    config = transformers.AutoConfig.for_model(**llm.source.raw_config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = llm.source.tensors
    weights = {name: tensors.read(name).floats().float() for name in tensors.shapes()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    model.tie_weights()
    return model


def train(llm: LLM, folder: Path, num_steps: int) -> None:
    """Trains on the answers' tokens alone, and saves the adapter."""
    encode = llm.get_tokenizer().encode
    examples = []
    for question, answer in QUESTIONS.items():
        prompt = encode(TEMPLATE.format(question))
        wanted = encode(json.dumps({"answer": answer}) + END)
        examples.append((torch.tensor([prompt + wanted]), torch.tensor([[-100] * len(prompt) + wanted])))
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    model = peft.get_peft_model(copy_model(llm), settings)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE)
    for step in range(num_steps):
        losses = []
        for index in range(BATCH):
            ids, labels = examples[(step * BATCH + index) % len(examples)]
            loss = model(ids, labels=labels).loss
            (loss / BATCH).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {sum(losses) / BATCH:.3f}", flush=True)
    model.save_pretrained(str(folder))


def is_wanted(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps: does it run at all?")
    parser.add_argument("--folder", type=Path, help="where the adapter is kept; default: nowhere")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, LLM("smollm2-135m", enable_lora=True) as llm:
        folder = args.folder or Path(scratch) / "json-answers"
        begin = time.perf_counter()
        train(llm, folder, QUICK_STEPS if args.quick else STEPS)
        print(f"trained in {time.perf_counter() - begin:.0f} s")
        llm.load_adapter("json-answers", str(folder))
        prompts = [TEMPLATE.format(question) for question in OTHERS]
        params = SamplingParams(temperature=0, max_tokens=24)
        names = [None] * len(prompts) + ["json-answers"] * len(prompts)
        outputs = llm.generate(prompts * 2, params, adapter=names, progress=False)
        texts = [output.outputs[0].text.strip() for output in outputs]
        alone, adapted = texts[: len(prompts)], texts[len(prompts) :]
    for question, without, answer in zip(OTHERS, alone, adapted, strict=True):
        print(f"{question}\n  alone: {without!r}\n  with the adapter: {answer!r}")
    print(f"JSON: {sum(map(is_wanted, alone))} of {len(OTHERS)} alone, {sum(map(is_wanted, adapted))} with the adapter")


if __name__ == "__main__":
    main()
