"""Features from public data: learned, cached, loaded, frozen."""

import pytest
import torch

from adadp.data import Dataset
from adadp.errors import ConfigurationError
from adadp.models import Recipe, build, load_features, pretrain, pretraining


@pytest.fixture
def public():
    """Red and blue noise: what a convolution can tell apart in a few steps."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 60, (48, 3, 32, 32), generator=generator, dtype=torch.uint8)
    images[:24, 0] += 190
    images[24:, 2] += 190
    return Dataset("colours", images, torch.arange(48) // 24, ("red", "blue"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "adadp" / "weights"


RECIPE = Recipe(epochs=4, batch=16, learning_rate=0.05)


@pytest.mark.parametrize("name", ["paper", "resnet"])
def test_it_learns_and_freezes(name, public, cache):
    losses = []
    weights = pretrain(name, recipe=RECIPE, data=public, progress=lambda epoch, loss: losses.append(loss))
    assert losses[-1] < 0.9 * losses[0]
    assert "colours" in weights.assumption
    assert weights.path is None
    assert not cache.exists()
    model = build(name, (3, 32, 32), 10)
    load_features(model, weights)
    assert torch.equal(next(iter(model.features.parameters())), next(iter(weights.weights.values())))
    assert not any(p.requires_grad for p in model.features.parameters())
    assert all(p.requires_grad for p in model.head.parameters())
    load_features(model, weights, frozen=False)
    assert all(p.requires_grad for p in model.parameters())


def test_cifar_100_weights_are_cached_by_recipe(public, cache, monkeypatch):
    loads = []
    monkeypatch.setattr(pretraining, "load", lambda name, **options: (loads.append(name), public)[1])
    recipe = Recipe(epochs=1, batch=16)
    state = torch.random.get_rng_state()
    first = pretrain("paper", recipe=recipe)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert loads == ["cifar100"]
    assert "CIFAR-100" in first.assumption
    assert first.path.suffix == ".safetensors"
    again = pretrain("paper", recipe=recipe)
    assert loads == ["cifar100"]
    assert all(torch.equal(again.weights[key], value) for key, value in first.weights.items())
    # Another recipe is another file; a damaged file is made anew, and comes out the same.
    pretrain("paper", recipe=Recipe(epochs=1, batch=24))
    assert len(loads) == 2
    assert len(list(cache.iterdir())) == 2
    first.path.write_bytes(first.path.read_bytes()[:-1])
    anew = pretrain("paper", recipe=recipe)
    assert len(loads) == 3
    assert all(torch.equal(anew.weights[key], value) for key, value in first.weights.items())


def test_refusals(public):
    with pytest.raises(ConfigurationError, match="paper and resnet"):
        pretrain("linear")
    weights = pretrain("paper", recipe=Recipe(epochs=1, batch=48), data=public)
    with pytest.raises(ConfigurationError, match="no `features`"):
        load_features(build("mlp", (4,), 2), weights)
    with pytest.raises(ConfigurationError, match="another model"):
        load_features(build("resnet", (3, 32, 32), 10), weights)
