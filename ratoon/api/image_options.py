"""Images on the command line: the options --image and --video, paths in a typed message, and the parts of messages that
they become.

Files are read when they are named, and travel as data URLs, to a model in this process as to a server. Nothing is
decoded here.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from ratoon.core.errors import RequestError
from ratoon.core.media import IMAGE, VIDEO

# Content types by the ends of file names
TYPES = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif",
    ".bmp": "image/bmp", ".tif": "image/tiff", ".tiff": "image/tiff",
}  # fmt: skip
WORD = re.compile(r'"[^"\n]*"|\'[^\'\n]*\'|(?:\\.|\S)+')  # of a typed text; terminals paste paths in these forms
UNKNOWN_TYPE = "application/octet-stream"
PATHS = {IMAGE: "the path of an image", VIDEO: "the path of a video"}


class VideoPath(str):
    """The value of --video, which stands in one list with those of --image, in their order."""


class ImageFile(NamedTuple):
    """The file of an image, or of a video."""

    path: Path
    data: bytes
    kind: str = IMAGE

    @property
    def option(self) -> str:
        return f"--{self.kind}"

    def as_part(self) -> dict[str, Any]:
        content_type = TYPES.get(self.path.suffix.lower(), UNKNOWN_TYPE)
        if self.kind == VIDEO:
            guessed = mimetypes.guess_type(self.path.name)[0] or ""
            content_type = guessed if guessed.startswith("video/") else UNKNOWN_TYPE
        url = f"data:{content_type};base64,{base64.b64encode(self.data).decode('ascii')}"
        return {"type": f"{self.kind}_url", f"{self.kind}_url": {"url": url}}


def add_image_option(parser: argparse.ArgumentParser, where: str) -> None:
    """`where` says where in the prompt the image or the video stands."""
    common: dict[str, Any] = {"dest": "images", "metavar": "FILE", "action": "append"}
    parser.add_argument("--image", default=[], help=f"an image {where}; may be repeated", **common)
    parser.add_argument("--video", type=VideoPath, default=[], help=f"a video {where}", **common)


def read_images(paths: Sequence[str]) -> list[ImageFile]:
    """RequestError: a file is missing, or can't be read."""
    return [
        read_image(Path(path).expanduser(), "--video", VIDEO)
        if isinstance(path, VideoPath)
        else read_image(Path(path).expanduser(), "--image")
        for path in paths
    ]


def read_image(path: Path, field: str, kind: str = IMAGE) -> ImageFile:
    """`field` is what the path was given by."""
    try:
        return ImageFile(path, path.read_bytes(), kind)
    except OSError as error:
        raise RequestError(field, f"{path} can't be read ({error.strerror})", PATHS[kind]) from None


def content_of(text: str, images: Sequence[ImageFile]) -> str | list[dict[str, Any]]:
    """The content of a message: the images come first."""
    if not images:
        return text
    parts = [image.as_part() for image in images]
    return [*parts, {"type": "text", "text": text}] if text else parts


class TypedMessage(NamedTuple):
    text: str  # without the paths
    paths: list[Path]


def split_paths(typed: str) -> TypedMessage:
    """Takes the paths of images that exist out of a typed or pasted text."""
    whole = _image_at(typed.strip())
    if whole is not None:
        return TypedMessage("", [whole])
    paths: list[Path] = []

    def take(word: re.Match[str]) -> str:
        path = _image_at(word[0])
        if path is None:
            return word[0]
        paths.append(path)
        return ""

    text = WORD.sub(take, typed)
    return TypedMessage(re.sub(r" {2,}", " ", text).strip() if paths else typed, paths)


def begins_with_image(typed: str) -> bool:
    """Whether a text begins with the path of an image that exists, or is one."""
    first = WORD.match(typed)
    return _image_at(typed) is not None or (first is not None and _image_at(first[0]) is not None)


def _image_at(word: str) -> Path | None:
    """The image that a word is the path of; None: there is none."""
    if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'":
        spellings = [word[1:-1]]
    else:
        spellings = [word, re.sub(r"\\(.)", r"\1", word)]
    for spelling in spellings:
        if spelling.lower().startswith("file://"):
            spelling = unquote(spelling[len("file://") :])
        if not spelling.lower().endswith(tuple(TYPES)):
            continue
        try:
            path = Path(spelling).expanduser()
            if path.is_file():
                return path
        except (OSError, RuntimeError, ValueError):  # too long, an unknown user, characters that no path has
            continue
    return None
