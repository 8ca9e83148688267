"""The engine: one call makes a model, an optimizer and a data loader private."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from adadp.accounting.accountants import covering_accountant, get_accountant
from adadp.accounting.budget import Budget
from adadp.accounting.events import Neighbours
from adadp.accounting.guarantee import Guarantee
from adadp.accounting.ledger import Ledger
from adadp.accounting.run import Run
from adadp.accounting.target_noise import noise_for_target
from adadp.checks.assumptions import REFUSED, against, standing, untried_at_start, untried_before
from adadp.checks.frozen_norms import FrozenNorms
from adadp.checks.same_dataset import look_of
from adadp.checks.setup import as_noise, check_training, refuse_ungrouped
from adadp.checks.trial import Trial
from adadp.checks.validation import uncompiled
from adadp.checks.weights import capture_of_private, inherit_spending, mark_private, trained_before, watching
from adadp.clipping import Clipping, Flat
from adadp.clipping.base import clipping_of, note_serving, settings_of
from adadp.distributed.sharded import let_go, refuse_settings
from adadp.distributed.together import Together
from adadp.distributed.wrapped import switch_off, switch_on
from adadp.errors import ConfigurationError, NoGuaranteeError
from adadp.mechanism import observation
from adadp.mechanism.checkpointing import Checkpointing
from adadp.mechanism.optimizer import Penalty, PrivateOptimizer
from adadp.mechanism.resuming import Continuation, Resumed
from adadp.mechanism.step import PrivateStep
from adadp.randomness import Randomness
from adadp.sampling.loader import PrivateLoader, check_parts, sampling_of
from adadp.sampling.lot import Lots
from adadp.sampling.schemes import Sampling
from adadp.sampling.units import Grouping, Units, grouping_of


class PrivacyEngine(Checkpointing):
    """Makes training private and says what may be said about it.

    One engine serves one dataset: whatever is made private through it is charged to one ledger, in memory or in the
    file `ledger`. `accountant` is "pld" (tight), "rdp", "theorem1" or your own (`accounting.accountant`); what it does
    not cover is accounted for by "rdp". A `budget` (epsilon, delta) ends training before the step that would
    exceed it. A `seed` makes noise and lots repeatable, and must stay secret. With `strict`
    there is no number where something could not be tried (`guarantee.untried`). With `resume` (a checkpoint) the next
    `make_private` goes on with the saved run, given its ledger (docs/checkpoints.md).

        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...train as ever...
        print(engine.guarantee(delta=1e-5))
    """

    _optimizer_class: type[PrivateOptimizer] = PrivateOptimizer  # integrations give what they return other names
    _loader_class: type[PrivateLoader] = PrivateLoader
    _noise = staticmethod(as_noise)

    def __init__(
        self,
        *,
        accountant: str = "pld",
        secure_mode: bool = False,
        seed: int | None = None,
        ledger: Ledger | str | Path | None = None,
        dataset: str | None = None,
        budget: Budget | tuple[float, float] | None = None,
        strict: bool = False,
        resume: str | Path | Mapping[str, Any] | None = None,
    ) -> None:
        self.accountant_name = get_accountant(accountant).name
        self.budget = Budget(*budget) if isinstance(budget, tuple) else budget
        self.seed, self.strict = seed, strict
        self._randomness = Randomness(seed, secure=secure_mode)
        self._ledger = ledger if isinstance(ledger, Ledger) else None
        self._ledger_path = None if isinstance(ledger, Ledger) else ledger
        self._dataset = dataset
        self._runs: list[Run] = []
        self._numbers = itertools.count()  # of runs: taken before they start, by whatever thread
        self._last: Run | None = None  # of a module that was made private
        self._abandoned: list[Counter[str]] = []  # of lots, for each run
        self._neighbours: Neighbours | None = None
        self._target: Budget | None = None
        self._together: Together | None = None
        self._private = []
        self.resumed = None if resume is None else Resumed(resume)

    def __getstate__(self) -> dict[str, Any]:
        if self._runs or self._ledger is not None:
            raise ConfigurationError(
                "an engine that keeps a record of releases is not copied or pickled: the copy would forget them, or "
                "charge them twice. Make a new engine with the same ledger file."
            )
        fresh: dict[str, Any] = {"_runs": [], "_abandoned": [], "_private": [], "_last": None}
        fresh |= {"_numbers": itertools.count(), "_randomness": copy.copy(self._randomness)}
        return {**vars(self), **fresh}

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
        normalize_clipping: bool = False,
        sampling: str = "poisson",
        poisson_sampling: bool | None = None,
        unit: Units | Iterable[Any] | None = None,
        augmentations: int = 1,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        criterion: Callable[..., Tensor] | None = None,
        max_physical_batch_size: int | None = None,
        pad_lots: bool = False,
        through_func: Iterable[str] = (),
        func_chunk: int = 32,
        loss_scale: float = 1.0,
        steps: int | None = None,
        penalty: Penalty | None = None,
        prefetch: torch.device | str | None = None,
        expose_raw: bool = False,
        public_examples: Any = None,
        step_class: Callable[..., PrivateStep] = PrivateStep,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """Make a module's training private: its loop stays as it is, with the optimizer and loader that are returned.

        Args:
            module: trained in place; it keeps its class and its state_dict. torch.compile may come before or after.
            optimizer: any of torch.optim, over the module's trainable parameters.
            data_loader: a map-style dataset with the lot as `batch_size`; lots are drawn from it anew.
            noise_multiplier: the noise's standard deviation over the clipping bound.
            max_grad_norm: the bound, for a clipping given by name (1.0 unless given).
            clipping: "flat", "per_layer", "automatic", "adaptive", "ellipsoid", "local", or a clipping object.
            normalize_clipping: divide the released gradient by the bound, after the noise: a learning rate then means
                the same for every bound. It changes nothing about privacy.
            sampling: "poisson"; "fixed" (lots of one size, replace-one neighbours); "shuffle" (no guarantee).
            poisson_sampling: True for sampling="poisson", False for "shuffle".
            unit: whose each row of the dataset is: ids, or `Units`. The guarantee is then for all rows of one person,
                and `batch_size` is the expected number of persons in a lot.
            augmentations: K calls of the dataset for each row, side by side in the batch; the mean of their K gradients
                is what is clipped.
            loss_reduction: "mean" or "sum": how a scalar loss puts examples together. `optimizer.backward(losses)`,
                with one loss for each example, needs neither.
            batch_first: False where sequences inside the model are [T, N, ...].
            criterion: the loss, an nn.Module that the loop calls; it is tried for mixing examples where it is used.
            max_physical_batch_size: a larger lot arrives in several batches; the loop need not know.
            pad_lots: give every batch the same size by rows that are not counted (`TrainingStep` needs it).
            through_func: names of modules whose gradients torch.func is to take ("" for all of the model).
            func_chunk: how many examples torch.func takes at a time.
            loss_scale: a constant by which the loop multiplies the loss before backward (float16).
            steps: how many steps are planned, if that was fixed beforehand. They are charged as planned from the first
                on, so that training may end early because of what was released.
            penalty: a scalar function of the module's weights alone (weight decay, an L1 term); its gradient is added
                after the noise, once for each lot.
            prefetch: a device to which the loader copies the next batch while the loop works on the current one.
            expose_raw: show counts that are not noised (`optimizer.raw_nonfinite`); the guarantee is then none.
            public_examples: items of public data with the dataset's structure, a list or a Dataset: what can be tried
                is tried on them, and on private examples only where they cannot be run.
            step_class: makes the step, for algorithms that release more on a lot than its gradient (`algorithms.agd`).

        Returns:
            `module` itself, the private optimizer and the private loader.

        Raises:
            ConfigurationError, UnsupportedModuleError: what was given cannot be trained privately; the message says why
                and what to do. Nothing was changed.
            NoGuaranteeError: the engine has a budget, and no proof covers these settings.
            BudgetExhaustedError: the weights bring along more spending than the ledger's budget holds.
            CheckpointError: the engine resumes a run that this ledger does not hold, or of another model or clipping.

        Guarantee:
            What the optimizer does to the weights is, for each lot, one Gaussian release on a lot drawn by `sampling`,
            charged to the ledger before it is made. `guarantee(delta)` says what all of them cost, and what that rests
            on.

        """
        called, module = module, uncompiled(module)
        together = self._join(called)
        # Everything that may be refused is refused before anything is changed.
        sigma, chosen = self._noise(noise_multiplier), clipping_of(clipping, max_grad_norm)
        grouping = grouping_of(unit, augmentations, data_loader)
        drawn = self._sampling(data_loader, sampling, poisson_sampling, grouping)
        refuse_ungrouped(grouping, max_physical_batch_size, step_class is PrivateStep, observation.under_test())
        check_training(module, optimizer, data_loader.dataset, loss_reduction, loss_scale)
        other, more = type(chosen) is not Flat, step_class is not PrivateStep
        what = f"the clipping {type(chosen).__name__} (flat is covered)"
        refuse_settings(module, {what: other, "an algorithm that releases more than a gradient": more})
        chosen.check(name for name, _ in module.named_parameters())
        if normalize_clipping:
            chosen.norm_bound()  # which may refuse
        reasons = [*drawn.reasons, *chosen.reasons, *against(expose_raw, sigma)]
        if reasons and self.budget is not None:
            raise NoGuaranteeError("a budget cannot be kept where the guarantee is none: " + "; ".join(reasons))
        drawn.warn_of_none(stacklevel=3)
        check_parts(max_physical_batch_size, prefetch)
        line = self._line(next(self._numbers), drawn.event_despite(sigma, reasons), module, chosen, together)
        randomness = together.sharing(line.randomness)
        trained = trained_before(module, optimizer)
        with watching(module, batch_first=batch_first, through_func=through_func, chunk=func_chunk) as capture:
            trial = Trial(
                capture,
                batch_first=batch_first,
                dataset=data_loader.dataset,
                collate=data_loader.collate_fn,
                loss_reduction=loss_reduction,
                steps=steps,
                largest=max_physical_batch_size,
                public_examples=public_examples,
                ordered=grouping is not None,
            )
            if criterion is not None:
                trial.of_criterion(criterion)
            largest = min(drawn.rows, max_physical_batch_size or drawn.rows)
            together.agree(module, partial(look_of, data_loader.dataset), {
                "noise_multiplier or expose_raw": (sigma, expose_raw), "steps": steps,
                "sampling or batch_size": (drawn.name, drawn.lot), "the run": line.number, "the budget": self.budget,
                "the clipping": ([type(part).__qualname__ for part in chosen.objects()], settings_of(chosen)),
                "loss_reduction or loss_scale": (loss_reduction, loss_scale), "secure_mode": self._randomness.secure,
                "max_physical_batch_size or pad_lots": (max_physical_batch_size, pad_lots), "the seed": self.seed,
                "unit or augmentations": None if grouping is None else grouping.look,
            })  # fmt: skip
            run = self._start(
                drawn,
                sigma,
                chosen,
                steps,
                [
                    *standing(
                        loss_reduction,
                        penalty=penalty is not None,
                        in_pieces=max_physical_batch_size is not None,
                        units=None if grouping is None else grouping.units,
                    ),
                    *FrozenNorms(module).assumptions(),
                    *chosen.assumptions,
                    randomness.assumption,
                    *together.assumptions,
                    *line.assumptions,
                ],
                [*trial.untried.values(), *untried_at_start(trained, largest)],
                line,
            )
            line.load(module, optimizer, chosen)
            inherit_spending(module, self._open())  # which may refuse: then nothing is left watching
            self._last = run
            step = step_class(
                capture,
                chosen,
                noise_multiplier=sigma,
                expected_lot=drawn.lot,
                event=drawn.event_despite(sigma, reasons),
                charge=run.charge,
                randomness=randomness,
                mean_loss=loss_reduction == "mean",
                loss_scale=loss_scale,
                normalize_clipping=normalize_clipping,
                count_nonfinite=expose_raw,
                agreement=together.agreement(run, module),
            )
            loader = self._loader_class(
                data_loader,
                drawn,
                randomness,
                max_physical_batch_size,
                pad_lots,
                batch_first=batch_first,
                prefetch=prefetch,
                grouping=grouping,
                lots=Lots(step.open, run.note_once_charged),
                share=together.group.share,
            )
            trial.on_refusal = lambda text: step.refused(partial(run.note_once_charged, reasons=[REFUSED.format(text)]))
            self._abandoned.append(loader.lots.abandoned)
            mark_private(module, capture, self._open())
            note_serving(chosen)
            private = self._optimizer_class(
                optimizer,
                step,
                loader,
                module,
                run=run,
                ledger=self._open(),
                trial=trial,
                penalty=penalty,
                expose_raw=expose_raw,
            )
            self._private.append(weakref.ref(line.settle(private)))
            observation.attach(private, loader)
            switch_off(called)
        return called, private, loader

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
        unit: Units | Iterable[Any] | None = None,
        **settings: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
        """As `make_private`, with the least noise for which `epochs` (or `steps`) cost at most the target.

        What the ledger already holds counts towards the target. The target becomes the engine's budget, unless it was
        given one: training ends before it is exceeded.

        Args:
            module, optimizer, data_loader, max_grad_norm, clipping, sampling, poisson_sampling, unit: as in
                `make_private`.
            target_epsilon: of everything in the ledger, together with the planned steps.
            target_delta: the delta at which the target holds.
            epochs: planned passes over the dataset, `len(loader)` lots each; or
            steps: planned lots.
            settings: the other arguments of `make_private`.

        Returns:
            As `make_private`.

        Raises:
            ConfigurationError: neither or both of `epochs` and `steps` are given, or no noise reaches the target, or
                there is no target for one run because the ledger's budget is kept by a privacy filter.
            NoGuaranteeError: no proof covers the clipping or the sampling.

        """
        if (epochs is None) == (steps is None):
            raise ConfigurationError("give either epochs= or steps=, and not both")
        self._join(module)
        chosen = clipping_of(clipping, max_grad_norm)
        units = unit if unit is None or isinstance(unit, Units) else Units(unit)
        drawn = self._sampling(data_loader, sampling, poisson_sampling, grouping_of(units, 1, data_loader))
        planned = steps if steps is not None else (epochs or 0) * len(drawn)
        if planned < 1:
            raise ConfigurationError(f"epochs or steps must be at least 1, not {epochs if steps is None else steps}")
        reasons = (*drawn.reasons, *chosen.reasons)
        if reasons:
            raise NoGuaranteeError("no noise reaches an epsilon where the guarantee is none: " + "; ".join(reasons))
        noise_multiplier = noise_for_target(
            self._open().composition(),
            drawn.event,
            planned,
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
                noise_multiplier=noise_multiplier,
                clipping=chosen,
                sampling=drawn.name,
                unit=units,
                steps=planned,
                **settings,
            )
        except BaseException:
            self.budget = before
            raise

    @property
    def run_ids(self) -> tuple[str, ...]:
        """This engine's runs in its ledger (`Ledger.charges`), each followed by those that it resumes."""
        return self._open().with_resumed(run.id for run in self._runs)

    def detach(self, module: nn.Module) -> None:
        """Remove the engine's hooks from a module, which is an ordinary one again. What was spent stays charged."""
        capture = capture_of_private(module)
        if capture is not None:
            capture.detach()
            switch_on(module)
            let_go(capture.module)

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
        """The guarantee at `delta` for all that the ledger holds, or *none* and why. A loop may ask at every step."""
        ledger = self._open()
        strict = ledger.untried if self.strict else ()
        left = sum(counter.total() for counter in self._abandoned)
        waiting = self._last.waiting if self._last is not None else ()
        return ledger.guarantee(
            delta,
            running=True,
            accountant=self.accountant_name,
            reasons=[*waiting, *(f"strict=True, and this could not be tried: {text}" for text in strict)],
            notes=[f"lots that were handed out and left: {left}"] if left else [],
        )

    @property
    def accountant(self) -> PrivacyEngine:
        """The engine itself, so that `engine.accountant.get_epsilon(delta)` is `engine.get_epsilon(delta)`."""
        return self

    def get_epsilon(self, delta: float) -> float:
        """The epsilon at `delta` (see `guarantee`). Raises NoGuaranteeError with the reasons where there is none."""
        return self.guarantee(delta).require()

    # ---- in parts ---------------------------------------------------------------------------------------------------

    def _join(self, module: nn.Module) -> Together:
        """The processes that train `module`, this one alone or several with one ledger."""
        self._together = Together.training(module, self._together, self._open)
        if self._together.books is not None:
            self._ledger = self._together.books.ledger
        return self._together

    def _sampling(
        self, loader: DataLoader[Any], name: str, poisson: bool | None, of: Grouping | None = None
    ) -> Sampling:
        return sampling_of(loader, name, poisson, of)

    def _accountant_for(self, sampling: Sampling) -> str:
        releases = [*self._open().charged(), (sampling.event(1.0), 1)]
        return covering_accountant(releases, sampling.neighbours, self.accountant_name)

    def _start(
        self,
        sampling: Sampling,
        noise_multiplier: float,
        clipping: Clipping,
        steps: int | None,
        assumptions: Sequence[str],
        untried: Sequence[str],
        line: Continuation,
    ) -> Run:
        if self._neighbours not in (None, sampling.neighbours):
            raise ConfigurationError(
                f"{sampling.name} sampling compares {sampling.neighbours} datasets, but this engine's ledger holds "
                f"{self._neighbours} releases: one ledger has one relation. Use another engine."
            )
        plan = {
            **sampling.plan(),
            "noise_multiplier": noise_multiplier,
            "clipping": type(clipping).__name__,
            "steps": steps,
        }
        seed = self.seed if not self._runs else None  # one seed, one stream of numbers, however many models
        begin = partial(
            self._open().start,
            plan,
            seed=seed,
            budget=self.budget,
            accountant=self._accountant_for(sampling),
            resume=line.resumes,
            attempt=line.attempt,
            assumptions=assumptions,
            untried=[*untried, *untried_before(earlier.waiting for earlier in self._runs)],
        )
        run = begin() if self._together is None else self._together.start(begin)
        self._runs.append(run)
        self._neighbours = sampling.neighbours
        return run


def is_private(module: nn.Module) -> bool:
    """Whether an engine watches this module."""
    return capture_of_private(module) is not None


__all__ = ["PrivacyEngine", "is_private"]
