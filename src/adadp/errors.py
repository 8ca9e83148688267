"""What adadp refuses, by kind. Every message names the cause and the way out."""

from __future__ import annotations


class PrivacyError(Exception):
    """Base of everything adadp refuses. Raised before the value in question is released."""


class ConfigurationError(PrivacyError, ValueError):
    """A setting that has no meaning or no guarantee: a negative sigma, a lot larger than the dataset."""


class UnsupportedModuleError(PrivacyError):
    """A module whose per-example gradients do not exist (it mixes examples) or are not known to be right."""


class TrainingLoopError(PrivacyError):
    """The loop around the engine did something that no proof covers, such as two lots in one step."""


class NoGuaranteeError(PrivacyError):
    """An epsilon was asked for where the guarantee is *none*. The message lists the reasons."""


class AccountingError(PrivacyError):
    """An accountant does not cover what it was asked to account for."""


class LedgerError(PrivacyError):
    """The record of what was released is damaged, was edited, or belongs to something else."""


class BudgetExhaustedError(PrivacyError):
    """The next release would exceed the budget. It did not run."""


class LotTooLargeError(PrivacyError, MemoryError):
    """A batch does not fit into memory; says which size would."""


class UntriedWarning(UserWarning):
    """The guarantee rests on something that could not be tried; it is said once, where training starts."""
