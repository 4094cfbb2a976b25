"""A linear probe: does the model know whether a sentence is praise or blame, and from which layer on?

    python examples/linear_probe.py

Every sentence is a request for the state of its last token, in several layers at once. The sentences of the test have
adjectives that the probe was not trained on, so counting words does not help there.
"""

from __future__ import annotations

import argparse

import torch

from ratoon import LLM, HiddenStatesParams

LAYERS = [0, 2, 4, 8, 16, 24, 30]  # 0: the embeddings; 30: after all layers of SmolLM2 and its final norm
PRAISE = """delicious wonderful superb delightful brilliant charming flawless excellent splendid lovely gorgeous
marvellous fantastic terrific outstanding pleasant perfect amazing enjoyable impressive"""
BLAME = """disgusting horrible awful dreadful boring ugly broken terrible lousy nasty hideous pathetic disappointing
rotten mediocre unpleasant worthless appalling annoying miserable"""
FRAMES = ("The dinner was {}.", "I found the film {}.", "What a {} hotel!", "Their service is {}.", "The book is {}.")
OTHERS = ["We would come again any time.", "She slept badly and left early.", "I want my money back."]


def sentences(adjectives: slice, frames: tuple[str, ...]) -> tuple[list[str], torch.Tensor]:
    """With these adjectives of each kind, and 1 for praise, 0 for blame."""
    texts = [frame.format(word) for words in (PRAISE, BLAME) for word in words.split()[adjectives] for frame in frames]
    return texts, torch.tensor([1.0, 0.0]).repeat_interleave(len(texts) // 2)


def last_token_states(llm: LLM, texts: list[str]) -> torch.Tensor:
    """[layers, texts, hidden]"""
    outputs = llm.extract_hidden_states(texts, HiddenStatesParams(positions=-1, layers=LAYERS))
    return torch.stack([output.tensor[:, 0] for output in outputs], dim=1)


def train_probe(states: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    """Logistic regression over [texts, numbers]: above 0 is praise."""
    torch.manual_seed(0)
    probe = torch.nn.Sequential(torch.nn.BatchNorm1d(states.shape[1]), torch.nn.Linear(states.shape[1], 1))
    optimizer = torch.optim.AdamW(probe.parameters(), lr=0.01, weight_decay=1.0)
    for _ in range(200):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(probe(states)[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return probe.eval()


def accuracy(probe: torch.nn.Module, states: torch.Tensor, labels: torch.Tensor) -> float:
    return ((probe(states)[:, 0] > 0) == labels.bool()).float().mean().item()


def word_counts(texts: list[str], vocabulary: list[str]) -> torch.Tensor:
    return torch.tensor([[float(text.split().count(word)) for word in vocabulary] for text in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer sentences")
    frames = FRAMES[:1] if parser.parse_args().quick else FRAMES
    train_texts, train_labels = sentences(slice(13), frames)
    test_texts, test_labels = sentences(slice(13, 20), frames)
    print(f"{len(train_texts)} sentences to train on, {len(test_texts)} with other adjectives to test on")
    vocabulary = sorted({word for text in train_texts for word in text.split()})
    probe = train_probe(word_counts(train_texts, vocabulary), train_labels)
    print(f"words counted  {accuracy(probe, word_counts(test_texts, vocabulary), test_labels):4.0%}")
    with LLM("smollm2-135m", kv_memory="256MiB") as llm:
        train, test, others = (last_token_states(llm, texts) for texts in (train_texts, test_texts, OTHERS))
    probes = [train_probe(states, train_labels) for states in train]
    for layer, probe, states in zip(LAYERS, probes, test):
        print(f"layer {layer:2}       {accuracy(probe, states, test_labels):4.0%}")
    middle = LAYERS.index(16)
    for text, score in zip(OTHERS, probes[middle](others[middle])[:, 0].sigmoid().tolist()):
        print(f"{score:4.0%} praise: {text}")


if __name__ == "__main__":
    main()
