"""The page `docs/training.md`: its program in four processes, and the rows of its table that have a model axis."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from tests.communication.test_distributed import FULL, launch
from tests.communication.test_engines import NO_GLOO, NO_MPI
from tests.optim.test_zero import mesh_of

PAGE = Path(__file__).parents[2] / "docs" / "training.md"

LAST = "import zlib\nprint(*(zlib.crc32(np.asarray(resumed[name])) for name in sorted(resumed)))\n"
"""What is added to the program: every process prints its parameters."""


def program(folder: Path) -> str:
    """The blocks of which a program consists according to step 7, and the change that it names."""
    code = []
    for step in (1, 3, 6):
        text = re.search(rf"^\*\*{step}\. .*?^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
        assert text
        code.append(text[1])
    changed = code[0].replace("\nrng =", "\nst.distributed.initialize()\nrng =", 1)
    own = code[2].replace("Path(tempfile.mkdtemp())", f"Path({str(folder)!r})")
    assert changed != code[0]
    assert own != code[2]
    return f"{changed}{code[1]}{own}{LAST}"


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("mpi", marks=[FULL, pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)]),
        pytest.param("gloo", marks=[FULL, pytest.mark.skipif(bool(NO_GLOO), reason=NO_GLOO)]),
    ],
)
def test_four_processes_have_the_bits_of_one(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for count in (4, 1):
        folder = tmp_path / f"of_{count}"
        folder.mkdir()
        path = tmp_path / f"train_{count}.py"
        path.write_text(program(folder))
        monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(8 // count))
        status, text = launch(engine, count, str(path), limit=60)
        assert status == 0, text
        lines = [line.split("] ")[1] for line in text.splitlines()]
        assert lines.count("True") == 2 * count
        assert len(lines) == 3 * count, text
        found.append({line for line in lines if line != "True"})
    assert len(found[0]) == 1
    assert found[0] == found[1]


ROWS = 64
SPECS = {"w1": P(None, "model"), "w2": P("model")}


def loss(params: Any, x: Any) -> Any:
    return (st.tanh(x @ params["w1"]) @ params["w2"]).sum()


@pytest.mark.parametrize("n", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_bytes_and_memory_of_tensor_parallelism(n: int) -> None:
    m = 8 // n
    mesh = mesh_of(data=n, model=m)
    device, optimizer = mesh.devices.flat[-1], st.optim.adamw(1e-2)
    arrays = {"w1": np.ones((16, 64), "float32") / 9, "w2": np.ones((64, 8), "float32") / 9}
    layout = {name: st.NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    x = st.device_put(np.ones((ROWS, 16), "float32"), st.NamedSharding(mesh, P("data")))
    size, product = sum(w.nbytes for w in arrays.values()), ROWS * 8 * 4
    expected = {
        0: (3 * size / m, 2 * size),
        1: (size / m + 2 * size / 8, 2 * size),
        2: (size / m + 2 * size / 8, 2 * size),
        3: (3 * size / 8, 2 * size + arrays["w2"].nbytes),
    }
    for level, (held, sent) in expected.items():
        before = st.memory_info(device).bytes_in_use
        params = st.device_put(arrays, layout)
        layouts = st.optim.zero(params, level=level) if level else None
        state = optimizer.init(params if layouts is None else st.reshard(params, layouts.state))
        params = params if layouts is None else st.reshard(params, layouts.params)

        def step(params: Any, state: Any, x: Any, layouts: Any = layouts) -> Any:
            grads = st.grad(lambda params: loss(st.reshard(params, layout), x))(params)
            grads = grads if layouts is None else st.reshard(grads, layouts.grads)
            updates, state = optimizer.update(grads, state, params)
            return st.optim.apply_updates(params, updates), state

        run = st.jit(step, donate_argnums=(0, 1), executor="numpy")
        params, state = run(params, state, x)
        with st.transfers() as log:
            params, state = run(params, state, x)
        assert 0 <= st.memory_info(device).bytes_in_use - before - held <= 64
        assert log.bytes == (n - 1) * sent + 2 * (m - 1) * product, (level, log)
        del params, state
