"""What `engine.accountant` is in loops written for Opacus: a view of the engine's ledger; and calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from adadp.accounting.composition import Canonical
from adadp.accounting.events import Event, FixedSizeGaussian, Neighbours, PoissonGaussian, Uncovered
from adadp.accounting.planned import steps_in
from adadp.errors import ConfigurationError
from adadp.integrations.opacus.notice import say

if TYPE_CHECKING:
    from adadp.integrations.opacus.engine import PrivacyEngine

SPENDING = "adadp"
_BY_OPACUS = (
    "these weights were trained by Opacus, whose record of noise and sampling rates is believed: how its loop drew "
    "lots, bounded and noised cannot be seen"
)
#: Opacus' names of accountants. Its "prv" bounds the same loss distribution as "pld" does.
NAMES = {"prv": "pld"}


def accountant_named(name: str) -> str:
    """The accountant here that stands for Opacus' `name`."""
    if name == "gdp":
        raise ConfigurationError(
            'accountant="gdp" is not here: it rests on the central limit theorem, and its epsilon can be too small. '
            'Use "pld" (tight) or "rdp"'
        )
    if name in NAMES:
        say(f'accountant="{name}" is called "{NAMES[name]}" here: upper bounds on the same privacy loss distribution')
    return NAMES.get(name, name)


class Accountant:
    """Reads an engine's ledger under the names of Opacus' accountants. Charging is the engine's own business."""

    def __init__(self, engine: PrivacyEngine) -> None:
        self._engine = engine

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sampling rate, steps) of each kind of step so far, to be read."""
        return [entry for entry in map(_entry, self._charged()) if entry is not None]

    @property
    def steps(self) -> int:
        """How many lots were charged."""
        return steps_in(dict(self._charged()))

    def __len__(self) -> int:
        return len(self.history)

    def _charged(self) -> Canonical:
        return self._engine._open().charged()

    def mechanism(self) -> str:
        """The accountant's name."""
        return self._engine.accountant_name

    def get_epsilon(self, delta: float, alphas: Any = None, **more: Any) -> float:
        """The epsilon at `delta`: an upper bound, infinite where lots were released without noise.

        Raises:
            NoGuaranteeError: there is none, for another reason.

        """
        if alphas is not None or more:
            names = ", ".join([*([] if alphas is None else ["alphas"]), *more])
            say(f"get_epsilon({names}=) is not used: the accountant chooses its orders and precision by itself")
        return self._engine.get_epsilon(delta)

    def get_privacy_spent(self, *, delta: float, alphas: Any = None) -> tuple[float, float]:
        """The epsilon, and the Renyi order that gave it (NaN for an accountant that uses none)."""
        order = self._engine.guarantee(delta).order
        return self.get_epsilon(delta, alphas), math.nan if order is None else float(order)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> NoReturn:
        """Refused: every release is charged by the engine, before it is made."""
        raise ConfigurationError(
            "accountant.step is not here: the engine charges each release before it is made. To account for releases "
            "of your own: adadp.Ledger().start(plan).charge(event), or `adadp account`"
        )

    def get_optimizer_hook_fn(self, sample_rate: float) -> NoReturn:
        """Refused, as `step`."""
        self.step(noise_multiplier=0.0, sample_rate=sample_rate)

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """`history` and `mechanism` as Opacus writes them, and what the ledger holds, which `load_state_dict` reads."""
        state = {} if destination is None else destination
        state.update(history=self.history, mechanism=self.mechanism(), **{SPENDING: self._engine._open().spending()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Charge what is in the state to this engine's ledger: what was there already stays.

        Runs that the ledger holds are not charged twice. A state that Opacus wrote is charged by its history, each time
        that it is loaded, and every guarantee says that Opacus' record is believed.

        Raises:
            ConfigurationError: the state has neither.
            LedgerError, BudgetExhaustedError: as `Ledger.inherit`.

        """
        if SPENDING in state_dict:
            self._engine._open().inherit(state_dict[SPENDING])
            return
        if "history" not in state_dict:
            raise ConfigurationError("the state of an accountant has a 'history', and this has none")
        steps = [(float(sigma), float(rate), int(count)) for sigma, rate, count in state_dict["history"]]
        plan = {"neighbours": str(Neighbours.ADD_REMOVE), "sampling": "poisson", "made by": "Opacus"}
        with self._engine._open().start(plan, untried=[_BY_OPACUS]) as run:
            for sigma, rate, count in steps:
                run.charge(
                    PoissonGaussian(sigma, rate) if sigma else Uncovered("trained by Opacus without noise"), count
                )


def _entry(pair: tuple[Event, int]) -> tuple[float, float, int] | None:
    event, count = pair
    if isinstance(event, Uncovered):
        return (0.0, math.nan, count) if event.claimed is None else _entry((event.claimed, count))
    if isinstance(event, PoissonGaussian):
        return event.noise_multiplier, event.rate, count
    if isinstance(event, FixedSizeGaussian):
        return event.noise_multiplier, event.lot / event.examples, count
    return None


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float | None = None,
    **more: Any,
) -> float:
    """The least noise multiplier for which so many Poisson lots cost at most the target.

    Args:
        target_epsilon: of all steps together.
        target_delta: at which it holds.
        sample_rate: probability with which each example is in a lot.
        epochs: passes over the data, 1 / sample_rate lots each; or
        steps: lots.
        accountant: "pld" (or "prv"), "rdp".
        epsilon_tolerance: not used: the answer is as exact as the accountant is.
        more: Opacus' `alphas` and the like, which are not used.

    Raises:
        ConfigurationError: neither or both of `epochs` and `steps` are given, or no noise reaches the target.

    """
    from adadp.accounting.calibration import calibrate_noise

    if (epochs is None) == (steps is None):
        raise ConfigurationError("give either epochs= or steps=, and not both")
    count = steps if steps is not None else math.ceil((epochs or 0) / sample_rate)
    if count < 1:
        raise ConfigurationError(f"at least one step must be planned, not {count}")

    def composition(noise_multiplier: float) -> list[tuple[Event, int]]:
        return [(PoissonGaussian(noise_multiplier, sample_rate), count)]

    name = accountant_named(accountant)
    return calibrate_noise(composition, target_epsilon, target_delta, accountant=name).noise_multiplier
