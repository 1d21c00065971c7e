"""Devices by name, refused in one sentence before anything is loaded."""

import re

import torch

from paceline.records import UserError


def check_device(name: str, key: str) -> None:
    """Refuse a device that is not `cpu` or a `cuda:N` of this machine; `key` says where it was set.

    Raises:
        UserError: the name is another one, or there is no such GPU.
    """
    kind, _, index = name.partition(":")
    if not re.fullmatch("cpu|cuda:(0|[1-9][0-9]{0,3})", name):  # torch knows no cuda:01 and no other digits
        raise UserError(f"{key} must be cpu or cuda:N, got {name!r}. Write for example cuda:0.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
        raise UserError(f"{key} names {name}, but this machine has {there}. Use one that is there, or cpu.")


def device_name(device: str | torch.device) -> str:
    """Return what a GPU is called by its maker, or `cpu`."""
    where = torch.device(device)
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
