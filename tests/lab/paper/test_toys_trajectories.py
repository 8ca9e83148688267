"""Walks are Algorithm 1: against a plain loop that follows the paper's lines, and against the library's own parts."""

import math

import pytest
import torch
from adadp_lab.paper import comparison
from adadp_lab.paper.surfaces import SURFACES
from adadp_lab.paper.trajectories import RULES, Rule, distance, walk

from adadp.algorithms.update_rule import Normalised

BEALE = SURFACES["beale"]


def by_hand(rule: Rule, start, rate, sigma, bound, steps, seed):
    """One walk, number by number."""
    generator = torch.Generator().manual_seed(seed)
    x = list(start)
    second, prior, local, path = [0.0, 0.0], [0.0, 0.0], False, []
    for _ in range(steps):
        g = BEALE.gradient(torch.tensor(x, dtype=torch.float64)).tolist()
        roots = [math.sqrt(p) for p in prior]
        middle = sum(roots) / 2
        local = local or (rule.adaptive_noise and sum((r - middle) ** 2 for r in roots) / 2 > 1e-6)
        if local:
            bar = [min(max(gi, -1.5 * r), 1.5 * r) for gi, r in zip(g, roots, strict=True)]
            noise = [1.5 * sigma * math.sqrt(2) * r for r in roots]
        else:
            factor = max(1.0, math.hypot(*g) / bound)
            bar, noise = [gi / factor for gi in g], [bound * sigma] * 2
        z = torch.randn(1, 2, dtype=torch.float64, generator=generator)[0].tolist()
        tilde = [b + s * zi for b, s, zi in zip(bar, noise, z, strict=True)]
        second = [0.9 * e + 0.1 * t * t for e, t in zip(second, tilde, strict=True)]
        seen = tilde if rule.shape == "released" else g
        prior = [0.9 * p + 0.1 * s * s for p, s in zip(prior, seen, strict=True)]
        step = [t / math.sqrt(e + 1e-8) for t, e in zip(tilde, second, strict=True)] if rule.adaptive_rate else tilde
        x = [xi - rate * si for xi, si in zip(x, step, strict=True)]
        path.append(list(x))
    return torch.tensor(path, dtype=torch.float64)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_walks_follow_algorithm_1(name, sigma):
    found = walk(BEALE, RULES[name], start=(1.0, 1.5), rate=0.02, sigma=sigma, bound=4.0, steps=40, seed=5)
    expected = by_hand(RULES[name], (1.0, 1.5), 0.02, sigma, 4.0, 40, 5)
    torch.testing.assert_close(found.path[:, 0], expected, rtol=1e-7, atol=1e-9)
    assert not found.lost.any()


def test_the_adaptive_step_is_the_librarys():
    path = walk(BEALE, Rule(adaptive_rate=True, clipped=False), start=(1.0, 1.5), rate=0.02, sigma=0.0, bound=1.0).path
    point = torch.nn.Parameter(torch.tensor([1.0, 1.5], dtype=torch.float64))
    optimizer = Normalised([point], lr=0.02)
    for expected in path[:, 0]:
        point.grad = BEALE.gradient(point)
        optimizer.step()
        torch.testing.assert_close(point.detach(), expected, rtol=1e-9, atol=1e-12)


def test_noise_has_the_size_that_is_said():
    """One step of DPSGD from a point of known gradient, many times."""
    walks, sigma, bound, rate = 40_000, 0.7, 2.0, 0.1
    settings = {"rate": rate, "sigma": sigma, "bound": bound, "walks": walks, "steps": 1}
    end = walk(BEALE, RULES["dpsgd"], start=(1.0, 1.5), **settings).path[0]
    gradient = BEALE.gradient(torch.tensor([1.0, 1.5], dtype=torch.float64))
    bounded = gradient * min(1.0, bound / float(gradient.norm()))
    error = rate * sigma * bound
    assert ((end.mean(0) - torch.tensor([1.0, 1.5]) + rate * bounded).abs() < 5 * error / math.sqrt(walks)).all()
    torch.testing.assert_close(end.std(0), torch.full((2,), error, dtype=torch.float64), rtol=0.02, atol=0)


def test_settings_may_differ_from_walk_to_walk():
    rate = torch.tensor([[0.01], [0.05]], dtype=torch.float64)
    both = walk(BEALE, RULES["adadp"], start=(1.0, 1.5), rate=rate, sigma=0.0, bound=4.0, walks=2).path
    for index, each in enumerate((0.01, 0.05)):
        alone = walk(BEALE, RULES["adadp"], start=(1.0, 1.5), rate=each, sigma=0.0, bound=4.0).path
        torch.testing.assert_close(both[:, index], alone[:, 0])


def test_a_walk_that_runs_away_is_said_to_be_lost():
    found = walk(BEALE, Rule(clipped=False), start=(4.0, 4.0), rate=1.0, sigma=0.0, bound=1.0, steps=20)
    assert found.lost.all()
    assert found.path.isfinite().all()
    summary = comparison._summary(torch.tensor([1.0, 2.0]), found.lost.any())
    assert summary is None
    assert comparison.written(None) == "runs away"


def test_distance_is_the_mean_of_the_lengths():
    first = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]], [[5.0, 1.0]]])
    second = torch.tensor([[[3.0, 4.0]], [[1.0, 1.0]], [[5.0, 3.0]]])
    assert distance(first, second).tolist() == pytest.approx([(5 + 0 + 2) / 3])


def test_rates_are_tuned_to_the_noise():
    """More noise wants shorter steps, and the best of the grid is not at its end."""
    rates = [comparison.tuned_rate("booth", "dpsgd", sigma, 4.0) for sigma in (0.1, 3.0)]
    assert rates[0] > rates[1]
    assert comparison.RATES[0] < rates[1]
    assert rates[0] < comparison.RATES[-1]


def test_seeds_are_pooled():
    def record(mean, spread):
        entry = {"distance": {"mean": mean, "spread": spread}}
        return {"settings": {"walks": 50}, "comparison": {"adadp": [entry]}}

    mean, error = comparison.pooled([record(1.0, 0.3), record(3.0, 0.4)], "adadp", 0)
    assert mean == 2.0
    assert error == pytest.approx(math.sqrt((0.09 + 0.16) / 2 / 100))
    lost = {"settings": {"walks": 50}, "comparison": {"adadp": [{"distance": None}]}}
    assert comparison.pooled([record(1.0, 0.3), lost], "adadp", 0) is None
