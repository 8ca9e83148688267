"""Runs what is missing, in worker processes that stay, and writes an item's file as soon as all its jobs are done."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from adadp.data import load
from adadp.errors import ConfigurationError, PrivacyError
from adadp_lab.paper.item import Item, Job, Options, Record
from adadp_lab.paper.paper_records import Records
from adadp_lab.paper.workbench import Workbench
from adadp_lab.pretraining import pretrain, weights_path


@dataclass
class Summary:
    """What came of each item: "finished", "already finished", "skipped: why" or "failed: why"."""

    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every item that was asked for has its results."""
        return all("finished" in outcome for outcome in self.outcomes.values())


#: Told after each job: how many are done, of how many, and its item.
Progress = Callable[[int, int, str], None]


def run(
    items: Sequence[Item],
    options: Options,
    out: Path,
    *,
    workers: int = 1,
    force: bool = False,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Run the jobs of `items` that have no record in `out` yet."""
    started, summary, records = time.perf_counter(), Summary(), Records(out)
    for item in items:
        if records.is_quick(item) not in (None, options.quick):
            raise ConfigurationError(
                f"{out} holds {'full' if options.quick else 'quick'} results of {item.name}: give --out another folder"
            )
    wanted: dict[str, list[Job]] = {}
    checked: dict[tuple[str, str], str] = {}
    for item in items:
        missing = _missing(item, data_dir, options, checked, say)
        if missing:
            summary.outcomes[item.name] = f"skipped: {missing}"
        else:
            wanted[item.name] = item.jobs(options)
    again = {job.key for jobs in wanted.values() for job in jobs} if force else set()
    for item in items if force else ():
        if item.name in wanted:
            records.forget(item, again)
    known = {key: record for key, record in records.known().items() if key not in again}
    for item in items:
        if item.name not in wanted:
            continue
        done = all(job.key in known for job in wanted[item.name])
        if done and {record["key"] for record in records.of(item)} >= {job.key for job in wanted[item.name]}:
            summary.outcomes[item.name] = "already finished"
    open_items = [item for item in items if item.name in wanted and item.name not in summary.outcomes]
    todo: dict[str, Job] = {}
    owner: dict[str, str] = {}
    for item in open_items:
        for job in wanted[item.name]:
            if job.key not in known:
                todo.setdefault(job.key, job)
                owner.setdefault(job.key, item.name)

    def close() -> None:
        """Write every item whose jobs are all done."""
        for item in open_items:
            if item.name not in summary.outcomes and all(job.key in known for job in wanted[item.name]):
                keys = dict.fromkeys(job.key for job in wanted[item.name])
                beside = [r for r in records.of(item) if r["key"] not in keys] if item.by_device else []
                records.finish(item, [*beside, *(known[key] for key in keys)], quick=options.quick)
                summary.outcomes[item.name] = "finished"

    close()
    for count, (key, record) in enumerate(_results(todo, options.device, data_dir, records.scratch, workers), 1):
        if "failed" in record:
            for item in open_items:
                if key in {job.key for job in wanted[item.name]}:
                    summary.outcomes[item.name] = f"failed: {record['failed']}"
        else:
            known[key] = {"key": key, **record}
            records.keep(key, record)
            close()
        if progress is not None:
            progress(count, len(todo), owner[key])
    summary.outcomes = {item.name: summary.outcomes[item.name] for item in items}
    summary.seconds = time.perf_counter() - started
    return summary


def _missing(
    item: Item, data_dir: Path | None, options: Options, checked: dict[tuple[str, str], str], say: Callable[[str], None]
) -> str:
    """Why an item cannot be run here; empty where it can. What it needs pre-trained is trained now."""
    needs = [("data", name) for name in item.datasets] + [("weights", net) for net in item.pretrained]
    for kind, name in needs:
        if (kind, name) not in checked:
            try:
                checked[kind, name] = ""
                if kind == "data":
                    load(name, data_dir=data_dir)
                elif not weights_path(name).exists():
                    if options.quick:
                        checked[kind, name] = f"its convolutions are not pre-trained yet: adadp pretrain {name}"
                    else:
                        say(f"pre-training the {name} net's convolutions on CIFAR-100, once (adadp pretrain {name})")
                        pretrain(name, data_dir=data_dir, device=options.device)
            except (PrivacyError, OSError) as error:
                checked[kind, name] = " ".join(str(error).split())
        if checked[kind, name]:
            return checked[kind, name]
    return ""


# ---- workers ------------------------------------------------------------------------------------------------------

_bench: Workbench | None = None


def _begin(parent: int, device: str, data_dir: Path | None, scratch: Path) -> None:
    global _bench
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _bench = Workbench(device, data_dir, scratch)


def _end_with(parent: int) -> None:
    """Nobody would keep what a worker computes after its parent was killed, be it while the worker was starting."""
    while os.getppid() == parent:
        time.sleep(2)
    os._exit(1)


def _work(job: Job) -> Record:
    assert _bench is not None
    return _done(job, _bench)


def _said(job: Job) -> Record:
    return {"work": job.work.__name__, "settings": dict(job.settings), "seed": job.seed}


def _done(job: Job, bench: Workbench) -> Record:
    started = time.perf_counter()
    try:
        found = job.work(job.settings, job.seed, bench)
    except Exception as error:  # one job that fails must not take the others along
        return {**_said(job), "failed": f"{type(error).__name__}: {error}"}
    return {**_said(job), "seconds": round(time.perf_counter() - started, 2), "device": bench.device_name, **found}


def _results(
    todo: dict[str, Job], device: str, data_dir: Path | None, scratch: Path, workers: int
) -> Iterator[tuple[str, Record]]:
    """(key, record) as jobs end: the longest begin first, those that measure time come last and by themselves."""
    order = dict(sorted(todo.items(), key=lambda pair: -pair[1].cost))
    together = {key: job for key, job in order.items() if not job.alone}
    if min(workers, len(together)) > 1:
        # A dozen processes share the machine: more threads in each would only wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        yield from _in_processes(together, (device, data_dir, scratch), workers)
        together = {}
    bench = Workbench(device, data_dir, scratch)
    for key, job in [*together.items(), *((key, job) for key, job in order.items() if job.alone)]:
        yield key, _done(job, bench)


def _in_processes(
    jobs: dict[str, Job], given: tuple[str, Path | None, Path], workers: int
) -> Iterator[tuple[str, Record]]:
    """As `_results`. When a process dies, the rest goes on in half as many; the job of a lone one that dies failed."""
    left = dict(jobs)
    while left:
        workers = min(workers, len(left))
        try:
            for key, record in _pool(left, given, workers):
                del left[key]
                yield key, record
        except BrokenProcessPool:
            if workers == 1:
                key = next(iter(left))
                yield key, {**_said(left.pop(key)), "failed": "its process died: out of memory?"}
            workers = max(1, workers // 2)


def _pool(jobs: dict[str, Job], given: tuple[str, Path | None, Path], workers: int) -> Iterator[tuple[str, Record]]:
    spawn, told = get_context("spawn"), (os.getpid(), *given)
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin, initargs=told)
    running: dict[Future[Record], str] = {pool.submit(_work, job): key for key, job in jobs.items()}
    try:
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                yield key, future.result()
    finally:
        processes = list(pool._processes.values())
        pool.shutdown(wait=not running, cancel_futures=True)
        if running:  # interrupted: what is under way is lost, and must not go on
            for process in processes:
                process.terminate()
