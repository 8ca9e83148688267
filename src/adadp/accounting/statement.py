"""The guarantee over a whole ledger: which number may be said, and everything that it rests on."""

from __future__ import annotations

from dataclasses import replace

from adadp.accounting.accountants import covering_accountant, get_accountant
from adadp.accounting.composition import canonical
from adadp.accounting.events import Neighbours
from adadp.accounting.guarantee import Guarantee, describe, make_guarantee
from adadp.accounting.ledger_state import LedgerState, View
from adadp.accounting.remarks import Remarks
from adadp.accounting.running import RunningEpsilon
from adadp.accounting.spending import DEFAULT_UNIT
from adadp.errors import ConfigurationError

PLANNED_TOGETHER = "the runs of this ledger were planned together: none was chosen after seeing what another released"
FIXED_BEFORE_INHERITED = (
    "the ledger's shared budget was fixed before the runs that it inherited, or without looking at what they released"
)


def over(
    state: LedgerState,
    view: View,
    remarks: Remarks,
    delta: float,
    accountant: str | None,
    unit: str | None,
    running: RunningEpsilon | None = None,
) -> Guarantee:
    """What may be said about everything that `state` hold, given all `remarks`.

    Under a privacy filter that is its whole budget, as one Renyi bound at its order. Less would be true of no run of
    this ledger in particular: what an adaptively chosen sequence has used up so far is itself an output (an odometer),
    and no bound on it holds at a moment chosen by looking.
    """
    releases = state.composition(view)
    neighbours = state.neighbours or Neighbours.ADD_REMOVE
    filtered = state.order is not None and bool(releases)
    notes = list(remarks.notes)
    if state.one_plan is not None:
        accountant = accountant or state.one_plan.accountant
    used = covering_accountant(releases, neighbours, accountant)
    if accountant not in (None, used) and not filtered:
        refusals = (get_accountant(str(accountant)).refusal(event, neighbours) for event, _ in releases)
        notes += [f"accounted for by {used}: {reason}" for reason in dict.fromkeys(filter(None, refusals))]
    found = make_guarantee(
        releases,
        delta,
        accountant=used,
        neighbours=neighbours,
        unit=_unit(state, unit),
        assumptions=(*remarks.untried, *remarks.assumptions, *_about_several(state, view)),
        reasons=remarks.reasons,
        untried=remarks.untried,
        notes=notes,
        running=running,
    )
    if not filtered or state.budget is None:
        return found
    made = "; ".join(describe(event, count, found.unit) for event, count in canonical(state.pairs(view)))
    budget = f"epsilon {state.budget.epsilon:g} at delta {state.budget.delta:g}"
    return replace(found, sampling=f"{made}; all under the ledger's privacy filter, whose budget is {budget}")


def _unit(state: LedgerState, asked: str | None) -> str:
    if asked is not None and state.unit not in (None, asked):
        raise ConfigurationError(f"this ledger protects {state.unit!r}: it has no guarantee for {asked!r}")
    return asked or state.unit or DEFAULT_UNIT


def _about_several(state: LedgerState, view: View) -> tuple[str, ...]:
    """What has to be assumed of runs together. A run that resumes another is the same plan."""
    inherited = [run for run in state.inherited() if run.counts]
    if state.order is not None:
        return (FIXED_BEFORE_INHERITED,) if inherited else ()
    charges = state.charges(view)
    own = sum(1 for name, run in state.runs.items() if charges[name] and run.resumes is None)
    filters = {run.filter for run in inherited if run.filter is not None}
    several = own + len(filters) + sum(run.filter is None for run in inherited) > 1
    return (PLANNED_TOGETHER,) if several else ()
