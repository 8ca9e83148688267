"""What adadp refuses, by kind. Every message names the cause and the way out."""

from __future__ import annotations


class PrivacyError(Exception):
    """Base of everything adadp refuses. Raised before the value in question is released."""

    #: Whether it was raised in process 0, which says so itself, and this is one of the others.
    told = False


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


class CheckpointError(PrivacyError):
    """A checkpoint cannot be written, read or resumed from. The message says why and what is there instead."""


class NotTheSameRunError(CheckpointError):
    """A resumed run with a seed is not the one that was interrupted. Nothing was released that had its noise."""


class NotFiniteError(PrivacyError):
    """Weights are NaN or infinite: training cannot go on from them."""


class InterruptedRunError(PrivacyError):
    """A run was asked to stop, and did between two lots. The message says what was spent and how to go on."""


class BudgetExhaustedError(PrivacyError):
    """The next release would exceed the budget. It did not run."""


class DistributedError(PrivacyError):
    """Processes that train one model together no longer do: one ended, or they do not do the same."""


class LotTooLargeError(PrivacyError, MemoryError):
    """A batch does not fit into memory; says which size would."""


class MissingExtraError(PrivacyError, ImportError):
    """Something needs an optional package that is not installed. The message names the extra."""


class DataError(PrivacyError, ValueError):
    """Data that cannot be used as it is. The message names the file, the column or the folder, and the way out."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A data set is neither here nor to be had. The message says where to put which files."""

    # OSError builds its text from errno and a file name; this one has a message of its own.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CorruptDataError(DataError):
    """A file is damaged or is not what its name says. It was not used."""


class CheckpointWarning(UserWarning):
    """The last checkpoint is damaged or missing, and the one before is used."""


class UntriedWarning(UserWarning):
    """The guarantee rests on something that could not be tried; it is said once, where training starts."""


class ModelNotice(UserWarning):
    """Something about the model that its user may want to know, in one line; `adadp.notes(model)` has every name."""


class LedgerNotice(UserWarning):
    """Something about a ledger in one line: what it holds already, or that another process is waited for."""


class NoGuaranteeWarning(UserWarning):
    """What was asked for has no guarantee, whatever follows: said before training starts."""
