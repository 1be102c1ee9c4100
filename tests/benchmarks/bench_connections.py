"""What the connection of each recipe costs beside the plain residual: a training step, a forward, and generation.

``make bench`` prints the times with their ratio to the fastest in brackets. Nothing is asserted: compare ratios.
"""

from pathlib import Path

import pytest
import torch

from resinspect.models import ResidualConfig, ResidualLM
from resinspect.models.training import read_recipe

RECIPES = Path(__file__).parents[2] / "data" / "recipes"
CASES = sorted(path.stem for path in RECIPES.glob("*.toml") if path.stem != "base" and "_seed" not in path.stem)

BATCH, TOKENS = 4, 256
ROUNDS = {"rounds": 5, "warmup_rounds": 1}


@pytest.fixture(params=CASES)
def model(request):
    torch.manual_seed(0)
    return ResidualLM(ResidualConfig(**read_recipe(RECIPES / f"{request.param}.toml").model))


def ids():
    return torch.randint(0, 2048, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.mark.benchmark(group="training step")
def test_training_step(benchmark, model):
    optimizer, tokens = torch.optim.AdamW(model.train().parameters()), ids()

    def step():
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    benchmark.pedantic(step, **ROUNDS)


@pytest.mark.benchmark(group="forward")
def test_forward(benchmark, model):
    tokens = ids()
    model.eval()

    def forward():
        with torch.no_grad():
            model(tokens, use_cache=False)

    benchmark.pedantic(forward, **ROUNDS)


@pytest.mark.benchmark(group="generate 16 tokens")
def test_generate(benchmark, model):
    tokens = ids()[:1, :32]
    model.eval()
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    benchmark.pedantic(lambda: model.generate(tokens, **options), **ROUNDS)
