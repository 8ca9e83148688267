"""A finished run as others may have it: `adadp export`.

| file | |
| --- | --- |
| `README.md` | the model card: what it is, what it was trained on, its guarantee with all conditions (`card`) |
| `model.safetensors`, `model.py` | weights, and the plain torch module that takes them (`plain_code`) |
| `preprocessing.json`, `preprocessing.safetensors` | how a row or an image becomes numbers (`recipe`) |
| `scattering.py` | the features of images, in plain torch, where the model was trained on them |
| `predict.py` | a program that follows them without this library (`alone`) |
| `guarantee.json`, `releases.json` | what may be said, for programs, and the releases that it is about |

Each file is written anew from named values: nothing of a run's folder is copied as a whole.
"""

from __future__ import annotations

import inspect
import json
import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.numpy import save as save_arrays
from safetensors.torch import save

from adadp.accounting.composition import releases_from_json
from adadp.accounting.guarantee import Guarantee, make_guarantee
from adadp.accounting.ledger import Ledger
from adadp.errors import ConfigurationError, LedgerError
from adadp.features import scattering
from adadp.training import alone
from adadp.training.card import Card
from adadp.training.checkpoints import RUN
from adadp.training.dataset_ledger import guarantee_of, on_record
from adadp.training.plain_code import plain_code
from adadp.training.recipe import recipe_of
from adadp.training.run_files import Audience, run_file
from adadp.training.run_folder import GUARANTEE, RELEASES, RESULT, WEIGHTS, FinishedRun, read

_LICENSE = "# From adadp, Apache License 2.0.\n"


@dataclass(frozen=True)
class Exported:
    """What was written, and what may be said about it."""

    folder: Path
    files: tuple[str, ...]
    guarantee: Guarantee


def export(run: str | Path, folder: str | Path, *, without_guarantee: bool = False) -> Exported:
    """Write what others may have of a finished run into a new folder.

    Args:
        run: the run's folder.
        folder: a new or empty one.
        without_guarantee: export a run whose guarantee is *none*, too. Its card says so.

    Raises:
        ConfigurationError: the run was interrupted or cannot be read, the folder is taken, or there is no guarantee.

    Guarantee:
        What is written follows from weights, noised statistics, events and public settings; figures on held-out rows
        are among them only if they were paid for. The guarantee is that of everything that the data's ledger holds
        now, where that is found; else of all that it held when the run ended.

    """
    source, target = Path(run), Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} is there already and is not empty: an export needs a new folder")
    if (source / RUN).is_file() and not (source / RESULT).is_file():
        raise ConfigurationError(
            f"the run in {source} has not ended, and nothing of it is exported. Go on: adadp train --resume {source}"
        )
    finished = read(source)
    result = {"ledger": "", **_json(source / RESULT)}  # older versions named no ledger, and wrote no releases
    if type(result.get("examples")) is not int:
        raise ConfigurationError(f"{source / RESULT} does not say on how many examples the run was trained")
    releases = _json(source / RELEASES) if (source / RELEASES).exists() else None
    guarantee, releases, now = _standing(Guarantee.from_dict(_json(source / GUARANTEE)), releases, source, result)
    guaranteed = guarantee.epsilon is not None
    if run_file(WEIGHTS).audience_with(guaranteed) is Audience.CURATOR and not without_guarantee:
        raise ConfigurationError(
            f"the guarantee of {source} is none: {'; '.join(guarantee.reasons)}. Its weights are not for others. "
            "Whoever exports them all the same says so: --without-guarantee"
        )
    noised = bool(finished.config.get("paid_metrics") and result["metrics"].get("noise"))
    paid = result["metrics"] if noised and guaranteed else None
    card = Card(finished, guarantee, releases, now=now, examples=result["examples"], paid=paid)
    part = target.absolute().with_name(f".{target.absolute().name}.{secrets.token_hex(4)}.part")
    try:
        part.mkdir(parents=True)
        _write(part, finished, card, guarantee, releases)
        if target.exists():
            target.rmdir()
        os.replace(part, target)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Exported(target, tuple(sorted(path.name for path in target.iterdir())), guarantee)


def _write(
    folder: Path, run: FinishedRun, card: Card, guarantee: Guarantee, releases: Mapping[str, Any] | None
) -> None:
    # Bytes, for a file that safetensors writes is readable by its owner alone.
    (folder / WEIGHTS).write_bytes(save({name: value.contiguous() for name, value in run.model.state_dict().items()}))
    code = plain_code(run.model, tuple(run.config["input_shape"]), len(run.classes))
    if code is not None:
        (folder / "model.py").write_text(_LICENSE + code, encoding="utf-8")
    recipe, arrays = recipe_of(run)
    (folder / "preprocessing.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    if arrays:
        (folder / "preprocessing.safetensors").write_bytes(save_arrays(arrays))
    if recipe.get("as") == "scattering":
        (folder / "scattering.py").write_text(_LICENSE + _plain_scattering(), encoding="utf-8")
    (folder / "predict.py").write_text(_LICENSE + inspect.getsource(alone), encoding="utf-8")
    (folder / GUARANTEE).write_text(guarantee.to_json() + "\n", encoding="utf-8")
    if releases is not None:
        (folder / RELEASES).write_text(json.dumps(releases, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card.text(has_code=code is not None), encoding="utf-8")


def _plain_scattering() -> str:
    """The code of `adadp.features.scattering` without its only line that takes this library."""
    code = inspect.getsource(scattering)
    return code.replace("from adadp.errors import ConfigurationError\n", "ConfigurationError = ValueError\n")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no table")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None


def _standing(
    found: Guarantee, releases: dict[str, Any] | None, folder: Path, result: Mapping[str, Any]
) -> tuple[Guarantee, dict[str, Any] | None, bool]:
    """Guarantee and releases of everything in the data's ledger as it is now, if it is found; and whether it was.

    What was released after the run counts too: the number that its people are promised is that of the data.
    """
    if releases is None:
        return found, None, False
    ledger = _ledger(folder, result, releases["ids"])
    if ledger is None:
        for said, about in ((found, "all_releases"), (Guarantee.from_dict(releases["own"]), "own_releases")):
            _refuse_more(folder, said, make_guarantee(releases_from_json(releases[about]), said.delta, unit=said.unit))
        return found, releases, False
    whole = ledger.guarantee(found.delta, assumptions=found.assumptions, notes=found.notes, untried=found.untried)
    runs = [run.id for run in ledger.runs if run.uid in releases["ids"]]
    own = guarantee_of(ledger, runs, found.delta, found.accountant, whole)
    now = on_record(ledger, runs, own)
    if now["all_releases"] != releases["all_releases"]:
        return whole, now, True
    _refuse_more(folder, found, whole)
    conditions = tuple(dict.fromkeys((*found.assumptions, *whole.assumptions)))  # the ledger has them on record, too
    return replace(found, assumptions=conditions, untried=whole.untried), now, True


def _refuse_more(folder: Path, said: Guarantee, computed: Guarantee) -> None:
    """Raise where a file says more than what was released allows."""
    if said.promises_more_than(computed):
        raise ConfigurationError(
            f"{folder}: its files promise more than the releases on record allow ({said.sentence()} On record: "
            f"{computed.sentence()}) One of them was changed, or they are not of one run: nothing is exported"
        )


def _ledger(folder: Path, result: Mapping[str, Any], ids: Collection[str]) -> Ledger | None:
    """The ledger that the run was charged to; None if it is not where it was."""
    for path in (folder / "ledger.jsonl", Path(str(result["ledger"]))):
        if path.is_file():
            try:
                ledger = Ledger(path, dataset=None, neighbours=None)
            except LedgerError as error:
                raise ConfigurationError(
                    f"the ledger of {folder} is damaged, so that its epsilon is unknown: {error}"
                ) from None
            if set(ids) <= {run.uid for run in ledger.runs}:
                return ledger
    return None
