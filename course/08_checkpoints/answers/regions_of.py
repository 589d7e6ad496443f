from labkit.answers import Edit

_BOX = "[[start, start + size] for start, size in zip(chunk.offsets, chunk.sizes)]"
_LAST = "place.offset + place.length"

WRONG = [
    Edit("[start, start + size]", "[start, size]", mistake="`sizes` are sizes. The end of a box is its offset and its size together."),
    Edit(_LAST, "place.length", mistake="`length` is a length. The bytes end before offset + length."),
    Edit("place.offset, place.offset", "0, place.offset", mistake="A file has several chunks: this one begins at its offset."),
    Edit("if index.fqn == name", "if True"),
    Edit("index.fqn == name", "index.fqn.startswith(name)"),
    Edit(_BOX, "[list(chunk.offsets), list(chunk.sizes)]"),
    Edit("places[chunk.offsets]", "list(places.values())[number]", ("for chunk in tensor.chunks", "for number, chunk in enumerate(tensor.chunks)"),
         mistake="Places and chunks are in different orders. A chunk's offsets say which place is its own."),
    Edit('if not hasattr(tensor, "chunks"):', "if tensor is None:"),
    Edit('raise ValueError(f"{name} is no tensor of this checkpoint")', "return []", mistake="What is no tensor of the checkpoint is to end in a ValueError."),
    Edit('f"{name} is no tensor of this checkpoint"', '"no tensor"', mistake="The text of the ValueError does not have the name."),
]

RIGHT = [
    Edit('not hasattr(tensor, "chunks")', 'not getattr(tensor, "chunks", None)'),
]


# %% right: from the places to the chunks
def regions_of(metadata, name):
    tensor = metadata.state_dict_metadata.get(name)
    if type(tensor).__name__ != "TensorStorageMetadata":
        raise ValueError(name + ": not a tensor")
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in tensor.chunks}
    found = []
    for index, place in metadata.storage_data.items():
        if index.fqn != name:
            continue
        box = tuple((o, o + s) for o, s in zip(index.offset, sizes[tuple(index.offset)]))
        found.append((place.relative_path, place.offset, place.offset + place.length, box))
    return found


# %% right: torch's own index
from torch.distributed.checkpoint.metadata import MetadataIndex


def regions_of(metadata, name):
    if name not in metadata.state_dict_metadata:
        raise ValueError(f"no {name}")
    try:
        chunks = metadata.state_dict_metadata[name].chunks
    except AttributeError:
        raise ValueError(f"{name} has no chunks") from None
    table = []
    for i, chunk in enumerate(chunks):
        info = metadata.storage_data[MetadataIndex(name, chunk.offsets, i)]
        box = []
        for dim in range(len(chunk.offsets)):
            box.append([chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]])
        table.append([info.relative_path, info.offset, info.offset + info.length, box])
    return table
