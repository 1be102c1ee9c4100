"""One tiny forward pass of any model: which modules ran, in which order, on what, and what came out.

So that what follows depends on the wiring alone and not on the weights, the probe feeds **random vectors** where
weights would decide: into the first layer, out of every projection to the residual's width, and out of every module
that gives nothing but zeros. Each has its own size at every token. Two modules can then never look alike, none is
silent, and a norm cannot pass for a multiplier. The model itself stays as it is.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.errors import CaptureError
from resinspect.families.forward import call, evaluating, vocabulary

ROWS, TOKENS = 2, 5


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        path: Name of the module.
        module: The module.
        number: How often it ran before.
        inside: The calls around it, outermost first.
        start: When it began, in steps of a clock that also counts ends.
        stop: When it ended.
        slot: Which argument is ``read``: a position or a keyword.
        read: Its first input ``(row, token, width)``, a copy.
        item: Which item of its output is ``written``, None for all of it.
        written: Its output ``(row, token, width)``, a copy.

    Rows and tokens may be one dimension where the module runs; the copies have both.
    """

    path: str
    module: nn.Module
    number: int
    inside: tuple["Call", ...]
    start: int
    stop: int = -1
    slot: int | str = 0
    read: Tensor | None = None
    item: int | None = None
    written: Tensor | None = None

    @property
    def leaf(self) -> bool:
        """Whether its module has no modules of its own."""
        return next(self.module.children(), None) is None


@dataclass
class Probe:
    """What was seen.

    Attributes:
        stack: Path of the list of layers.
        layers: The one call of each layer, in the order in which they ran.
        calls: All calls from the first layer on, in the order in which they began.
        count: How often each module ran.
        why: Where there is nothing to see, one clause that says why.
        ids: The tokens.
    """

    stack: str = ""
    layers: list[Call] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    count: Counter[nn.Module] = field(default_factory=Counter)
    why: str = ""
    ids: Tensor | None = None


def probe(model: nn.Module) -> Probe:
    """Run a model on a few made-up tokens and record its layers."""
    stacks = dict(_stacks(model))
    if not stacks:
        return Probe(why="it has no list of layers that all have modules of their own")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return Probe(why="its tensors are on the meta device, so that it cannot be run; load its weights first")
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    # Where the vocabulary cannot be told, ids that no embedding of the model lacks.
    known = vocabulary(model) or min(tables, default=0)
    if not known:
        return Probe(why="it has no embedding of token ids")
    recorder = _Recorder({module for layers in stacks.values() for module in layers})
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.randint(known, (ROWS, TOKENS), generator=recorder.generator).to(device)
    try:
        with evaluating(model), recorder.attached(model):
            call(model, ids, use_cache=False, return_dict=True)
    except CaptureError as failed:
        error = failed.__cause__ or failed
        return Probe(why=f"it does not run on token ids alone ({type(error).__name__}: {_first_line(error)})")
    return replace(_seen(stacks, recorder), ids=ids)


def _stacks(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Outermost lists of modules that have modules of their own, with their paths."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) or path.startswith(inside or ("\0",)):
            continue
        layers = [*module.values()] if isinstance(module, nn.ModuleDict) else [*module]
        if layers and all(layer is not None and next(layer.children(), None) is not None for layer in layers):
            inside += (f"{path}.",)
            yield path, layers


def _seen(stacks: dict[str, list[nn.Module]], recorder: "_Recorder") -> Probe:
    ran = {path: layers for path, layers in stacks.items() if any(recorder.count[layer] for layer in layers)}
    if not ran:
        return Probe(why=f"the modules in its lists of layers ({', '.join(stacks)}) never run as a whole")
    if len(ran) > 1:
        return Probe(why=f"it has not one but several lists of layers that run ({', '.join(ran)})")
    ((path, layers),) = ran.items()
    calls = [c for c in recorder.calls if c.module in set(layers)]
    if repeated := [c.path for c in calls if c.number]:
        return Probe(why=f"its layer {repeated[0]!r} runs several times in one forward pass")
    if len(calls) != len(layers):
        return Probe(why=f"only {len(calls)} of the {len(layers)} layers in {path!r} ran")
    shapes = {tuple(v.shape) for c in calls for v in (c.read, c.written) if v is not None}
    if len(shapes) != 1 or any(c.read is None or c.written is None for c in calls):
        return Probe(why=f"its layers in {path!r} do not all take and give one tensor (batch, token, channel)")
    later = [c for c in recorder.calls if c.start >= calls[0].start]
    return Probe(path, calls, later, recorder.count)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")[:120]


class _Recorder:
    """Watches every module of a model for one forward pass.

    Args:
        layers: Those whose input tells the width of the residual; the first that runs gets a random one.
    """

    def __init__(self, layers: set[nn.Module]) -> None:
        self.layers, self.width = layers, 0
        self.calls: list[Call] = []
        self.count: Counter[nn.Module] = Counter()
        self.generator = torch.Generator().manual_seed(0)
        self._open: list[Call] = []
        self._clock = 0

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Hooks on every module, removed on the way out."""
        handles = []
        try:
            for path, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
                handles.append(module.register_forward_hook(self._after, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            new = Call(path, module, self.count[module], tuple(self._open), self._tick())
            self.count[module] += 1
            self.calls.append(new)
            self._open.append(new)
            slot, value = first_input(args, kwargs, self.width)
            if value is None:
                return None
            new.slot = slot
            first = module in self.layers and not self.width
            if first:
                self.width = value.shape[-1]
                value = self._random(value)
            new.read = _grid(value)
            return replaced(args, kwargs, slot, value) if first else None

        return hook

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        done = self._open.pop()
        done.stop = self._tick()
        item, value = (0, output[0]) if isinstance(output, tuple | list) and output else (None, output)
        if not _is_hidden(value, self.width):
            return None
        random = self._decides(done, value)
        value = self._random(value) if random else value
        done.item, done.written = item, _grid(value)
        if not random:
            return None
        return value if item is None else type(output)((value, *output[1:]))

    def _decides(self, done: Call, value: Tensor) -> bool:
        """Whether this output is a matter of weights: a projection to the residual's width, or zeros."""
        if value.shape[-1] != self.width:
            return False
        tensors = [*done.module.parameters(recurse=False), *done.module.buffers(recurse=False)]
        return (done.leaf and any(t.ndim > 1 for t in tensors)) or not bool(value.any())

    def _random(self, like: Tensor) -> Tensor:
        """Normal numbers, at each token times its own factor between 1/2 and 2."""
        size = 2 ** (2 * torch.rand(ROWS * TOKENS, 1, generator=self.generator) - 1)
        values = size * torch.randn(ROWS * TOKENS, like.shape[-1], generator=self.generator)
        return values.view(like.shape).to(like)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any], width: int) -> tuple[int | str, Tensor | None]:
    """What a module works on: its first argument, ``hidden_states``, or the only one it can be."""
    if args:
        return 0, args[0] if _is_hidden(args[0], width) else None
    if _is_hidden(kwargs.get("hidden_states"), width):
        return "hidden_states", kwargs["hidden_states"]
    found = [name for name, value in kwargs.items() if _is_hidden(value, width)]
    return (found[0], kwargs[found[0]]) if len(found) == 1 else (0, None)


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], slot: int | str, value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another first input."""
    return ((value, *args[1:]), kwargs) if slot == 0 else (args, kwargs | {slot: value})


def _is_hidden(value: Any, width: int) -> bool:
    """Whether something holds a vector for each token: ``(row, token, any)``, or flattened ``(row token, width)``."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return (value.ndim == 3 and value.shape[:2] == (ROWS, TOKENS)) or value.shape == (ROWS * TOKENS, width)


def _grid(value: Tensor) -> Tensor:
    """A copy ``(row, token, width)``."""
    return value.detach().to("cpu", copy=True).view(ROWS, TOKENS, -1)
