"""Which shape, from which source, with which exponents: the measurement behind AdaDP's default.

    python -m adadp_lab.experiments.shapes --data DIR --out results/shapes [--device cuda] [--workers 12] [--quick]

Every method gets the same learning rates to choose from, on 10,000 examples set aside from the training set (the
rest is trained on); the best then trains on the whole training set with `--seeds` seeds, and that is what the table
shows: test accuracy, mean and standard error. Nobody pays for the choice of the learning rate, so an epsilon here is
that of one run. `--show` prints the tables again from the JSON files in `--out`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adadp import (
    Clipping,
    Diagonal,
    Ellipsoid,
    Flat,
    Kronecker,
    Paid,
    PrivacyEngine,
    Probe,
    Public,
    Released,
    TrainingStep,
)
from adadp.accounting.calibration import calibrate_noise
from adadp.accounting.events import Event, Gaussian, PoissonGaussian
from adadp.data import load
from adadp.models import build
from adadp.preprocessing import DPPCA
from adadp.shapes.probes import Blobs, PinkNoise
from adadp.training.lot_loop import each_lot

DELTA = 1e-5
RATES = {"tanh-cnn": (0.5, 1.0, 2.0, 4.0, 8.0), "paper": (0.125, 0.25, 0.5, 1.0, 2.0)}
HELD_OUT = 10_000


@dataclass(frozen=True)
class ShapeTask:
    """What is trained. `bound` is the clipping bound C, the same for every method."""

    dataset: str
    model: str
    epsilon: float
    lot: int
    steps: int
    bound: float
    pca_noise: float | None = None


@dataclass(frozen=True)
class ShapeSetting:
    """One run."""

    task: ShapeTask
    method: str
    rate: float
    seed: int
    tuning: bool


#: Gradients taken where the momentum is about to carry the weights (Nesterov).
EXTRAPOLATED = "Kronecker (1/4, 0), probes, extrapolated"

Maker = Callable[[int, torch.Generator], Tensor]


def methods(bound: float, pink: Maker, blobs: Maker, public: list[Tensor]) -> dict[str, Callable[[], Clipping]]:
    """Every method by name. The two exponents are those before and after the noise."""

    def kronecker(before: float, after: float, source: Any, **options: Any) -> Clipping:
        return Ellipsoid(bound, shape=Kronecker(before, after, **options), source=source)

    return {
        "flat (DPSGD)": lambda: Flat(bound),
        "Kronecker (1/4, 0), probes": lambda: kronecker(0.25, 0.0, Probe(pink)),
        "Kronecker (1/4, 1/4), probes": lambda: kronecker(0.25, 0.25, Probe(pink)),
        "Kronecker (1/8, 1/8), probes": lambda: kronecker(0.125, 0.125, Probe(pink)),
        "Kronecker (1/2, 0), probes": lambda: kronecker(0.5, 0.0, Probe(pink)),
        "AdaN: Kronecker (1/4, -1/4), probes": lambda: kronecker(0.25, -0.25, Probe(pink)),
        "AdaL: Kronecker (0, 1/4), probes": lambda: kronecker(0.0, 0.25, Probe(pink)),
        "Kronecker (1/4, 0), blob probes": lambda: kronecker(0.25, 0.0, Probe(blobs)),
        "Kronecker (1/4, 0), full rank": lambda: kronecker(0.25, 0.0, Probe(pink), rank=None),
        "Kronecker (1/4, 0), damping 0.01": lambda: kronecker(0.25, 0.0, Probe(pink), damping=0.01),
        "Kronecker (1/4, 0), damping 1": lambda: kronecker(0.25, 0.0, Probe(pink), damping=1.0),
        "Kronecker (1/4, 0), refresh 10": lambda: kronecker(0.25, 0.0, Probe(pink, every=10)),
        "Kronecker (1/4, 0), refresh 400": lambda: kronecker(0.25, 0.0, Probe(pink, every=400)),
        "Kronecker (1/4, 0), 256 probes": lambda: kronecker(0.25, 0.0, Probe(pink, count=256)),
        "Kronecker (1/4, 0), 128 probes every 25, averaged": lambda: kronecker(
            0.25, 0.0, Probe(pink, count=128, every=25, decay=0.5)
        ),
        EXTRAPOLATED: lambda: kronecker(0.25, 0.0, Probe(pink)),
        "rows and columns (1/4, 0), probes": lambda: kronecker(0.25, 0.0, Probe(pink), rank=0),
        "Kronecker (1/4, 0), released": lambda: kronecker(0.25, 0.0, Released(every=10)),
        "rows and columns (1/4, 0), paid": lambda: kronecker(0.25, 0.0, Paid(share=0.1, every=10), rank=0),
        "Kronecker (1/4, 0), public": lambda: kronecker(0.25, 0.0, Public(public)),
        "diagonal (1/2, 0), probes": lambda: Ellipsoid(bound, shape=Diagonal(0.5, 0.0), source=Probe(pink)),
        "diagonal (1/2, 0), released": lambda: Ellipsoid(bound, shape=Diagonal(0.5, 0.0), source=Released(every=10)),
    }


MAIN = ("flat (DPSGD)", "Kronecker (1/4, 0), probes", "Kronecker (1/4, 1/4), probes")


def tasks(quick: bool) -> list[ShapeTask]:
    cnn = [
        ShapeTask(dataset, "tanh-cnn", epsilon, 2048, 1200, 0.1)
        for dataset in ("mnist", "fashion-mnist")
        for epsilon in (0.5, 1.0, 3.0)
    ]
    paper = [
        ShapeTask(dataset, "paper", epsilon, 600, 1600, 0.5, pca_noise)
        for dataset in ("mnist", "fashion-mnist")
        for epsilon, pca_noise in ((0.5, 16.0), (1.0, 8.0), (3.0, 4.0))
    ]
    return [replace(cnn[1], steps=20), replace(paper[1], steps=20)] if quick else cnn + paper


def noise_for(task: ShapeTask, examples: int) -> float:
    """The noise multiplier for which the whole run, DP-PCA included, has the task's epsilon."""
    fixed: list[tuple[Event, int]] = [] if task.pca_noise is None else [(Gaussian(task.pca_noise), 1)]
    rate = task.lot / examples
    return calibrate_noise(
        lambda sigma: [*fixed, (PoissonGaussian(sigma, rate), task.steps)], task.epsilon, DELTA
    ).noise_multiplier


class ShapeWorkbench:
    """A worker's data on its device, loaded once."""

    def __init__(self, data: Path, device: str) -> None:
        self.data, self.device = data, device
        self._cache: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._bases: dict[Any, Tensor] = {}

    def dataset(self, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if name not in self._cache:
            train, test = (load(name, split, data_dir=self.data) for split in ("train", "test"))
            parts = (train.inputs(), train.labels, test.inputs(), test.labels)
            self._cache[name] = tuple(part.to(self.device) for part in parts)  # type: ignore[assignment]
        return self._cache[name]

    def _basis(self, task: ShapeTask, setting: ShapeSetting, images: Tensor) -> Tensor:
        key = (task.dataset, task.pca_noise, setting.seed, setting.tuning)
        if key not in self._bases:
            assert task.pca_noise is not None
            pca = DPPCA(60, task.pca_noise, random_state=setting.seed).fit(images.flatten(1).cpu().numpy())
            self._bases[key] = torch.as_tensor(pca.components_, dtype=torch.float32)
        return self._bases[key]

    def run(self, setting: ShapeSetting, noise_multiplier: float) -> dict[str, Any]:
        task = setting.task
        images, labels, test_images, test_labels = self.dataset(task.dataset)
        other = self.dataset("fashion-mnist" if task.dataset == "mnist" else "mnist")[0][:512]
        if setting.tuning:
            test_images, test_labels = images[-HELD_OUT:], labels[-HELD_OUT:]
            images, labels = images[:-HELD_OUT], labels[:-HELD_OUT]
        prepare: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
        torch.manual_seed(1000 + setting.seed)
        if task.pca_noise is not None:
            basis = self._basis(task, setting, images)
            prepare = lambda x: x.flatten(1) @ basis.to(x.device).T  # noqa: E731
        images, test_images = prepare(images), prepare(test_images)
        model = build(task.model, tuple(images.shape[1:]), 10).to(self.device)
        shape = (1, 28, 28)
        chosen = methods(
            task.bound,
            lambda count, generator: prepare(PinkNoise(shape)(count, generator)),
            lambda count, generator: prepare(Blobs(shape)(count, generator)),
            list(prepare(other).split(256)),
        )[setting.method]()
        ahead = setting.method == EXTRAPOLATED
        optimizer = torch.optim.SGD(model.parameters(), lr=setting.rate, momentum=0.9, nesterov=ahead)
        engine = PrivacyEngine(seed=setting.seed)
        model, private, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(images, labels), batch_size=task.lot),
            noise_multiplier=noise_multiplier,
            clipping=chosen,
            pad_lots=self.device == "cuda",
        )
        work = TrainingStep(private, lambda batch, targets: nn.functional.cross_entropy(model(batch), targets))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps)
        average = [parameter.detach().clone() for parameter in model.parameters()]
        started = time.perf_counter()
        for _ in each_lot(loader, work, task.steps):
            schedule.step()
            torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.02)
        final = _accuracy(model, test_images, test_labels)
        seconds = time.perf_counter() - started
        for parameter, value in zip(model.parameters(), average, strict=True):
            parameter.data.copy_(value)
        averaged = _accuracy(model, test_images, test_labels)
        return {
            **asdict(task),
            "method": setting.method,
            "rate": setting.rate,
            "seed": setting.seed,
            "tuning": setting.tuning,
            "noise_multiplier": noise_multiplier,
            "delta": DELTA,
            "accuracy": round(final, 5),
            "accuracy_averaged": round(averaged, 5),
            "seconds": round(seconds, 2),
        }


@torch.no_grad()
def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(2000), labels.split(2000), strict=True)
    )
    return right / len(labels)


_bench: ShapeWorkbench | None = None


def _begin(data: Path, device: str) -> None:
    global _bench
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _bench = ShapeWorkbench(data, device)


def _work(job: tuple[ShapeSetting, float]) -> dict[str, Any]:
    assert _bench is not None
    try:
        return _bench.run(*job)
    except Exception as error:  # one method that fails must not take the others along
        return {"failed": f"{type(error).__name__}: {error}", **asdict(job[0])}
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # many workers share one GPU


def best_rates(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """The learning rate with the best accuracy on the examples that were set aside, by task and method."""
    best: dict[tuple[Any, ...], tuple[float, float]] = {}
    for row in rows:
        key = _key(row)
        if row["tuning"] and math.isfinite(row["accuracy"]):
            best[key] = max(best.get(key, (-1.0, 0.0)), (row["accuracy"], row["rate"]))
    return {key: rate for key, (_, rate) in best.items()}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["dataset"], row["model"], row["epsilon"], row["method"]


def _settings_key(setting: ShapeSetting) -> tuple[Any, ...]:
    return (*_key({**asdict(setting.task), **asdict(setting)}), setting.rate, setting.seed, setting.tuning)


def table(rows: list[dict[str, Any]]) -> str:
    """Test accuracy by method and task, in percent: mean and standard error over seeds, then the learning rate."""
    final: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if not row["tuning"]:
            final.setdefault(_key(row), []).append(row)
    lines = []
    for (dataset, model), group in itertools.groupby(sorted(final), key=lambda key: key[:2]):
        keys = list(group)
        epsilons = sorted({key[2] for key in keys})
        lines += [
            "",
            f"### {dataset}, {model}",
            "",
            "| method | " + " | ".join(f"epsilon {e:g}" for e in epsilons) + " |",
        ]
        lines.append("| --- |" + " --- |" * len(epsilons))
        for method in dict.fromkeys(key[3] for key in keys):
            cells = []
            for epsilon in epsilons:
                found = final.get((dataset, model, epsilon, method))
                cells.append("" if found is None else _cell(found))
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def tuning_table(rows: list[dict[str, Any]]) -> str:
    """Accuracy on the examples set aside, one seed, at each method's best learning rate."""
    best: dict[str, dict[tuple[str, float], tuple[float, float]]] = {}
    for row in rows:
        if row["tuning"]:
            found = best.setdefault(row["method"], {})
            key = (row["dataset"], row["epsilon"])
            found[key] = max(found.get(key, (-1.0, 0.0)), (100 * row["accuracy"], row["rate"]))
    columns = sorted({key for found in best.values() for key in found})
    lines = [
        "| method (set-aside examples, one seed) | " + " | ".join(f"{d}, epsilon {e:g}" for d, e in columns) + " |"
    ]
    lines.append("| --- |" + " --- |" * len(columns))
    for method, found in sorted(best.items(), key=lambda item: [-value[0] for value in item[1].values()]):
        cells = [f"{found[key][0]:.2f} (rate {found[key][1]:g})" if key in found else "" for key in columns]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def averaging(rows: list[dict[str, Any]], method: str = MAIN[1]) -> str:
    """What an average over the last weights gains over the last weights themselves."""
    gains = [100 * (r["accuracy_averaged"] - r["accuracy"]) for r in rows if r["method"] == method and not r["tuning"]]
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    return (
        f"Averaging the weights over the last steps, {method}: {statistics.mean(gains):+.3f} ± {error:.3f} points over "
        f"{len(gains)} runs.\n"
    )


def _cell(rows: list[dict[str, Any]]) -> str:
    values = [100 * row["accuracy"] for row in rows]
    if len(values) == 1:
        return f"{values[0]:.2f} (one seed, rate {rows[0]['rate']:g})"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {error:.2f} ({len(values)} seeds, rate {rows[0]['rate']:g})"


def show(out: Path) -> None:
    """The tables of results made before."""
    main_rows, others = (json.loads((out / f"{part}.json").read_text())["rows"] for part in ("main", "ablations"))
    text = (
        table(main_rows)
        + "\n"
        + averaging(main_rows)
        + "\n## Other shapes, sources, exponents, damping and refreshes, epsilon 1\n"
        + table(others)
        + "\n"
        + tuning_table([row for row in main_rows if row["model"] == "tanh-cnn" and row["epsilon"] == 1.0] + others)
    )
    (out / "tables.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=("main", "ablations"), default="main")
    parser.add_argument("--resume", type=Path, help="runs made before: those are not made again")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further run after this long")
    parser.add_argument("--show", action="store_true", help="only print the tables of what is in --out")
    options = parser.parse_args()
    if options.show:
        return show(options.out)
    started = time.time()
    chosen = tasks(options.quick)
    every = list(methods(1.0, PinkNoise((1, 28, 28)), Blobs((1, 28, 28)), []))
    noise = {(task, count): noise_for(task, count) for task in chosen for count in (60_000 - HELD_OUT, 60_000)}
    if options.part == "main":
        pairs = [(task, method) for task in chosen for method in MAIN]
    else:  # at epsilon 1, on the convolutional net
        single = [task for task in chosen if task.epsilon == 1.0 and task.model == "tanh-cnn"]
        pairs = [(task, method) for task in single for method in every if method not in MAIN]
    tuning = [
        ShapeSetting(task, method, rate, 0, True)
        for task, method in pairs
        for rate in (RATES[task.model][:1] if options.quick else RATES[task.model])
        if options.part == "main" or rate <= 4
    ]
    wanted = {(*_key({**asdict(task), "method": method}), rate) for task, method in pairs for rate in RATES[task.model]}
    rows: list[dict[str, Any]] = []
    if options.resume:
        before = json.loads(options.resume.read_text())["rows"]
        rows = [row for row in before if (*_key(row), row["rate"]) in wanted]
        print(f"{len(rows)} runs from {options.resume.name}")
    options.out.mkdir(parents=True, exist_ok=True)
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(options.workers, _begin, (options.data, options.device)) as pool:

        def run(settings: list[ShapeSetting]) -> None:
            done_before = {(*_key(row), row["rate"], row["seed"], row["tuning"]) for row in rows}
            settings = [s for s in settings if _settings_key(s) not in done_before]
            jobs = [(s, noise[s.task, 60_000 - HELD_OUT if s.tuning else 60_000]) for s in settings]
            for done, row in enumerate(pool.imap_unordered(_work, jobs), 1):
                if "failed" in row:
                    print("failed:", row["method"], row["failed"][:300])
                    continue
                rows.append(row)
                if done % 20 == 0:
                    print(f"{done}/{len(jobs)} after {time.time() - started:.0f} s", flush=True)
                if time.time() - started > 60 * options.minutes:
                    print("out of time")
                    pool.terminate()
                    return

        run(tuning)
        best = best_rates(rows)
        keys = {(task.dataset, task.model, task.epsilon, method): (task, method) for task, method in pairs}
        final = [
            ShapeSetting(*keys[key], rate, seed, False) for seed in range(options.seeds) for key, rate in best.items()
        ]
        if time.time() - started < 60 * options.minutes:
            run(final)
    rows.sort(key=lambda row: (*_key(row), row["tuning"], row["rate"], row["seed"]))
    versions = {"torch": torch.__version__, "device": options.device}
    if options.device == "cuda":
        versions["gpu"] = torch.cuda.get_device_name()
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    text = f'{{"versions": {json.dumps(versions)},\n "rows": [\n  {lines}\n]}}\n'
    (options.out / f"{options.part}.json").write_text(text)
    print(table(rows))
    if options.part == "ablations":
        print(tuning_table(rows))
    print(f"{len(rows)} runs, {sum(row['seconds'] for row in rows):.0f} s of training in {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
