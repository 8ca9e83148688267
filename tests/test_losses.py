"""Per-example losses: each row is what its example alone would have, whatever the others are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from adadp import losses
from adadp.errors import ConfigurationError

N, T, V = 5, 7, 11
Loss = Callable[[Tensor, Tensor], Tensor]


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2, logits.shape[1], dtype=torch.float64, device=logits.device)
    return losses.classification(logits, labels, 0.1, weights)


def one_class(logits: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(logits[None], label[None], reduction="sum", ignore_index=-100)


def one_weighted(logits: Tensor, label: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2, len(logits), dtype=torch.float64)
    smooth = functional.cross_entropy(logits[None], label[None], reduction="sum", label_smoothing=0.1)
    return smooth * weights[label] if label >= 0 else smooth


def one_text(logits: Tensor, labels: Tensor) -> Tensor:
    kept = [t for t in range(len(labels)) if labels[t] != -100]
    if not kept:
        return logits.sum() * 0
    return torch.stack([-logits[t].log_softmax(0)[labels[t]] for t in kept]).mean()


def one_causal(logits: Tensor, labels: Tensor) -> Tensor:
    return one_text(logits[:-1], labels[1:])


def one_binary(logits: Tensor, targets: Tensor) -> Tensor:
    pairs = [(x, y) for x, y in zip(logits.flatten(), targets.flatten(), strict=True) if y != -100]
    if not pairs:
        return logits.sum() * 0
    return torch.stack([-(y * functional.logsigmoid(x) + (1 - y) * functional.logsigmoid(-x)) for x, y in pairs]).mean()


def one_regression(predictions: Tensor, targets: Tensor) -> Tensor:
    return ((predictions - targets) ** 2).mean()


# name -> (loss, the same for one example, kind of arguments)
LOSSES: dict[str, tuple[Loss, Loss, str]] = {
    "classification": (losses.classification, one_class, "labels"),
    "weighted": (weighted, one_weighted, "labels"),
    "causal_lm": (losses.causal_lm, one_causal, "tokens"),
    "masked_lm": (losses.masked_lm, one_text, "tokens"),
    "seq2seq": (losses.seq2seq, one_text, "tokens"),
    "regression": (losses.regression, one_regression, "numbers"),
    "binary": (losses.binary, one_binary, "flags"),
}
every = pytest.mark.parametrize("name", LOSSES)
with_labels = pytest.mark.parametrize("name", [name for name, (_, _, kind) in LOSSES.items() if kind != "numbers"])
of_tokens = pytest.mark.parametrize("name", [name for name, (_, _, kind) in LOSSES.items() if kind == "tokens"])


def arguments(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits and targets of N examples; the last has no label, others are partly labelled, and unlike in number."""
    generator = torch.Generator().manual_seed(3)
    shape = {"labels": (N, V), "tokens": (N, T, V), "numbers": (N, 3, 2), "flags": (N, 6)}[kind]
    logits = 3 * torch.randn(shape, dtype=torch.float64, generator=generator)
    if kind == "numbers":
        return logits.to(dtype), torch.randn(shape, dtype=torch.float64, generator=generator)
    size = V if kind != "flags" else 2
    targets = torch.randint(size, shape if kind == "flags" else shape[:-1], generator=generator)
    if kind != "labels":
        for row in range(N):
            targets[row, targets.shape[1] - row :] = -100
    targets[-1] = -100
    return logits.to(dtype), targets.double() if kind == "flags" else targets


def value_and_gradient(loss: Loss, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    values = loss(leaf, targets)
    factors = torch.linspace(1, 2, len(values), dtype=values.dtype)  # a gradient of another size for each example
    (values * factors).sum().backward()
    assert leaf.grad is not None
    return values.detach(), leaf.grad


@every
def test_each_is_a_loop_over_single_examples(name: str) -> None:
    loss, single, kind = LOSSES[name]
    logits, targets = arguments(kind)

    def loop(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([single(*pair) for pair in zip(logits, targets, strict=True)])

    values, gradient = value_and_gradient(loss, logits, targets)
    wanted, wanted_gradient = value_and_gradient(loop, logits, targets)
    assert values.shape == (N,)
    torch.testing.assert_close(values, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-12)


@every
def test_another_row_changes_nothing(name: str) -> None:
    loss, _, kind = LOSSES[name]
    logits, targets = arguments(kind)
    values, gradient = value_and_gradient(loss, logits, targets)
    other, labels = logits.clone(), targets.clone()
    other[1] = float("nan")
    labels[1] = 0 if kind != "numbers" else 1e300
    changed, changed_gradient = value_and_gradient(loss, other, labels)
    rest = [0, 2, 3, 4]
    assert torch.equal(values[rest], changed[rest])
    assert torch.equal(gradient[rest], changed_gradient[rest])
    alone = torch.cat([loss(logits[i : i + 1], targets[i : i + 1]) for i in range(N)])
    torch.testing.assert_close(alone, values, rtol=1e-12, atol=1e-12)


@of_tokens
def test_more_padding_changes_nothing(name: str) -> None:
    loss, _, _ = LOSSES[name]
    logits, labels = arguments("tokens")
    values, gradient = value_and_gradient(loss, logits, labels)
    padding = torch.full((N, 9, V), float("nan"), dtype=logits.dtype)
    longer = torch.cat([logits, padding], 1), torch.cat([labels, torch.full((N, 9), -100)], 1)
    padded, padded_gradient = value_and_gradient(loss, *longer)
    torch.testing.assert_close(padded, values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded_gradient[:, :T], gradient, rtol=1e-12, atol=1e-12)
    assert (padded_gradient[:, T:] == 0).all()


@with_labels
def test_nothing_labelled_is_zero_even_where_logits_are_not_finite(name: str) -> None:
    loss, _, kind = LOSSES[name]
    logits, targets = arguments(kind)
    logits[0], logits[1], logits[2] = float("nan"), float("inf"), -float("inf")
    values, gradient = value_and_gradient(loss, logits, torch.full_like(targets, -100))
    assert (values == 0).all()
    assert (gradient == 0).all()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    loss, _, kind = LOSSES[name]
    logits, targets = arguments(kind, dtype)
    values, gradient = value_and_gradient(loss, logits, targets)
    wanted, wanted_gradient = value_and_gradient(loss, logits.double(), targets)
    assert values.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(values.double(), wanted, rtol=1e-6, atol=1e-6)
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("name", ["classification", "weighted", "masked_lm", "causal_lm", "binary"])
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_huge_logits(name: str, size: float) -> None:
    loss, _, kind = LOSSES[name]
    logits, targets = arguments(kind, torch.float32)
    values, gradient = value_and_gradient(loss, logits * size, targets)
    assert values.isfinite().all()
    assert gradient.isfinite().all()


def test_a_huge_logit_does_not_swallow_the_others() -> None:
    logits = torch.tensor([[1e4, 1e4, 1e4 - 3]])
    values = losses.classification(logits, torch.tensor([0]))
    wanted = functional.cross_entropy(logits.double(), torch.tensor([0]))
    assert abs(values.item() - wanted.item()) < 1e-6


@pytest.mark.parametrize("name", ["classification", "weighted", "masked_lm", "causal_lm"])
def test_parts_of_the_logits_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, _, kind = LOSSES[name]
    logits, targets = arguments(kind)
    whole = value_and_gradient(loss, logits, targets)
    monkeypatch.setattr(losses, "_AT_A_TIME", 3 * V + 1)
    for a, b in zip(whole, value_and_gradient(loss, logits, targets), strict=True):
        assert torch.equal(a, b)


def test_weights_are_not_divided_by_the_batch() -> None:
    logits, labels = arguments("labels")
    weights = torch.linspace(1, 3, V, dtype=torch.float64)
    values = losses.classification(logits, labels, class_weights=weights)
    wanted = functional.cross_entropy(logits, labels, weight=weights, reduction="none")
    torch.testing.assert_close(values, wanted, rtol=1e-12, atol=1e-12)


def test_another_ignored_label() -> None:
    logits, labels = arguments("tokens")
    padded = torch.where(labels == -100, 0, labels)
    wanted = losses.causal_lm(logits, torch.where(padded == 0, -100, padded))
    assert torch.equal(losses.causal_lm(logits, padded, ignore_index=0), wanted)


def test_one_token_predicts_nothing() -> None:
    assert losses.causal_lm(torch.randn(3, 1, V), torch.ones(3, 1, dtype=torch.int64)).tolist() == [0, 0, 0]


@every
def test_nothing_depends_on_values(name: str) -> None:
    """Tensors without values cannot be looked at: whatever needs a host sync, or a mask as an index, fails on them."""
    loss, _, kind = LOSSES[name]
    logits, targets = arguments(kind, torch.bfloat16)
    leaf = logits.to("meta").requires_grad_()
    values = loss(leaf, targets.to("meta"))
    values.sum().backward()
    assert values.shape == (N,)
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape


@every
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_recorded_as_a_cuda_graph(name: str) -> None:
    loss, _, kind = LOSSES[name]
    logits, targets = (value.cuda() for value in arguments(kind, torch.float32))
    leaf = logits.clone().requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad(loss(leaf, targets).sum(), leaf)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = loss(leaf, targets)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    with torch.no_grad():
        leaf.mul_(0.5)
    graph.replay()
    wanted = loss(leaf, targets)
    torch.testing.assert_close(values, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), leaf)[0])


LOGITS, LABELS = torch.zeros(4, 6, 9), torch.zeros(4, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: losses.causal_lm(LOGITS.view(-1, 9), LABELS.view(-1)), "stay with their example"),
        (lambda: losses.masked_lm(LOGITS.view(-1, 9), LABELS.view(-1)), "stay with their example"),
        (lambda: losses.seq2seq(LOGITS, LABELS.view(-1)), "each example keeps its own labels"),
        (lambda: losses.causal_lm(LOGITS[:, :-1], LABELS), r"\[n, T\] = \[4, 5\]"),
        (lambda: losses.seq2seq(LOGITS[None], LABELS), r"\[n, T, V\], not \[1, 4, 6, 9\]"),
        (lambda: losses.causal_lm(SimpleNamespace(logits=LOGITS), LABELS), "pass outputs.logits"),
        (lambda: losses.masked_lm(LOGITS, LABELS.float()), "whole numbers"),
        (lambda: losses.masked_lm(LABELS[..., None], LABELS), "floating-point"),
        (lambda: losses.classification(LOGITS, LABELS), "masked_lm"),
        (lambda: losses.classification(LOGITS[:, 0], LABELS), r"\[n\] = \[4\]"),
        (lambda: losses.classification(LOGITS[:, 0], torch.zeros(4, 9)), r"\[n\] = \[4\]"),
        (lambda: losses.classification(LOGITS[:, 0], LABELS[:, 0], 1.0), "label_smoothing"),
        (lambda: losses.classification(LOGITS[:, 0], LABELS[:, 0], class_weights=torch.ones(4)), "class_weights"),
        (lambda: losses.regression(LOGITS[:, :1, 0], LOGITS[:, 0, 0]), "squeeze"),
        (lambda: losses.binary(LOGITS[:, :1, 0], LOGITS[:, 0, 0]), "squeeze"),
        (lambda: losses.binary(LABELS, LABELS), "floating-point"),
        (lambda: losses.regression(torch.tensor(1.0), torch.tensor(1.0)), r"\[n, \.\.\.\]"),
        (lambda: losses.regression(LOGITS, [1.0]), "tensor, not list"),
    ],
)
def test_shapes_that_could_mix_examples_are_refused(call: Callable[[], Tensor], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        call()


def test_importing_needs_torch_alone() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import adadp.losses; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new & {'scipy', 'dp_accounting', 'typer', 'rich'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
