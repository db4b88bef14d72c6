"""Programs of pandas, which reads tensors like arrays; its own objects are on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.clients.programs import Program, compared, lazily, numbers, on_meshes

pd = lazily("pandas")

VECTOR, TABLE, WHOLE = numbers(37), numbers(19, 7), numbers(37, dtype="int64")


def assigned(xp: Any, x: Any) -> Any:
    frame = pd.DataFrame({"a": np.arange(19)})
    frame["b"] = x[:, 1]
    return frame.to_numpy().tolist()


PROGRAMS: dict[str, tuple[Program, ...]] = {
    "Series": (lambda xp, x: [float(pd.Series(x).sum()), (pd.Series(np.arange(37.0)) + x).tolist()], VECTOR),
    "DataFrame": (lambda xp, x: pd.DataFrame(x, columns=list("abcdefg")).describe().to_numpy().tolist(), TABLE),
    "columns": (lambda xp, x: pd.DataFrame({"a": x[:, 0], "b": x[:, 1]}).to_numpy().tolist(), TABLE),
    "Index": (lambda xp, x: pd.Index(x).tolist(), WHOLE),
    "assignment": (assigned, TABLE),
    "cut": (lambda xp, x: pd.cut(x, 3).codes.tolist(), VECTOR),
    "isna": (lambda xp, x: np.asarray(pd.isna(x)).tolist(), VECTOR),
    "from a frame": (lambda xp, x: xp.asarray(pd.DataFrame(np.asarray(x)).to_numpy()), TABLE),
    "from a series": (lambda xp, x: xp.asarray(pd.Series(np.asarray(x))), VECTOR),
}


@on_meshes
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_numpys(name: str, count: int) -> None:
    compared(*PROGRAMS[name], count=count)
