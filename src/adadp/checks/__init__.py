"""What a module, a collate function and a loss must not do, tried out on examples that are unlike each other."""

from adadp.checks.trial import Trial

__all__ = ["Trial"]
