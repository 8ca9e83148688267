"""The model card of an exported run: README.md as Hugging Face's hub reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adadp import __version__
from adadp.accounting.guarantee import Guarantee
from adadp.accounting.model_card import front_matter, privacy_section
from adadp.data import NAMES
from adadp.preprocessing import TablePreprocessor
from adadp.preprocessing.free_text import PACKAGE
from adadp.training.run_folder import FinishedRun

_LEFT_OUT = (
    "Left out. Figures on held-out rows are computed without noise, so no guarantee covers them (adadp train "
    "--paid-metrics releases figures that one covers)."
)
_LIMITS = """\
- The guarantee is for the people whose data it was trained on. Whoever the model is used on is not covered: a
  prediction tells about its input.
- It bounds what can be learnt about one of them. What is true of many of them, the model may say.
- Whether it is good enough, or fair, for a use is for its user to find out.
"""


@dataclass(frozen=True)
class Card:
    """What a card says.

    Attributes:
        run: the finished run.
        guarantee: for everything that was released on the data.
        releases: what `releases.json` holds; None in runs of older versions.
        now: whether the data's ledger was read when the card was written.
        examples: how many rows or persons it was trained on: public.
        paid: figures on held-out rows that were released with noise; None where there are none.

    """

    run: FinishedRun
    guarantee: Guarantee
    releases: Mapping[str, Any] | None
    now: bool
    examples: int
    paid: Mapping[str, Any] | None

    def text(self, *, has_code: bool) -> str:
        """The card, in Markdown."""
        config = self.run.config
        title = f"{_code(config['built'])} trained on {_code(self._data)}"
        private = self.guarantee.epsilon is not None
        promise = "under differential privacy" if private else "**without a privacy guarantee**"
        parts = [
            self._front(),
            f"# {title}\n\nA PyTorch model that {self._does}. It was trained {promise} with adadp, and exported by "
            f"its version {__version__}.\n",
            privacy_section(self.guarantee, self._own, since=self._since),
            f"## Training data\n\n{self._training_data}\n",
            f"## Training\n\n{_table(self._settings)}\n",
            f"## How good it is\n\n{self._figures}\n",
            f"## Use\n\n{_use(self.run, has_code)}",
            f"## Limits\n\n{_LIMITS}",
        ]
        return "\n".join(parts)

    def _front(self) -> str:
        kind = "image" if self.run.config["kind"] == "images" else "tabular"
        task = f"{kind}-{'classification' if self.run.classes else 'regression'}"
        return front_matter(
            {"library_name": "pytorch", "pipeline_tag": task, "tags": ["differential-privacy", "adadp"]}
        )

    @property
    def _data(self) -> str:
        config = self.run.config
        if self.releases is not None:
            return str(self.releases["dataset"])
        return str(config["dataset"]) if config["dataset"] in NAMES else "private data"

    @property
    def _does(self) -> str:
        config = self.run.config
        given = "images" if config["kind"] == "images" else "rows of a table"
        if self.run.target is None:
            return f"tells {len(self.run.classes)} classes of {given} apart"
        low, high = self.run.target
        return f"predicts {_code(config['label'] or 'label')} of {given}, a number from {low:g} to {high:g}"

    @property
    def _own(self) -> Guarantee | None:
        if self.releases is None or self.releases["own_releases"] == self.releases["all_releases"]:
            return None
        return Guarantee.from_dict(self.releases["own"])

    @property
    def _since(self) -> str:
        if self.releases is None:
            return ""
        runs = self.releases["runs"]
        counted = "this run, the only one" if runs == 1 else f"{runs:,} runs, this one included,"
        when = "when this card was written" if self.now else "when this run ended (later ones add to it)"
        return f"It is for everything on record for {_code(self._data)} {when}: {counted} on this data."

    @property
    def _training_data(self) -> str:
        config, run = self.run.config, self.run
        whose = "persons" if config.get("person") is not None else "images" if config["kind"] == "images" else "rows"
        known = config["dataset"] in NAMES
        text = [f"{self.examples:,} {whose} of {'' if known else 'private data, called '}{_code(self._data)}."]
        if config["kind"] == "images":
            channels, height, width = config["image_shape"]
            text.append(f"Images of {height} x {width} pixels, {'grey' if channels == 1 else f'{channels} channels'}.")
        else:
            kinds = config.get("kinds") or dict.fromkeys(config["category"], "category")
            text.append("Columns: " + ", ".join(f"{_code(name)} ({kind})" for name, kind in kinds.items()) + ".")
        if run.classes:
            text.append("Classes: " + ", ".join(_code(name) for name in run.classes) + ".")
        text.append("What counts as public about it is among the conditions of the guarantee.")
        return "\n".join(text)

    @property
    def _settings(self) -> list[tuple[str, str]]:
        config = self.run.config
        reading = f" ({config['reading']})" if config.get("reading") else ""
        planned = {name: config.get(name) for name in ("noise_multiplier", "lot", "steps", "epochs", "class_weights")}
        numbers = {**planned, **config.get("settings", {})}.items()
        return [
            ("algorithm", f"{config.get('algorithm')}{reading}"),
            ("model", config["built"]),
            *((name.replace("_", " "), _number(value)) for name, value in numbers if value is not None),
        ]

    @property
    def _figures(self) -> str:
        if self.paid is None:
            return _LEFT_OUT
        values = {**self.paid["values"], "constant guess": self.paid["baseline"]}
        rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in values.items()]
        return (
            "On held-out rows, from counts that were released with noise: the guarantee covers these figures.\n\n"
            f"{_table(rows)}"
        )


def _use(run: FinishedRun, has_code: bool) -> str:
    images = run.config["kind"] == "images"
    needed = ["torch", "numpy", "safetensors", *(["Pillow"] if images else [])]
    table = run.estimator
    if isinstance(table, TablePreprocessor) and table.free_text_ is not None and table.free_text_.vectors_ == "words":
        needed += ["tokenizers", PACKAGE]
    row = '"image.png"' if images else "{column: cell, ...}"
    code = "`model.py` builds the module and `model.safetensors` has its weights"
    if not has_code:
        code = (
            "`model.safetensors` has the weights. **The module's code belongs beside it, as `model.py` with a function "
            "`build()`**: it is its author's, and no part of adadp"
        )
    return (
        f"Without adadp: {', '.join(needed)} are needed. {code}; `preprocessing.json` says how "
        f"{'an image' if images else 'a row'} becomes numbers, and `predict.py` does all of it:\n\n"
        f"    python predict.py {'image.png' if images else 'rows.csv'}\n\n"
        "```python\nimport predict\n\nmodel = predict.load_model()\n"
        f"outputs = model(predict.inputs([{row}]))\nprint(predict.answers(outputs))\n```\n"
    )


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _code(str(value)) if isinstance(value, str) else f"{value}"


def _code(text: str) -> str:
    """A name from elsewhere as code: no Markdown of it works, and it stays on its line and in its cell."""
    return "`" + " ".join(str(text).split()).replace("`", "'").replace("|", "\\|") + "`"
