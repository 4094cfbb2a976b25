"""Models of a known shape with random weights, the same numbers in every engine's form: a Hugging Face folder in
float32, and GGUF files in Q4_0 and Q4_1. Only their speed means something.

The numbers are drawn as 4-bit codes with one scale, so that both formats and float32 hold exactly the same ones. The
vocabulary's table is in Q8_0, as in files that llama.cpp's own quantiser makes of these shapes. Needs no network.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from export_hf import CACHE_FOLDER, write_json

if TYPE_CHECKING:
    import torch

SEED = 0
FORMATS = ("Q4_0", "Q4_1")
BLOCK = 32
WEIGHT_STEP = 2.0**-8  # uniform codes from -8 to 7 have a deviation of 4.6: weights of about 0.018
TABLE_STEP = 2.0**-12  # the same with codes of 8 bits
LAST_NORM_STD = 3.0
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    },
    # Two of the 48 layers of Qwen3-30B-A3B, with a smaller vocabulary: 1.3 billion weights, five gigabytes in float32
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    },
    # Three of the 27 layers of DeepSeek-V2-Lite, the first dense, and a smaller vocabulary: 1.3 billion weights
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 32768,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "routed_scaling_factor": 1.0,
        "norm_topk_prob": False, "topk_method": "greedy", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    # Six of the 34 layers of Gemma 3 4B, five of which have a window, and a smaller vocabulary: 650 million weights
    "gemma3-4b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 32768, "hidden_size": 2560,
        "intermediate_size": 10240, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    },
    "tiny-windows": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    },
    "tiny-latent": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 512,
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 64, "q_lora_rank": None,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "routed_scaling_factor": 1.0,
        "norm_topk_prob": False, "topk_method": "greedy", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    "tiny-experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    },
}  # fmt: skip
COMMON = {
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 1,
    "eos_token_id": 2, "rope_scaling": None, "dtype": "float32",
}  # fmt: skip


class RandomModel(NamedTuple):
    folder: Path  # of Hugging Face's form
    files: dict[str, Path]  # GGUF, by format


class Tensor(NamedTuple):
    """A matrix of codes (int8: from -8 to 7, or 8 bits wide for the vocabulary's table), those of the experts of a
    layer [experts, out, in], or the floats of a norm or a router."""

    name: str  # in the folder; with {} where the number of an expert goes
    gguf_name: str
    data: torch.Tensor
    num_rotated_heads: int = 0  # rows of queries and keys, which llama.cpp keeps in another order
    split: tuple[int, int] | None = None  # heads, rows of a key: llama.cpp has those transposed, values apart


def make_random_model(shape: str, formats: tuple[str, ...] = FORMATS) -> RandomModel:
    """Each file appears in one moment and complete, or not at all; what is there is kept."""
    config = {**SHAPES[shape], **COMMON}
    name = _random_name(shape, [config, SEED, WEIGHT_STEP, TABLE_STEP, LAST_NORM_STD])
    CACHE_FOLDER.mkdir(parents=True, exist_ok=True)
    folder = CACHE_FOLDER / f"{name}-hf"
    files = {one: CACHE_FOLDER / f"{name}-{one}.gguf" for one in formats}
    if not (folder / "config.json").is_file():
        _write_folder(config, folder)
    for one, path in files.items():
        if not path.exists():
            _write_gguf(config, one, path)
    return RandomModel(folder, files)


def _random_name(shape: str, recipe: list[Any]) -> str:
    """Returns the name under which a model is kept: another recipe makes another one."""
    return f"{shape}-random-{hashlib.blake2b(json.dumps(recipe).encode(), digest_size=4).hexdigest()}"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Gives a folder to write to, which takes its name when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(folder)


def _tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    """Always the same numbers, in the same order."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    is_latent = config["model_type"] == "deepseek_v2"
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config.get("head_dim", 0)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    is_gemma = config["model_type"] == "gemma3_text"  # which adds one to the weights of norms, and has four in a layer
    has_head_norms = is_gemma or config["model_type"] in ("qwen3", "qwen3_moe")
    num_experts = config.get("num_experts", config.get("n_routed_experts", 0))

    def matrix(name: str, gguf_name: str, rows: int, inputs: int, num_rotated_heads: int = 0) -> Tensor:
        codes = torch.randint(-8, 8, (rows, inputs), generator=generator, dtype=torch.int8)
        return Tensor(f"{name}.weight", f"{gguf_name}.weight", codes, num_rotated_heads)

    def norm(name: str, gguf_name: str, size: int = hidden) -> Tensor:
        weights = torch.zeros(size) if is_gemma else torch.ones(size)
        return Tensor(f"{name}.weight", f"{gguf_name}.weight", weights)

    shape = (config["vocab_size"], hidden)
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int16).to(torch.int8)
    yield Tensor("model.embed_tokens.weight", "token_embd.weight", codes)
    for index in range(config["num_hidden_layers"]):
        layer, block = f"model.layers.{index}", f"blk.{index}"
        permuted = config["model_type"] == "llama"
        yield norm(f"{layer}.input_layernorm", f"{block}.attn_norm")
        if is_latent:
            attention, rank = f"{layer}.self_attn", config["kv_lora_rank"]
            rope, nope, value = (config[f"{name}_head_dim"] for name in ("qk_rope", "qk_nope", "v"))
            yield matrix(f"{attention}.q_proj", f"{block}.attn_q", heads * (nope + rope), hidden)
            yield matrix(f"{attention}.kv_a_proj_with_mqa", f"{block}.attn_kv_a_mqa", rank + rope, hidden)
            yield norm(f"{attention}.kv_a_layernorm", f"{block}.attn_kv_a_norm", rank)
            joined = matrix(f"{attention}.kv_b_proj", f"{block}.attn_kv_b", heads * (nope + value), rank)
            yield joined._replace(split=(heads, nope))
            yield matrix(f"{attention}.o_proj", f"{block}.attn_output", hidden, heads * value)
        for part, count in () if is_latent else (("q", heads), ("k", kv_heads)):
            rotated = count if permuted else 0
            yield matrix(f"{layer}.self_attn.{part}_proj", f"{block}.attn_{part}", count * head_dim, hidden, rotated)
            if has_head_norms:
                yield norm(f"{layer}.self_attn.{part}_norm", f"{block}.attn_{part}_norm", head_dim)
        if not is_latent:
            yield matrix(f"{layer}.self_attn.v_proj", f"{block}.attn_v", kv_heads * head_dim, hidden)
            yield matrix(f"{layer}.self_attn.o_proj", f"{block}.attn_output", hidden, heads * head_dim)
        if is_gemma:
            yield norm(f"{layer}.post_attention_layernorm", f"{block}.post_attention_norm")
            yield norm(f"{layer}.pre_feedforward_layernorm", f"{block}.ffn_norm")
            yield norm(f"{layer}.post_feedforward_layernorm", f"{block}.post_ffw_norm")
        else:
            yield norm(f"{layer}.post_attention_layernorm", f"{block}.ffn_norm")
        if num_experts and index >= config.get("first_k_dense_replace", 0):
            router = torch.randn(num_experts, hidden, generator=generator).mul_(0.02)
            yield Tensor(f"{layer}.mlp.gate.weight", f"{block}.ffn_gate_inp.weight", router)
            own = config["moe_intermediate_size"]
            for part, rows, inputs in (("gate", own, hidden), ("up", own, hidden), ("down", hidden, own)):
                codes = torch.randint(-8, 8, (num_experts, rows, inputs), generator=generator, dtype=torch.int8)
                names = f"{layer}.mlp.experts.{{}}.{part}_proj.weight", f"{block}.ffn_{part}_exps.weight"
                yield Tensor(*names, codes)
            shared = own * config.get("n_shared_experts", 0)
            for part, rows, inputs in (("gate", shared, hidden), ("up", shared, hidden), ("down", hidden, shared)):
                if shared:
                    yield matrix(f"{layer}.mlp.shared_experts.{part}_proj", f"{block}.ffn_{part}_shexp", rows, inputs)
            continue
        for part in ("gate", "up"):
            yield matrix(f"{layer}.mlp.{part}_proj", f"{block}.ffn_{part}", inner, hidden)
        yield matrix(f"{layer}.mlp.down_proj", f"{block}.ffn_down", hidden, inner)
    # Head and embedding are one: with a norm of ones, every token would be followed by itself.
    last_norm = LAST_NORM_STD * torch.randn(hidden, generator=generator)
    if is_gemma:
        last_norm = last_norm.mul(1024).round().div(1024)  # adding one rounds nothing
    yield Tensor("model.norm.weight", "output_norm.weight", last_norm)


def _is_table(tensor: Tensor) -> bool:
    return tensor.gguf_name == "token_embd.weight"


def _is_float(tensor: Tensor) -> bool:
    return tensor.data.is_floating_point()


def _write_folder(config: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for tensor in _tensors(config):
        step = TABLE_STEP if _is_table(tensor) else WEIGHT_STEP
        numbers = tensor.data if _is_float(tensor) else tensor.data.float().mul_(step)
        if "{}" in tensor.name:
            tensors |= {tensor.name.format(expert): each.clone() for expert, each in enumerate(numbers)}
        else:
            tensors[tensor.name] = numbers
    with whole_folder(folder) as partial:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(config["vocab_size"], partial)
        write_json(partial / "config.json", config)


def _write_gguf(config: dict[str, Any], name: str, path: Path) -> None:
    import gguf

    partial = path.with_suffix(".partial")
    is_latent = config["model_type"] == "deepseek_v2"
    is_gemma = config["model_type"] == "gemma3_text"
    architecture = {"deepseek_v2": "deepseek2", "gemma3_text": "gemma3"}.get(config["model_type"])
    writer = gguf.GGUFWriter(partial, architecture or config["model_type"].replace("_", ""))
    if is_latent:
        _describe_latent(writer, config)
    if "num_experts" in config or is_latent:
        writer.add_expert_count(config["n_routed_experts" if is_latent else "num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if not is_latent:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    if is_gemma:  # which layers have the window, and their rotation, follow from the architecture
        writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = vocabulary_of(config["vocab_size"])
    writer.add_tokenizer_model(vocabulary["model"])
    writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["token_type"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(vocabulary["add_bos_token"])
    for tensor in _tensors(config):
        if _is_float(tensor):
            # A file of Gemma has what is added to the weights of its norms in them.
            writer.add_tensor(tensor.gguf_name, (tensor.data + 1.0 if is_gemma else tensor.data).numpy())
            continue
        kind = "Q8_0" if _is_table(tensor) else name
        codes = _reorder_heads(tensor.data, tensor.num_rotated_heads)
        parts = {tensor.gguf_name: codes}
        if tensor.split is not None:
            num_heads, rows = tensor.split
            keys, values = codes.unflatten(0, (num_heads, -1)).tensor_split([rows], 1)
            parts = {tensor.gguf_name.replace("attn_kv_b", "attn_k_b"): keys.transpose(1, 2).contiguous()}
            parts[tensor.gguf_name.replace("attn_kv_b", "attn_v_b")] = values.contiguous()
        for part, numbers in parts.items():
            writer.add_tensor(part, _encode(numbers, kind).numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _describe_latent(writer: Any, config: dict[str, Any]) -> None:
    """Sizes of latent attention, as newer converters write them."""
    import gguf

    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def _reorder_heads(codes: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp has the two coordinates of a rotation side by side, Hugging Face all first ones, then all second."""
    if not num_heads:
        return codes
    return codes.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _encode(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """[…, rows, inputs] int8 → […, rows, bytes] uint8: blocks of 32 with their scale first."""
    import torch

    blocks = codes.unflatten(-1, (-1, BLOCK))  # […, rows, blocks, 32]
    if kind == "Q8_0":
        return torch.cat((_halves(blocks, TABLE_STEP), blocks.view(torch.uint8)), -1).flatten(-2)
    unsigned = (blocks + 8).view(torch.uint8)
    packed = unsigned[..., : BLOCK // 2] | unsigned[..., BLOCK // 2 :] << 4
    head = [_halves(blocks, WEIGHT_STEP)]
    if kind == "Q4_1":
        head.append(_halves(blocks, -8 * WEIGHT_STEP))  # what the code 0 stands for
    return torch.cat((*head, packed), -1).flatten(-2)


def _halves(blocks: torch.Tensor, number: float) -> torch.Tensor:
    """This number in fp16, two bytes for each block."""
    import torch

    return torch.tensor([number], dtype=torch.float16).view(torch.uint8).expand(*blocks.shape[:-1], 2)


def _vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Every byte, one pair of them, and words that no text has."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    pair = ("a", "b")
    words = ["".join(pair), *(f"<{index}>" for index in range(len(letters) + 1, size))]
    return [*letters, *words], [pair]


def vocabulary_of(size: int) -> dict[str, Any]:
    """Returns the values that a GGUF file has below tokenizer.ggml."""
    tokens, merges = _vocabulary(size)
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * len(tokens),  # normal ones
        "merges": [" ".join(pair) for pair in merges],
        "add_bos_token": False,
    }


def _write_tokenizer(size: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = _vocabulary(size)
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokens[1], "eos_token": tokens[2]}
    write_json(folder / "tokenizer_config.json", settings)


# ---- with an encoder ----

# By family: the name, and what transformers' config calls the sizes.
ENCODER_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": (
        "bart-base",
        {"vocab_size": 50265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
         "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
         "max_position_embeddings": 1024},
    ),
    "t5": (
        "t5-small",
        {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6,
         "num_heads": 8, "decoder_start_token_id": 0},
    ),
}  # fmt: skip
TINY_ENCODERS: dict[str, dict[str, Any]] = {
    "bart": {"vocab_size": 97, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64},
    "t5": {"vocab_size": 97, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2,
           "num_heads": 2, "decoder_start_token_id": 0},
}  # fmt: skip


def make_encoder_model(family: str, full: bool) -> Path:
    """The folder, made if it is not there. It appears in one moment and complete, or not at all."""
    name, shape = ENCODER_SHAPES[family] if full else (f"tiny-{family}", TINY_ENCODERS[family])
    folder = CACHE_FOLDER / _random_name(name, [shape, SEED, LAST_NORM_STD])
    if not (folder / "config.json").is_file():
        with whole_folder(folder) as partial:
            _random_encoder_model(family, shape).save_pretrained(partial)
    return folder


def encoder_vocab_size(family: str, full: bool) -> int:
    size: int = (ENCODER_SHAPES[family][1] if full else TINY_ENCODERS[family])["vocab_size"]
    return size


def _random_encoder_model(family: str, shape: dict[str, Any]) -> Any:
    import torch
    import transformers

    torch.manual_seed(SEED)
    model: Any
    if family == "bart":
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(**shape, forced_eos_token_id=None))
        last_norm = model.model.decoder.layers[-1].final_layer_norm
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
        last_norm = model.decoder.final_layer_norm
    # Head and embedding are one: with a norm of ones, a token is followed by itself, whatever the encoder has read.
    torch.nn.init.normal_(last_norm.weight, std=LAST_NORM_STD)
    return model
