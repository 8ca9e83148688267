"""Predictions of an exported model without the library that trained it: torch, numpy and safetensors are enough.

    python predict.py rows.csv            # a class (or number) for each row of a table
    python predict.py a.png b.png         # or for each image (with Pillow)

or from Python, beside this file:

    import predict
    model = predict.load_model()          # the plain module of model.py with the weights of model.safetensors
    numbers = predict.inputs([{"age": 40, "size": "M"}])      # a row as the model takes it (preprocessing.json)
    print(predict.answers(model(numbers)))
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import importlib.util
import itertools
import json
import math
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

FOLDER = Path(__file__).resolve().parent
MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
FLAGS = {"true": 1.0, "1": 1.0, "yes": 1.0, "false": 0.0, "0": 0.0, "no": 0.0}
LONGEST_TEXT = 20_000  # characters that are read


def load_model() -> torch.nn.Module:
    """The module of model.py, with its weights."""
    model: torch.nn.Module = _code("model").build()
    model.load_state_dict(load_file(FOLDER / "model.safetensors"))
    return model.eval()


def _code(name: str) -> Any:
    """The module in a file beside this one."""
    spec = importlib.util.spec_from_file_location(f"exported_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe() -> dict[str, Any]:
    """preprocessing.json: how a row or an image becomes numbers, and what the model's outputs mean."""
    read: dict[str, Any] = json.loads((FOLDER / "preprocessing.json").read_text(encoding="utf-8"))
    return read


def inputs(rows: Sequence[Any]) -> torch.Tensor:
    """What the model takes, float32.

    `rows` are mappings from columns to cells; or images, as files or arrays of bytes (height, width[, channels]).
    """
    how = recipe()
    if how["kind"] == "images":
        return _images(how, rows)
    columns = {
        name: [_cell(name, kind, row[name], how["decimal_comma"]) for row in rows]
        for name, kind in how["columns"].items()
    }
    parts = [AS[one["as"]](columns[one["column"]], one) for one in how["features"]]
    made = np.nan_to_num(np.concatenate(parts, axis=1), nan=0.0)  # what is missing is 0
    return torch.from_numpy(made.astype(np.float32))


def answers(outputs: torch.Tensor) -> list[Any]:
    """The classes that the model's outputs name; or the numbers, in their own unit."""
    how = recipe()
    if how["classes"]:
        return [how["classes"][number] for number in outputs.argmax(1).tolist()]
    low, high = how["target"]
    scaled: list[float] = outputs.detach().squeeze(1).double().clamp(-1, 1).tolist()
    return [(low + high) / 2 + value * ((high - low) / 2) for value in scaled]


# ---- cells ----------------------------------------------------------------------------------------------------------


def _cell(column: str, kind: str, cell: Any, decimal_comma: bool) -> Any:
    """A cell as its kind: a float for numbers, flags and dates (days since the start of 2000), else text or None."""
    text = cell.strip() if isinstance(cell, str) else cell
    if kind in ("category", "text"):
        if isinstance(text, float | np.floating) and float(text).is_integer():
            text = int(text)
        return None if text is None or text != text or text == "" else str(text)  # NaN is not itself
    if text is None or (isinstance(text, str) and text.lower() in MISSING):
        if kind == "flag":
            raise ValueError(f"column {column!r}: a flag is true or false, and cannot be missing")
        return math.nan
    try:
        if kind == "date":
            return _day(text) if isinstance(text, str | datetime.date) else float(text)
        if kind == "flag" and isinstance(text, str):
            return FLAGS[text.lower()]
        if decimal_comma and isinstance(text, str):
            text = text.replace(".", "").replace(",", ".")
        return float(text)
    except (ValueError, KeyError):
        raise ValueError(f"column {column!r}: {cell!r} is no {kind}") from None


def _day(value: str | datetime.date) -> float:
    """Days since 2000-01-01 of an ISO date or time (any time zone), of day.month.year, or of a date of Python's."""
    if isinstance(value, str) and value.count(".") == 2 and ":" not in value:
        day, month, year = (int(part) for part in value.split("."))
        value = datetime.datetime(year, month, day)
    elif isinstance(value, str):
        value = datetime.datetime.fromisoformat(value.replace("/", "-") if value[4:5] == "/" else value)
    elif not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day)
    assert isinstance(value, datetime.datetime)
    if value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return (value - datetime.datetime(2000, 1, 1)) / datetime.timedelta(days=1)


# ---- a column as numbers (n, k), for each "as" of preprocessing.json ------------------------------------------------

Cells = list[Any]
Feature = Mapping[str, Any]


def _scaled(cells: Cells, one: Feature) -> Any:
    values = (np.array(cells, dtype=np.float64)[:, None] - one["middle"]) / one["scale"]
    return values if one["clip"] is None else np.clip(values, -one["clip"], one["clip"])


def _missing(cells: Cells, one: Feature) -> Any:
    return np.isnan(np.array(cells, dtype=np.float64))[:, None].astype(np.float64)


def _flag(cells: Cells, one: Feature) -> Any:
    return np.clip(np.array(cells, dtype=np.float64)[:, None], 0.0, 1.0)


def _seasons(cells: Cells, one: Feature) -> Any:
    days = np.array(cells, dtype=np.float64)
    turns = np.stack([days / 365.2425, (days + 5) / 7, days], axis=1)
    angles = 2 * np.pi * (turns % 1)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _one_of(cells: Cells, one: Feature) -> Any:
    return np.array([[float(cell == value) for value in one["values"]] for cell in cells]).reshape(len(cells), -1)


def _bucket(cells: Cells, one: Feature) -> Any:
    made = np.zeros((len(cells), one["buckets"]))
    for row, cell in enumerate(cells):
        if cell is not None:
            text = f"{one['number']}\0{cell}".encode(errors="surrogatepass")
            made[row, int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % one["buckets"]] = 1.0
    return made


def _hashed_words(cells: Cells, one: Feature) -> Any:
    counts = np.zeros((len(cells), one["buckets"]))
    for row, cell in enumerate(cells):
        words = re.findall(r"\w+", (cell or "")[:LONGEST_TEXT].lower())
        for piece in (*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))):
            code = zlib.crc32(piece.encode(errors="surrogatepass"))
            counts[row, (code >> 1) % one["buckets"]] += 1.0 if code & 1 else -1.0
    return _of_length((np.sign(counts) * np.sqrt(np.abs(counts))).astype(np.float32), one["length"])


def _words(cells: Cells, one: Feature) -> Any:
    table, tokenizer = _word_vectors(one["package"], one["vectors"], one["tokenizer"], one["blake2b"])
    made = np.zeros((len(cells), table.shape[1]), dtype=np.float32)
    texts = [(cell or "")[:LONGEST_TEXT] for cell in cells]
    for row, found in enumerate(tokenizer.encode_batch_fast(texts, add_special_tokens=False)):
        if found.ids:
            made[row] = (table[found.ids] * np.float32(1 / len(found.ids))).sum(0)
    return _of_length(made, one["length"])


def _word_vectors(package: str, vectors: str, tokenizer: str, digest: str) -> tuple[Any, Any]:
    """Public word vectors from an installed package, whose files are read; refused where they are others."""
    from tokenizers import Tokenizer

    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"reading free text takes the word vectors of {package}: pip install {package}")
    folder = Path(spec.submodule_search_locations[0])
    if hashlib.blake2b((folder / vectors).read_bytes(), digest_size=16).hexdigest() != digest:
        raise ValueError(f"the word vectors of {package} are others than the model was trained with")
    (table,) = load_arrays(folder / vectors).values()
    found = Tokenizer.from_file(str(folder / tokenizer))
    found.no_padding()
    found.no_truncation()
    return np.asarray(table, dtype=np.float32), found


def _of_length(vectors: Any, length: float) -> Any:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32) * length


AS = {
    "scaled": _scaled,
    "missing": _missing,
    "flag": _flag,
    "seasons": _seasons,
    "one of": _one_of,
    "bucket": _bucket,
    "hashed words": _hashed_words,
    "words": _words,
}


# ---- images ---------------------------------------------------------------------------------------------------------


def _images(how: Mapping[str, Any], images: Sequence[Any]) -> torch.Tensor:
    channels, height, width = how["shape"]
    pixels = []
    for image in images:
        values = _pixels(how, Path(image)) if isinstance(image, str | Path) else np.asarray(image)
        values = values.reshape(*values.shape[:2], -1).transpose(2, 0, 1)
        if values.dtype != np.uint8 or values.shape != (channels, height, width):
            raise ValueError(
                f"an image is bytes of (height, width, channels) = {(height, width, channels)}, not {values.dtype} of "
                f"{(*values.shape[1:], values.shape[0])}"
            )
        pixels.append(values)
    made: torch.Tensor = torch.from_numpy(np.stack(pixels)).to(torch.float32) / how["maximum"]
    if how["as"] == "pixels":
        return made
    arrays = load_arrays(FOLDER / "preprocessing.safetensors")
    if how["as"] == "scattering":
        return torch.from_numpy((_scattered(how, made) - arrays["mean"]) @ arrays["onto"] - arrays["offset"])
    rows = made.flatten(1).numpy().astype(np.float64)
    return torch.from_numpy(rows @ arrays["components"].T).to(torch.float32)


def _scattered(how: Mapping[str, Any], images: torch.Tensor) -> Any:
    """Scattering features of images, rounded to 16 bits, then signed powers of them at norm 1."""
    plan = _code("scattering").Scattering(*how["shape"], how["scales"])
    made = plan(images).to(torch.float16).numpy().astype(np.float32)
    made /= np.maximum(np.abs(made).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    made = np.copysign(np.abs(made) ** how["power"], made)
    return made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def _pixels(how: Mapping[str, Any], path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        found = image if how["resize"] is None else image.resize((how["resize"][1], how["resize"][0]))
        return np.asarray(found.convert("L" if how["shape"][0] == 1 else "RGB"))


# ---- files ----------------------------------------------------------------------------------------------------------


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """Rows of a .csv: its first line names the columns; the delimiter is a comma, a semicolon or a tab."""
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        first = file.readline()
        file.seek(0)
        names, *rows = (row for row in csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True) if row)
    return [dict(zip((name.strip() for name in names), row, strict=True)) for row in rows]


def main(files: Sequence[str]) -> None:
    """Print a prediction for each row of a .csv, or for each image."""
    if not files or files[0] in ("-h", "--help"):
        sys.exit(__doc__)
    rows: Sequence[Any] = files if recipe()["kind"] == "images" else [row for file in files for row in read_csv(file)]
    with torch.no_grad():
        for answer in answers(load_model()(inputs(rows))):
            print(answer if isinstance(answer, str) else f"{answer:.6g}")


if __name__ == "__main__":
    main(sys.argv[1:])
