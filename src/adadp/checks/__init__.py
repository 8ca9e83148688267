"""What a module, a collate function, a loss and a loop must not do, tried out on examples that are unlike each other."""

from adadp.checks.trial import Trial

__all__ = ["Trial"]
