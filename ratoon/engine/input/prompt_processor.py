"""A prompt, in whatever form, to what a model reads of it: the tokens of its decoder and the input of its encoder.

Tokenised, completed with what the model's decoder begins with, and checked against the model's vocabulary and lengths.
A model that is an encoder alone is treated like a decoder alone: its tokens are `token_ids`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from ratoon.core.config import EncoderConfig, MediaSettings, ModelConfig
from ratoon.core.encoder import (
    HIGHEST_RATE,
    LOWEST_RATE,
    EncoderInput,
    features_for_encoder,
    tokens_for_encoder,
)
from ratoon.core.errors import RequestError
from ratoon.core.media import MediaFeature, RopePositions
from ratoon.core.prepared import prepared
from ratoon.core.wire import WireTensor
from ratoon.engine.input.prompt_media import PromptMedia, refuse_media, verify_audio, verify_rope
from ratoon.engine.input.prompts import (
    AUDIO_FORMS,
    TEXT_FORMS,
    Prompt,
    PromptPair,
    PromptPart,
    Suffix,
    parse_prompt,
    parse_suffix,
)
from ratoon.media.processor import ExpandedPrompt

if TYPE_CHECKING:
    import numpy


class ModelInput(NamedTuple):
    token_ids: list[int]
    encoder_input: EncoderInput | None = None  # of an encoder-decoder model
    num_forced_tokens: int = 0  # at the end of `token_ids`: those that the model's files have every text begin with
    mm_features: Sequence[MediaFeature] = ()  # what the model reads in the place of tokens, in their order
    rope: RopePositions | None = None


class PromptProcessor:
    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Any | None,
        max_model_len: int,
        media: MediaSettings | None = None,
    ) -> None:
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._media_settings = media or MediaSettings()
        self._media = PromptMedia(model_config, tokenizer, self._media_settings)
        sizes = {model_config.vocab_size, self._encoder_vocabulary}
        self._fine: dict[int, Any] = {size: _ids_below(size) for size in sizes}
        self._fine_types = _ids_below(max(1, model_config.num_token_types))

    @property
    def _encoder_vocabulary(self) -> int:
        encoder = self._model_config.encoder
        own = None if encoder is None else encoder.vocab_size
        return self._model_config.vocab_size if own is None else own

    def process(self, prompt: Prompt, num_places: int) -> ModelInput:
        """The decoder's tokens leave this many places of the model's length free."""
        parsed = parse_prompt(prompt)
        encoder = self._model_config.encoder
        if encoder is None:
            return self._decoder_alone(self._verify_single(parsed), num_places)
        pair = parsed if isinstance(parsed, PromptPair) else PromptPair(parsed, None)
        decoder_ids = self._decoder_tokens(pair.decoder, num_places)
        num_forced = 0 if pair.decoder is not None else len(decoder_ids) - 1
        return ModelInput(decoder_ids, self._encoder_input(encoder, pair.encoder), num_forced)

    def process_suffix(self, suffix: Suffix, earlier: Mapping[str, int]) -> ExpandedPrompt:
        """What comes after the tokens of another request, as if it stood alone. It may be empty. `earlier`: the number
        of media by modality in that request."""
        part = parse_suffix(suffix)
        if self._model_config.encoder is not None:
            refuse_media(part, "the decoder of this model reads text")
        items = self._media.verify(part, earlier)
        self._verify_text(part, self._max_model_len - 1, partial(self._too_long, num_places=1))
        token_ids = self._tokens(part, add_special_tokens=False) if part.token_ids is not None or part.text else []
        return self._media.expand(part, token_ids, items)

    # ---- the parts ----

    def _decoder_alone(self, part: PromptPart, num_places: int) -> ModelInput:
        if part.embeds is not None:
            expanded = self._media.read_embeds(part, self._max_model_len - num_places)
        else:
            items = self._media.verify(part)
            self._verify_text(part, self._max_model_len - num_places, partial(self._too_long, num_places=num_places))
            token_ids = self._some_tokens(part)
            self._verify_length(part.field, token_ids, num_places)
            expanded = self._media.expand(part, token_ids, items)
            self._verify_length(part.field, expanded.token_ids, num_places)
            if part.type_ids is not None:
                return ModelInput(self._with_types(token_ids, part.type_ids))
            verify_rope(part.media_field, expanded.rope, self._max_model_len - num_places)
        return ModelInput(expanded.token_ids, mm_features=expanded.features, rope=expanded.rope)

    @property
    def _reads_audio(self) -> bool:
        encoder = self._model_config.encoder
        return encoder is not None and encoder.num_mel_bins is not None

    def _verify_single(self, parsed: PromptPart | PromptPair) -> PromptPart:
        if isinstance(parsed, PromptPair):
            if parsed.encoder.audio is not None:
                problem = "is audio, and the model has no encoder that reads audio"
                raise RequestError(parsed.encoder.name, problem, TEXT_FORMS)
            if self._model_config.causal:
                raise RequestError(parsed.encoder.name, "the model has no encoder", "a single prompt")
            part = parsed.decoder or parsed.encoder
            raise RequestError(part.name, "the model has no decoder", "a single prompt, for its encoder")
        if parsed.audio is not None:
            raise RequestError(parsed.name, "is audio, and the model has no encoder that reads audio", TEXT_FORMS)
        return parsed

    def _encoder_input(self, encoder: EncoderConfig, part: PromptPart) -> EncoderInput:
        reads = "text" if encoder.num_mel_bins is None else "audio"
        refuse_media(part, f"the model's encoder reads {reads}")
        verify_audio(part, self._media_settings)
        if encoder.num_mel_bins is not None:
            if part.audio is None:
                raise RequestError(part.field, "is text, and the model's encoder reads audio", AUDIO_FORMS)
            features = read_audio(part.name, part.audio, encoder)
            return features_for_encoder(features, _num_states(features, encoder))
        if part.audio is not None:
            raise RequestError(part.name, "is audio, and the model's encoder reads text", TEXT_FORMS)
        longest = encoder.max_position

        def too_long(field: str, num_tokens: str) -> RequestError:
            problem = f"has {num_tokens} tokens, and the model's encoder has {longest} positions"
            return RequestError(field, problem, f"at most {longest} tokens")

        self._verify_text(part, longest, too_long)
        token_ids = self._some_tokens(part, self._encoder_vocabulary)
        if len(token_ids) > longest:
            raise too_long(part.field, str(len(token_ids)))
        return tokens_for_encoder(token_ids)

    def _decoder_tokens(self, part: PromptPart | None, num_places: int) -> list[int]:
        """Returns the decoder's prompt with the start token in front, as transformers puts it there. A text goes on
        after the whole default; one that begins with a special token (a language's, say) has said itself what comes
        behind the start. Before the start of what was heard there may stand what was said earlier."""
        default = self._default_decoder_prompt()
        if part is None:
            return default
        if part.audio is not None:
            raise RequestError(part.name, "is audio, and decoders read text", TEXT_FORMS)
        refuse_media(part, "the decoder of this model reads text")
        self._verify_text(part, self._max_model_len - num_places, partial(self._too_long, num_places=num_places))
        token_ids = self._tokens(part, add_special_tokens=False)
        if default[0] not in (token_ids if self._reads_audio else token_ids[:1]):
            is_plain_text = part.token_ids is None and not self._is_special(token_ids[:1])
            token_ids = (default if is_plain_text else default[:1]) + token_ids
        self._verify_length(part.field, token_ids, num_places)
        return token_ids

    def _default_decoder_prompt(self) -> list[int]:
        config = self._model_config
        start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        if start is None:
            raise RequestError("model", "its config has no decoder_start_token_id", "a model whose config has one")
        return [start] if config.forced_bos_token_id is None else [start, config.forced_bos_token_id]

    def _is_special(self, token_ids: list[int]) -> bool:
        return self._tokenizer is not None and not self._tokenizer.special_token_ids.isdisjoint(token_ids)

    def _with_types(self, token_ids: list[int], type_ids: Sequence[int]) -> list[int]:
        """The ids of typed tokens: those of the second type come behind the vocabulary, and so on."""
        num_types = max(1, self._model_config.num_token_types)
        try:  # at C speed; the bad one is looked for only where there is one
            msgspec.convert({"token_ids": type_ids}, prepared(self._fine_types))
        except msgspec.ValidationError:
            for index, kind in enumerate(type_ids):
                if isinstance(kind, bool) or not isinstance(kind, int) or not 0 <= kind < num_types:
                    problem = f"{kind!r} is no type of the model's tokens"
                    raise RequestError(f"token_type_ids[{index}]", problem, f"0 to {num_types - 1}") from None
        vocab_size = self._model_config.vocab_size
        return [token + kind * vocab_size for token, kind in zip(token_ids, type_ids, strict=True)]

    # ---- tokens ----

    def _some_tokens(self, part: PromptPart, vocab_size: int | None = None) -> list[int]:
        """`vocab_size`: of what reads them; None: the decoder's."""
        if part.token_ids is None and not part.text:
            raise RequestError(part.field, "is empty", "at least one character")
        token_ids = self._tokens(part, add_special_tokens=True, vocab_size=vocab_size)
        if not token_ids:
            raise RequestError(part.field, "is empty", "at least one token")
        return token_ids

    def _tokens(self, part: PromptPart, add_special_tokens: bool, vocab_size: int | None = None) -> list[int]:
        if part.token_ids is not None:
            return self._verify_token_ids(part.token_ids, part.field, vocab_size or self._model_config.vocab_size)
        encoder = self._model_config.encoder
        if encoder is not None and encoder.vocab_size is not None:
            problem = "is text, and the model has a vocabulary for each side, which one tokenizer does not know"
            raise RequestError(part.field, problem, "token ids")
        assert part.text is not None, "audio is read elsewhere"
        return self._encode(part.text, part.field, add_special_tokens)

    def _verify_text(self, part: PromptPart, longest: int, too_long: Callable[[str, str], RequestError]) -> None:
        """Refuses a text that has surely more tokens, before it is tokenised, which takes long and much memory."""
        if part.token_ids is not None or part.text is None or self._tokenizer is None:
            return
        num_tokens = self._tokenizer.refuse_early(part.text, longest)
        if num_tokens is not None:
            raise too_long(part.field, f"at least {num_tokens}")

    def _verify_length(self, field: str, token_ids: list[int], num_places: int) -> None:
        if len(token_ids) > self._max_model_len - num_places:
            raise self._too_long(field, str(len(token_ids)), num_places)

    def _too_long(self, field: str, num_tokens: str, num_places: int) -> RequestError:
        return RequestError(
            field,
            f"has {num_tokens} tokens, and at most {self._max_model_len - num_places} "
            f"{'leave room' if num_places else 'fit'} (max_model_len is {self._max_model_len})",
            "shorten it, or start the engine with a greater max_model_len if the model can do it",
        )

    def _encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(field, "text needs a tokenizer, and none is loaded", "give prompt_token_ids")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                field, f"is not valid Unicode at character {error.start}", "text without surrogates"
            ) from None
        token_ids: list[int] = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        vocab_size = self._model_config.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            raise RequestError(
                field,
                f"is tokenised to id {max(token_ids)}, and the model's vocabulary ends at {vocab_size - 1}",
                "the tokenizer that belongs to the model",
            )
        return token_ids

    def _verify_token_ids(self, token_ids: Sequence[int], field: str, vocab_size: int) -> list[int]:
        # Most prompts are fine, so the whole list is judged at C speed; only a bad one is searched for its bad entry.
        with suppress(msgspec.ValidationError):
            judged: list[int] = msgspec.convert({"token_ids": token_ids}, prepared(self._fine[vocab_size])).token_ids
            return judged
        checked = []
        for index, token in enumerate(token_ids):
            try:
                value = None if isinstance(token, bool) else operator.index(token)
            except TypeError:
                value = None
            if value is None:
                raise RequestError(f"{field}[{index}]", f"{token!r} is not a token id", "a list of whole numbers")
            if not 0 <= value < vocab_size:
                raise RequestError(
                    f"{field}[{index}]", f"{value} is not in the vocabulary", f"ids from 0 to {vocab_size - 1}"
                )
            checked.append(value)
        return checked


@cache
def _ids_below(vocab_size: int) -> Any:
    token_id = Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]
    return msgspec.defstruct("TokenIds", [("token_ids", list[token_id])])


# ---- audio ----

FRAMES_PER_STATE = 2  # the encoder's convolutions make one state of two frames


def read_audio(name: str, audio: Mapping[str, Any], encoder: EncoderConfig) -> WireTensor:
    """Features of what an AudioPrompt or a FeaturesPrompt holds. `name` is what errors call that."""
    assert encoder.num_mel_bins is not None
    if encoder.reads_waveform:
        return _read_samples(name, audio)
    if "features" in audio:
        features = _numbers(f"{name}.features", audio["features"])
    else:
        from ratoon.models.log_mel import log_mel  # here: it needs numpy, and most front ends do without

        features = log_mel(_waveform(name, audio["audio"], audio["sampling_rate"]), encoder.num_mel_bins)
    expected = (encoder.num_mel_bins, FRAMES_PER_STATE * encoder.max_position)
    if features.shape != expected:
        problem = f"has the shape {list(features.shape)}"
        raise RequestError(f"{name}.features", problem, f"{list(expected)}: mel bins, then frames")
    return WireTensor("float32", features.shape, features.data)


def _read_samples(name: str, audio: Mapping[str, Any]) -> WireTensor:
    """Returns the samples [1, samples] that an encoder of waveforms reads."""
    from ratoon.models.waveform import FEWEST_SAMPLES, WINDOW_SAMPLES, waveform_features

    if "features" not in audio:
        samples = waveform_features(_waveform(name, audio["audio"], audio["sampling_rate"]))
        return WireTensor("float32", samples.shape, samples.data)
    features = _numbers(f"{name}.features", audio["features"])
    if features.ndim != 2 or features.shape[0] != 1 or not FEWEST_SAMPLES <= features.shape[1] <= WINDOW_SAMPLES:
        problem = f"has the shape {list(features.shape)}"
        expected = f"[1, samples], from {FEWEST_SAMPLES} to {WINDOW_SAMPLES} of them at 16 kHz"
        raise RequestError(f"{name}.features", problem, expected)
    return WireTensor("float32", features.shape, features.data)


def _num_states(features: WireTensor, encoder: EncoderConfig) -> int:
    if not encoder.reads_waveform:
        return encoder.max_position
    from ratoon.models.waveform import num_states

    return num_states(features.shape[1])


def _waveform(name: str, audio: Any, sampling_rate: Any) -> numpy.ndarray:
    from ratoon.models.log_mel import SAMPLE_RATE, WINDOW_SECONDS

    rate = _sampling_rate(f"{name}.sampling_rate", sampling_rate)
    field = f"{name}.audio"
    waveform = _numbers(field, audio)
    if waveform.ndim != 1:
        problem = f"has the shape {list(waveform.shape)}"
        raise RequestError(field, problem, "one channel: a list of samples; transcribe mixes channels down")
    if waveform.size == 0:
        raise RequestError(field, "is empty", "at least one sample")
    if waveform.size > WINDOW_SECONDS * rate:
        raise RequestError(
            field,
            f"is {waveform.size / rate:.1f} s long ({waveform.size} samples)",
            f"at most {WINDOW_SECONDS} s in a prompt; transcribe takes longer ones",
        )
    return waveform if rate == SAMPLE_RATE else _resampled(f"{name}.sampling_rate", waveform, rate)


def _sampling_rate(field: str, value: Any) -> int:
    try:
        rate = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        rate = int(value) if isinstance(value, float) and value.is_integer() else 0
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        expected = f"a whole number of samples a second, from {LOWEST_RATE} to {HIGHEST_RATE}"
        raise RequestError(field, f"is {value!r}", expected)
    return rate


def _resampled(field: str, waveform: numpy.ndarray, rate: int) -> numpy.ndarray:
    """Returns a recording at the rate that encoders read. RequestError: PyAV is not installed."""
    import numpy

    from ratoon.models.log_mel import SAMPLE_RATE, WINDOW_SAMPLES

    try:
        from ratoon.models.resample import resample
    except ImportError:
        problem = f"is {rate}, and PyAV, which resamples, is not installed"
        raise RequestError(field, problem, f"{SAMPLE_RATE}, or pip install 'ratoon[audio]'") from None
    return numpy.concatenate([*resample([waveform], rate)])[:WINDOW_SAMPLES]


def _numbers(field: str, values: Any) -> numpy.ndarray:
    """float32, a copy: the caller may modify the original while the engine reads."""
    import numpy

    try:
        array = numpy.asarray(values)
    except Exception as error:  # ragged lists, tensors of another device, whatever has an __array__ of its own
        raise RequestError(field, f"is not an array ({error})", "floats") from None
    if array.dtype.kind != "f":
        raise RequestError(field, f"holds {array.dtype}", "floats, of audio from -1 to 1")
    with numpy.errstate(over="ignore"):  # infinity is found below
        array = numpy.array(array, numpy.float32, order="C")
    is_finite = numpy.isfinite(array)
    if not is_finite.all():
        place = numpy.unravel_index(int(is_finite.argmin()), array.shape)
        where = ", ".join(str(int(index)) for index in place)
        raise RequestError(f"{field}[{where}]", f"is {array[place]}", "finite numbers")
    return array
