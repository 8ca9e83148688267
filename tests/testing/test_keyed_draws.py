"""A row's draws are the same whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor

from adadp.testing.keyed_draws import KeyedDraws, RowOwners, generators_kept, normal, seed_everything, uniform

DRAWS: dict[str, Callable[[int], Tensor]] = {
    "dropout": lambda n: F.dropout(torch.ones(n, 9), 0.5),
    "feature dropout": lambda n: F.dropout2d(torch.ones(n, 9, 2, 2), 0.5),
    "randn": lambda n: torch.randn(n, 9),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, 9)),
    "rand": lambda n: torch.rand(n, 9, generator=torch.Generator().manual_seed(5)),
    "randint": lambda n: torch.randint(3, 90, (n, 9)),
    "normal": lambda n: torch.normal(torch.ones(n, 9), 2.0),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 9), 0.3)),
    "gumbel": lambda n: F.gumbel_softmax(torch.ones(n, 9)),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 9), 4),
    "multinomial with replacement": lambda n: torch.multinomial(torch.ones(n, 9), 4, replacement=True),
}


def drawn(make: Callable[[int], Tensor], identities: tuple[int, ...], earlier: KeyedDraws | None = None) -> Any:
    mode = KeyedDraws(earlier)
    mode.rows = RowOwners(identities)
    with generators_kept(), mode:
        seed_everything("test")
        return mode, make(len(identities))


@pytest.mark.parametrize("name", DRAWS)
def test_a_row_has_its_own_draws(name: str) -> None:
    first, one = drawn(DRAWS[name], (4, 6, 7))
    _, two = drawn(DRAWS[name], (4, 5, 6, 7), first)
    assert torch.equal(one, two[[0, 2, 3]])
    assert not torch.equal(two[0], two[1])


def test_tokens_in_rows_and_rows_in_another_dimension_are_known() -> None:
    first, one = drawn(lambda n: torch.randn(n * 5, 2), (4, 6, 7))
    _, two = drawn(lambda n: torch.randn(n * 5, 2), (4, 5, 6, 7), first)
    assert torch.equal(one.view(3, 5, 2), two.view(4, 5, 2)[[0, 2, 3]])
    first, one = drawn(lambda n: torch.randn(11, n, 2), (4, 6, 7))
    _, two = drawn(lambda n: torch.randn(11, n, 2), (4, 5, 6, 7), first)
    assert torch.equal(one, two[:, [0, 2, 3]])


def test_a_longer_padding_leaves_what_was_there() -> None:
    first, one = drawn(lambda n: torch.randn(n, 5, 4), (4, 6))
    _, two = drawn(lambda n: torch.randn(n, 8, 4), (4, 6), first)
    assert torch.equal(one, two[:, :5])


def test_what_has_no_rows_is_the_same_in_both_worlds() -> None:
    first, one = drawn(lambda n: torch.randn(12, 5), (4, 6, 7))
    _, two = drawn(lambda n: torch.randn(12, 5), (4, 5, 6, 7), first)
    assert torch.equal(one, two)
    assert torch.equal(drawn(lambda n: torch.randperm(9), (1,))[1].sort().values, torch.arange(9))


def test_a_generator_that_is_put_back_draws_the_same_again() -> None:
    def twice(n: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            one = torch.randn(n, 4)
        return torch.stack([one, torch.randn(n, 4), torch.randn(n, 4)])

    one, two, three = drawn(twice, (1, 2))[1]
    assert torch.equal(one, two)
    assert not torch.equal(two, three)


def test_values_are_distributed_as_they_should_be() -> None:
    values, signs = uniform(3, (200, 300)), normal(3, (200, 300))
    assert abs(values.mean() - 0.5) < 0.005
    assert abs(signs.std() - 1) < 0.01
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.3
