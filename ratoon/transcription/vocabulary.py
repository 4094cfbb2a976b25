"""Whisper's languages and special tokens by their names, and the decoder prompts that they make up. Nothing here runs a
model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ratoon.core.config import ModelConfig
from ratoon.core.errors import RequestError
from ratoon.core.params import TimestampRules

if TYPE_CHECKING:
    from ratoon.models.tokenizer import Tokenizer


LANGUAGE_NAMES = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean",
    "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan",
    "nl": "dutch", "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi",
    "fi": "finnish", "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay",
    "cs": "czech", "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin",
    "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian",
    "lv": "latvian", "bn": "bengali", "sr": "serbian", "az": "azerbaijani", "sl": "slovenian", "kn": "kannada",
    "et": "estonian", "mk": "macedonian", "br": "breton", "eu": "basque", "is": "icelandic", "hy": "armenian",
    "ne": "nepali", "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian", "sw": "swahili",
    "gl": "galician", "mr": "marathi", "pa": "punjabi", "si": "sinhala", "km": "khmer", "sn": "shona",
    "yo": "yoruba", "so": "somali", "af": "afrikaans", "oc": "occitan", "ka": "georgian", "be": "belarusian",
    "tg": "tajik", "sd": "sindhi", "gu": "gujarati", "am": "amharic", "yi": "yiddish", "lo": "lao",
    "uz": "uzbek", "fo": "faroese", "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk",
    "mt": "maltese", "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan", "tl": "tagalog",
    "mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian", "ln": "lingala", "ha": "hausa",
    "ba": "bashkir", "jw": "javanese", "su": "sundanese", "yue": "cantonese",
}  # fmt: skip
LANGUAGE_CODES = {name: code for code, name in LANGUAGE_NAMES.items()} | {
    "burmese": "my", "valencian": "ca", "flemish": "nl", "haitian": "ht", "letzeburgesch": "lb", "pushto": "ps",
    "panjabi": "pa", "moldavian": "ro", "moldovan": "ro", "sinhalese": "si", "castilian": "es", "mandarin": "zh",
}  # fmt: skip


def language_name(code: str) -> str:
    return LANGUAGE_NAMES.get(code, code)


def language_code(language: str) -> str:
    """Returns the code of a language that is given by name, by code, or by its token. Other text is returned
    unchanged."""
    plain = language.strip().lower().removeprefix("<|").removesuffix("|>")
    return LANGUAGE_CODES.get(plain, plain)


TASKS = ("transcribe", "translate")
# English-only models have tokens of languages in their files, but were not trained on them. They are known by
# their vocabulary, which is one token smaller than that of the others.
ENGLISH_ONLY_VOCAB_SIZE = 51864
MAX_INITIAL_INDEX = 50  # a window's first timestamp is at one second at the latest, unless the model's files say else
SECONDS_OF_TIMESTAMP = 0.02
MEDIAN_WIDTH = 7  # positions over which weights are smoothed, unless the model's files say else
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
NO_SPEECH_NAMES = ("<|nospeech|>", "<|nocaptions|>")


@dataclass(frozen=True)
class SpeechVocabulary:
    """The tokens that matter. None: the model has no such token."""

    tokenizer: Tokenizer = field(repr=False)
    max_length: int  # of the decoder: prompt and text
    start: int
    end: int  # ids below it are text
    no_timestamps: int  # ids above it are timestamps
    previous: int | None  # stands before text that came earlier
    no_speech: int | None
    tasks: Mapping[str, int]  # empty for a model that only knows English
    languages: Mapping[str, int]  # by code; empty as well
    max_initial_index: int = MAX_INITIAL_INDEX
    # Heads of the decoder whose cross-attention follows the sound: (layer, head). Empty: the files name none.
    alignment_heads: tuple[tuple[int, int], ...] = ()
    median_width: int = MEDIAN_WIDTH

    has_timestamps: ClassVar[bool] = True
    only_language: ClassVar[str] = "en"  # of a model that is not multilingual

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    @property
    def max_text_tokens(self) -> int:
        """The most tokens of a window's text: half of what the decoder can hold, as in openai-whisper: more is never
        speech."""
        return self.max_length // 2

    def most_tokens_of(self, seconds: float) -> int:
        """The most tokens of the text of a window of so many seconds."""
        return self.max_text_tokens

    @cached_property
    def timestamp_rules(self) -> TimestampRules:
        return TimestampRules(
            first_token_id=self.first_timestamp,
            no_timestamps_token_id=self.no_timestamps,
            end_token_id=self.end,
            max_initial_index=self.max_initial_index,
        )

    def language_code(self, language: str) -> str:
        """RequestError for one that the model does not support."""
        code = language_code(language)
        if code in self.languages or (not self.is_multilingual and code == "en"):
            return code
        known = ", ".join(self.languages) or "en: the model supports no other"
        raise RequestError("language", f"{language[:64]!r} is not supported by the model", f"one of {known}")

    def verify_task(self, task: str) -> None:
        if task not in TASKS:
            raise RequestError("task", f"{task!r} is unknown", " or ".join(TASKS))
        if task == "translate" and task not in self.tasks:
            raise RequestError("task", "the model only supports English, and can't translate", "transcribe")

    def verify_words(self) -> None:
        if not self.alignment_heads:
            problem = "the model's generation_config.json names no alignment_heads, from which words get their times"
            raise RequestError("word_timestamps", problem, "another model, or leave it out")

    def verify_context(self, option: str) -> None:
        """RequestError, under the option's name, if the model reads no text that came before."""

    def prompt(self, language: str, task: str, timestamps: bool, previous: Sequence[int] = ()) -> list[int]:
        """What the decoder begins with. Of the text that came before, the end is what fits."""
        prompt = [*self.before_start(previous), self.start]
        if self.is_multilingual:
            prompt += [self.languages[language], self.tasks[task]]
        return prompt if timestamps else [*prompt, self.no_timestamps]

    def before_start(self, previous: Sequence[int]) -> list[int]:
        if not previous or self.previous is None:
            return []
        return [self.previous, *previous[-(self.max_length // 2 - 1) :]]

    def encode_text(self, text: str) -> list[int]:
        """A caller's prompt as text that came before."""
        token_ids = self.tokenizer.encode(" " + text.strip(), add_special_tokens=False) if text.strip() else []
        if any(token_id >= self.end for token_id in token_ids):
            raise RequestError("prompt", "contains a special token", "plain text")
        return token_ids

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Decodes tokens without timestamps and other special tokens."""
        return self.tokenizer.decode([token_id for token_id in token_ids if token_id < self.end])


def find_vocabulary(
    tokenizer: Tokenizer,
    config: ModelConfig,
    generation_config: Mapping[str, Any],  # what the model's file of this name holds
    max_model_len: int | None = None,  # of the engine; None: the model's
) -> SpeechVocabulary:
    """RequestError: the tokens are not Whisper's."""

    def find(*names: str) -> int | None:
        ids = (tokenizer.backend.token_to_id(name) for name in names)
        return next((token_id for token_id in ids if token_id is not None), None)

    start, end, no_timestamps = find("<|startoftranscript|>"), find("<|endoftext|>"), find("<|notimestamps|>")
    if start is None or end is None or no_timestamps is None:
        raise RequestError("model", "reads audio, but has other tokens than Whisper", "one of the Whisper family")
    tasks = {task: token_id for task in TASKS if (token_id := find(f"<|{task}|>")) is not None}
    languages = _find_languages(tokenizer, start, no_timestamps)
    if config.vocab_size == ENGLISH_ONLY_VOCAB_SIZE or len(tasks) < len(TASKS):
        tasks, languages = {}, {}
    index = generation_config.get("max_initial_timestamp_index")
    width = generation_config.get("median_filter_width")
    return SpeechVocabulary(
        tokenizer=tokenizer,
        max_length=config.max_position if max_model_len is None else max_model_len,
        start=start,
        end=end,
        no_timestamps=no_timestamps,
        previous=find("<|startofprev|>"),
        no_speech=find(*NO_SPEECH_NAMES),
        tasks=tasks if languages else {},
        languages=languages,
        max_initial_index=index if isinstance(index, int) and index >= 0 else MAX_INITIAL_INDEX,
        alignment_heads=_alignment_heads(generation_config.get("alignment_heads"), config),
        median_width=width if isinstance(width, int) and width > 0 and width % 2 else MEDIAN_WIDTH,
    )


def _alignment_heads(named: Any, config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """The heads that a file names; none, if one of them is not in the model."""
    pairs = named if isinstance(named, list) else []
    heads = []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and set(map(type, pair)) == {int}):
            return ()
        layer, head = pair
        if not (0 <= layer < config.num_layers and 0 <= head < config.num_heads):
            return ()
        heads.append((layer, head))
    return tuple(dict.fromkeys(heads))


def _find_languages(tokenizer: Tokenizer, start: int, no_timestamps: int) -> dict[str, int]:
    """Finds the tokens of languages by code, in their order: they stand between the start token and the timestamps."""
    found = {}
    for token_id in range(start + 1, no_timestamps):
        match = LANGUAGE.fullmatch(tokenizer.id_to_token(token_id) or "")
        if match:
            found[match[1]] = token_id
    return found


TOKENS_PER_SECOND = 13  # more is never speech: Moonshine's limit for the languages with the most tokens


class PlainVocabulary(SpeechVocabulary):
    """The vocabulary of Moonshine: a start token, and then text alone. The files do not say which language it is."""

    has_timestamps = False
    only_language = ""

    def most_tokens_of(self, seconds: float) -> int:
        return max(1, min(self.max_length - 1, int(TOKENS_PER_SECOND * seconds)))

    def language_code(self, language: str) -> str:
        return language_code(language)

    def verify_task(self, task: str) -> None:
        if task != "transcribe":
            raise RequestError("task", f"the model does not {task}", "transcribe")

    def verify_words(self) -> None:
        raise RequestError("word_timestamps", "the model has no timestamps", "a model of the Whisper family")

    def verify_context(self, option: str) -> None:
        raise RequestError(option, "the model reads no text before the recording", "leave it out")

    def prompt(self, language: str, task: str, timestamps: bool, previous: Sequence[int] = ()) -> list[int]:
        return [self.start]

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text with a space before its first word, as Whisper's texts have one, so that texts can be
        joined."""
        text = self.tokenizer.decode([token_id for token_id in token_ids if token_id != self.end]).strip()
        return f" {text}" if text else ""


def plain_vocabulary(tokenizer: Tokenizer, config: ModelConfig, max_model_len: int | None = None) -> PlainVocabulary:
    """The vocabulary of a model whose decoder has a start token and an end token, and no other of Whisper's."""
    start, ends = config.decoder_start_token_id, config.eos_token_ids
    if start is None or not ends:
        raise RequestError("model", "has no start token, or no end token", "one of the Moonshine family")
    return PlainVocabulary(
        tokenizer=tokenizer,
        max_length=config.max_position if max_model_len is None else max_model_len,
        start=start,
        end=ends[0],
        no_timestamps=config.vocab_size,
        previous=None,
        no_speech=None,
        tasks={},
        languages={},
    )
