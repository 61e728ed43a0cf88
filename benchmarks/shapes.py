"""Models whose parameters have the shapes of a ResNet and of a GPT, small enough for one core."""

from __future__ import annotations

import torch
from language_model import LanguageModel
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, CONTEXT, NUM_CLASSES = 8192, 64, 100


class Residual(nn.Module):
    """ResNet's basic block: two convolutions with BatchNorm, added to what came in."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after))
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.skip: nn.Module = nn.Identity()
        if stride > 1:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(batch, channels, height, width)` in and out."""
        return F.relu(self.skip(x) + self.second(F.relu(self.first(x))))


class ResNet(nn.Module):
    """ResNet-18, He et al. 2015, https://arxiv.org/abs/1512.03385, narrower: 6.3 M parameters in 62 tensors.

    Args:
        width: channels of the first stage; 64 in the paper.
    """

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
        for stage in range(4):
            for block in range(2):
                after = width * 2**stage
                layers.append(Residual(channels, after, 2 if stage and not block else 1))
                channels = after
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classes = nn.Linear(channels, NUM_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean loss."""
        return F.cross_entropy(self.classes(self.features(images)), labels)


def make(shape: str, seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model, `"resnet"` or `"gpt"`, and a batch that depends on the seed; models of one shape begin the same."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(0)
    if shape == "resnet":
        images = torch.randn(4, 3, 32, 32, generator=generator)
        return ResNet(), (images, torch.randint(NUM_CLASSES, (4,), generator=generator))
    tokens = torch.randint(VOCABULARY, (1, CONTEXT + 1), generator=generator)
    return LanguageModel(VOCABULARY, 256, 5, 4, CONTEXT), (tokens[:, :-1], tokens[:, 1:])
