"""Train a draft head: it reads hidden states of a model and guesses its next tokens, which the model then checks.

    python examples/train_draft_head.py --output smollm2-head
    ratoon serve smollm2-135m --speculate head:smollm2-head

The model writes texts and the engine returns its hidden states at all positions: a low, a middle and a high layer for
the head to read, and the last one, whose distribution of the next token it learns. The head has the layout of EAGLE-3,
and is trained on its own guesses as well, as it will be used. In the end the acceptance is measured in the engine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from ratoon import LLM, HiddenStatesParams, SamplingParams

Tensor = torch.Tensor

TASKS = (
    "Explain {} to a child.", "Write a short story about {}.", "List five facts about {}.", "What is {}?",
    "Give me advice about {}.", "Write a polite e-mail about {}.", "Compare {} with something similar.",
    "Summarise the history of {}.", "Write a poem about {}.", "How does one learn about {}?",
)  # fmt: skip
TOPICS = """the sea, bread, volcanoes, the piano, honesty, spreadsheets, bicycles, winter, the moon, taxes, tea,
bridges, robots, sleep, gardens, chess, the heart, rivers, paper, lightning, owls, money, languages, cheese, maps,
trains, friendship, glass, ants, the brain, coffee, clouds, museums, running, salt, clocks, painting, whales, rice"""
HELD_OUT = 8  # prompts that the head is measured with, and not trained on
GUESSES = 3  # places that it is trained to guess, each from its own state at the one before
HEAD_DIM = 64


class Sequences(NamedTuple):
    """Texts with their hidden states."""

    tokens: list[Tensor]  # [T] each
    states: list[Tensor]  # [layers, T, H]: the embeddings, three layers that the head reads, the last norm's output


def chat_prompts(num: int) -> list[list[dict[str, str]]]:
    """In an order that mixes tasks and topics."""
    texts = [task.format(topic) for task, topic in product(TASKS, TOPICS.replace("\n", " ").split(", "))]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    return [[{"role": "user", "content": texts[index]}] for index in order[:num]]


def write_texts(llm: LLM, num_texts: int, num_tokens: int, layers: list[int | str]) -> Sequences:
    params = SamplingParams(temperature=0.8, max_tokens=num_tokens, seed=1)
    outputs = llm.chat(chat_prompts(num_texts + HELD_OUT)[HELD_OUT:], params, progress=False)
    wanted = HiddenStatesParams(positions="all", layers=layers)
    found = llm.extract_hidden_states(outputs, wanted, progress=False)
    return Sequences([torch.tensor(one.token_ids) for one in found], [one.tensor for one in found])


# ---- the head ----


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class MidLayer(nn.Module):
    """A Llama layer whose attention reads an embedding and a state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (RMSNorm(size) for _ in range(3))
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(2 * size, size, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
            | {"o_proj": nn.Linear(size, size, bias=False)}
        )
        self.mlp = nn.ModuleDict(
            {name: nn.Linear(size, 3 * size, bias=False) for name in ("gate_proj", "up_proj")}
            | {"down_proj": nn.Linear(3 * size, size, bias=False)}
        )

    def forward(self, embedded: Tensor, hidden: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[B, T, H] twice. `earlier`: keys and values of the guesses before this one, to which its own are added."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        q, k, v = (_heads(self.self_attn[name](both)) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = _rotate(q), _rotate(k)
        earlier.append((k, v))
        hidden = hidden + self.self_attn["o_proj"](_attend(q, earlier))
        x = self.post_attention_layernorm(hidden)
        return hidden + self.mlp["down_proj"](functional.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))


class Head(nn.Module):
    def __init__(self, size: int, draft_vocab: Tensor) -> None:
        """`draft_vocab` [V, H]: what the output head begins with."""
        super().__init__()
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = MidLayer(size)
        self.norm = RMSNorm(size)
        self.lm_head = nn.Linear(size, len(draft_vocab), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(draft_vocab / draft_vocab.norm(dim=1).mean())  # else it is sure of wrong guesses
            self.fc.weight.copy_(torch.eye(size).repeat(1, 3) / 3)  # the mean of what it reads

    def forward(self, embedded: Tensor, states: Tensor) -> list[Tensor]:
        """[B, T + 1, H] embeddings, [B, T, 3H] states → for each place in a draft, [B, T, V] logits. The row of a
        position reads the token behind it. From the second place on, it reads the head's own state of the row before:
        row p guesses as if the text had ended as many rows before p."""
        hidden, earlier, logits = self.fc(states), [], []
        for _ in range(GUESSES):
            hidden = self.midlayer(embedded[:, 1:], hidden, earlier)
            logits.append(self.lm_head(self.norm(hidden)))
            hidden = _back(hidden, 1, dim=1)
        return logits


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)  # [B, heads, T, D]


def _rotate(x: Tensor) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(x.shape[2])[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _back(x: Tensor, count: int, dim: int = 2) -> Tensor:
    """Row p gets what row p - count has."""
    return x if not count else x.roll(count, dim)  # the first rows are not trained on


def _attend(q: Tensor, passes: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The row p of guess j reads the model's states up to p - j, and the guesses behind them, at p - j + 1 to p."""
    last, num_rows = len(passes) - 1, q.shape[2]
    keys, values = passes[0]
    scores = [q @ keys.transpose(-1, -2)]  # [B, heads, T, T]
    places = torch.arange(num_rows)
    scores[0] = scores[0].masked_fill(places[None, :] > places[:, None] - last, float("-inf"))
    guessed = [(_back(k, last - index), _back(v, last - index)) for index, (k, v) in enumerate(passes)][1:]
    scores += [(q * k).sum(-1, keepdim=True) for k, _ in guessed]
    weights = (torch.cat(scores, dim=-1) / HEAD_DIM**0.5).softmax(-1)
    attended = weights[..., :num_rows] @ values
    for index, (_, v) in enumerate(guessed):
        attended = attended + weights[..., num_rows + index, None] * v
    return attended.transpose(1, 2).flatten(2)


# ---- training ----


def choose_vocabulary(data: Sequences, size: int) -> tuple[Tensor, Tensor]:
    """The most frequent tokens [V], rising, and their embeddings [V, H], which the states of layer 0 are."""
    counts = Counter(token for tokens in data.tokens for token in tokens.tolist())
    kept = torch.tensor(sorted(token for token, _ in counts.most_common(size)))
    rows: dict[int, Tensor] = {}
    for tokens, states in zip(data.tokens, data.states):
        for place, token in enumerate(tokens.tolist()):
            rows.setdefault(token, states[0, place])
    return kept, torch.stack([rows[token] for token in kept.tolist()])


def train(data: Sequences, embeddings: Tensor, epochs: int, batch_size: int = 4) -> Head:
    torch.manual_seed(0)
    head = Head(embeddings.shape[1], embeddings)
    lengths = sorted(range(len(data.tokens)), key=lambda index: len(data.tokens[index]))
    batches = [lengths[first : first + batch_size] for first in range(0, len(lengths), batch_size)]
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.01)
    num_steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=num_steps + 1)
    begin = time.perf_counter()
    for epoch in range(epochs):
        total = torch.zeros(GUESSES)
        for number in torch.randperm(len(batches)).tolist():
            losses = losses_of(head, data, batches[number], embeddings)
            optimizer.zero_grad()
            (losses * 0.8 ** torch.arange(GUESSES)).sum().backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += losses.detach()
        shown = ", ".join(f"{loss:.3f}" for loss in (total / len(batches)).tolist())
        print(f"epoch {epoch + 1} of {epochs}: loss by place {shown} ({time.perf_counter() - begin:.0f} s)", flush=True)
    return head.eval()


def losses_of(head: Head, data: Sequences, batch: list[int], embeddings: Tensor) -> Tensor:
    """[GUESSES]: cross entropy against the model's own distribution among the tokens that the head can guess."""
    states = nn.utils.rnn.pad_sequence([data.states[index].transpose(0, 1) for index in batch], batch_first=True)
    embedded, read, final = states[:, :, 0], states[:, :-1, 1:4].flatten(2), states[:, :, 4]
    with torch.no_grad():  # row p guesses the token behind p + 1; the embeddings are the output head, too
        wanted = (final[:, 1:] @ embeddings.T).softmax(-1)
    has_token = (
        torch.arange(read.shape[1])[None, :] < torch.tensor([len(data.tokens[one]) - 1 for one in batch])[:, None]
    )
    losses = []
    for place, logits in enumerate(head(embedded, read)):
        counts = has_token.clone()
        counts[:, :place] = False
        losses.append(-(wanted * logits.log_softmax(-1)).sum(-1)[counts].mean())
    return torch.stack(losses)


# ---- the folder, and what the head is worth ----


def save(head: Head, kept: Tensor, vocab_size: int, layers: list[int], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    size = head.fc.out_features
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size,
        "intermediate_size": 3 * size, "num_attention_heads": size // HEAD_DIM, "head_dim": HEAD_DIM,
        "num_key_value_heads": size // HEAD_DIM, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "vocab_size": vocab_size, "draft_vocab_size": len(kept), "max_position_embeddings": 2048,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    save_file(tensors, folder / "model.safetensors")


def measure(model: str, folder: Path, num_tokens: int) -> None:
    """With prompts that the head was not trained on, one after the other, with drafts and without."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    texts, seconds = [], []
    always = {"speculate_max_seqs": 1, "speculate_min_acceptance": 0}  # whatever the guesses are worth
    for settings in ({}, {"speculate": f"head:{folder}", "speculate_tokens": GUESSES, **always}):
        with LLM(model, **settings) as llm:
            llm.chat(chat_prompts(1), params, progress=False)  # the first one prepares more than it computes
            begin = time.perf_counter()
            outputs = [llm.chat([one], params, progress=False)[0] for one in chat_prompts(HELD_OUT)]
            seconds.append(time.perf_counter() - begin)
            texts.append([output.outputs[0].token_ids for output in outputs])
            stats = llm.stats().drafts.get("head")
    count = sum(map(len, texts[0]))
    print(f"the texts are {'the same' if texts[0] == texts[1] else 'NOT the same'} with drafts and without")
    if stats is not None:
        shares = [f"{right / stats.drafts:.0%}" for right in stats.accepted_per_pos]
        print(f"{stats.drafts} drafts, of which right at place 1, 2, …: {', '.join(shares)}")
        print(f"{1 + stats.accepted_tokens / stats.drafts:.2f} tokens a step with drafts")
    print(f"{count / seconds[0]:.0f} tokens/s without, {count / seconds[1]:.0f} with drafts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="with tied embeddings (default: %(default)s)")
    parser.add_argument("--output", default="draft-head", type=Path, help="folder (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=300, help="that the model writes (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="of each, at most (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens that the head can guess, at most")
    parser.add_argument("--quick", action="store_true", help="few texts, one epoch: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.texts, args.tokens, args.epochs = 16, 24, 1
    begin = time.perf_counter()
    with LLM(args.model) as llm:
        config = llm.source.config
        layers = [2, config.num_layers // 2, config.num_layers - 3]
        data = write_texts(llm, args.texts, args.tokens, [0, *layers, "norm"])
    num_tokens = sum(map(len, data.tokens))
    print(f"{len(data.tokens)} texts of {num_tokens:,} tokens in {time.perf_counter() - begin:.0f} s")
    kept, embeddings = choose_vocabulary(data, args.vocabulary)
    head = train(data, embeddings, args.epochs)
    save(head, kept, config.vocab_size, layers, args.output)
    print(f"{args.output}: {sum(one.numel() for one in head.parameters()) / 1e6:.1f} million weights")
    measure(args.model, args.output, 24 if args.quick else 96)


if __name__ == "__main__":
    main()
