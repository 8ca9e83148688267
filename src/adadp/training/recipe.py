"""From a row to a model's numbers, in plain values: what `preprocessing.json` of an exported run holds.

`alone.py`, which is exported with it, follows it without this library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from adadp import preprocessing
from adadp.errors import ConfigurationError
from adadp.features import Scattering
from adadp.preprocessing import DPPCA, ShapedFeatures, TablePreprocessor
from adadp.preprocessing.encoding import text_of
from adadp.preprocessing.free_text import PACKAGE, TOKENIZER, VECTORS, FreeText
from adadp.training.run_folder import FinishedRun
from adadp.training.settings import parse_image_size

Arrays = dict[str, npt.NDArray[Any]]


def recipe_of(run: FinishedRun) -> tuple[dict[str, Any], Arrays]:
    """What becomes of a row, as JSON, and the arrays that it takes beside."""
    outputs = {"classes": list(run.classes), "target": run.target}
    if run.config["kind"] == "images":
        size = parse_image_size(run.config["image_size"])
        images = {"shape": run.config["image_shape"], "maximum": run.config["maximum"], "resize": size}
        then, arrays = _of_images(run)
        return {"kind": "images", **images, **then, **outputs}, arrays
    if not isinstance(run.estimator, TablePreprocessor):
        raise ConfigurationError(f"{run.folder} has no preprocessing of a table")
    features = list(_features(run.estimator))
    columns = {each["column"]: _kind(run, each["column"]) for each in features}
    comma = run.config.get("decimal_comma", False)
    return {"kind": "table", "columns": columns, "decimal_comma": comma, "features": features, **outputs}, {}


def _of_images(run: FinishedRun) -> tuple[dict[str, Any], Arrays]:
    """What becomes of an image's pixels."""
    estimator = run.estimator
    if estimator is None:
        return {"as": "pixels"}, {}
    if isinstance(estimator, DPPCA):
        return {"as": "projected"}, {"components": np.ascontiguousarray(estimator.components_)}
    if isinstance(estimator, ShapedFeatures):
        scales = Scattering.for_images(tuple(run.config["image_shape"])).scales
        mean, onto, offset = estimator.projection()
        arrays = {"mean": mean, "onto": np.ascontiguousarray(onto), "offset": offset}
        return {"as": "scattering", "scales": scales, "power": estimator.power}, arrays
    raise ConfigurationError(f"{run.folder}: {type(estimator).__name__} is no preprocessing of images")


def _kind(run: FinishedRun, column: str) -> str:
    """How a column's cells are read."""
    table = run.estimator
    assert isinstance(table, TablePreprocessor)
    if column in table.dates_:
        return "date"
    if column in table.flags_:
        return "flag"
    if column in table.text_:
        return "text"
    return "number" if column in (*table.numeric_, *table.ranged_) else "category"


def _features(table: TablePreprocessor) -> Iterator[dict[str, Any]]:
    """The blocks of numbers that a row becomes, in the order of `TablePreprocessor.transform`."""
    if table.scaler_ is not None:
        scaler = table.scaler_
        for name, middle, scale in zip(table.numeric_, scaler.mean_.tolist(), scaler.scale_.tolist(), strict=True):
            yield {"column": name, "as": "scaled", "middle": middle, "scale": scale, "clip": scaler.clip}
    ends = zip(table.ranged_, table.range_middle_.tolist(), table.range_scale_.tolist(), strict=True)
    for name, middle, scale in ends:
        yield {"column": name, "as": "scaled", "middle": middle, "scale": scale, "clip": math.sqrt(3)}
    if table.missing:
        yield from ({"column": name, "as": "missing"} for name in (*table.numeric_, *table.ranged_))
    yield from ({"column": name, "as": "flag"} for name in table.flags_)
    yield from ({"column": name, "as": "seasons"} for name in table.dates_)
    for name, values in zip(table.declared_, table.one_hot_.categories, strict=True):
        yield {"column": name, "as": "one of", "values": [text_of(value) for value in values]}
    for number, name in enumerate(table.categories_):
        yield {"column": name, "as": "bucket", "buckets": table.buckets, "number": number}
    if table.free_text_ is not None:
        yield from ({"column": name, **_of_text(table.free_text_)} for name in table.text_)


def _of_text(text: FreeText) -> dict[str, Any]:
    length = preprocessing.TEXT_LENGTH
    if text.vectors_ == "hashed":
        return {"as": "hashed words", "buckets": text.size_, "length": length}
    files = {"package": PACKAGE, "vectors": VECTORS, "tokenizer": TOKENIZER, "blake2b": text.digest_}
    return {"as": "words", "length": length, **files}
