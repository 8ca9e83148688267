"""What importing costs: a command that needs no torch loads none, training loads no accounting stack."""

from __future__ import annotations

import subprocess
import sys

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


def test_every_exported_name_is_there() -> None:
    for name in adadp.__all__:
        assert getattr(adadp, name).__name__ == name
