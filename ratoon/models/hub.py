"""Models of the Hugging Face hub: fetched into its cache by `huggingface_hub`, which heeds HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE. Only the files that an engine reads are fetched. Errors become ModelErrors."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.core.errors import ModelError
from ratoon.core.sizes import format_size

HUB_FILES = (
    "*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "1_Pooling/config.json", "modules.json",
    "config_sentence_transformers.json",
)  # fmt: skip
HUB_IGNORED = ("consolidated*.safetensors", "original/*")  # duplicates of the weights
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
MAX_SHOWN_FILES = 8
WATCH_INTERVAL = 0.2  # seconds between polls
# Smaller files are fetched again from their beginning; for larger ones than the second, the hub has no plain HTTP.
RESUMED_SIZES = range(2**20, 50 * 10**9)
PARTIAL = ".ratoon.incomplete"  # what the name of a partially fetched file ends with, in the cache's folder of blobs

Watch = Callable[[int], None]  # called with the bytes fetched so far


def download(hub_id: str, expected: str, revision: str | None = None) -> Path:
    """The model's folder in the hub's cache, fetched if missing. `expected` ends the error of an unknown id."""
    from huggingface_hub import snapshot_download

    with hub_errors(hub_id, expected):
        return Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_IGNORED)
            )
        )


def download_file(hub_id: str, file: str, expected: str, revision: str | None = None) -> Path:
    """One file of a repository, such as a GGUF file, fetched if missing."""
    from huggingface_hub import hf_hub_download

    with hub_errors(hub_id, expected):
        return Path(hf_hub_download(hub_id, file, revision=revision))


def fetch_resumably(hub_id: str, files: Mapping[str, HubFile], expected: str, revision: str | None = None) -> None:
    """Fetches large files into the cache, from where an interrupted run left off: newer versions of the hub's library
    delete what they have when they are interrupted. `download` and `download_file` then find these files."""
    with hub_errors(hub_id, expected):
        for name, file in files.items():
            if file.size in RESUMED_SIZES:
                _fetch_blob(hub_id, name, revision)


def _fetch_blob(hub_id: str, name: str, revision: str | None) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    try:  # It is not documented, and was tested in version 2.4. Without it the library fetches files its own way
        from huggingface_hub.file_download import http_get
    except ImportError:
        return
    url = hf_hub_url(hub_id, name, revision=revision)
    known = get_hf_file_metadata(url)
    if not known.etag or not known.size:
        return
    blob = cache_folder(hub_id) / "blobs" / known.etag
    partial = blob.with_name(known.etag + PARTIAL)
    blob.parent.mkdir(parents=True, exist_ok=True)
    if blob.exists():
        return
    with partial.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process that fetches it is waited for
        if blob.exists():
            return
        begin = os.fstat(file.fileno()).st_size
        if begin > known.size:
            file.truncate(0)
            begin = 0
        http_get(url, file, resume_size=begin, headers=build_hf_headers(), expected_size=known.size)
        file.flush()
        os.replace(partial, blob)


@dataclass(frozen=True, slots=True)
class HubFile:
    size: int
    sha256: str | None  # None: the hub does not say, as for small files


def files_of(hub_id: str, expected: str, revision: str | None = None) -> dict[str, HubFile]:
    """All files of a repository. ModelError: there is no such repository, or no such revision."""
    from huggingface_hub import HfApi

    with hub_errors(hub_id, expected):
        files = HfApi().model_info(hub_id, revision=revision, files_metadata=True).siblings or []
    return {file.rfilename: HubFile(file.size or 0, None if file.lfs is None else file.lfs.sha256) for file in files}


def wanted_files(hub_id: str, files: Mapping[str, HubFile]) -> dict[str, HubFile]:
    """The files that `download` fetches. Raises ModelError for a repository without a config too."""
    from huggingface_hub.utils import filter_repo_objects

    wanted = filter_repo_objects(files, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_IGNORED))
    found = {path: files[path] for path in wanted}
    if "config.json" not in found or not any(path.endswith(".safetensors") for path in found):
        hint = "a repository with config.json and safetensors files"
        gguf = sorted(path for path in files if path.endswith(".gguf"))
        if gguf:
            hint += f", or --file NAME, one of {', '.join(gguf[:MAX_SHOWN_FILES])}" + (
                "…" * (len(gguf) > MAX_SHOWN_FILES)
            )
        raise ModelError(hub_id, "is no model in the form that is read", hint)
    return found


def verify_checksums(hub_id: str, paths: Mapping[Path, HubFile]) -> int:
    """Compares fetched files with the hub's SHA-256 sums, where it has one. Returns how many were compared.
    ModelError: one differs; it is deleted, so that the next download fetches it again."""
    num_compared = 0
    for path, file in paths.items():
        if file.sha256 is None:
            continue
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != file.sha256:
            blob = path.resolve()
            path.unlink(missing_ok=True)
            blob.unlink(missing_ok=True)
            problem = f"{path.name} has the SHA-256 sum {found}, and the hub's is {file.sha256}"
            raise ModelError(hub_id, problem, "the file was deleted; fetch it again")
        num_compared += 1
    return num_compared


def remove(hub_id: str, revision: str | None = None) -> int:
    """Deletes a model from the cache; returns the bytes that this freed. ModelError: it is not there."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    expected = "one that `ratoon list` shows with the kind hub"
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        raise ModelError(hub_id, "is not in the hub's cache", expected) from None
    repo = next((one for one in cache.repos if one.repo_id == hub_id and one.repo_type == "model"), None)
    if repo is None and cache_folder(hub_id).is_dir():  # an interrupted download: no revision of it is whole
        num_bytes = num_bytes_cached(hub_id)
        shutil.rmtree(cache_folder(hub_id))
        return num_bytes
    if repo is None:
        raise ModelError(hub_id, "is not in the hub's cache", expected)
    found = [one for one in repo.revisions if revision in (None, one.commit_hash, *one.refs)]
    if not found:
        known = sorted({name for one in repo.revisions for name in (*one.refs, one.commit_hash)})
        raise ModelError(hub_id, f"has no revision {revision!r} in the cache", f"one of {', '.join(known)}")
    strategy = cache.delete_revisions(*(one.commit_hash for one in found))
    strategy.execute()
    return int(strategy.expected_freed_size)


def fetch_config(hub_id: str, expected: str, revision: str | None = None) -> Path:
    """Fetch config.json only, to check that the model is supported before large files are fetched."""
    from huggingface_hub import hf_hub_download

    with hub_errors(hub_id, expected):
        return Path(hf_hub_download(hub_id, "config.json", revision=revision))


def cache_folder(hub_id: str) -> Path:
    """Where the hub's cache keeps this model."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"


def num_bytes_cached(hub_id: str) -> int:
    """Bytes in the cache, including partially fetched files."""
    total = 0
    for file in (cache_folder(hub_id) / "blobs").glob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # renamed on completion
            continue
    return total


def verify_space(hub_id: str, num_bytes: int) -> None:
    """Raise ModelError if `num_bytes` more do not fit on the cache's disk."""
    folder = cache_folder(hub_id)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        problem = f"needs {format_size(num_bytes)} more, and {format_size(free)} are free at {folder}"
        raise ModelError(hub_id, problem, "make room, or set HF_HOME to a folder on another disk")


@contextmanager
def watched(hub_id: str, watch: Watch) -> Iterator[None]:
    """Inside the block, `watch` is called periodically with the bytes fetched so far. The hub's own progress bars are
    off, since they differ between its versions."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    done = threading.Event()

    def look() -> None:
        while not done.wait(WATCH_INTERVAL):
            watch(num_bytes_cached(hub_id))

    thread = threading.Thread(target=look, name="watch a download", daemon=True)
    disable_progress_bars()
    thread.start()
    try:
        yield
        watch(num_bytes_cached(hub_id))
    finally:
        done.set()
        thread.join()
        enable_progress_bars()


@contextmanager
def hub_errors(hub_id: str, expected: str) -> Iterator[None]:
    """Convert the hub library's exceptions to ModelError."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except ModelError:
        raise
    except GatedRepoError as error:
        raise ModelError(hub_id, "is gated on the hub", "accept its terms there, then set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelError(hub_id, "has no such revision on the hub", "a branch, a tag or a commit") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(hub_id, "is neither here nor on the hub", expected) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        problem = (
            "is neither a path here nor in the hub's cache, and the hub can't be reached (or HF_HUB_OFFLINE is set)"
        )
        raise ModelError(hub_id, problem, expected) from error
    except Exception as error:  # the class of connection errors depends on the hub's HTTP library
        if _is_full_disk(error):
            problem = f"can't be kept: no space is left at {cache_folder(hub_id)}"
            raise ModelError(hub_id, problem, "make room, or set HF_HOME to a folder on another disk") from error
        if _is_connection_error(error):
            where = os.environ.get("HF_ENDPOINT", "huggingface.co")
            raise ModelError(hub_id, f"the hub ({where}) can't be reached", "is there a network?") from error
        raise ModelError(hub_id, f"can't be fetched from the hub: {error}", expected) from error


def _is_full_disk(error: BaseException | None) -> bool:
    return _any_cause(error, lambda cause: isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))


def _is_connection_error(error: BaseException) -> bool:
    names = ("ConnectError", "ConnectTimeout", "ConnectionError", "NewConnectionError")
    return _any_cause(error, lambda cause: isinstance(cause, ConnectionError) or type(cause).__name__ in names)


def _any_cause(error: Any, is_it: Callable[[Any], bool]) -> bool:
    while error is not None:
        if is_it(error):
            return True
        error = error.__cause__ or error.__context__
    return False
