"""PowerSGD and its batched variant in one process and float64, after Vogels et al. 2019."""

import math

import torch
from driver import mean_gradients

from lightning_commhooks.hooks.powersgd import random_factors


class Memory:
    """One matrix of each rank, compressed step after step."""

    def __init__(self, hook, key, n, m, world):
        self.hook, self.key, self.rank = hook, key, min(n, m, hook.matrix_approximation_rank)
        self.residuals = [torch.zeros(n, m, dtype=torch.float64) for _ in range(world)]
        self.q = self._random(0, m)
        self.p = self._random(-1, n)
        self.num_steps = 0

    def mean(self, matrices, step):
        """The approximate mean of the ranks' matrices."""
        owed = [matrix + e for matrix, e in zip(matrices, self.residuals, strict=True)]
        mean = (self._half if self.hook.num_iters_per_step == 1 else self._whole)(owed, step)
        if self.hook.use_error_feedback:
            self.residuals = [matrix - mean for matrix in owed]
        return mean

    def _whole(self, owed, step):
        start = self.q if self.hook.warm_start else self._random(step, owed[0].shape[1])
        q = torch.linalg.qr(start).Q
        p = torch.linalg.qr(sum(matrix @ q for matrix in owed)).Q
        self.q = sum(matrix.t() @ p for matrix in owed) / len(owed)
        return p @ self.q.t()

    def _half(self, owed, step):
        """One product, and that with what was made of the other one in the step before."""
        mean = sum(owed) / len(owed)
        self.num_steps += 1
        if self.num_steps % 2:
            q = torch.linalg.qr(self.q).Q
            self.p = mean @ q
            return self.p @ q.t()
        p = torch.linalg.qr(self.p).Q
        self.q = mean.t() @ p
        return p @ self.q.t()

    def _random(self, step, length):
        like = torch.empty(0, dtype=torch.float64)
        return random_factors([self.key], (self.rank, length), like, self.hook.random_seed, step)[0].t()


def powersgd(hook, make, world, steps, shapes, bad_before=None):
    """Averaged gradients of each step; before one of them a bad step may have cleared what ranks owe."""
    memory, outputs = {}, []
    for step in range(steps):
        if step == bad_before:
            for own in memory.values():
                own.residuals = [torch.zeros_like(residual) for residual in own.residuals]
        output = mean_gradients(make, world, step, shapes, torch.float64)
        ranks = [make(rank, step, shapes, torch.float64) for rank in range(world)]
        for name, shape in shapes.items() if step >= hook.start_powerSGD_iter else ():
            n, m = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            r = min(n, m, hook.matrix_approximation_rank)
            if len(shape) < 2 or not (n + m) * r * hook.min_compression_rate < n * m:
                continue
            if name not in memory:
                memory[name] = Memory(hook, name, n, m, world)
            output[name] = memory[name].mean([g[name].view(n, m) for g in ranks], step).view(shape)
        outputs.append(output)
    return outputs


def batched_powersgd(hook, make, world, steps, shapes, buckets):
    """Averaged gradients of each step, with the parameters' names in each bucket given."""
    memory, outputs = {}, []
    for step in range(steps):
        output = mean_gradients(make, world, step, shapes, torch.float64)
        ranks = [make(rank, step, shapes, torch.float64) for rank in range(world)]
        for names in buckets if step >= hook.start_powerSGD_iter else ():
            flats = [torch.cat([g[name].reshape(-1) for name in names]) for g in ranks]
            side = math.ceil(math.sqrt(flats[0].numel()))
            squares = [torch.zeros(side, side, dtype=torch.float64) for _ in ranks]
            for square, flat in zip(squares, flats, strict=True):
                square.view(-1)[: flat.numel()] = flat
            if names not in memory:
                memory[names] = Memory(hook, "\n".join(names), side, side, world)
            mean = memory[names].mean(squares, step).reshape(-1)
            # The padding is no gradient: nothing is owed to it.
            for residual in memory[names].residuals:
                residual.view(-1)[flats[0].numel() :] = 0
            parts = mean[: flats[0].numel()].split([math.prod(shapes[name]) for name in names])
            output.update({name: part.view(shapes[name]) for name, part in zip(names, parts, strict=True)})
        outputs.append(output)
    return outputs
