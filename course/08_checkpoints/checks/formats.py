"""Lab 08, two formats of others: rows out of sharded safetensors, and the table of a checkpoint of torch's DCP.

Files are made by safetensors itself, and read by it for the right answer; tables are torch's own `Metadata`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save

from labkit.exercises import Answer, Case, Draw, Exercise

INDEX = "model.safetensors.index.json"
Folder = dict[str, torch.Tensor]  # {file: its bytes}

# ----------------------------------------------------------------------------------------------------- safetensors


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def load_rows(folder: Folder, name: str, first: int, last: int, refused: bool = False) -> Any:
    if refused:
        return "refused"
    files = (load(bytes(data.tolist())) for file, data in folder.items() if file != INDEX)
    return next(tensors[name] for tensors in files if name in tensors)[first:last]


def _drive(exercise: Any, folder: Any, name: str, first: int, last: int, refused: bool) -> Any:
    from labkit.tools import note

    def read(file: str, start: int = 0, stop: Any = None) -> bytes:
        if file not in folder:
            raise FileNotFoundError(f"there is no file {file!r:.60}")
        size = len(folder[file])
        stop = size if stop is None else stop
        if not 0 <= start < stop <= size:
            raise ValueError(f"{file} has {size} bytes; asked for are {start} to {stop}, the last not included")
        note("read", [file, start, stop])
        return bytes(folder[file][start:stop].tolist())

    if not refused:
        return exercise.load_rows(read, name, first, last)
    try:
        exercise.load_rows(read, name, first, last)
    except ValueError as error:
        return "refused" if name in str(error) else f"a ValueError that does not name {name}"
    return "rows, though the index does not have this name"


def _few(answer: Answer) -> str | None:
    """No byte of another tensor or row is read, and none twice."""
    folder, name, reads = answer.inputs["folder"], answer.inputs["name"], answer.evidence[0].notes.get("read", [])
    for at, (file, start, stop) in enumerate(reads):
        for other, begin, end in reads[:at]:
            if other == file and max(start, begin) < min(stop, end):
                return f"it reads bytes {max(start, begin)} to {min(stop, end)} of {file} twice"
    right = json.loads(bytes(folder[INDEX].tolist()))["weight_map"][name]
    if others := sorted({file for file, *_ in reads} - {INDEX, right}):
        return f"it opens {others[0]}; the index says that {name} is in {right}"
    header = 8 + int.from_bytes(bytes(folder[right][:8].tolist()), "little")
    rows = answer.value.numel() * answer.value.element_size()
    if (read := sum(stop - start for file, start, stop in reads if file == right)) > header + rows:
        return f"it reads {read} bytes of {right}: {header} are length and header, {rows} are the rows asked for"
    return None


def _folder(draw: Draw, shapes: dict[str, tuple[int, ...]], dtypes: list[Any], files: int) -> Folder:
    """Draw a model in several files, in an order of its own, with metadata in the headers."""
    names = list(shapes)
    draw.random.shuffle(names)
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(files)]
    for number, name in enumerate(names):
        parts[number % files][name] = draw.tensor(*shapes[name]).to(draw.choice(dtypes))
    found, where = Folder(), dict[str, str]()
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{files:05}.safetensors"
        found[file] = _bytes(save(part, {"format": "pt"}))
        where |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for part in parts for tensor in part.values())
    found[INDEX] = _bytes(json.dumps({"metadata": {"total_size": total}, "weight_map": where}).encode())
    return found


_SHAPES = {
    "model.embed_tokens.weight": (9, 4), "model.layers.0.mlp.up_proj.weight": (6, 5), "model.norm.weight": (8,),
    "model.layers.0.conv.weight": (5, 3, 2), "model.layers.0.mlp.down_proj.weight": (5, 6),
}  # fmt: skip


def _rows(name: str = "", dtypes: tuple[Any, ...] = (torch.float32, torch.bfloat16, torch.float16), files: int = 2,
          whole: bool = False) -> Any:  # fmt: skip
    def inputs(draw: Draw) -> dict[str, Any]:
        mine = name or draw.choice(list(_SHAPES))
        first, last = sorted(draw.random.sample(range(_SHAPES[mine][0] + 1), 2))
        first, last = (0, _SHAPES[mine][0]) if whole else (first, last)
        folder = _folder(draw, _SHAPES, list(dtypes), files)
        return {"folder": folder, "name": mine, "first": first, "last": last, "refused": False}

    return inputs


def _tiny(refused: str = "") -> dict[str, Any]:
    matrix, norm = torch.arange(6.0).view(3, 2), torch.tensor([7.0, 8.0])
    folder = {
        "model-00001-of-00002.safetensors": _bytes(save({"weight": matrix})),
        "model-00002-of-00002.safetensors": _bytes(save({"norm": norm})),
        INDEX: _bytes(json.dumps({"metadata": {"total_size": 32}, "weight_map": {
            "weight": "model-00001-of-00002.safetensors", "norm": "model-00002-of-00002.safetensors"}}).encode()),
    }  # fmt: skip
    return {"folder": folder, "name": refused or "weight", "first": 1, "last": 3, "refused": bool(refused)}


ROWS = Exercise(
    "load_rows",
    reference=load_rows,
    drive=_drive,
    rtol=0.0,
    atol=0.0,
    dtypes=(torch.float32,),
    cases=[
        Case("rows 1 to 3 of [[0, 1], [2, 3], [4, 5]], float32, in the first of two files", _tiny()),
        Case("other tensors: bfloat16, one dimension, three", _rows(), hidden=True, draws=4, fixed=[
            _rows("model.layers.0.conv.weight"), _rows("model.norm.weight", (torch.bfloat16,)),
            _rows("model.layers.0.mlp.up_proj.weight", (torch.float16,), 3), _rows(whole=True)]),
        Case("no byte of other rows or other files is read, none twice", _rows("model.embed_tokens.weight"), points=2,
             hidden=True, accept=[_few], draws=2, fixed=[_rows("model.norm.weight"), _rows(files=3)]),
        Case("a name that is not in the index is refused with a ValueError that names it",
             _tiny("model.layers.7.weight"), hidden=True, errors={
                 "KeyError": "A tensor that the index does not have is to end in a ValueError."}),
    ],
    idea="Where does the first byte of the tensor stand in the file? And how many bytes has one row?",
    hint="weight_map of the index gives the file. N = int.from_bytes(read(file, 0, 8), \"little\"); then "
    "json.loads(read(file, 8, 8 + N))[name] has dtype, shape, offsets. A row has itemsize * prod(shape[1:]) bytes, "
    "the tensor begins at 8 + N + data_offsets[0]. torch.frombuffer(bytearray(data), dtype=...).view(last - first, "
    "*shape[1:]).",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- DCP


def regions_of(chunks: list[Any], name: str, refused: bool = False) -> Any:
    if refused:
        return "refused"
    return sorted(
        [file, at, at + length, [[start, start + size] for start, size in zip(offsets, sizes, strict=True)]]
        for of, offsets, sizes, file, at, length in chunks
        if of == name
    )


def _drive_dcp(exercise: Any, chunks: Any, name: str, refused: bool) -> Any:
    """Build torch's own table: {tensor: chunks}, {chunk: its place}."""
    import torch as t
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, Any] = {"step": dcp.BytesStorageMetadata()}
    places: dict[Any, Any] = {dcp.MetadataIndex("step"): _StorageInfo("__0_0.distcp", 0, 900)}
    for of in dict.fromkeys(one[0] for one in chunks):
        mine = [one for one in chunks if one[0] == of]
        size = [a + b for a, b in zip(*mine[-1][1:3], strict=True)]  # the last chunk ends where the tensor does
        cut = [dcp.ChunkStorageMetadata(t.Size(offsets), t.Size(sizes)) for _, offsets, sizes, *_ in mine]
        tensors[of] = dcp.TensorStorageMetadata(dcp.TensorProperties(), t.Size(size), cut)
        for number, (_, offsets, _, file, at, length) in reversed(list(enumerate(mine))):
            places[dcp.MetadataIndex(of, t.Size(offsets), number)] = _StorageInfo(file, at, length)
    metadata = dcp.Metadata(tensors, storage_data=places)
    if not refused:
        return sorted(
            [file, a, b, [list(one) for one in box]] for file, a, b, box in exercise.regions_of(metadata, name)
        )
    try:
        exercise.regions_of(metadata, name)
    except ValueError as error:
        return "refused" if name in str(error) else f"a ValueError that does not name {name}"
    return "a table, though this is no tensor"


def _chunks(draw: Draw) -> list[Any]:
    """Draw tensors of one to three dimensions, each cut along one, in files that hold several chunks."""
    found, ends = [], dict[str, int]()
    for name in ("decoder.norm.weight", "decoder.fc1.weight", "decoder.fc1.weight_scale", "decoder.conv.weight"):
        size = [4 * draw.integer(1, 3) for _ in range({"n": 1, "f": 2, "c": 3}[name[8]])]
        dim, parts = draw.integer(0, len(size) - 1), draw.choice([2, 4])
        for part in range(parts):
            sizes = [*size]
            sizes[dim] //= parts
            offsets = [0] * len(size)
            offsets[dim] = part * sizes[dim]
            file, length = f"__{draw.integer(0, 2)}_0.distcp", 900 + draw.integer(1, 300)
            found.append([name, offsets, sizes, file, ends.get(file, 0), length])
            ends[file] = ends.get(file, 0) + length
    return found


def _table(name: str) -> Any:
    return lambda draw: {"chunks": _chunks(draw), "name": name, "refused": False}


_HALVES = {
    "chunks": [["w", [0, 0], [5, 6], "__0_0.distcp", 0, 1641], ["w", [5, 0], [4, 6], "__1_0.distcp", 0, 1577],
               ["norm", [0], [3], "__1_0.distcp", 1577, 1577]],
    "name": "w", "refused": False,
}  # fmt: skip

REGIONS = Exercise(
    "regions_of",
    reference=regions_of,
    drive=_drive_dcp,
    cases=[
        Case("w, [9, 6], by two ranks: 5 rows and 4 rows", _HALVES, fixed=[{**_HALVES, "name": "norm"}]),
        Case("other tables: one to three dimensions, several chunks in a file", _table("decoder.fc1.weight"), points=2,
             hidden=True, draws=2, fixed=[_table("decoder.norm.weight"), _table("decoder.conv.weight")]),
        Case("what is no tensor of the checkpoint is refused with a ValueError that names it",
             {**_HALVES, "name": "step", "refused": True}, hidden=True,
             fixed=[{**_HALVES, "name": "decoder.bias", "refused": True}], errors={
                 "KeyError": "What is no tensor of the checkpoint is to end in a ValueError.",
                 "has no attribute 'chunks'": "`step` is pickled: it has no chunks. It is to end in a ValueError."}),
    ],
    errors={"not subscriptable": "Chunks, indices and places are objects: chunk.offsets, index.fqn, place.offset."},
    idea="Chunks know where they stand in the tensor, storage_data where they stand in a file. By what do both know a "
    "chunk?",
    hint="tensor = metadata.state_dict_metadata.get(name); without `chunks` raise ValueError(name). places = "
    "{index.offset: place for index, place in metadata.storage_data.items() if index.fqn == name}. For each chunk: its "
    "place's relative_path, offset, offset + length, and [[o, o + s] for o, s in zip(chunk.offsets, chunk.sizes)].",
)  # fmt: skip
