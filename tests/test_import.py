"""What importing costs: a command that needs no torch loads none, training loads no accounting stack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import adadp


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sorted(name.partition('.')[0] for name in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_loads_no_torch() -> None:
    assert "torch" not in loaded_after("import adadp, adadp.cli")


def test_ledger_and_guarantee_load_neither_torch_nor_the_accounting_stack() -> None:
    loaded = loaded_after("import adadp.accounting.ledger, adadp.accounting.guarantee, adadp.accounting.events")
    assert not loaded & {"torch", "dp_accounting", "scipy"}


def test_sampling_schemes_load_no_torch() -> None:
    assert "torch" not in loaded_after("import adadp.sampling.schemes, adadp.cli.pipeline")


def test_the_engine_loads_no_accounting_stack() -> None:
    loaded = loaded_after("from adadp import PrivacyEngine")
    assert "torch" in loaded
    assert "dp_accounting" not in loaded


def test_the_plugin_for_pytest_loads_no_torch() -> None:
    loaded = loaded_after("import adadp.testing.plugin")
    assert not loaded & {"torch", "numpy", "scipy"}


BLOCK = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
blocked = set(sys.argv[1].split(","))
for finder in (BuiltinImporter, FrozenImporter, PathFinder):
    def find(name, path=None, target=None, real=finder.find_spec):
        return None if name.partition(".")[0] in blocked else real(name, path, target)
    finder.find_spec = staticmethod(find)
"""
TRAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import adadp
import adadp.training
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
data = TensorDataset(torch.randn(32, 3), torch.randint(2, (32,)))
engine = adadp.PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0)
for _, (inputs, targets) in zip(range(3), loader):
    optimizer.zero_grad()
    optimizer.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
    optimizer.step()
print(engine.guarantee(1e-5))
"""
OPTIONAL = "matplotlib,numba,PIL,pyarrow,rich,sklearn,triton,typer"


def without(modules: str, statement: str) -> subprocess.CompletedProcess[str]:
    """Run `statement` in a process in which these modules are not installed."""
    return subprocess.run([sys.executable, "-c", BLOCK + statement, modules], capture_output=True, text=True)


def test_training_needs_no_optional_package() -> None:
    done = without(OPTIONAL, TRAIN)
    assert done.returncode == 0, done.stderr
    assert "-differential privacy for one example" in done.stdout
    assert done.stderr.count("pip install 'adadp[fast]'") == 1  # a CPU without numba is right, and slower


def test_training_works_without_posix_locks_and_a_ledger_file_is_refused() -> None:
    done = without("fcntl", TRAIN)
    assert done.returncode == 0, done.stderr
    assert "-differential privacy for one example" in done.stdout
    done = without("fcntl", "import adadp\nadadp.Ledger('never.jsonl', dataset='d').start({})")
    assert done.stderr.splitlines()[-1].startswith("adadp.errors.LedgerError: the ledger never.jsonl cannot be written")
    assert not Path("never.jsonl").exists()


@pytest.mark.parametrize(
    ("statement", "extra"),
    [
        ("from adadp.preprocessing import DPPCA", "preprocessing"),
        ("import adadp.audit", "preprocessing"),
        ("from adadp.data import load\nload('digits')", "demo"),
        ("from adadp.audit.report import draw\ndraw(None)", "plots"),
        ("from adadp.__main__ import main\nmain()", "cli"),
    ],
)
def test_what_needs_an_optional_package_names_the_extra(statement: str, extra: str) -> None:
    blocked = OPTIONAL if extra != "plots" else "matplotlib"
    done = without(blocked, statement)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith(f"which is not installed: pip install 'adadp[{extra}]'")


def test_importing_adadp_loads_no_accounting_stack_and_no_optional_package() -> None:
    loaded = loaded_after("import adadp, adadp.engine, adadp.training")
    assert not loaded & {"dp_accounting", "typer", "rich", "matplotlib", "sklearn", "numba"}


def test_every_exported_name_is_there() -> None:
    for name in adadp.__all__:
        assert getattr(adadp, name).__name__ == name
