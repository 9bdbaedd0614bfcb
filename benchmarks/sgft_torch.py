"""The peer of the SAC rows: the update of core.rl.sac as an eager PyTorch loop, written to be fast on CPU.

What a careful torch user would do: fused Adam, one fused step for the target average, no gradient that nobody
reads, actor and temperature in one backward pass, no `.item()` in the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from core.rl import sac

__all__ = ["LAYOUTS", "Draw", "TorchSAC"]

LAYOUTS = ("stacked", "members")
EPSILON = 1e-5  # of LayerNorm


class Draw(NamedTuple):
    """The random part of one update: replay rows `[B]`, both policy noises `[B, A]`, target members `[M]`."""

    rows: Any
    noise: Any
    next_noise: Any
    members: Any


class TorchSAC:
    """Soft actor-critic with the parameters, the hyper-parameters and the replay it is given.

    Args:
      config, state, hyper: of core.rl.sac, one lane; the actor has a head for log std and ReLU layers.
      data: a core.rl.replay.Transition of numpy arrays `[N, ...]` to draw batches from.
      batch: B.
      layout: how the ensemble is computed: "stacked" as one batched product per layer, "members" as a Python
        loop over its networks.
    """

    def __init__(
        self, config: sac.Config, state: Any, hyper: sac.Hyper, data: Any, *, batch: int, layout: str
    ):
        self.batch, self.subset, self.size = batch, config.subset, config.critic.ensemble
        self.stacked = layout == "stacked"
        self.hyper = {name: float(value) for name, value in vars(hyper).items()}
        self.log_std = (config.actor.log_std_init, *config.actor.log_std_range)
        self.actor = [_parameter(leaf) for leaf in _layers(state.actor["params"]["body"])]
        split = self._split(state.critic)
        self.critic = [[_parameter(leaf) for leaf in member] for member in split]
        self.target = [[torch.tensor(leaf) for leaf in member] for member in self._split(state.target)]
        self.log_alpha = _parameter(np.asarray(state.log_alpha))
        self._online = [leaf.detach() for member in self.critic for leaf in member]
        self._average = [leaf for member in self.target for leaf in member]
        self._trained = [*self.actor, self.log_alpha]
        self._critic_adam = torch.optim.Adam(
            [leaf for member in self.critic for leaf in member], lr=self.hyper["critic_lr"], fused=True
        )
        self._policy_adam = torch.optim.Adam(
            [
                {"params": self.actor, "lr": self.hyper["actor_lr"]},
                {"params": [self.log_alpha], "lr": self.hyper["alpha_lr"]},
            ],
            fused=True,
        )
        self._data = [
            torch.tensor(np.asarray(leaf))
            for leaf in (data.observation, data.action, data.reward, data.next_observation, data.terminated)
        ]

    def draw(self) -> Draw:
        """Random numbers of one update from torch's own generator."""
        noise = torch.randn(2, self.batch, self._data[1].shape[1])
        members = torch.randperm(self.size)[: self.subset] if self.subset < self.size else None
        return Draw(torch.randint(len(self._data[0]), (self.batch,)), noise[0], noise[1], members)

    def run(self, n: int, draws: Iterable[Draw] | None = None) -> torch.Tensor:
        """`n` updates with these draws, or fresh ones; mean (critic, actor, temperature) loss `[3]`."""
        losses = [self._update(draw) for draw in draws or (self.draw() for _ in range(n))]
        return torch.stack([torch.stack(each) for each in losses]).mean(0)

    def parameters(self) -> list[np.ndarray]:
        """Actor, online critic and target in the layout of `arrays`, then log alpha."""
        networks = []
        for members in (self.critic, self.target):
            leaves = [[leaf.detach().numpy() for leaf in member] for member in members]
            if self.stacked:
                networks += [leaf.reshape(leaf.shape[0], -1) for leaf in leaves[0]]
            else:
                networks += [np.stack([leaf.reshape(-1) for leaf in column]) for column in zip(*leaves)]
        return [
            *(leaf.detach().numpy() for leaf in self.actor),
            *networks,
            self.log_alpha.detach().numpy(),
        ]

    @staticmethod
    def arrays(state: sac.SACState) -> list[np.ndarray]:
        """The parameters of a state of core.rl.sac in the order and shapes of `parameters`."""
        networks = []
        for tree in (state.critic, state.target):
            layers = _layers(tree["params"]["ensemble"]["members"])
            networks += [leaf.reshape(leaf.shape[0], -1) for leaf in layers]
        return [*_layers(state.actor["params"]["body"]), *networks, np.asarray(state.log_alpha)]

    def _split(self, variables) -> list[list[np.ndarray]]:
        layers = _layers(variables["params"]["ensemble"]["members"])
        if self.stacked:
            return [[leaf if leaf.ndim == 3 else leaf[:, None] for leaf in layers]]
        return [[leaf[i] for leaf in layers] for i in range(self.size)]

    def _q(self, members, x):
        """`[E, B]`."""
        if self.stacked:
            return _stacked(members[0], x.expand(members[0][0].shape[0], *x.shape))
        return torch.stack([_network(member, x) for member in members])

    def _chosen(self, members):
        if members is None:
            return self.target
        if self.stacked:
            return [[leaf[members] for leaf in self.target[0]]]
        return [self.target[i] for i in members.tolist()]

    def _policy(self, observation, noise):
        w0, b0, w1, b1, w2, b2 = self.actor
        x = torch.addmm(b0, observation, w0).relu_()
        x = torch.addmm(b1, x, w1).relu_()
        mean, log_std = torch.addmm(b2, x, w2).chunk(2, -1)
        offset, low, high = self.log_std
        log_std = (log_std + offset).clamp(low, high)
        u = mean + log_std.exp() * noise
        slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
        log_prob = (-0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - slope).sum(-1)
        return torch.tanh(u), log_prob

    def _update(self, draw: Draw):
        hyper = self.hyper
        observation, action, reward, next_observation, terminated = (x[draw.rows] for x in self._data)
        with torch.no_grad():
            next_action, log_prob = self._policy(next_observation, draw.next_noise)
            q = self._q(self._chosen(draw.members), torch.cat([next_observation, next_action], -1))
            value = q.amin(0) - self.log_alpha.exp() * log_prob
            y = reward + hyper["gamma"] * value.masked_fill(terminated, 0.0)
        q = self._q(self.critic, torch.cat([observation, action], -1))
        critic_loss = F.mse_loss(q, y.expand_as(q))
        self._critic_adam.zero_grad()
        critic_loss.backward()
        self._critic_adam.step()
        torch._foreach_lerp_(self._average, self._online, hyper["tau"])

        action, log_prob = self._policy(observation, draw.noise)
        q = self._q(self.critic, torch.cat([observation, action], -1))
        actor_loss = (self.log_alpha.detach().exp() * log_prob - q.mean(0)).mean()
        alpha_loss = -self.log_alpha * (log_prob.detach() + hyper["target_entropy"]).mean()
        self._policy_adam.zero_grad()
        # Naming the inputs spares the gradients of the critic's weights.
        (actor_loss + alpha_loss).backward(inputs=self._trained)
        self._policy_adam.step()
        return critic_loss.detach(), actor_loss.detach(), alpha_loss.detach()


def _parameter(leaf) -> torch.Tensor:
    return torch.tensor(np.asarray(leaf), requires_grad=True)


def _layers(tree) -> list[np.ndarray]:
    """kernel, bias, then scale and bias of the LayerNorm behind it where there is one, layer after layer."""
    leaves = []
    for i in range(sum(name.startswith("Dense") for name in tree)):
        leaves += [tree[f"Dense_{i}"]["kernel"], tree[f"Dense_{i}"]["bias"]]
        if f"LayerNorm_{i}" in tree:
            leaves += [tree[f"LayerNorm_{i}"]["scale"], tree[f"LayerNorm_{i}"]["bias"]]
    return [np.array(leaf) for leaf in leaves]


def _network(leaves, x):
    *hidden, kernel, bias = leaves
    for w, b, scale, shift in zip(*[iter(hidden)] * 4):
        x = F.layer_norm(torch.addmm(b, x, w), b.shape, scale, shift, EPSILON).relu_()
    return torch.addmm(bias, x, kernel).squeeze(-1)


def _stacked(leaves, x):
    *hidden, kernel, bias = leaves
    for w, b, scale, shift in zip(*[iter(hidden)] * 4):
        x = F.layer_norm(torch.baddbmm(b, x, w), b.shape[-1:], eps=EPSILON)
        x = torch.addcmul(shift, x, scale).relu_()
    return torch.baddbmm(bias, x, kernel).squeeze(-1)
