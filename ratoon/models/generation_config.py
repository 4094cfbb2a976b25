"""Generation defaults of a model's files: generation_config.json, or, without one, the same keys of config.json.

Pure: supported keys become defaults. Keys that would change answers in transformers, and that are not obeyed here, are
refused by name. engine/input/default_params.py applies the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError, RequestError
from ratoon.core.params import MAX_FORCED_TOKENS, MAX_NGRAM_SIZE, SamplingParams
from ratoon.models.config_fields import LARGEST, LARGEST_NUMBER, ConfigFields
from ratoon.models.damage import show

NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "max_new_tokens",
    "length_penalty",
)
SAMPLING_NAMES = {"max_new_tokens": "max_tokens"}  # where SamplingParams has another name
COUNTS = ("max_length", "min_length", "min_new_tokens", "num_beams")
NGRAM_SIZES = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
# transformers' defaults, if there is only a config.json without the key.
FORCED_EOS_OF_FAMILIES = {
    "BartForConditionalGeneration": 2,
    "MBartForConditionalGeneration": 2,
    "MarianMTModel": 0,
}

Raw = Mapping[str, Any]


def generation_fields(raw_generation: Raw, raw_config: Raw, config: ModelConfig) -> dict[str, Any]:
    """The keys that apply: only those of generation_config.json, if there is one."""
    if raw_generation:
        return dict(raw_generation)
    known = {*NUMBERS, *COUNTS, *NGRAM_SIZES, *REFUSED, "do_sample", "early_stopping", "forced_eos_token_id"}
    known |= {"bad_words_ids", "suppress_tokens", "begin_suppress_tokens"}
    found = {name: raw_config[name] for name in known if raw_config.get(name) is not None}
    forced_eos = FORCED_EOS_OF_FAMILIES.get(config.architecture)
    if forced_eos is not None and "forced_eos_token_id" not in raw_config:
        found["forced_eos_token_id"] = forced_eos
    return found


def read_generation_defaults(raw: Raw, config: ModelConfig, source: str) -> dict[str, Any]:
    """Returns the defaults that the file sets, under transformers' names. ModelError for a value of the wrong kind, and
    for keys that change answers there and are not obeyed here."""
    fields = ConfigFields(raw, source)
    _refuse(raw, config, source)
    values: dict[str, Any] = {name: _number(fields, name) for name in NUMBERS}
    values |= {name: _count(fields, name) for name in COUNTS}
    values |= {"early_stopping": _early_stopping(fields), "bad_words_ids": _long_bad_words(fields, config) or None}
    for name in NGRAM_SIZES:
        values[name] = _count(fields, name) or None
        if (values[name] or 0) > MAX_NGRAM_SIZE:
            raise fields.wrong(name, f"is {values[name]}", f"at most {MAX_NGRAM_SIZE}")
    if _reads_audio(config):  # nor in transformers
        values["encoder_no_repeat_ngram_size"] = None
    forced_eos = [token for token in fields.token_ids("forced_eos_token_id") if token < config.vocab_size]
    values["forced_eos_token_id"] = forced_eos[:MAX_FORCED_TOKENS] or None
    # The file's temperature applies once sampling is on, which is not transformers' default. A model with an encoder
    # (translation, summaries, speech) is greedy by default; for others a file without do_sample decides nothing.
    if raw.get("do_sample") is False or (config.encoder is not None and not _samples(raw)):
        values["temperature"] = 0.0
    if not _samples(raw):
        values["typical_p"] = None  # as in transformers, where only sampling has it
    values["eos_token_ids"] = fields.token_ids("eos_token_id") or None
    return {name: value for name, value in values.items() if value is not None}


def _refuse(raw: Raw, config: ModelConfig, source: str) -> None:
    """ModelError that names every key of the file that is not obeyed, and what it asks for."""
    found = [name for name, (_, has_effect) in REFUSED.items() if _is_set(raw, name) and has_effect(raw, config)]
    if not found:
        return
    named = ", ".join(f"{name} ({REFUSED[name][0]})" for name in found)
    without = json.dumps(dict.fromkeys(found))
    if source.endswith("generation_config.json"):
        without = f'{{"generation_config": {without}}}'
    problem = f"sets {named}, which changes answers in transformers and is not supported here"
    raise ModelError(source, problem, f"files without it, or leave it out: hf_overrides={without}")


def _number(fields: ConfigFields, name: str) -> int | float | None:
    value = fields.raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST_NUMBER:
        raise fields.wrong(name, f"is {show(value)}", "a number")
    parameter = SAMPLING_NAMES.get(name, name)
    if parameter in SamplingParams.__struct_fields__:  # otherwise requests with the default would be refused
        given: dict[str, Any] = {parameter: value}
        try:
            SamplingParams(**given).verify()
        except RequestError as error:
            raise fields.wrong(name, f"is {show(value)}", error.expected.removeprefix("expected ")) from error
    return value


def _count(fields: ConfigFields, name: str) -> int | None:
    value = fields.raw.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST):
        raise fields.wrong(name, f"is {show(value)}", f"a whole number from 0 to {LARGEST}")
    return value


def _early_stopping(fields: ConfigFields) -> Any:
    value = fields.raw.get("early_stopping")
    if value is not None and not isinstance(value, bool) and value != "never":
        raise fields.wrong("early_stopping", f"is {show(value)}", 'true, false or "never"')
    return value


def _long_bad_words(fields: ConfigFields, config: ModelConfig) -> list[list[int]]:
    """Returns the bad words of several tokens; the others are suppressed tokens. Lists may name tokens outside the
    vocabulary, which are ignored."""
    words = bad_words(fields)
    return [word for word in words if len(word) > 1 and max(word) < config.vocab_size]


def bad_words(fields: ConfigFields) -> list[list[int]]:
    words = fields.raw.get("bad_words_ids") or []
    is_right = isinstance(words, list) and all(
        isinstance(word, list) and set(map(type, word)) <= {int} for word in words
    )
    if not is_right or any(token < 0 for word in words for token in word):
        raise fields.wrong("bad_words_ids", "is not a list of lists of token ids", "a list of lists of token ids")
    return words


def _samples(raw: Raw) -> bool:
    return raw.get("do_sample") is True


def _reads_audio(config: ModelConfig) -> bool:
    return config.encoder is not None and config.encoder.num_mel_bins is not None


def _is_set(raw: Raw, name: str) -> bool:
    return raw.get(name) not in (None, False, [], {})


def _above(name: str, limit: float) -> Callable[[Raw, ModelConfig], bool]:
    return lambda raw, _: not isinstance(raw[name], (int, float)) or raw[name] > limit


def _differs(name: str, neutral: float) -> Callable[[Raw, ModelConfig], bool]:
    return lambda raw, _: raw[name] != neutral


def _always(raw: Raw, config: ModelConfig) -> bool:
    return True


def _when_sampling(raw: Raw, config: ModelConfig) -> bool:
    return _samples(raw)


def _searches(raw: Raw) -> bool:
    return isinstance(raw.get("num_beams"), int) and raw["num_beams"] > 1 and not _samples(raw)


# Keys of transformers that change answers and are not obeyed here: what they ask for, and when they do so.
REFUSED: dict[str, tuple[str, Callable[[Raw, ModelConfig], bool]]] = {
    "penalty_alpha": ("contrastive search", _above("penalty_alpha", 0)),
    "dola_layers": ("decoding by contrasting layers", _always),
    "num_beam_groups": ("groups of beams that differ", _above("num_beam_groups", 1)),
    "diversity_penalty": ("groups of beams that differ", _differs("diversity_penalty", 0)),
    "constraints": ("a beam search under constraints", _always),
    "force_words_ids": ("words that a beam search must contain", _always),
    "num_beams": ("beams that are sampled", lambda raw, _: _samples(raw) and _above("num_beams", 1)(raw, _)),
    "num_return_sequences": ("several answers to each prompt", _above("num_return_sequences", 1)),
    "encoder_repetition_penalty": ("a penalty by the encoder's tokens", _differs("encoder_repetition_penalty", 1)),
    "exponential_decay_length_penalty": ("an end that becomes more probable", _always),
    "sequence_bias": ("a bias of token sequences", _always),
    "guidance_scale": ("guidance by a second prompt", _differs("guidance_scale", 1)),
    "epsilon_cutoff": ("epsilon sampling", lambda raw, _: _samples(raw) and raw["epsilon_cutoff"] != 0),
    "eta_cutoff": ("eta sampling", lambda raw, _: _samples(raw) and raw["eta_cutoff"] != 0),
    "top_h": ("top-H sampling", _when_sampling),
    "renormalize_logits": ("scores of beams that are normalised again", lambda raw, _: _searches(raw)),
    "watermarking_config": ("watermarks", _always),
    "token_healing": ("token healing", _always),
    "stop_strings": ("stop strings; a request has them as stop", _always),
    "max_time": ("a limit of seconds", _always),
    # For speech models, language and task are the request's.
    "forced_decoder_ids": ("forced tokens", lambda raw, config: not _reads_audio(config)),
    "forced_bos_token_id": ("a forced first token", lambda raw, config: config.encoder is None),
}
