"""The forms that a prompt may have, brought into one: parts with text, token ids, embeddings or audio, alone or as a
pair, and the images and videos beside them.

Also which prompts take long to check. Nothing here knows a model or a tokenizer. Whether a model has an encoder to read
a part, and what it reads of it, is worked out in prompt_processor.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypeAlias, TypedDict

from ratoon.core.errors import RequestError
from ratoon.models.tokenizer import LONG_TEXT


class WithMedia(TypedDict):
    """What may stand beside a text or token ids that have a placeholder for each image and video."""

    # {"image": …, "video": …}, each one or a list; of an encoder that reads audio, {"audio": (samples, sampling rate)}
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]  # options of preprocessing, such as max_pixels


class TextPrompt(WithMedia):
    prompt: str


class TokensPrompt(WithMedia):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]  # the text of the ids, shown in outputs only
    token_type_ids: NotRequired[Sequence[int] | None]  # of each token, for an encoder that reads pairs of texts (BERT)


class EmbedsPrompt(TypedDict):
    """Embeddings in the place of tokens."""

    prompt_embeds: Any  # floats [tokens, hidden size]


class AudioPrompt(TypedDict):
    """The prompt of an encoder that reads audio: at most 30 s of it."""

    audio: Any  # one channel: floats from -1 to 1, in whatever numpy can make an array of
    sampling_rate: int


class FeaturesPrompt(TypedDict):
    """The prompt of an encoder that reads audio, where the features of 30 s were made elsewhere."""

    features: Any  # [mel bins, frames]


SingletonPrompt: TypeAlias = (
    str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt | AudioPrompt | FeaturesPrompt | Mapping[str, Any]
)


class ExplicitEncoderDecoderPrompt(TypedDict):
    """The two prompts of an encoder-decoder model. A single prompt is its encoder's alone."""

    encoder_prompt: SingletonPrompt
    decoder_prompt: NotRequired[SingletonPrompt | None]  # None: the model's default


Prompt: TypeAlias = SingletonPrompt | ExplicitEncoderDecoderPrompt
# What stands behind the tokens of an earlier request: as a prompt of text, and like it with media
Suffix: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]

TEXT_FORMS = 'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
AUDIO_FORMS = '{"audio": floats, "sampling_rate": 16000} or {"features": floats}'
EMBEDS_FORM = '{"prompt_embeds": floats}: [tokens, hidden size], alone'
MEDIA_FORM = '{"image": …, "video": …}'
MEDIA_AUDIO_FORM = '{"audio": (floats, 16000)}'
SUFFIX = "continuation_suffix"  # the name of such a part
PAIR_FORM = '{"encoder_prompt": …, "decoder_prompt": …}'
_MEDIA_KEYS = {"multi_modal_data", "mm_processor_kwargs"}
_TEXT_KEYS = {"prompt", "prompt_token_ids", "token_type_ids", *_MEDIA_KEYS}
_AUDIO_KEYS = {"audio", "sampling_rate", "features"}
_PAIR_KEYS = {"encoder_prompt", "decoder_prompt"}


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What one half of a model reads. With both text and ids (a rendered chat, say) the ids count."""

    name: str  # as the caller knows it: prompt, encoder_prompt, decoder_prompt or continuation_suffix
    text: str | None = None
    token_ids: Sequence[int] | None = None
    type_ids: Sequence[int] | None = None  # of the token ids; None: all are of the first type
    audio: Mapping[str, Any] | None = None  # set: there are neither; the keys are AudioPrompt's or FeaturesPrompt's
    embeds: Any = None  # set: there are neither
    media: Mapping[str, Any] | None = None  # `multi_modal_data`, without audio
    processor_kwargs: Mapping[str, Any] | None = None

    @property
    def field(self) -> str:
        """The field that an error about the tokens names."""
        return self.name if self.token_ids is None or self.name == SUFFIX else f"{self.name}_token_ids"

    @property
    def media_field(self) -> str:
        return "multi_modal_data" if self.name == "prompt" else f"{self.name}.multi_modal_data"


@dataclass(frozen=True, slots=True)
class PromptPair:
    encoder: PromptPart
    decoder: PromptPart | None


def parse_prompt(prompt: Any) -> PromptPart | PromptPair:
    """RequestError for what has none of the forms."""
    if not isinstance(prompt, Mapping) or not _PAIR_KEYS & prompt.keys():
        return _parse_single(prompt)
    unknown = _first_unknown(prompt, _PAIR_KEYS)
    if unknown is not None:
        raise RequestError("prompt", f"a mapping with {unknown!r} beside an encoder or decoder prompt", PAIR_FORM)
    encoder, decoder = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
    if encoder is None:
        raise RequestError("encoder_prompt", "is missing", f"{TEXT_FORMS}; of audio, {AUDIO_FORMS}")
    parsed = _parse_audio_beside_text("encoder_prompt", encoder)
    if parsed is None:
        return PromptPair(_parse_part("encoder_prompt", encoder), _parse_decoder(decoder))
    if parsed.decoder is not None:
        raise RequestError("encoder_prompt", "has text or token ids beside its audio", 'an empty "prompt", or none')
    return PromptPair(parsed.encoder, _parse_decoder(decoder))


def parse_suffix(suffix: Any) -> PromptPart:
    """RequestError for what has none of the forms of text and token ids."""
    part = _parse_part(SUFFIX, suffix)
    if part.audio is not None or part.embeds is not None:
        raise RequestError(SUFFIX, "is neither text nor token ids", TEXT_FORMS)
    return part


def _parse_single(prompt: Any) -> PromptPart | PromptPair:
    return _parse_audio_beside_text("prompt", prompt) or _parse_part("prompt", prompt)


def _parse_decoder(decoder: Any) -> PromptPart | None:
    return None if decoder is None else _parse_part("decoder_prompt", decoder)


def texts_of(prompt: Prompt, has_encoder: bool) -> tuple[str | None, str | None]:
    """The texts that outputs show: the decoder's, and the encoder's where the model has one."""
    parsed = parse_prompt(prompt)
    if isinstance(parsed, PromptPair):
        return None if parsed.decoder is None else parsed.decoder.text, parsed.encoder.text
    return (None, parsed.text) if has_encoder else (parsed.text, None)


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _parse_part(name: str, prompt: Any) -> PromptPart:
    if isinstance(prompt, str):
        return PromptPart(name, text=prompt)
    if is_list(prompt):
        return PromptPart(name, token_ids=prompt)
    if not isinstance(prompt, Mapping):
        raise RequestError(name, f"{type(prompt).__name__} is not a prompt", TEXT_FORMS)
    if _PAIR_KEYS & prompt.keys():
        raise RequestError(name, "is itself a pair of an encoder and a decoder prompt", TEXT_FORMS)
    if _AUDIO_KEYS & prompt.keys():
        return _parse_audio(name, prompt)
    if "prompt_embeds" in prompt:
        return _parse_embeds(name, prompt)
    unknown = _first_unknown(prompt, _TEXT_KEYS)
    if unknown is not None:
        raise RequestError(name, f"a mapping with {unknown!r}", TEXT_FORMS)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError(name, f"{type(text).__name__} is not text", TEXT_FORMS)
    if token_ids is not None and not is_list(token_ids):
        raise RequestError(f"{name}_token_ids", f"{type(token_ids).__name__} is not a list", "a list of token ids")
    if text is None and token_ids is None:
        raise RequestError(name, "is missing", TEXT_FORMS)
    type_ids = prompt.get("token_type_ids")
    if type_ids is not None and (token_ids is None or not is_list(type_ids) or len(type_ids) != len(token_ids)):
        raise RequestError(f"{name}.token_type_ids", "is no list with a type for each token id", "a list as long")
    part = PromptPart(name, text, token_ids, type_ids)
    media, options = prompt.get("multi_modal_data"), prompt.get("mm_processor_kwargs")
    if media is not None and not isinstance(media, Mapping):
        raise RequestError(part.media_field, f"{type(media).__name__} is not a mapping", MEDIA_FORM)
    if options is not None and not isinstance(options, Mapping):
        raise RequestError("mm_processor_kwargs", f"{type(options).__name__} is not a mapping", "an object of options")
    return replace(part, media=media or None, processor_kwargs=options or None)


def _parse_embeds(name: str, prompt: Mapping[str, Any]) -> PromptPart:
    unknown = _first_unknown(prompt, {"prompt_embeds"})
    if unknown is not None:
        raise RequestError(name, f"a mapping with {unknown!r} beside prompt_embeds", EMBEDS_FORM)
    if prompt["prompt_embeds"] is None:
        raise RequestError(f"{name}_embeds", "is missing", EMBEDS_FORM)
    return PromptPart(name, embeds=prompt["prompt_embeds"])


def _parse_audio_beside_text(name: str, prompt: Any) -> PromptPair | None:
    """Audio in `multi_modal_data`, which is the encoder's prompt; a text beside it is the decoder's. None: there is
    none."""
    media = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if not isinstance(media, Mapping) or media.get("audio") is None:
        return None
    field = "multi_modal_data" if name == "prompt" else f"{name}.multi_modal_data"
    unknown = _first_unknown(media, {"audio"}) or _first_unknown(prompt, _TEXT_KEYS)
    if unknown is not None:
        raise RequestError(field, f"a mapping with {unknown!r} beside audio", MEDIA_AUDIO_FORM)
    audio = media["audio"]
    if isinstance(audio, list) and len(audio) == 1:
        audio = audio[0]
    if not isinstance(audio, tuple) or len(audio) != 2:
        raise RequestError(f"{field}.audio", f"{type(audio).__name__} is not a recording", MEDIA_AUDIO_FORM)
    encoder = PromptPart(field, audio={"audio": audio[0], "sampling_rate": audio[1]})
    text = {key: value for key, value in prompt.items() if key not in _MEDIA_KEYS and not _is_nothing(value)}
    return PromptPair(encoder, _parse_part(name, text) if text else None)


def _parse_audio(name: str, prompt: Mapping[str, Any]) -> PromptPart:
    keys = {"features"} if "features" in prompt else {"audio", "sampling_rate"}
    unknown = _first_unknown(prompt, keys)
    if unknown is not None:
        raise RequestError(name, f"a mapping with {unknown!r} beside {' and '.join(sorted(keys))}", AUDIO_FORMS)
    for key in sorted(keys):
        if prompt.get(key) is None:
            raise RequestError(f"{name}.{key}", "is missing", AUDIO_FORMS)
    return PromptPart(name, audio=prompt)


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, Sequence) and len(value) == 0)


def _first_unknown(prompt: Mapping[str, Any], known: set[str]) -> str | None:
    return min((str(key) for key in prompt if key not in known), default=None)


MANY_PIECES = 256  # entries of `positions`, each of which may be as long as a sequence
MANY_WORDS = 100  # that may not appear in an answer: tokenising more of them takes its time


def takes_long(prompt: Prompt | None = None, suffix: Suffix = "", params: Any = None) -> bool:
    """RequestError: the prompt has an unknown form."""
    return _has_many_entries(params) or any(map(_takes_long_to_read, _parts_of(prompt, suffix)))


def has_media(prompt: Prompt | None = None, suffix: Suffix = "", params: Any = None) -> bool:
    """Whether images or videos are to be decoded. RequestError: the prompt has an unknown form."""
    return any(part.media is not None for part in _parts_of(prompt, suffix))


def _parts_of(prompt: Prompt | None, suffix: Suffix) -> list[PromptPart]:
    parts: list[PromptPart | None] = [parse_suffix(suffix)]
    if prompt is not None:
        parsed = parse_prompt(prompt)
        parts += [parsed.encoder, parsed.decoder] if isinstance(parsed, PromptPair) else [parsed]
    return [part for part in parts if part is not None]


def _takes_long_to_read(part: PromptPart) -> bool:
    is_large = part.audio is not None or part.media is not None or part.embeds is not None
    return is_large or (part.token_ids is None and _is_long(part.text))


def _has_many_entries(params: Any) -> bool:
    words, positions = getattr(params, "bad_words", None), getattr(params, "positions", None)
    if isinstance(words, list) and (len(words) > MANY_WORDS or any(map(_is_long, words))):
        return True
    return isinstance(positions, Sequence) and len(positions) > MANY_PIECES


def _is_long(text: Any) -> bool:
    return isinstance(text, str) and len(text) > LONG_TEXT
