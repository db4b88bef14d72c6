"""The model of docs/examples/gpt.py in PyTorch, with PyTorch's layers, losses and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.nn import functional


def leaves_of(tree: Any) -> list[torch.Tensor]:
    """Returns the parameters of a tree, each of which needs a gradient, in the order of `st.tree.leaves`."""
    if isinstance(tree, dict):
        return [x for name in sorted(tree) for x in leaves_of(tree[name])]
    return [x for item in tree for x in leaves_of(item)] if isinstance(tree, list) else [tree]


def copied(tree: Any, dtype: str) -> Any:
    """Returns a tree of arrays of NumPy as parameters of a dtype."""
    if isinstance(tree, dict):
        return {name: copied(value, dtype) for name, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value, dtype) for value in tree]
    return torch.tensor(tree, dtype=getattr(torch, dtype), requires_grad=True)


def logits_of(params: Any, tokens: torch.Tensor, heads: int) -> torch.Tensor:
    batch, length = tokens.shape
    x = functional.embedding(tokens, params["tokens"]) + params["positions"][:length]
    width = x.shape[-1]

    def normalize(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return functional.layer_norm(x, (width,), norm["scale"], norm["shift"])

    for block in params["blocks"]:
        y = normalize(x, block["norm1"])
        parts = [(y @ block[name]).view(batch, length, heads, -1).transpose(1, 2) for name in NAMES]
        y = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, length, width) @ block["out"]
        y = functional.gelu(normalize(x, block["norm2"]) @ block["up"], approximate="tanh")
        x = x + y @ block["down"]
    return normalize(x, params["norm"]) @ params["logits"]


NAMES = ("query", "key", "value")


def losses_of(
    params: Any,
    batches: Iterable[np.ndarray],
    heads: int,
    dtype: str,
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
) -> np.ndarray:
    """Returns the losses of a training, before each step.

    Args:
        params: the tree of the first parameters, as arrays of NumPy.
        batches: of shape (batch, context + 1).
        heads: the heads of attention.
        dtype: the dtype of the parameters.
        optimizer: makes the optimizer of parameters.
    """
    params, losses = copied(params, dtype), []
    chosen = optimizer(leaves_of(params))
    for rows in batches:
        tokens = torch.from_numpy(rows)
        logits = logits_of(params, tokens[:, :-1], heads)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        chosen.zero_grad()
        loss.backward()
        chosen.step()
        losses.append(loss.item())
    return np.array(losses)
