"""Blocks whose residual is formed in one way or another, and a model of them that no library knows."""

import copy

import torch
from tiny import randomised
from torch import nn


class Block(nn.Module):
    """Attention-free; a subclass says how the two writes are added up."""

    def __init__(self, width):
        super().__init__()
        self.norm_a, self.mix, self.norm_b, self.turn = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        )

    def forward(self, x):
        x = x + self.mix(self.norm_a(x))
        return x + self.turn(self.norm_b(x))


class Toy(nn.Module):
    """A model of blocks, with no configuration and no attention mask."""

    def __init__(self, block=Block, width=16, layers=3):
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(layers))
        self.last = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class GoesOn(Toy):
    """One block more, outside of the list."""

    def __init__(self):
        super().__init__()
        self.extra = Block(16)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.last(self.extra(x))


class FromTokens(Toy):
    """Every block also gets the embedding and adds something made of it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Beside(16) for _ in range(3))

    def forward(self, ids):
        x = first = self.tokens(ids)
        for block in self.blocks:
            x = block(x, first)
        return self.last(x)


class Beside(Block):
    def __init__(self, width):
        super().__init__(width)
        self.lift = nn.Linear(width, width)

    def forward(self, x, first):
        x = x + self.mix(self.norm_a(x)) + self.lift(first)
        return x + self.turn(self.norm_b(x))


class PositionsFirst(Toy):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(12, 16)
        tokens = self._modules.pop("tokens")
        self.tokens = tokens  # registered after the positions

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def toy(block=Block, **options):
    torch.manual_seed(0)
    return randomised(Toy(block, **options))


class InPlace(Block):
    def forward(self, x):
        x += self.mix(self.norm_a(x))
        x.add_(self.turn(self.norm_b(x)))
        return x


class PassedOn(Block):
    def __init__(self, width):
        super().__init__(width)
        self.drop, self.same = nn.Dropout(0.5), nn.Identity()

    def forward(self, x):
        x = self.same(x)
        x = x + self.drop(self.mix(self.norm_a(self.same(x))))
        return self.same(x + self.drop(self.turn(self.norm_b(x))))


class Inside(Block):
    """Each sublayer adds the residual itself."""

    def __init__(self, width):
        super().__init__(width)
        self.first, self.second = Adds(self.norm_a, self.mix), Adds(self.norm_b, self.turn)

    def forward(self, x):
        return self.second(self.first(x))


class Adds(nn.Module):
    def __init__(self, norm, work):
        super().__init__()
        self.norm, self.work = norm, work

    def forward(self, x):
        return self.work(self.norm(x)) + x


class Doubled(Block):
    """A sublayer that adds the residual itself, added to the residual once more."""

    inner = Adds

    def __init__(self, width):
        super().__init__(width)
        self.first = self.inner(self.norm_a, self.mix)

    def forward(self, x):
        x = x + self.first(x)
        return x + self.turn(self.norm_b(x))


class Shares(Adds):
    """Experts, one of which gives what came in: a share of it at every token."""

    def __init__(self, norm, work):
        super().__init__(norm, work)
        self.router = nn.Linear(*norm.normalized_shape, 3)

    def weight(self, x):
        return torch.softmax(self.router(x), -1)[..., :1]

    def forward(self, x):
        return self.weight(x) * x + self.work(self.norm(x))


class Picks(Shares):
    """The same, but each token goes to one expert."""

    def weight(self, x):
        return (self.router(x).argmax(-1, keepdim=True) == 0).to(x)


class Scales(Adds):
    def __init__(self, norm, work):
        super().__init__(norm, work)
        self.scale = nn.Parameter(torch.ones(norm.normalized_shape))

    def forward(self, x):
        return self.scale * x + self.work(self.norm(x))


class PassesSome(Doubled):
    inner = Shares


class PassesTokens(Doubled):
    inner = Picks


class PassesChannels(Doubled):
    inner = Scales


class Noisy(Block):
    """Not the same twice, also in evaluation mode."""

    def forward(self, x):
        x = x + self.mix(self.norm_a(x) + torch.randn_like(x))
        return x + self.turn(self.norm_b(x))


class Silent(Block):
    """As initialised in many recipes: nothing is written yet."""

    def __init__(self, width):
        super().__init__(width)
        for linear in (self.mix, self.turn[-1]):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)


class Twins(Block):
    """Two modules with equal weights, whose outputs are the same."""

    def __init__(self, width):
        super().__init__(width)
        self.twin = copy.deepcopy(self.mix)

    def forward(self, x):
        n = self.norm_a(x)
        x = x + self.mix(n) + self.twin(n)
        return x + self.turn(self.norm_b(x))


class Gated(Block):
    def __init__(self, width):
        super().__init__(width)
        self.gate = nn.Linear(width, 1)

    def forward(self, x):
        x = x + self.mix(self.norm_a(x))
        n = self.norm_b(x)
        return x + torch.sigmoid(self.gate(n)) * self.turn(n)


class Biased(Block):
    def __init__(self, width):
        super().__init__(width)
        self.extra = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x + self.mix(self.norm_a(x)) + self.extra
        return x + self.turn(self.norm_b(x))


class PerChannel(Biased):
    def forward(self, x):
        x = x + self.extra * self.mix(self.norm_a(x))
        return x + self.turn(self.norm_b(x))


class ReadsMore(Block):
    """What one norm reads is not the residual alone, though everything added is seen."""

    def forward(self, x):
        return x + self.mix(self.norm_a(x + x.roll(1, dims=-1))) + self.turn(self.norm_b(x))


class Closed(Block):
    """A multiplier of 0: the writes are there, and nothing is added."""

    def forward(self, x):
        return x + 0.0 * self.mix(self.norm_a(x))


class Late(Block):
    """A write computed in one layer and added nowhere."""

    def forward(self, x):
        self.norm_b(x)
        return self.turn(x)


class Shrinks(Block):
    """Numbers of its own, of its parameters, and plain literals."""

    def __init__(self, width):
        super().__init__(width)
        self.rate = 0.31
        self.strength = nn.Parameter(torch.tensor(0.4))

    def forward(self, x):
        x = 0.9 * x - self.rate * self.mix(self.norm_a(x))
        return x / 2 + self.strength * self.turn(self.norm_b(x))


class NormsWithoutAModule(Block):
    """The second sublayer reads what no module reads."""

    def forward(self, x):
        x = x + self.mix(self.norm_a(x))
        return x + self.turn(nn.functional.layer_norm(x, x.shape[-1:]))


class Prenormed(nn.Module):
    def __init__(self, norm, work):
        super().__init__()
        self.norm, self.work = norm, work

    def forward(self, x):
        return self.work(self.norm(x))


class ReadsMoreWrapped(Block):
    """As a sublayer that norms its input itself, and gets more than the residual."""

    def __init__(self, width):
        super().__init__(width)
        self.second = Prenormed(self.norm_b, self.turn)

    def forward(self, x):
        x = x + self.mix(self.norm_a(x))
        return x + self.second(x + 0.5 * x.roll(1, dims=1))
