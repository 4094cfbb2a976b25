"""`ratoon transcribe MODEL AUDIO…`: speech to text, JSON or subtitles."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.api.options import Subparsers, add_common_options, add_engine_options, open_llm
from ratoon.core.errors import RequestError
from ratoon.transcription.formats import FORMATS, SUBTITLES, SUFFIXES, as_dict, as_verbose_dict, render
from ratoon.transcription.options import TEMPERATURES, TranscriptionOptions
from ratoon.transcription.vocabulary import TASKS

if TYPE_CHECKING:
    from ratoon.transcription.results import Transcription

DESCRIPTION = """Transcribe recordings with a speech model (Whisper, Moonshine).

Recordings may be of any length, and are processed together. The text is printed, or written to files in --output-dir,
each named after its recording. The recording "-" is read from standard input. Containers and codecs other than plain
WAV files at 16 kHz need PyAV: pip install "ratoon[audio]"."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("transcribe", help="transcribe recordings", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument("prompts", metavar="AUDIO", nargs="*", help="a recording's file; - reads standard input")
    parser.add_argument("--format", choices=FORMATS, default="text", help="default text")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="write a file there for each recording")
    add_speech_options(parser)
    add_engine_options(parser, without=("task",))
    add_common_options(parser)
    parser.set_defaults(run=run)


def add_speech_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speech")
    group.add_argument("--language", metavar="NAME", help="a code or a name, such as en; default: detected")
    group.add_argument("--task", choices=TASKS, default="transcribe", help="translate: to English")
    group.add_argument("--prompt", metavar="TEXT", help="context before the recording: spelling of names, a style")
    group.add_argument("--beam-size", type=int, metavar="N", help="beam search with N beams; default: greedy")
    group.add_argument("--temperature", type=float, metavar="X", help="default: 0, raised where a text is rejected")
    group.add_argument(
        "--word-timestamps", action="store_true", help="find the times of words; they are in --format verbose_json"
    )
    group.add_argument(
        "--no-timestamps", action="store_true", help="windows of 30 seconds, in parallel: faster, but may cut words"
    )
    group.add_argument(
        "--condition-on-previous-text", action="store_true", help="use the text of the previous window as context"
    )


def run(args: argparse.Namespace) -> int:
    options = transcription_options(args)
    options.verify()  # before the model is loaded
    check_outputs(args)
    found = [name for name in args.prompts if name == "-" or Path(name).is_file()]
    failed = len(args.prompts) - len(found)
    for name in args.prompts:
        if name not in found:
            print(f"error: {name}: there is no such file", file=sys.stderr)
    if not found:
        return 2  # as for other missing input, and before the model is loaded
    if args.output_dir is not None:
        make_folder(args.output_dir)
    recordings = [sys.stdin.buffer.read() if name == "-" else name for name in found]
    with open_llm(args) as llm:
        transcriptions = llm.transcribe(recordings, **{name: getattr(options, name) for name in GIVEN})
    assert isinstance(transcriptions, list)
    for name, transcription in zip(found, transcriptions):
        problem = transcription.error
        if problem is None and args.output_dir is not None:
            problem = write_transcription(transcription, output_path(args, name), args.format)
        if problem is not None:
            failed += 1
            print(f"error: {name}: {problem}", file=sys.stderr)
        elif args.output_dir is not None:
            print(output_path(args, name))
        else:
            print_transcription(transcription, name, args.format, heading=len(transcriptions) > 1)
    return 1 if failed else 0


GIVEN = (
    "language", "task", "word_timestamps", "timestamps", "prompt", "temperature", "beam_size",
    "condition_on_previous_text",
)  # fmt: skip


def transcription_options(args: argparse.Namespace) -> TranscriptionOptions:
    return TranscriptionOptions(
        language=args.language,
        task=args.task,
        word_timestamps=args.word_timestamps,
        timestamps=not args.no_timestamps,
        prompt=args.prompt,
        temperature=args.temperature or TEMPERATURES,
        beam_size=args.beam_size,
        condition_on_previous_text=args.condition_on_previous_text,
    )


def check_outputs(args: argparse.Namespace) -> None:
    """RequestError for results that could not be printed or written."""
    if not args.prompts:
        raise RequestError("AUDIO", "is missing", "a recording's file, or - to read standard input")
    if args.format in SUBTITLES and args.no_timestamps:
        raise RequestError("--no-timestamps", f"{args.format} needs timestamps", "leave it out")
    if args.word_timestamps and args.format != "verbose_json":
        problem = f"{args.format} has no place for them"
        raise RequestError("--word-timestamps", problem, "--format verbose_json")
    if args.output_dir is None:
        if args.format in SUBTITLES and len(args.prompts) > 1:
            raise RequestError("--format", f"{args.format} is for one recording", "add --output-dir")
        return
    paths = Counter(output_path(args, name) for name in args.prompts)
    twice = next((path for path, count in paths.items() if count > 1), None)
    if twice is not None:
        raise RequestError("--output-dir", f"two recordings would be written to {twice}", "one after the other")


def output_path(args: argparse.Namespace, name: str) -> Path:
    stem = "stdin" if name == "-" else Path(name).stem
    folder: Path = args.output_dir
    return folder / f"{stem}.{SUFFIXES[args.format]}"


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"can't create the folder {folder}: {error.strerror}"
        raise RequestError("--output-dir", problem, "a folder that can be written to") from None


def write_transcription(transcription: Transcription, path: Path, format: str) -> str | None:
    """The error that kept it from being written, or None."""
    try:
        path.write_text(render(transcription, format), encoding="utf-8")
    except OSError as error:
        return f"can't write {path}: {error.strerror}"
    return None


def print_transcription(transcription: Transcription, name: str, format: str, heading: bool) -> None:
    if format in ("json", "verbose_json"):
        told: dict[str, Any] = (as_verbose_dict if format == "verbose_json" else as_dict)(transcription)
        print(json.dumps({"file": name, **told}, ensure_ascii=False))
        return
    if heading:
        print(f"=== {name}")
    print(render(transcription, format), end="")
