"""Local SGD of all kinds in one process and float64: w copies of a model, averaged as the papers say."""

import copy

import torch


class Simulation:
    """Copies of a model with optimizers of their own.

    `periods` gives for each period the number of neighbouring ranks that average; `outer` the outer optimizer's
    settings, for DiLoCo, whose averages are taken over `delay` steps after they have begun, and mixed by `mixing`;
    `warmup` the number of steps of each optimizer whose gradients are averaged over all ranks, `begins_at` that of
    backwards; `subgroup` how many neighbours average gradients afterwards.
    """

    def __init__(
        self,
        model,
        world,
        make_optimizers,
        loss,
        *,
        periods,
        warmup=0,
        begins_at=0,
        subgroup=1,
        outer=None,
        fragments=1,
        delay=0,
        mixing=0,
    ):
        self.models = [copy.deepcopy(model) for _ in range(world)]
        self.optimizers = [make_optimizers(m) for m in self.models]
        self.world, self.loss, self.periods, self.warmup, self.subgroup = world, loss, periods, warmup, subgroup
        self.fragments, self.delay, self.mixing = fragments, delay, mixing
        self.moves = {}
        self.begins_at, self.num_backwards, self.is_local = begins_at, 0, False
        # Of each optimizer, since the beginning and since ranks step alone.
        self.taken = [0] * len(self.optimizers[0])
        self.num_steps = [0] * len(self.optimizers[0])
        self.outer = outer
        if outer is not None:
            self.anchor = copy.deepcopy(model)
            self.outer_optimizers = {n: torch.optim.SGD([p], **outer) for n, p in self.anchor.named_parameters()}

    def backward(self, micro_batches, part):
        """Gradients of the mean loss over micro-batches, `micro_batches[rank][i]`, averaged as configured."""
        for model, batches in zip(self.models, micro_batches, strict=True):
            model.zero_grad()
            for batch in batches:
                (self.loss(model, batch, part) / len(batches)).backward()
        self.is_local |= min(self.taken) >= self.warmup and self.num_backwards >= self.begins_at
        self.num_backwards += 1
        size = self.subgroup if self.is_local else self.world
        self._average(lambda model: [p.grad for p in model.parameters() if p.grad is not None], size)

    def _average(self, tensors_of, size):
        for first in range(0, self.world, size):
            for copies in zip(*(tensors_of(m) for m in self.models[first : first + size]), strict=True):
                mean = sum(c.detach() for c in copies) / len(copies)
                for c in copies:
                    c.data.copy_(mean)

    def step(self, k):
        """Step the k-th optimizer of each rank; average if it is time to."""
        for optimizers in self.optimizers:
            optimizers[k].step()
        self.taken[k] += 1
        if not self.is_local:
            if self.outer is not None:
                self.anchor.load_state_dict(self.models[0].state_dict())
            return
        self.num_steps[k] += 1
        mine = {p for group in self.optimizers[0][k].param_groups for p in group["params"]}
        names = [n for n, p in self.models[0].named_parameters() if p in mine]
        if self.outer is None:
            for period in sorted(self.periods, reverse=True):
                if self.num_steps[k] % period == 0:
                    self._average(lambda m: [m.get_parameter(n) for n in names], self.periods[period])
                    break
            return
        (period,) = self.periods
        for i, part in enumerate(self._split(names)):
            left = ((i + 1) * period // self.fragments - self.num_steps[k]) % period
            if left == self.delay:
                for name in part:
                    anchor = self.anchor.get_parameter(name)
                    moves = [anchor.detach() - m.get_parameter(name).detach() for m in self.models]
                    self.moves[name] = sum(moves) / self.world
            if left == 0:
                for name in set(part) & set(self.moves):
                    self._outer_step(name)

    def _split(self, names):
        numel = [self.anchor.get_parameter(n).numel() for n in names]
        parts = [[] for _ in range(self.fragments)]
        for i, name in enumerate(names):
            middle = sum(numel[:i]) + numel[i] / 2
            parts[int(middle / sum(numel) * self.fragments)].append(name)
        return parts

    def _outer_step(self, name):
        anchor = self.anchor.get_parameter(name)
        anchor.grad = self.moves[name]
        self.outer_optimizers[name].step()
        for model in self.models:
            parameter = model.get_parameter(name).data
            parameter.copy_(torch.lerp(anchor.detach(), parameter, self.mixing))
