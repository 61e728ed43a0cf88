"""Averages over ranks whose numbers are encoded on the way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_commhooks.codecs.codec import Codec, Kernels, compiled, seed_tensor
from lightning_commhooks.collectives.counters import Counters

# Elements that are encoded and sent together: so many that calls and latencies do not count, and few enough that on CPU
# encoding some hides sending others.
PART_NUMEL = 2**20

# What this rank sends, and what waits for what it receives.
_Sent = tuple[Tensor, Callable[[], Tensor]]


@dataclass
class Part:
    """Numbers that are encoded and sent together; see `Group.average_encoded_`.

    Attributes:
        numbers: shape `(b, s)`, float32 or float64, this rank's; b is a multiple of w for a two-shot average.
        owed: of this rank: what it owed before, and where to write what it owes then, both of shape `(b, s)`. `None`:
            no error feedback.
        carried: the same of the rank's share of the mean, shape `(b / w, s)`; `None` unless there are two shots.
        seed: for random rounding; of this rank, step and part alone. Below 2^30.
    """

    numbers: Tensor
    owed: tuple[Tensor, Tensor] | None
    carried: tuple[Tensor, Tensor] | None
    seed: int


class EncodedCollectives(ABC):
    """The part of a `Group` that uses codecs.

    Args:
        codec: what `all_reduce_factors_` encodes by; `None`: nothing.
    """

    size: int
    device: torch.device
    counters: Counters

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._kernels: dict[tuple[Codec, bool, bool], Kernels] = {}

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """See `Group`."""

    @abstractmethod
    def all_reduce_coalesced_(self, tensors: Sequence[Tensor]) -> None:
        """See `Group`."""

    @abstractmethod
    def _start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See `Group`."""

    @abstractmethod
    def _start_gather_shares(self, share: Tensor, of_equals: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Group`."""

    @abstractmethod
    def _start_all_to_all(self, chunks: Tensor) -> Callable[[], Tensor]:
        """See `Group`."""

    def num_owners(self, two_shot: bool = True) -> int:
        """Ranks that each own a share of what `average_encoded_` averages; 1 if all ranks send all to each other."""
        return self.size if two_shot and self.size > 2 else 1

    def kernels(self, codec: Codec, *, feedback: bool, two_shot: bool) -> Kernels:
        """What runs a codec in this group, compiled if that works on all ranks.

        Collective when this is asked for the first time.

        Args:
            codec: the codec.
            feedback: whether there is error feedback.
            two_shot: see `average_encoded_`.
        """
        key = codec, feedback, two_shot
        if key not in self._kernels:
            owners = self.num_owners(two_shot)
            own = compiled(codec, self.device, {self.size, 1} if owners > 1 else {self.size}, feedback, owners)
            with self.counters.paused():
                # Sums of a compiled function may be rounded in another way.
                everywhere = self.all_gather(torch.tensor([own is not None], device=self.device)).all()
            self._kernels[key] = own if own is not None and everywhere else Kernels(codec)
        return self._kernels[key]

    def average_encoded_(
        self,
        parts: Sequence[Part],
        kernels: Kernels,
        *,
        loss_scale: float | Tensor = 1.0,
        scale: float | Tensor = 1.0,
        two_shot: bool = True,
    ) -> Tensor:
        """Replace the numbers of each part by their mean over ranks, encoded on the way, equal on all ranks.

        Two-shot, as CGX (Markov et al. 2022, https://arxiv.org/abs/2111.08617) and ZeRO++ (Wang et al. 2023,
        https://arxiv.org/abs/2306.10209, section 3.3) do it: each rank receives its share of all parts from the others,
        sums it in at least float32, encodes the mean and sends it to all; 2(w-1)/w of the encoded size. Two ranks send
        all to each other instead, the same bytes and one rounding less. Encoding and decoding of one part go on while
        others are under way.

        Args:
            parts: the same on every rank.
            kernels: of this group.
            loss_scale: what numbers are divided by before they are added to what is owed, and the mean multiplied by.
            scale: what numbers are multiplied by, those with error feedback only.
            two_shot: whether there are two; if not, each rank sends all to all others, (w-1) times the encoded size.

        Returns:
            whether all means are finite before they are multiplied, boolean, one element.
        """
        if not parts:
            return torch.ones((), dtype=torch.bool, device=self.device)
        one = parts[0].numbers.new_ones(())
        way_in, way_out = (one * (scale / loss_scale)).view(()), (one * loss_scale).view(())
        has_owners = self.num_owners(two_shot) > 1
        sent = [self._send(part, kernels, way_in, has_owners) for part in parts]
        if has_owners:
            sent = [self._send_mean(part, kernels, one, *of_part) for part, of_part in zip(parts, sent, strict=True)]
        finite = []
        for part, (_, arrived) in zip(parts, sent, strict=True):
            num_senders = 1 if has_owners else self.size
            payloads = arrived().view(num_senders, part.numbers.shape[0], -1)
            factor = way_out if part.owed is not None else one
            finite.append(kernels.decode_mean(payloads, factor, part.numbers))
        return torch.stack(finite).all()

    def average_tensors_encoded_(self, tensors: Sequence[Tensor], kernels: Kernels) -> None:
        """Replace tensors by their means over ranks, without error feedback: see `average_encoded_`.

        Args:
            tensors: of one floating-point dtype; each begins a block. Same shapes on every rank.
            kernels: of this group, of a codec with a block size.
        """
        size = kernels.codec.block_size
        assert size is not None
        if not any(tensor.numel() for tensor in tensors):
            return
        filled = [-(-tensor.numel() // size) * size for tensor in tensors]
        unit = size * self.num_owners()
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        flat = tensors[0].new_zeros(-(-sum(filled) // unit) * unit, dtype=dtype)
        places = flat[: sum(filled)].split(filled)
        for tensor, place in zip(tensors, places, strict=True):
            place[: tensor.numel()] = tensor.reshape(-1)
        chunks = flat.split(max(unit, PART_NUMEL // unit * unit))
        self.average_encoded_([Part(chunk.view(-1, size), None, None, seed=0) for chunk in chunks], kernels)
        for tensor, place in zip(tensors, places, strict=True):
            tensor.copy_(place[: tensor.numel()].view(tensor.shape))

    def _send(self, part: Part, kernels: Kernels, factor: Tensor, to_owners: bool) -> _Sent:
        payload = kernels.encode(part.numbers, part.owed, factor, seed_tensor(part.seed, self.device)).view(-1)
        if to_owners:
            return payload, self._start_all_to_all(payload.view(self.size, -1))
        return payload, self._start_all_gather(payload)

    def _send_mean(
        self, part: Part, kernels: Kernels, one: Tensor, payload: Tensor, arrived: Callable[[], Tensor]
    ) -> _Sent:
        b, s = part.numbers.shape
        mean = part.numbers.new_empty((b // self.size, s))
        kernels.decode_mean(arrived().view(self.size, b // self.size, -1), one, mean)
        seed = seed_tensor(part.seed + 2**30, self.device)
        share = kernels.encode(mean, part.carried, one, seed).view(-1)
        # The mean of what equal ranks send is what each of them sends.
        return share, self._start_gather_shares(share, lambda: payload.view(self.size, -1).clone())

    def all_reduce_factors_(self, exact: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks; `factors` encoded on the way, if this group has a codec.

        Args:
            exact: as in `all_reduce_coalesced_`.
            factors: floating-point tensors whose errors the algorithm makes up for, as error feedback does. Those that
                do not fill a block are not encoded.
        """
        if self._codec is None or self.size == 1:
            self.all_reduce_coalesced_([*exact, *factors])
            return
        kernels = self.kernels(self._codec, feedback=False, two_shot=True)
        large = [factor for factor in factors if kernels.fills_block(factor)]
        self.all_reduce_coalesced_([*exact, *(factor for factor in factors if not kernels.fills_block(factor))])
        self.average_tensors_encoded_(large, kernels)
        for factor in large:
            factor.mul_(self.size)
