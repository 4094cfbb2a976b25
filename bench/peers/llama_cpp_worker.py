"""llama.cpp through llama-cpp-python's functions of its C interface, with its own defaults: what it can do at best,
with nothing of Python between two tokens but the choice of the largest logit.

One prompt goes into a sequence that keeps what the one before had in common with it. Several go into sequences of their
own and take every step together, as in llama.cpp's own batched benchmark. It has no beam search.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from typing import Any

from peers.protocol import Calls, TokenIds, serve

ERROR_LEVEL = 4
SEQUENCE_LENGTH = 512  # tokens of each of several prompts and its answer


def load(args: argparse.Namespace) -> Calls:
    import llama_cpp

    llama_cpp.llama_log_set(write_log, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(args.model.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp can't load {args.model}")
    single = Context(model, args.threads, 1, args.max_model_len)
    contexts: dict[int, Context] = {}

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        if len(prompts) == 1:
            return [single.generate_one(prompts[0], num_tokens)]
        if len(prompts) not in contexts:
            contexts[len(prompts)] = Context(model, args.threads, len(prompts), len(prompts) * SEQUENCE_LENGTH)
        return contexts[len(prompts)].generate_many(prompts, num_tokens)

    return {"generate": generate}


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def write_log(level: int, text: bytes, _: Any) -> None:
    """Without what it says of every graph."""
    if level >= ERROR_LEVEL:
        print(text.decode(errors="replace"), end="", file=sys.stderr, flush=True)


class Context:
    """Keys and values of some sequences, and the logits of the last call."""

    def __init__(self, model: Any, threads: int, num_sequences: int, length: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = length, num_sequences
        params.n_batch = 2048
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp can't make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._most_tokens = params.n_batch
        self._batch = llama_cpp.llama_batch_init(self._most_tokens, 0, 1)
        self._kept: list[int] = []  # tokens of sequence 0

    def generate_one(self, prompt: list[int], num_tokens: int) -> list[int]:
        same = 0
        while same < min(len(self._kept), len(prompt) - 1) and self._kept[same] == prompt[same]:
            same += 1
        self._lib.llama_memory_seq_rm(self._memory, 0, same, -1)
        answer = [self._run([(token, same + i, 0) for i, token in enumerate(prompt[same:])])[-1]]
        while len(answer) < num_tokens:
            answer += self._run([(answer[-1], len(prompt) + len(answer) - 1, 0)])
        self._kept = [*prompt, *answer[:-1]]
        return answer

    def generate_many(self, prompts: TokenIds, num_tokens: int) -> TokenIds:
        self._lib.llama_memory_clear(self._memory, True)
        entries = [(token, at, index) for index, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        answers = [[token] for token in self._run(entries)]
        for step in range(num_tokens - 1):
            last = [(answer[-1], len(prompts[i]) + step, i) for i, answer in enumerate(answers)]
            for answer, token in zip(answers, self._run(last), strict=True):
                answer.append(token)
        return answers

    def _run(self, entries: list[tuple[int, int, int]]) -> list[int]:
        """Of tokens with their positions and sequences: the most probable token behind the last of each sequence."""
        import numpy as np

        found = []
        for first in range(0, len(entries), self._most_tokens):
            part = entries[first : first + self._most_tokens]
            batch, wanted = self._batch, []
            batch.n_tokens = len(part)
            for i, (token, position, sequence) in enumerate(part):
                after = entries[first + i + 1] if first + i + 1 < len(entries) else None
                is_last = after is None or after[2] != sequence
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, is_last
                if is_last:
                    wanted.append(i)
            if status := self._lib.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for i in wanted:
                logits = self._lib.llama_get_logits_ith(self._context, i)
                numbers = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
                found.append(int(np.ctypeslib.as_array(numbers, shape=(self._vocab_size,)).argmax()))
        return found


if __name__ == "__main__":
    serve(load, ("llama-cpp-python",))
