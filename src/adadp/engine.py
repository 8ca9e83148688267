"""The engine: one call makes a model, an optimizer and a data loader private."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from adadp.accounting.budget import Budget
from adadp.accounting.events import Event, FixedSizeGaussian, Gaussian, Neighbours, PoissonGaussian, Uncovered
from adadp.accounting.guarantee import Guarantee, make_guarantee
from adadp.accounting.ledger import Ledger, Run
from adadp.clipping import Clipping, by_name
from adadp.errors import ConfigurationError, NoGuaranteeError
from adadp.gradients import Capture
from adadp.noise import Randomness
from adadp.optimizer import PrivateOptimizer
from adadp.sampling import SAMPLINGS, PrivateLoader, Sampling, check_loader
from adadp.step import PrivateStep
from adadp.validation import IndependenceCheck, check_criterion, check_module, check_optimizer, uncompiled

#: What watches a module. The module's own hooks keep the capture alive, so that both can go together.
_PRIVATE: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Capture]] = weakref.WeakKeyDictionary()
#: Clippings, shapes and sources that serve a run already: they keep its state.
_SERVING: weakref.WeakSet[object] = weakref.WeakSet()

_STANDING = (
    "the loss is a {reduction} over examples of terms that each depend on one example, plus terms free of data",
    "row i of what the module is given is example i of the loader's batch, and weights meet data in its calls only",
    "the number of examples and all settings are public: none was chosen by looking at the private data",
    "floating-point numbers stand for real ones, but for the rounding that the clipping norms allow for: as the model "
    "computes it, an example's gradient does not depend on the others of its batch",
)


class PrivacyEngine:
    """Makes training private and says what may be said about it.

    One engine serves one dataset: whatever is made private through it is charged to one ledger, in memory or in the
    file `ledger`. `accountant` is "pld" (tight), "rdp" or "theorem1". A `budget` (epsilon, delta) ends training
    before the step that would exceed it. A `seed` makes noise and lots repeatable, and must stay secret.

        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...train as ever...
        print(engine.guarantee(delta=1e-5))
    """

    def __init__(
        self,
        *,
        accountant: str = "pld",
        secure_mode: bool = False,
        seed: int | None = None,
        ledger: Ledger | str | Path | None = None,
        dataset: str | None = None,
        budget: Budget | tuple[float, float] | None = None,
    ) -> None:
        if accountant not in ("pld", "rdp", "theorem1"):
            raise ConfigurationError(f"accountant must be 'pld', 'rdp' or 'theorem1', not {accountant!r}")
        self.accountant_name = accountant
        self.budget = Budget(*budget) if isinstance(budget, tuple) else budget
        self.seed = seed
        self._randomness = Randomness(seed, secure=secure_mode)
        self._ledger = ledger if isinstance(ledger, Ledger) else None
        self._ledger_path = None if isinstance(ledger, Ledger) else ledger
        self._dataset = dataset
        self._runs: list[Run] = []
        self._assumptions: dict[str, None] = {}
        self._reasons: dict[str, None] = {}
        self._neighbours: Neighbours | None = None
        self._target: Budget | None = None

    # ---- making things private ----------------------------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | None = None,
        clipping: str | Clipping = "flat",
        sampling: str = "poisson",
        poisson_sampling: bool | None = None,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        criterion: Callable[..., Tensor] | None = None,
        max_physical_batch_size: int | None = None,
        pad_lots: bool = False,
        through_func: Iterable[str] = (),
        func_chunk: int = 32,
        loss_scale: float = 1.0,
        steps: int | None = None,
        expose_raw: bool = False,
        step_class: Callable[..., PrivateStep] = PrivateStep,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """The same module, an optimizer and a loader that together train it privately.

        Args:
            module: trained in place; it keeps its class and its state_dict. torch.compile may come before or after.
            optimizer: any of torch.optim, over the module's trainable parameters.
            data_loader: a map-style dataset with the lot as `batch_size`; lots are drawn from it anew.
            noise_multiplier: the noise's standard deviation over the clipping bound.
            max_grad_norm: the bound, for a clipping given by name (1.0 unless given).
            clipping: "flat", "per_layer", "automatic", "ellipsoid", "local", or a clipping object.
            sampling: "poisson"; "fixed" (lots of one size, replace-one neighbours); "shuffle" (no guarantee).
            poisson_sampling: True for sampling="poisson", False for "shuffle".
            loss_reduction: "mean" or "sum": how the loss puts examples together.
            batch_first: False where sequences inside the model are [T, N, ...].
            criterion: the loss; if given, it is checked for mixing examples.
            max_physical_batch_size: a larger lot arrives in several batches; the loop need not know.
            pad_lots: give every batch the same size, filled up with examples that count for nothing (`TrainingStep`).
            through_func: names of modules whose gradients torch.func is to take ("" for all of the model).
            func_chunk: how many examples torch.func takes at a time.
            loss_scale: a constant by which the loop multiplies the loss before backward (float16).
            steps: how many steps are planned, if known: a budget's message then says how many were left out.
            expose_raw: show counts that are not noised (`optimizer.raw_nonfinite`); the guarantee is then none.
            step_class: makes the step, for algorithms that release more on a lot than its gradient (`algorithms.agd`).

        """
        called, module = module, uncompiled(module)
        sigma = Gaussian(_number("noise_multiplier", noise_multiplier)).noise_multiplier
        chosen = self._clipping(clipping, max_grad_norm)
        drawn = self._sampling(data_loader, sampling, poisson_sampling)
        self._check(module, optimizer, criterion, loss_reduction, loss_scale)
        chosen.check(name for name, _ in module.named_parameters())
        reasons = [*drawn.reasons, *chosen.reasons]
        if expose_raw:
            reasons.append("expose_raw shows counts over private examples without noise")
        if reasons and self.budget is not None:
            raise NoGuaranteeError("a budget cannot be kept where the guarantee is none: " + "; ".join(reasons))
        event = drawn.event(sigma)
        if reasons:
            covered = event if isinstance(event, PoissonGaussian | FixedSizeGaussian) else None
            event = Uncovered("; ".join(reasons), covered)
        loader = PrivateLoader(data_loader, drawn, self._randomness, max_physical_batch_size, pad_lots)
        capture = Capture(module, batch_first=batch_first, through_func=through_func, chunk=func_chunk)
        try:
            run = self._start(drawn, sigma, chosen, steps)
        except BaseException:
            capture.detach()  # what is not made private is left as it was
            raise
        capture.on_first_call = IndependenceCheck(capture, batch_first)
        for notice in capture.notices:
            warnings.warn(notice, stacklevel=2)
        step = step_class(
            capture,
            chosen,
            noise_multiplier=sigma,
            expected_lot=drawn.lot,
            event=event,
            charge=run.charge,
            randomness=self._randomness,
            mean_loss=loss_reduction == "mean",
            loss_scale=loss_scale,
            count_nonfinite=expose_raw,
        )
        loader.on_microbatch = lambda microbatch: capture.work_on(microbatch, microbatch.count)
        _PRIVATE[module] = weakref.ref(capture)
        _SERVING.update(chosen.objects())
        self._note(chosen, loss_reduction)
        return called, PrivateOptimizer(optimizer, step, loader, module, expose_raw), loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int | None = None,
        steps: int | None = None,
        max_grad_norm: float | None = None,
        clipping: str | Clipping = "flat",
        sampling: str = "poisson",
        poisson_sampling: bool | None = None,
        **settings: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """As `make_private`, with the least noise for which `epochs` (or `steps`) cost at most the target.

        What the ledger holds already is part of the target. The target becomes the engine's budget, unless it was
        given one: training ends before it is exceeded.
        """
        if (epochs is None) == (steps is None):
            raise ConfigurationError("give either epochs= or steps=, and not both")
        chosen = self._clipping(clipping, max_grad_norm)
        drawn = self._sampling(data_loader, sampling, poisson_sampling)
        planned = steps if steps is not None else (epochs or 0) * len(drawn)
        if planned < 1:
            raise ConfigurationError(f"epochs or steps must be at least 1, not {epochs if steps is None else steps}")
        reasons = (*drawn.reasons, *chosen.reasons)
        if reasons:
            raise NoGuaranteeError("no noise reaches an epsilon where the guarantee is none: " + "; ".join(reasons))
        from adadp.accounting.calibration import calibrate_noise  # the accounting stack is needed only here

        spent = self._open().composition()

        def composition(noise_multiplier: float) -> list[tuple[Event, int]]:
            return [*spent, (drawn.event(noise_multiplier), planned)]

        found = calibrate_noise(
            composition,
            target_epsilon,
            target_delta,
            accountant=self._accountant_for(drawn),
            neighbours=drawn.neighbours,
        )
        before = self.budget
        if before is None or before is self._target:  # a budget of the user's own stays
            self.budget = self._target = Budget(target_epsilon, target_delta)
        try:
            return self.make_private(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                noise_multiplier=found.noise_multiplier,
                clipping=chosen,
                sampling=drawn.name,
                steps=planned,
                **settings,
            )
        except BaseException:
            self.budget = before
            raise

    def detach(self, module: nn.Module) -> None:
        """Take the engine's hooks off a module: it is an ordinary one again."""
        capture = _capture_of(module)
        if capture is not None:
            capture.detach()
            _PRIVATE.pop(capture.module, None)

    def close(self) -> None:
        """End this engine's runs in the ledger. What was reserved and not used is given back."""
        for run in self._runs:
            run.close()

    def __enter__(self) -> PrivacyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what may be said -----------------------------------------------------------------------------------------

    def guarantee(self, delta: float) -> Guarantee:
        """What may be said about everything that this engine's ledger holds, at `delta`."""
        ledger = self._open()
        neighbours = self._neighbours or ledger.neighbours or Neighbours.ADD_REMOVE
        return make_guarantee(
            ledger.composition(),
            delta,
            accountant=self.accountant_name if neighbours == Neighbours.ADD_REMOVE else "rdp",
            neighbours=neighbours,
            assumptions=tuple(self._assumptions),
            reasons=tuple(self._reasons),
        )

    @property
    def accountant(self) -> PrivacyEngine:
        """The engine itself, so that `engine.accountant.get_epsilon(delta)` is `engine.get_epsilon(delta)`."""
        return self

    def get_epsilon(self, delta: float) -> float:
        """The epsilon at `delta`. Raises NoGuaranteeError with the reasons where there is none."""
        return self.guarantee(delta).require()

    # ---- in parts ---------------------------------------------------------------------------------------------------

    def _clipping(self, clipping: str | Clipping, max_grad_norm: float | None) -> Clipping:
        if isinstance(clipping, str):
            return by_name(clipping, 1.0 if max_grad_norm is None else max_grad_norm)
        if not isinstance(clipping, Clipping):
            raise ConfigurationError(f"clipping must be a name or a Clipping, not {type(clipping).__name__}")
        if max_grad_norm is not None:
            raise ConfigurationError("max_grad_norm goes with a clipping's name: a clipping object has its own bound")
        if any(part in _SERVING for part in clipping.objects()):
            raise ConfigurationError(
                "this clipping (or its shape or source) serves another run, whose state it keeps: make a new one"
            )
        return clipping

    def _sampling(self, loader: DataLoader[Any], sampling: str, poisson_sampling: bool | None) -> Sampling:
        if poisson_sampling is not None:
            sampling = "poisson" if poisson_sampling else "shuffle"
        if sampling not in SAMPLINGS:
            raise ConfigurationError(f"sampling must be one of {', '.join(SAMPLINGS)}, not {sampling!r}")
        return SAMPLINGS[sampling](*check_loader(loader))

    def _check(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Tensor] | None,
        loss_reduction: str,
        loss_scale: float,
    ) -> None:
        if is_private(module):
            raise ConfigurationError("this module is private already; engine.detach(module) makes it an ordinary one")
        check_module(module)
        check_optimizer(module, optimizer)
        if loss_reduction not in ("mean", "sum"):
            raise ConfigurationError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
        if not 0 < loss_scale < float("inf"):
            raise ConfigurationError(f"loss_scale must be a finite number above 0, not {loss_scale!r}")
        if criterion is not None:
            check_criterion(criterion, loss_reduction)

    def _accountant_for(self, sampling: Sampling) -> str:
        return "rdp" if sampling.neighbours == Neighbours.REPLACE_ONE else self.accountant_name

    def _open(self) -> Ledger:
        if self._ledger is None:
            # Its relation is what the file says, or what the first run's plan says.
            self._ledger = Ledger(self._ledger_path, dataset=self._dataset, neighbours=None)
        return self._ledger

    def _start(self, sampling: Sampling, noise_multiplier: float, clipping: Clipping, steps: int | None) -> Run:
        if self._neighbours not in (None, sampling.neighbours):
            raise ConfigurationError(
                f"{sampling.name} sampling compares {sampling.neighbours} datasets, but this engine's ledger holds "
                f"{self._neighbours} releases: one ledger has one relation. Use another engine."
            )
        plan = {
            "neighbours": str(sampling.neighbours),
            "examples": sampling.examples,
            "lot": sampling.lot,
            "sampling": sampling.name,
            "noise_multiplier": noise_multiplier,
            "clipping": type(clipping).__name__,
            "steps": steps,
        }
        seed = self.seed if not self._runs else None  # one seed, one stream of numbers, however many models
        run = self._open().start(plan, seed=seed, budget=self.budget, accountant=self._accountant_for(sampling))
        self._runs.append(run)
        self._neighbours = sampling.neighbours
        return run

    def _note(self, clipping: Clipping, loss_reduction: str) -> None:
        for text in (*_STANDING, *clipping.assumptions, self._randomness.assumption):
            self._assumptions[text.format(reduction=loss_reduction)] = None


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} must be a number, not {value!r}") from None


def _capture_of(module: nn.Module) -> Capture | None:
    reference = _PRIVATE.get(getattr(module, "_orig_mod", module))
    return None if reference is None else reference()


def is_private(module: nn.Module) -> bool:
    """Whether an engine watches this module."""
    return _capture_of(module) is not None


__all__ = ["PrivacyEngine", "is_private"]
