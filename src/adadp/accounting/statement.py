"""The guarantee over a whole ledger: which number may be said, and everything that it rests on."""

from __future__ import annotations

from dataclasses import replace

from adadp.accounting.accountants import covering_accountant, get_accountant
from adadp.accounting.books import Books, View
from adadp.accounting.composition import canonical
from adadp.accounting.events import Neighbours
from adadp.accounting.guarantee import Guarantee, describe, make_guarantee
from adadp.accounting.remarks import Remarks
from adadp.accounting.spending import DEFAULT_UNIT
from adadp.errors import ConfigurationError

PLANNED_TOGETHER = "the runs of this ledger were planned together: none was chosen after seeing what another released"
FIXED_BEFORE_INHERITED = (
    "the ledger's shared budget was fixed before the runs that it inherited, or without looking at what they released"
)


def over(
    books: Books, view: View, remarks: Remarks, delta: float, accountant: str | None, unit: str | None
) -> Guarantee:
    """What may be said about everything that `books` hold, given all `remarks`.

    Under a privacy filter that is its whole budget, as one Renyi bound at its order. Less would be true of no run of
    this ledger in particular: what an adaptively chosen sequence has used up so far is itself an output (an odometer),
    and no bound on it holds at a moment chosen by looking.
    """
    releases = books.composition(view)
    neighbours = books.neighbours or Neighbours.ADD_REMOVE
    filtered = books.order is not None and bool(releases)
    notes = list(remarks.notes)
    if books.one_plan is not None:
        accountant = accountant or books.one_plan.accountant
    used = covering_accountant(releases, neighbours, accountant)
    if accountant not in (None, used) and not filtered:
        refusals = (get_accountant(str(accountant)).refusal(event, neighbours) for event, _ in releases)
        notes += [f"accounted for by {used}: {reason}" for reason in dict.fromkeys(filter(None, refusals))]
    found = make_guarantee(
        releases,
        delta,
        accountant=used,
        neighbours=neighbours,
        unit=_unit(books, unit),
        assumptions=(*remarks.untried, *remarks.assumptions, *_about_several(books, view)),
        reasons=remarks.reasons,
        untried=remarks.untried,
        notes=notes,
    )
    if not filtered or books.budget is None:
        return found
    made = "; ".join(describe(event, count) for event, count in canonical(books.pairs(view)))
    budget = f"epsilon {books.budget.epsilon:g} at delta {books.budget.delta:g}"
    return replace(found, sampling=f"{made}; all under the ledger's privacy filter, whose budget is {budget}")


def _unit(books: Books, asked: str | None) -> str:
    declared = next((run.unit for run in books.runs.values() if run.unit is not None), None)
    if asked is not None and declared is not None and asked != declared:
        raise ConfigurationError(f"this ledger protects {declared!r}: it has no guarantee for {asked!r}")
    return asked or books.unit or DEFAULT_UNIT


def _about_several(books: Books, view: View) -> tuple[str, ...]:
    """What has to be assumed of runs together. A run that resumes another is the same plan."""
    inherited = [run for run in books.inherited() if run.counts]
    if books.order is not None:
        return (FIXED_BEFORE_INHERITED,) if inherited else ()
    charges = books.charges(view)
    own = sum(1 for name, run in books.runs.items() if charges[name] and run.resumes is None)
    filters = {run.filter for run in inherited if run.filter is not None}
    several = own + len(filters) + sum(run.filter is None for run in inherited) > 1
    return (PLANNED_TOGETHER,) if several else ()
