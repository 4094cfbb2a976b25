"""The commands, on an engine that plays a script: what they print, and the exit code."""

from __future__ import annotations

import builtins
import io
import json

import pytest

from ratoon.api.cli import parse_arguments
from ratoon.api.commands.demo import describe_rounding
from ratoon.api.commands.serve import say_what_is_waited_for
from ratoon.api.server.settings import ServerSettings
from ratoon.cli import main
from ratoon.core.errors import EngineError, ModelError, RequestError
from ratoon.core.params import SamplingParams
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def no_debug(monkeypatch):
    monkeypatch.delenv("RATOON_DEBUG", raising=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_generate_prints_the_answer(client, capsys):
    assert main(["generate", "fake", "abc", "--raw"]) == 0
    assert capsys.readouterr().out == "cba\n"


def test_generate_applies_the_chat_template_where_there_is_one(client, source, capsys):
    main(["generate", "fake", "hi", "--system", "be kind", "--max-tokens", "1"])
    assert bytes(client.added[0].prompt_token_ids) == b"[system]be kind\n[user]hi\n[assistant]"
    source.chat_template = None
    main(["generate", "fake", "hi", "--max-tokens", "1"])
    assert bytes(client.added[1].prompt_token_ids) == b"hi"


def test_generate_goes_on_with_an_answer_that_was_begun(client, source, capsys):
    assert main(["generate", "fake", "hi", "--prefill", "Well,", "--max-tokens", "1"]) == 0
    assert bytes(client.added[0].prompt_token_ids) == b"[user]hi\n[assistant]Well,"
    assert main(["generate", "fake", "hi", "--raw", "--prefill", "x"]) == 2
    assert "--prefill: can't be used with a raw prompt" in capsys.readouterr().err
    source.chat_template = None
    assert main(["generate", "fake", "hi", "--prefill", "x"]) == 2
    assert "--prefill: needs a chat template" in capsys.readouterr().err


def test_complete_sends_an_answer_that_was_begun(capsys):
    from ratoon.api.commands.complete import make_request

    path, body = make_request(
        "m", "hi", parse_arguments(["complete", "--url", "x", "--chat", "hi", "--prefill", "Well,"])
    )
    assert path == "/v1/chat/completions"
    assert body["messages"][-1] == {"role": "assistant", "content": "Well,"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert main(["complete", "--url", "x", "hi", "--prefill", "Well,"]) == 2
    assert "--prefill: can't be used with a plain prompt; add --chat" in capsys.readouterr().err


def test_generate_takes_what_the_model_recommends_and_what_was_given(client, source):
    main(["generate", "fake", "ab", "--raw", "--top-k", "7", "--stop", "x", "--stop", "y", "--seed", "3"])
    params = client.added[0].params
    assert (params.temperature, params.top_k, params.stop, params.seed) == (0.5, 7, ["x", "y"], 3)
    source.generation_defaults = {}
    main(["generate", "fake", "ab", "--raw"])
    assert client.added[1].params.is_greedy


def test_generate_reads_standard_input(client, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("xyz"))
    assert main(["generate", "fake", "-", "--raw"]) == 0
    assert capsys.readouterr().out == "zyx\n"


def test_generate_prints_one_json_object_a_prompt(client, capsys):
    assert main(["generate", "fake", "ab", "cd", "--raw", "--json", "--n", "2"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("ab", "cd")
    assert [choice["text"] for choice in second["outputs"]] == ["dc", "dc"]
    assert first["outputs"][0]["finish_reason"] == "stop"
    assert first["num_prompt_tokens"] == 2


def test_generate_streams_on_a_terminal(client, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    seen = []
    client.on_step = lambda: seen.append(terminal.getvalue())
    assert main(["generate", "fake", "abc", "--raw"]) == 0
    assert terminal.getvalue() == "cba\n"
    assert "c" in seen and "cb" in seen


def test_generate_does_not_stream_into_a_pipe(client, monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stdout", pipe)
    seen = []
    client.on_step = lambda: seen.append(pipe.getvalue())
    main(["generate", "fake", "abc", "--raw"])
    assert set(seen) == {""}


def test_generate_searches_with_beams_and_prints_texts_with_their_scores(client, capsys):
    client.script = lambda request, choice: [*b"xyz"[choice:], 256]
    options = ["--raw", "--beam-width", "4", "--max-tokens", "9", "--early-stopping", "true", "--length-penalty", "0"]
    assert main(["generate", "fake", "abc", *options, "-n", "2", "--temperature", "0", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "--- choice 0, score -0.5000\nxyz\n--- choice 1, score -0.8333\nyz\n"
    params = client.added[0].params
    assert (params.beam_width, params.n, params.early_stopping, params.length_penalty) == (4, 2, True, 0.0)
    assert main(["generate", "fake", "abc", *options]) == 0
    assert capsys.readouterr().out == "xyz\n"
    assert main(["generate", "fake", "abc", *options, "--json"]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["outputs"]
    assert (choice["text"], choice["score"], choice["cumulative_logprob"]) == ("xyz", -0.5, -2.0)


def test_a_beam_search_is_not_streamed_on_a_terminal(client, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["generate", "fake", "abc", "--raw", "--beam-width", "2"]) == 0
    assert terminal.getvalue() == "cba\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--temperature", "0.5"],
        ["--top-p", "0.9"],
        ["--top-k", "3"],
        ["--min-p", "0.1"],
        ["--stop", "x"],
        ["--logprobs", "1", "--json"],
        ["--stream"],
    ],
    ids=lambda words: words[0],
)
def test_what_contradicts_a_beam_search_is_refused_by_its_name(client, capsys, words):
    assert main(["generate", "fake", "hi", "--beam-width", "4", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {words[0]}: ")
    assert client.added == []


def test_penalties_go_with_a_beam_search(client):
    words = ["--presence-penalty", "1", "--frequency-penalty", "0.5", "--repetition-penalty", "1.2"]
    assert main(["generate", "fake", "hi", "--raw", "--beam-width", "4", *words]) == 0
    params = client.added[-1].params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, 0.5, 1.2)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["generate", "fake", "hi", "--length-penalty", "2"], "--length-penalty"),
        (["generate", "fake", "hi", "--early-stopping", "true"], "--early-stopping"),
        (["generate", "fake", "hi", "--beam-width", "0"], "--beam-width"),
        (["generate", "fake", "hi", "--beam-width", "2", "-n", "3"], "n:"),
        (["generate", "fake", "hi", "--beam-width", "2", "--early-stopping", "soon"], "--early-stopping"),
        (["generate", "fake", "hi", "--beam-width", "2", "--length-penalty", "nan"], "--length-penalty"),
        (["generate", "fake", ""], "PROMPT"),
        (["generate", "fake", "a", ""], "prompts[1]"),
        (["generate", "fake", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "fake", "hi", "--temperature", "nan"], "temperature"),
        (["generate", "fake", "hi", "--n", "0"], "n:"),
        (["generate", "fake", "hi", "--logprobs", "9999", "--json"], "logprobs"),
        (["generate", "fake", "hi", "--logprobs", "1"], "--json"),
        (["generate", "fake", "hi", "--stream", "--json"], "--stream"),
        (["generate", "fake", "a" * 99, "--raw"], "99 tokens"),
        (["generate", "fake", "hi", "--kv-memory", "lots"], "--kv-memory"),
        (["generate", "fake", "hi", "--policy", "lottery"], "policy"),
        (["bench", "latency", "fake", "--input-len", "0"], "--input-len"),
        (["bench", "latency", "fake", "--input-len", "60", "--output-len", "60"], "120 tokens"),
        (["chat", "fake", "--top-p", "7"], "--top-p"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(client, capsys, arguments, part):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert part in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("m", "is broken"), 2),
        (RequestError("prompt", "is broken"), 2),
        (EngineError("is broken"), 1),
        (RuntimeError("is broken\nin two lines"), 1),
    ],
)
def test_errors_have_their_exit_codes(client, capsys, error, code):
    def fail() -> None:
        raise error

    client.on_step = fail
    assert main(["generate", "fake", "hi"]) == code
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert "is broken" in message


def test_debug_shows_the_traceback(client, monkeypatch):
    def fail() -> None:
        raise RuntimeError("broken")

    client.on_step = fail
    with pytest.raises(RuntimeError):
        main(["generate", "fake", "hi", "--debug"])
    monkeypatch.setenv("RATOON_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main(["generate", "fake", "hi"])


def test_an_interrupt_is_exit_code_130(client):
    def interrupt() -> None:
        raise KeyboardInterrupt

    client.on_step = interrupt
    assert main(["generate", "fake", "hi"]) == 130
    assert client.closed


def test_a_request_that_fails_in_a_batch_is_exit_code_1_and_the_others_are_printed(client, capsys):
    client.refuse = lambda request: RequestError("prompt", "no room") if len(request.prompt_token_ids) == 3 else None
    assert main(["generate", "fake", "ab", "abc", "--raw"]) == 1
    captured = capsys.readouterr()
    assert "ba" in captured.out
    assert "no room" in captured.err


def chat(monkeypatch, lines, arguments=()) -> int:
    """Run `chat` on lines that a user types; an exception in their place is raised instead."""
    typed = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", read)
    return main(["chat", "fake", "--max-tokens", "3", *arguments])


def test_chat_remembers_the_conversation_until_it_is_reset(client, monkeypatch, capsys):
    client.script = lambda request, choice: [*b"ok", 256]
    assert chat(monkeypatch, ["one", "two", "/reset", "three"], ["--system", "s"]) == 0
    sent = [bytes(request.prompt_token_ids).decode() for request in client.added]
    assert sent == [
        "[system]s\n[user]one\n[assistant]",
        "[system]s\n[user]one\n[assistant]ok\n[user]two\n[assistant]",
        "[system]s\n[user]three\n[assistant]",
    ]
    assert capsys.readouterr().out.count("ok\n") == 3


def test_chat_goes_on_with_the_last_answer(client, monkeypatch, capsys):
    client.script = lambda request, choice: [*b"abcdef"]
    assert chat(monkeypatch, ["/continue", "one", "/continue", "two"]) == 0
    sent = [bytes(request.prompt_token_ids).decode() for request in client.added]
    assert sent == [
        "[user]one\n[assistant]",
        "[user]one\n[assistant]abc",
        "[user]one\n[assistant]abcabc\n[user]two\n[assistant]",
    ]
    assert capsys.readouterr().out.startswith("there is no answer to continue\nabc\nabc\n")


def test_chat_ctrl_c_stops_the_answer_and_not_the_program(client, monkeypatch, capsys):
    client.script = lambda request, choice: [*b"abcdef"]
    steps = []

    def interrupt_the_second_step() -> None:
        steps.append(True)
        if len(steps) == 2:
            raise KeyboardInterrupt

    client.on_step = interrupt_the_second_step
    assert chat(monkeypatch, ["one", "two"]) == 0
    assert client.aborted == [client.added[0].request_id]
    assert "[assistant]a\n[user]two" in bytes(client.added[1].prompt_token_ids).decode()
    captured = capsys.readouterr()
    assert captured.out.startswith("a\nabc\n")
    assert "stopped" in captured.err


def test_chat_does_not_keep_an_answer_that_was_stopped_before_its_first_token(client, monkeypatch, capsys):
    client.script = lambda request, choice: [*b"ok", 256]
    steps = []

    def interrupt_the_first_step() -> None:
        steps.append(True)
        if len(steps) == 1:
            raise KeyboardInterrupt

    client.on_step = interrupt_the_first_step
    assert chat(monkeypatch, ["one", "two", "/stats"]) == 0
    assert bytes(client.added[1].prompt_token_ids).decode() == "[user]two\n[assistant]"
    captured = capsys.readouterr()
    assert "stopped before the first token; the message is removed" in captured.err
    assert "messages       2" in captured.out


def test_chat_shows_that_it_waits_for_the_first_token(client, monkeypatch):
    client.script = lambda request, choice: [*b"ok", 256]
    monkeypatch.setenv("TERM", "xterm")
    out, err = Terminal(), Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    seen = []

    def look() -> None:
        wait_until("a thread draws it", lambda: seen or "waiting for the first token" in err.getvalue())
        seen.append(err.getvalue())

    client.on_step = look
    assert chat(monkeypatch, ["one"]) == 0
    assert "waiting for the first token" in seen[0]
    assert "ok" in out.getvalue()


def test_chat_ctrl_c_at_the_prompt_gives_up_the_line_alone(client, monkeypatch, capsys):
    client.script = lambda request, choice: [*b"ok", 256]
    assert chat(monkeypatch, [KeyboardInterrupt(), "one"]) == 0
    assert len(client.added) == 1


def test_chat_commands_do_not_reach_the_model(client, monkeypatch, capsys):
    assert chat(monkeypatch, ["/help", "/stats", "/unknown", "", "/exit", "never"]) == 0
    assert client.added == []
    out = capsys.readouterr().out
    assert "/reset" in out and "hit rate" in out and "/unknown is no command" in out


def test_chat_that_grows_too_long_says_so_and_goes_on(client, monkeypatch, capsys):
    client.script = lambda request, choice: [*b"ok", 256]
    assert chat(monkeypatch, ["x" * 80, "y"]) == 0
    assert "/reset" in capsys.readouterr().err
    assert bytes(client.added[0].prompt_token_ids).decode() == "[user]y\n[assistant]"


def test_chat_without_a_template_is_refused(client, source, capsys):
    source.chat_template = None
    assert main(["chat", "fake"]) == 2
    assert "chat template" in capsys.readouterr().err


def test_info_has_all_sections_as_json(client, capsys):
    assert main(["info", "fake", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    sections = {
        "model",
        "engine",
        "attention",
        "weights",
        "products",
        "memory",
        "scheduler",
        "plugins",
        "startup_seconds",
    }
    assert set(facts) == sections
    (choice,) = facts["attention"]
    assert choice == {"layers": "layers 0-1 (full)", "backend": "slow", "reasons_against": {"fast": ["is lazy"]}}
    assert facts["memory"]["kv_tokens"] == 8 * 16
    assert facts["startup_seconds"]["total"] >= facts["startup_seconds"]["find model"]


def test_info_shows_what_the_largest_step_takes_where_it_was_measured(client, capsys):
    assert main(["info", "fake"]) == 0
    assert "largest step" not in capsys.readouterr().out
    facts = client.describe()
    client.describe = lambda: {**facts, "step_bytes": 3 * 2**30}
    assert main(["info", "fake"]) == 0
    assert "largest step  " in (shown := capsys.readouterr().out) and "3.0 GiB" in shown


def test_info_shows_settings_and_start_up(client, capsys):
    assert main(["info", "fake", "--max-num-seqs", "5"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out and "max num seqs" in out and "load tokenizer" in out
    assert "layers 0-1 (full)  slow; not fast: is lazy" in out
    assert "2,048 numbers in 1.1 KiB; products: in 4 bits" in out
    assert "4 bits, 64 → 32  in registers, matrix unit from 12 rows (measured; 2 of them)" in out


def test_demo_answers_everything_and_sends_the_shared_prefix_second(client, source, capsys):
    from dataclasses import replace

    source.config = replace(source.config, max_position=8192)
    client.script = lambda request, choice: [*b"ok", 256]
    order = []
    client.on_step = lambda: order.append(len(client.added))
    assert main(["demo", "fake"]) == 0
    assert order[0] == 5 and order[1] == 6
    out = capsys.readouterr().out
    assert out.count("\nok\n") == 6
    assert "library 2" in out and "prefix cache" in out


def test_demo_says_what_is_rounded_where_weights_stay_in_few_bits():
    few = {"format": "Q4_1", "product": "4-bit weights, 8-bit activations (neon)"}
    floats = {"format": "float32", "product": "float32"}
    assert "as the file has them (Q4_1), with activations rounded to 8 bits" in describe_rounding([few, floats])
    assert describe_rounding([floats]) == ""


def test_prompts_may_stand_behind_options(client, capsys):
    assert main(["generate", "fake", "ab", "--max-tokens", "2", "cd", "--raw", "ef"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("===")] == ["=== ab", "=== cd", "=== ef"]


@pytest.mark.parametrize("arguments", [["generate", "fake", "ab", "--tempature", "1"], ["info", "fake", "more"]])
def test_words_that_mean_nothing_are_refused(client, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and arguments[-1 - ("--tempature" in arguments)] in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["generate", "fake", "hi", "--temprature", "0"],
            "error: --temprature is no option of `ratoon generate`; did you mean --temperature?",
        ),
        (
            ["serve", "fake", "--max-modle-len=5"],
            "error: --max-modle-len is no option of `ratoon serve`; did you mean --max-model-len?",
        ),
        (["sevre", "fake"], "error: 'sevre' is no command of `ratoon`; did you mean serve?"),
        (["bench", "latncy", "fake"], "did you mean latency?"),
        (["generate", "fake", "hi", "--top-k", "x"], "error: --top-k: 'x' is not a whole number"),
        (["generate", "fake", "hi", "--top-k"], "error: --top-k: needs one value"),
        (["generate"], "error: MODEL is missing; usage: ratoon generate [OPTION ...] MODEL [PROMPT ...]"),
        (["run", "llama3"], "`ratoon chat MODEL` talks with a model, `ratoon generate MODEL PROMPT` answers"),
        (["stop"], "error: MODEL is missing; usage: ratoon stop [OPTION ...] MODEL"),
        (["transcribe", "fake", "a.wav", "--format", "sr"], "error: --format: 'sr' is unknown; one of "),
    ],
)  # fmt: skip
def test_a_mistyped_option_or_command_is_told_what_it_may_have_been(words, said, capsys):
    assert said in refusal_of(words, capsys)


def refusal_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command line that is wrong. Returns the one line that it prints."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["serve", "fake", "--balance-by-event"],
            "--balance-by-event is no option of `ratoon serve`; did you mean --balance-by-events?",
        ),
        (["serve", "fake", "--balance"], "did you mean --balance-by-events?"),
        (["serve", "fake", "--max-model=5"], "--max-model is no option of `ratoon serve`; did you mean "),
        (["generate", "fake", "hi", "--temp", "0"], "did you mean --temperature?"),
        (["generate", "fake", "hi", "--no-enable-prefix"], "did you mean --no-enable-prefix-caching?"),
        (["chat", "fake", "--syst", "x"], "did you mean --system?"),
        (["embed", "fake", "x", "--help-a"], "did you mean --help-all?"),
        (["bench", "latency", "fake", "--input", "3"], "--input is no option of `ratoon bench latency`; did you mean"),
        (["serve", "fake", "--max-lo", "8"], "did you mean --max-logprobs, --max-lora-rank or --max-loras?"),
        (["serve", "fake", "--max"], "--max is no option of `ratoon serve`; `ratoon serve --help` lists them"),
    ],
)  # fmt: skip
def test_the_beginning_of_an_option_is_refused_with_the_options_that_begin_so(words, said, capsys):
    assert said in refusal_of(words, capsys)


@pytest.mark.parametrize("words", [["generate", "fake", "hi", "--dance"], ["dance"]])
def test_what_is_like_nothing_gets_no_suggestion(words, capsys):
    assert "did you mean" not in refusal_of(words, capsys)


def test_no_swap_memory_can_be_asked_for(client, capsys):
    assert main(["generate", "fake", "abc", "--raw", "--swap-memory", "0"]) == 0


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "ending: no requests are running\n"),
        (1, "ending: waiting up to 30 s for 1 request running; a second Ctrl-C ends it at once\n"),
        (3, "ending: waiting up to 30 s for 3 requests running; a second Ctrl-C ends it at once\n"),
    ],
)
def test_serve_says_what_it_waits_for_when_it_is_asked_to_end(count, said, capsys):
    say_what_is_waited_for(count, ServerSettings())
    assert capsys.readouterr().err == said


def test_generate_searches_where_the_model_s_files_say_so_and_nothing_is_said_against_it(client, source):
    source.generation_defaults = {"num_beams": 3, "length_penalty": 2.0, "max_new_tokens": 7}
    main(["generate", "fake", "ab", "--raw", "--no-repeat-ngram-size", "2"])
    search = client.added[0].params
    assert (search.beam_width, search.length_penalty, search.max_tokens) == (3, 2.0, 7)
    assert search.no_repeat_ngram_size == 2
    main(["generate", "fake", "ab", "--raw", "--temperature", "0", "--max-tokens", "9", "--forced-eos-token-id", "5"])
    assert isinstance(client.added[1].params, SamplingParams)
    params = client.added[1].params
    assert (params.max_tokens, params.forced_eos_token_id) == (9, [5])
