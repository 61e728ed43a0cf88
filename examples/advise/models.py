"""Models for `python -m lightning_commhooks advise examples/advise/models.py:mlp`, and how to hand over your own.

A factory takes no arguments and returns a model and a batch; if the model does not return its loss, a loss function
too. It is called on each rank; make batches of the size that one rank works on.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """Large matrices, little to compute for each number in them: 8.4 M parameters, 33.6 MB of gradients."""
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())])
    return model, (torch.randn(16, 1024), torch.randn(16, 1024)), nn.MSELoss()


class TinyGPT(nn.Module):
    """A decoder of 3.4 M parameters that returns its loss.

    Args:
        vocabulary: number of tokens.
        width: of embeddings.
        depth: number of layers.
        context: tokens in a sequence.
    """

    def __init__(self, vocabulary: int = 512, width: int = 256, depth: int = 4, context: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next token; `tokens` has shape `(batch, context + 1)`."""
        x = self.embed(tokens[:, :-1]) + self.position
        logits = self.head(self.layers(x, mask=self.mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt() -> dict[str, object]:
    """A small language model with AdamW: a dict, since there is an optimizer of its own."""
    model = TinyGPT()
    batch = torch.randint(512, (4, 65))
    return {"model": model, "batch": (batch,), "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-4)}


def conv() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """Small filters that each work on every pixel: 0.6 M parameters, 2.4 MB of gradients, and much to compute."""
    widths = (3, 64, 128, 128, 256)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return model, (torch.randn(8, 3, 32, 32), torch.randint(10, (8,))), nn.CrossEntropyLoss()
