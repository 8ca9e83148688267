"""What a report says, of one run or of several: sections of blocks, in the order in which a reader needs them."""

from __future__ import annotations

from collections.abc import Sequence

from adadp import __version__
from adadp.accounting.guarantee import round_up
from adadp.report import figures, wording
from adadp.report.blocks import (
    Beside,
    Block,
    Card,
    Cards,
    Code,
    Figure,
    Figures,
    Folded,
    Items,
    Notice,
    Page,
    Section,
    Table,
    Text,
    Tone,
)
from adadp.report.facts import Facts
from adadp.report.rerun import given, rerun
from adadp.report.run import Run

FOR_THE_CURATOR = "For the curator only"
MAY_BE_PUBLISHED = "May be published"
_PARTS = {"pca_components": "pca_noise_multiplier", "rows_per_person": "person"}  # idle without the other
_RULED_OUT = {"sha256", "seed", "settings", "kinds", "out"}  # shown elsewhere, or no settings
_NAMES = {
    "balanced_accuracy": "balanced accuracy", "f1": "F1", "auc": "AUC", "mae": "mean absolute error", "rmse": "RMSE",
    "r2": "R2",
}  # fmt: skip
_PLAN = ("algorithm", "reading", "model", "epsilon", "noise_multiplier", "delta", "lot", "steps", "epochs")


def page_of(facts: Sequence[Facts], *, public: bool) -> Page:
    """The report on these runs."""
    one = len(facts) == 1
    head = [_audience(facts, public), *(_of_one(facts[0]) if one else _of_several(facts))]
    sections = [
        Section("", head),
        *_drawn("How well it predicts" if one else "How well they predict", figures.learning(facts)),
        *_attacks(facts),
        *_spent(facts),
        *_drawn("Noise", [*figures.noise(facts), *figures.sigma(facts)]),
        *_rest(facts, public),
    ]
    names = list(dict.fromkeys(each.run.dataset for each in facts))
    title = f"{facts[0].run.algorithm} on {names[0]}" if one else f"{len(facts)} runs on {', '.join(names)}"
    footer = f"Made by adadp {__version__} from the folders of the runs. Numbers of guarantees are rounded up."
    return Page(title, _subtitle(facts, public), public, sections, footer)


def _subtitle(facts: Sequence[Facts], public: bool) -> str:
    if len(facts) > 1:
        return "Compared on common axes: " + ", ".join(each.run.label for each in facts)
    run = facts[0].run
    known = run.settings.get
    parts = [
        "" if public else run.label,
        f"model {known('model')}" if known("model") else "",
        f"{run.steps:,} steps" if run.steps is not None else "",
        f"lots of {known('lot'):,}" if isinstance(known("lot"), int) else "",
    ]
    return " · ".join(filter(None, parts))


def _audience(facts: Sequence[Facts], public: bool) -> Notice:
    if public:
        hidden = " Figures on held-out rows that may not be published are left out, as are times and paths."
        return Notice(
            Tone.GOOD, MAY_BE_PUBLISHED, f"Everything on this page is in files that may be published.{hidden}"
        )
    raw = any(each.run.figures is not None and not each.run.figures.public for each in facts)
    why = " It shows figures that the guarantee does not cover." if raw else ""
    return Notice(
        Tone.NOTE, FOR_THE_CURATOR, f"Do not pass this page on.{why} --public makes one that may be published."
    )


# ---- at the top -----------------------------------------------------------------------------------------------------


def _of_one(facts: Facts) -> list[Block]:
    run = facts.run
    blocks: list[Block] = [Notice(Tone.WARNING, "What is missing", items=wording.sentences(run.remarks))] * bool(
        run.remarks
    )
    if run.current is not None and not facts.guaranteed:
        blocks.insert(0, _none(run))
    blocks.append(Cards(_cards(facts)))
    if run.current is not None and facts.guaranteed:
        blocks.append(Text(run.current.sentence()))
    blocks += [Text(text) for text in (wording.which_to_publish(run), wording.since(run)) if text]
    return blocks


def _none(run: Run, title: str = "") -> Notice:
    found = run.current
    reasons = () if found is None else found.reasons
    claim = ""
    if found is not None and found.claimed_epsilon is not None:
        claim = (
            f" The published analysis would claim epsilon {round_up(found.claimed_epsilon)} at delta "
            f"{round_up(found.delta)}: claimed, not guaranteed."
        )
    text = f"{wording.NOTHING_PROMISED}{claim} Why there is none:"
    return Notice(Tone.NONE, title or wording.NO_GUARANTEE, text, wording.sentences(reasons))


def _cards(facts: Facts) -> list[Card]:
    run, found = facts.run, facts.run.current
    tone = Tone.GOOD if facts.guaranteed else Tone.NONE
    several = run.counted is not None and run.counted > 1
    under = "" if found is None else f"at delta {round_up(found.delta)}, for {found.unit}"
    if not run.finished and found is not None:
        under = f"charged so far, the rest of the plan included; {under}"
    title = f"epsilon of the data set ({run.counted:,} runs): publish this one" if several else "epsilon"
    cards = [Card(title, wording.epsilon_of(found), under, tone)]
    if several and run.own is not None:
        cards.append(Card("epsilon of this run alone", wording.epsilon_of(run.own), "to compare methods"))
    if facts.attacker is not None:
        right = wording.percent(facts.attacker.right)
        cards.append(Card("an attacker's guess is right at most", right, "of the time; luck is right 50%"))
    if run.figures is not None and run.figures.values:
        cards.append(_figure_card(run))
    return cards


def _figure_card(run: Run) -> Card:
    assert run.figures is not None
    values, baseline = run.figures.values, run.figures.baseline
    name, value = next(((key, values[key]) for key in ("accuracy", "mae") if key in values), next(iter(values.items())))
    parts = [f"a constant guess: {_figure(name, baseline)}" if baseline is not None else ""]
    parts.append("not told apart from that" if run.figures.learnt is False else "")
    parts.append("may be published" if run.figures.public else "not covered by the guarantee")
    return Card(f"{_NAMES.get(name, name)} on held-out rows", _figure(name, value), "; ".join(filter(None, parts)))


def _figure(name: str, value: float) -> str:
    return f"{value:.4g}" if name in ("mae", "rmse", "r2", "loss") else f"{value:.2%}"


def _of_several(facts: Sequence[Facts]) -> list[Block]:
    blocks: list[Block] = []
    without = [each.run for each in facts if each.run.current is not None and not each.guaranteed]
    blocks += [_none(run, f"{wording.NO_GUARANTEE} for {run.label}") for run in without]
    for each in facts:
        if each.run.remarks:
            items = wording.sentences(each.run.remarks)
            blocks.append(Notice(Tone.WARNING, f"What is missing in {each.run.label}", items=items))
    if _unlike(facts):
        blocks.append(Notice(Tone.WARNING, "Before you compare", items=_unlike(facts)))
    return [*blocks, _side_by_side(facts), *(Text(text) for text in _several_on_one_data_set(facts))]


def _several_on_one_data_set(facts: Sequence[Facts]) -> list[str]:
    """Which number to publish of each data set that several runs looked at."""
    found = {}
    for each in facts:
        text = wording.which_to_publish(each.run)
        if text:
            found[each.run.dataset] = f"{each.run.dataset}: {text}"
    return list(found.values())


def _unlike(facts: Sequence[Facts]) -> list[str]:
    """Why numbers of these runs are not of one kind."""
    known = [each.run.current for each in facts if each.run.current is not None]
    found = []
    if len({each.run.dataset for each in facts}) > 1:
        found.append("The runs are on different data sets: their accuracies and losses cannot be compared.")
    elif any(each.run.own_data and each.run.figures is not None for each in facts):
        found.append("Each run drew its own held-out rows unless they were given: figures differ by that, too.")
    if len({each.delta for each in known}) > 1:
        found.append("The deltas differ: an epsilon at a larger delta is a weaker promise than it looks.")
    if len({each.unit for each in known}) > 1:
        found.append("The units differ: an epsilon for one person is a stronger promise than one for an example.")
    return found


def _side_by_side(facts: Sequence[Facts]) -> Table:
    """The comparison: one column a run, rows that differ marked."""
    columns = [_column(each) for each in facts]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    marked = frozenset(number for number, row in enumerate(rows) if len(set(row[1:])) > 1)
    return Table(["", *(each.run.label for each in facts)], rows, marked)


def _column(facts: Facts) -> dict[str, str]:
    run = facts.run
    found = {
        "dataset": run.dataset,
        "algorithm": run.algorithm,
        "ended": "yes" if run.finished else "no",
        "epsilon of the data set (publish this)": wording.epsilon_of(run.current),
        "epsilon of the run alone": wording.epsilon_of(run.own or (None if (run.counted or 1) > 1 else run.current)),
        "delta": "" if run.current is None else round_up(run.current.delta),
        "unit": "" if run.current is None else run.current.unit,
        "runs on record": "" if run.counted is None else f"{run.counted:,}",
        "an attacker is right at most": "always" if facts.attacker is None else wording.percent(facts.attacker.right),
    }
    if run.current is None:
        found["an attacker is right at most"] = "not known"
    if run.figures is not None:
        found |= {
            f"{_NAMES.get(name, name)} on held-out rows": _figure(name, value)
            for name, value in run.figures.values.items()
        }
    for name in ("model", "lot", "steps", "noise_multiplier"):
        if run.settings.get(name) is not None:
            found[name.replace("_", " ")] = _value(run.settings[name])
    return found


# ---- below ----------------------------------------------------------------------------------------------------------


def _drawn(title: str, found: Sequence[Figure]) -> list[Section]:
    return [Section(title, [Figures(found)])] if found else []


def _attacks(facts: Sequence[Facts]) -> list[Section]:
    known = [each for each in facts if each.attacker is not None and each.run.current is not None]
    if not known:
        return []
    blocks: list[Block] = []
    for each in known:
        assert each.attacker is not None
        assert each.run.current is not None
        said = wording.attacks(each.attacker, each.run.current)
        blocks += [Text(said[0]), Items("", said[1:])] if len(facts) == 1 else [Items(each.run.label, said)]
    if len(facts) > 1:
        blocks = [_odds(known), Folded("In words", blocks)]
    blocks.append(Text("These are bounds for the worst case. Most attackers know less, and find less."))
    return [Section("What an attacker can do", [Beside(blocks, figures.attack(facts))])]


def _odds(facts: Sequence[Facts]) -> Table:
    """What the sentences say, a column for each run."""
    found = [each.attacker for each in facts if each.attacker is not None]
    rows = [["a guess is right (luck: 50%)", *(wording.percent(each.right) for each in found)]]
    for rate in found[0].found:
        name = f"found, if {wording.percent(rate)} may be accused wrongly"
        rows.append([name, *(wording.percent(each.found[rate]) for each in found)])
    return Table(["at most", *(each.run.label for each in facts)], rows)


def _spent(facts: Sequence[Facts]) -> list[Section]:
    """Epsilon over time; beside it, in numbers, what was planned and what was spent."""
    drawn = figures.epsilon(facts)
    if not drawn:
        return []
    columns = [_accounts(each.run) for each in facts]
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    heads = ["", "epsilon"] if len(facts) == 1 else ["epsilon", *(each.run.label for each in facts)]
    rows = [[name, *(column[name] for column in columns)] for name in names]
    return [Section("What was spent", [Beside([Table(heads, rows)], drawn)])]


def _accounts(run: Run) -> dict[str, str]:
    planned, budget = (run.settings.get(name) for name in ("epsilon", "budget"))
    return {
        "planned": f"{planned:g}" if isinstance(planned, int | float) else "by its noise",
        "this run alone": wording.epsilon_of(run.own),
        "all runs on the data when it ended": wording.epsilon_of(run.guarantee),
        "all runs on the data now": wording.epsilon_of(run.current) if run.since else "",
        "budget of all runs": f"{budget:g}" if isinstance(budget, int | float) else "",
    }


def _rest(facts: Sequence[Facts], public: bool) -> list[Section]:
    if len(facts) == 1:
        each = facts[0]
        return [
            *([Section("The guarantee, and what it rests on", _guarantee(each))] if each.run.current else []),
            Section("Settings", _settings([each])),
            Section("To run it again", _again(each.run, public)),
            Section("Which files may be published", _files(each.run, public)),
        ]
    blocks = [
        Folded(each.run.label, [*_guarantee(each), *_again(each.run, public), *_files(each.run, public)])
        for each in facts
    ]
    return [
        Section("Settings that differ", _settings(facts)),
        Section("Each run: its guarantee, how to run it again, its files", blocks),
    ]


def _guarantee(facts: Facts) -> list[Block]:
    found = facts.run.current
    if found is None:
        return [Text("No guarantee is known of this run.")]
    order = "" if found.order is None else f", order {found.order:g}"
    rows = [
        ["epsilon", wording.epsilon_of(found)],
        ["delta", round_up(found.delta)],
        ["neighbours", str(found.neighbours)],
        ["unit of privacy", found.unit],
        ["released", found.sampling],
        ["accountant", f"{found.accountant}{order}"],
    ]
    rests = "It would rest on these conditions" if found.epsilon is None else "It holds under these conditions"
    return [
        Table(["", ""], rows),
        *([Items("Why there is none", wording.sentences(found.reasons))] if found.reasons else []),
        Items(rests, wording.sentences(wording.conditions(facts))),
        *([Items("Notes", wording.sentences(found.notes))] if found.notes else []),
    ]


def _settings(facts: Sequence[Facts]) -> list[Block]:
    columns = [_listed(each.run) for each in facts]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    if len(facts) == 1:
        return [Table(["", ""], rows, code=frozenset({0}))]
    same = [row[:2] for row in rows if len(set(row[1:])) == 1]
    other = [row for row in rows if len(set(row[1:])) > 1]
    heads = [each.run.label for each in facts]
    shared = Folded("Settings that all share", [Table(["", "all"], same, code=frozenset({0}))])
    return [Table(["", *heads], other, code=frozenset({0})) if other else Text("None does."), shared]


def _listed(run: Run) -> dict[str, str]:
    settings = run.settings
    names = [name for name in (*_PLAN, *settings) if name in settings and name not in _RULED_OUT]
    found = {
        name.replace("_", "-"): _value(settings[name])
        for name in dict.fromkeys(names)
        if given(settings[name]) and settings.get(_PARTS.get(name, name)) is not None
    }
    own = settings.get("settings")
    found |= {f"algorithm: {key}": _value(value) for key, value in (own if isinstance(own, dict) else {}).items()}
    kinds = settings.get("kinds")
    return found | {f"column {key}": _value(kind) for key, kind in (kinds if isinstance(kinds, dict) else {}).items()}


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and 1000 <= value < 10**9 else str(value)


def _again(run: Run, public: bool) -> list[Block]:
    cost = (
        "A run that is made again draws other lots and other noise, and its epsilon is spent again. adadp plan, with "
        "the same options, says first what it would cost."
    )
    return [Code(rerun(run.settings, public=public)), Text(cost)]


def _files(run: Run, public: bool) -> list[Block]:
    rows = [[name, str(audience), why.replace("`", "")] for name, audience, why in run.files]
    kept = "" if public else "Never pass on the folder as a whole. "
    return [
        Text(f'{kept}"May be published" means that the guarantee covers it, or that it holds nothing of anybody.'),
        Table(["file", "who may see it", "why"], rows, code=frozenset({0})),
    ]
