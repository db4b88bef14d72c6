"""Programs of einops' main API and of its array API."""

from __future__ import annotations

from typing import Any

import pytest

from shardtensor.einops import register
from tests.clients.programs import Program, compared, numbers, on_meshes
from tests.scripts import new_process, output_of

einops = pytest.importorskip("einops", reason="einops is not installed: see the extra `test`")
array_api: Any = pytest.importorskip("einops.array_api", reason="einops is not installed: see the extra `test`")
register()  # The backend of another test may have started before einops was imported.

IMAGES, TABLE = numbers(2, 9, 10, 3), numbers(19, 7)

BOTH: dict[str, Any] = {
    "rearrange": lambda e, x: e.rearrange(x, "b h w c -> (b h) (w c)"),
    "split": lambda e, x: e.rearrange(x, "b (h h1) (w w1) c -> b (h w) (h1 w1 c)", h1=3, w1=5),
    "list": lambda e, x: e.rearrange([x[0], x[1]], "b h w c -> h (b w) c"),
    "mean": lambda e, x: e.reduce(x, "b h w c -> b c", "mean"),
    "max": lambda e, x: e.reduce(x, "b (h h1) w c -> h w", "max", h1=3),
    "repeat": lambda e, x: e.repeat(x, "b h w c -> b (h r) w c", r=2),
    "pack": lambda e, x: e.unpack(*e.pack([x, x[:, 0]], "b * c"), "b * c"),
}

MAIN: dict[str, tuple[Program, ...]] = {
    "einsum": (lambda xp, x, y: einops.einsum(x, y, "i j, k j -> i k"), TABLE, TABLE[:4]),
    "any": (lambda xp, x: einops.reduce(x > 0, "b h w c -> w", "any"), IMAGES),
    "new axis": (lambda xp, x: einops.repeat(x, "i j -> n i j m", n=2, m=3), TABLE),
    "parse_shape": (lambda xp, x: einops.parse_shape(x, "b h w _"), IMAGES),
    "asnumpy": (lambda xp, x: einops.asnumpy(x).tolist(), TABLE),
}


@on_meshes
@pytest.mark.parametrize("api", [einops, array_api], ids=["main", "array API"])
@pytest.mark.parametrize("name", BOTH)
def test_both_apis(name: str, api: Any, count: int) -> None:
    compared(lambda xp, x: BOTH[name](api, x), IMAGES, count=count)


@on_meshes
@pytest.mark.parametrize("name", MAIN)
def test_the_main_api(name: str, count: int) -> None:
    compared(*MAIN[name], count=count)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["einops, shardtensor", "shardtensor, einops"])
def test_tensors_are_known_in_either_order_of_imports(order: str) -> None:
    code = f"import {order}; print(einops.rearrange(shardtensor.zeros((2, 3)), 'i j -> j i').shape)"
    assert output_of(new_process("-c", code)) == "(3, 2)\n"


@pytest.mark.slow
def test_a_program_that_imports_einops_later_registers_tensors_itself() -> None:
    code = "import shardtensor as st, shardtensor.einops; x = st.zeros((2, 3)); import einops; st.einops.register(); "
    code += "st.einops.register(); print(einops.rearrange(x, 'i j -> j i').shape)"
    assert output_of(new_process("-c", code)) == "(3, 2)\n"


@pytest.mark.slow
def test_einops_is_not_imported_by_the_package() -> None:
    code = "import sys, shardtensor; shardtensor.zeros(3); print('einops' in sys.modules)"
    assert output_of(new_process("-c", code)) == "False\n"
