"""Index arrays on a GPU, on the simulated CuPy: elements are selected there, with NumPy's results and errors."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.interpreters.views import advanced_indexing
from shardtensor.interpreters.writes import scattered_on_device, write_ops
from tests import fakecupy
from tests.backends.test_cupy import launched, machine
from tests.draws import drawn

SHAPE = (6, 4, 5)


@some.composite
def indices(draw: Any) -> tuple[Any, ...]:
    """An index with arrays of integers, perhaps one out of bounds, or a mask at its beginning."""
    rng = np.random.default_rng(draw(some.integers(0, 99)))
    if draw(some.integers(0, 3)) == 0:
        mask = rng.random(SHAPE[: draw(some.integers(1, 3))]) > draw(some.sampled_from([0.5, 2.0]))
        rest = len(SHAPE) - mask.ndim
        return (mask, *draw(some.sampled_from([(), (slice(1, None),)[:rest], (slice(None, None, -1),)[:rest]])))
    block = draw(some.sampled_from([(3,), (2, 2), (0,), (1, 3)]))
    entries: list[Any] = []
    for size in SHAPE[: draw(some.integers(1, 3))]:
        kind = draw(some.sampled_from(["array", "array", "slice", "integer", "wrong"]))
        if kind == "slice":
            entries.append(draw(some.sampled_from([slice(None), slice(1, 3), slice(None, None, -2)])))
        elif kind == "integer":
            entries.append(draw(some.integers(-size, size - 1)))
        else:
            array = rng.integers(-size, size, block).astype(draw(some.sampled_from(["i8", "i4", "i1"])))
            if kind == "wrong" and array.size:
                array.flat[-1] = draw(some.sampled_from([size, -size - 1]))
            entries.append(array)
    if draw(some.booleans()):
        entries.insert(draw(some.integers(0, len(entries))), None)
    if draw(some.booleans()):
        entries.append(Ellipsis)
    return tuple(entries)


@hypothesis.given(index=indices(), data=some.data())
@hypothesis.settings(max_examples=drawn(100), deadline=None)
def test_selected_elements(index: tuple[Any, ...], data: Any) -> None:
    host = np.arange(float(np.prod(SHAPE))).reshape(SHAPE)
    with machine(4, devices=1) as m:
        spec = data.draw(some.sampled_from([st.P(), st.P("d"), st.P(None, "d"), st.P(None, None, "d")]))
        x = st.device_put(host, st.NamedSharding(m.mesh(), spec))
        mesh = st.make_mesh((4,), ("d",), devices=st.devices("numpy")[:4])
        drawn_places = [data.draw(some.booleans()) for _ in index]

        def placed(mesh: st.Mesh) -> tuple[Any, ...]:
            """Returns the index with tensors on a mesh, which are split or on one device."""
            where = [st.NamedSharding(mesh, st.P("d")) if split else mesh.flat[2] for split in drawn_places]
            pairs = zip(index, where, strict=True)
            return tuple([st.device_put(e, at) if isinstance(e, np.ndarray) else e for e, at in pairs])

        given = placed(m.mesh())
        try:
            wanted = host[index]
        except IndexError:
            with pytest.raises(st.IndexingError, match="out of bounds"):
                x[given]
            return
        found = x[given]
        np.testing.assert_array_equal(np.asarray(found), wanted, strict=True)
        on_host = st.device_put(host, st.NamedSharding(mesh, spec))[placed(mesh)]
        assert found.sharding.spec == on_host.sharding.spec


@hypothesis.given(index=indices(), data=some.data())
@hypothesis.settings(max_examples=drawn(100), deadline=None)
def test_written_elements(index: tuple[Any, ...], data: Any) -> None:
    host = np.arange(float(np.prod(SHAPE))).reshape(SHAPE)
    with machine(4, devices=1) as m:
        spec = data.draw(some.sampled_from([st.P(), st.P("d"), st.P(None, "d")]))
        where = st.NamedSharding(m.mesh(), spec)
        turned = data.draw(some.booleans())
        x = st.device_put(host[::-1] if turned else host, where)
        view, answer = x[::-1] if turned else x, host.copy()
        place = data.draw(some.sampled_from([st.NamedSharding(m.mesh(), st.P("d")), m.devices[2]]))
        given = tuple([st.device_put(e, place) if isinstance(e, np.ndarray) else e for e in index])
        try:
            shape = host[index].shape
        except IndexError:
            with pytest.raises(st.IndexingError, match="out of bounds"):
                view[given] = 1
            return
        kept = tuple(n if data.draw(some.booleans()) else 1 for n in shape)
        value = -1.0 - np.arange(float(np.prod(kept))).reshape(kept)
        kinds = {"tensor": lambda: st.device_put(value, place if value.ndim else m.devices[1]), "host": lambda: value}
        kind = data.draw(some.sampled_from(["tensor", "host", "scalar", "own"]))
        if kind == "own":
            value = answer.reshape(-1)[: value.size].reshape(kept).copy()
            view[given] = view.reshape(-1)[: value.size].reshape(kept)
        elif kind == "scalar":
            value = np.float64(-7.0)
            view[given] = -7
        else:
            view[given] = kinds[kind]()
        answer[index] = value
        np.testing.assert_array_equal(np.asarray(view), answer)


@pytest.mark.parametrize("dtype", ["i1", "u1", "u2", "i8", "u8"])
def test_narrow_indices_of_long_dimensions(dtype: str) -> None:
    host, index = np.arange(300.0), np.array([0, 127, 5], dtype)
    with machine(1, devices=1) as m:
        x, i = [st.device_put(a, m.devices[0]) for a in (host, index)]
        np.testing.assert_array_equal(np.asarray(x[i]), host[index])
        x[i] = st.device_put(np.array([1.0, 2, 3]), m.devices[0])
        host[index] = [1, 2, 3]
        np.testing.assert_array_equal(np.asarray(x), host)


@pytest.mark.parametrize("dense", [0, 16])
def test_the_last_value_is_written(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattered_on_device, "_DENSE", dense)
    index = np.array([3, -7, 3, 0, 3, -10])
    with machine(1, devices=1) as m:
        x = st.device_put(np.zeros((10, 2)), m.devices[0])
        x[st.device_put(index, m.devices[0])] = st.device_put(np.arange(12.0).reshape(6, 2), m.devices[0])
        answer = np.zeros((10, 2))
        answer[index] = np.arange(12.0).reshape(6, 2)
        np.testing.assert_array_equal(np.asarray(x), answer)


def test_the_host_reads_no_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    host, index = np.arange(40.0).reshape(10, 4), np.arange(1000) % 10
    with machine(8, devices=1) as m:
        where = st.NamedSharding(m.mesh(), st.P("d"))
        x, i, mask = [st.device_put(a, where) for a in (host, index, host[:, 0] > 9)]
        plans: list[Any] = []
        monkeypatch.setattr(advanced_indexing, "_selected", lambda *args: plans.append(args))
        names, before = launched(monkeypatch), fakecupy.waits
        found = [x[i], st.take(x, i, axis=0), x[mask]]
        assert not plans
        assert fakecupy.waits - before <= 3, "the bounds of indices, and the number of true elements"
        assert len(names) <= 20
        y = x.copy()
        monkeypatch.setattr(write_ops.Scattered, "stage", lambda *args: plans.append(args))
        before = fakecupy.waits
        y[i[:5]] = 0
        y[i[:5]] = x[5:]
        y[mask] = x[3:]
        assert fakecupy.waits - before <= 3
        assert not plans
        for y, wanted in zip(found, (host[index], host[index], host[3:]), strict=True):
            np.testing.assert_array_equal(np.asarray(y), wanted)
        monkeypatch.undo()
        with st.transfers():  # The messages that separate memories would send are recorded.
            np.testing.assert_array_equal(np.asarray(x[i]), host[index])


def test_other_arrays_are_read_by_the_host() -> None:
    host = np.arange(40.0).reshape(10, 4)
    with machine(4, devices=2) as m:
        x = st.device_put(host, m.devices[0])
        far, mask = st.device_put(np.array([9, 0]), m.devices[3]), st.device_put(host[0] > 1, m.devices[0])
        np.testing.assert_array_equal(np.asarray(x[far]), host[[9, 0]])
        np.testing.assert_array_equal(np.asarray(x[:, mask]), host[:, 2:])
        np.testing.assert_array_equal(
            np.asarray(x[st.device_put(np.array([1, 2]), m.devices[0]), [3, 0]]), host[[1, 2], [3, 0]]
        )
        with pytest.raises(st.IndexingError, match="mask of shape"):
            x[mask]
        with pytest.raises(st.IndexingError, match="indices for a tensor"):
            x[far, far, far]
