"""`ratoon info MODEL`: the model's properties, resolved settings, memory and start-up times."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm
from ratoon.core.plugins import plugin_facts
from ratoon.core.sizes import format_size
from ratoon.core.worker import LOOKED_UP

if TYPE_CHECKING:
    from ratoon.api.llm import LLM

MODEL_FIELDS = (
    "architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
    "vocab_size", "max_position", "sliding_window", "tie_word_embeddings", "checkpoint_dtype", "eos_token_ids",
)  # fmt: skip

LABELS = {
    "weight_bytes": "weights",
    "kv_bytes": "KV cache",
    "step_bytes": "largest step",
    "swap_bytes": "swap",
    "kv_bytes_per_token": "KV per token",
    "kv_groups": "KV groups",
    "kv_tokens": "tokens in the KV cache",
    "num_blocks": "blocks",
    "block_size": "tokens in a block",
}


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("info", help="resolved settings, memory, start-up time", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or an embedded name")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_engine_options(parser)
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Sizing an engine with random weights needs only the model's config.
    with open_llm(args, skip_tokenizer=args.load_format == "dummy") as llm:
        facts = collect(llm)
        startup_table = llm.startup_timer.table()
    if args.json:
        print(json.dumps(facts, indent=2, default=str))
        return 0
    facts["attention"] = {choice["layers"]: _show_choice(choice) for choice in facts["attention"]}
    facts["weights"] = dict(map(_show_weights, facts["weights"]))
    facts["products"] = {one["weights"]: _show_products(one) for one in facts["products"]}
    facts["plugins"] = {f"{one['group']} {one['name']}": _show_plugin(one) for one in facts["plugins"]}
    for section in ("model", "engine", "attention", "weights", "products", "memory", "scheduler", "plugins"):
        if facts[section]:
            print_section(section, facts[section])
    print("start-up")
    print("\n".join(f"  {line}" for line in startup_table.splitlines()))
    return 0


def collect(llm: LLM) -> dict[str, Any]:
    """All figures, by section. The memory figures are bytes."""
    engine = llm.describe()
    config, source = llm.config, llm.source
    block_size, num_blocks = engine["block_size"], engine["num_blocks"]
    memory = {name: engine.pop(name) for name in ("weight_bytes", "kv_bytes", "kv_bytes_per_token")}
    # The largest step is measured on a GPU, and swapping too, where there is memory for it.
    memory |= {name: value for name in ("step_bytes", "swap_bytes") if (value := engine.pop(name, 0))}
    if engine.get("swap_costs") is None:
        engine.pop("swap_costs", None)
    memory |= {name: engine.pop(name) for name in ("block_size", "num_blocks", "kv_groups")}
    memory["kv_tokens"] = (num_blocks - 1) * block_size  # block 0 is reserved
    model = asdict(source.config)
    attention, weights, products = (engine.pop(name) for name in ("attention", "weight_formats", "kernel_choices"))
    return {
        "model": {
            "name": source.name,
            "path": str(source.path),
            "format": source.format,
            "backend": "native" if source.config.library is None else "transformers",
            **{name: model[name] for name in MODEL_FIELDS},
            "chat_template": source.chat_template is not None,
            "generation_defaults": source.generation_defaults,
        },
        "engine": engine,
        "attention": attention,
        "weights": weights,
        "products": products,
        "memory": memory,
        "scheduler": {**asdict(config.scheduler), "prefix_caching": config.cache.enable_prefix_caching},
        "plugins": plugin_facts(),
        "startup_seconds": llm.startup_timer.as_dict(),
    }


def print_section(title: str, values: dict[str, Any]) -> None:
    print(title)
    width = max(len(LABELS.get(name, name)) for name in values)
    for name, value in values.items():
        shown = format_size(value) if "bytes" in name else _show(value)
        label = LABELS.get(name, name.replace("_", " ") if name.isidentifier() and name.islower() else name)
        print(f"  {label:<{width}}  {shown}")
    print()


def _show_choice(choice: dict[str, Any]) -> str:
    against = [f"not {name}: {', '.join(reasons)}" for name, reasons in choice["reasons_against"].items()]
    return "; ".join([choice["backend"], *against])


def _show_plugin(one: dict[str, Any]) -> str:
    return f"{one['value']} of {one['package']}" if one["problem"] is None else one["problem"]


def _show_weights(one: dict[str, Any]) -> tuple[str, str]:
    """A label, and what is behind it. Tables and products may have the same format."""
    label = f"{one['format']} table" if one["product"] == LOOKED_UP else one["format"]
    return label, f"{one['num_weights']:,} numbers in {format_size(one['num_bytes'])}; products: {one['product']}"


def _show_products(one: dict[str, Any]) -> str:
    """`one`: the kernels for weights of a shape, each with the rows that it begins at."""
    kernels = [name if rows == 1 else f"{name} from {rows} rows" for name, rows in one["kernels"].items()]
    return f"{', '.join(kernels)} ({one['choice']}; {one['count']} of them)"


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(entry)}" for name, entry in value.items()) or "-"
    return f"{value:,}" if isinstance(value, int) else str(value)
