"""The texts of trials. They are fixed but for names of modules and classes, so that none holds private values."""

from __future__ import annotations

ATTRIBUTES = (
    "the loop puts tensors into the module between its calls: that they are not made of examples cannot be seen. What "
    "the module computes in its calls can be tried"
)
LOSSES = (
    "each example's loss is computed by the loop in a way that is not known: that row i is not divided or weighted by "
    "something of the other examples (a count, a length, a maximum) cannot be seen. A TrainingStep, which is given the "
    "loss as a function, can try it; the functions of adadp.losses on the model's outputs are known"
)
INPUTS = (
    "the loop changes a batch before it gives it to the model: that it does so row by row, without the other examples, "
    "cannot be seen. In the dataset, the collate function or the module it can be tried"
)
NO_BATCH = (
    "no tensor with a row for each example is in what the step is given, so the loss cannot be tried: call the step "
    "with all of the batch, as tensors, or lists, tuples, dicts or dataclasses of tensors"
)
STALE_OUTPUT = (
    "{} is given what it returned for an earlier lot (a hidden state that is handed on, for instance): examples of "
    "that lot reach this one without noise. Begin each batch with a fresh state."
)
UNRUN = (
    "{} cannot be tried out on a few examples of a batch, so it is not known whether it keeps them apart. Let it take "
    "batches of any size."
)
UNKNOWN = (
    "{} was given a {}, which cannot be taken apart into examples, so it is not known whether the model keeps them "
    "apart. Give it tensors, or lists, tuples, dicts or dataclasses of tensors."
)
NO_ROWS = (
    "{} was given no tensor with a row for each example of the batch, so it is not known whether it keeps them apart. "
    "Keep examples in the first dimension (batch_first=False for [T, N, ...]) from the loader to the loss."
)
