"""Pictures as arrays: conversion to RGB as transformers does it.

A picture here is uint8 [height, width, 3]. Files are opened in decode.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratoon.core.errors import RequestError
from ratoon.media.items import IMAGE_FORMS, is_array

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

HOW_TO_INSTALL = "pip install 'ratoon[images]'"
NUM_CHANNELS = (1, 3, 4)


def require_pillow(field: str) -> None:
    """RequestError: Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise RequestError(field, "images need Pillow, which is not installed", HOW_TO_INSTALL) from None


def verify_pixels(field: str, height: int, width: int, max_pixels: int) -> None:
    if height < 1 or width < 1:
        raise RequestError(field, f"has {width} × {height} pixels", "at least one")
    if height * width > max_pixels:
        raise RequestError(field, f"has {width} × {height} pixels", f"at most {max_pixels} (max_image_pixels)")


def rgb_of_image(image: Image.Image) -> np.ndarray:
    """The pixels of an image of Pillow. What is transparent shows white, as in transformers' `convert_to_rgb`."""
    import numpy as np
    from PIL import Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.array(image.convert("RGB"))


def rgb_of_array(field: str, picture: Any, max_pixels: int) -> np.ndarray:
    """The pixels of an array or a tensor: [height, width], or with 1, 3 or 4 channels in front or behind. Whole numbers
    are from 0 to 255, floats from 0 to 1."""
    import numpy as np

    array = to_numpy(field, picture)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or not (array.shape[0] in NUM_CHANNELS or array.shape[-1] in NUM_CHANNELS):
        raise RequestError(field, f"has the shape {list(array.shape)}", IMAGE_FORMS)
    if array.shape[0] in NUM_CHANNELS:  # also where both could be channels, as in transformers
        array = np.moveaxis(array, 0, -1)
    verify_pixels(field, array.shape[0], array.shape[1], max_pixels)
    array = _to_bytes(field, array)
    if array.shape[-1] == 1:
        return np.repeat(array, 3, axis=-1)
    if array.shape[-1] == 4:
        opacity = array[..., 3:] / 255
        return np.round(opacity * array[..., :3] + (1 - opacity) * 255).astype(np.uint8)
    return np.array(array, order="C")  # a copy: the caller may write into its own while this one is read


def to_numpy(field: str, values: Any) -> np.ndarray:
    """An array of numpy with the values of an array, or of a tensor on any device."""
    import numpy as np

    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
        if "bfloat16" in str(getattr(values, "dtype", "")):
            values = values.float()  # numpy has no such type
        return np.asarray(values)
    except Exception as error:  # ragged lists, whatever has an __array__ of its own
        raise RequestError(field, f"is not an array ({error})", "an array of numbers") from None


def _to_bytes(field: str, array: np.ndarray) -> np.ndarray:
    import numpy as np

    if array.dtype == np.uint8:
        return array
    kind, highest = array.dtype.kind, 1 if array.dtype.kind == "f" else 255
    if kind not in "fiu":
        raise RequestError(field, f"holds {array.dtype}", "whole numbers from 0 to 255, or floats from 0 to 1")
    if not (array.min() >= 0 and array.max() <= highest):  # also: not a number
        problem = f"holds {array.dtype} from {array.min()} to {array.max()}"
        raise RequestError(field, problem, "whole numbers from 0 to 255, or floats from 0 to 1")
    return np.round(array * 255).astype(np.uint8) if kind == "f" else array.astype(np.uint8)


def is_picture(value: Any) -> bool:
    """Whether it is decoded: an image of Pillow, or an array."""
    return hasattr(value, "getbands") or is_array(value)
