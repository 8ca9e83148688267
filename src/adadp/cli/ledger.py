"""`adadp ledger show|add|check`: what a dataset has been asked so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adadp.accounting.spending import DEFAULT_UNIT
from adadp.cli import pipeline as options
from adadp.cli.output import JsonOption, argument, option, print_table
from adadp.errors import ConfigurationError, LedgerError

if TYPE_CHECKING:
    from adadp.accounting.composition import Canonical
    from adadp.accounting.ledger import Ledger

app = typer.Typer(no_args_is_help=True, help="What was released on a dataset, over all runs.")

PathArgument = Annotated[Path, argument("The ledger's file.")]
DatasetOption = Annotated[str | None, option("The dataset it has to belong to.")]
DeltaOption = Annotated[
    float | None, option("The delta at which everything is composed; the smallest that was declared unless given.")
]
USUAL_DELTA = 1e-5


def _open(path: Path, dataset: str | None) -> Ledger:
    from adadp.accounting.ledger import Ledger

    ledger = Ledger(path, dataset=dataset, neighbours=None)
    if ledger.dataset is None or not path.exists():
        raise LedgerError(f"there is no ledger at {path}")
    return ledger


def _delta(ledger: Ledger, given: float | None) -> tuple[float, str]:
    """The delta to compose at, and where it comes from."""
    if given is not None:
        return given, "as given"
    declared = ledger.deltas
    if not declared:
        return USUAL_DELTA, "no run declared one; --delta takes another"
    if len(declared) == 1:
        return declared[0], "as declared"
    return declared[0], f"the smallest of those declared: {', '.join(f'{each:g}' for each in declared)}"


@app.command()
def show(
    path: PathArgument,
    delta: DeltaOption = None,
    accountant: options.AccountantOption = None,
    json_output: JsonOption = False,
) -> None:
    """Every run, and the guarantee of all of them together."""
    from adadp.accounting.events import event_to_json

    ledger = _open(path, None)
    at, why = _delta(ledger, delta)
    guarantee = ledger.guarantee(at, accountant=accountant)
    charges = ledger.charges()
    if json_output:
        runs = [
            {
                "run": run.id,
                "uid": run.uid,
                "plan": run.plan,
                "closed": run.closed,
                "resumes": run.resumes,
                "delta": run.delta,
                "charged": [[event_to_json(event), count] for event, count in charges[run.id]],
                **run.remarks.to_json(),
            }
            for run in ledger.runs
        ]
        budget = None if ledger.budget is None else [ledger.budget.epsilon, ledger.budget.delta]
        values = {
            "dataset": ledger.dataset,
            "shared_budget": budget,
            **guarantee.to_dict(),
            "runs": runs,
            "inherited": [run.to_json() for run in ledger.inherited],
            "elsewhere": [
                {"dataset": dataset, "charged": [[event_to_json(event), count] for event, count in releases]}
                for dataset, releases in ledger.elsewhere
            ],
        }
        typer.echo(json.dumps(values))
        return
    print_table(f"Ledger {path}", _rows(ledger))
    typer.echo(f"\nAll runs together, at delta {at:g} ({why})\n{guarantee.to_text(80)}")


def _rows(ledger: Ledger) -> list[tuple[str, str]]:
    from adadp.accounting.guarantee import describe

    def words(releases: Canonical) -> str:
        return "; ".join(describe(event, count) for event, count in releases) or "nothing"

    rows = [("dataset", str(ledger.dataset))]
    if ledger.unit is not None and ledger.neighbours is not None:
        rows.append(("protects", f"{ledger.unit}, {ledger.neighbours} neighbours"))
    if ledger.budget is not None:
        rows.append(("shared budget", f"epsilon {ledger.budget.epsilon:g} at delta {ledger.budget.delta:g}"))
    charges = ledger.charges()
    for run in ledger.runs:
        state = "" if run.closed else " (not closed: charged for all that it reserved)"
        rows.append((run.id, words(charges[run.id]) + state))
    rows += [(f"inherited {run.uid[:8]}", words(run.counts)) for run in ledger.inherited]
    rows += [(f"on {dataset}", words(releases) + " (not in the number)") for dataset, releases in ledger.elsewhere]
    return rows


@app.command()
def add(
    path: PathArgument,
    dataset: DatasetOption = None,
    examples: Annotated[int | None, option("Size N of the dataset.")] = None,
    lot: Annotated[int | None, option("Expected size L of a lot.")] = None,
    noise_multiplier: Annotated[float | None, option("Noise over one example's bound (sigma).")] = None,
    steps: Annotated[int | None, option("Number T of steps.")] = None,
    sampling: options.SamplingOption = options.SamplingName.POISSON,
    gaussian: options.GaussianOption = None,
    unit: Annotated[str, typer.Option(help="The unit that its noise protects, such as 'one person'.")] = DEFAULT_UNIT,
    note: Annotated[str, typer.Option(help="What this was.")] = "",
) -> None:
    """Charge a run that was made elsewhere. A new ledger needs --dataset."""
    from adadp.accounting.events import Gaussian
    from adadp.accounting.ledger import Ledger
    from adadp.sampling.schemes import scheme

    training = (examples, lot, noise_multiplier, steps)
    if any(value is not None for value in training):
        if examples is None or lot is None or noise_multiplier is None or steps is None:
            raise ConfigurationError("steps are --examples, --lot, --noise-multiplier and --steps together")
        options.require_noise("--noise-multiplier", noise_multiplier)
        run = options.pipeline(examples, lot, steps, sampling, gaussian)
        composition, relation = run.composition(noise_multiplier), run.neighbours
    else:
        for sigma in gaussian or ():
            options.require_noise("--gaussian", sigma)
        composition = [(Gaussian(sigma), 1) for sigma in gaussian or ()]
        relation = scheme(sampling.value).neighbours
    if not any(count for _, count in composition):
        raise ConfigurationError("nothing to add: give a run's steps or a --gaussian")
    ledger = Ledger(path, dataset=dataset, neighbours=None)
    # A ledger of the other relation refuses the steps; Gaussian releases alone fit either.
    if any(value is not None for value in training) or ledger.neighbours is None:
        ledger = Ledger(path, dataset=dataset, neighbours=relation)
    with ledger.start({"added": note or "by hand", "unit": unit}) as charged:
        for event, count in composition:
            if count:
                charged.charge(event, count)
    typer.echo(f"{charged.id} was added to {path}.")


@app.command()
def check(
    path: PathArgument,
    dataset: DatasetOption = None,
    epsilon: Annotated[float | None, option("The budget that must not be exceeded.")] = None,
    delta: DeltaOption = None,
    accountant: options.AccountantOption = None,
    json_output: JsonOption = False,
) -> None:
    """Verify the ledger; with --epsilon also that it keeps to a budget (exit code 1 if not)."""
    from adadp.accounting.accountants import require_delta, require_epsilon

    if delta is not None:
        require_delta(delta)
    if epsilon is not None:
        require_epsilon(epsilon)
    ledger = _open(path, dataset)
    values: dict[str, object] = {"intact": True, "dataset": ledger.dataset, "runs": len(ledger.runs)}
    lines = [f"{path} is intact: dataset {ledger.dataset!r}, {len(ledger.runs)} runs."]
    within = True
    if epsilon is not None:
        at, why = _delta(ledger, delta)
        guarantee = ledger.guarantee(at, accountant=accountant)
        within = guarantee.epsilon is not None and guarantee.epsilon <= epsilon
        values.update(epsilon=guarantee.epsilon, delta=at, budget=epsilon, within_budget=within)
        keeps = f"It {'keeps to' if within else 'exceeds'} epsilon {epsilon:g} at delta {at:g} ({why})."
        lines.append(f"{keeps} {guarantee.to_text(80)}")
    typer.echo(json.dumps(values) if json_output else "\n".join(lines))
    if not within:
        raise typer.Exit(1)
