"""From pictures to what a vision transformer reads: patches, where each stands, and which token each becomes.

The problem in a sentence: pictures have many sizes, a vision transformer reads rows of patches, and the text has a
number of picture tokens that follows from the size.

A picture of H x W pixels, both multiples of p m (for CLIP `vision_image_size`), is cut into patches of p x p pixels. A
block of m x m patches becomes one token of the text. Patches of all pictures of a microbatch stand in one row of
patches without padding, as documents do in a packed row, and nothing of one picture is seen by another:

    pixels   [n, 3 T p p]   a patch a row; a still picture is repeated T times, as a video of T equal frames
    patches  [n, 4]         its row and column in the picture, the number of the picture, the number of the window

CLIP has a class token before the patches of a picture: a row of zeros whose place is -1, -1, of which no token of the
text knows.

**Windows.** Most layers attend inside windows of w x w pixels. Patches are therefore ordered by window, a window's by
block, a block's by row, so that a window is a document, too. The order is made here, once, and no layer undoes it:
instead each picture token knows which row of the projector's output is its own:

    picture_rows  [b, s]    row of the projector's output; -1 for a word

It is made of the whole sequence, before cp, tp and pp see it, and is cut with the tokens. A rank of cp whose tokens
begin inside a picture has the rows in the middle of the picture, and needs no count of what the ranks before it have.

**Positions.** With mRoPE a word has one position, three times. A picture of H/(pm) x W/(pm) tokens that begins at
position i has time i everywhere, height i + row and width i + column; the next word has position i + max(rows,
columns). With RoPE a picture's tokens are counted as words are.

Wang et al. 2024 (arXiv 2409.12191), section 2.1; Bai et al. 2025 (arXiv 2502.13923), section 2.1. Megatron-LM:
`examples/multimodal/image_processing.py`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from minimegatron.config.vision import VisionFields
from minimegatron.errors import DataError


class Grid(NamedTuple):
    """A picture's size in patches."""

    rows: int
    columns: int

    def tokens(self, config: VisionFields) -> int:
        """How many tokens of the text it is."""
        return self.rows * self.columns // config.vision_spatial_merge_size**2


def fitting_size(height: int, width: int, config: VisionFields, least: int = 4, most: int = 1280) -> tuple[int, int]:
    """The size to which a picture is resized: multiples of p m, about its shape, `least` to `most` tokens; for CLIP
    the shorter side is `vision_image_size`, whatever the tokens.

    Raises:
        DataError: one side is more than 200 times the other.
    """
    side = config.vision_patch_size * config.vision_spatial_merge_size
    if max(height, width) > 200 * min(height, width):
        raise DataError(
            f"a picture of {height} x {width} pixels: one side is more than 200 times the other", fix="cut the picture"
        )
    if (size := config.vision_image_size) is not None:
        return tuple(int(size * n / min(height, width)) for n in (height, width))  # type: ignore[return-value]
    h, w = (round(n / side) for n in (height, width))
    if h * w > most:
        shrink = math.sqrt(height * width / (most * side * side))
        h, w = (max(1, math.floor(n / shrink / side)) for n in (height, width))
    elif h * w < least:
        grow = math.sqrt(least * side * side / (height * width))
        h, w = (math.ceil(n * grow / side) for n in (height, width))
    return h * side, w * side


def patches_of(picture: np.ndarray, config: VisionFields) -> tuple[torch.Tensor, Grid]:
    """A picture's patches, block by block.

    Args:
        picture: [H, W, 3] of uint8; H and W are multiples of p m, for CLIP both `vision_image_size`.

    Returns:
        [n, 3 T p p] in fp32, normalised: the channel varies slowest, then the frame, the row, the column.

    Raises:
        DataError: another shape.
    """
    p, m, frames = config.vision_patch_size, config.vision_spatial_merge_size, config.vision_temporal_patch_size
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.shape[0] % (p * m) or picture.shape[1] % (p * m):
        raise DataError(
            f"a picture of shape {picture.shape}; sides must be multiples of {p * m} pixels, and 3 channels",
            fix="resize it (data.pictures.fitting_size)",
        )
    if (size := config.vision_image_size) is not None and picture.shape[:2] != (size, size):
        raise DataError(
            f"a picture of shape {picture.shape}, and the encoder sees {size} x {size} pixels",
            fix="resize it (data.picture_messages.resized)",
        )
    grid = Grid(picture.shape[0] // p, picture.shape[1] // p)
    numbers = torch.from_numpy(picture.astype(np.float32)) / 255
    numbers = (numbers - torch.tensor(config.tower.mean)) / torch.tensor(config.tower.std)
    blocks = numbers.view(grid.rows // m, m, p, grid.columns // m, m, p, 3).permute(0, 3, 1, 4, 6, 2, 5)
    patches = blocks.reshape(-1, 3, 1, p * p).expand(-1, -1, frames, -1)
    return patches.reshape(-1, config.patch_channels), grid


@functools.lru_cache(maxsize=256)
def _ordered(grid: Grid, m: int, w: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """For one picture: the block at each place, the place of each block, [row, column, window] of each patch at its
    place, and the number of windows; w is the side of a window in blocks."""
    rows, columns = grid.rows // m, grid.columns // m
    row, column = (x.flatten() for x in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    window = row // w * -(-columns // w) + column // w
    order = window.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    i, j = (x.flatten() for x in torch.meshgrid(torch.arange(m), torch.arange(m), indexing="ij"))
    of_patch = [row[order, None] * m + i, column[order, None] * m + j, window[order, None].expand(-1, m * m)]
    return order, place, torch.stack([x.flatten() for x in of_patch], 1), int(window[-1]) + 1


class Pictures(NamedTuple):
    """The pictures of a microbatch, in the order of their tokens.

    Attributes:
        pixels: [n, 3 T p p] in fp32.
        patches: [n, 4] int64: row, column, picture, window.
        rows: for each picture the row of the projector's output of each of its tokens.
    """

    pixels: torch.Tensor
    patches: torch.Tensor
    rows: list[torch.Tensor]


def arranged(pictures: Sequence[tuple[torch.Tensor, Grid]], config: VisionFields) -> Pictures:
    """Patches of several pictures in the order of windows.

    Args:
        pictures: as `patches_of` returns each.
    """
    m = config.vision_spatial_merge_size
    w = config.vision_window_size // m // config.vision_patch_size
    pixels, patches, rows = [torch.zeros(0, config.patch_channels)], [torch.zeros(0, 4, dtype=torch.int64)], []
    tokens = windows = 0
    for number, (of_picture, grid) in enumerate(pictures):
        order, place, found, count = _ordered(grid, m, w)
        if config.tower.class_token:
            pixels.append(torch.zeros(1, config.patch_channels))
            patches.append(torch.tensor([[-1, -1, number, windows]]))
            tokens += 1
        pixels.append(of_picture.unflatten(0, (-1, m * m))[order].flatten(0, 1))
        picture = torch.full((len(found), 1), number)
        patches.append(torch.cat([found[:, :2], picture, found[:, 2:] + windows], 1))
        rows.append(place + tokens)
        tokens, windows = tokens + len(place), windows + count
    return Pictures(torch.cat(pixels), torch.cat(patches), rows)


def pictures_in(ids: torch.Tensor, grids: Sequence[Grid], config: VisionFields) -> Iterator[tuple[int, Grid]]:
    """(first token, grid) of each picture of one text.

    Args:
        ids: [s] ids of the text.
        grids: of its pictures, in order.

    Raises:
        DataError: the text has other picture tokens than its pictures need, for example because it was cut.
    """
    assert config.image_token_id is not None, "a model that sees has one"
    places = (ids == config.image_token_id).nonzero().flatten().tolist()
    wanted = [grid.tokens(config) for grid in grids]
    at = 0
    for number, (grid, n) in enumerate(zip(grids, wanted, strict=True)):
        if at + n > len(places) or places[at + n - 1] - places[at] != n - 1:
            raise DataError(
                f"picture {number} of {grid.rows} x {grid.columns} patches needs {n} picture tokens in a row; the text "
                f"of {len(ids)} tokens has {len(places)} of the {sum(wanted)} that its pictures need",
                fix="do not cut a text inside of a picture: a longer seq_length, or smaller pictures",
            )
        yield places[at], grid
        at += n
    if at < len(places):
        raise DataError(
            f"a text with {len(places)} picture tokens, and pictures for {at}",
            fix=f"give every picture, or keep the id {config.image_token_id} out of the text",
        )


def picture_positions(ids: torch.Tensor, grids: Sequence[Grid], config: VisionFields) -> torch.Tensor:
    """Time, height and width of each token of one text, [3, s] int64.

    Args:
        ids, grids: as of `pictures_in`.

    Raises:
        DataError: see `pictures_in`.
    """
    m, spans, at, here = config.vision_spatial_merge_size, [], 0, 0
    for first, grid in pictures_in(ids, grids, config):
        rows, columns = grid.rows // m, grid.columns // m
        spans.append(torch.arange(here, here + first - at).expand(3, -1))
        here += first - at
        axes = (torch.zeros(1, dtype=torch.int64), torch.arange(rows), torch.arange(columns))
        spans.append(here + torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1))
        at, here = first + rows * columns, here + max(rows, columns)
    spans.append(torch.arange(here, here + len(ids) - at).expand(3, -1))
    return torch.cat(spans, 1)


class Seen(NamedTuple):
    """A text with pictures, a document of its own.

    Attributes:
        ids: [n] int64, the picture tokens among them.
        pictures: in the order of their tokens, as `patches_of` returns each.
    """

    ids: torch.Tensor
    pictures: Sequence[tuple[torch.Tensor, Grid]] = ()


def picture_inputs(rows: Sequence[Sequence[Seen]], config: VisionFields) -> dict[str, torch.Tensor]:
    """What a batch has beside tokens, labels and masks.

    Args:
        rows: the texts of each row of the batch, one after the other; all rows have the same length s.

    Returns:
        `pixels` and `patches` of all pictures; `picture_rows` [b, s]; `position_ids` [3, b, s] with mRoPE, else [b, s],
        which begin anew with each text.

    Raises:
        DataError: a text has other picture tokens than its pictures need.
    """
    found = arranged([picture for row in rows for seen in row for picture in seen.pictures], config)
    left, of_tokens, positions, three = iter(found.rows), [], [], _three(config)
    for row in rows:
        places, of_row = [], []
        for seen in row:
            grids = [grid for _, grid in seen.pictures]
            picture_rows = torch.full_like(seen.ids, -1)
            for first, _ in pictures_in(seen.ids, grids, config):
                own = next(left)
                picture_rows[first : first + len(own)] = own
            of_row.append(picture_rows)
            straight = torch.arange(len(seen.ids))
            places.append(picture_positions(seen.ids, grids, config) if three else straight)
        of_tokens.append(torch.cat(of_row))
        positions.append(torch.cat(places, -1))
    return {
        "pixels": found.pixels,
        "patches": found.patches,
        "picture_rows": torch.stack(of_tokens),
        "position_ids": torch.stack(positions, -2),
    }


def _three(config: VisionFields) -> bool:
    """Whether a token has three positions."""
    return config.position_embedding_type == "mrope"  # type: ignore[attr-defined, no-any-return]


def blank_inputs(b: int, s: int, config: VisionFields) -> dict[str, torch.Tensor]:
    """What `picture_inputs` gives for `vision_patches_per_sample` patches a sample, all 0: for plans.

    Args:
        b, s: with context parallelism s is a rank's part.
    """
    n = b * config.vision_patches_per_sample
    return {
        "pixels": torch.zeros(n, config.patch_channels),
        "patches": torch.zeros(n, 4, dtype=torch.int64),
        "picture_rows": torch.zeros(b, s, dtype=torch.int64),
        "position_ids": torch.zeros(*([3] * _three(config)), b, s, dtype=torch.int64),
    }


class Picture:
    """A picture of a prompt.

    Attributes:
        patches, grid: as `patches_of` returns them.
        digest: of the patches: pages of a prefix cache must not confuse two pictures, whose tokens are the same.
    """

    def __init__(self, picture: np.ndarray, config: VisionFields) -> None:
        self.patches, self.grid = patches_of(picture, config)
        self.digest = hashlib.blake2b(self.patches.numpy().tobytes(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        return f"Picture({self.digest})"


class SeenPrompt:
    """A prompt with pictures, any part of which can be computed by itself.

    Args:
        ids: of the prompt, with a picture token for each block of its pictures.
        pictures: in the order of their tokens.
        config: the model that sees.

    Raises:
        DataError: other picture tokens than the pictures need.
    """

    def __init__(self, ids: Sequence[int], pictures: Sequence[Picture], config: VisionFields) -> None:
        tokens, grids = torch.tensor(ids), [picture.grid for picture in pictures]
        self.pictures = pictures
        self.firsts = [first for first, _ in pictures_in(tokens, grids, config)]
        self.stops = [first + grid.tokens(config) for first, grid in zip(self.firsts, grids, strict=True)]
        straight = torch.arange(len(ids)).expand(3, -1)
        self.positions = picture_positions(tokens, grids, config) if _three(config) else straight

    def places(self, start: int, stop: int) -> torch.Tensor:
        """Time, height and width of tokens [start, stop) of the prompt and its answer, [3, n]."""
        length = self.positions.shape[1]
        behind = torch.arange(max(start, length), max(stop, length)) + int(self.positions.max()) + 1 - length
        return torch.cat([self.positions[:, start:stop], behind.expand(3, -1)], 1)


def picture_part(
    parts: Sequence[tuple[SeenPrompt | None, int, int]], config: VisionFields
) -> dict[str, torch.Tensor] | None:
    """What a step of an engine has beside its tokens, where one of its sequences has pictures; else None.

    Args:
        parts: for each sequence its prompt, None if that has no picture, and the tokens [start, stop) of it and its
            answer that the step computes.

    Returns:
        With mRoPE `position_ids` [3, 1, n]; and if the tokens are in pictures, `pixels`, `patches` and `picture_rows`
        [1, n]. Of a prompt that is computed in several steps the pictures of each step's tokens are seen in it.
    """
    if not any(prompt for prompt, _, _ in parts):
        return None
    pictures: list[Picture] = []
    places: list[tuple[int, int, int]] = []  # first token in the row, first token of the picture, tokens
    positions, at = [], 0
    for prompt, start, stop in parts:
        positions.append(prompt.places(start, stop) if prompt else torch.arange(start, stop).expand(3, -1))
        for picture, first, last in zip(prompt.pictures, prompt.firsts, prompt.stops, strict=True) if prompt else ():
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                pictures.append(picture)
                places.append((at + begin - start, begin - first, end - begin))
        at += stop - start
    found: dict[str, torch.Tensor] = {"position_ids": torch.cat(positions, 1)[:, None]} if _three(config) else {}
    if pictures:
        seen = arranged([(picture.patches, picture.grid) for picture in pictures], config)
        rows = torch.full((1, at), -1)
        for (to, first, count), of_picture in zip(places, seen.rows, strict=True):
            rows[0, to : to + count] = of_picture[first : first + count]
        found |= {"pixels": seen.pixels, "patches": seen.patches, "picture_rows": rows}
    return found or None
