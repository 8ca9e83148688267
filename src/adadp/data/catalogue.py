"""The public data sets that are known by name, as `catalogue.toml` lists them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Download:
    """One published file: where it is and what its bytes must be (`algorithm` names a hashlib function)."""

    url: str
    size: int
    algorithm: str
    checksum: str


@dataclass(frozen=True)
class Idx:
    """One IDX file: its name without .gz, and the SHA-256 of its uncompressed bytes."""

    file: str
    digest: str
    download: Download


@dataclass(frozen=True)
class IdxSplit:
    """Images and labels of a split."""

    images: Idx
    labels: Idx


@dataclass(frozen=True)
class CifarSplit:
    """A split of CIFAR: parquet shards, or members of the archive; `digest` is None where not known."""

    shards: str
    members: tuple[str, ...]
    rows: int
    digest: str | None


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100: label columns in parquet, bytes before the pixels in the archive."""

    label_column: str
    label_bytes: int
    archive: str
    download: Download
    splits: dict[str, CifarSplit]


@dataclass(frozen=True)
class Entry:
    """A data set by name. `folders` are the places, relative to a data folder, where its files may lie.

    `image` is the shape of an image, (channels, height, width), and `rows` says how many each split has.
    """

    name: str
    classes: tuple[str, ...]
    image: tuple[int, ...]
    rows: dict[str, int]
    folders: tuple[str, ...]
    content: dict[str, IdxSplit] | Cifar
    system_folders: tuple[str, ...] = ()


def _download(values: dict[str, Any]) -> Download:
    return Download(values["url"], values["size"], values["algorithm"], values["checksum"])


def _idx(values: dict[str, Any]) -> Idx:
    return Idx(values["file"], values["digest"], _download(values))


def _entry(name: str, values: dict[str, Any]) -> Entry:
    splits: dict[str, Any] = {split: values[split] for split in ("train", "test")}
    content: dict[str, IdxSplit] | Cifar
    if "archive" in values:
        parts = {
            split: CifarSplit(part["shards"], tuple(part["members"]), values["rows"][split], part.get("digest"))
            for split, part in splits.items()
        }
        source = _download(values["download"])
        content = Cifar(values["label_column"], values["label_bytes"], values["archive"], source, parts)
    else:
        content = {split: IdxSplit(_idx(part["images"]), _idx(part["labels"])) for split, part in splits.items()}
    folders, system = tuple(values["folders"]), tuple(values.get("system_folders", ()))
    form = tuple(values["classes"]), tuple(values["image"]), dict(values["rows"])
    return Entry(name, *form, folders, content, system)


_FILE = files("adadp.data") / "catalogue.toml"
CATALOGUE = {name: _entry(name, values) for name, values in tomllib.loads(_FILE.read_text("utf-8")).items()}
