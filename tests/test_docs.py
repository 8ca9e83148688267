"""README and docs: Python blocks compile and run, and links, paths and commands lead somewhere.

The blocks of one page are run in order, in one namespace and an empty folder, after the page's `SETUP`. A block that
needs data, a GPU or code of the reader is preceded by a comment that says so, and is compiled only:

    <!-- not run: needs MNIST -->
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^(?P<before>[^\n]*)\n```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: \S.*-->$")

#: What a reader has at hand when the page begins.
SETUP = {
    "README.md": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.rand(60, 1, 28, 28), torch.arange(60) % 10), batch_size=30)
    """,
    "accounting.md": """
        from adadp import Budget, Ledger
        other = Ledger("other.ledger", dataset="mnist")
        sigma_of_this_step = 0.9
    """,
    "guide.md": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from adadp import PrivacyEngine
        engine, model = PrivacyEngine(), torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.rand(60, 4), torch.arange(60) % 2), batch_size=30)
        public_dataset = TensorDataset(torch.rand(20, 4), torch.arange(20) % 2)
    """,
    "huggingface.md": """
        import torch, transformers
        sizes = dict(vocab_size=23, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        words = torch.randint(1, 23, (192, 6))
        dataset = [{"input_ids": row, "labels": row.clone()} for row in words]
        collate = transformers.default_data_collator
    """,
    "lightning.md": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        train_loader = DataLoader(TensorDataset(torch.rand(60, 8), torch.arange(60) % 2), batch_size=30)
    """,
    "losses.md": """
        import torch
        from types import SimpleNamespace
        from torch.utils.data import DataLoader, TensorDataset
        from adadp import PrivacyEngine
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)
            def forward(self, input_ids, attention_mask=None):
                return SimpleNamespace(logits=self.head(self.embedding(input_ids)))
        model = Model()
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            data_loader=DataLoader(TensorDataset(torch.arange(40).reshape(8, 5) % 7), batch_size=4), max_grad_norm=1.0)
        tokens, = next(iter(loader))
        mask, labels = torch.ones_like(tokens), tokens
    """,
    "units.md": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from adadp import PrivacyEngine
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        patients = [f"patient {row % 20}" for row in range(60)]
        loader = data_loader2 = DataLoader(TensorDataset(torch.rand(60, 4), torch.arange(60) % 2), batch_size=10)
        engine2 = PrivacyEngine()
    """,
    "preprocessing.md": """
        import numpy as np
        from adadp import Ledger
        columns = {"age": np.arange(50.0), "colour": np.array(["red", "green"] * 25)}
        run = Ledger(dataset="survey").start({})
    """,
}

#: Packages of extras that a page's blocks import.
NEEDS = {"huggingface.md": "transformers", "lightning.md": "lightning"}


def blocks(page: Path) -> list[tuple[int, str, bool]]:
    """The line, the code and whether it is run, of each block of a page."""
    text = page.read_text()
    return [
        (text.count("\n", 0, found.start("code")) + 1, found["code"], not NOT_RUN.search(found["before"]))
        for found in BLOCK.finditer(text)
    ]


WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_every_block_is_found_and_compiles(page: Path) -> None:
    assert len(blocks(page)) == page.read_text().count("```python")
    for line, code, _ in blocks(page):
        compile("\n" * (line - 1) + code, str(page), "exec")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason=f"{page.name} needs {NEEDS[page.name]}")
    namespace: dict[str, Any] = {"__name__": page.stem}
    if any(run for _, _, run in blocks(page)):
        exec(textwrap.dedent(SETUP.get(page.name, "")), namespace)
    for line, code, run in blocks(page):
        if run:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)}


def slug(heading: str) -> str:
    """The anchor that a heading gets on a page."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


#: Files of the source, as docs name them: `gradients/capture/slot.py`, `src/adadp/engine.py`, `lab/adadp_lab/...`.
SOURCE = re.compile(r"`((?:[\w.]+/)*[\w]+\.py)`")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_named_source_files_exist(page: Path) -> None:
    places = (ROOT, ROOT / "src/adadp", ROOT / "src", ROOT / "lab/adadp_lab/bench")
    missing = [
        name for name in SOURCE.findall(page.read_text()) if not any((place / name).exists() for place in places)
    ]
    assert not missing


def test_the_readme_begins_with_two_commands() -> None:
    commands = re.findall(r"^    (\S.*?)(?:  .*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]
