"""What each connection costs beside the plain residual: a training step, a forward, and generation, in one run.

``make bench`` prints the times with their ratio to the fastest in brackets. Nothing is asserted: compare ratios.
"""

import pytest
import torch

from resinspect.models import CONNECTIONS, ResidualConfig, ResidualLM

BATCH, TOKENS = 4, 256
ROUNDS = {"rounds": 5, "warmup_rounds": 1}


@pytest.fixture(params=CONNECTIONS)
def model(request):
    torch.manual_seed(0)
    return ResidualLM(ResidualConfig(connection=request.param))


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
