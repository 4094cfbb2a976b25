"""Damaged model files: any exception while reading them becomes a ModelError with a message of one line.

Known defects are checked where the file is read. This is for the rest, and for the tokenizers library, which panics on
some files: a panic is not an Exception, and writes to standard error.
"""

from __future__ import annotations

import contextlib
import os
import reprlib
import tempfile
from collections.abc import Iterator

from ratoon.core.errors import ModelError, RatoonError

MAX_SHOWN = 80  # characters of a value, or of another library's message
PANIC = "PanicException"  # of pyo3, which has no module to import it from
FETCH_AGAIN = "fetch the file again"

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_SHOWN
_repr.maxlist = _repr.maxdict = _repr.maxtuple = 4
_repr.maxlevel = 3


def show(value: object) -> str:
    """A value of a file for messages: at most one line."""
    return shorten(_repr.repr(value))


def shorten(text: str, length: int = 2 * MAX_SHOWN) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[:length] + "…"


def is_panic(error: BaseException) -> bool:
    return type(error).__name__ == PANIC


@contextlib.contextmanager
def reading(source: str, expected: str = FETCH_AGAIN) -> Iterator[None]:
    """Raise ModelError about `source` for any exception in the block."""
    try:
        yield
    except RatoonError:
        raise
    except RecursionError as error:
        raise ModelError(source, "is nested too deep", expected) from error
    except MemoryError as error:
        raise ModelError(source, "needs more memory to be read than there is", expected) from error
    except OSError as error:
        raise ModelError(source, f"can't be read: {error.strerror or shorten(str(error))}", expected) from error
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise  # KeyboardInterrupt, SystemExit
        raise ModelError(source, f"is damaged: {shorten(str(error) or type(error).__name__)}", expected) from error


@contextlib.contextmanager
def without_panic_messages() -> Iterator[None]:
    """Drop what a panic writes to standard error, which its exception repeats. Other output is written afterwards."""
    with contextlib.ExitStack() as stack:
        try:
            kept = os.dup(2)
            stack.callback(os.close, kept)
            written = stack.enter_context(tempfile.TemporaryFile())
            os.dup2(written.fileno(), 2)
        except OSError:  # no standard error, or no space for a file
            yield
            return
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error) or is_panic(error.__cause__ or error)
            raise
        finally:
            os.dup2(kept, 2)
            written.seek(0)
            if not panicked and (text := written.read()):
                with contextlib.suppress(OSError):
                    os.write(2, text)
