"""The log of transfers: collectives and devices in it, its table, and its pictures of the traffic between devices."""

from __future__ import annotations

import collections
import json
import re
import sys
import tracemalloc
from concurrent import futures
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.registry import shared_memory
from shardtensor.communication.transfer_log import TransferBatch, record_transfer
from shardtensor.host.units import readable
from shardtensor.pictures.traffic_picture import Moved, TextPicture, traffic_picture
from tests.layouts import everywhere, mesh_of
from tests.scripts import new_process, output_of
from tests.timing import within


def devices(count: int, backend: str = "numpy") -> list[st.Device]:
    """Returns devices that need not exist."""
    return [st.Device(backend, i) for i in range(count)]


def ring(count: int, nbytes: int = 1) -> dict[tuple[st.Device, st.Device], int]:
    there = devices(count)
    return {(there[k], there[(k + 1) % count]): nbytes for k in range(count)}


def drawn_of(pairs: dict[tuple[st.Device, st.Device], int], text: bool = False) -> Any:
    """The picture of bytes by (source, destination)."""
    there = {device: k for k, device in enumerate(dict.fromkeys(device for pair in pairs for device in pair))}
    ends = np.array([[there[device] for device in pair] for pair in pairs], np.int64).reshape(-1, 2).T
    return traffic_picture(Moved(list(there), *ends, np.array(list(pairs.values()), np.int64)), text=text)


def mapped(body: Any, mesh: st.Mesh, x: Any) -> st.TransferLog:
    """Returns the log of ``body`` mapped over the rows of x."""
    x = st.device_put(x, st.NamedSharding(mesh, st.P("x")))
    with st.transfers() as log:
        st.shard_map(body, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(x)
    return log


def cells(line: str) -> list[str]:
    """Returns the cells of a line, which are separated by two or more spaces."""
    return re.split(r"  +", line.strip())


def table(log: st.TransferLog) -> list[dict[str, str]]:
    """The printed table's lines, by the titles of its columns."""
    head, rule, *lines, end, total = str(log).splitlines()
    assert rule == end == "─" * len(head)
    assert len({len(line) for line in (head, *lines, total)}) == 1
    found = []
    for line in (*lines, total):
        starts = [(m.start(), m.end()) for m in re.finditer(r"\S+( \S+)*", head)]
        row = {}
        for title, (begin, finish) in zip(cells(head), starts, strict=True):
            left = title in ("operator", "axis", "explicit")
            upto = next((b for b, _ in starts if b > begin), None)
            after = max((f for _, f in starts if f < finish), default=0)
            text = line[begin:upto] if left else line[after:finish]
            row[title] = text.strip()
        found.append(row)
    return found


# -- the table -------------------------------------------------------------------------------------


@everywhere
def test_collectives_have_lines_of_their_own_by_axis(backend: str) -> None:
    mesh = st.make_mesh((2, 2), ("x", "y"), devices=st.devices(backend)[:4])

    def body(block: Any) -> Any:
        return st.ppermute(st.psum(block, "y"), "x", [(0, 1)]) + st.psum(block, ("x", "y"))

    x = st.device_put(np.ones((4, 6)), st.NamedSharding(mesh, st.P("x", "y")))
    with st.transfers() as log:
        st.shard_map(body, mesh=mesh, in_specs=st.P("x", "y"), out_specs=st.P("x", "y"))(x)
        st.sum(x)
    rows = {(row["operator"], row["axis"]): row for row in table(log) if row["bytes"] != "0"}  # without mere copies
    block = 2 * 3 * 8
    assert list(rows) == [("psum", "y"), ("ppermute", "x"), ("psum", "x, y"), ("sum", ""), ("total", "")]
    for key, transfers, nbytes, most in (
        (("psum", "y"), 4, 4 * block, block),  # two devices in two groups: one sends its block, and gets the sum
        (("ppermute", "x"), 2, 2 * block, block),
        (("psum", "x, y"), 6, 6 * block, 2 * block),  # the first one gets them all
        (("sum", ""), 6, 6 * 8, 2 * 8),
    ):
        row = rows[key]
        assert (row["transfers"], row["bytes"]) == (str(transfers), str(nbytes)), key
        assert int(row["copied"]) == (0 if shared_memory(mesh.flat) else nbytes), key
        assert row["explicit"] == "yes"
        if key[1]:
            assert row["per device"] == str(most), key
    assert rows["total", ""]["bytes"] == f"{log.bytes:,}"
    assert {r.axis for r in log if r.operator == "ppermute"} == {"x"}


def test_without_collectives_there_is_no_column_of_axes() -> None:
    x = st.ones((8, 2), dtype="float32", device=mesh_of((4,), "numpy"))
    with st.transfers() as log:
        x[1:] + 1
        st.reshard(x, x.sharding.with_spec(st.P()))
    assert cells(str(log).splitlines()[0]) == ["operator", "explicit", "transfers", "bytes", "copied", "per device"]
    rows = table(log)
    assert [(r["operator"], r["explicit"], r["transfers"], r["bytes"], r["per device"]) for r in rows] == [
        ("getitem", "no", "3", "24", "8"),
        ("reshard", "yes", "12", "192", "48"),
        ("total", "", "15", "216", "56"),
    ]


def test_per_device_leaves_the_host_aside() -> None:
    mesh = mesh_of((4,), "numpy")
    with st.transfers() as log:
        st.device_put(np.ones(1000), mesh)
    assert table(log)[-1]["bytes"] == "8,000"
    assert table(log)[-1]["per device"] == "2,000"


def test_an_empty_log_is_a_table_of_zeros() -> None:
    with st.transfers() as log:
        pass
    (total,) = table(log)
    assert total == {
        "operator": "total",
        "explicit": "",
        "transfers": "0",
        "bytes": "0",
        "copied": "0",
        "per device": "0",
    }
    assert log.by_device() == {}
    assert str(log.picture(text=True)) == "no bytes moved"


def test_figures_are_those_of_the_records_one_by_one() -> None:
    """Batches and single records together, in one log."""
    there = [*devices(6), st.HOST]
    rng = np.random.default_rng(1)
    ends = rng.integers(0, 7, (2, 50))
    sizes = rng.integers(0, 1 << 40, 50)
    with st.transfers() as log:
        for k, explicit, copied in ((10, True, True), (40, False, False)):
            batch = TransferBatch(
                *ends[:, :k], sizes[:k], there.__getitem__, operator="a", explicit=explicit, copied=copied, axis="x"
            )
            record_transfer("a", 0, True, lambda batch=batch: batch)
        single = [st.Transfer(1 << 62, 5, there[0], there[1], "b", True)] * 3  # more than 64 bits together
        record_transfer("b", 0, True, lambda: single)
        record_transfer("c", 0, True, list)
    records = list(log)
    assert records[-3:] == single
    assert [(r.source, r.destination, r.bytes) for r in records[10:50]] == [
        (there[i], there[k], n) for i, k, n in zip(*ends[:, :40].tolist(), sizes[:40].tolist(), strict=True)
    ]
    assert (len(log), log.bytes, log.copied) == (53, sum(r.bytes for r in records), sum(r.copied for r in records))
    groups = [records[:10], records[10:50]]
    *rows, total = table(log)
    assert [row["operator"] for row in rows] == ["a", "a", "b"]
    for row, mine in zip(rows[:2], groups, strict=True):
        assert row["bytes"] == f"{sum(r.bytes for r in mine):,}"
        assert row["copied"] == f"{sum(r.copied for r in mine):,}"
        assert row["per device"] == f"{most_at_a_device(mine):,}"
    assert total["transfers"] == "53"
    assert total["bytes"] == f"{log.bytes:,}"


def most_at_a_device(records: list[st.Transfer]) -> int:
    """Returns the most bytes that a device sends or receives; transfers of the host are not counted."""
    sums: dict[tuple[str, st.Device], int] = collections.Counter()
    for r in records:
        if r.source != r.destination:
            sums["sent", r.source] += r.bytes
            sums["received", r.destination] += r.bytes
    return max(n for (_, device), n in sums.items() if device != st.HOST)


def test_a_million_records_print_at_once() -> None:
    """The limit is a hundred times the time needed, and a tenth of the time of adding the records one by one."""
    count = 1000
    mesh = st.AbstractMesh((count,), ("x",))
    x = st.zeros((count, count), dtype="int8", device=mesh)
    with st.transfers() as log:
        st.reshard(x, st.NamedSharding(mesh, st.P(None, "x")))
    with within(8):
        (row, total), sums, drawn = table(log), log.by_device(), str(log.picture(text=True))
    assert row["transfers"] == total["bytes"] == f"{count * (count - 1):,}"
    assert total["per device"] == f"{count - 1:,}"
    assert set(sums.values()) == {(count - 1, count - 1)}
    assert drawn.startswith("976 KiB from rows to columns, 16 devices to each")


def test_records_take_little_memory() -> None:
    mesh = st.AbstractMesh((300,), ("x",))
    x, columns = st.zeros((300, 300), device=mesh), st.NamedSharding(mesh, st.P(None, "x"))
    with st.transfers():  # plans are kept; they do not count
        st.reshard(x, columns)
    tracemalloc.start()
    with st.transfers() as log:
        st.reshard(x, columns)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(log) == 300 * 299
    assert used < 40 * len(log)


def test_a_log_is_read_while_it_is_written() -> None:
    batch = TransferBatch([0] * 1000, [1] * 1000, [1] * 1000, devices(2).__getitem__, operator="a")
    with st.transfers() as log, futures.ThreadPoolExecutor(4) as pool:
        writers = [
            pool.submit(lambda: [record_transfer("a", 0, True, lambda: batch) for _ in range(50)]) for _ in range(4)
        ]
        while not all(writer.done() for writer in writers):
            row = table(log)[-1]
            assert row["transfers"] == row["bytes"]
        for writer in writers:
            writer.result()
    assert len(log) == log.bytes == 200_000


def test_a_finalizer_records_while_a_record_is_made() -> None:
    """The hash of a device calls the library, as a finalizer does that the garbage collector calls at any moment."""
    here, there = devices(2)
    pending = [True]

    def record(ends: list[st.Device], operator: str) -> None:
        record_transfer(operator, 0, True, lambda: TransferBatch([0], [1], [2], ends.__getitem__, operator=operator))
        record_transfer(operator, 0, True, lambda: [st.Transfer(1, 0, ends[0], ends[1], operator, True)])

    class Finalizing(st.Device):
        def __hash__(self) -> int:
            if pending:
                pending.clear()
                with st.transfers() as inner:
                    record([there, here], "inner")
                assert inner.bytes == log.bytes == 3
            return 0

    with st.transfers() as log:
        record([here, Finalizing("numpy", 9)], "outer")
    assert not pending
    assert [(t.operator, t.source.id, t.destination.id, t.bytes) for t in log] == [
        ("inner", 1, 0, 2), ("inner", 1, 0, 1), ("outer", 0, 9, 2), ("outer", 0, 9, 1)
    ]  # fmt: skip
    assert [row["transfers"] for row in table(log)] == ["1", "1", "1", "1", "4"]


# -- by device -------------------------------------------------------------------------------------


@everywhere
def test_by_device(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    shards = st.shard(np.ones((10, 2), "float32"), devices=mesh)  # of 24, 24, 16 and 16 bytes
    with st.transfers() as log:
        st.pmap(lambda block: st.ppermute(block, "i", [(0, 1), (1, 2), (3, 0)]), shards, axis_name="i")
    first, second, third, last = mesh.flat
    assert log.by_device() == {first: (24, 16), second: (24, 24), third: (0, 24), last: (16, 0)}
    assert list(log.by_device()) == list(mesh.flat)
    with st.transfers() as log:
        np.asarray(st.device_put(np.ones(4, "float32"), mesh))
    assert log.by_device() == {**dict.fromkeys(mesh.flat, (4, 4)), st.HOST: (16, 16)}
    assert list(log.by_device())[-1] == st.HOST


@pytest.mark.parametrize("body", [
    lambda b: st.psum(b, "x"), lambda b: st.all_gather(b, "x", tiled=True), lambda b: st.pbroadcast(b, "x", 2),
    lambda b: st.all_to_all(b, "x", 1, 0, tiled=True), lambda b: st.psum_scatter(b, "x", scatter_dimension=1, tiled=True),
])  # fmt: skip
def test_what_is_sent_is_received(body: Any, backend: str) -> None:
    log = mapped(body, mesh_of((4,), backend), np.ones((8, 8)))
    sums = log.by_device().values()
    assert sum(sent for sent, _ in sums) == sum(received for _, received in sums) == log.bytes > 0


@everywhere
def test_elements_are_converted_where_they_arrive(backend: str) -> None:
    """Each of two devices sends half of one operand, in the operand's dtype."""
    mesh = mesh_of((2,), backend)
    x, y = (st.device_put(np.ones(8, dtype), mesh) for dtype in ("int16", "float64"))
    with st.transfers() as log:
        joined = st.concat([x, y])
    assert joined.dtype == "float64"
    assert sorted(t.bytes for t in log) == [4 * 2, 4 * 8]
    assert st.explain(lambda x, y: st.concat([x, y]), x, y).bytes == log.bytes


def test_copies_within_a_device_are_no_traffic() -> None:
    shards = st.shard(np.ones(8), devices=st.devices("checked")[:4])
    kept: list[Any] = []
    with st.transfers() as log:
        st.pmap(lambda x: kept.append(x + 1) or kept[-1], shards)  # held elsewhere: the result is a copy
    assert log.copied > 0
    assert (log.bytes, log.by_device(), str(log.picture(text=True))) == (0, {}, "no bytes moved")


# -- pictures as text ------------------------------------------------------------------------------


def grid_of(drawn: TextPicture) -> dict[tuple[str, str], str]:
    """The cells of a table of numbers, by their row's and their column's names."""
    _, head, *rows = str(drawn).splitlines()
    assert len({len(line) for line in (head, *rows)}) == 1
    return {
        (name, column): cell for name, *line in map(cells, rows) for column, cell in zip(cells(head), line, strict=True)
    }


@everywhere
def test_numbers(backend: str) -> None:
    mesh = mesh_of((3,), backend)
    log = mapped(lambda block: st.ppermute(block, "x", [(0, 2), (1, 0)]), mesh, np.ones((6, 100)))
    drawn = log.picture(text=True)
    assert str(drawn).splitlines()[0] == "3.12 KiB from rows to columns"
    named = [f"{backend}:{k}" for k in range(3)]
    found = grid_of(drawn)
    kib = {(0, 2): "1.56 KiB", (1, 0): "1.56 KiB"}
    for source in range(3):
        for destination in range(3):
            assert found[named[source], str(destination)] == kib.get((source, destination), "·")
    assert [found[name, "sent"] for name in named] == ["1.56 KiB", "1.56 KiB", "0 B"]
    assert [found[name, "received"] for name in named] == ["1.56 KiB", "0 B", "1.56 KiB"]


def test_the_host_comes_last_and_backends_are_named_where_they_differ() -> None:
    one, other = st.Device("checked", 3), st.Device("numpy", 11)
    found = grid_of(drawn_of({(st.HOST, other): 5, (other, one): 7}, text=True))
    assert found["host", "numpy:11"] == "5 B"
    assert found["numpy:11", "checked:3"] == "7 B"
    assert [row for row, column in found if column == "sent"] == ["checked:3", "numpy:11", "host"]
    found = grid_of(drawn_of({(st.HOST, other): 5}, text=True))
    assert found["host", "11"] == "5 B"


def shades_of(drawn: TextPicture) -> tuple[list[str], list[str], list[list[str]]]:
    """The lines before the rows, the rows of shades, and the cells around them."""
    first, second, head, *rows = str(drawn).splitlines()
    assert len({len(line) for line in (head, *rows)}) == 1
    parts = [cells(row) for row in rows]
    return [first, second], [row[1] for row in parts], [[row[0], *row[2:]] for row in parts]


def test_shades_for_many_devices() -> None:
    there = devices(20)
    moved = {(there[0], there[k]): 100 * k for k in range(1, 20)} | {(there[19], st.HOST): 1}
    (total, legend), rows, ends = shades_of(drawn_of(moved, text=True))
    assert total == "18.6 KiB from rows to columns"
    assert legend == "· none  ░ to 475 B  ▒ to 950 B  ▓ to 1.39 KiB  █ to 1.86 KiB"
    assert rows[0] == "·" + "░" * 4 + "▒" * 5 + "▓" * 5 + "█" * 5 + "·"
    assert rows[1:19] == ["·" * 21] * 18
    assert rows[19:] == ["·" * 20 + "░", "·" * 21]  # the least that was sent shows
    assert [name for name, *_ in ends] == [*map(str, there), "host"]
    assert ends[0][1:] == ["18.6 KiB", "0 B"]
    assert ends[20][1:] == ["0 B", "1 B"]


def test_thousands_of_devices_share_rows() -> None:
    moved = ring(4096, 1 << 20) | {(st.HOST, st.Device("numpy", 4095)): 7}
    (total, legend), rows, ends = shades_of(drawn_of(moved, text=True))
    assert total == "4 GiB from rows to columns, 64 devices to each"
    assert legend.endswith("█ to 63 MiB")
    assert len(rows) == 65
    for k, row in enumerate(rows[:64]):
        wanted = {k: "█", (k + 1) % 64: "░"}
        assert row == "".join(wanted.get(j, "·") for j in range(65))
    assert rows[64] == "·" * 63 + "░" + "·"
    assert [name for name, *_ in ends][::32] == ["numpy:0..63", "numpy:2048..2111", "host"]
    assert ends[3][1:] == ["64 MiB", "64 MiB"]


def test_a_table_of_numbers_is_at_most_120_wide() -> None:
    moved = {(a, b): 1023 << 10 for a in devices(12, "backend") for b in devices(12, "backend") if a != b}
    narrow = str(drawn_of(dict.fromkeys(moved, 1), text=True))
    assert "1 B" in narrow.splitlines()[2]
    for drawn in (narrow, str(drawn_of(moved, text=True))):
        assert max(map(len, drawn.splitlines())) <= 120
    assert "█" in str(drawn_of(moved, text=True))


def test_text_in_notebooks() -> None:
    drawn = drawn_of({(st.Device("<b>", 0), st.Device("<b>", 1)): 3}, text=True)
    shown = drawn._repr_html_()
    assert re.fullmatch(r"<pre[^<>]*>[^<>]*</pre>", shown)
    assert "&lt;b&gt;:0" in shown
    assert repr(drawn) == str(drawn)


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (102297, "99.9 KiB"), (102349, "100 KiB"), (102400, "100 KiB"),
    (1023 << 10, "1023 KiB"), ((1 << 20) - 1, "1 MiB"), (10**9, "954 MiB"), (5 << 40, "5 TiB"), (3 << 70, "3072 EiB"),
])  # fmt: skip
def test_readable(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text


# -- figures ---------------------------------------------------------------------------------------


def colorbar_of(figure: Any) -> Any:
    return figure.axes[0].images[0].colorbar


@everywhere
def test_heat_map(backend: str) -> None:
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    mesh = mesh_of((4,), backend)
    x = st.ones((8, 1000), device=mesh)
    with st.transfers() as log:
        st.pmap(lambda part, other: part, st.shard(x, devices=mesh), np.ones(10))
        x[1:] + 1
    figure = log.picture()
    assert isinstance(figure, figure_class)
    (axes,) = [a for a in figure.axes if a.images and a.get_xlabel()]
    (image,) = axes.images
    shown = image.get_array()
    wanted = np.zeros((5, 5))
    wanted[[1, 2, 3], [0, 1, 2]] = 8000
    wanted[4, :4] = 80
    np.testing.assert_array_equal(np.ma.filled(shown, 0), wanted)
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), wanted == 0)
    names = [*map(str, mesh.flat), "host"]
    assert [t.get_text() for t in axes.get_xticklabels()] == [t.get_text() for t in axes.get_yticklabels()] == names
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("to", "from", f"{readable(log.bytes)} moved")
    said = {tuple(map(int, t.get_position())): t.get_text() for t in axes.texts}
    assert said == {(0, 1): "7.81 KiB", (1, 2): "7.81 KiB", (2, 3): "7.81 KiB"} | {(k, 4): "80 B" for k in range(4)}
    figure.draw_without_rendering()
    assert [t.get_text() for t in colorbar_of(figure).ax.get_yticklabels()] == ["0 B", "2.5 KiB", "5 KiB", "7.5 KiB"]
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(("most", "ticks"), [
    (1, ["0 B", "1 B"]), (1 << 20, ["0 B", "256 KiB", "512 KiB", "768 KiB", "1 MiB"]),
    (100 << 20, ["0 B", "25 MiB", "50 MiB", "75 MiB", "100 MiB"]),
])  # fmt: skip
def test_the_colour_bar_has_round_numbers(most: int, ticks: list[str]) -> None:
    pytest.importorskip("matplotlib")
    figure = drawn_of(ring(3, most))
    figure.draw_without_rendering()
    assert [t.get_text() for t in colorbar_of(figure).ax.get_yticklabels()] == ticks


def test_figures_of_many_devices() -> None:
    pytest.importorskip("matplotlib")
    figure = drawn_of(ring(40) | {(st.HOST, st.Device("numpy", 0)): 3})
    axes = figure.axes[0]
    assert axes.images[0].get_array().shape == (41, 41)
    assert not axes.texts
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels == [f"numpy:{k}" for k in range(0, 39, 2)] + ["host"]
    figure = drawn_of(ring(4096))
    assert figure.axes[0].images[0].get_array().shape == (128, 128)
    assert figure.axes[0].get_title() == "4 KiB moved, 32 devices to each"


def test_a_figure_of_nothing() -> None:
    pytest.importorskip("matplotlib")
    figure = drawn_of({})
    assert figure.axes[0].get_title() == "no bytes moved"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_it_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtensor.pictures import traffic_picture as traffic

    traffic._matplotlib_figure.cache_clear()
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    drawn = drawn_of(ring(3))
    assert isinstance(drawn, TextPicture)
    assert str(drawn) == str(drawn_of(ring(3), text=True))


def test_pyplot_is_left_alone_and_text_needs_no_matplotlib() -> None:
    code = (
        "import json, sys, shardtensor as st\n"
        "def loaded(): return [n in sys.modules for n in ('shardtensor.pictures.traffic_picture', 'matplotlib', 'matplotlib.pyplot')]\n"
        "seen = [loaded()]\n"
        "with st.transfers() as log: st.ones(8)[1:] + 1\n"
        "for text in (True, False): log.picture(text=text); seen.append(loaded())\n"
        "print(json.dumps(seen))"
    )
    before, text, figure = json.loads(output_of(new_process("-c", code)))
    assert before == [False, False, False]
    assert text == [True, False, False]
    assert figure[2] is False


def test_notebooks_show_the_table():
    x = st.zeros((8, 2), dtype="float32", device=st.make_mesh((4,), ("<x>",), devices=st.devices("numpy")[:4]))
    with st.transfers() as log:
        x[1:] + 1
        st.shard_map(lambda x: st.psum(x, "<x>"), mesh=x.sharding.mesh, in_specs=st.P("<x>"), out_specs=st.P())(x)
    rows = [["".join(cell.itertext()) for cell in row] for row in ElementTree.fromstring(log._repr_html_())]
    printed = [line.split() for line in str(log).splitlines() if "─" not in line]
    assert [" ".join(filter(None, row)).split() for row in rows] == printed
    assert rows[0][:3] == ["operator", "axis", "explicit"]
    assert rows[2][:2] == ["psum", "<x>"]
    with st.transfers() as none:
        pass
    assert len(ElementTree.fromstring(none._repr_html_())) == 2
