"""The private loader with the attributes of a DataLoader, and lots in several batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from adadp.errors import ConfigurationError
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.sampling.loader import PrivateLoader

#: Attributes of a DataLoader that the private one has from the one it was made of.
_KEPT = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers",
)  # fmt: skip
_DRAWN = (
    "which examples a lot holds is drawn from the run's key, and stays in the loader: iterate over the loader itself. "
    "Amplification by sampling assumes that nobody knows who was drawn"
)


class DPDataLoader(PrivateLoader):
    """`PrivateLoader` by Opacus' name. `PrivacyEngine.make_private` makes it."""

    def __getattr__(self, name: str) -> Any:
        if name in _KEPT and "_loader" in vars(self):
            return getattr(self._loader, name)
        if name in ("batch_sampler", "sampler", "generator"):
            raise AttributeError(f"a private loader has no {name}: {_DRAWN}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def sample_rate(self) -> float:
        """The part of the dataset that a lot holds on average."""
        return self.sampling.lot / self.sampling.examples

    @property
    def drop_last(self) -> bool:
        """False: no example is dropped."""
        return False

    @classmethod
    def from_data_loader(cls, data_loader: DataLoader[Any], **settings: Any) -> DPDataLoader:
        """Refused: lots belong to a run."""
        raise ConfigurationError(
            "DPDataLoader.from_data_loader is not needed: give the ordinary DataLoader to make_private, which returns "
            "the private one. Lots that belong to no run cannot be charged"
        )


def ordinary(loader: Any) -> Any:
    """The DataLoader that a private one was made of, for another run on the same data; any other loader as it is.

    The new run draws its own lots.
    """
    if not isinstance(loader, PrivateLoader):
        return loader
    inner = loader._loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.sampling.lot,
        num_workers=inner.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=inner.pin_memory,
        timeout=inner.timeout,
        worker_init_fn=inner.worker_init_fn,
        multiprocessing_context=inner.multiprocessing_context,
        prefetch_factor=inner.prefetch_factor,
        persistent_workers=inner.persistent_workers,
    )


class BatchMemoryManager:
    """Within the block, lots larger than `max_physical_batch_size` arrive in several batches."""

    def __init__(
        self, *, data_loader: PrivateLoader, max_physical_batch_size: int, optimizer: PrivateOptimizer
    ) -> None:
        if not isinstance(data_loader, PrivateLoader):
            raise ConfigurationError("BatchMemoryManager needs the data loader that make_private returned")
        self._loader, self._size = data_loader, max_physical_batch_size
        self._before = data_loader.max_physical_batch_size

    def __enter__(self) -> PrivateLoader:
        self._loader.max_physical_batch_size = self._size
        return self._loader

    def __exit__(self, *_: object) -> None:
        self._loader.max_physical_batch_size = self._before
