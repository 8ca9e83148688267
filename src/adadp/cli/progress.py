"""Progress bars, and that of `adadp train`: accuracy, epsilon so far, examples per second, time left."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from adadp.accounting.guarantee import round_up

if TYPE_CHECKING:
    from adadp.training.planning import Plan
    from adadp.training.result import Progress as Standing


def on_stderr(doing: str, *more: ProgressColumn) -> Progress:
    """A bar on stderr, so that results can be piped; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(doing), BarColumn(bar_width=24), MofNCompleteColumn(), *more, TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


class Bar:
    """The bar of a training run."""

    def __init__(self, plan: Plan) -> None:
        self._bar = on_stderr("training", TextColumn("{task.fields[standing]}"))
        self._task = self._bar.add_task("training", total=plan.steps, standing="")

    def show(self, standing: Standing) -> None:
        """Draw where the run stands."""
        parts = []
        if standing.accuracy is not None:
            parts.append(f"accuracy {standing.accuracy:.1%}")
        if standing.epsilon is not None:
            parts.append(f"epsilon {round_up(standing.epsilon, 3)}")
        parts.append(f"{standing.examples_per_second:,.0f} examples/s")
        self._bar.update(self._task, completed=standing.step, standing="  ".join(parts))

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
