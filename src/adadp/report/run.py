"""A run as its folder tells it: what there is, what is missing, and nothing that the reader may not see.

For a page that may be published (`public=True`) only those files are opened that may be published themselves
(`adadp.training.run_files`), and of others only figures on held-out rows that are paid for or come from a published
test set. No weights are loaded, and a folder that is damaged, unfinished or older is read as far as it goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adadp.accounting.composition import Canonical, releases_from_json
from adadp.accounting.guarantee import Guarantee
from adadp.accounting.ledger import Ledger
from adadp.data import NAMES
from adadp.errors import ConfigurationError, LedgerError
from adadp.training import run_files
from adadp.training.checkpoints import RUN
from adadp.training.dataset_ledger import releases_of, runs_in
from adadp.training.held_out import is_published
from adadp.training.run_files import PATHS, Audience
from adadp.training.run_folder import CONFIG, GUARANTEE, HISTORY, METRICS, RELEASES, RESULT

NOT_KNOWN = "not known"
UNLIKE = (
    "guarantee.json promises more than the releases on record allow: a file was changed, or they are not of one run. "
    "Do not rely on the epsilon below"
)


@dataclass(frozen=True)
class Figures:
    """Figures on held-out rows, and who may see them.

    Attributes:
        values: by name, at the end.
        baseline: what a constant guess reaches; None where that is not known.
        learnt: whether the run is better than that by more than chance; None where that is not known.
        curve: lines of metrics.jsonl: step, and accuracy (or mae) and loss where there are any.
        public: whether they may be published.
        why: who may see them, and why, in a sentence.

    """

    values: dict[str, float]
    baseline: float | None
    learnt: bool | None
    curve: tuple[dict[str, float], ...]
    public: bool
    why: str


@dataclass(frozen=True)
class Since:
    """What the data's ledger holds now, if runs were charged to it after this one: how many were, and all releases."""

    runs: int
    guarantee: Guarantee
    releases: Canonical


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        folder: where it is.
        label: what it is called here: the folder's name, or a number on a page that may be published.
        dataset: the data's declared name.
        settings: `config.json`; of a run that has not ended what `run.json` says, as it was asked for.
        finished: whether it ended.
        guarantee: over everything in its ledger when it ended: the one to publish. None where there is no such file.
        own: of this run alone, where that is known.
        runs: how many runs had been charged to the ledger by then; None where that is not known.
        own_releases, all_releases: what `own` and `guarantee` are about; None where that is not known.
        figures: on held-out rows; None where there are none, or the reader may not see them.
        history: lines of history.jsonl.
        since: what was charged to the data's ledger after this run; None for nothing, or where that is not known.
        files: name, who may see it, and why, of each file that may be mentioned.
        remarks: what is missing, damaged, or has to be known before the rest.

    """

    folder: Path
    label: str
    dataset: str
    settings: dict[str, Any]
    finished: bool
    guarantee: Guarantee | None
    own: Guarantee | None
    runs: int | None
    own_releases: Canonical | None
    all_releases: Canonical | None
    figures: Figures | None
    history: tuple[dict[str, Any], ...]
    since: Since | None
    files: tuple[tuple[str, Audience, str], ...]
    remarks: tuple[str, ...]

    @property
    def algorithm(self) -> str:
        """The algorithm, and its reading unless that is the sound one."""
        name, reading = self.settings.get("algorithm", NOT_KNOWN), self.settings.get("reading")
        return f"{name}" if reading in (None, "sound", "") else f"{name} ({reading})"

    @property
    def current(self) -> Guarantee | None:
        """The guarantee to publish: over everything that is on record for the data now."""
        return self.guarantee if self.since is None else self.since.guarantee

    @property
    def current_releases(self) -> Canonical | None:
        """What `current` is about."""
        return self.all_releases if self.since is None else self.since.releases

    @property
    def counted(self) -> int | None:
        """How many runs `current` counts."""
        return self.runs if self.runs is None or self.since is None else self.runs + self.since.runs

    @property
    def steps(self) -> int | None:
        """Steps as planned; None where that is not known."""
        found = self.settings.get("steps")
        return found if isinstance(found, int) else None

    @property
    def own_data(self) -> bool:
        """Whether the data is the user's own."""
        return self.settings.get("dataset") not in NAMES


class _Folder:
    """Files of one run, for a reader who may see them."""

    def __init__(self, path: Path, public: bool) -> None:
        self.path, self.public, self.remarks = path, public, list[str]()
        self.guaranteed = True  # until guarantee.json says otherwise

    def may_show(self, name: str) -> bool:
        audience = run_files.run_file(name).audience_with(self.guaranteed)
        return not self.public or audience is Audience.PUBLIC

    def table(self, name: str, *, unseen: bool = False) -> dict[str, Any] | None:
        """A file that holds one table; None where it is not there. `unseen`: the caller shows none of it."""
        text = self._text(name) if unseen or self.may_show(name) else None
        return None if text is None else self._parsed(name, text)

    def lines(self, name: str, *, unseen: bool = False) -> list[dict[str, Any]]:
        """A file of tables, one a line; lines that cannot be read are left out, and that is said."""
        text = self._text(name) if unseen or self.may_show(name) else None
        rows = (text or "").splitlines()
        found = [_table(row) for row in rows]
        torn = sum(row is None for row in found)
        if torn:
            self.remarks.append(f"{name}: {torn} of {len(rows)} lines are damaged and left out")
        return [row for row in found if row is not None]

    def _text(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.remarks.append(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")
            return None

    def _parsed(self, name: str, text: str) -> dict[str, Any] | None:
        found = _table(text)
        if found is None:
            self.remarks.append(f"{name} is damaged and left out")
        return found


def _table(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read(path: str | Path, *, public: bool = False, number: int | None = None) -> Run:
    """A run from its folder.

    Args:
        path: the folder.
        public: leave out what may not be published.
        number: the run's number among several, for its label on a public page.

    Raises:
        ConfigurationError: it is not a run's folder; or the run has not ended, and the page is to be published.

    """
    folder = _Folder(Path(path), public)
    if not (folder.path / CONFIG).is_file() and not (folder.path / RUN).is_file():
        raise ConfigurationError(f"{path} is not the folder of a run: it has neither {CONFIG} nor {RUN}")
    settings = folder.table(CONFIG)
    finished = settings is not None and (folder.path / GUARANTEE).is_file()
    if public and not finished:
        raise ConfigurationError(f"the run in {path} has not ended: there is no guarantee yet that could be published")
    if settings is None:
        settings = _asked_for(folder)
    guarantee, charged = (_guarantee(folder), None) if finished else _so_far(folder)
    folder.guaranteed = guarantee is not None and guarantee.epsilon is not None
    releases = folder.table(RELEASES) or {}
    if finished and not {"own", "own_releases", "all_releases"} <= releases.keys():
        folder.remarks.append(f"{RELEASES} is missing or not whole (older versions wrote none): releases are not known")
    result = folder.table(RESULT, unseen=True)  # where the ledger is; `_figures` knows who may see what else is in it
    if finished and result is None:
        folder.remarks.append(f"{RESULT} is missing or damaged: the figures at the end are not known")
    if finished and any(settings.get(name) is None for name in ("dataset", "algorithm", "steps")):
        folder.remarks.append(f"{CONFIG} does not hold all settings of a run")
    written = folder.lines(HISTORY)
    history = [line for line in written if _is_history(line)]
    if len(history) < len(written):
        folder.remarks.append(
            f"{HISTORY}: {len(written) - len(history)} lines have not the form that this version knows"
        )
    if guarantee is not None and not history:
        why = "without a guarantee none is written" if guarantee.epsilon is None else "older versions wrote none"
        folder.remarks.append(f"there is no {HISTORY} ({why}; nor do line searches): how much is noise is not known")
    run = Run(
        folder=folder.path,
        label=folder.path.resolve().name if not public else f"run {number or 1}",
        dataset=_name_of(settings, releases),
        settings=_shown(settings) if public else settings,
        finished=finished,
        guarantee=guarantee,
        own=_own(releases),
        runs=releases.get("runs") if isinstance(releases.get("runs"), int) else None,
        own_releases=_releases(folder, releases.get("own_releases")),
        all_releases=charged or _releases(folder, releases.get("all_releases")),
        figures=_figures(folder, settings, result),
        history=tuple(history),
        since=None,
        files=tuple(_files(folder)),
        remarks=(),
    )
    since, remark = _since(run, str((result or {}).get("ledger", "")), releases.get("ids"), public)
    if since is not None and since.guarantee.epsilon is None:  # what was made since took it away
        folder.guaranteed = False
        run = replace(run, figures=_figures(folder, settings, result), files=tuple(_files(folder)))
        run = replace(run, history=() if public else run.history)
    first = [] if finished else [_unfinished(folder, settings)]
    remarks = dict.fromkeys([*first, *folder.remarks, *filter(None, [remark])])
    return replace(run, since=since, remarks=tuple(remarks))


# ---- settings -------------------------------------------------------------------------------------------------------


def _asked_for(folder: _Folder) -> dict[str, Any]:
    """Settings of a run that has not ended, and what was settled from them."""
    found = folder.table(RUN) or {}
    settings, settled = found.get("settings"), found.get("settled")
    known = settled if isinstance(settled, dict) else {}
    return {
        **(settings if isinstance(settings, dict) else {}),
        **{name: known[name] for name in ("noise_multiplier", "epsilon") if known.get(name) is not None},
    }


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without paths and digests; data sets known by name stay."""
    known = settings.get("dataset") in NAMES
    return {
        name: value for name, value in settings.items() if name not in PATHS or (name == "dataset" and known)
    }  # fmt: skip


def _name_of(settings: Mapping[str, Any], releases: Mapping[str, Any]) -> str:
    for name in (settings.get("dataset_name"), releases.get("dataset")):
        if isinstance(name, str) and name:
            return name
    dataset = settings.get("dataset")
    return NOT_KNOWN if not isinstance(dataset, str) else dataset if dataset in NAMES else Path(dataset).stem


# ---- guarantee and releases -----------------------------------------------------------------------------------------


def _guarantee(folder: _Folder) -> Guarantee | None:
    values = folder.table(GUARANTEE)
    try:
        return None if values is None else Guarantee.from_dict(values)
    except ConfigurationError as error:
        folder.remarks.append(f"{GUARANTEE} is damaged: {error}")
        return None


def _so_far(folder: _Folder) -> tuple[Guarantee | None, Canonical | None]:
    """What the ledger in the folder of an unfinished run holds: the guarantee over it, and its releases."""
    path = folder.path / "ledger.jsonl"
    if not path.is_file():
        folder.remarks.append("the ledger is not in the folder: what is charged, adadp ledger show tells")
        return None, None
    try:
        ledger = Ledger(path, neighbours=None)
        return (ledger.guarantee(ledger.deltas[0]), ledger.composition()) if ledger.deltas else (None, None)
    except (LedgerError, ConfigurationError) as error:
        folder.remarks.append(str(error))
        return None, None


def _own(releases: Mapping[str, Any]) -> Guarantee | None:
    try:
        return Guarantee.from_dict(releases["own"])
    except (KeyError, ConfigurationError):
        return None


def _releases(folder: _Folder, values: Any) -> Canonical | None:
    try:
        return None if values is None else releases_from_json(values)
    except ConfigurationError as error:
        folder.remarks.append(f"{RELEASES} is damaged: {error}")
        return None


def _since(run: Run, place: str, ids: Any, public: bool) -> tuple[Since | None, str | None]:
    """What later runs were charged to the data's ledger; or a remark that this could not be found out.

    Args:
        run: which has ended.
        place: where its ledger was, as it was written then: it may lie elsewhere now, or another one may lie there.
        ids: of what the run charged, by which its ledger is known.
        public: whether the remark may name no path.

    """
    if run.guarantee is None or run.guarantee.epsilon is None or run.runs is None or not run.finished:
        return None, None
    away = "the data's ledger is not at hand: runs that were made after this one are not in any number here"
    path = next((p for p in (run.folder / Path(place).name, Path(place)) if place and p.is_file()), None)
    if path is None or not isinstance(ids, list):
        return None, away
    try:
        ledger = Ledger(path, neighbours=None)
        known = {each.uid for each in ledger.runs} | {each.uid for each in ledger.inherited}
        if not known.issuperset(map(str, ids)):
            return None, away
        whole, releases = ledger.guarantee(run.guarantee.delta), ledger.composition()
        own = [each.id for each in ledger.runs if each.uid in ids]
        if len(own) == len(ids) and run.own_releases != releases_of(ledger, own):
            return None, UNLIKE
        if releases == run.all_releases:
            return None, UNLIKE if run.guarantee.promises_more_than(whole) else None
        return Since(max(0, runs_in(ledger) - run.runs), whole, releases), None
    except (LedgerError, ConfigurationError) as error:
        return None, "the data's ledger cannot be read: later runs are not in any number here" if public else str(error)


# ---- figures and files ----------------------------------------------------------------------------------------------

PAID = "Computed from counts that were released with noise and charged: the guarantee covers them."
PUBLISHED = (
    "Computed without noise on the published test set, whose examples need no protection. The guarantee does "
    "not cover the examples of a test set."
)
PRIVATE = (
    "Computed without noise on private rows that were held out: the guarantee does not cover those people, "
    "and the figures are for the curator only."
)
UNCOVERED = "No guarantee covers the weights, and so none covers what is computed with them: for the curator only."


def _who_may_see(settings: Mapping[str, Any], guaranteed: bool, noised: bool) -> tuple[bool, str]:
    if not guaranteed:
        return False, UNCOVERED
    if settings.get("paid_metrics") is True and noised:
        return True, PAID
    known = is_published(settings.get("dataset"), settings.get("test"))
    return known, PUBLISHED if known else PRIVATE


def _figures(folder: _Folder, settings: Mapping[str, Any], result: Mapping[str, Any] | None) -> Figures | None:
    found = (result or {}).get("metrics")
    metrics = found if isinstance(found, dict) else {}
    noised = _finite(metrics).get("noise", 0.0) > 0
    public, why = _who_may_see(settings, folder.guaranteed, noised)
    if folder.public and not public:
        return None
    if not metrics and isinstance((result or {}).get("accuracy"), float):  # version 0.1
        metrics = {"values": {"accuracy": (result or {})["accuracy"]}}
    values = _finite(metrics.get("values"))
    lines = (_finite(line, ("step", "accuracy", "mae", "loss")) for line in folder.lines(METRICS, unseen=True))
    curve = tuple(line for line in lines if line.keys() > {"step"} and "step" in line)
    if not values and not curve:
        return None
    learnt = metrics.get("learnt")
    return Figures(
        values, _finite(metrics).get("baseline"), learnt if isinstance(learnt, bool) else None, curve, public, why
    )


def _finite(values: Any, names: tuple[str, ...] | None = None) -> dict[str, float]:
    """The finite numbers of a table, by name."""
    if not isinstance(values, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in values.items()
        if (names is None or name in names) and type(value) in (int, float) and math.isfinite(value)
    }


def _is_history(line: Mapping[str, Any]) -> bool:
    layers = line.get("layers")
    return (
        type(line.get("step")) is int
        and _finite(line).get("samples", 0) > 0
        and isinstance(layers, dict)
        and all(_finite(layer).keys() >= {"signal", "noise", "error"} for layer in layers.values())
    )


def _files(folder: _Folder) -> list[tuple[str, Audience, str]]:
    """Each file of the run; to those who may not see the folder, only what may be published of it."""
    found = [
        (name, file.audience_with(folder.guaranteed), file.why_with(folder.guaranteed))
        for name, file in run_files.files_of(folder.path)
    ]
    return [each for each in found if not folder.public or each[1] is Audience.PUBLIC]


def _unfinished(folder: _Folder, settings: Mapping[str, Any]) -> str:
    lines = [*folder.lines(METRICS), *folder.lines(HISTORY)]
    last = max((line["step"] for line in lines if type(line.get("step")) is int), default=0)
    steps = settings.get("steps")
    of = f" of {steps:,}" if isinstance(steps, int) else ""
    return (
        f"This run has not ended: its last note is of step {last:,}{of}. It was interrupted, or it is still running. "
        "Below is what there is; what is charged holds the rest of its plan, too"
    )
