"""Pictures in messages: OpenAI's `image_url` parts, decoded, and the ids of a conversation with room for them.

    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}, {"type": "text", "text": "What is it?"}]

A chat template of a model that sees writes one picture token where it meets a part `{"type": "image"}`. So the parts
are handed to it as such (`without_pictures`), and afterwards each picture token becomes as many as its picture has
blocks (`with_room`).

Only `data:` URLs are read, PNG and JPEG alone, by Pillow: nothing is fetched for whoever writes a message, and a small
file cannot claim the memory of a large picture (`MOST_PIXELS`, of which the header tells before a pixel is decoded).
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from minimegatron.config.vision import VisionFields
from minimegatron.data.pictures import Grid, fitting_size
from minimegatron.errors import ConfigError, DataError

MOST_PIXELS = 32 << 20  # 100 MB decoded
FORMATS = {"png": "PNG", "jpeg": "JPEG", "jpg": "JPEG"}
_URL = re.compile(r"data:image/([a-z]+);base64,(.*)", re.DOTALL)


def decoded(url: str) -> np.ndarray:
    """The picture of a `data:` URL, [H, W, 3] of uint8.

    Raises:
        DataError: another kind of URL or of file, a broken one, or one with too many pixels.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise ConfigError("pictures need the pillow package", fix="pip install pillow") from None
    found = _URL.fullmatch(url)
    if found is None or found[1] not in FORMATS:
        shown = url if len(url) <= 40 else url[:40] + "..."
        raise DataError(f"{shown!r} is not read as a picture", fix="data:image/png;base64,... or data:image/jpeg;...")
    try:
        file = io.BytesIO(base64.b64decode(found[2], validate=True))
        with Image.open(file, formats=[FORMATS[found[1]]]) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise DataError(
                    f"a picture of {picture.width} x {picture.height} pixels, and at most {MOST_PIXELS} are decoded",
                    fix="a smaller picture",
                )
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except (binascii.Error, UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"a broken picture: {error}", fix=f"base64 of a {FORMATS[found[1]]} file") from None


def url_of(picture: np.ndarray) -> str:
    """A picture [H, W, 3] of uint8 as a `data:` URL of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def resized(picture: np.ndarray, config: VisionFields, most: int = 1280) -> np.ndarray:
    """A picture in a size that the model reads, of at most so many tokens (`fitting_size`); bicubic; for CLIP the
    middle of it.

    Raises:
        DataError: as `fitting_size`.
    """
    height, width = picture.shape[:2]
    size = fitting_size(height, width, config, most=most)
    if size != (height, width):
        from PIL import Image

        picture = np.asarray(Image.fromarray(picture).resize(size[::-1], Image.Resampling.BICUBIC))
    if config.vision_image_size is None:
        return picture
    top, left = ((n - config.vision_image_size) // 2 for n in size)
    return picture[top : top + config.vision_image_size, left : left + config.vision_image_size]


def without_pictures(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """(messages with `{"type": "image"}` in place of each `image_url`, the URLs in their order).

    Contents that are one text stay as they are.

    Raises:
        DataError: a part of another kind.
    """
    urls: list[str] = []

    def plain(part: Any) -> dict[str, Any]:
        match part:
            case {"type": "text", "text": str(text)}:
                return {"type": "text", "text": text}
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                urls.append(url)
                return {"type": "image"}
        raise DataError(f"a part {str(part)[:60]!r} of a message", fix='a "text", or an "image_url" with a "url"')

    found = [
        {**message, "content": [plain(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]
    return found, urls


def with_room(ids: Sequence[int], grids: Sequence[Grid], config: VisionFields) -> Iterator[tuple[int, int]]:
    """(id, how many times) for each id of a conversation: a picture token as often as its picture has blocks.

    Args:
        ids: with one picture token for each picture.
        grids: of the pictures, in order.

    Raises:
        DataError: the conversation has another number of picture tokens.
    """
    count = sum(token == config.image_token_id for token in ids)
    if count != len(grids):
        raise DataError(
            f"{len(grids)} pictures, and the conversation has {count} picture tokens, of id {config.image_token_id}",
            fix="a chat template that writes image_token_id for each part of type image, and no such token in a text",
        )
    left = iter(grids)
    for token in ids:
        yield token, next(left).tokens(config) if token == config.image_token_id else 1
