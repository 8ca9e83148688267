"""README and docs: Python blocks run, commands are understood, and links and paths lead somewhere.

The blocks of one page are run in order, in one namespace and an empty folder. README's need nothing before them. Those
of a page in docs may assume the names of its `SETUP`: what a reader of that page has at hand. A block that cannot be
run is preceded by a comment that says why, and is compiled only:

    <!-- not run: needs a GPU -->

Where a block's output or error is shown on the page, it is compared with the real one: a ```text block after it with
`<!-- prints -->` on the line before, or a ```pytb block with `<!-- raises -->`. In a ```console block, a line
`$ adadp ...` is run, and must print what follows it. Line breaks may differ.

Every line `adadp ...` is read by its command's own parser of options; the cheap ones are run.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from adadp import Ledger
from adadp.accounting.accountants import ACCOUNTANTS
from adadp.accounting.events import PoissonGaussian
from adadp.cli import app
from adadp.gradients.layers.layer import _REGISTER

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(
    r"^(?P<before>[^\n]*)\n```python\n(?P<code>.*?)^```$"
    r"(?:\n\n<!-- (?P<how>prints|raises) -->\n```(?:text|pytb)\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = re.compile(r"<!-- not run: \S.*-->$")

#: What a reader has at hand when the page begins.
SETUP = {
    "accounting.md": """
        from adadp import Budget, Ledger
        other = Ledger("other.ledger", dataset="mnist")
        sigma_of_this_step = 0.9
    """,
    "checkpoints.md": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from adadp import PrivacyEngine
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.rand(60, 4), torch.arange(60) % 2), batch_size=6)
    """,
    "data.md": """
        rows = ["age,outcome", *(f"{20 + i},{('no', 'yes')[i % 2]}" for i in range(40))]
        open("patients.csv", "w").write("\\n".join(rows))
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
    "testing.md": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        dataset = TensorDataset(torch.randn(256, 3), torch.arange(256) % 2)
        def make_model():
            model = torch.nn.Linear(3, 2)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)
        def my_loop(model, optimizer, loader):
            for inputs, labels in loader:
                optimizer.zero_grad()
                optimizer.backward(torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none"))
                optimizer.step()
    """,
    "opacus.md": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 10))
        data_loader = DataLoader(TensorDataset(torch.rand(60, 1, 4, 4), torch.arange(60) % 10), batch_size=20)
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


class Block(NamedTuple):
    """A Python block of a page: where it is, and what the page says that it prints or raises."""

    line: int
    code: str
    run: bool
    prints: str | None
    raises: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            text.count("\n", 0, found.start("code")) + 1,
            found["code"],
            not NOT_RUN.search(found["before"]),
            found["shown"] if found["how"] == "prints" else None,
            found["shown"] if found["how"] == "raises" else None,
        )
        for found in BLOCK.finditer(text)
    ]


WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_every_block_is_found_and_compiles(page: Path) -> None:
    assert len(blocks(page)) == page.read_text().count("```python")
    shown = [block for block in blocks(page) if block.prints or block.raises]
    assert len(shown) == len(re.findall(r"^<!-- (?:prints|raises) -->$", page.read_text(), re.MULTILINE))
    for block in blocks(page):
        compile("\n" * (block.line - 1) + block.code, str(page), "exec")


@pytest.fixture
def registers() -> Iterator[None]:
    """What a page's blocks register is forgotten after the page."""
    registers: tuple[dict[Any, Any], ...] = (ACCOUNTANTS, _REGISTER)
    before = [dict(register) for register in registers]
    yield
    for register, kept in zip(registers, before, strict=True):
        register.clear()
        register.update(kept)


#: Pages whose blocks need more than a few seconds.
SLOW = {"testing.md"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("registers")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else []) for page in WITH_CODE],
    ids=lambda page: page.name,
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason=f"{page.name} needs {NEEDS[page.name]}")
    namespace: dict[str, Any] = {"__name__": page.stem}
    if any(block.run for block in blocks(page)):
        exec(textwrap.dedent(SETUP.get(page.name, "")), namespace)
    for block in blocks(page):
        if block.run:
            execute(block, page, namespace)


def execute(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    """Run a block, and compare what it prints or raises with what the page shows."""
    code, printed = compile("\n" * (block.line - 1) + block.code, str(page), "exec"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.raises is None:
            exec(code, namespace)
        else:
            with pytest.raises(Exception) as raised:  # noqa: PT011 - the page says which
                exec(code, namespace)
            assert words(f"{raised.type.__name__}: {raised.value}") == words(block.raises)
    if block.prints is not None:
        assert words(printed.getvalue()) == words(block.prints)


def words(text: str) -> str:
    return " ".join(text.split())


#: The commands of a console block, each with what it prints.
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^\$ adadp ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)(?=^\$ |\Z)", re.MULTILINE | re.DOTALL)


def transcripts(page: Path) -> list[tuple[list[str], str]]:
    return [
        (shlex.split(typed.replace("\\\n", " ")), shown)
        for block in CONSOLE.findall(page.read_text())
        for typed, shown in PROMPT.findall(block)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if transcripts(page)], ids=lambda page: page.name)
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for typed, shown in transcripts(page):
        result = CliRunner().invoke(app, typed)
        assert result.exit_code == 0, (typed, result.output)
        assert words(result.output) == words(shown)


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


def test_figures_of_the_comparison_are_those_of_the_record() -> None:
    rows = re.findall(
        r"^\| (?:adadp|opacus|fastdp|sgd-graph).*$", (ROOT / "docs/comparison.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 10
    recorded = (ROOT / "results/bench/tables.md").read_text().splitlines()
    assert [row for row in rows if row not in recorded] == []
    ratios = set(re.findall(r"\d+\.\d\dx", "\n".join(recorded)))
    for page, pattern in (
        ("README.md", r"\d+\.\d\dx"), ("docs/comparison.md", r"\d+\.\d\dx"),
        ("docs/performance.md", r"\d+\.\d\dx(?= of\s+(?:ordinary|replayed)\s+SGD)"),
    ):  # fmt: skip
        said = set(re.findall(pattern, (ROOT / page).read_text()))
        assert said, page
        assert sorted(said - ratios) == [], page


#: Files of the source, as docs name them: `gradients/capture/slot.py`, `src/adadp/engine.py`, `lab/adadp_lab/...`.
SOURCE = re.compile(r"`((?:[\w.]+/)*[\w]+\.py)`")
#: Files that a command writes.
WRITTEN = ("model.py", "predict.py", "scattering.py")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_named_source_files_exist(page: Path) -> None:
    places = (ROOT, ROOT / "src/adadp", ROOT / "src", ROOT / "lab/adadp_lab/bench")
    named = [name for name in SOURCE.findall(page.read_text()) if name not in WRITTEN]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing


def test_the_readme_begins_with_two_commands() -> None:
    commands = re.findall(r"^    (\S.*?)(?:  .*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]


#: Lines of shell blocks that call the command, with the next one where they end in a backslash.
COMMAND = re.compile(r"^    (adadp (?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """The words of each line `adadp ...` of a page, without comments."""
    return [shlex.split(line.replace("\\\n", " "), comments=True)[1:] for line in COMMAND.findall(page.read_text())]


WITH_COMMANDS = [page for page in PAGES if page.name != "CHANGELOG.md" and commands(page)]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_every_command_takes_its_options(page: Path) -> None:
    for words in commands(page):
        command, context, rest = get_command(app), None, words
        while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):  # a group, and a name in it
            context = command.context_class(command, parent=context, info_name=command.name)
            command, rest = command.get_command(context, rest[0]), rest[1:]
            assert command is not None, words
        if rest not in (["--help"], []) or not hasattr(command, "get_command"):
            command.make_context(command.name, list(rest), parent=context)  # raises where it knows no such option


def test_cheap_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = "runs/mnist-adadp-1/ledger.jsonl"
    with Ledger(made, dataset="mnist").start({}) as run:
        run.charge(PoissonGaussian(2.0, 0.01), 100)
    ran = []
    for words in commands(ROOT / "README.md"):
        if words[0] in ("account", "calibrate", "ledger", "--help") or words == ["reproduce", "--list"]:
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, (words, result.output)
            assert result.output.strip()
            ran.append(words[0])
    assert {"account", "calibrate", "ledger", "reproduce", "--help"} <= set(ran)
