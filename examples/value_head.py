"""A value head: a number for every token of a text. Here: how many brackets will still have to be closed.

    python examples/value_head.py

It is trained on the states of all positions of written formulas, and then reads a formula that the model itself goes on
with: `return_hidden_states` brings the states with the answer. A head for rewards is trained in the same way.
"""

from __future__ import annotations

import argparse
import random
from itertools import accumulate

import torch

from ratoon import LLM, HiddenStatesOutput, HiddenStatesParams, SamplingParams

LAYERS = [0, 4]  # embeddings know their own token alone; four layers on, a state has seen what stands before it


def formula(chance: random.Random, depth: int) -> str:
    if depth == 0 or chance.random() < 0.25:
        return chance.choice("abcdxyz123456789")
    return f"({formula(chance, depth - 1)} {chance.choice('+-*/')} {formula(chance, depth - 1)})"


def make_formulas(count: int) -> list[str]:
    chance = random.Random(0)
    texts: list[str] = []
    while len(texts) < count:
        text = f"result = {formula(chance, 4)}"
        if 30 < len(text) < 90 and text not in texts:
            texts.append(text)
    return texts


def open_brackets(llm: LLM, states: HiddenStatesOutput) -> torch.Tensor:
    """What the head should say: [positions]"""
    texts = [llm.get_tokenizer().decode([token]) for token in states.token_ids]
    return torch.tensor([*accumulate(float(text.count("(") - text.count(")")) for text in texts)])


def train_head(states: torch.Tensor, values: torch.Tensor) -> torch.nn.Module:
    """Linear, [positions, hidden] → [positions, 1]."""
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.BatchNorm1d(states.shape[1]), torch.nn.Linear(states.shape[1], 1))
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(300):
        loss = torch.nn.functional.mse_loss(head(states)[:, 0], values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer formulas")
    formulas = make_formulas(16 if parser.parse_args().quick else 60)
    everything = HiddenStatesParams(positions="all", layers=LAYERS)
    with LLM("smollm2-135m", kv_memory="256MiB") as llm:
        outputs = llm.extract_hidden_states(formulas, everything)
        params = SamplingParams(temperature=0, max_tokens=10, return_hidden_states=everything)
        answer = llm.generate("result = ((a + b) * (c", params)[0].hidden_states[0]  # of the only choice
        values = [open_brackets(llm, output) for output in [*outputs, answer]]
        tokens = [llm.get_tokenizer().decode([token]) for token in answer.token_ids]
    split = len(formulas) * 3 // 4
    train_values, test_values = torch.cat(values[:split]), torch.cat(values[split:-1])
    print(f"{len(train_values)} tokens to train on, {len(test_values)} of other formulas to test on")
    for index, layer in enumerate(LAYERS):
        states = [output.tensor[index] for output in outputs]
        head = train_head(torch.cat(states[:split]), train_values)
        guesses = head(torch.cat(states[split:]))[:, 0]
        off, right = (guesses - test_values).abs().mean(), (guesses.round() == test_values).float().mean()
        print(f"layer {layer}: off by {off:.2f} on average, right for {right:.0%}")
    print("value  open  token")  # of the last layer, along the model's own text
    for value, number, token in zip(head(answer.tensor[-1])[:, 0], values[-1], tokens):
        print(f"{value:z5.1f}  {number:4.0f}  {token!r}")


if __name__ == "__main__":
    main()
