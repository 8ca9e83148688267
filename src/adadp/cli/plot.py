"""The privacy profile and the trade-off function as one image."""

from __future__ import annotations

from pathlib import Path

from adadp.accounting.accountants import Spent
from adadp.accounting.composition import Composition, canonical
from adadp.accounting.events import Neighbours
from adadp.errors import ConfigurationError
from adadp.extras import require


def draw_profile(path: Path, composition: Composition, spent: Spent, accountant: str, neighbours: Neighbours) -> None:
    """Write the image. Both curves are bounds: delta from above, false negatives from below."""
    require("matplotlib", "plots", "drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from adadp.accounting.curves import privacy_profile, trade_off
    from adadp.accounting.guarantee import round_up

    releases = canonical(composition)
    top = 1.6 * spent.epsilon if spent.epsilon > 0 else 1.0
    epsilons = [top * index / 160 for index in range(161)]
    aim = min(max(spent.delta, 1e-12), 0.5)
    deltas = privacy_profile(releases, epsilons, accountant=accountant, neighbours=neighbours, aim=aim)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    floor = 1e-3 * spent.delta if spent.delta > 0 else 1e-12
    visible = [(epsilon, delta) for epsilon, delta in zip(epsilons, deltas, strict=True) if delta >= floor]
    if visible:
        left.semilogy(*zip(*visible, strict=True), color="#1f5fa8")
    if spent.delta > 0:
        left.plot(spent.epsilon, spent.delta, "o", color="#c0392b")
        left.annotate(
            f"({round_up(spent.epsilon)}, {round_up(spent.delta)})",
            (spent.epsilon, spent.delta),
            textcoords="offset points",
            xytext=(8, 8),
        )
    left.set(xlabel="epsilon", ylabel="delta", title="Privacy profile", xlim=(0, top))
    left.grid(alpha=0.3)
    rates = [index / 400 for index in range(401)]
    right.fill_between(rates, trade_off(epsilons, deltas, rates), alpha=0.15, color="#1f5fa8")
    right.plot(rates, trade_off(epsilons, deltas, rates), color="#1f5fa8", label="no test lies below")
    right.plot([0, 1], [1, 0], "--", color="#888888", label="guessing")
    right.set(
        xlabel="false positives", ylabel="false negatives", title="Telling whether one example was used",
        xlim=(0, 1), ylim=(0, 1), aspect="equal",
    )  # fmt: skip
    right.legend(frameon=False)
    right.grid(alpha=0.3)
    figure.suptitle(f"{spent.accountant} accountant, {neighbours} neighbours", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"--plot {path} cannot be written: {error}") from None
