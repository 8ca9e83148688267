"""`adadp audit`: attack a guarantee, and say whether it held."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adadp.cli.output import print_list, print_table

if TYPE_CHECKING:
    from adadp.audit.result import Audit


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def audit(
    algorithm: Annotated[str, _option("adadp, dpsgd, adal, adan, agd, dpopt. [adadp]")] = "adadp",
    reading: Annotated[
        str | None, _option("sound, or the paper's text: example, lot; for dpopt: published. [sound]")
    ] = None,
    threat: Annotated[str, _option("gradient, white-box, black-box: what the auditor may do and see. [gradient]")] =
    "gradient",
    epsilon: Annotated[float | None, _option("Calibrate the noise to this budget. [2.0]")] = None,
    delta: Annotated[float, _option("The delta of the guarantee. [1e-5]")] = 1e-5,
    noise_multiplier: Annotated[float | None, _option("Or give the noise over the bound (sigma).")] = None,
    examples: Annotated[int, _option("Examples in a trial, the canary included. [16]")] = 16,
    lot: Annotated[int | None, _option("Expected examples in a step. [all]")] = None,
    steps: Annotated[int, _option("Steps of a run. [8]")] = 8,
    watched: Annotated[int | None, _option("Attack only the first of them. [all]")] = None,
    trials: Annotated[int, _option("Runs with and without the canary. [1000]")] = 1000,
    confidence: Annotated[float, _option("Of the bound and the verdict. [0.95]")] = 0.95,
    seed: Annotated[int | None, _option("Repeatable trials. [none]")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")] = False,
) -> None:
    """Attack an algorithm and compare what leaks with what is guaranteed."""
    from adadp import audit as auditing

    setting = auditing.Setting(
        examples=examples, lot=examples if lot is None else lot, steps=steps, delta=delta, watched=watched,
        noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
    )  # fmt: skip
    wanted = (2.0 if epsilon is None else epsilon) if noise_multiplier is None else None
    target = auditing.for_algorithm(algorithm, reading=reading, epsilon=wanted, setting=setting)
    with _bar() as bar:
        task = bar.add_task("attacking", total=trials)

        def report(done: int) -> None:
            bar.update(task, completed=done)

        found = auditing.audit(
            target, threat=threat, trials=trials, confidence=confidence, seed=seed, report=report
        )
    if json_output:
        typer.echo(json.dumps(found.to_dict()))
        return
    _print(found)


def _bar() -> Progress:
    """On stderr, so that results can be piped; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("attacking"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _print(found: Audit) -> None:
    from adadp.accounting.guarantee import round_up

    promise, values = found.promise, found.to_dict()
    counted = values["counted"]
    guaranteed = "none" if promise.guaranteed is None else round_up(promise.guaranteed)
    rows = [
        ("verdict", f"{found.verdict} at confidence {values['confidence']:g}"),
        ("epsilon, at least", f"{found.epsilon_lower:.4g} ({found.bound})"),
        ("epsilon guaranteed", guaranteed),
    ]
    if promise.guaranteed is None and promise.claimed is not None:
        rows.append(("epsilon claimed", round_up(promise.claimed)))
    if values["epsilon_estimate"] is not None:
        rows.append(("estimate", f"{values['epsilon_estimate']:.4g} if releases were plain Gaussian (not a bound)"))
    rows += [
        ("delta", round_up(promise.delta)),
        ("attack", f"{found.threat}: canary {values['canary']!r}, statistic {values['statistic']!r}"),
        (
            "errors",
            f"{counted['false_positives']} of {counted['without']} without the canary, "
            f"{counted['false_negatives']} of {counted['with']} with it",
        ),
        ("trials", f"{found.trials:,}, of which {counted['trials']:,} were counted"),
        ("time", f"{found.seconds:.1f} s"),
    ]
    print_table(f"Audit of {found.target}", rows)
    print_list("Why there is no guarantee", promise.why)
    print_list("Privacy of this output", [found.privacy])
