"""The example of a package that adds parts to Ratoon: installed as users install it, and used by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.golden.engines import write_word_tokenizer
from tests.golden.tiny_models import TinyModel, tiny_llama

pytestmark = pytest.mark.slow  # each test starts a process as users do

ROOT = Path(__file__).parents[2]
PROMPT = [5, 9, 2, 40, 7]
NUM_TOKENS = 6
CAP = 30.0
SECONDS = 240

PROGRAM = """
import json, sys
from ratoon import LLM, SamplingParams
prompt, folder, settings = json.loads(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
with LLM(folder, skip_tokenizer=True, num_blocks=64, num_threads=1, **settings) as llm:
    (answer,) = llm.generate([prompt], params, progress=False)[0].outputs
    facts = llm.describe()
    logprobs = [one[token].logprob for token, one in zip(answer.token_ids, answer.logprobs)]
    print(json.dumps([list(answer.token_ids), logprobs, facts["kernels"], facts["attention_backend"]]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example, installed by pip without a network."""
    target = tmp_path_factory.mktemp("installed")
    source = tmp_path_factory.mktemp("source")
    subprocess.run(["cp", "-r", str(ROOT / "examples" / "plugin"), str(source)], check=True)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source / "plugin")]
    subprocess.run(command, check=True, timeout=SECONDS)
    return target


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def folder(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.oracle.save_pretrained(folder)
    write_word_tokenizer(folder)
    return folder


def with_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def run(installed: Path, *command: str) -> str:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *command], env=variables, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(installed: Path, folder: Path, **settings: Any) -> tuple[list[int], list[float], str, str]:
    found = run(installed, "-c", PROGRAM, json.dumps([PROMPT, str(folder), settings]))
    return tuple(json.loads(found.splitlines()[-1]))  # type: ignore[return-value]


@torch.no_grad()
def by_transformers(oracle: Any, cap: float | None = None) -> tuple[list[int], list[float]]:
    ids, logprobs = list(PROMPT), []
    for _ in range(NUM_TOKENS):
        logits = oracle(torch.tensor([ids])).logits[0, -1].double()
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(0).max()))
    return ids[len(PROMPT) :], logprobs


def test_a_backend_and_a_device_of_the_package_answer_as_the_built_in_ones(
    installed: Path, folder: Path, tiny: TinyModel
) -> None:
    tokens, logprobs = by_transformers(tiny.oracle)
    found = answer(installed, folder, device="plain-cpu", attention_backend="example_sdpa", process=True)
    assert found[0] == tokens and found[1] == pytest.approx(logprobs, abs=1e-4)
    assert found[2:] == ("torch", "example_sdpa")


def test_a_family_of_the_package_is_built(installed: Path, tiny: TinyModel, tmp_path: Path) -> None:
    """With logits that the cap changes: the head is made larger."""
    oracle = tiny_llama().oracle
    with torch.no_grad():
        oracle.lm_head.weight.mul_(20)
    oracle.save_pretrained(tmp_path)
    with_config(tmp_path, architectures=["SoftcapForCausalLM"])
    plain, capped = by_transformers(oracle), by_transformers(oracle, CAP)
    assert plain[1] != pytest.approx(capped[1], abs=1e-2)
    found = answer(installed, tmp_path, device="cpu")
    assert found[0] == capped[0] and found[1] == pytest.approx(capped[1], abs=1e-3)


def test_a_weight_format_of_the_package_is_read(installed: Path, tiny: TinyModel, tmp_path: Path) -> None:
    oracle = tiny_llama().oracle
    codes: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            if not name.endswith("proj.weight"):
                continue
            scale = weight.abs().amax(1) / 127
            codes[name], codes[f"{name}_scale"] = (weight / scale[:, None]).round().to(torch.int8), scale.clone()
            weight.copy_(codes[name].float() * scale[:, None])  # what the codes stand for
    oracle.save_pretrained(tmp_path)
    save_file({**load_file(tmp_path / "model.safetensors"), **codes}, tmp_path / "model.safetensors")
    with_config(tmp_path, quantization_config={"quant_method": "example_int8", "bits": 8})
    tokens, logprobs = by_transformers(oracle)
    found = answer(installed, tmp_path, device="cpu", dtype="float32", quantization="none")
    assert found[0] == tokens and found[1] == pytest.approx(logprobs, abs=1e-4)


SESSION = """
import json, sys
from ratoon import LLM, SamplingParams
prompts, folder, settings = json.loads(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
with LLM(folder, skip_tokenizer=True, num_threads=1, device="cpu", **settings) as llm:
    outputs = [llm.generate([prompt], params, progress=False)[0] for prompt in prompts]
    print(json.dumps([[list(one.outputs[0].token_ids), one.num_cached_tokens] for one in outputs]))
"""


@pytest.mark.full
@pytest.mark.parametrize("process", [False, True])
def test_blocks_in_files_of_the_package_outlive_the_engine(
    installed: Path, folder: Path, tmp_path: Path, process: bool
) -> None:
    prompts = [[(7 * index + place * place) % 97 for place in range(70)] for index in range(6)]
    settings: dict[str, Any] = {"num_blocks": 12, "swap_memory": "1MiB", "process": process}
    connected = settings | {
        "kv_connector": "example_folder", "kv_connector_options": {"folder": str(tmp_path / "blocks")}
    }  # fmt: skip

    def session(prompts: list[list[int]], **settings: Any) -> list[tuple[list[int], int]]:
        found = run(installed, "-c", SESSION, json.dumps([prompts, str(folder), settings]))
        return [(tokens, num_cached) for tokens, num_cached in json.loads(found.splitlines()[-1])]

    expected = session(prompts, **settings)
    assert session(prompts, **connected) == expected
    files = sorted((tmp_path / "blocks").glob("*/*.block"))
    assert files and all(file.stat().st_mode & 0o77 == 0 for file in files)
    # Another process finds what the first one has evicted; a damaged file is not read, and neither is what follows it.
    again = session(prompts[:2], **connected)
    assert again == [(expected[0][0], 64), (expected[1][0], 64)]
    for file in files:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert session(prompts[:2], **connected) == [(expected[0][0], 0), (expected[1][0], 0)]


def test_a_connector_is_chosen_on_the_command_line(installed: Path, folder: Path, tmp_path: Path) -> None:
    options = ["--kv-connector", "example_folder", "--kv-connector-options", json.dumps({"folder": str(tmp_path)})]
    shown = run(
        installed, "-m", "ratoon", "info", str(folder), "--device", "cpu", "--num-blocks", "16", "--swap-memory",
        "1MiB", *options, "--json",
    )  # fmt: skip
    assert json.loads(shown)["memory"]["swap_bytes"] > 0
    assert [one for one in tmp_path.iterdir() if one.is_dir()], "both halves were opened"


def test_info_lists_what_packages_register(installed: Path, folder: Path) -> None:
    shown = run(installed, "-m", "ratoon", "info", str(folder), "--device", "cpu", "--num-blocks", "16", "--json")
    parts = {one["group"]: one["name"] for one in json.loads(shown)["plugins"]}
    assert parts == {
        "ratoon.attention_backends": "example_sdpa",
        "ratoon.devices": "plain-cpu",
        "ratoon.kv_connectors": "example_folder",
        "ratoon.models": "SoftcapForCausalLM",
        "ratoon.weight_formats": "example_int8",
    }
