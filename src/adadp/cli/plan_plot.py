"""What epsilon, lot and epochs change, as one image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from adadp.errors import ConfigurationError
from adadp.extras import require

if TYPE_CHECKING:
    from adadp.training.outlook import Choice, Outlook

_COLOUR, _MARK = "#1f5fa8", "#c0392b"
_LABELS = {
    "epsilon": "epsilon",
    "noise_multiplier": "noise multiplier",
    "lot": "lot (expected examples in a step)",
    "epochs": "epochs",
}


def draw(path: Path, found: Outlook) -> None:
    """Write the image: noise, and signal over noise of the whole run, over each number that may be changed."""
    require("matplotlib", "plots", "drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    axes: dict[str, list[Choice]] = {}
    for choice in found.choices:
        if choice.refused is None and choice.signal is not None:
            axes.setdefault(choice.changed, []).append(choice)
    if not axes:
        raise ConfigurationError("--plot shows noise and signal, and without privacy there is no noise")
    figure = Figure(figsize=(3.6 * len(axes), 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(axes), sharey="row", squeeze=False)
    for column, (changed, choices) in enumerate(axes.items()):
        values = [choice.value for choice in choices]
        signal = [0.0 if choice.signal is None else choice.signal.run_whole for choice in choices]
        noise = [choice.noise_multiplier or 0.0 for choice in choices]
        for row, heights in enumerate((signal, noise)):
            panel = panels[row, column]
            panel.plot(values, heights, "o-", color=_COLOUR, markersize=4)
            for value, height, choice in zip(values, heights, choices, strict=True):
                if (choice.lot, choice.steps, choice.noise_multiplier) == _planned(found):
                    panel.plot([value], [height], "o", color=_MARK, markersize=8, label="as planned")
            panel.set(xscale="log", yscale="log")
            panel.set_xticks(values, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values])
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        panels[1, column].set_xlabel(_LABELS[changed])
    panels[0, 0].set_ylabel("signal / noise, all steps")
    panels[1, 0].set_ylabel("noise multiplier")
    panels[0, 0].legend(frameon=False)
    plan = found.plan
    figure.suptitle(f"{plan.train.name}: {plan.population:,} {plan.noun}, {plan.algorithm.name}, delta {plan.delta:g}")
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"--plot {path} cannot be written: {error}") from None


def _planned(found: Outlook) -> tuple[int, int, float | None]:
    return found.plan.lot, found.plan.steps, found.plan.noise_multiplier
