"""Two helpers that loops written for Opacus use, by the names they have there.

    from adadp.integrations.opacus import BatchMemoryManager, ModuleValidator, PrivacyEngine

New code needs neither: `make_private(max_physical_batch_size=...)` and `adadp.fix` do the same.
"""

from __future__ import annotations

from torch import nn

from adadp.checks.repair import fix
from adadp.checks.validation import check_module, problems
from adadp.engine import PrivacyEngine
from adadp.mechanism.optimizer import PrivateOptimizer
from adadp.sampling.loader import PrivateLoader


class BatchMemoryManager:
    """Within the block, lots larger than `max_physical_batch_size` arrive in several batches."""

    def __init__(
        self, *, data_loader: PrivateLoader, max_physical_batch_size: int, optimizer: PrivateOptimizer
    ) -> None:
        self._loader, self._size = data_loader, max_physical_batch_size
        self._before = data_loader.max_physical_batch_size

    def __enter__(self) -> PrivateLoader:
        self._loader.max_physical_batch_size = self._size
        return self._loader

    def __exit__(self, *_: object) -> None:
        self._loader.max_physical_batch_size = self._before


class ModuleValidator:
    """Whether a model can be trained privately, and what to do if not."""

    @staticmethod
    def is_valid(module: nn.Module) -> bool:
        """True where nothing is in the way."""
        return not problems(module)

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[str]:
        """What is in the way, in words; raised instead where `strict`."""
        if strict:
            check_module(module)
        return problems(module)

    @staticmethod
    def fix(module: nn.Module) -> nn.Module:
        """A copy with cross-example layers replaced."""
        return fix(module)


__all__ = ["BatchMemoryManager", "ModuleValidator", "PrivacyEngine"]
