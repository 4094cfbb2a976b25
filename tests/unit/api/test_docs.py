"""The documents say what the program does: options, endpoints, fields, error codes, metrics; and links lead somewhere.

Whether the examples still print what they show is not checked here.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ratoon.api.commands import serve
from ratoon.api.server.protocol.base import RequestModel
from ratoon.api.server.protocol.chat import ChatCompletionRequest
from ratoon.api.server.protocol.completions import CompletionRequest
from ratoon.api.server.protocol.hidden_states import HiddenStatesRequest
from ratoon.api.server.protocol.messages import MessagesRequest, MessageToolChoice, OutputConfig, Thinking
from ratoon.api.server.protocol.responses import ReasoningConfig, ResponsesRequest, TextConfig
from ratoon.api.server.protocol.sampling import StreamOptions
from ratoon.api.server.routes.embeddings import EmbeddingRequest
from ratoon.api.server.routes.tokens import DetokenizeRequest, TokenizeRequest
from ratoon.cli import main
from ratoon.core.health import EngineHealth, EngineState, Health
from ratoon.core.stats import AdapterStats, DraftStats, SchedulerStats
from ratoon.models.families import FAMILIES, LIBRARY_FAMILIES
from ratoon.models.gguf_names import ARCHITECTURES
from ratoon.models.registry import MODEL_CLASSES
from ratoon.models.speeds import SPEEDS
from ratoon.observe.metrics import EngineMetrics
from tests.unit.api.server.harness import scripted
from tests.unit.engine.fakes_async import on_event_loop

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
SERVER = ROOT / "ratoon/api/server"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
NO_EFFECT = {"include_obfuscation"}  # accepted, and not worth a word


def section(page: str, heading: str) -> str:
    """A page's text from a heading to the next of the same rank."""
    text = (DOCS / page).read_text()
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, heads and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {index - 1 for index, cells in enumerate(tables) if set("".join(cells)) <= set("-")}
    return [cells for index, cells in enumerate(tables) if index not in heads and index - 1 not in heads]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_option_of_serve_is_documented_and_every_documented_one_exists():
    subparsers = argparse.ArgumentParser().add_subparsers()
    serve.add_parser(subparsers)
    existing = set(OPTION.findall(subparsers.choices["serve"].format_help())) - {"--help"}
    documented = {
        option for page in ("serving.md", "settings.md") for option in OPTION.findall((DOCS / page).read_text())
    }
    assert documented == existing


def test_the_page_of_settings_is_what_their_declarations_say():
    """`python docs/write_settings.py` brings it up to date."""
    written = runpy.run_path(str(DOCS / "write_settings.py"))["page"]()
    assert (DOCS / "settings.md").read_text() == written


def test_the_table_of_families_is_what_the_registry_has():
    """`python docs/write_models.py` brings it up to date."""
    assert (DOCS / "models.md").read_text() == runpy.run_path(str(DOCS / "write_models.py"))["page"]()
    shown = [name for family in FAMILIES for name in family.architectures]
    assert len(set(shown)) == len(shown) and set(shown) == set(MODEL_CLASSES)
    by_gguf = {name for family in FAMILIES for name in family.architectures if family.gguf}
    by_content = {
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "DeepseekV3ForCausalLM",
        "MT5ForConditionalGeneration",
        "RobertaModel",
        "XLMRobertaModel",
        "RobertaForSequenceClassification",
        "XLMRobertaForSequenceClassification",
        "ModernBertForSequenceClassification",
    }  # of "llama", "llama", "deepseek2", "t5", "bert" and "modern-bert"
    assert by_gguf == {*ARCHITECTURES.values(), *by_content}


def test_families_are_listed_as_lines_and_as_objects(capsys):
    assert main(["models", "--families"]) == 0
    text = capsys.readouterr().out
    assert "Gemma2ForCausalLM (GGUF: gemma2)\n" in text
    assert all(text.count(f"    measured: {speed.text()}\n") == 1 for speed in SPEEDS)
    assert main(["models", "--families", "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    native = [tuple(one["architectures"]) for one in listed if one["backend"] == "native"]
    assert native == [family.architectures for family in FAMILIES]
    measured = {tuple(one["architectures"]): one["speeds"] for one in listed if one["speeds"]}
    assert measured["Qwen3ForCausalLM",] == [
        speed.text() for speed in SPEEDS if speed.architecture == "Qwen3ForCausalLM"
    ]
    assert sum(map(len, measured.values())) == len(SPEEDS)
    library = [one["architectures"][0] for one in listed if one["backend"] == "transformers"]
    assert library == list(LIBRARY_FAMILIES) and not set(library) & set(MODEL_CLASSES)


def test_the_example_of_a_family_is_the_one_that_is_built_in():
    """The program's file as a whole; of the changes, each line is one of the files that the section names."""
    text = section("models.md", "Adding a family")
    assert (ROOT / "ratoon/models/smollm3.py").read_text() in text
    named = {name for name in quoted(CODE_BLOCK.sub("", text)) if name.startswith("ratoon/") and name.endswith(".py")}
    lines = {line for name in named for line in (ROOT / name).read_text().splitlines()}
    shown = [line[1:] for line in text.splitlines() if line.startswith("+")]
    assert shown and [line for line in shown if line not in lines] == []


def test_every_known_speed_stands_in_the_document_that_it_names():
    for speed in SPEEDS:
        text = (DOCS.parent / speed.document).read_text()
        rows = [line for line in text.splitlines() if line.startswith("|")]
        for shown in (speed.decode, speed.at_once):
            number = shown.split()[0]
            assert any(number in row for row in rows), f"{speed.model}: {number} is not in a table of {speed.document}"
        assert speed.model.partition("-")[0] in text and speed.architecture in MODEL_CLASSES


@on_event_loop
async def test_every_endpoint_is_documented_and_every_documented_one_exists():
    async with scripted(admin=True, admin_keys=("admin",)) as client:
        document = (await client.get("/openapi.json")).json()
    existing = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    documented = {quoted(cells[0])[0] for cells in rows(section("serving.md", "Endpoints"))}
    assert documented == existing


@pytest.mark.parametrize(
    "model",
    [
        *(CompletionRequest, ChatCompletionRequest, StreamOptions, EmbeddingRequest, HiddenStatesRequest),
        *(TokenizeRequest, DetokenizeRequest),
        *(ResponsesRequest, TextConfig, ReasoningConfig, MessagesRequest, MessageToolChoice, Thinking, OutputConfig),
    ],
)
def test_every_field_of_a_request_is_documented(model: type[RequestModel]):
    page = f"{model.__module__.rpartition('.')[2]}.md"
    text = (DOCS / (page if page in ("responses.md", "messages.md") else "serving.md")).read_text()
    mentioned = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`|\{[^}]+\}", text))))
    unsupported = {name.removesuffix("*") for name in model.UNSUPPORTED}
    assert {*model.model_fields, *unsupported} - mentioned <= NO_EFFECT


def test_every_error_code_is_documented_and_every_documented_one_exists():
    sources = "".join(path.read_text() for path in SERVER.rglob("*.py"))
    existing = set(re.findall(r'code="(\w+)"', sources))
    documented = {code for cells in rows(section("serving.md", "Errors")) for code in quoted(cells[1])}
    assert documented == existing


def test_every_metric_is_documented_with_its_type_and_labels_and_every_documented_one_exists():
    metrics = EngineMetrics("some-model")
    adapters, drafts = AdapterStats(holders={"digest": 1}), {"ngram": DraftStats(1, 1, 1, [1])}
    metrics.record_engine(0, SchedulerStats(drafts=drafts, adapters=adapters, experts={0: [1]}))
    metrics.record_http("/health", 200)
    metrics.watch(lambda: Health([EngineHealth(0, EngineState.OK)]))
    families = list(text_string_to_metric_families(metrics.render()[0].decode()))
    existing = {}
    for family in families:
        if family.name.startswith("ratoon_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            existing[name] = (family.type, labels)
    documented = {
        quoted(name)[0]: (kind, set(quoted(labels)))
        for name, kind, labels, _ in rows(section("metrics.md", "What is there"))
    }
    assert documented == existing


def test_queries_ask_for_metrics_that_exist():
    known = {quoted(cells[0])[0] for cells in rows(section("metrics.md", "What is there"))}
    asked = set(re.findall(r"ratoon_\w+", section("metrics.md", "Questions")))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    text = CODE_BLOCK.sub("", page.read_text())
    for target in LINK.findall(text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", CODE_BLOCK.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
