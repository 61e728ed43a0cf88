"""A small transformer that learns Python's own documentation, character by character; nothing is downloaded."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 64
VOCABULARY = 128


class Block(nn.Module):
    """Attention and a perceptron, each on normalized input and added to it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(batch, length, width)` in and out."""
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_perceptron(x))))


class LanguageModel(nn.Module):
    """GPT-like: learned positions, norms first, one matrix for input and output tokens.

    Args:
        vocabulary: number of tokens.
        width: of the residual stream, a multiple of `num_heads`.
        num_layers: of attention and perceptron.
        num_heads: of each attention.
        length: tokens in a context, at most.
    """

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = 192,
        num_layers: int = 2,
        num_heads: int = 4,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Branches begin as if they were not there, which learns fastest.
                std = 0.0 if name.endswith(("out.weight", "down.weight")) else 0.05 if "blocks" in name else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats; both of shape `(batch, length)`."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text() -> tuple[Tensor, Tensor]:
    """Pieces of `LENGTH + 1` characters for training, and the tenth that is for validation; always the same."""
    characters = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    num = len(characters) // (LENGTH + 1)
    pieces = torch.tensor(list(characters[: num * (LENGTH + 1)])).view(num, LENGTH + 1)
    pieces = pieces[torch.randperm(num, generator=torch.Generator().manual_seed(0))]
    return pieces[num // 10 :], pieces[: num // 10]
