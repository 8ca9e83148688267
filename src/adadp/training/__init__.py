"""`adadp train` as a library: settings, a plan of public numbers, the loop, the run folder."""

from adadp.training.loop import plan, resume, run, train
from adadp.training.result import Progress, Result

__all__ = ["Progress", "Result", "plan", "resume", "run", "train"]
