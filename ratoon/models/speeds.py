"""How fast models are known to run: figures that were measured and published in the documents, each with its place.

Documents and `ratoon models` show them from here. A figure enters when a benchmark's result is in the document that it
names; a test looks for it there.
"""

from __future__ import annotations

from typing import NamedTuple


class Speed(NamedTuple):
    """One measurement of a model's shape on a machine. Rates are tokens a second as the document prints them."""

    model: str
    architecture: str
    form: str  # of its weights
    machine: str
    decode: str  # of one request
    at_once: str  # of several requests, with how many these are
    document: str

    def text(self) -> str:
        """Returns the measurement as commands show it."""
        return f"{self.model} {self.form} on {self.machine}: {self.decode}; {self.at_once}"


SMOLLM2, LLAMA = "SmolLM2-135M", "LlamaForCausalLM"
SPEEDS = (
    Speed(SMOLLM2, LLAMA, "Q4_0", "2 Cascade Lake cores", "152 tok/s", "302 tok/s (32)", "README.md"),
    Speed(SMOLLM2, LLAMA, "Q4_0", "2 of 16 Sapphire Rapids cores", "354 tok/s", "578 tok/s (32)", "README.md"),
    Speed(SMOLLM2, LLAMA, "Q4_0", "16 Sapphire Rapids cores", "668 tok/s", "2,041 tok/s (32)", "README.md"),
    Speed(SMOLLM2, LLAMA, "float32", "2 Neoverse-N1 cores", "46.2 tok/s", "125 tok/s (32)", "README.md"),
    Speed(
        "Qwen3-0.6B", "Qwen3ForCausalLM", "bfloat16", "1 H200", "0.58 ms a token", "26,983 tok/s (256)", "docs/gpu.md"
    ),
    Speed(
        "Granite-4-h-350m",
        "GraniteMoeHybridForCausalLM",
        "Q4_0",
        "2 Cascade Lake cores",
        "78.3 tok/s",
        "149 tok/s (32)",
        "docs/cpu.md",
    ),
    Speed("Llama-3-8B", LLAMA, "bfloat16", "1 H200", "3.87 ms a token", "10,440 tok/s (256)", "docs/gpu.md"),
)
HEAD = ("model", "weights", "machine", "1 request", "at once", "from")


def speeds_of(architecture: str) -> list[Speed]:
    """What was measured with models of this architecture."""
    return [one for one in SPEEDS if one.architecture == architecture]


def markdown_table() -> str:
    """Returns the table of docs/models.md."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for one in SPEEDS:
        page = one.document.removeprefix("docs/") if "/" in one.document else f"../{one.document}"
        rows.append((one.model, one.form, one.machine, one.decode, one.at_once, f"[{one.document}]({page})"))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
