"""The public data sets that are known by name: which files they are made of and where those are published.

`digest` is always of content: for IDX files of the bytes after decompression, for decoded CIFAR arrays of the
pixels (uint8, N x H x W x C) followed by the labels, so that a copy in another container is accepted and a
changed pixel is not.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """A data set by name. `folders` are the places, relative to a data folder, where its files may lie."""

    name: str
    classes: tuple[str, ...]
    folders: tuple[str, ...]
    content: dict[str, IdxSplit] | Cifar
    system_folders: tuple[str, ...] = ()


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"

_CIFAR100_CLASSES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905
)


def _idx_splits(base: str, *files: tuple[int, str, str]) -> dict[str, IdxSplit]:
    """(size, checksum of the .gz, digest) of the images and labels to train on, and of those to test on."""
    names = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    made = [
        Idx(name, digest, Download(f"{base}{name}.gz", size, "sha256", checksum))
        for name, (size, checksum, digest) in zip(names, files, strict=True)
    ]
    return {"train": IdxSplit(*made[:2]), "test": IdxSplit(*made[2:])}


CATALOGUE: dict[str, Entry] = {
    "mnist": Entry(
        "mnist",
        tuple("0123456789"),
        ("mnist", "MNIST/raw", "MNIST"),
        _idx_splits(
            _MNIST,
            (
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            (
                28881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            (
                1648877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            (
                4542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
    ),
    "fashion-mnist": Entry(
        "fashion-mnist",
        ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
        _idx_splits(
            _FASHION,
            (
                26421880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            ),
            (
                29515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            ),
            (
                4422102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            ),
            (
                5148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
        # Where Debian's package dataset-fashion-mnist puts them.
        ("/usr/share/dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist"),
    ),
    "cifar10": Entry(
        "cifar10",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        ("cifar10", "CIFAR10"),
        Cifar(
            "label",
            1,
            "cifar-10-binary.tar.gz",
            Download(f"{_CIFAR}cifar-10-binary.tar.gz", 170052171, "md5", "c32a1d4ab5d03f1284b67883e8d87530"),
            {
                "train": CifarSplit(
                    "train-*.parquet",
                    tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)),
                    50000,
                    "f912919bdea371136f1aa4feed6beeca728015a5f08b1899a29c932a7e30be2b",
                ),
                "test": CifarSplit(
                    "test-*.parquet",
                    ("cifar-10-batches-bin/test_batch.bin",),
                    10000,
                    "8193b3fbce55bec361cd1b8fd4880cb1649832dc4d6de6da1e7a21847a4843aa",
                ),
            },
        ),
    ),
    "cifar100": Entry(
        "cifar100",
        _CIFAR100_CLASSES,
        ("cifar100", "CIFAR100"),
        Cifar(
            "fine_label",
            2,
            "cifar-100-binary.tar.gz",
            Download(f"{_CIFAR}cifar-100-binary.tar.gz", 168513733, "md5", "03b5dce01913d631647c71ecec9e9cb8"),
            {
                "train": CifarSplit(
                    "train-*.parquet",
                    ("cifar-100-binary/train.bin",),
                    50000,
                    "14886c20287690f03728355958fe0858f491f72573360ceb2c75e0feff0833ba",
                ),
                # Not at hand when this was written: the archive's own checksum covers it.
                "test": CifarSplit("test-*.parquet", ("cifar-100-binary/test.bin",), 10000, None),
            },
        ),
    ),
}
