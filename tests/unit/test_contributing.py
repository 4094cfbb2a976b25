"""CONTRIBUTING.md shows where to add things: its files are executed, its diffs applied to the source, and the result is
used as the page says. A diff whose lines are not in the source (comments aside) fails."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon.api import cli
from ratoon.api.options import add_setting_options
from ratoon.api.server import app
from ratoon.attention.interface import AttentionNeeds
from ratoon.core.errors import RequestError
from ratoon.core.kv import KVCacheConfig, KVCacheGroup
from ratoon.core.outputs import LogprobsLists, PromptLogprobsChunk
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.setting import settings_of
from ratoon.core.settings import engine_config
from ratoon.distributed.executor import executor_class
from ratoon.engine.core import EngineCore
from ratoon.execution.rules.base import apply_rules
from ratoon.layers.attention import AttentionLayer
from ratoon.layers.products import make_product
from ratoon.layers.stored import StoredTensor
from ratoon.memory import growth
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence
from ratoon.models import registry as model_registry
from ratoon.models.build import collect_shapes
from ratoon.observe.startup import StartupTimer
from ratoon.scheduling.kinds import registry as kind_registry
from tests.unit.api.server.harness import scripted
from tests.unit.attention.test_backends import MIXED, Batch
from tests.unit.engine.fakes_async import on_event_loop
from tests.unit.models.test_build_model import LLAMA, ShapeSource, build
from tests.unit.scheduling.steps import answer_of, scheduler_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Where do I add …\n")[1]
ENTRY = re.compile(r"^### (.+?)\n(.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(python|diff)\n(?:# |--- )(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENTRIES = dict(ENTRY.findall(PAGE))

Load = Callable[[str], dict[str, Any]]


def without_comment(line: str) -> str:
    return line.split("  # ")[0].rstrip()


def apply_diff(source: str, diff: str, path: str) -> str:
    """Each part of a diff (an ellipsis is between them) replaces the only place in the source that has its lines."""
    for part in diff.split("…\n"):
        changes = part.splitlines()
        old = [without_comment(line[1:]) for line in changes if not line.startswith("+")]
        lines = source.splitlines()
        plain = [without_comment(line) for line in lines]
        places = [start for start in range(len(lines)) if plain[start : start + len(old)] == old]
        assert len(places) == 1, f"CONTRIBUTING.md: {len(places)} places in {path} have the lines {old}"
        new = [line[1:] for line in changes if not line.startswith("-")]
        source = "\n".join([*lines[: places[0]], *new, *lines[places[0] + len(old) :]]) + "\n"
    return source


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Make the modules of an entry: by file name without suffix, each with its diff applied. They import each other."""

    def load(entry: str) -> dict[str, Any]:
        blocks = BLOCK.findall(ENTRIES[entry])
        assert len(blocks) == ENTRIES[entry].count("\n```python\n") + ENTRIES[entry].count("\n```diff\n")
        sources = {}
        for language, path, text in blocks:
            sources[path] = text if language == "python" else apply_diff((ROOT / path).read_text(), text, path)
        names = {path: path.removesuffix(".py").replace("/", ".") for path in sources}
        for path, name in names.items():
            if (ROOT / path).exists():
                importlib.import_module(name)  # with all that it imports: none of that may keep what is made below
        found = {}
        for path in sorted(sources, key=lambda path: (not path.startswith("ratoon/core/"), (ROOT / path).exists())):
            module = types.ModuleType(names[path])
            monkeypatch.setitem(sys.modules, module.__name__, module)
            exec(compile(sources[path], path, "exec"), module.__dict__)
            found[Path(path).stem] = module
        return found

    return load


def test_every_row_of_the_table_is_an_entry_with_code_that_a_test_here_runs() -> None:
    named = re.findall(r"^\| \[(.+?)\]", PAGE, re.MULTILINE)
    assert [name.split(" ", 1)[1] for name in named] == [entry.split(" ", 1)[1] for entry in ENTRIES]
    assert all(BLOCK.search(text) for text in ENTRIES.values())
    tested = set(re.findall(r'load\("(.+?)"\)', Path(__file__).read_text()))
    assert tested == set(ENTRIES)


FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*(?:\.(?:py|c|h|toml|yml|yaml)|/))`")
MADE = (".cache", "build", "dist")  # folders of what programs and tests write: what is there depends on what was run
PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *ROOT.glob("bench/**/*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A name with folders is one of the repository, the package or the page's own folder; a bare one is anywhere."""
    known = {
        path.name for room in ("ratoon", "bench", "tests", "docs", "examples") for path in (ROOT / room).rglob("*.*")
    }
    known |= {path.name for path in ROOT.iterdir()}
    for name in set(FILE.findall(FENCED.sub("", page.read_text()))):
        if name.split("/")[0] in MADE:
            continue
        if "/" in name.rstrip("/"):
            places = (ROOT, ROOT / "ratoon", page.parent, ROOT / "ratoon" / "execution", ROOT / "ratoon" / "layers")
            if (ROOT / name.split("/")[0]).exists() or (ROOT / "ratoon" / name.split("/")[0]).exists():
                assert any((place / name).exists() for place in places), name
        elif not name.endswith("/"):
            assert name in known, name


def test_the_page_about_the_architecture_is_short() -> None:
    """Newcomers read it whole; details of a subject belong to the subject's own page."""
    assert len((ROOT / "docs" / "architecture.md").read_text().split()) <= 3700


def test_files_that_comments_and_docstrings_name_exist() -> None:
    known = {path.name for room in ("ratoon", "bench", "tests", "docs") for path in (ROOT / room).rglob("*.py")}
    known |= {path.name for path in ROOT.glob("*.py")}
    for path in [*(ROOT / "ratoon").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        named = set(re.findall(r"(?<![\w*{])([a-z_0-9]+\.py)\b", path.read_text()))
        assert named <= known, f"{path.relative_to(ROOT)} names {sorted(named - known)}"


def test_a_model(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = load("A model")
    monkeypatch.setattr(model_registry, "MODEL_CLASSES", modules["registry"].MODEL_CLASSES)
    raw = {
        "model_type": "example", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
    }  # fmt: skip
    config = modules["hf_config"].parse_hf_config(raw, "config.json")
    assert config.architecture == "ExampleForCausalLM"
    shapes = collect_shapes(config)
    assert set(shapes) - set(collect_shapes(replace(config, architecture="LlamaForCausalLM"))) == {
        f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(2)
    }
    assert type(build(config, ShapeSource(shapes))).__name__ == "ExampleForCausalLM"


def test_a_backend(load: Load) -> None:
    select = load("An attention backend")["select"]
    for layer in (AttentionLayer(0, 4, 2, 16, 0.25), AttentionLayer(0, 4, 4, 16, 0.25, causal=False)):
        needs = AttentionNeeds("cpu", torch.float32, 16, 16, layer.num_heads, layer.num_kv_heads, causal=layer.causal)
        backend = select.select_backend("sdpa", needs, "layer 0").backend
        batch = Batch(*(MIXED if layer.causal else ([0, 0], [40, 3])), layer, 16)
        for got, expected in zip(batch.run(backend), batch.written_out(), strict=True):
            # Up to 146 keys of 16 numbers, values below 5: (146 + 16) · 2^-24 · 5, in whatever order torch sums
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=5e-5)
    windowed = select.select_backend("auto", replace(needs, window=8), "layer 0")
    assert windowed.reasons_against["sdpa"] == ["has neither windows nor biases"]


def test_a_rule(load: Load) -> None:
    modules = load("A rule over logits")
    params = modules["params"]
    for asked in (params.SamplingParams(no_doubles=True), params.BeamSearchParams(beam_width=2, no_doubles=True)):
        rules = modules["build"].rules_of(asked, [4, 5])
        logits = torch.zeros(2, 8)
        apply_rules(logits, [rules.active(), rules.after(3).active()])
        assert logits.isinf().nonzero().tolist() == [[0, 5], [1, 3]]
    assert not modules["build"].rules_of(params.SamplingParams(), [4, 5])


def test_a_weight_format(load: Load) -> None:
    ops = load("A weight format")["torch_ops"].TorchOps()
    numbers = torch.randint(-127, 128, (6, 8), dtype=torch.int8)
    scales = torch.rand(6)

    def stored(rows: slice) -> StoredTensor:
        floats = numbers[rows] * scales[rows, None]
        extras = {"scales": scales[rows]}
        return StoredTensor(tuple(floats.shape), "I8_ROWS", numbers[rows], lambda data: floats, extras=extras)

    x, bias = torch.randn(3, 8), torch.randn(6)
    multiply = make_product(ops, [stored(slice(4)), stored(slice(4, 6))], bias)
    torch.testing.assert_close(multiply(x), x @ (numbers * scales[:, None]).T + bias, rtol=1e-5, atol=1e-3)
    table = stored(slice(6))
    format = ops.find_format(table)
    assert torch.equal(format.make_embedding(table)(torch.tensor([5, 0])), table.floats()[[5, 0]])
    assert ops.find_format(StoredTensor.of_floats(x)) is None


def test_an_endpoint(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ROUTERS", load("An endpoint")["app"].ROUTERS)

    @on_event_loop
    async def ask() -> None:
        async with scripted() as client:
            assert (await client.post("/v1/count", {"prompt": "rice"})).json() == {"count": 4}
            refused = await client.post("/v1/count", {"promt": "rice"})
            assert refused.status == 400 and "prompt" in refused.error["message"]
            assert "/v1/count" in (await client.get("/openapi.json")).json()["paths"]

    ask()


def test_a_kind_of_request(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = load("A kind of request")
    monkeypatch.setattr(kind_registry, "KINDS", modules["registry"].KINDS)
    scheduler = scheduler_of(max_num_batched_tokens=8)
    with pytest.raises(RequestError, match="two at least"):
        scheduler.add_request(EngineCoreRequest("s", [1], modules["request"].ScoreParams()))
    scheduler.add_request(EngineCoreRequest("s", list(range(10)), modules["request"].ScoreParams()))
    found = []
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        result = answer_of(plan)
        result.prompt_logprobs["s"] = PromptLogprobsChunk(1, LogprobsLists([[3]], [[-1.5]], [1]))
        found += scheduler.update_from_output(plan, result)
        scheduler.check()
    assert [output.score for output in found] == [-1.5] and scheduler.kv_cache.usage == 0.0


def test_a_setting(load: Load) -> None:
    settings = settings_of(load("A setting")["config"].SchedulerConfig)
    parser = argparse.ArgumentParser()
    add_setting_options(parser.add_argument_group("engine"), settings)
    assert parser.parse_args(["--max-num-waiting", "3"]).max_num_waiting == 3


def test_a_kind_of_memory(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = load("A kind of layer memory")
    monkeypatch.setattr(growth, "GROWTH_RULES", modules["growth"].GROWTH_RULES)
    spec = modules["summary"].SummarySpec(4, 8)
    assert spec.page_size_bytes == 16 * 8 * 4
    manager = KVCacheManager(KVCacheConfig(10, 4, (KVCacheGroup(spec, (0,)),)), max_model_len=64)
    sequence = TokenSequence("a", list(range(20)))
    assert manager.allocate_slots(sequence, 20) is not None
    sequence.num_computed_tokens = 20
    assert (manager.required_blocks(20, 4), manager.enable_caching) == (3, False)


def test_an_executor(load: Load) -> None:
    load("An executor")
    config = engine_config("m", num_blocks=20)
    executor = executor_class(config.with_(executor="my_package.fixed:FixedExecutor"))(
        config, LLAMA, ShapeSource({}), StartupTimer()
    )
    core = EngineCore(config, executor)
    core.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=5)))
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    core.shutdown()
    assert [token for output in outputs for token in output.new_token_ids] == [7] * 5


def test_a_command(load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    commands = load("A command")["cli"].COMMANDS
    tokenizer = types.SimpleNamespace(encode=str.split)
    source = types.SimpleNamespace(load_tokenizer=lambda: tokenizer)
    monkeypatch.setattr("ratoon.models.source.resolve_model", lambda name: source)
    assert cli.main(["count", "some-model", "rice is a grass"], commands) == 0
    assert capsys.readouterr().out == "4\n"


def test_a_metric(load: Load) -> None:
    metrics = load("A metric")["metrics"].EngineMetrics("m")
    metrics.record_stop_string()
    page, _ = metrics.render()
    assert b"ratoon_stop_strings_total 1.0" in page
