from labkit.answers import Edit, Same

_PLACE = "at = 8 + length + entry[\"data_offsets\"][0] + first * row"
_CHECK = "    if name not in where:\n        raise ValueError(f\"no file has {name}\")\n"
_DATA = "read(file, at, at + (last - first) * row)"

WRONG = [
    Edit("8 + length + entry", "entry", mistake="Offsets count from the end of the header, not from the beginning of the file."),
    Edit("8 + length + entry", "length + entry", mistake="Before the header stand the 8 bytes of its length."),
    Edit('"little"', '"big"'),
    Edit(" + first * row", "", mistake="These are the first rows of the tensor. It asks for those from `first`."),
    Edit("row = dtype.itemsize * math.prod(entry[\"shape\"][1:])", "row = dtype.itemsize", told="shape | invalid"),
    Edit("row = dtype.itemsize * math.prod", "row = 4 * math.prod"),
    Edit("torch.frombuffer(bytearray(data), dtype=dtype)", "torch.frombuffer(bytearray(data), dtype=torch.float32)"),
    Edit("torch.frombuffer(bytearray(data), dtype=dtype)", "torch.frombuffer(bytearray(data), dtype=dtype).float()", mistake="The rows are to have the dtype that the file has."),
    Edit(_DATA, "read(file)[at : at + (last - first) * row]", told="twice"),
    Edit("json.loads(read(file, 8, 8 + length))", "json.loads(read(file)[8 : 8 + length])", told="twice"),
    Edit(_CHECK, "", told="is to end in a ValueError"),
    Edit('ValueError(f"no file has {name}")', 'ValueError("no such tensor")', mistake="The text of the ValueError does not have the name."),
    Edit(
        f"{_PLACE}\n    data = {_DATA}",
        'at = 8 + length + entry["data_offsets"][0]\n    data = read(file, at, 8 + length + entry["data_offsets"][1])[first * row : last * row]',
        told="are the rows asked for",
    ),
    Edit('where[name]', 'sorted(where.values())[0]'),
]

EQUIVALENT = [
    Same("line 15: 7 for 8", "the eighth byte of the length is 0: no header has 2**56 bytes"),
]

RIGHT = [
    Edit("math.prod(entry[\"shape\"][1:])", "torch.Size(entry[\"shape\"][1:]).numel()"),
    Edit('int.from_bytes(read(file, 0, 8), "little")', 'int.from_bytes(read(file, stop=8)[::-1], "big")'),
]


# %% right: the row's bytes from the offsets, numbers by struct
import json
import struct

import torch

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def load_rows(read, name, first, last):
    index = json.loads(read("model.safetensors.index.json").decode())
    file = index["weight_map"].get(name)
    if not file:
        raise ValueError("the index does not have " + repr(name))
    (n,) = struct.unpack("<Q", read(file, 0, 8))
    header = json.loads(read(file, 8, n + 8))
    begin, end = header[name]["data_offsets"]
    rows, *rest = header[name]["shape"]
    row = (end - begin) // rows
    numbers = bytearray(read(file, 8 + n + begin + first * row, 8 + n + begin + last * row))
    return torch.frombuffer(numbers, dtype=DTYPES[header[name]["dtype"]]).reshape([last - first] + rest)
