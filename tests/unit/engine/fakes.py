"""Stand-ins for what the front end stands on: small real tokenizers, and an engine core that plays a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from ratoon.core.config import EncoderConfig, ModelConfig
from ratoon.core.errors import RequestError
from ratoon.core.faults import fault_of
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from ratoon.core.readings import asks_for_states, awaits_count, reading_of
from ratoon.core.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Extraction,
    FinishReason,
    InheritedFrom,
)
from ratoon.core.stats import SchedulerStats
from ratoon.core.wire import WireTensor
from ratoon.models.token_bound import find_bound

END = 256  # the special tokens of the byte tokenizer
OTHER = 257
VOCAB_SIZE = 258
HIDDEN_SIZE = 8
NUM_LAYERS = 3


class FakeTokenizer:
    """The part of ratoon.models.tokenizer.Tokenizer that the front end uses."""

    def __init__(self, backend: Backend, eos: str) -> None:
        self.backend = backend
        self.vocab_size = backend.get_vocab_size()
        self.eos_token_id = backend.token_to_id(eos)
        self.bos_token_id = None
        self.special_token_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token: int) -> str | None:
        return self.backend.id_to_token(token)

    def token_text(self, token: int) -> str:
        return self.backend.decode([token], skip_special_tokens=False)

    def apply_chat_template(
        self, messages: list[dict], *, add_generation_prompt=None, continue_final_message=False, tools=None, **_
    ) -> str:
        text = "".join(f"[{message['role']}]{message['content']}\n" for message in messages)
        if continue_final_message:
            return text.removesuffix("\n")
        return text + ("" if add_generation_prompt is False else "[assistant]")

    def template_text(self, asked: str | None = None, has_tools: bool = False) -> str | None:
        return asked

    def special_token_id(self, text: str) -> int | None:
        return None

    def min_tokens(self, text: str, enough: int) -> int:
        return find_bound(self.backend)(text, enough) if len(text) > enough else 0

    def refuse_early(self, text: str, longest: int) -> int | None:
        num_tokens = self.min_tokens(text, longest)
        return num_tokens if num_tokens > longest else None


def byte_tokenizer() -> FakeTokenizer:
    """One token for each byte, as GPT-2 and its children spell them, and one special token."""
    alphabet = {byte: place for place, byte in enumerate(_byte_characters())}
    backend = Backend(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|other|>"])
    return FakeTokenizer(backend, "<|end|>")


def framing_tokenizer() -> FakeTokenizer:
    """The same, with a special token before and behind a text, as BART and BERT expect it."""
    tokenizer = byte_tokenizer()
    frame = [("<|other|>", OTHER), ("<|end|>", END)]
    tokenizer.backend.post_processor = processors.TemplateProcessing("<|other|> $A <|end|>", None, frame)
    return tokenizer


def sentencepiece_tokenizer() -> FakeTokenizer:
    """Words with a leading-space mark, and bytes for what has no word: as Llama-2 and Mistral do it."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ["▁", "▁hello", "▁world", "lo", "wor", "ld", "a", "b", "▁a", "あ", ".", "!"]:
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return FakeTokenizer(backend, "</s>")


class SlowTokenizer:
    """A tokenizer without a `tokenizers` backend."""

    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self.backend = None
        self.decode = tokenizer.decode
        self.special_token_ids = tokenizer.special_token_ids


def model_config(**changes: object) -> ModelConfig:
    fields: dict = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 16,
        "num_layers": NUM_LAYERS,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "max_position": 64,
        "eos_token_ids": (END,),
    }
    return ModelConfig(**(fields | changes))


ENCODER_POSITIONS = 32
ENCODER_LAYERS = 5
NUM_MEL_BINS = 4
AUDIO_POSITIONS = 1500  # of 30 s
DECODER_START = [END, OTHER]  # what the decoder's prompt is where nobody says otherwise


def encoder_decoder_config(num_mel_bins: int | None = None, **changes: object) -> ModelConfig:
    """As BART's, in which the end token also starts the decoder; with mel bins it hears."""
    max_position = ENCODER_POSITIONS if num_mel_bins is None else AUDIO_POSITIONS
    encoder = EncoderConfig(ENCODER_LAYERS, 2, 4, 16, max_position, num_mel_bins)
    start = {"decoder_start_token_id": END, "forced_bos_token_id": OTHER}
    return model_config(**{"encoder": encoder, **start, **changes})


Script = Callable[[EngineCoreRequest, int], list[int]]  # (request, choice) → the tokens it will get


def echo(request: EngineCoreRequest, choice: int) -> list[int]:
    """The prompt once more, backwards, then the end."""
    return [*reversed(request.prompt_token_ids), END]


def refusal(request: EngineCoreRequest, error: RequestError) -> EngineCoreOutput:
    """A refusal as it comes from another process."""
    return EngineCoreOutput(
        request.request_id, [], finish_reason=FinishReason.ERROR, error=str(error), refusal=fault_of(error)
    )


def found_text(
    request_id: str, token_ids: list[int], choice: int = 0, reason: FinishReason | None = None
) -> EngineCoreOutput:
    """A text of a beam search: each token cost 0.5, and the first choices are the best."""
    total = -0.5 * len(token_ids) - choice
    return EngineCoreOutput(
        request_id,
        list(token_ids),
        choice,
        reason,
        score=total / len(token_ids),
        cumulative_logprob=total,
        replaces=True,
    )


def hidden_state(position: int, layer: int) -> list[float]:
    """What every sequence has there."""
    return [position + layer / 8 + place / 64 for place in range(HIDDEN_SIZE)]


def hidden_rows(request: EngineCoreRequest, first_row: int, num_rows: int) -> EngineCoreOutput:
    """The next rows of an extraction, and with the last of them its end."""
    import numpy  # the front end does without it until somebody asks for hidden states

    extraction = request.params
    positions = extraction.positions[first_row : first_row + num_rows]
    rows = [[hidden_state(position, layer) for position in positions] for layer in extraction.layers]
    is_last = first_row + len(positions) == len(extraction.positions)
    return EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.STOP if is_last else None,
        hidden_states=wire_tensor(numpy.array(rows), extraction.dtype),
        first_row=first_row,
        num_rows_run=first_row + len(positions),
        inherited_from=None if request.continuation_of is None else InheritedFrom.LEASE,
    )


def wire_tensor(array: Any, dtype: str) -> WireTensor:
    if dtype == "bfloat16":  # the upper half of a float32
        data = (array.astype("float32").view("uint32") >> 16).astype("uint16")
    else:
        data = array.astype(dtype)
    return WireTensor(dtype, array.shape, data.tobytes())


class FakeClient:
    """An engine core that gives each choice the next token of its script, one a step, and extractions some rows. Hidden
    states of a text that has ended are read as by a real one.

    Of a beam search the scripts are the texts that it will find. It takes as many steps as the longest has tokens,
    and until then the best text is another one after each.
    """

    def __init__(self, script: Script = echo) -> None:
        self.script = script
        self.refuse: Callable[[EngineCoreRequest], Exception | None] = lambda request: None
        self.refuses_by_output = False  # as an engine in another process does
        self.rows_at_once = 2  # of an extraction, in a step
        self.added: list[EngineCoreRequest] = []
        self.groups: list[int] = []  # how many were handed over together
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self.on_step: Callable[[], None] = lambda: None
        self.closed = False
        self._left: dict[tuple[str, int], list[int]] = {}
        self._requests: dict[str, EngineCoreRequest] = {}
        self._given: dict[tuple[str, int], int] = {}
        self._texts: dict[tuple[str, int], list[int]] = {}
        self._refused: list[EngineCoreOutput] = []
        self.calls: list[tuple[Any, ...]] = []  # of utilities
        self.num_moments = 0  # that callers gave it after their results
        self._extracted: dict[str, int] = {}  # rows of extractions that are given, by id
        self.readings: list[EngineCoreRequest] = []  # of texts that have ended

    @contextmanager
    def together(self) -> Iterator[None]:
        num_before = len(self.added)
        yield
        self.groups.append(len(self.added) - num_before)

    def add_request(self, request: EngineCoreRequest) -> None:
        error = self.refuse(request)
        if isinstance(error, RequestError) and self.refuses_by_output:
            self._refused.append(refusal(request, error))
            return
        if error is not None:
            raise error
        self.added.append(request)
        self._requests[request.request_id] = request
        if isinstance(request.params, Extraction):
            self._extracted[request.request_id] = 0
            return
        for choice in range(request.num_choices):
            self._left[request.request_id, choice] = list(self.script(request, choice))

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted.extend(request_ids)
        for name in request_ids:
            self._extracted.pop(name, None)
            request_id, _, choice = name.partition("#")
            for key in [key for key in self._left if key[0] == request_id and choice in ("", str(key[1]))]:
                del self._left[key]

    def stop_requests(self, stopped: dict[str, int | None]) -> None:
        for branch_id, num_tokens in stopped.items():
            request_id, _, choice = branch_id.partition("#")
            key = request_id, int(choice or 0)
            self.stopped.append(branch_id)
            self._left.pop(key, None)
            if num_tokens is not None:
                self._read(key, self._texts[key][:num_tokens])

    def work_between_calls(self) -> None:
        self.num_moments += 1

    def _read(self, key: tuple[str, int], token_ids: list[int]) -> None:
        reading = reading_of(self._requests[key[0]], key[1], token_ids)
        if reading is not None:
            self.readings.append(reading)
            self._requests[reading.request_id] = reading
            self._extracted[reading.request_id] = 0

    def _end_texts(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            request = self._requests[output.request_id]
            if output.finished and asks_for_states(request) and not awaits_count(request.params):
                self._read((output.request_id, output.choice), self._texts[output.request_id, output.choice])

    def get_output(self) -> EngineCoreOutputs:
        self.on_step()
        outputs, self._refused = self._refused, []
        for request_id, first_row in list(self._extracted.items()):
            outputs.append(hidden_rows(self._requests[request_id], first_row, self.rows_at_once))
            self._extracted[request_id] = first_row + self.rows_at_once
            if outputs[-1].finished:
                del self._extracted[request_id]
        for request_id in {key[0] for key in self._left}:
            if isinstance(self._requests[request_id].params, BeamSearchParams):
                outputs += self._search(self._requests[request_id])
        for key in [key for key in self._left if isinstance(self._requests[key[0]].params, PoolingParams)]:
            del self._left[key]
            outputs.append(EngineCoreOutput(key[0], [], finish_reason=FinishReason.ERROR, error="it has no vector"))
        for key in [key for key in self._left if isinstance(self._requests[key[0]].params, SamplingParams)]:
            params = self._requests[key[0]].params
            token = self._left[key].pop(0)
            given = self._given[key] = self._given.get(key, 0) + 1
            self._texts.setdefault(key, []).append(token)
            reason = stop = None
            if token in (params.all_stop_token_ids or ()):
                reason, stop = FinishReason.STOP, token
            elif given == params.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                del self._left[key]
            continues = given == 1 and self._requests[key[0]].continuation_of is not None
            outputs.append(
                EngineCoreOutput(
                    request_id=key[0],
                    new_token_ids=[token],
                    choice=key[1],
                    finish_reason=reason,
                    stop_reason=stop,
                    inherited_from=InheritedFrom.LEASE if continues else None,
                )
            )
        self._end_texts([output for output in outputs if output.new_token_ids])
        return EngineCoreOutputs(outputs=outputs)

    def _search(self, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        params, request_id = request.params, request.request_id
        texts = [self._left[request_id, choice][: params.max_tokens] for choice in range(params.n)]
        step = self._given[request_id, 0] = self._given.get((request_id, 0), 0) + 1
        if step < max(map(len, texts)):
            best = texts[step % params.n][:step]
            return [found_text(request_id, best)] if params.output_kind == RequestOutputKind.CUMULATIVE else []
        outputs = []
        for choice, text in enumerate(texts):
            stopped = text[-1] in params.all_stop_token_ids
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            outputs.append(found_text(request_id, text, choice, reason))
            self._texts[request_id, choice] = text
            del self._left[request_id, choice]
        return outputs

    def has_work(self) -> bool:
        return bool(self._left or self._refused or self._extracted)

    def call_utility(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, *arguments))
        results = {"reset_prefix_cache": not self._left, "stats": msgspec.to_builtins(SchedulerStats())}
        return results.get(method)

    def health(self) -> Health:
        return Health([EngineHealth(0, EngineState.OK)])

    def describe(self) -> dict:
        names = ("device", "dtype", "num_threads", "weight_bytes", "kv_bytes", "kv_bytes_per_token", "kv_groups")
        attention = [{"layers": "layers 0-1 (full)", "backend": "slow", "reasons_against": {"fast": ["is lazy"]}}]
        weights = [{"format": "Q4_0", "num_weights": 2048, "num_bytes": 1152, "product": "in 4 bits"}]
        sizes = {"block_size": 16, "num_blocks": 9}
        kernels = {"in registers": 1, "matrix unit": 12}
        products = [{"weights": "4 bits, 64 → 32", "count": 2, "kernels": kernels, "choice": "measured"}]
        lists = {"attention": attention, "weight_formats": weights, "kernel_choices": products}
        return {**dict.fromkeys(names, 1), **sizes, **lists}

    def shutdown(self) -> None:
        self.closed = True


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in shown}
    hidden = [byte for byte in range(256) if byte not in characters]
    characters.update({byte: chr(256 + place) for place, byte in enumerate(hidden)})
    return [characters[byte] for byte in range(256)]
