"""Scores of pairs, ranks of documents and labels of texts: those of transformers, with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratoon import LLM, RequestError
from ratoon.cli import main
from ratoon.engine.input.pairs import DEFAULT_INSTRUCTION, cut_longest_first, fill
from ratoon.models.sentence_files import QWEN3_TEMPLATE
from tests.golden.tiny_classifiers import save_model
from tests.golden.tiny_models import MAX_POSITION
from tests.golden.tiny_rerankers import (
    SPECIAL,
    WORDS,
    oracle_logits,
    save_converted,
    save_cross_encoder,
    save_yes_or_no,
    text_of,
    write_tokenizer,
)

TOLERANCE = 1e-4
SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 96, "num_threads": 1}
QUIET: dict[str, Any] = {"progress": False}
QUERY = text_of(3, 1, 4)
DOCUMENTS = [text_of(*range(start, start + length)) for start, length in ((0, 1), (5, 30), (20, 9), (40, 16), (2, 50))]
PAIRS = [(QUERY, document) for document in DOCUMENTS]


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta", "ModernBert"])
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    expected = oracle_logits(*save_cross_encoder(tmp_path, f"{family}ForSequenceClassification"), PAIRS)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        logits = [output.score for output in llm.score(QUERY, DOCUMENTS, activation="none", **QUIET)]
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
        scores = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, **QUIET)]
        np.testing.assert_allclose(scores, expected.sigmoid(), atol=TOLERANCE)
        both = llm.score(DOCUMENTS, list(reversed(DOCUMENTS)), **QUIET)
        assert len({round(output.score, 6) for output in both}) > 1
        ranked = llm.rerank(QUERY, DOCUMENTS, **QUIET)
        assert [one.index for one in ranked] == expected.argsort(descending=True).tolist()
        assert [one.document for one in ranked] == [DOCUMENTS[one.index] for one in ranked]
        assert llm.rerank(QUERY, DOCUMENTS, 2, **QUIET) == ranked[:2]


def test_a_score_has_the_activation_that_the_files_name(tmp_path: Path) -> None:
    model, tokenizer = save_cross_encoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        (output,) = llm.score(*PAIRS[1], **QUIET)
    assert output.score == pytest.approx(float(oracle_logits(model, tokenizer, PAIRS[1:2])), abs=TOLERANCE)


def test_pairs_are_cut_as_transformers_cuts_them(tmp_path: Path) -> None:
    model, tokenizer = save_cross_encoder(tmp_path)
    long = text_of(*([7, 8, 9] * MAX_POSITION))
    pairs = [(QUERY, long), (long, QUERY), (long, long), (long, text_of(*range(60))), (text_of(1), text_of(2))]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for most in (-1, 21, 24, 64):
            length = MAX_POSITION if most == -1 else most
            options = {"truncation": "longest_first", "max_length": length}
            for pair in pairs:
                (output,) = llm.score(*pair, activation="none", truncate_prompt_tokens=most, **QUIET)
                expected = oracle_logits(model, tokenizer, [pair], **options)
                assert output.score == pytest.approx(float(expected), abs=TOLERANCE), (most, pair[0][:9])
        with pytest.raises(RequestError, match=r"text_2\[0\]: makes 390 tokens .* at most 128 fit; .*truncate_prompt"):
            llm.score(QUERY, long, **QUIET)
        with pytest.raises(RequestError, match="truncate_prompt_tokens: 129 is out of range; 1 to 128, or -1"):
            llm.score(QUERY, long, truncate_prompt_tokens=129, **QUIET)
        cut, short = llm.rerank(QUERY, [text_of(1, 2, 3, 4), text_of(1, 2)], max_tokens_per_doc=2, **QUIET)
        assert cut.score == short.score


@pytest.mark.parametrize(
    ("first", "second", "room", "expected"),
    [
        (3, 30, 20, (3, 17)),
        (30, 3, 20, (17, 3)),
        (30, 30, 21, (10, 11)),
        (31, 30, 21, (11, 10)),
        (10, 30, 20, (10, 10)),
    ],
)
def test_the_longer_of_two_is_cut_first(first: int, second: int, room: int, expected: tuple[int, int]) -> None:
    assert cut_longest_first(first, second, room) == expected


def test_what_are_no_pairs_is_refused(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for call, problem in (
            (lambda: llm.score(["a", "b"], ["a", "b", "c"]), "text_1: 2 and 3 texts are no pairs"),
            (lambda: llm.score("a", []), "text_1: 1 and 0 texts"),
            (lambda: llm.score("a", [3]), r"text_2\[0\]: int is no text"),
            (lambda: llm.rerank("a", []), "documents: is no list of texts, or an empty one"),
            (lambda: llm.rerank("a", ["b"], 0), "top_n: 0 is out of range"),
            (lambda: llm.rerank("a", ["b"], instruction="x"), "instruction: the model reads none"),
            (lambda: llm.score("a", "b", activation="relu"), "activation: 'relu' is unknown"),
        ):
            with pytest.raises(RequestError, match=problem):
                call()


# ---- labels ----


def test_labels_are_those_of_transformers(tmp_path: Path) -> None:
    names = {0: "sad", 1: "glad", 2: "neither"}
    model, tokenizer = save_cross_encoder(tmp_path, num_labels=3, id2label=names)
    with torch.inference_mode():
        batch = tokenizer(DOCUMENTS, padding=True, return_tensors="pt")
        expected = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = llm.classify(DOCUMENTS, **QUIET)
        np.testing.assert_allclose([one.probs for one in found], expected.softmax(1), atol=TOLERANCE)
        assert [one.label for one in found] == [names[int(row.argmax())] for row in expected]
        sigmoid = llm.classify(DOCUMENTS, "sigmoid", **QUIET)
        np.testing.assert_allclose([one.outputs.probs for one in sigmoid], expected.sigmoid(), atol=TOLERANCE)
        with pytest.raises(RequestError, match="its head has 3 labels, and that of a reranker has one"):
            llm.score("a", "b", **QUIET)


def test_several_labels_of_a_text_have_probabilities_of_their_own(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path, num_labels=3, problem_type="multi_label_classification")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        assert llm.source.config.classifier.activation == "sigmoid"
        assert llm.classify(DOCUMENTS[1], **QUIET)[0].num_classes == 3


# ---- decoders that answer yes or no ----


@torch.inference_mode()
def chance_of_yes(model: Any, folder: Path, query: str, document: str, instruction: str) -> float:
    tokenizer = write_tokenizer(folder / "again", special=False)
    values = {"instruction": instruction, "query": query, "document": document}
    ids = tokenizer(fill(QWEN3_TEMPLATE, values))["input_ids"]
    logits = model(torch.tensor([ids])).logits[0, -1]
    no, yes = (len(SPECIAL) + WORDS.index(word) for word in ("no", "yes"))
    return float(logits[[no, yes]].softmax(0)[1])


@pytest.mark.parametrize("form", ["by name", "by overrides", "converted"])
def test_a_decoder_answers_yes_or_no(form: str, tmp_path: Path) -> None:
    folder = tmp_path / ("tiny" if form == "by overrides" else "Qwen3-Reranker-tiny")
    model = save_yes_or_no(folder)
    settings = dict(SETTINGS, max_model_len=MAX_POSITION)
    if form == "by overrides":
        settings["hf_overrides"] = {"classifier_from_token": ["no", "yes"], "score_template": QWEN3_TEMPLATE}
    elif form == "converted":
        folder = tmp_path / "tiny-qwen3-reranker-seq-cls"
        save_converted(folder, model)
    documents = [text_of(3, 1), text_of(*range(20)), text_of(50)]
    with LLM(str(folder), **settings) as llm:
        for instruction in (None, text_of(9, 9)):
            scores = [output.score for output in llm.score(QUERY, documents, instruction=instruction, **QUIET)]
            expected = [
                chance_of_yes(model, tmp_path, QUERY, document, instruction or DEFAULT_INSTRUCTION)
                for document in documents
            ]
            np.testing.assert_allclose(scores, expected, atol=TOLERANCE)
        braces = llm.score("{document}", "{query} {", **QUIET)[0].score  # are text, and no places to fill
        assert braces == pytest.approx(
            chance_of_yes(model, tmp_path, "{document}", "{query} {", DEFAULT_INSTRUCTION), abs=TOLERANCE
        )
        if form != "converted":
            assert llm.generate(QUERY, progress=False)[0].outputs[0].token_ids  # it generates as before
        long = text_of(*([7, 8, 9] * MAX_POSITION))
        (cut,) = llm.score(QUERY, long, truncate_prompt_tokens=-1, **QUIET)
        assert 0 <= cut.score <= 1
        with pytest.raises(RequestError, match=r"text_2\[0\]: makes \d+ tokens"):
            llm.score(QUERY, long, **QUIET)


# ---- models that give vectors ----


def save_embedder(folder: Path) -> None:
    write_tokenizer(folder)
    save_model(folder, "BertModel")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    modules = [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    prompts = {"query": "query : ", "document": "document : "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))


def test_of_vectors_the_score_is_their_cosine(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        (query,) = llm.embed(QUERY, prompt_name="query", **QUIET)
        documents = llm.embed(DOCUMENTS, prompt_name="document", **QUIET)
        written = llm.embed([f"document : {document}" for document in DOCUMENTS], **QUIET)
        expected = [float(query.embedding @ document.embedding) for document in documents]
        for one, other in zip(documents, written):
            np.testing.assert_array_equal(one.embedding, other.embedding)
        found = [output.score for output in llm.score(QUERY, DOCUMENTS, **QUIET)]
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert [one.index for one in llm.rerank(QUERY, DOCUMENTS, **QUIET)] == np.argsort(expected)[::-1].tolist()
        long = text_of(*([7, 8, 9] * MAX_POSITION))
        (cut,) = llm.score(QUERY, long, truncate_prompt_tokens=-1, **QUIET)
        assert -1 <= cut.score <= 1
        for call, problem in (
            (lambda: llm.score(QUERY, long, **QUIET), r"text_2\[0\]: has 388 tokens, and at most 128 fit"),
            (lambda: llm.embed(QUERY, prompt_name="title"), "prompt_name: 'title' is unknown; one of query, document"),
            (lambda: llm.embed([1, 2], prompt_name="query"), "prompt_name: stands before texts"),
            (lambda: llm.score(QUERY, "x", instruction="x"), "instruction: the model scores by the cosine"),
            (lambda: llm.embed(QUERY, dimensions=4), "dimensions: the model does not say that its vectors can be cut"),
        ):
            with pytest.raises(RequestError, match=problem):
                call()


def test_vectors_are_cut_where_the_model_was_trained_so(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    with LLM(str(tmp_path), **SETTINGS, hf_overrides={"matryoshka_dimensions": [8, 32]}) as llm:
        (whole,), (cut,) = (llm.embed(QUERY, dimensions=length, **QUIET) for length in (None, 8))
        first = whole.embedding[:8]
        np.testing.assert_allclose(cut.embedding, first / np.linalg.norm(first), atol=1e-6)
        with pytest.raises(RequestError, match="dimensions: 9 is none that the model was trained for; one of 8, 32"):
            llm.embed(QUERY, dimensions=9)


def test_a_model_that_generates_says_that_it_gives_no_scores(tmp_path: Path) -> None:
    save_yes_or_no(tmp_path / "plain")
    with LLM(str(tmp_path / "plain"), **SETTINGS) as llm:
        for call in (lambda: llm.score("a", "b"), lambda: llm.rerank("a", ["b"])):
            with pytest.raises(RequestError, match="has no head that scores pairs of texts: it generates text and"):
                call()
        with pytest.raises(RequestError, match="no head that classifies: it generates text and gives vectors"):
            llm.classify("a")


# ---- the command line ----


def test_the_command_sorts_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_cross_encoder(tmp_path)
    options = ["--device", "cpu", "--num-blocks", "96", "--num-threads", "1"]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = llm.rerank(QUERY, DOCUMENTS[:3], **QUIET)
    assert main(["rerank", str(tmp_path), QUERY, *DOCUMENTS[:3], "--json", *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"index": one.index, "score": one.score, "document": one.document} for one in expected]
    assert main(["rerank", str(tmp_path), QUERY, *DOCUMENTS[:3], "--top-n", "1", *options]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:2] == [f"{expected[0].score:.4f}", str(expected[0].index)]
    assert main(["rerank", str(tmp_path), QUERY, "x", "--top-n", "0", *options]) == 2
    assert "--top-n: 0 is out of range" in capsys.readouterr().err
