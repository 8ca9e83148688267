"""What modules run for at the moment, which of them run, and what a trial sees of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from adadp.gradients.capture.hooks import WatchedPart
from adadp.gradients.capture.shared import Shared
from adadp.gradients.capture.tap import Record


@dataclass
class Observed:
    """What modules returned and what layers were given inside `Capture.observing`."""

    outputs: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    inputs: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # a layer's, with the output it gave
    free: list[tuple[str, Tensor]] = field(default_factory=list)  # what is taken to be the same whatever the examples


@dataclass
class Work:
    """What modules run for at the moment: one microbatch, or something beside it (`Capture.aside`)."""

    tag: object = None  # which microbatch
    count: int | None = None  # its examples
    planned: int | None = None  # how many examples such a microbatch is planned for, a public number
    aside: bool = False
    trial: bool = False  # a run of a trial, which may be begun again
    derived: list[Shared] = field(default_factory=list)  # values made of parameters in its passes
    uses: Counter[str] = field(default_factory=Counter)  # calls that used a parameter, by its name
    anchors: list[Tensor] = field(default_factory=list)  # of its passes
    records: list[Record] = field(default_factory=list)  # of calls that a backward pass came through
    refusals: list[str] = field(default_factory=list)  # why such a call's gradients must not be used


class Frame:
    """A watched module that runs."""

    __slots__ = ("active", "part", "places", "shared")

    def __init__(self, part: WatchedPart, active: bool, shared: bool) -> None:
        self.part, self.active = part, active
        self.shared = shared  # whether it was given parameters as its input
        self.places: dict[tuple[Any, ...], int] = {}  # operations and inputs so far, by label
