"""`adadp train` that is killed, stopped, or finds its folder damaged goes on; the ledger holds what was released."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from adadp import training
from adadp.accounting.ledger import Ledger
from adadp.accounting.unused import boot_id
from adadp.checkpoint import before, read
from adadp.cli import app
from adadp.errors import ConfigurationError, InterruptedRunError, NotFiniteError
from adadp.training import checkpoints, loop, run_folder
from adadp.training.settings import Settings

STEPS = 30
QUICK: dict[str, Any] = {
    "dataset": "digits", "model": "linear", "steps": STEPS, "lot": 100, "evaluations": 2, "noise_multiplier": 3.0,
    "checkpoint_every": 0.001,
}  # fmt: skip

# A process that has adadp loaded, and forks one that runs the command for each line that it gets. Each release is
# written down beside the command's own work: eight bytes that say which one it was.
SERVER = """
import hashlib, json, os, sys
sys.path[:0] = sys.argv[1:]
import torch
torch.set_num_threads(1)
import adadp.training.loop, adadp.algorithms, adadp.cli.train, sklearn.datasets
from adadp.cli import app
from adadp.mechanism import step
real = step.add_noise
for line in sys.stdin:
    folder, released, arguments = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        log = os.open(released, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        def watched(*given):
            noisy = real(*given)
            numbers = b"".join(value.numpy().tobytes() for value in noisy.values())
            os.write(log, hashlib.sha256(numbers).digest()[:8])
            return noisy
        step.add_noise = watched
        for stream in (1, 2):
            os.dup2(os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        try:
            app(arguments)
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Server:
    """Runs commands in processes of their own, which may be killed."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", SERVER, *sys.path]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(
        self,
        folder: Path,
        *arguments: str,
        kill_after: float | None = None,
        after: Path | None = None,
        number: int = signal.SIGKILL,
    ) -> int:
        """The exit status. With `kill_after` a signal is sent, so many seconds after the file `after` is there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps([str(folder), str(folder / "released"), list(arguments)])
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        child = int(self._process.stdout.readline())
        if kill_after is not None:
            while after is not None and not after.exists():
                time.sleep(0.01)
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


#: Where processes are killed.
FEW = 12
KILLED = ["--model", "linear", "--steps", str(FEW), "--lot", "60", "--evaluations", "1", "--checkpoint-every", "0.02"]
OPTIONS = [
    "--model", "linear", "--steps", str(STEPS), "--lot", "100", "--evaluations", "2", "--checkpoint-every", "0.02",
]  # fmt: skip


def releases(folder: Path) -> list[bytes]:
    data = (folder / "released").read_bytes() if (folder / "released").exists() else b""
    return [data[place : place + 8] for place in range(0, len(data), 8)]


def charged(folder: Path) -> int:
    ledger = folder / "run" / "ledger.jsonl"
    return sum(count for _, count in Ledger(ledger).charged()) if ledger.exists() else 0


def kill_and_resume(server: Server, tmp_path: Path, times: int, seed: int) -> None:
    """Each run is killed at a random moment, resumed, killed again or not, and resumed to its end."""
    chance = random.Random(seed)
    whole = tmp_path / "whole"
    whole.mkdir()
    start = time.monotonic()
    with_seed = ["--noise-multiplier", "3", "--seed", "11"]
    assert server.run(whole, "train", *KILLED, *with_seed, "--out", "run") == 0, (whole / "output").read_text()
    whole_time = time.monotonic() - start
    assert len(releases(whole)) == FEW
    expected = load_file(whole / "run" / "model.safetensors")
    for round_ in range(times):
        folder = tmp_path / f"round-{round_}"
        folder.mkdir()
        seeded = round_ % 2 == 0
        options = with_seed if seeded else ["--noise-multiplier", "3"]
        again = ["--seed", "11"] if seeded else []
        code = server.run(
            folder, "train", *KILLED, *options, "--out", "run", kill_after=chance.uniform(0.05, whole_time)
        )
        for _ in range(20):
            made = releases(folder)
            assert charged(folder) >= (len(set(made)) if seeded else len(made))
            if code == 0:
                break
            if not (folder / "run" / "run.json").exists():  # killed before it had begun
                assert not made
                shutil.rmtree(folder / "run", ignore_errors=True)
                command = ["train", *KILLED, *options, "--out", "run"]
            else:
                command = ["train", "--resume", "run", *again]
            kill = chance.uniform(0.05, whole_time) if chance.random() < 0.25 else None
            code = server.run(folder, *command, kill_after=kill)
            assert code in (0, -signal.SIGKILL), (folder / "output").read_text()
            if (folder / "run" / "result.json").exists():
                break
        made = releases(folder)
        found = load_file(folder / "run" / "model.safetensors")
        if seeded:
            assert all(torch.equal(found[name], expected[name]) for name in expected), folder
            assert len(set(made)) == FEW
            assert boot_id() is None or charged(folder) == FEW
        else:
            assert len(set(made)) == len(made) >= FEW
            assert charged(folder) >= len(made)


def test_five_kills(server: Server, tmp_path: Path) -> None:
    kill_and_resume(server, tmp_path, 5, seed=1)


@pytest.mark.slow
def test_fifty_kills(server: Server, tmp_path: Path) -> None:
    kill_and_resume(server, tmp_path, 50, seed=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_between_lots_with_a_checkpoint_and_a_line(server: Server, tmp_path: Path, number: int) -> None:
    options = [*OPTIONS[:2], "--steps", "3000", *OPTIONS[4:-1], "1000", "--noise-multiplier", "30", "--out", "run"]
    started = tmp_path / "run" / "checkpoint.safetensors"
    code = server.run(tmp_path, "train", *options, kill_after=0.3, after=started, number=number)
    assert code == 130, (tmp_path / "output").read_text()
    said = (tmp_path / "output").read_text().splitlines()[-1]
    assert said.startswith("adadp: stopped after ")
    assert said.endswith("Go on with: adadp train --resume run")
    assert "charged so far, the rest of the plan included: epsilon " in said
    made = read(tmp_path / "run" / "checkpoint.safetensors").checkpoint.values["lot"]
    assert f"stopped after {made:,} of 3,000 steps" in said
    assert made == len(releases(tmp_path)) == charged(tmp_path)
    assert Ledger(tmp_path / "run" / "ledger.jsonl").runs[0].closed
    assert not (tmp_path / "run" / "result.json").exists()


# ---- in this process ------------------------------------------------------------------------------------------------


def stopping(after: int) -> Any:
    """Stops a run after so many steps."""
    asked = [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] > after

    return stop


def stopped(after: int = 12, **options: Any) -> Path:
    settings = Settings(**{**QUICK, "out": "run", **options})
    with pytest.raises(InterruptedRunError):
        loop.run(training.plan(settings), None, stopping(after))
    return Path("run")


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for value in load_file(folder / "model.safetensors").values()])


@pytest.mark.parametrize("algorithm", ["adadp", "dpsgd", "adal", "adan", "dpopt"])
def test_every_algorithm_goes_on_to_the_same_model(algorithm: str) -> None:
    whole = training.train(**QUICK, algorithm=algorithm, seed=3, out="whole", schedule="cosine")
    stopped(seed=3, algorithm=algorithm, schedule="cosine")
    resumed = training.resume("run", seed=3)
    assert torch.equal(weights(whole.folder), weights(resumed.folder))
    assert resumed.steps == STEPS
    assert resumed.guarantee.epsilon == whole.guarantee.epsilon == resumed.run_guarantee.epsilon
    steps = [json.loads(line)["step"] for line in (resumed.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [15, 30]
    assert sum(count for _, count in Ledger(resumed.ledger).charged()) == STEPS


def test_a_table_goes_on_with_its_rows_its_scales_and_its_noise(tmp_path: Path) -> None:
    generator = random.Random(1)
    lines = ["amount,kind,label", *(f"{generator.gauss(5, 2)},{generator.choice('ab')},{i % 2}" for i in range(300))]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    options = {**QUICK, "dataset": "table.csv", "lot": 30, "noise_multiplier": None, "epsilon": 2.0}
    folder = stopped(**options)
    fitted = load_file(folder / "preprocessing.safetensors")
    sigma = json.loads((folder / "run.json").read_text())["settled"]["noise_multiplier"]
    resumed = training.resume("run")
    again = load_file(folder / "preprocessing.safetensors")
    assert all(torch.equal(again[name], fitted[name]) for name in fitted)
    assert resumed.plan.noise_multiplier == sigma
    assert resumed.run_guarantee.epsilon is not None
    assert resumed.run_guarantee.epsilon <= 2.0
    ledger = Ledger(tmp_path / "table.csv.adadp-ledger.jsonl")
    assert len(ledger.runs) == 3  # the scales, the run, and its resumption
    assert len(run_folder.read("run").predict(resumed.plan.test)) == len(resumed.plan.test)


def test_another_process_in_the_folder_is_refused() -> None:
    folder = stopped()
    with (folder / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = CliRunner().invoke(app, ["train", "--resume", "run"])
    assert result.exit_code == 2
    assert result.stderr.strip() == "adadp: another process trains in run: wait for it to end"


def test_what_is_refused() -> None:
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["train", *arguments])
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
        return str(result.stderr)

    assert "has no run.json" in refused("--resume", "nowhere")
    folder = stopped(seed=3)
    assert "leave --lr out" in refused("--resume", "run", "--lr", "0.1")
    assert "leave --set out" in refused("--resume", "run", "--set", "beta=1")
    assert "seed has been used" in refused("--seed", "3", "--ledger", "run/ledger.jsonl", *OPTIONS, "--epsilon", "9")
    (folder / "run.json").write_text("{}")
    assert "run.json is damaged" in refused("--resume", "run")
    training.train(**QUICK, out="ended")
    assert "has ended" in refused("--resume", "ended")
    training.train(**{**QUICK, "checkpoint_every": 0}, out="none")
    (Path("none") / "result.json").unlink()
    assert "has no run.json" in refused("--resume", "none")
    assert not list(Path("none").glob("checkpoint*"))


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used() -> None:
    whole = training.train(**QUICK, seed=3, out="whole")
    folder = stopped(seed=3)
    path = folder / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    earlier = read(before(path)).checkpoint.values["lot"]
    assert earlier == 11
    result = CliRunner().invoke(app, ["train", "--resume", "run", "--seed", "3", "--json"])
    assert result.exit_code == 0, result.output
    warned = [line for line in result.stderr.splitlines() if line.startswith("adadp: warning: ")]
    assert len(warned) == 1
    assert "was truncated or changed" in warned[0]
    assert "checkpoint.safetensors.before is used instead" in warned[0]
    assert json.loads(result.stdout)["steps"] == STEPS
    assert torch.equal(weights(whole.folder), weights(folder))
    for file in (path, before(path)):
        file.write_bytes(b"nothing")
    (folder / "result.json").unlink()
    result = CliRunner().invoke(app, ["train", "--resume", "run", "--seed", "3"])
    assert result.exit_code == 2
    assert "There is nothing to resume from" in result.stderr


def test_weights_that_are_not_finite_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop._Execution._standing

    def spoiling(self: Any, model: torch.nn.Module) -> float:
        found = real(self, model)
        with torch.no_grad():
            next(model.parameters()).fill_(float("inf"))  # the step after an evaluation went astray
        return found

    monkeypatch.setattr(loop._Execution, "_standing", spoiling)
    with pytest.raises(NotFiniteError) as refused:
        training.train(**{**QUICK, "checkpoint_every": 1000.0, "lr": 0.5}, out="run")
    said = str(refused.value)
    assert said.startswith("step 30: after 30 lots ")
    assert "Weights of step 0: run/checkpoint.safetensors" in said
    assert "--lr well below 0.5" in said
    assert read(Path("run") / "checkpoint.safetensors").checkpoint.values["lot"] == 0
    assert Ledger("run/ledger.jsonl").runs[0].closed


def test_a_full_disk_ends_the_run_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stopped(seed=3)
    real, count = os.fsync, [0]

    def full(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".part"):
            count[0] += 1
            raise OSError(28, os.strerror(28))
        real(file)

    data = (folder / "checkpoint.safetensors").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        result = CliRunner().invoke(app, ["train", "--resume", "run", "--seed", "3", "--json"])
    assert count[0] == 1
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("adadp: the checkpoint run/checkpoint.safetensors could not be")
    assert "No space left on device; the one that is there" in result.stderr
    assert (folder / "checkpoint.safetensors").read_bytes() == data


def test_a_folder_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped()
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith("lock"):
            raise OSError(30, os.strerror(30))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(ConfigurationError, match=r"run cannot be written: Read-only file system"):
        training.resume("run")


def test_line_searches_and_plain_sgd_make_no_checkpoints() -> None:
    for algorithm in ("agd", "sgd"):
        options = {**QUICK, "algorithm": algorithm, "out": algorithm}
        if algorithm == "sgd":
            options["noise_multiplier"] = None
        with pytest.raises(InterruptedRunError, match="makes no checkpoints"):
            loop.run(training.plan(Settings(**options)), None, stopping(3))
        assert not list(Path(algorithm).glob("checkpoint*"))
        with pytest.raises(ConfigurationError, match=r"has no run\.json"):
            training.resume(algorithm)


def test_a_budget_that_is_spent_ends_a_resumed_run_as_it_ends_any(tmp_path: Path) -> None:
    """Without a seed lots that are run again are charged again: the plan's budget holds fewer of them."""
    options = {**QUICK, "noise_multiplier": None, "epsilon": 1.0}
    folder = stopped(after=12, **options)
    early = read(before(folder / "checkpoint.safetensors"))
    shutil.copy(early.path, folder / "checkpoint.safetensors")  # as if it had been killed after it
    resumed = training.resume("run")
    assert resumed.steps == STEPS - 1
    assert resumed.guarantee.epsilon is not None
    assert resumed.guarantee.epsilon <= 1.0
    assert checkpoints.CHECKPOINT == "checkpoint.safetensors"
