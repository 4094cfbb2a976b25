"""A GGUF file as a model source: tensors under Hugging Face names and shapes, and its config (gguf_config.py).

What llama.cpp's converter did to the tensors (reordered query and key rows, transposed GPT-2 weights, norms of Gemma
plus 1, decays of states without their logarithm) is undone here. Names are in gguf_names.py. The bytes are read by
gguf_file.py, the tokenizer is built by gguf_tokenizer.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.core.errors import ModelError
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.models.damage import show
from ratoon.models.gguf_config import KEY_VALUE_HEADS, LONGROPE_FACTORS, ROPE_FACTORS, GGUFConfig
from ratoon.models.gguf_file import GGUFFile
from ratoon.models.gguf_names import (
    ARCHITECTURES,
    FALCON_TWO_NORMS,
    LLAMA_NAMES,
    NAMES,
    T5_PLAIN_UP,
    WITH_IMAGES,
    hugging_face_name,
)

if TYPE_CHECKING:
    import torch

    from ratoon.layers.weights import Destination

KEYS_OF_LATENT, VALUES_OF_LATENT = ".attn_k_b.weight", ".attn_v_b.weight"  # the two halves of kv_b_proj
PERMUTED = ("llama", "mistral3", "granite", "granitehybrid", "smollm3")  # whose rows of queries and keys are reordered
BY_KV_HEAD = ("gptneox", "falcon")  # whose fused rows it has as all queries, all keys, all values
# Hugging Face's GPT-2 keeps these as [in, out]; GGUF files have all weights as [out, in].
GPT2_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

ONE_OUTPUT = ".ffn_gate_inp_shexp.weight"  # a weight [1, in], which files have without its first dimension
POSITIONS = "position_embd.weight"  # of RoBERTa without the first rows, which no text uses
# Parameters of states: convolutions [channels, 1, width] without the dimension between, the others as matrices
STATE_CONV, STATE_DECAY = ".ssm_conv1d.weight", ".ssm_a"
STATE_VECTORS = (STATE_DECAY, ".ssm_d", ".ssm_norm.weight")


class GGUFSource:
    """Implements TensorSource, and has the model's config (`raw_config`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.file = GGUFFile(path)
        self.metadata = self.file.metadata
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(self.name, "is one part of a split model", "join the parts with llama-gguf-split --merge")
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture in WITH_IMAGES:
            problem = f"is a GGUF file of a model that reads images ({self.architecture})"
            raise ModelError(self.name, problem, "the model's Hugging Face folder, with safetensors files")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            problem = f"has the unknown architecture {show(self.architecture)}"
            raise ModelError(self.name, problem, f"known in GGUF: {known}")
        self.fields = GGUFConfig(self.file, self.name, self.architecture)
        own = {ROPE_FACTORS, *LONGROPE_FACTORS.values()}  # of the rotation: no layer takes them
        self._gguf_names = {
            self._hugging_face_name(name): name
            for name in self.file.tensors
            if name not in own and not self._is_second_half(name)
        }
        self._shapes = {name: self._shape(name) for name in self._gguf_names}
        self.raw_config = self.fields.build()
        self.pooling = self.fields.pooling()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        gguf_name = self._gguf_names[name]
        if self._is_transposed(name):
            return self.file.read(gguf_name, None if part is None else part._replace(dim=1 - part.dim)).t()
        if self.architecture in BY_KV_HEAD and ".attn_qkv." in gguf_name:
            return self._read_by_kv_head(name, gguf_name, part)
        if gguf_name == POSITIONS and self.fields.num_unused_positions:
            return StoredTensor.of_floats(self._with_unused_rows(gguf_name), part)
        if gguf_name.endswith((STATE_CONV, *STATE_VECTORS)):
            return StoredTensor.of_floats(self._read_of_state(gguf_name).view(self._shapes[name]), part)
        if gguf_name.endswith(ONE_OUTPUT):
            return StoredTensor.of_floats(self.file.read(gguf_name).floats().view(self._shapes[name]), part)
        if gguf_name.endswith(KEYS_OF_LATENT):
            return StoredTensor.of_floats(self._join_latent(gguf_name), part)
        stored = self.file.read(gguf_name, part)
        if self.architecture in ("gemma2", "gemma3") and gguf_name.endswith("norm.weight"):
            return StoredTensor.of_floats(stored.floats() - 1.0)  # the converter added what Gemma adds to its weights
        heads = self._permuted_heads(gguf_name)
        if not heads:
            return stored
        # Rows are reordered while they are still quantised, which is cheaper: a row is whole blocks.
        head_dim = self._shapes[name][0] // heads
        assert part is None or part.dim or part.start % head_dim == part.stop % head_dim == 0, "rows of whole heads"
        return replace(stored, data=restore_rotary_halves(stored.data, head_dim))

    def _read_by_kv_head(self, name: str, gguf_name: str, part: TensorSlice | None) -> StoredTensor:
        """Rows as the checkpoint has them: for each KV head its queries, its key and its value. A range of whole heads
        that are neighbours in the file, too, is read alone."""
        heads = self.fields.whole("attention.head_count")
        kv_heads = self.fields.whole(KEY_VALUE_HEADS, heads)
        group, rows = heads // kv_heads, self._shapes[name][0]
        dim = rows // (heads + 2 * kv_heads)
        places = [
            heads + (index - group) * kv_heads + kv_head if index >= group else kv_head * group + index
            for kv_head in range(kv_heads)
            for index in range(group + 2)
        ]
        own = range(rows) if part is None or part.dim else range(part.start, part.stop)
        order = [places[row // dim] * dim + row % dim for row in own]
        if order == list(range(order[0], order[0] + len(order))) and (part is None or not part.dim):
            return self.file.read(gguf_name, TensorSlice.of_range(0, range(order[0], order[-1] + 1), rows))
        return self.file.read(gguf_name, part if part is not None and part.dim else None).with_rows(order)

    def _with_unused_rows(self, gguf_name: str) -> torch.Tensor:
        from torch.nn import functional

        return functional.pad(self.file.read(gguf_name).floats(), (0, 0, self.fields.num_unused_positions, 0))

    def _read_of_state(self, gguf_name: str) -> torch.Tensor:
        numbers = self.file.read(gguf_name).floats()
        if not gguf_name.endswith(STATE_DECAY):
            return numbers
        if not bool((numbers <= 0).all()):
            raise ModelError(self.name, f"has decays above 0 in {gguf_name}", "convert the model again")
        return (-numbers).log()

    def _is_second_half(self, gguf_name: str) -> bool:
        """Whether a tensor is read together with another one."""
        keys = gguf_name.replace(VALUES_OF_LATENT, KEYS_OF_LATENT)
        return self.architecture == "deepseek2" and keys != gguf_name and keys in self.file.tensors

    def _join_latent(self, gguf_name: str) -> torch.Tensor:
        """The rows of kv_b_proj: for each head those of its key, which newer files have transposed and apart, and those
        of its value."""
        import torch

        keys = self.file.read(gguf_name).floats()  # [heads, kv_rank, nope]
        values = self.file.read(gguf_name.replace(KEYS_OF_LATENT, VALUES_OF_LATENT)).floats()  # [heads, value, kv_rank]
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)

    def _hugging_face_name(self, gguf_name: str) -> str:
        """An unknown tensor keeps its name, so that strict loading can report it."""
        names = NAMES.get(self.architecture, LLAMA_NAMES)
        if self.architecture == "falcon" and "blk.0.attn_norm_2.weight" in self.file.tensors:
            names = {**names, **FALCON_TWO_NORMS}
        if self.architecture == "t5" and "enc.blk.0.ffn_gate.weight" not in self.file.tensors:
            names = {**names, **T5_PLAIN_UP}
        return hugging_face_name(names, gguf_name) or gguf_name

    def _is_transposed(self, name: str) -> bool:
        return self.architecture == "gpt2" and name.endswith(GPT2_TRANSPOSED)

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.file.tensors[self._gguf_names[name]].shape
        if self._gguf_names[name].endswith(KEYS_OF_LATENT):
            values = self.file.tensors.get(self._gguf_names[name].replace(KEYS_OF_LATENT, VALUES_OF_LATENT))
            if values is None or len(shape) != 3 or len(values.shape) != 3:
                raise ModelError(self.name, f"lacks the other half of {self._gguf_names[name]}", "convert it again")
            return (shape[0] * (shape[2] + values.shape[1]), shape[1])
        if self._gguf_names[name] == POSITIONS and len(shape) == 2:
            return (shape[0] + self.fields.num_unused_positions, shape[1])
        if self._gguf_names[name].endswith(STATE_VECTORS):
            return (math.prod(shape),)
        if self._gguf_names[name].endswith(STATE_CONV) and len(shape) == 2:
            return (shape[0], 1, shape[1])
        if self._gguf_names[name].endswith(ONE_OUTPUT) and len(shape) == 1:
            return (1, *shape)
        return shape[::-1] if self._is_transposed(name) else shape

    def _permuted_heads(self, gguf_name: str) -> int:
        """How many heads the rows of this tensor were reordered by; 0: they were not."""
        if self.architecture not in PERMUTED:
            return 0
        if re.search(r"\.attn_q\.(weight|bias)$", gguf_name):
            return self.fields.whole("attention.head_count")
        if re.search(r"\.attn_k\.(weight|bias)$", gguf_name):
            return self.fields.whole(KEY_VALUE_HEADS, self.fields.whole("attention.head_count"))
        return 0


def restore_rotary_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """llama.cpp has the two coordinates of a rotation side by side, Hugging Face all first ones, then all second."""
    return rows.reshape(-1, head_dim // 2, 2, rows[0].numel()).transpose(1, 2).reshape(rows.shape)
