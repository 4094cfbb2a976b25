"""`ratoon bench latency|throughput`, on an engine that plays a script: what is sent and what is printed."""

from __future__ import annotations

import json

import pytest

from ratoon.cli import main


@pytest.mark.parametrize(("kind", "count"), [("latency", "--batch"), ("throughput", "--num-requests")])
def test_bench_reports_speed_of_what_was_asked(client, capsys, kind, count):
    client.script = lambda request, choice: [1] * 64
    shape = ["--input-len", "10", "--output-len", "5", count, "3", "--repeat", "2", "--json"]
    assert main(["bench", kind, "fake", *shape]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["kind"], result["num_requests"], result["repeat"]) == (kind, 3, 2)
    assert result["output_tokens_per_second"]["min"] <= result["output_tokens_per_second"]["median"]
    measured = client.added[3:]  # the first round warms up
    assert len(measured) == 6
    assert all(len(request.prompt_token_ids) == 10 for request in measured)
    assert all(request.params.all_stop_token_ids == [] for request in measured)
    assert len({tuple(request.prompt_token_ids) for request in client.added}) == 9


def test_bench_prompts_are_the_same_in_every_run(client):
    client.script = lambda request, choice: [1] * 64
    for _ in range(2):
        main(["bench", "latency", "fake", "--input-len", "4", "--output-len", "2", "--repeat", "1"])
    half = len(client.added) // 2
    prompts = [request.prompt_token_ids for request in client.added]
    assert prompts[:half] == prompts[half:]


def test_random_weights_need_no_more_than_a_config(tmp_path, capsys):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = ["--load-format", "dummy", "--device", "cpu", "--threads", "1", "--num-blocks", "16"]
    for kind in ("latency", "throughput"):
        shape = ["--input-len", "4", "--output-len", "2", "--repeat", "1", "--json"]
        assert main(["bench", kind, str(tmp_path), *shape, *engine]) == 0
        assert json.loads(capsys.readouterr().out)["output_tokens_per_second"]["median"] > 0
