"""Does the plain residual fail to learn the identity? DeepCrossAttention's Figure 1, which essay 003 quotes.

Ten linear layers of rank 3 in 100 dimensions, batches of 100 standard normal inputs, 1000 steps of SGD. Two targets:
the input itself, and a random affine map of it. The fixed residual ``x + sum_i f_i`` against GRN-v1, where each layer
reads a learned weighted sum of the input and all earlier outputs. The paper states neither learning rate nor
initialisation, so several of the first are tried; the maps are factored, drawn as ``nn.Linear`` draws them.

Usage: python data/experiments/identity_learning.py
"""

import math

import torch
from torch import Tensor, nn

WIDTH, RANK, LAYERS, BATCH, STEPS = 100, 3, 10, 100, 1000
RATES = (0.003, 0.01, 0.03, 0.1)
SEEDS = (0, 1, 2)


class Network(nn.Module):
    """Low-rank linear layers over the plain sum, or over learned sums (one scalar per source)."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, RANK, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(RANK, WIDTH, bias=False) for _ in range(LAYERS))
        sums = [torch.ones(i + 1) for i in range(LAYERS + 1)]
        self.weights = nn.ParameterList(sums) if learned else sums

    def forward(self, x: Tensor) -> Tensor:
        """Inputs ``(batch, d)`` to outputs ``(batch, d)``."""
        bank = [x]
        for weight, down, up in zip(self.weights, self.down, self.up, strict=False):
            bank.append(up(down(torch.einsum("s,sbd->bd", weight, torch.stack(bank)))))
        return torch.einsum("s,sbd->bd", self.weights[-1], torch.stack(bank))


def train(learned: bool, affine: bool, rate: float, seed: int) -> float:
    """Mean squared error per channel over the last 50 steps; infinite if training diverged."""
    torch.manual_seed(seed)
    matrix, offset = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    network = Network(learned)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    errors = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        error = nn.functional.mse_loss(network(x), x @ matrix.T + offset if affine else x)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(float(error.detach()))
        if not math.isfinite(errors[-1]):
            return math.inf
    return sum(errors[-50:]) / 50


def main() -> None:
    """Print the median over seeds of the final error."""
    print("| target | learning rate | fixed residual | GRN-v1 |\n|---|---:|---:|---:|")
    for affine in (False, True):
        for rate in RATES:
            medians = [sorted(train(learned, affine, rate, s) for s in SEEDS)[1] for learned in (False, True)]
            print(f"| {'random affine' if affine else 'identity'} | {rate} | {medians[0]:.3g} | {medians[1]:.3g} |")


if __name__ == "__main__":
    main()
