"""`LLM.embed` and `ratoon embed`, on an engine that makes vectors of a prompt's bytes."""

from __future__ import annotations

import io
import json
from array import array

import numpy as np
import pytest

from ratoon.api.llm import LLM
from ratoon.cli import main
from ratoon.core.errors import RequestError
from ratoon.core.outputs import EmbeddingOutput
from ratoon.core.params import PoolingParams
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from ratoon.core.wire import WireTensor

HIDDEN = 8


def vector_of(request: EngineCoreRequest) -> list[float]:
    """How often the letters a to h stand in the prompt."""
    return [float(request.prompt_token_ids.count(ord("a") + index)) for index in range(HIDDEN)]


@pytest.fixture
def engine(client, monkeypatch):
    """The client, but what it is asked for ends with a vector, the last first, one a step."""

    def get_output() -> EngineCoreOutputs:
        request_id, _ = key = list(client._left)[-1]
        del client._left[key]
        request = client._requests[request_id]
        data = array("f", vector_of(request)).tobytes()
        failed = 0 in request.prompt_token_ids
        output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR if failed else FinishReason.STOP)
        output.error = "NaN" if failed else None
        output.pooled = None if failed else WireTensor("float32", (HIDDEN,), data)
        return EngineCoreOutputs([output])

    monkeypatch.setattr(client, "get_output", get_output)
    return client


@pytest.fixture
def llm(engine) -> LLM:
    return LLM("fake")


def shown(llm: LLM, *arguments, **options) -> list[list[float]]:
    return [output.embedding.tolist() for output in llm.embed(*arguments, progress=False, **options)]


PLAIN = PoolingParams(normalize=False, dimensions=3)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", [[1, 1, 0]]),
        ([97, 98], [[1, 1, 0]]),
        (["ab", {"prompt": "ccc"}, [97, 97]], [[1, 1, 0], [0, 0, 3], [2, 0, 0]]),
        ([], []),
    ],
)
def test_one_prompt_or_many_come_back_in_their_order(llm, prompts, expected):
    assert shown(llm, prompts, PLAIN) == expected


def test_without_params_vectors_are_whole_and_have_length_one(llm, engine):
    (output,) = llm.embed("aabb", progress=False)
    assert (
        isinstance(output, EmbeddingOutput) and output.prompt == "aabb" and output.prompt_token_ids == [97, 97, 98, 98]
    )
    np.testing.assert_allclose(output.embedding, [0.5**0.5] * 2 + [0] * 6, rtol=1e-6)
    assert engine.added[0].params == PoolingParams(pooling="last")


def test_params_are_one_for_all_or_one_for_each(llm, engine):
    one, two = PoolingParams(pooling="mean", dimensions=1), PoolingParams(pooling="last", dimensions=2)
    assert [len(vector) for vector in shown(llm, ["a", "b"], [one, two])] == [1, 2]
    assert [request.params for request in engine.added] == [one, two]
    with pytest.raises(RequestError, match="pooling_params"):
        llm.embed(["a", "b"], [one])


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        ("a", PoolingParams(pooling="first"), "pooling"),
        (["a", "b"], PoolingParams(dimensions=HIDDEN + 1), "dimensions"),
        (["a", "b"], [PLAIN, PoolingParams(dimensions=0)], "prompts[1].dimensions"),
        (["a", ""], None, "prompts[1].prompt"),
        (["a", "b" * 65], None, "prompts[1].prompt"),
        (["a", "b"], [PLAIN, "mean"], "prompts[1].pooling_params"),
        ("a", {"pooling": "mean"}, "pooling_params"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_started(llm, engine, prompts, params, field):
    with pytest.raises(RequestError) as caught:
        llm.embed(prompts, params)
    assert caught.value.field == field
    assert engine.added == []


def test_a_prompt_may_fill_the_models_whole_length(llm):
    assert shown(llm, "a" * 64, PLAIN) == [[64, 0, 0]]


def test_a_prompt_that_fails_has_an_error_and_the_others_have_vectors(llm):
    good, bad = llm.embed(["a", [0]], PLAIN, progress=False)
    assert good.error is None and good.embedding.tolist() == [1, 0, 0]
    assert bad.error == "NaN" and bad.embedding is None


def test_a_salt_reaches_the_engine(llm, engine):
    llm.embed("a", cache_salt="tenant", progress=False)
    assert engine.added[0].cache_salt == "tenant"


# ---- the command ----


def test_the_command_prints_one_object_a_text(engine, capsys):
    assert main(["embed", "fake", "aab", "c", "--no-normalize", "--dimensions", "3", "--pooling", "mean"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"index": 0, "embedding": [2.0, 1.0, 0.0]}, {"index": 1, "embedding": [0.0, 0.0, 1.0]}]
    assert [request.params.pooling for request in engine.added] == ["mean", "mean"]


def test_numbers_are_printed_with_the_digits_that_float32_has(engine, capsys):
    main(["embed", "fake", "aab"])
    assert "[0.8944272, 0.4472136, 0.0," in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_each_line_of_standard_input_is_a_text(engine, capsys, monkeypatch, arguments):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\nc d\n"))
    assert main(["embed", "fake", *arguments, "--no-normalize", "--dimensions", "4"]) == 0
    vectors = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    assert vectors == [[1, 1, 0, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("normalize", [[], ["--no-normalize"]])
def test_similarity_is_a_table_of_cosines(engine, capsys, normalize):
    assert main(["embed", "fake", "a", "aab", "c", "--similarity", *normalize]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table == [
        ["0", "1", "2"],
        ["0", "1.000", "0.894", "0.000", "a"],
        ["1", "0.894", "1.000", "0.000", "aab"],
        ["2", "0.000", "0.000", "1.000", "c"],
    ]


def test_a_vector_of_zeros_is_like_nothing(engine, capsys):
    assert main(["embed", "fake", "a", "z", "--similarity"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["1", "0.000", "0.000", "z"]


@pytest.mark.parametrize("similarity", [[], ["--similarity"]])
def test_a_text_that_failed_makes_the_exit_code_1(engine, capsys, similarity):
    assert main(["embed", "fake", "a", "\0", *similarity]) == 1
    captured = capsys.readouterr()
    assert "error: prompts[1]: NaN" in captured.err
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [line.get("error") for line in lines] == ([] if similarity else [None, "NaN"])


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["a", "--dimensions", "0"], "", "dimensions: 0 is out of range"),
        (["a", "--dimensions", "9"], "", "dimensions: 9 is more"),
        ([], "\n \n", "TEXT: is missing"),
        (["a", ""], "", "TEXT: is empty"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(engine, capsys, monkeypatch, arguments, stdin, message):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert main(["embed", "fake", *arguments]) == 2
    assert message in capsys.readouterr().err
