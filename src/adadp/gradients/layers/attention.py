"""nn.MultiheadAttention, and with it nn.TransformerEncoderLayer, DecoderLayer and Transformer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from adadp.gradients.forms.dense import Dense
from adadp.gradients.forms.per_example import PerExample
from adadp.gradients.layers.layer import Layer, LayerCall, Taps, no_batch, supports
from adadp.gradients.layers.rewritten import Rewritten


class _Repeated(Layer):
    """A parameter that is copied for each example: the gradient of an example's copy is its gradient."""

    def copies(self, taps: Taps, module: nn.Module, name: str, count: int) -> Tensor:
        """The module's parameter [1, 1, d] of that name as [count, 1, d], tapped."""
        parameter = taps.alias(module, name)
        assert parameter is not None
        return taps.tap(self, module, [parameter.repeat(count, 1, 1)], [], name, [name])[0]

    def per_example(self, call: LayerCall) -> Mapping[str, PerExample]:
        gradients = Dense(call.gradients[0].unsqueeze(1), planned=call.planned)
        return {call.context: gradients} if call.context in call.wanted else {}


_REPEATED = _Repeated()


@supports(nn.MultiheadAttention)
class MultiheadAttention(Rewritten):
    """Computes what torch.nn.functional.multi_head_attention_forward does, batch first."""

    def run(  # the module's own arguments
        self,
        taps: Taps,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(module, nn.MultiheadAttention)
        if query.ndim != 3 or query.is_nested:
            raise no_batch(taps, module, query, "[n, length, d] (or [length, n, d] with batch_first=False)")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        q, k, v = self._projected(taps, module, query, key, value)
        count, length, width = q.shape
        extra = 0
        if module.bias_k is not None:
            k = torch.cat([k, _REPEATED.copies(taps, module, "bias_k", count)], 1)
            v = torch.cat([v, _REPEATED.copies(taps, module, "bias_v", count)], 1)
            extra += 1
        if module.add_zero_attn:
            k, v, extra = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), extra + 1
        heads = (module.num_heads, width // module.num_heads)
        q, k, v = (x.unflatten(2, heads).transpose(1, 2) for x in (q, k, v))  # type: ignore[no-untyped-call]

        causal_only = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal_only else _mask(attn_mask, key_padding_mask, q, extra)
        dropout = module.dropout if module.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / heads[1])) @ k.mT
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal_only)
        mixed = mixed.transpose(1, 2).reshape(count, length, width)
        output = self.linear(taps, module, mixed, "out_proj.weight", "out_proj.bias")
        return output if module.batch_first else output.transpose(0, 1), weights

    def _projected(
        self, taps: Taps, module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [n, length, d], with as few products as the inputs allow."""
        given = query, key, value
        query, key, value = given if module.batch_first else tuple(x.transpose(0, 1) for x in given)
        width = module.embed_dim
        rows = [slice(0, width), slice(width, 2 * width), slice(2 * width, 3 * width)]
        bias = "in_proj_bias"
        if not module._qkv_same_embed_dim:
            names = "q_proj_weight", "k_proj_weight", "v_proj_weight"
            parts = zip((query, key, value), names, rows, strict=True)
            q, k, v = (self.linear(taps, module, x, name, bias, bias_rows=part) for x, name, part in parts)
        elif given[0] is given[1] is given[2]:
            q, k, v = self.linear(taps, module, query, "in_proj_weight", bias).chunk(3, 2)
        elif given[1] is given[2]:
            q = self.linear(taps, module, query, "in_proj_weight", bias, rows[0])
            k, v = self.linear(taps, module, key, "in_proj_weight", bias, slice(width, 3 * width)).chunk(2, 2)
        else:
            parts = zip((query, key, value), ["in_proj_weight"] * 3, rows, strict=True)
            q, k, v = (self.linear(taps, module, x, name, bias, part) for x, name, part in parts)
        return q, k, v


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, queries: Tensor, extra: int) -> Tensor | None:
    """What is added to the scores [n, heads, length, keys]; the `extra` last keys are open to all."""
    total: Tensor | None = None
    if attn_mask is not None:
        by_example = attn_mask.ndim == 3  # [n * heads, length, keys]
        total = F.pad(_added(attn_mask, queries.dtype), (0, extra))
        total = total.view(*queries.shape[:2], *total.shape[1:]) if by_example else total[None, None]
    if key_padding_mask is not None:
        padding = F.pad(_added(key_padding_mask, queries.dtype), (0, extra))[:, None, None]
        total = padding if total is None else total + padding
    return total


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of booleans (True: not allowed) or of numbers, as numbers."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
