"""The checks of shapes and types: what they raise for is what jaxtyping's own wrapper raises for."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import checked
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from paceline.blocks import anchor_candidates


def two(a_AB: Float[Tensor, "A B"], b_BC: Float[Tensor, "B C"]) -> Float[Tensor, "A C"]:
    return a_AB[:, :1] @ b_BC[:1]


def transposed(a_AB: Float[Tensor, "A B"]) -> Float[Tensor, "A B"]:
    return a_AB.T


def inside(many: list[Float[Tensor, "A"]], one_A: Float[Tensor, "A"] | None = None) -> None:
    pass


def plain(count: int, *names: str, loud: bool = False) -> str:
    return names[0] if names else count  # type: ignore[return-value]


def quoted(count: "int") -> "str":
    return count  # type: ignore[return-value]


def rows(count: int) -> Iterator[int]:
    yield from range(count)


@dataclasses.dataclass
class Pair:
    a_A: Float[Tensor, "A"]
    b_A: Float[Tensor, "A"]


def raises(call: Callable[..., Any], arguments: tuple[Any, ...], more: dict[str, Any]) -> bool:
    try:
        call(*arguments, **more)
    except TypeCheckError:
        return True
    return False


@pytest.mark.parametrize(
    ("call", "arguments", "more", "wrong"),
    [
        (two, (torch.ones(2, 3), torch.ones(3, 4)), {}, False),
        (two, (torch.ones(2, 3), torch.ones(2, 4)), {}, True),  # axes of two arguments
        (two, (torch.ones(2), torch.ones(3, 4)), {}, True),
        (two, (torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 4)), {}, True),
        (transposed, (torch.ones(3, 3),), {}, False),
        (transposed, (torch.ones(2, 3),), {}, True),  # an argument and the result
        (inside, ([torch.ones(2)], torch.ones(2)), {}, False),
        (inside, ([torch.ones(2)],), {}, False),
        (inside, ([torch.ones(2)],), {"one_A": torch.ones(3)}, True),
        (plain, (1, "a"), {"loud": True}, False),
        (plain, ("1", "a"), {}, True),
        (plain, (1, 2), {}, True),
        (plain, (1, "a"), {"loud": 1}, True),
        (plain, (1,), {}, True),  # the result
        (quoted, (1,), {}, True),
        (rows, (1,), {}, False),
        (rows, ("1",), {}, True),
        (Pair, (torch.ones(2), torch.ones(2)), {}, False),
        (Pair, (torch.ones(2), torch.ones(3)), {}, True),
    ],
)
def test_the_same_calls_are_wrong_as_with_jaxtyping_alone(
    call: Any, arguments: tuple[Any, ...], more: dict[str, Any], wrong: bool
) -> None:
    def fresh() -> Any:  # wrapping a class changes it
        return dataclasses.make_dataclass("Pair", Pair.__annotations__.items()) if isinstance(call, type) else call

    stock = checked.stock(fresh(), typechecker=beartype)
    assert raises(stock, arguments, more) is wrong
    assert raises(checked.jaxtyped(fresh(), typechecker=beartype), arguments, more) is wrong


def test_paceline_is_checked() -> None:
    with pytest.raises(TypeCheckError, match="anchor_candidates"):
        anchor_candidates(torch.ones(2, 3))  # type: ignore[arg-type]


def test_checks_can_be_switched_off(traceable: None) -> None:
    assert checked.jaxtyped(plain, typechecker=beartype)(1) == 1


def test_shapes_of_one_call_are_forgotten_before_the_next() -> None:
    call = checked.jaxtyped(inside, typechecker=beartype)
    for size in 2, 3:
        call([torch.ones(size)], torch.ones(size))
