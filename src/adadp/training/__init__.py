"""`adadp train` as a library: settings, a plan of public numbers, the loop, the run folder."""

from adadp.training.loop import Progress, Result, plan, resume, run, train

__all__ = ["Progress", "Result", "plan", "resume", "run", "train"]
