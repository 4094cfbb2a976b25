"""Adapters in PEFT's form: a folder with adapter_config.json and adapter_model.safetensors.

The tensors say what is adapted and by which rank; of the config only what scales them is needed. What the config asks
for beyond that, and is not done here, is refused: the adapter would act in another way than it was trained to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.core.errors import ModelError
from ratoon.models.adapter_parts import LowRankPart
from ratoon.models.config_fields import ConfigFields
from ratoon.models.damage import FETCH_AGAIN, reading, show
from ratoon.models.safetensors_source import DTYPE_NAMES, FLOATING_BYTES, HeaderEntry, read_header
from ratoon.models.tokenizer import read_json

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
MATRICES = {"lora_A": 0, "lora_B": 1}
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERN = 200  # characters
MOST_REPEATS = 3  # in a pattern: more would take too long to match
CHANGES_BASE = ("pissa", "olora", "loftq", "corda")  # ways to begin that change the weights of the model as well

# Fields by which PEFT computes something else, and the values without which it does not.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}


class PEFTAdapter:
    """Implements AdapterFile."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.config = ConfigFields(_read_config(folder), str(folder / CONFIG_FILE))
        self._file = find_weights(folder)
        self._data: bytearray | None = None  # of the file, from the first tensor on
        self._verify_config()
        self._matrices: dict[str, list[HeaderEntry | None]] = {}  # a and b, by the layer
        self._tables: set[str] = set()  # those of the layers that are tables
        self._saved: dict[str, HeaderEntry] = {}
        self.saved: dict[str, tuple[int, ...]] = {}
        for name, entry in read_header(self._file).items():
            self._sort(name, entry)
        self.parts = {layer: self._part(layer, *pair) for layer, pair in self._matrices.items()}
        if not self.parts and not self.saved:
            raise ModelError(self.name, f"has no tensors lora_A and lora_B in {WEIGHTS_FILE}", FETCH_AGAIN)

    def read(self, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self._matrices[layer]
        assert a is not None and b is not None
        found = self._read(a), self._read(b)
        return (found[0].t(), found[1].t()) if layer in self._tables else found

    def read_saved(self, layer: str) -> torch.Tensor:
        return self._read(self._saved[layer])

    def _read(self, entry: HeaderEntry) -> torch.Tensor:
        """The tensor, in memory that the whole file is read to at once: an adapter has hundreds of small ones, and the
        file may be replaced while it is read, which would end a process that has it mapped."""
        import torch

        with reading(str(self._file)):
            if self._data is None:
                self._data = bytearray(self._file.stat().st_size)
                with self._file.open("rb") as stream:
                    stream.readinto(self._data)
            dtype = getattr(torch, {"F64": "float64", **DTYPE_NAMES}[entry.dtype])
            numbers = torch.frombuffer(self._data, dtype=dtype, count=math.prod(entry.shape), offset=entry.offset)
            return numbers.view(entry.shape)

    # ---- the config ----

    def _verify_config(self) -> None:
        config = self.config
        kind = config.raw.get("peft_type")
        if kind != "LORA":
            raise config.wrong("peft_type", f"is {show(kind)}", "LORA: other kinds of adapters are not supported")
        for field, allowed in UNSUPPORTED.items():
            value = config.raw.get(field)
            if value not in allowed:
                raise config.wrong(field, f"is {show(value)}, which is not supported", f"{show(allowed[0])}")
        begin = config.raw.get("init_lora_weights")
        if isinstance(begin, str) and begin.startswith(CHANGES_BASE):
            problem = f"is {show(begin)}, which changes the model's own weights too"
            raise config.wrong(
                "init_lora_weights", problem, "an adapter that PEFT has converted to LoRA when saving it"
            )
        self._alpha = config.number("lora_alpha")
        config.count("r")
        self._is_rank_stable = config.flag("use_rslora", False)
        self._may_be_transposed = config.flag("fan_in_fan_out", False)
        self._alphas = self._patterns("alpha_pattern")
        targets, saved = config.raw.get("target_modules"), config.raw.get("modules_to_save")
        if targets is not None and not isinstance(targets, (str, list)):
            raise config.wrong("target_modules", f"is {show(targets)}", "a list of names, or a pattern")
        if saved is not None and not (isinstance(saved, list) and all(isinstance(name, str) for name in saved)):
            raise config.wrong("modules_to_save", f"is {show(saved)}", "a list of names")
        self._modules_to_save: list[str] = saved or []

    def _patterns(self, field: str) -> list[tuple[re.Pattern[str], float]]:
        """The numbers of layers that differ from the others, by PEFT's rule: a pattern matches the end of a layer's
        name, from a dot on."""
        given = self.config.raw.get(field) or {}
        if not isinstance(given, dict):
            raise self.config.wrong(field, f"is {show(given)}", "an object of numbers by the names of layers")
        found = []
        for pattern in given:
            numbers = ConfigFields(given, self.config.source, f"{field}.")
            if not is_brief_pattern(pattern):
                expected = f"names of layers, or patterns of at most {MAX_PATTERN} characters that repeat little"
                raise self.config.wrong(field, f"has the pattern {show(pattern)}", expected)
            found.append((re.compile(rf"(.*\.)?({pattern})$"), numbers.number(pattern)))
        return found

    def _alpha_of(self, layer: str) -> float:
        return next((alpha for pattern, alpha in self._alphas if pattern.match(layer)), self._alpha)

    # ---- the tensors ----

    def _sort(self, name: str, entry: HeaderEntry) -> None:
        own = name.removeprefix(PREFIX)
        if entry.dtype not in FLOATING_BYTES:
            raise ModelError(
                str(self._file), f"tensor {show(name)} is stored as {entry.dtype}", ", ".join(FLOATING_BYTES)
            )
        match = re.fullmatch(r"(.+)\.(lora_[AB])(?:\.default)?\.weight", own)
        if match is not None:
            place = MATRICES[match[2]]
            self._matrices.setdefault(match[1], [None, None])[place] = entry
            return
        match = re.fullmatch(r"(.+)\.lora_embedding_([AB])(?:\.default)?", own)
        if match is not None:  # of a table [V, H], whose change is Aᵀ · Bᵀ: the other way round than a layer's
            self._tables.add(match[1])
            self._matrices.setdefault(match[1], [None, None])[match[2] == "A"] = entry
            return
        match = re.fullmatch(r"(.+?)(?:\.modules_to_save(?:\.default)?)?\.weight", own)
        layer = "" if match is None else match[1]
        if layer.endswith(".base_layer"):  # of a head that is adapted, for vocabularies that were resized
            return
        if match is not None and any(layer == saved or layer.endswith(f".{saved}") for saved in self._modules_to_save):
            self.saved[layer] = entry.shape
            self._saved[layer] = entry
            return
        if match is not None and layer.rsplit(".", 1)[-1] in ("embed_tokens", "lm_head"):
            return  # copies of the model's own, which PEFT saves beside an adapter of the head
        raise ModelError(self.name, f"has the tensor {show(name)}, whose meaning is unknown", "lora_A and lora_B alone")

    def _part(self, layer: str, a: HeaderEntry | None, b: HeaderEntry | None) -> LowRankPart:
        if a is None or b is None:
            raise ModelError(self.name, f"has one of lora_A and lora_B for {show(layer)}", "both")
        shapes = (a.shape[::-1], b.shape[::-1]) if layer in self._tables else (a.shape, b.shape)
        part = LowRankPart.of_shapes(self.name, layer, *shapes, self._alpha_of(layer), self._is_rank_stable)
        return part._replace(may_be_transposed=self._may_be_transposed)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ModelError(
            str(folder), f"has no {CONFIG_FILE}", f"a folder that PEFT has saved: {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(str(file), f"has {file.stat().st_size:,} bytes", f"at most {MAX_CONFIG_BYTES:,}")
    return read_json(file)


def find_weights(folder: Path) -> Path:
    """Returns the file of the tensors. Pickles are never opened."""
    file = folder / WEIGHTS_FILE
    if file.is_file():
        return file
    pickled = next((path.name for path in sorted(folder.glob("*.bin"))), None)
    if pickled is not None:
        problem = f"has {pickled}, a pickle, which is never opened"
        raise ModelError(str(folder), problem, f"{WEIGHTS_FILE}: save it again with safe_serialization=True")
    raise ModelError(
        str(folder), f"has no {WEIGHTS_FILE}", f"a folder that PEFT has saved: {CONFIG_FILE} and {WEIGHTS_FILE}"
    )


def is_brief_pattern(pattern: str) -> bool:
    """Whether a pattern of a file can be matched in little time: it is short, repeats few things, and repeats nothing
    that repeats."""
    if len(pattern) > MAX_PATTERN or re.search(r"\)[*+?{]|\\[1-9]|\(\?", pattern):
        return False
    if len(re.findall(r"[*+{]", pattern)) > MOST_REPEATS:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
