"""Whether a run may begin in a ledger: its relation, its unit, its seed, and the run that it resumes."""

from __future__ import annotations

from collections.abc import Container, Mapping

from adadp.accounting.chain import canonical_json
from adadp.accounting.events import Neighbours
from adadp.accounting.ledger_state import JSON, LedgerState, Refusal
from adadp.accounting.spending import DEFAULT_UNIT
from adadp.errors import ConfigurationError, LedgerError


def relation_for(state: LedgerState, plan: Mapping[str, JSON]) -> Neighbours:
    """The neighbouring relation of a run with this plan. `Refusal` where the ledger holds another one."""
    relation = state.neighbours or Neighbours(plan.get("neighbours", Neighbours.ADD_REMOVE))
    if plan.get("neighbours", relation) != relation:
        raise Refusal(f"it holds guarantees for {relation} neighbours, the plan is for {plan['neighbours']}")
    return relation


def unit_for(state: LedgerState, plan: Mapping[str, JSON]) -> str:
    """The unit of privacy of a run with this plan. `Refusal` where the ledger protects another one.

    A plan that names none is for one example, in any ledger: to take the ledger's would turn rows into persons.
    """
    unit = DEFAULT_UNIT if plan.get("unit") is None else plan["unit"]
    if not isinstance(unit, str) or not unit.strip():
        raise ConfigurationError(f"a plan's unit must be a text such as 'one example', not {unit!r}")
    if state.unit not in (None, unit):
        raise Refusal(f"it protects {state.unit!r}, and the plan {unit!r}: one ledger, one unit. Give another file")
    return unit


def require_new_seed(state: LedgerState, seed: int, attempt: int | None, resume: str | None) -> None:
    """Raise LedgerError where a run had this seed, unless `resume` is that run and each attempt has its own noise."""
    fingerprint = state.fingerprint(seed)
    goes_on = attempt is not None and resume is not None and state.only_in_line(fingerprint, resume)
    if fingerprint in state.seeds and not goes_on:
        raise LedgerError(
            "this seed has been used in this ledger: the same noise twice protects nothing. Leave the "
            "seed out, or take a new one. (Only PrivacyEngine(resume=...) and adadp train --resume go on with the "
            "seed of the run that they resume.)"
        )


def require_resumable(
    state: LedgerState, resume: str | None, plan: Mapping[str, JSON], still_open: Container[str]
) -> None:
    """`Refusal` where the run `resume`, or one that it resumes, is not here, is open, or had another plan."""
    while resume is not None:
        summary = state.runs.get(resume)
        if summary is None:
            raise Refusal(f"it has no run {resume!r} to resume")
        if resume in still_open:
            raise Refusal(f"{resume} is still open and cannot be resumed")
        if canonical_json(summary.plan) != canonical_json(plan):
            raise Refusal(f"{resume} belongs to another plan: {_difference(summary.plan, plan)}")
        resume = summary.resumes


def _difference(old: Mapping[str, JSON], new: Mapping[str, JSON]) -> str:
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    return ", ".join(f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in keys)
