"""`chat --url`, `complete --url` and `bench serve` against a server that plays a script, over real connections."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import socket
import threading

import pytest

from ratoon.cli import main
from tests.e2e.fake_server import Script, fake_server
from tests.e2e.test_cli import Terminal
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("RATOON_DEBUG", "RATOON_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    with fake_server() as found:
        yield found


def interrupt_when(condition) -> threading.Thread:
    def watch() -> None:
        wait_until("the moment to interrupt", condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def one_line(text: str) -> str:
    assert text.startswith("error: ") and text.count("\n") == 1
    return text


# complete


def test_complete_prints_the_answer_and_sends_what_was_given(server, capsys):
    url, script = server
    options = ["--max-tokens", "3", "--top-k", "5", "--stop", "x", "--seed", "1", "--ignore-eos"]
    assert main(["complete", "--url", f"{url}/v1", "Hello", *options]) == 0
    assert capsys.readouterr().out == " w0 w1 w2\n"
    (body,) = script.received
    given = {"max_tokens": 3, "top_k": 5, "stop": ["x"], "seed": 1, "ignore_eos": True}
    assert body == {"model": "fake-model", "prompt": "Hello", **given}


def test_complete_answers_many_prompts_in_order_as_json(server, monkeypatch, capsys):
    url, _ = server
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert main(["complete", "--url", url, "-", "b", "--json", "--n", "2", "--max-tokens", "2"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("from a pipe", "b")
    assert [choice["text"] for choice in first["outputs"]] == [" w0 w1", " w0 w1"]
    assert first["num_prompt_tokens"] == 3 and first["error"] is None


def test_complete_as_a_chat_sends_messages(server, capsys):
    url, script = server
    words = ["--chat", "--system", "be kind", "--max-tokens", "2", "--model", "other", "--json", "--logprobs", "3"]
    assert main(["complete", "--url", url, "hi", *words]) == 0
    (body,) = script.received
    assert body["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert (body["model"], body["logprobs"], body["top_logprobs"]) == ("other", True, 3)
    assert json.loads(capsys.readouterr().out)["outputs"][0]["text"] == " w0 w1"


def test_complete_asks_for_a_beam_search_and_prints_texts_with_their_scores(server, capsys):
    url, script = server
    options = [
        "--beam-width",
        "4",
        "-n",
        "2",
        "--length-penalty",
        "2",
        "--early-stopping",
        "never",
        "--max-tokens",
        "2",
    ]
    assert main(["complete", "--url", url, "hi", "--seed", "1", "--temperature", "0", *options]) == 0
    assert capsys.readouterr().out == "--- choice 0, score -0.5000\n w0 w1\n--- choice 1, score -1.5000\n w0 w1\n"
    (body,) = script.received
    search = {"use_beam_search": True, "beam_width": 4, "n": 2, "length_penalty": 2.0, "early_stopping": "never"}
    assert body == {"model": "fake-model", "prompt": "hi", "max_tokens": 2, **search}
    assert main(["complete", "--url", url, "hi", "--chat", "--json", "--beam-width", "4", "--max-tokens", "2"]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["outputs"]
    assert (choice["text"], choice["score"], choice["cumulative_logprob"]) == (" w0 w1", -0.5, -2.0)


def test_complete_does_not_stream_a_beam_search(server, monkeypatch):
    url, script = server
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["complete", "--url", url, "hi", "--beam-width", "4", "--max-tokens", "2"]) == 0
    assert terminal.getvalue() == " w0 w1\n" and "stream" not in script.received[0]


@pytest.mark.parametrize("words", [[], ["--chat"]])
def test_complete_streams_on_request(server, capsys, words):
    url, script = server
    script.line_break = "\r\n"
    assert main(["complete", "--url", url, "hi", "--stream", "--max-tokens", "4", *words]) == 0
    assert capsys.readouterr().out == " w0 w1 w2 w3\n"
    assert script.received[0]["stream"] is True


def test_complete_says_when_a_stream_breaks_off_or_fails(server, capsys):
    url, script = server
    script.break_after = 2
    assert main(["complete", "--url", url, "hi", "--stream"]) == 1
    captured = capsys.readouterr()
    assert captured.out == " w0 w1\n" and "broke off" in one_line(captured.err)
    script.break_after, script.error_after = None, 1
    assert main(["complete", "--url", url, "hi", "--stream"]) == 1
    assert "the engine fell over" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(("status", "code"), [(400, 2), (404, 2), (429, 1), (500, 1)])
def test_complete_turns_what_the_server_says_into_one_line_and_an_exit_code(server, capsys, status, code):
    url, script = server
    script.status = status
    assert main(["complete", "--url", url, "hi", "--model", "m"]) == code
    assert one_line(capsys.readouterr().err) == f"error: server: not today (HTTP {status})\n"


def test_complete_of_a_batch_says_which_prompt_failed_and_prints_the_others(server, capsys):
    url, script = server
    script.refused_prompt = "b"
    assert main(["complete", "--url", url, "a", "b", "c", "--max-tokens", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "=== a\n w0\n=== c\n w0\n"
    assert one_line(captured.err) == "error: prompts[1]: server: prompt: no (HTTP 400)\n"


def test_a_server_without_a_list_of_models_needs_a_name(server, capsys):
    url, script = server
    script.has_models = False
    assert main(["complete", "--url", url, "hi"]) == 2
    assert "--model" in one_line(capsys.readouterr().err)
    assert main(["complete", "--url", url, "hi", "--model", "m"]) == 0


def test_a_server_that_is_not_there_is_said_so(capsys):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen; no other process gets this port meanwhile
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for command in (["complete", "hi"], ["chat"], ["bench", "serve"]):
            assert main([*command, "--url", url]) == 1
            assert "can't be reached (Connection refused)" in one_line(capsys.readouterr().err)


def test_the_usual_server_is_asked_where_none_is_named(server, monkeypatch, capsys):
    url, _ = server
    with fake_server() as (gone, _):
        pass
    for module in ("ratoon.api.remote.options", "ratoon.api.commands.chat"):
        monkeypatch.setattr(f"{module}.DEFAULT_URL", url)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["complete", "hi", "--max-tokens", "2"]) == main(["chat", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2
    monkeypatch.setattr("ratoon.api.commands.chat.DEFAULT_URL", gone)
    assert main(["chat"]) == 2
    assert f"MODEL: is missing, and {gone} can't be reached" in one_line(capsys.readouterr().err)


def test_keys_come_from_the_command_line_or_the_environment(server, monkeypatch, capsys):
    url, script = server
    script.api_key = "secret"
    assert main(["complete", "--url", url, "hi", "--api-key", "wrong"]) == 2
    assert "wrong API key (HTTP 401)" in one_line(capsys.readouterr().err)
    assert main(["complete", "--url", url, "hi", "--api-key", "secret"]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    monkeypatch.setenv("RATOON_API_KEY", "secret, another")  # as a server takes it
    assert main(["complete", "--url", url, "hi"]) == 0


def test_ctrl_c_ends_complete_with_130_and_the_server_notices(server, capsys):
    url, script = server
    script.hold_after = 3
    interrupt_when(lambda: script.running == 1)
    assert main(["complete", "--url", url, "hi", "--stream", "--max-tokens", "1000"]) == 130
    wait_until("the server notices", lambda: script.num_left == 1)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["complete", "hi", "--temperature", "-1"], "temperature"),
        (["complete", "hi", "--system", "x"], "--chat"),
        (["complete", "hi", "--logprobs", "1"], "--json"),
        (["complete", "a", "b", "--stream"], "--stream"),
        (["complete", ""], "PROMPT"),
        (["complete", "hi", "--beam-width", "4", "--top-p", "0.5"], "--top-p"),
        (["complete", "hi", "--length-penalty", "2"], "--length-penalty"),
        (["chat", "model"], "MODEL"),
        (["chat", "--device", "cpu"], "--device"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(server, capsys, arguments, part):
    url, script = server
    assert main([*arguments, "--url", url]) == 2
    assert part in one_line(capsys.readouterr().err)
    assert script.received == []


@pytest.mark.parametrize("arguments", [["chat"], ["chat", "model", "--api-key", "x"], ["chat", "m", "--model", "x"]])
def test_chat_needs_a_model_or_a_server(capsys, arguments):
    assert main(arguments) == 2
    one_line(capsys.readouterr().err)


# chat


def chat(monkeypatch, url: str, lines: list[str], *options: str) -> int:
    """Run `chat` on lines that a user types; a function among them is called in its place."""
    typed = iter(lines)

    def read(prompt: str = "") -> str:
        for line in typed:
            if isinstance(line, str):
                return line
            line()
        raise EOFError

    monkeypatch.setattr(builtins, "input", read)
    return main(["chat", "--url", url, "--max-tokens", "2", *options])


def test_chat_sends_the_conversation_and_counts(server, monkeypatch, capsys):
    url, script = server
    script.cached_tokens = 1
    assert chat(monkeypatch, url, ["one", "two", "/stats", "/reset", "three"], "--system", "s", "--top-k", "3") == 0
    sent = [[message["content"] for message in body["messages"]] for body in script.received]
    assert sent == [["s", "one"], ["s", "one", " w0 w1", "two"], ["s", "three"]]
    assert script.received[0]["top_k"] == 3 and script.received[0]["max_tokens"] == 2
    out = capsys.readouterr().out
    assert out.count(" w0 w1\n") == 3
    assert "prompt tokens  7, of them from the cache 2" in out and "answer tokens  4" in out
    assert f"fake-model at {url}" in out


def test_chat_takes_a_message_back_that_was_not_answered_and_goes_on(server, monkeypatch, capsys):
    url, script = server

    def set_status(status: int):
        return lambda: setattr(script, "status", status)

    assert chat(monkeypatch, url, [set_status(500), "one", set_status(200), "two"]) == 0
    captured = capsys.readouterr()
    assert one_line(captured.err) == "error: server: not today (HTTP 500)\n"
    assert [message["content"] for message in script.received[0]["messages"]] == ["two"]


def test_chat_says_when_an_answer_breaks_off_and_keeps_what_came(server, monkeypatch, capsys):
    url, script = server
    script.break_after = 1
    assert chat(monkeypatch, url, ["one", lambda: setattr(script, "break_after", None), "two"]) == 0
    captured = capsys.readouterr()
    assert "broke off" in captured.err
    assert [message["content"] for message in script.received[1]["messages"]] == ["one", " w0", "two"]


def test_chat_ctrl_c_stops_the_answer_closes_the_connection_and_the_conversation_goes_on():
    with fake_server(Script(hold_after=4)) as (url, script):
        terminal = Terminal("chat", "--url", url, "--max-tokens", "500")
        try:
            terminal.wait_for(Terminal.PROMPT)
            terminal.send("Tell me a story.\n")
            terminal.wait_for(" w3")
            terminal.send("\x03")
            terminal.wait_for(r"\(stopped; \d+ tokens")
            wait_until("the server notices", lambda: script.num_left == 1)
            terminal.wait_for(Terminal.PROMPT)
            terminal.send("And then?\n")
            terminal.wait_for(" w3")
            assert " w0 w1 w2" in script.received[1]["messages"][1]["content"]
            terminal.send("\x03")
            terminal.wait_for(Terminal.PROMPT)
            terminal.send("\x04")
            assert terminal.exit_code() == 0
        finally:
            terminal.kill()


# bench serve


def bench(url: str, *options: str) -> int:
    shape = ["--num-requests", "6", "--input-len", "10", "--output-len", "4", "--warmup", "1"]
    return main(["bench", "serve", "--url", url, *shape, *options])


def measured(script: Script, count: int = 6) -> list[dict]:
    """The requests behind the probe and the warm-up."""
    return script.received[-count:]


def test_bench_sends_exact_prompts_of_token_ids_and_reports(server, tmp_path, capsys):
    url, script = server
    script.cached_tokens = 5
    script.num_tokens = 1  # a model that would rather stop at once
    file, plot = tmp_path / "out.json", tmp_path / "out.png"
    limits = ["--goodput", "ttft:10000", "e2e:10000"]
    assert bench(url, "--concurrency", "2", *limits, "--json", str(file), "--plot", str(plot)) == 0
    bodies = measured(script)
    assert len(script.received) == 1 + 1 + 6
    assert all(len(body["prompt"]) == 10 and min(body["prompt"]) >= 1000 for body in bodies)
    assert all(body["max_tokens"] == 4 and body["ignore_eos"] for body in bodies)
    assert script.most_running <= 2
    captured = capsys.readouterr()
    assert "6 of 6 answered" in captured.out and "50.0 % of them cached" in captured.out
    assert "100.0 % of requests" in captured.out
    assert "50% of the prompts were cached from an earlier run" in captured.err
    facts = json.loads(file.read_text())
    assert facts["rounds"][0]["summary"]["num_output_tokens"] == 24
    assert [request["num_output_tokens"] for request in facts["rounds"][0]["requests"]] == [4] * 6
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_prompts_are_the_same_in_every_run_and_new_in_every_round(server):
    url, script = server
    for _ in range(2):
        assert bench(url, "--repeat", "2", "--concurrency", "1") == 0
    half = len(script.received) // 2
    prompts = [tuple(body["prompt"]) for body in script.received]
    assert prompts[:half] == prompts[half:]
    assert len(set(prompts[:half])) == half


def test_bench_counts_tokens_that_come_several_in_a_chunk(server, tmp_path):
    url, script = server
    script.tokens_per_chunk = 3
    file = tmp_path / "out.json"
    assert bench(url, "--output-len", "7", "--json", str(file)) == 0
    (request, *_) = json.loads(file.read_text())["rounds"][0]["requests"]
    assert request["chunk_tokens"] == [3, 3, 1] and request["num_output_tokens"] == 7


def test_bench_does_without_what_a_server_does_not_take(capsys):
    plain = Script(has_tokenize=False, refused_fields=("continuous_usage_stats", "ignore_eos"))
    with fake_server(plain) as (url, script):
        assert bench(url) == 0
    bodies = measured(script)
    assert all(len(body["prompt"].split()) == 10 and "ignore_eos" not in body for body in bodies)
    assert bodies[0]["stream_options"] == {"include_usage": True}
    notes = capsys.readouterr().err
    assert "no token ids" in notes and "ignore_eos" in notes
    with fake_server(Script(takes_token_ids=False)) as (url, script):
        assert bench(url) == 0
        assert all(isinstance(body["prompt"], str) for body in measured(script))


def test_bench_holds_conversations(server):
    url, script = server
    assert bench(url, "--dataset", "multi-turn", "--turns", "3", "--concurrency", "1") == 0
    lengths = [len(body["messages"]) for body in measured(script)]
    assert lengths == [1, 3, 5, 1, 3, 5]
    assert measured(script)[1]["messages"][1] == {"role": "assistant", "content": " w0 w1 w2 w3"}


def test_bench_sends_a_file(server, tmp_path):
    url, script = server
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a b", "output_len": 2}\n{"prompt": "c"}\n')
    arguments = ["--dataset", "jsonl", "--file", str(path), "--output-len", "5", "--warmup", "0"]
    assert main(["bench", "serve", "--url", url, *arguments]) == 0
    assert [(body["prompt"], body["max_tokens"]) for body in script.received[1:]] == [("a b", 2), ("c", 5)]
    assert "ignore_eos" not in script.received[-1]


def test_bench_reports_what_failed_by_its_kind(server, tmp_path, capsys):
    url, script = server
    script.break_after = 3
    assert bench(url, "--warmup", "0", "--num-requests", "4") == 1
    assert "failed                  broke off: 4" in capsys.readouterr().out
    script.break_after, script.finish_reason = None, "abort"  # what a server that shuts down says
    assert bench(url, "--warmup", "0", "--num-requests", "3") == 1
    assert "aborted the answer" in one_line(capsys.readouterr().err)
    script.finish_reason, script.status = None, 503
    assert bench(url) == 1
    assert one_line(capsys.readouterr().err) == "error: server: not today (HTTP 503)\n"


@pytest.mark.full
def test_bench_that_is_interrupted_reports_what_there_is(server, capsys):
    url, script = server
    script.seconds_per_token = 0.02
    interrupt_when(lambda: len(script.received) >= 2 + 5)
    assert bench(url, "--num-requests", "50000", "--concurrency", "2") == 130
    captured = capsys.readouterr()
    assert "answered in" in captured.out and "unfinished" in captured.out
    assert "figures so far" in captured.err
    wait_until("the server notices", lambda: script.running == 0)
