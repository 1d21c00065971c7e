"""A copy of tensors in host memory, laid out as a safetensors file holds them.

It is written here and not with safetensors.torch.save_file: that tells a full disk by the text of its error alone, and
the checksum would take a second pass. Writing and hashing a piece both release Python's lock, so the training thread
goes on launching.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

# Bytes of a piece. torch rounds pinned memory up to a power of two, so one piece of 9 GiB would take 16.
_PIECE = 2**28
_FORMATS = {torch.float32: "F32", torch.uint8: "U8"}  # as safetensors names them


class HostCopy:
    """Room for a copy of named tensors of float32 and uint8. On CUDA it is pinned: a copy runs at the bus's speed.

    Some may lie in host memory themselves, where work on the device of the others puts them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate. `take` needs tensors of the same names and shapes."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        # Those of wider entries first, so that each begins at a multiple of its entry's size.
        self._order = sorted(tensors, key=lambda name: -tensors[name].element_size())
        size = 0
        for name in self._order:
            tensor = tensors[name]
            assert tensor.dtype in _FORMATS, f"{name} is {tensor.dtype}"
            offsets = [size, size + tensor.nbytes]
            header[name] = {"dtype": _FORMATS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            size += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self._header) + size
        devices = [tensor.device for tensor in tensors.values()]
        self._device = next((device for device in devices if device.type == "cuda"), devices[0])
        cuda = self._device.type == "cuda"
        self._host = cuda and any(device.type == "cpu" for device in devices)
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if cuda else ()  # begin, end
        self.copy_s = 0.0  # how long the last copy held up its stream, once it is written
        sizes = [min(_PIECE, size - first) for first in range(0, size, _PIECE)]
        self._pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=cuda) for size in sizes]

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors as they are now; what their stream does next waits for it.

        The host does not wait, unless some lie in its own memory: then it does for the device, and copies these itself.
        """
        began, (piece, used) = time.monotonic(), (0, 0)
        if self._events:
            self._events[0].record(torch.cuda.current_stream(self._device))
        if self._host:
            torch.cuda.current_stream(self._device).synchronize()
        for name in self._order:
            flat = tensors[name].detach().reshape(-1).view(torch.uint8)
            while len(flat):
                room = self._pieces[piece][used : used + len(flat)]
                room.copy_(flat[: len(room)], non_blocking=True)
                flat = flat[len(room) :]
                used += len(room)
                if used == len(self._pieces[piece]):
                    piece, used = piece + 1, 0
        if self._events:
            self._events[1].record(torch.cuda.current_stream(self._device))
        self.copy_s = time.monotonic() - began

    def write(self, path: Path) -> str:
        """Write what was taken, wait until it is on the disk and return its sha256."""
        if self._events:
            self._events[1].synchronize()
            self.copy_s = self._events[0].elapsed_time(self._events[1]) / 1000
        digest = hashlib.sha256(self._header)
        with path.open("wb") as file:
            file.write(self._header)
            for piece in self._pieces:
                view = memoryview(piece.numpy())  # type: ignore[arg-type]
                for first in range(0, len(view), 2**24):
                    part = view[first : first + 2**24]
                    digest.update(part)
                    file.write(part)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()
