"""`adadp audit`: attack a guarantee, and say whether it held."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adadp.cli import completion
from adadp.cli import script as own
from adadp.cli.output import DataDirOption, JsonOption, option, print_list, print_table
from adadp.errors import ConfigurationError

if TYPE_CHECKING:
    from adadp.accounting.ledger import Ledger
    from adadp.audit.examples import Examples
    from adadp.audit.one_run import OneRunAudit
    from adadp.audit.result import Audit

_ALGORITHMS = (*(name for name in completion.ALGORITHMS if name != "sgd"), "dp-pca", "dp-scaler")
_THREATS = ("gradient", "white-box", "black-box")


def audit(
    context: typer.Context,
    algorithm: Annotated[
        str, option("adadp, dpsgd, adal, adan, agd, dpopt; or dp-pca, dp-scaler. [adadp]", values=_ALGORITHMS)
    ] = "adadp",
    reading: Annotated[
        str | None,
        option("sound, or the paper's text: example, lot; for dpopt: published. [sound]", values=completion.READINGS),
    ] = None,
    dataset: Annotated[
        str | None,
        option(
            "All others are real examples: digits, mnist, ... Every trial is charged. [synthetic]",
            values=completion.DATASETS,
        ),
    ] = None,
    data_dir: DataDirOption = None,
    threat: Annotated[
        str, option("gradient, white-box, black-box: what the auditor may do and see. [gradient]", values=_THREATS)
    ] = "gradient",
    epsilon: Annotated[float | None, option("Calibrate the noise to this budget. [2.0]")] = None,
    delta: Annotated[float, option("The delta of the guarantee. [1e-5]")] = 1e-5,
    noise_multiplier: Annotated[float | None, option("Or give the noise over the bound (sigma).")] = None,
    examples: Annotated[int | None, option("Examples in a trial, the canary included. [16]")] = None,
    lot: Annotated[int | None, option("Expected examples in a step. [all; of a data set about 4 sqrt(N)]")] = None,
    steps: Annotated[int, option("Steps of a run. [8]")] = 8,
    watched: Annotated[int | None, option("Run and attack only the first of them. [all]")] = None,
    canary: Annotated[
        list[str] | None, option("Try only this canary (flipping, mislabelled, ...). Repeatable. [all]")
    ] = None,
    layers: Annotated[
        str | None, option("Sizes of the attacked layers, columns x rows, such as 60x1000,1000x10. [8x4,8x4]")
    ] = None,
    one_run: Annotated[bool, option("One run in which all examples are canaries.", "--one-run")] = False,
    trials: Annotated[int, option("Runs with and without the canary. [1000]")] = 1000,
    confidence: Annotated[float, option("Of the bound. The word violated takes 0.999 or more. [0.95]")] = 0.95,
    seed: Annotated[int | None, option("Repeatable trials. [none]")] = None,
    ledger: Annotated[str | None, option("The data set's ledger, which all trials are charged to.")] = None,
    script: Annotated[
        str | None, option("Measure a loop of your own in place of an attack: train.py:main, called with a dataset.")
    ] = None,
    dataset_from: Annotated[
        str | None, option("Where --script's dataset is: an object or a function, train.py:data. [train.py:dataset]")
    ] = None,
    report: Annotated[Path | None, option("Write numbers, a plot and a page into this folder.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Attack an algorithm, and compare what leaks with what is guaranteed.

    The verdict is consistent, suspicious or violated. Where the trials contradict the guarantee, as many fresh ones
    test the same attack: if these contradict it at confidence 0.999 it is violated, else suspicious, and the output
    says which command settles it. The exit status is 0 whatever the verdict, and 2 where an option is refused.

    With --script no algorithm is attacked: your own training function runs with and without one example, in lockstep,
    and the verdict is within, exceeded, refused or no number (adadp.testing).
    """
    if script is not None:
        _refuse_beside_script(context)
        found_there = own.run(script, dataset_from, canary or [], steps, seed or 0, delta)
        own.show(found_there, script, json_output)
        return
    if dataset_from is not None:
        raise ConfigurationError("--dataset-from goes with --script; an attack's --dataset is a name")
    from adadp import audit as auditing

    if epsilon is not None and noise_multiplier is not None:
        raise ConfigurationError("give either --epsilon, to which the noise is calibrated, or --noise-multiplier")
    if threat not in auditing.THREATS:
        raise ConfigurationError(f"--threat must be one of {', '.join(auditing.THREATS)}, not {threat!r}")
    if ledger is not None and dataset is None:
        raise ConfigurationError("--ledger goes with --dataset: synthetic examples cost nobody anything")
    budget = 2.0 if epsilon is None else epsilon
    if algorithm in auditing.ESTIMATORS:
        _refuse(f"{algorithm} is attacked as it is", {
            "--dataset": dataset, "--reading": reading, "--one-run": one_run, "--threat": threat != "gradient",
            "--canary": canary, "--layers": layers, "--examples": examples, "--lot": lot, "--watched": watched,
        })  # fmt: skip
        estimator = (
            auditing.PreprocessingThreat(algorithm, noise_multiplier) if noise_multiplier is not None
            else auditing.PreprocessingThreat.for_epsilon(algorithm, budget, delta)
        )  # fmt: skip
        found = _with_bar(trials, lambda show: auditing.audit_preprocessing(
            estimator, delta, trials=trials, confidence=confidence, seed=seed, report=show))  # fmt: skip
        _give(replace(found, command=_settling(found, context)), report, json_output)
        return
    others, charged = (None, None) if dataset is None else _real(dataset, data_dir, examples, ledger)
    count = (examples or (200 if one_run else 16)) if others is None else len(others.inputs) + 1
    setting = auditing.Setting(
        examples=count, lot=_lot(lot, count, others), steps=steps, delta=delta, watched=watched,
        noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
    )  # fmt: skip
    wanted = budget if noise_multiplier is None else None
    target = auditing.for_algorithm(algorithm, reading=reading, epsilon=wanted, setting=setting)
    if one_run:
        _refuse("--one-run has gradient canaries of its own", {
            "--dataset": dataset, "--threat": threat != "gradient", "--canary": canary, "--layers": layers,
            "--report": report,
        })  # fmt: skip
        one = auditing.audit_one_run(target, confidence=confidence, seed=seed)
        _give_one(replace(one, command=_settling(one, context)), json_output)
        return
    attacked: Any = threat
    if layers is not None:
        if threat != "gradient" or others is not None:
            raise ConfigurationError("--layers goes with --threat gradient and synthetic examples")
        attacked = auditing.GradientThreat(target, _sizes(layers))
        if canary:
            attacked = replace(attacked, names=tuple(canary))
    found = _with_bar(trials, lambda show: auditing.audit(
        target, threat=attacked, canaries=tuple(canary or ()), others=others, trials=trials, confidence=confidence,
        seed=seed, ledger=charged, report=show))  # fmt: skip
    _give(replace(found, command=_settling(found, context)), report, json_output)


def _refuse(why: str, options: dict[str, object]) -> None:
    """Options that would be ignored are refused: whoever gave them wanted something else."""
    for name, value in options.items():
        if value not in (None, False, []):
            raise ConfigurationError(f"{why}: no {name}")


_WITH_SCRIPT = ("script", "dataset_from", "canary", "steps", "seed", "delta", "json_output")


def _refuse_beside_script(context: typer.Context) -> None:
    given = [
        option.opts[0]
        for option in context.command.params
        if getattr(context.get_parameter_source(str(option.name)), "name", "") == "COMMANDLINE"
        and option.name not in _WITH_SCRIPT
    ]
    if given:
        raise ConfigurationError(f"--script has its own model, data and noise: no {', '.join(given)}")


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((int(columns), int(rows)) for columns, rows in (part.split("x") for part in text.split(",")))
    except ValueError:
        raise ConfigurationError(f"--layers must look like 60x1000,1000x10, not {text!r}") from None


def _lot(lot: int | None, count: int, others: Examples | None) -> int:
    from adadp.algorithms.defaults import default_lot

    if lot is not None:
        return lot
    return count if others is None else default_lot(count)


def _real(dataset: str, data_dir: str | None, examples: int | None, path: str | None) -> tuple[Examples, Ledger]:
    """Real examples for all others, and the ledger of their data set."""
    from adadp import data
    from adadp.accounting.ledger import Ledger
    from adadp.audit.examples import Examples

    if dataset not in data.NAMES:
        raise ConfigurationError(f"an audit's --dataset is one of {', '.join(data.NAMES)}, not {dataset!r}")
    found = data.load(dataset, data_dir=data_dir)
    count = len(found) if examples is None else examples - 1
    if not 1 <= count <= len(found):
        raise ConfigurationError(f"--examples must be in 2..{len(found) + 1} for {dataset}, not {examples}")
    inputs, labels = found.inputs()[:count], found.labels[:count]
    return Examples(inputs, labels, len(found.classes)), Ledger(path, dataset=dataset)


def _with_bar(trials: int, run: Callable[[Callable[[int], None]], Audit]) -> Audit:
    """Run with a bar of the trials that were made."""
    from adadp.cli.progress import on_stderr

    with on_stderr("attacking") as bar:
        task = bar.add_task("attacking", total=trials)

        def show(done: int) -> None:
            # A second set has as many trials as the first, or more where the audit is a small one.
            bar.update(task, completed=done, total=trials if done <= trials else max(2 * trials, done))

        return run(show)


def _settling(found: Audit | OneRunAudit, context: typer.Context) -> str | None:
    """The command line of this audit with the options that settle a suspicion, and another seed.

    With the same seed the same trials would be made again, the ones that the suspicion comes from.
    """
    if not found.suspicious:
        return None
    values, words = found.more, ["adadp", "audit"]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name in values:
            value = values[name]
        elif value is None or getattr(context.get_parameter_source(name), "name", "") != "COMMANDLINE":
            continue
        if name == "seed":
            value += 1
        for each in value if isinstance(value, (list, tuple)) else [value]:
            words += [parameter.opts[0]] if each is True else [parameter.opts[0], str(each)]
    return shlex.join(words)


def _give(found: Audit, folder: Path | None, json_output: bool) -> None:
    if folder is not None:
        from adadp.audit import report

        report.write(folder, found)
    if json_output:
        typer.echo(json.dumps(found.to_dict()))
        return
    values = found.to_dict()
    counted = values["counted"]
    rows = _first_rows(found)
    if found.promise.gaussian:
        rows.append(("of any mechanism", f"at least {values['epsilon_lower_any_mechanism']:.4g} (Clopper-Pearson)"))
    if values["epsilon_estimate"] is not None:
        rows.append(("estimate", f"{values['epsilon_estimate']:.4g} if releases were plain Gaussian (not a bound)"))
    rows += [
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
    if found.contradicted:
        from adadp.audit.report import confirmed, reasoning

        print_list(f"Why {found.verdict}", [reasoning(found), confirmed(found)])
    _print_settling(found)
    print_list("Why there is no guarantee", found.promise.why)
    print_list("Privacy of this output", [found.privacy])
    if folder is not None:
        typer.echo(f"\nThe report is in {folder}.")


def _print_settling(found: Audit | OneRunAudit) -> None:
    """On a line of its own, however long: it is there to be copied."""
    if found.settled_by is not None:
        typer.echo(f"\nThis settles it:\n{found.settled_by}")


def _give_one(found: OneRunAudit, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps(found.to_dict()))
        return
    rows = _first_rows(found)
    rows.append(("guesses", f"{found.correct} of {found.guesses} right, {found.canaries} canaries in one run"))
    if (second := found.confirmation) is not None:
        rows.append((
            "fresh guesses",
            f"{second['correct']} of {second['guesses']} right in {second['trials']} more runs, p = "
            f"{second['p_value']:.2g}",
        ))  # fmt: skip
    print_table(f"Audit of {found.target} in one run", rows)
    _print_settling(found)
    print_list("Why there is no guarantee", found.promise.why)
    print_list("Privacy of this output", [found.to_dict()["privacy"]])


def _first_rows(found: Audit | OneRunAudit) -> list[tuple[str, str]]:
    from adadp.accounting.guarantee import round_up

    promise, values = found.promise, found.to_dict()
    rows = [
        ("verdict", _verdict(found)),
        ("epsilon, at least", f"{found.epsilon_lower:.4g} ({values['bound']})"),
        ("epsilon guaranteed", "none" if promise.guaranteed is None else round_up(promise.guaranteed)),
    ]
    if promise.guaranteed is None and promise.claimed is not None:
        rows.append(("epsilon claimed", round_up(promise.claimed)))
    return [*rows, ("delta", round_up(promise.delta))]


def _verdict(found: Audit | OneRunAudit) -> str:
    """The word, and the confidence at which it is said."""
    confidence, second = found.to_dict()["confidence"], found.confirmation
    if second is None:
        return f"{found.verdict} at confidence {confidence:g}"
    if found.violated:
        return f"{found.verdict}, confirmed at confidence {second['confidence']:g}"
    return f"{found.verdict}: contradicted at confidence {confidence:g}, not confirmed at {second['confidence']:g}"
