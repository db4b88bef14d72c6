"""Programs of opt_einsum."""

from __future__ import annotations

import pytest

from tests.clients.programs import Program, compared, numbers, on_meshes

opt_einsum = pytest.importorskip("opt_einsum", reason="opt_einsum is not installed: see the extra `test`")

X, Y, CUBE, VECTOR = numbers(19, 7), numbers(19, 7, seed=1), numbers(5, 11, 7), numbers(37)


def expression(xp, x, y):  # type: ignore[no-untyped-def]
    return opt_einsum.contract_expression("ij,jk->ik", (19, 7), (7, 19))(x, y.T)


def constants(xp, x, y):  # type: ignore[no-untyped-def]
    return opt_einsum.contract_expression("ij,jk,kl->il", (19, 7), y.T, (19, 7), constants=[1])(x, x)


PROGRAMS: dict[str, tuple[Program, ...]] = {
    "three": (lambda xp, x, y: opt_einsum.contract("ij,kj,kl->il", x, y, x), X, Y),
    "batched": (lambda xp, x, y: opt_einsum.contract("abc,bd->acd", x, y), CUBE, numbers(11, 4)),
    "diagonal": (lambda xp, x: opt_einsum.contract("ii->i", x[:7]), X),
    "outer": (lambda xp, x: opt_einsum.contract("i,j->ij", x, x), VECTOR),
    "ellipsis": (lambda xp, x: opt_einsum.contract("...ij,...kj->...ik", x, x), CUBE),
    "expression": (expression, X, Y),
    "constants": (constants, X, Y),
    "path": (lambda xp, x, y: opt_einsum.contract_path("ij,kj,kl->il", x, y, x)[0], X, Y),
}


@on_meshes
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_numpys_and_tensors(name: str, count: int) -> None:
    compared(*PROGRAMS[name], count=count)
