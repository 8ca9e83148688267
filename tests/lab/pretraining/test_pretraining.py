"""Features from public data: learned, cached, loaded, frozen."""

import json

import numpy as np
import pytest
import torch
from adadp_lab.pretraining import Recipe, WideResNet, features, load_features, pretrain, untrained

from adadp import models
from adadp.data import Dataset
from adadp.errors import ConfigurationError
from adadp.models import build
from adadp.training import train


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


@pytest.fixture
def narrow(monkeypatch):
    """A wide net that is not: seconds are for the GPU."""
    monkeypatch.setitem(features._NETS, "wide", lambda classes: WideResNet(3, classes, width=8))


@pytest.mark.parametrize("name", ["paper", "resnet", "wide"])
def test_it_learns_and_freezes(name, public, cache, narrow):
    losses = []
    weights = pretrain(name, recipe=RECIPE, data=public, progress=lambda epoch, loss: losses.append(loss))
    assert losses[-1] < 0.9 * losses[0]
    assert "colours" in weights.assumption
    assert weights.path is None
    assert not cache.exists()
    model = untrained(name)
    load_features(model, weights)
    assert torch.equal(next(iter(model.features.parameters())), next(iter(weights.weights.values())).float())
    assert not any(p.requires_grad for p in model.features.parameters())
    assert all(p.requires_grad for p in model.head.parameters())
    load_features(model, weights, frozen=False)
    assert all(p.requires_grad for p in model.parameters())


def test_cifar_100_weights_are_cached_by_recipe(public, cache, monkeypatch):
    loads = []
    monkeypatch.setattr(features, "load", lambda name, **options: (loads.append(name), public)[1])
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


def test_what_is_held_out_is_guessed_and_not_trained_on(public, cache, monkeypatch, narrow):
    seen = []
    monkeypatch.setattr(features, "load", lambda name, **options: public)
    train = features._train
    monkeypatch.setattr(features, "_train", lambda *given: (seen.append(given[1]), train(*given))[1])
    found = pretrain("wide", recipe=Recipe(epochs=6, batch=12, learning_rate=0.1), hold_out=0.25)
    assert found.accuracy >= 0.9  # red and blue
    assert found.path is None
    assert not cache.exists()
    assert len(seen[0]) == 36
    assert pretrain("paper", recipe=Recipe(epochs=1, batch=48), data=public).accuracy is None
    with pytest.raises(ConfigurationError, match="held out"):
        pretrain("paper", hold_out=1.0)


def test_images_are_shifted_and_flipped_each_by_itself():
    images = torch.rand(3, 2, 8, 8)
    flips, shifts = torch.tensor([False, True, False]), torch.tensor([[4, 4, 6], [4, 4, 1]])
    made = features._augment(images, flips, shifts)
    assert torch.equal(made[0], images[0])
    assert torch.equal(made[1], images[1].flip(2))
    assert torch.equal(made[2, :, :6, 3:], images[2, :, 2:, :5])  # two rows up, three columns to the right
    assert not made[2, :, 6:].any()
    assert not made[2, :, :, :3].any()


def test_an_epoch_takes_each_example_once_and_draws_all_shifts():
    batches = features._epoch(2000, 64, 31, torch.Generator().manual_seed(0), torch.device("cpu"))
    index, flips, shifts = (torch.cat(parts, -1) for parts in zip(*batches, strict=True))
    assert [len(batch[0]) for batch in batches] == [64] * 31
    assert len(index.unique()) == len(index)
    assert 0.4 < flips.double().mean() < 0.6
    assert shifts.unique().tolist() == list(range(9))


def test_frozen_features_of_a_wide_net_do_not_mix_examples():
    torch.manual_seed(0)
    net = WideResNet(3, 10, width=8)
    x = torch.rand(6, 3, 16, 16)
    net.train()(x)  # statistics that are not those of a new net
    net.eval()
    assert net.features(x).shape == (6, 64)
    other = x.clone()
    other[1:] = 100 * torch.rand(5, 3, 16, 16)
    assert torch.allclose(net.features(x)[0], net.features(other)[0], atol=1e-5)
    assert torch.allclose(net(x), net.head(net.features(x)[:, 32:]))


def test_the_wide_net_is_small_enough_to_be_sent_around():
    net = untrained("wide", 100)
    weights = features._weights(net)
    assert sum(value.numel() * value.element_size() for value in weights.values()) < 16 * 2**20
    assert sum(value.numel() for value in net.parameters()) == 6_206_772
    assert weights["norm.running_var"].dtype == torch.float32


def test_refusals(public):
    with pytest.raises(ConfigurationError, match="only paper, resnet, wide have"):
        pretrain("linear")
    weights = pretrain("paper", recipe=Recipe(epochs=1, batch=48), data=public)
    with pytest.raises(ConfigurationError, match="no `features`"):
        load_features(build("mlp", (4,), 2), weights)
    with pytest.raises(ConfigurationError, match="another model"):
        load_features(build("resnet", (3, 32, 32), 10), weights)


def test_old_names_warn():
    with pytest.warns(DeprecationWarning, match=r"adadp_lab\.pretraining\.WideResNet"):
        assert models.WideResNet is WideResNet
    with pytest.raises(AttributeError, match="no attribute 'narrow'"):
        _ = models.narrow


def test_adadp_train_takes_the_pretrained_convolutions(public, cache, monkeypatch, tmp_path):
    monkeypatch.setattr(features, "load", lambda name, **options: public)
    monkeypatch.setitem(features.RECIPES, "paper", RECIPE)
    data = tmp_path / "private.npz"
    np.savez(data, images=public.images.permute(0, 2, 3, 1).numpy(), label=public.labels.numpy())
    options = {"model": "paper", "algorithm": "dpsgd", "lot": 16, "steps": 2, "out": str(tmp_path / "run"), "seed": 0}
    result = train(dataset=str(data), **options)
    assert any("CIFAR-100" in text for text in result_assumptions(result))
    kept = features.pretrain("paper").weights["0.weight"]
    assert torch.equal(next(iter(result.plan.model.features.parameters())), kept)


def result_assumptions(result):
    return json.loads((result.folder / "guarantee.json").read_text())["assumptions"]
