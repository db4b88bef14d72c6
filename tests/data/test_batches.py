"""`Batches`: the same ones on all devices, states, errors at their steps, and threads that end."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.data.order import shuffled
from shardtensor.errors import ArgumentError
from tests.draws import drawn
from tests.host.test_fork import scripted

KEY = st.random.key(7)
X = np.arange(53 * 3, dtype="f4").reshape(53, 3)
Y = np.arange(53)


def is_reading(thread: threading.Thread) -> bool:
    return thread.name == "shardtensor-batches"


def threads(seconds: float = 5) -> list[threading.Thread]:
    """The threads that read, once those that have been told to end are gone."""
    end = time.monotonic() + seconds
    while (found := list(filter(is_reading, threading.enumerate()))) and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not threads()


def expected(step: int, batch: int = 8, rows: int = 53, key: Any = KEY, drop_last: bool = False) -> Any:
    """The rows of a step."""
    epoch, k = divmod(step, rows // batch if drop_last else -(-rows // batch))
    order = shuffled(np.arange(rows), rows, key.seed | key.stream << 64, epoch)
    return order[k * batch : (k + 1) * batch]


def meshes() -> dict[str, Any]:
    devices, checked, grouped = st.devices("numpy"), st.devices("checked"), st.devices("grouped")
    return {
        "1": st.make_mesh((1,), ("d",), devices=devices[:1]),
        "2": st.make_mesh((2,), ("d",), devices=devices[:2]),
        "8": st.make_mesh((8,), ("d",), devices=devices),
        "2 x 4": st.make_mesh((2, 4), ("data", "model"), devices=devices),
        "checked": st.make_mesh((3,), ("d",), devices=checked[:3]),
        "checked 2 x 4": st.make_mesh((2, 4), ("data", "model"), devices=checked),
        "grouped": st.make_mesh((8,), ("d",), devices=grouped[:8]),
        "cupy": st.make_mesh((2,), ("d",), devices=st.devices("cupy")[:2]),
    }


@pytest.mark.parametrize("name", ["1", "2", "8", "2 x 4", "checked", "checked 2 x 4", "grouped", "cupy"])
def test_the_same_batches_on_all_devices(name: str) -> None:
    """Also where columns are split, where batches are replicated, and where a batch has fewer rows than devices."""
    mesh = meshes()[name]
    axes = mesh.axis_names
    source = {"x": X, "y": Y, "t": st.device_put(X, st.NamedSharding(mesh, st.P(axes[0])))}
    for spec in (st.P(axes[0]), st.P(), st.P(None, axes[-1]), st.P(*axes)):
        sharding = {name: st.NamedSharding(mesh, spec) for name in "xt"} | {"y": st.NamedSharding(mesh, st.P(axes))}
        with st.data.Batches(source, 17, key=KEY, epochs=2, sharding=sharding) as batches:
            assert len(batches) == 8
            for step, batch in enumerate(batches):
                rows = expected(step, 17)
                assert len(rows) == (17, 17, 17, 2)[step % 4]
                assert batch["x"].sharding == batch["t"].sharding == sharding["x"]
                for found, given_ in (("x", X), ("t", X), ("y", Y)):
                    assert np.array_equal(batch[found], given_[rows])


def test_the_default_layout_and_bare_specs() -> None:
    with st.data.Batches((X, Y), 8, key=KEY) as batches:
        x, y = next(batches)
        assert x.sharding == y.sharding == st.asarray(X).sharding
        assert not x._aval.committed
    mesh = meshes()["2 x 4"]
    with st.use_mesh(mesh), st.data.Batches((X, Y), 8, key=KEY, sharding=st.P("data")) as batches:
        assert [a.sharding for a in next(batches)] == [st.NamedSharding(mesh, st.P("data"))] * 2
    with st.data.Batches((X, Y), 8, key=KEY, sharding=(mesh, st.devices()[3])) as batches:
        assert next(batches)[1].device == st.devices()[3]


def test_batches_can_be_written_and_kept() -> None:
    """No batch shares its memory with the source, with another batch or with a copy on another device."""
    x = X.copy()
    for sharding in (None, st.NamedSharding(meshes()["checked"], st.P())):
        with st.data.Batches(x, 8, shuffle=False, sharding=sharding) as batches:
            first = next(batches)
            first[...] = -1
            second = next(batches)
            assert np.array_equal(second, X[8:16])
            assert np.array_equal(first, np.full((8, 3), -1))
    tensor = st.asarray(x)
    with st.data.Batches(tensor, 53, shuffle=False) as batches:
        next(batches)[...] = 0
    assert np.array_equal(tensor, X)
    assert np.array_equal(x, X)


def test_meshes_without_devices() -> None:
    mesh = st.AbstractMesh((64,), ("data",))
    with st.data.Batches(X, 17, key=KEY, sharding=st.NamedSharding(mesh, st.P("data"))) as batches:
        assert next(batches).shape == (17, 3)


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
def test_memory_kinds(kind: str) -> None:
    sharding = st.NamedSharding(meshes()["checked"], st.P("d"), memory_kind=kind)
    with st.data.Batches(X, 8, key=KEY, sharding=sharding) as batches:
        batch = next(batches)
        assert batch.sharding == sharding
        assert np.array_equal(batch, X[expected(0)])


@settings(max_examples=drawn(120), deadline=None)
@given(
    rows=some.integers(1, 40), data=some.data(), epochs=some.integers(0, 3), drop_last=some.booleans(),
    shuffle=some.booleans(), ahead=some.integers(0, 3),
)  # fmt: skip
def test_epochs_have_each_row_once(
    rows: int, data: some.DataObject, epochs: int, drop_last: bool, shuffle: bool, ahead: int
) -> None:
    batch = data.draw(some.integers(1, rows))
    with st.data.Batches(
        np.arange(rows), batch, key=KEY, shuffle=shuffle, epochs=epochs, drop_last=drop_last, prefetch=ahead
    ) as batches:
        found = [np.asarray(one).tolist() for one in batches]
        each = rows // batch if drop_last else -(-rows // batch)
        assert (len(found), batches.batches_per_epoch, len(batches)) == (epochs * each, each, epochs * each)
        assert list(batches) == []
    for epoch in range(epochs):
        seen = list(itertools.chain(*found[epoch * each : (epoch + 1) * each]))
        assert len({*seen}) == len(seen) == (each * batch if drop_last else rows)
        assert shuffle or seen == list(range(len(seen)))


@pytest.mark.parametrize("batch", [1, 999, 1500, 5000])
def test_rows_that_are_drawn_together(batch: int) -> None:
    """Those of many batches, of few, and of one that is larger than what is drawn at least."""
    x = np.arange(9000)
    with st.data.Batches(x, batch, key=KEY) as batches:
        batches.restore(batches.state | {"step": max(batches.batches_per_epoch - 2, 0)})
        for step in range(batches.state["step"], batches.state["step"] + 4):
            assert np.array_equal(next(batches), expected(step, batch, 9000))
        batches.restore(batches.state | {"step": 4090 // batch})
        for step in range(4090 // batch, 4090 // batch + 10):
            assert np.array_equal(next(batches), expected(step, batch, 9000))


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_state_of_every_step_is_restored(ahead: int, tmp_path: Path) -> None:
    with st.data.Batches(X, 8, key=KEY, epochs=2, prefetch=ahead) as batches:
        states, found = [batches.state], []
        for batch in batches:
            states.append(batches.state)
            found.append(np.asarray(batch).tobytes())
    assert [state["step"] for state in states] == list(range(15))
    with st.data.Batches(X, 8, key=KEY, epochs=2, prefetch=ahead) as others:
        for step in (*range(15), 3, 14, 0):
            others.restore(states[step])
            assert others.epoch == step // 7
            assert [np.asarray(batch).tobytes() for batch in others] == found[step:]
    st.checkpoint.save(tmp_path / "state", {"data": states[5]})
    mesh = meshes()["checked"]
    with st.data.Batches(X, 8, key=KEY, sharding=st.NamedSharding(mesh, st.P("d"))) as others:
        others.restore(st.checkpoint.restore(tmp_path / "state")["data"])
        assert np.asarray(next(others)).tobytes() == found[5]
        assert others.state["step"] == 6


def test_keys_of_64_bits_are_restored(tmp_path: Path) -> None:
    key = st.random.Key(2**64 - 1, 2**63 + 5)
    with st.data.Batches(X, 8, key=key) as batches:
        next(batches)
        st.checkpoint.save(tmp_path / "state", batches.state)
        second = np.asarray(next(batches))
        batches.restore(st.checkpoint.restore(tmp_path / "state"))
        assert np.array_equal(next(batches), second)


def test_states_of_other_batches_are_errors() -> None:
    state = st.data.Batches(X, 8, key=KEY).state
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"batch": 4}, "it has batch 8; wanted batch 4"),
        ({"source": X[:50], "key": st.random.key(8)}, "it has rows 53, seed 7; wanted rows 50, seed 8"),
        ({"shuffle": False}, "it has shuffle 1, seed 7; wanted shuffle 0, seed 0"),
        ({"drop_last": True}, "it has drop_last 0; wanted drop_last 1"),
    )
    for options, message in cases:
        batches = st.data.Batches(**{"source": X, "batch": 8, "key": KEY, **options})
        with pytest.raises(st.ArgumentError, match=f"^data.Batches.restore: .* in another order: {message}$"):
            batches.restore(state)
    for wrong in (3, {}, state | {"more": 1}):
        with pytest.raises(
            st.ArgumentTypeError, match=r"^data.Batches.restore: state is .*; wanted a dict with step, rows"
        ):
            batches.restore(wrong)  # type: ignore[arg-type]
    with pytest.raises(st.ArgumentTypeError, match=r"^data.Batches.restore: step is a float; wanted an integer"):
        batches.restore({**state, "step": 0.5})  # type: ignore[dict-item]
    with pytest.raises(st.ArgumentError, match=r"step is -1; wanted at least 0"):
        batches.restore(batches.state | {"step": -1})


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({"batch": 54}, st.ArgumentError, "batch is 54; wanted at most 53, the number of rows of the source$"),
    ({"batch": 0}, st.ArgumentError, "batch is 0; wanted at least 1$"),
    ({"batch": 2.5}, st.ArgumentTypeError, "batch is a float; wanted an integer$"),
    ({"key": None}, st.ArgumentError, r"there is no key; wanted key=st.random.key\(0\), or shuffle=False$"),
    ({"key": 3}, st.ArgumentTypeError, "key is an int; wanted a key, such as"),
    ({"epochs": -1}, st.ArgumentError, "epochs is -1; wanted at least 0$"),
    ({"prefetch": -1}, st.ArgumentError, "prefetch is -1; wanted at least 0$"),
    ({"sharding": 3}, st.ArgumentTypeError, "3 is an int; wanted a Device, a Mesh, a NamedSharding or a P"),
    ({"sharding": [st.P(), st.P()]}, st.ArgumentError, "sharding is a list of 2, and source is a leaf"),
])  # fmt: skip
def test_wrong_arguments_are_errors(options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^data.Batches: {message}"):
        st.data.Batches(**{"source": X, "batch": 8, "key": KEY, **options})


def test_an_axis_that_the_mesh_lacks_is_an_error() -> None:
    with st.use_mesh(meshes()["2 x 4"]), pytest.raises(st.ShardingError, match=r"data.Batches.*batches"):
        st.data.Batches(X, 8, key=KEY, sharding=st.P("batches"))
    sharding = st.NamedSharding(meshes()["2 x 4"], st.P("data", "model"))
    with pytest.raises(st.ShardingError, match=r"data.Batches: source\['y'\]"):
        st.data.Batches({"x": X, "y": Y}, 8, key=KEY, sharding=sharding)


def test_the_length_of_endless_batches_is_an_error() -> None:
    batches = st.data.Batches(X, 8, key=KEY)
    assert bool(batches)
    assert repr(batches) == "Batches(53 rows, batch=8, epochs=None, step=0)"
    with pytest.raises(
        st.ArgumentTypeError, match=r"^len: data.Batches is endless; give epochs, or use batches_per_epoch$"
    ):
        len(batches)


class Failing:
    """Items of which some raise errors."""

    def __init__(self, *failing: int, error: BaseException | None = None) -> None:
        self.failing, self.error = {*failing}, error or OSError(5, "broken disk")

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, n: int) -> Any:
        if n in self.failing:
            raise self.error
        return X[n]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("error", [OSError(5, "broken disk"), StopIteration(), IndexError(3)])
def test_errors_of_a_source_are_raised_at_their_step(ahead: int, error: Exception) -> None:
    failing = int(expected(3)[2])
    source = Failing(failing, error=error)
    with st.data.Batches(source, 8, key=KEY, prefetch=ahead) as batches:
        for step in range(3):
            assert np.array_equal(next(batches), X[expected(step)])
        for _ in range(2):
            text = (
                r"^data.Batches: the source raised an error at step 3, for the rows \d+, .*, \.\.\.|"
                + type(error).__name__
            )
            with pytest.raises(st.ArgumentError, match=text) as caught:
                next(batches)
            assert caught.value.__cause__ is error
            assert batches.state["step"] == 3
            assert not threads()
        source.failing.clear()
        for step in range(3, 9):
            assert np.array_equal(next(batches), X[expected(step)])


def test_an_exit_of_a_source_is_raised_as_it_is() -> None:
    with st.data.Batches(Failing(int(expected(1)[0]), error=SystemExit(3)), 8, key=KEY) as batches:
        next(batches)
        with pytest.raises(SystemExit):
            next(batches)


def test_host_arrays_are_sent_explicitly() -> None:
    sharding = st.NamedSharding(meshes()["checked"], st.P("d"))
    with st.data.Batches((X, Y), 8, key=KEY, sharding=sharding) as batches:
        with st.transfer_guard("disallow"):
            next(batches)
        with st.transfers() as log:
            next(batches)
        assert {entry.operator for entry in log} == {"data.Batches"}


def test_errors_of_tensors_are_raised_as_they_are() -> None:
    x = st.asarray(X)
    with st.data.Batches(x, 8, key=KEY) as batches:
        next(batches)
        st.device_put(x, st.devices()[1], donate=True)
        with pytest.raises(st.DonatedError):
            next(batches)


# -- threads ---------------------------------------------------------------------------------------


def test_how_many_batches_are_read_ahead() -> None:
    asked, go = [], threading.Event()

    class Rows:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, n: int) -> Any:
            asked.append(n)
            return n

    for ahead in (0, 1, 2, 5):
        asked.clear()
        with st.data.Batches(Rows(), 1, shuffle=False, prefetch=ahead) as batches:
            for step in range(4):
                assert next(batches).tolist() == [step]
            end = time.monotonic() + 5
            while len(asked) < 5 + ahead and time.monotonic() < end and ahead:
                time.sleep(0.001)
            go.wait(0.02)
            assert asked == [0, *range(4 + ahead)]  # Item 0 is read at the beginning.
            assert batches.state["step"] == 4


def test_threads_end_with_the_iteration_with_errors_and_with_close() -> None:
    batches = st.data.Batches(X, 8, key=KEY, epochs=1)
    assert len(list(batches)) == 7
    assert not threads()
    batches = st.data.Batches(X, 8, key=KEY)

    def interrupted() -> None:
        with batches:
            next(batches)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(filter(is_reading, threading.enumerate()))  # at once
    batches.close()
    assert np.array_equal(next(batches), X[expected(1)])
    batches.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_threads_that_share_an_iterator_get_different_batches(ahead: int) -> None:
    batches, found = st.data.Batches(np.arange(400), 4, key=KEY, epochs=1, prefetch=ahead), list[Any]()
    sharing = [threading.Thread(target=lambda: found.extend(batches), daemon=True) for _ in range(3)]
    for thread in sharing:
        thread.start()
    for thread in sharing:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(np.concatenate(found).tolist()) == list(range(400))


def test_close_ends_the_wait_of_another_thread() -> None:
    reading, go, errors = threading.Event(), threading.Event(), list[Exception]()

    class Rows:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, n: int) -> Any:
            if n:
                reading.set()
                go.wait(30)
            return n

    def taken() -> None:
        try:
            next(batches)
        except ArgumentError as error:
            errors.append(error)

    batches = st.data.Batches(Rows(), 4, shuffle=False)
    waiting = threading.Thread(target=taken, daemon=True)
    waiting.start()
    assert reading.wait(30)
    while batches._reader is None:  # The thread that reads runs before the other one has noted it.
        time.sleep(0.001)
    threading.Timer(0.05, go.set).start()  # The thread that reads ends after the row that it is reading.
    batches.close()
    waiting.join(30)
    assert not waiting.is_alive()
    assert "another thread has called close()" in str(errors[0])
    assert next(batches).tolist() == [0, 1, 2, 3]
    batches.close()


def test_the_thread_ends_when_the_batches_are_deleted() -> None:
    batches = st.data.Batches(Failing(), 8, key=KEY)
    next(batches)
    gone = weakref.ref(batches)
    del batches
    assert gone() is None
    assert not threads()
    batches = st.data.Batches(X, 8, key=KEY)
    cycle = [batches]
    cycle.append(cycle)  # type: ignore[arg-type]
    next(batches)
    del batches, cycle
    gc.collect()
    assert not threads()


def test_the_interpreter_ends_while_batches_are_read() -> None:
    output = scripted(
        """
        class Rows:
            def __len__(self): return 100
            def __getitem__(self, n):
                time.sleep(0.001)
                return n
        batches = st.data.Batches(Rows(), 4, key=st.random.key(0))
        next(batches)
        print("end")
        """
    )
    assert output == "end\n"


def test_a_fork_continues_at_the_same_step_in_both_processes() -> None:
    output = scripted(
        """
        batches = st.data.Batches(np.arange(100), 4, key=st.random.key(0), epochs=1)
        others = list(map(np.asarray, st.data.Batches(np.arange(100), 4, key=st.random.key(0), epochs=1)))
        def check():
            found = list(map(np.asarray, batches))
            assert len(found) == 23 and all(map(np.array_equal, found, others[2:]))
        next(batches), next(batches)
        time.sleep(0.05)
        print(outcome(check))
        check()
        """
    )
    assert output == "0\n"


def test_next_in_a_function_that_is_traced_is_an_error() -> None:
    batches = st.data.Batches(np.arange(10.0), 2, key=st.random.key(0))
    with pytest.raises(ArgumentError, match="next is called in a function that is traced"):
        st.jit(lambda x: x + next(batches))(st.ones(2))
    assert batches.state["step"] == 0
