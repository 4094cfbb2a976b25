"""Pictures that tests draw, in the formats that people send, and small configs of the families that read them."""

import io

import numpy as np
from PIL import Image

from ratoon.core.media import MediaConfig, VisionConfig

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def vision(**changes) -> VisionConfig:
    return VisionConfig(**{"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1, **changes})


QWEN = MediaConfig(
    "qwen2_5_vl",
    vision(patch_size=14, temporal_patch_size=2, merge_size=2, tokens_per_second=2.0),
    image_token_id=5,
    video_token_id=6,
    mean=CLIP_MEAN,
    std=CLIP_STD,
)
GEMMA = MediaConfig("gemma3", vision(patch_size=14, image_size=224), image_token_id=7, num_rows=16)
IDEFICS = MediaConfig(
    "idefics3",
    vision(patch_size=14, image_size=56, merge_size=2),
    image_token_id=8,
    num_rows=4,
    processor={"size": {"longest_edge": 4 * 56}, "max_image_size": {"longest_edge": 56}},
)


def drawn(width: int, height: int, channels: int = 3) -> np.ndarray:
    """Gradients, edges and noise: [height, width, channels]."""
    y, x = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(width * 10007 + height).integers(0, 60, (height, width, channels))
    waves = np.stack([120 + 70 * np.sin((x * (c + 1) + y * (3 - c)) / 9) for c in range(channels)], axis=-1)
    waves[(x // 8 + y // 8) % 2 == 0] += 40
    return np.clip(waves + noise, 0, 255).astype(np.uint8)


def saved(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def _turned() -> bytes:
    image = Image.fromarray(drawn(90, 60))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    return saved(image, "JPEG", exif=exif)


def _with_alpha() -> Image.Image:
    pixels = drawn(77, 50, 4)
    pixels[:20, :20, 3] = 0
    return Image.fromarray(pixels)


def _palette_with_transparency() -> bytes:
    image = Image.fromarray(drawn(64, 40)).quantize(16)
    return saved(image, "PNG", transparency=3)


def files() -> dict[str, bytes]:
    color, grey = Image.fromarray(drawn(123, 71)), Image.fromarray(drawn(50, 80, 1)[..., 0])
    deep = Image.fromarray(drawn(60, 45, 1)[..., 0].astype(np.uint16) * 257)
    others = [Image.fromarray(drawn(64, 64)), Image.fromarray(255 - drawn(64, 64))]
    return {
        "jpeg": saved(color, "JPEG", quality=88),
        "png": saved(color, "PNG"),
        "bmp": saved(color, "BMP"),
        "tiff": saved(color, "TIFF"),
        "webp": saved(color, "WEBP", lossless=True),
        "ppm": saved(color, "PPM"),
        "png with alpha": saved(_with_alpha(), "PNG"),
        "grey with alpha": saved(_with_alpha().convert("LA"), "PNG"),
        "grey": saved(grey, "JPEG"),
        "16 bit": saved(deep, "PNG"),
        "one bit": saved(grey.convert("1"), "PNG"),
        "turned": _turned(),
        "cmyk": saved(color.convert("CMYK"), "JPEG"),
        "palette": saved(color.quantize(32), "PNG"),
        "palette with transparency": _palette_with_transparency(),
        "animated gif": saved(others[0], "GIF", save_all=True, append_images=others[1:]),
        "animated webp": saved(others[0], "WEBP", save_all=True, append_images=others[1:], lossless=True),
    }
