"""Free text to numbers without looking at the data: averages of public word vectors, or hashed pieces of words.

Both map each text by itself and learn nothing, so they cost nothing. Weights by how rare a word is (IDF) would be a
statistic of the data; the public vectors bring what such weights would give.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import scipy.sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from adadp.errors import ConfigurationError
from adadp.extras import require
from adadp.preprocessing.encoding import as_cells, text_of
from adadp.preprocessing.release import require_columns

Floats = npt.NDArray[np.float32]

PACKAGE = "wordllama"
VECTORS, TOKENIZER = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"
_WORD = re.compile(r"\w+")
_PIECES = 12  # of a made text
_LONGEST = 20_000  # characters of a text that are read: public, and more than most documents have


class FreeText(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Columns of text (n, c) to (n, c * size): each text becomes a vector of length 1, one without words 0.

    Formal guarantee: no release. Each row is mapped by itself, by public vectors or a public hash; `fit` reads nothing
    but the number of columns.

    Parameters
    ----------
    vectors : "words" for the averages of public word vectors (the package wordllama, `pip install 'adadp[text]'`);
        "hashed" for words and pairs of words hashed into `buckets` signed counts; "auto" for the first that is there.
    buckets : how many numbers "hashed" makes of a text.

    Attributes: `vectors_` ("words" or "hashed"), `size_` numbers a text, `digest_` of the word vectors, so that a run
    is never used with others than it was trained with.
    """

    def __init__(self, vectors: str = "auto", *, buckets: int = 1024) -> None:
        self.vectors = vectors
        self.buckets = buckets

    def fit(self, X: Any, y: object = None, *, ledger: object = None) -> Self:  # noqa: N803
        """Note the number of columns and which vectors are there. Nothing is learned and nothing is charged."""
        del y, ledger
        if self.vectors not in ("auto", "words", "hashed"):
            raise ConfigurationError(f"vectors must be auto, words or hashed, not {self.vectors!r}")
        if not 2 <= self.buckets <= 2**20:
            raise ConfigurationError(f"buckets must be in 2..{2**20}, not {self.buckets!r}")
        self.n_features_in_ = as_cells(X, "FreeText").shape[1]
        self.vectors_ = self.vectors if self.vectors != "auto" else ("words" if words_are_there() else "hashed")
        self.size_ = self.buckets
        self.digest_ = ""
        if self.vectors_ == "words":
            known = word_vectors()
            self.size_, self.digest_ = known.table.shape[1], known.digest
        self.events_: tuple[()] = ()
        return self

    def transform(self, X: Any) -> Floats:  # noqa: N803
        """Vectors of length 1, float32, shape (n, c * size)."""
        check_is_fitted(self)
        cells = as_cells(X, "FreeText")
        require_columns(cells, self.n_features_in_, "FreeText")
        blocks = [self._of([text_of(cell) or "" for cell in cells[:, column]]) for column in range(cells.shape[1])]
        return np.concatenate(blocks, axis=1) if blocks else np.zeros((len(cells), 0), dtype=np.float32)

    def of_made_texts(self, count: int, seed: int) -> Floats:
        """Vectors of `count` texts of random words, (count, size): they hold nothing of the data."""
        check_is_fitted(self)
        generator = np.random.default_rng(seed)
        if self.vectors_ == "hashed":
            places = generator.integers(0, self.size_, (count, 2 * _PIECES))
            vectors = np.zeros((count, self.size_), dtype=np.float32)
            np.put_along_axis(vectors, places, generator.choice([-1.0, 1.0], places.shape).astype(np.float32), 1)
            return _unit(vectors)
        return word_vectors().of_random_texts(count, generator)

    def _of(self, texts: Sequence[str]) -> Floats:
        texts = [text[:_LONGEST] for text in texts]
        if self.vectors_ == "hashed":
            return _unit(_hashed(texts, self.size_))
        known = word_vectors()
        if known.digest != self.digest_:
            raise ConfigurationError(
                "the word vectors that are installed are others than the run was trained with: install the version of "
                f"{PACKAGE} that was used"
            )
        return _unit(known.averages(texts))


class WordVectors:
    """Public vectors of pieces of words, and the tokenizer that finds the pieces."""

    def __init__(self, table: Floats, tokenizer: Any, digest: str) -> None:
        self.table, self.digest = table, digest
        self._tokenizer = tokenizer

    def averages(self, texts: Sequence[str]) -> Floats:
        """Mean vector of each text's pieces, (n, size); 0 for a text without any."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return self._means([one.ids for one in found])

    def _means(self, pieces: Sequence[Sequence[int]]) -> Floats:
        lengths = np.array([len(ids) for ids in pieces], dtype=np.int64)
        starts = np.concatenate([[0], lengths.cumsum()])
        columns = np.fromiter((i for ids in pieces for i in ids), dtype=np.int64, count=int(starts[-1]))
        shares = np.repeat(1 / np.maximum(lengths, 1), lengths).astype(np.float32)
        counts = scipy.sparse.csr_array((shares, columns, starts), shape=(len(pieces), len(self.table)))
        return np.asarray(counts @ self.table, dtype=np.float32)

    def of_random_texts(self, count: int, generator: np.random.Generator) -> Floats:
        """Vectors of length 1 of made texts, (count, size): random pieces, frequent ones (low numbers) more often."""
        size = len(self.table)
        # Zipf's law over the tokenizer's order, which follows how often pieces occur in public text.
        drawn = np.exp(generator.random((count, _PIECES)) * np.log(size)).astype(np.int64) - 1
        return _unit(self._means([row.tolist() for row in np.clip(drawn, 0, size - 1)]))


def words_are_there() -> bool:
    """Whether public word vectors and their tokenizer are installed."""
    return all(importlib.util.find_spec(name) is not None for name in (PACKAGE, "tokenizers"))


@functools.lru_cache(maxsize=1)
def word_vectors() -> WordVectors:
    """Return the installed public word vectors. The files of the package are read; none of its code is run."""
    tokenizers = require("tokenizers", "text", "reading free text with word vectors")
    safetensors = require("safetensors.numpy", None, "reading word vectors")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        require(PACKAGE, "text", "reading free text with word vectors")
        raise ConfigurationError(f"{PACKAGE} is installed in a way that its files cannot be found")
    folder = Path(spec.submodule_search_locations[0])
    try:
        raw = (folder / VECTORS).read_bytes()
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:
        raise ConfigurationError(f"the word vectors of {PACKAGE} cannot be read from {folder}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    (table,) = safetensors.load(raw).values()
    return WordVectors(np.asarray(table, dtype=np.float32), tokenizer, hashlib.blake2b(raw, digest_size=16).hexdigest())


def _hashed(texts: Iterable[str], buckets: int) -> Floats:
    """Signed counts of each text's words and pairs of words, square roots taken, (n, buckets)."""
    rows = list(texts)
    columns: list[int] = []
    signs: list[float] = []
    starts = [0]
    known: dict[str, tuple[int, float]] = {}
    for text in rows:
        words = _WORD.findall(text.lower())
        for piece in (*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))):
            if piece not in known:
                code = zlib.crc32(piece.encode(errors="surrogatepass"))
                known[piece] = (code >> 1) % buckets, 1.0 if code & 1 else -1.0
            column, sign = known[piece]
            columns.append(column)
            signs.append(sign)
        starts.append(len(columns))
    counts = scipy.sparse.csr_array((signs, columns, starts), shape=(len(rows), buckets)).toarray()
    return np.asarray(np.sign(counts) * np.sqrt(np.abs(counts)), dtype=np.float32)


def _unit(vectors: Floats) -> Floats:
    """The vectors at length 1; those of length 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)
