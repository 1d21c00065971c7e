"""A decoder whose layers lie on several devices, each of which computes the next micro-batch meanwhile.

Stage n is a run of layers on device n; the embedding, positions and masks are made on the first one. The model's own
forward runs through all of them, in one thread a micro-batch: what a layer is called with is carried to its device
before it is called. A stage takes one thread at a time. Who goes on to the next stage lets go of the one before only
there, so micro-batches keep their order, and stage 2 works on one while stage 1 works on the one behind it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.records import UserError
from paceline.target.load import TargetFacts, load_trunk
from paceline.target.weights import is_embedding, layer_entries, layer_of


def split_layers(sizes: Sequence[int], first: int, stages: int) -> tuple[int, ...]:
    """Return how many layers each stage gets: runs of which the largest is as small as can be, `first` counted in the
    first. Of splits that are as good, the one with most layers in front.

    Raises:
        UserError: there are fewer layers than stages.
    """
    if len(sizes) < stages:
        raise UserError(
            f"target.devices_per_replica must not exceed the layers up to the deepest tap ({len(sizes)}), got {stages}."
            " Lower it."
        )
    sums = [0, *accumulate(sizes)]
    # best[n]: of the layers from n on in so many stages, the largest stage's size and the layers of each stage
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        n: (sums[-1] - sums[n], (len(sizes) - n,)) for n in range(len(sizes))
    }
    for left in range(2, stages + 1):
        own = first if left == stages else 0
        before, best = best, {}
        for n in range(len(sizes) - left + 1):
            ways = [
                (max(own + sums[end] - sums[n], before[end][0]), (end - n, *before[end][1]))
                for end in range(n + 1, len(sizes) - left + 2)
            ]
            best[n] = min(ways, key=lambda way: (way[0], [-count for count in way[1]]))
    return best[0][1]


class Sent(NamedTuple):
    """A tensor on its way to another device."""

    tensor: Tensor
    event: torch.cuda.Event | None  # once it is there; None: it is

    def arrived(self) -> Tensor:
        """Return the tensor for what comes from now on behind it on its device, which waits for it; this thread does
        not."""
        if self.event is not None:
            main = torch.cuda.current_stream(self.tensor.device)
            main.wait_event(self.event)
            self.tensor.record_stream(main)
        return self.tensor


def sent(tensor: Tensor, device: torch.device) -> Sent:
    """Send a tensor to a device. Between GPUs nothing there waits for it yet."""
    if tensor.device == device:
        return Sent(tensor, None)
    if tensor.device.type != "cuda" or device.type != "cuda":
        return Sent(tensor.to(device), None)
    # Torch lets the source wait for all that is under way on the stream of the destination, which is the micro-batch
    # before this one. On a stream for copies alone nothing is but those.
    side = _side(tensor.device, device)
    with torch.cuda.stream(side):
        return Sent(tensor.to(device, non_blocking=True), side.record_event())


@cache
def _side(source: torch.device, device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device on which copies from another one arrive."""
    return torch.cuda.Stream(device)


def load_stages(
    facts: TargetFacts,
    deepest_tap: int,
    *,
    dtype: torch.dtype,
    devices: Sequence[str],
    on_loaded: Callable[[float], None] = lambda share: None,
) -> tuple[Any, "Stages"]:
    """Return what `load_trunk` does with its layers spread over devices, each weight about as much, and where they lie.

    Each file is read once. A weight goes to its device when it is read, and no layer behind the deepest tap is kept: so
    the host holds a few weights of a model that is stored as it is used, and one copy of one that must be made plain.

    Raises:
        UserError: there are fewer layers than devices, or two stages would share weights.
    """
    embedding, layers = layer_entries(facts.folder, deepest_tap)
    stages = Stages(devices, split_layers(layers, embedding, len(devices)))

    def device_of(name: str) -> torch.device:
        layer = layer_of(name)
        if layer is None:
            return stages.devices[0] if is_embedding(name) else torch.device("cpu")
        return stages.devices[stages.stage_of(layer)] if layer <= deepest_tap else torch.device("meta")

    trunk = load_trunk(facts, deepest_tap, dtype=dtype, device=device_of, on_loaded=on_loaded)
    stages.place(trunk)
    return trunk, stages


class Stages:
    """Which layers lie where, and who is in which stage."""

    def __init__(self, devices: Sequence[str], counts: Sequence[int]) -> None:
        """Stage n has `counts[n]` layers on `devices[n]`."""
        self.devices = tuple(map(torch.device, devices))
        ends = [*accumulate(counts)]
        self.ranges = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
        self._locks = [threading.Lock() for _ in devices]
        self._at: dict[threading.Thread, int] = {}  # the stage that each thread is in
        self._failed: dict[threading.Thread, int] = {}  # or was in when it failed
        self._kept = threading.local()

    def stage_of(self, layer: int) -> int:
        """Return the stage of a layer."""
        return next(stage for stage, layers in enumerate(self.ranges) if layer in layers)

    def at(self, thread: threading.Thread) -> int:
        """Return the stage that a thread is in; -1: in none."""
        return self._at.get(thread, -1)

    def where(self, thread: threading.Thread) -> str:
        """Return which layers a thread works at or has failed at, and on which device; "" if at none."""
        stage = self._at.get(thread, self._failed.get(thread))
        if stage is None:
            return ""
        layers = self.ranges[stage]
        return f"layers {layers[0]} to {layers[-1]} on {self.devices[stage]}"

    def place(self, trunk: Any) -> None:
        """Put a decoder's layers where they belong, one at a time, and all else on the first device; from now on its
        forward takes its way through the stages, inside `through`.

        Raises:
            UserError: layers of two stages have a weight in common.
        """
        owners: dict[int, int] = {}
        for index, layer in enumerate(trunk.layers):
            stage = self.stage_of(index)
            for tensor in (*layer.parameters(), *layer.buffers()):
                if owners.setdefault(id(tensor), stage) != stage:
                    raise UserError(
                        "target.devices_per_replica puts layers on several devices, but layers of this target have "
                        "weights in common. Set it to 1."
                    )
        for index, layer in enumerate(trunk.layers):
            layer.to(self.devices[self.stage_of(index)])
        for name, part in trunk.named_children():
            if name != "layers":
                part.to(self.devices[0])
        for own in (*trunk.parameters(recurse=False), *trunk.buffers(recurse=False)):
            own.data = own.data.to(self.devices[0])
        for index, layer in enumerate(trunk.layers):
            layer.register_forward_pre_hook(self._carrier(self.stage_of(index)), with_kwargs=True)

    @contextmanager
    def through(self) -> Iterator[None]:
        """Take one micro-batch through the stages: wait for the first one, and leave whichever this thread is in."""
        me = threading.current_thread()
        self._failed.pop(me, None)
        self._locks[0].acquire()
        self._at[me] = 0
        self._kept.tensors = {}
        try:
            self._set_device(0)
            yield
        except BaseException:
            self._failed[me] = self._at[me]
            raise
        finally:
            self._kept.tensors = {}
            self._locks[self._at.pop(me)].release()

    def carry(self, stage: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Go on to a stage, or stay in it, and return tensors on its device; inside `through`."""
        with self._entering(stage):
            return tuple(sent(tensor, self.devices[stage]).arrived() for tensor in tensors)

    @contextmanager
    def _entering(self, stage: int) -> Iterator[None]:
        """Wait for a stage, and leave the one before once the block has ended: what is sent in it goes before all that
        the next thread does there."""
        me = threading.current_thread()
        before = self._at[me]
        if before == stage:
            yield
            return
        self._locks[stage].acquire()
        self._at[me] = stage
        try:
            self._set_device(stage)
            yield
        finally:
            self._locks[before].release()

    def _set_device(self, stage: int) -> None:
        if self.devices[stage].type == "cuda":  # for kernels that do not ask where their tensors are
            torch.cuda.set_device(self.devices[stage])

    def _carrier(self, stage: int) -> Any:
        def carry(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
            if stage == 0:
                return args, named
            device = self.devices[stage]
            with self._entering(stage):
                # The hidden state is another one each time; masks and angles are the same for all layers of a stage.
                return self._there(args, device, keep=False), {
                    name: self._there(value, device, keep=name != "hidden_states") for name, value in named.items()
                }

        return carry

    def _there(self, value: Any, device: torch.device, *, keep: bool) -> Any:
        if isinstance(value, Tensor):
            if not keep or value.device == device:
                return sent(value, device).arrived()
            kept = self._kept.tensors
            if (id(value), device) not in kept:
                # With the first one, whose id is given to no other one meanwhile.
                kept[id(value), device] = value, sent(value, device).arrived()
            return kept[id(value), device][1]
        if type(value) in (tuple, list):
            return type(value)(self._there(one, device, keep=keep) for one in value)
        if type(value) is dict:
            return {key: self._there(one, device, keep=keep) for key, one in value.items()}
        return value
