"""What an example adds under autocast does not depend on how many others are in its piece of a lot.

One example more or less decides whether the last piece has one row or two. Where a parameter met a single row by other
arithmetic than it meets two, that changed the other example's gradient by up to 2^-9 of the bound.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.gradients.capture import meetings
from adadp.gradients.capture.operations import UNKNOWN
from soundness.stand import CLIPPINGS, TOLERANCE, Stand, World, without

TOKENS, COLUMNS = 5, 6


class Meets(nn.Module):
    """Parameters of a shape that meet the examples [n, tokens, columns] in one operation."""

    def __init__(self, shape: tuple[int, ...], meet: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.meet = nn.Parameter(torch.randn(shape)), meet
        self.head = nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x: Tensor) -> Tensor:
        made = self.meet(self.head(x), self.weight)  # of bfloat16 inputs under autocast
        return F.pad(made.float().flatten(1), (0, 1))[:, :2]


WAYS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "x W": ((COLUMNS, 3), lambda x, w: (x @ w).tanh()),
    "x v": ((COLUMNS,), lambda x, v: (x @ v).tanh()),
    "linear": ((3, COLUMNS), lambda x, w: F.linear(x, w).tanh()),
    "a matrix for each token": ((TOKENS, COLUMNS, 3), lambda x, w: (x.unsqueeze(2) @ w).tanh()),
    "a number": ((), lambda x, s: (x.tanh() * s).sum(1)),
    "a scale": ((COLUMNS,), lambda x, s: (x * s).tanh().sum(1)),
    "positions": ((TOKENS, COLUMNS), lambda x, p: (x + p).tanh().sum(1)),
    "a token": ((1, 1, COLUMNS), lambda x, t: torch.cat([t.expand(len(x), -1, -1), x], 1).tanh().sum(1)),
    "a convolution": ((4, TOKENS, 3), lambda x, w: F.conv1d(x, w).tanh()),
    "a slope": ((TOKENS,), lambda x, s: F.prelu(x, s).sum(1)),
    "a norm": ((COLUMNS,), lambda x, s: F.layer_norm(x, (COLUMNS,), s).tanh().sum(1)),
    "queries": ((1, 2, COLUMNS), lambda x, q: F.scaled_dot_product_attention(q.expand(len(x), -1, -1), x, x)),
}


def farthest(way: str) -> float:
    """The largest distance, of several draws, between five examples in pieces of four and four of them in one piece."""
    shape, meet = WAYS[way]
    world = World(lambda: Meets(shape, meet), (TOKENS, COLUMNS))
    found = []
    for seed in range(20):
        stand = Stand(world, CLIPPINGS["flat"], torch.float32, seed=seed)
        inputs, weights = stand.examples(5)
        weights *= 100  # all are clipped, as far as the bound allows
        with torch.autocast("cpu", torch.bfloat16):
            first, last = stand.bound(inputs[:4], weights[:4]), stand.bound(inputs[4:], weights[4:])
            whole = {name: value + last[name] for name, value in first.items()}
            fewer = stand.bound(without(inputs, 1), weights[1:])
        found.append(stand.distance(whole, fewer) * stand.sigma)
    return max(found)


@pytest.mark.parametrize("way", WAYS)
def test_an_example_alone_in_a_piece_adds_what_it_adds_among_others(way: str) -> None:
    assert farthest(way) <= 1 + TOLERANCE[torch.float32]


@pytest.mark.parametrize("way", ["x W", "x v", "linear"])
def test_an_example_of_which_nothing_meets_the_parameter(way: str) -> None:
    """As where tokens are sent to experts: alone in a piece, an example may have none for one of them."""
    shape, meet = WAYS[way]

    def chosen(x: Tensor, w: Tensor) -> Tensor:
        made = meet(x[x[..., 0] > 1e9], w)
        return torch.cat([x[:, 0, :2], made.sum().expand(len(x), 1)], 1)

    stand = Stand(World(lambda: Meets(shape, chosen), (TOKENS, COLUMNS)), CLIPPINGS["flat"], lots=0)
    inputs, weights = stand.examples(1)
    found = stand.bound(inputs, weights)
    assert not found["weight"].any()
    assert found["head.weight"].any()


@pytest.mark.parametrize("way", ["x W", "x v", "linear", "a number", "a convolution", "a slope"])
def test_another_arithmetic_for_one_example_is_caught(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {name: _Otherwise(rule) for name, rule in meetings.RULES.items()}
    monkeypatch.setattr(meetings, "RULES", rules)
    assert farthest(way) > 1 + TOLERANCE[torch.float32]


class _Otherwise:
    """A rule that knows nothing about one example alone: the operation is done on the value itself."""

    alone = staticmethod(UNKNOWN.alone)

    def __init__(self, rule: object) -> None:
        self._rule = rule

    def __getattr__(self, name: str) -> object:
        return getattr(self._rule, name)
