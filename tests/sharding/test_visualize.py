"""Pictures of shardings show the devices of each part, in proportion, for any shape: as text, in colors and as HTML."""

from __future__ import annotations

import io
import itertools
import re
import xml.etree.ElementTree as ET
from typing import NamedTuple

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import shardtensor as st
from shardtensor import P
from shardtensor.pictures.html import tensor_html
from tests.layouts import all_specs, put
from tests.scripts import new_process, output_of

ESCAPE = "\x1b["


class Cell(NamedTuple):
    """The lines of a caption, and how many characters and lines the cell has inside."""

    caption: tuple[str, ...]
    width: int
    height: int


def mesh_of(*sizes: int, backend: str = "numpy") -> st.Mesh:
    """Returns a mesh of devices that need not exist: nothing is placed on them."""
    devices = np.empty(int(np.prod(sizes)), object)
    devices[:] = [st.Device(backend, i) for i in range(devices.size)]
    return st.Mesh(devices.reshape(sizes), ("x", "y", "z")[: len(sizes)])


def text(shape: tuple[int, ...], sharding: st.NamedSharding) -> str:
    """The picture without colors; its tables are at most 80 characters wide."""
    out = io.StringIO()
    st.visualize_sharding(shape, sharding, file=out, use_color=False)
    return out.getvalue()


def draw(shape: tuple[int, ...], mesh: st.Mesh, *spec: str | tuple[str, ...] | None) -> str:
    return text(shape, st.NamedSharding(mesh, P(*spec)))


def tables(picture: str) -> list[list[list[Cell]]]:
    """Each table of a picture: its rows of cells. Asserts that every line of a table is as long as the others."""
    found = []
    for drawn in re.findall(r"^┌[^└]*└.*$", picture, re.MULTILINE):
        top, *lines = drawn.splitlines()
        assert {len(line) for line in lines} == {len(top)}
        rows: list[list[list[str]]] = [[]]
        for line in lines[:-1]:
            if line.startswith("├"):
                rows.append([])
            else:
                rows[-1].append(line[1:-1].split("│"))
        found.append([[_cell(column) for column in zip(*row, strict=True)] for row in rows])
    return found


def _cell(lines: tuple[str, ...]) -> Cell:
    (width,) = {len(line) for line in lines}
    return Cell(tuple(line.strip() for line in lines if line.strip()), width, len(lines))


def captions(picture: str) -> list[list[str]]:
    """The captions of the only table, the lines of each joined."""
    (table,) = tables(picture)
    return [[" ".join(cell.caption) for cell in row] for row in table]


# -- text: one dimension and none ------------------------------------------------------------------


def test_one_dimension_is_one_row_in_proportion():
    picture = draw((10,), mesh_of(4), "x")
    assert captions(picture) == [["NUMPY 0 0:3", "NUMPY 1 3:6", "NUMPY 2 6:8", "NUMPY 3 8:10"]]
    a, b, c, d = (cell.width for cell in tables(picture)[0][0])
    assert a == b
    assert c == d
    assert abs(2 * a - 3 * c) <= 2
    assert len(picture.splitlines()) == 4  # the two lines of the captions, and the frame


def test_parts_of_several_axes_alternate_in_size():
    picture = draw((10,), mesh_of(2, 2), ("x", "y"))
    assert captions(picture) == [["NUMPY 0 0:3", "NUMPY 1 3:5", "NUMPY 2 5:8", "NUMPY 3 8:10"]]
    a, b, c, d = (cell.width for cell in tables(picture)[0][0])
    assert (a, b) == (c, d)
    assert abs(2 * a - 3 * b) <= 2


def test_axes_in_the_other_order_put_the_devices_where_they_are():
    picture = draw((8,), mesh_of(2, 2), ("y", "x"))
    assert captions(picture) == [["NUMPY 0 0:2", "NUMPY 2 2:4", "NUMPY 1 4:6", "NUMPY 3 6:8"]]


def test_replicas_are_all_named():
    assert captions(draw((10,), mesh_of(2, 2), "y")) == [["NUMPY 0,2 0:5", "NUMPY 1,3 5:10"]]
    assert captions(draw((10,), mesh_of(4))) == [["NUMPY 0,1,2,3 0:10"]]


def test_no_dimensions_are_one_cell():
    assert captions(draw((), mesh_of(4))) == [["NUMPY 0,1,2,3"]]


def test_ids_that_do_not_fit_are_left_out_visibly():
    ((caption,),) = captions(draw((5,), mesh_of(64)))
    assert re.fullmatch(r"NUMPY (\d+,)+… 0:5", caption)
    named = caption.split(" ")[1].split(",")[:-1]
    assert named == [str(i) for i in range(len(named))]
    assert len(named) > 20


def test_devices_of_several_backends_keep_their_names():
    devices = [*mesh_of(2).flat, *mesh_of(2, backend="cupy").flat]
    assert captions(draw((4,), st.Mesh(devices, "x"))) == [["NUMPY 0,1,CUPY 0,1 0:4"]]


def test_an_index_stands_in_all_cells_or_in_none():
    picture = draw((5_000_000,), mesh_of(8), "x")
    assert captions(picture) == [[f"NUMPY {i}" for i in range(8)]]


# -- text: two dimensions --------------------------------------------------------------------------


def test_two_dimensions_are_a_table_in_proportion():
    picture = draw((5, 9), mesh_of(2, 4), "x", "y")
    assert captions(picture) == [
        ["NUMPY 0 0:3, 0:3", "NUMPY 1 0:3, 3:5", "NUMPY 2 0:3, 5:7", "NUMPY 3 0:3, 7:9"],
        ["NUMPY 4 3:5, 0:3", "NUMPY 5 3:5, 3:5", "NUMPY 6 3:5, 5:7", "NUMPY 7 3:5, 7:9"],
    ]
    (table,) = tables(picture)
    first, second, *_ = (cell.width for cell in table[0])
    assert abs(2 * first - 3 * second) <= 2
    assert 2 * table[0][0].height == 3 * table[1][0].height


def test_a_transposed_spec_splits_the_columns():
    picture = draw((8, 8), mesh_of(4, 2), None, "x")
    wanted = ["NUMPY 0,1 0:8, 0:2", "NUMPY 2,3 0:8, 2:4", "NUMPY 4,5 0:8, 4:6", "NUMPY 6,7 0:8, 6:8"]
    assert captions(picture) == [wanted]
    picture = draw((8, 8), mesh_of(2, 2), "y", "x")
    assert captions(picture) == [["NUMPY 0 0:4, 0:4", "NUMPY 2 0:4, 4:8"], ["NUMPY 1 4:8, 0:4", "NUMPY 3 4:8, 4:8"]]


def test_a_square_is_drawn_as_one():
    (((cell,),),) = tables(draw((6, 6), mesh_of(1)))
    assert cell.width == 2 * cell.height


def test_many_rows_take_a_line_each():
    (table,) = tables(draw((1_000_000, 4), mesh_of(8), "x"))
    assert [cell.height for (cell,) in table] == [1] * 8
    assert table[7][0].caption == ("NUMPY 7  875000:1000000, 0:4",)


@pytest.mark.parametrize("shape", [(64,), (100,), (3, 640)])
def test_columns_that_do_not_fit_go_on_below(shape):
    picture = draw(shape, mesh_of(64), *[None] * (len(shape) - 1), "x")
    found = [cell.caption for table in tables(picture) for row in table for cell in row]
    assert [caption[0] for caption in found] == [f"NUMPY {i}" for i in range(64)]
    grid = st.NamedSharding(mesh_of(64), P(*[None] * (len(shape) - 1), "x")).grid(shape)
    assert [caption[1].split(", ")[-1] for caption in found] == ["{}:{}".format(*grid.box(k)[-1]) for k in range(64)]
    assert max(map(len, picture.splitlines())) <= 80
    titles = [line for line in picture.splitlines() if line.startswith("[")]
    assert len(titles) == len(tables(picture)) > 1
    for title, (row,) in zip(titles, tables(picture), strict=True):
        begin, end = row[0].caption[1].split(":")[-2].split()[-1], row[-1].caption[1].split(":")[-1]
        assert title == f"[{':, ' * (len(shape) - 1)}{begin}:{end}]"


def test_a_table_of_64_devices():
    rows = captions(draw((100, 100), mesh_of(8, 8), "x", "y"))
    assert rows == [[f"NUMPY {8 * i + j}" for j in range(8)] for i in range(8)]


# -- text: more dimensions -------------------------------------------------------------------------


def test_each_block_of_the_leading_dimensions_has_a_table():
    picture = draw((7, 3, 4, 6), mesh_of(2, 2, 2), "x", "y", None, "z")
    titles = [line for line in picture.splitlines() if line.startswith("[")]
    assert titles == ["[0:4, 0:2, :, :]", "[0:4, 2:3, :, :]", "[4:7, 0:2, :, :]", "[4:7, 2:3, :, :]"]
    found = tables(picture)
    for number, table in enumerate(found):
        want = [(f"NUMPY {2 * number}", "0:4, 0:3"), (f"NUMPY {2 * number + 1}", "0:4, 3:6")]
        assert [[cell.caption for cell in row] for row in table] == [want]


def test_whole_leading_dimensions_are_one_table():
    picture = draw((7, 4, 6), mesh_of(2, 2), None, "x", "y")
    assert picture.startswith("[:, :, :]\n")
    assert captions(picture) == [["NUMPY 0 0:2, 0:3", "NUMPY 1 0:2, 3:6"], ["NUMPY 2 2:4, 0:3", "NUMPY 3 2:4, 3:6"]]


# -- text: what is empty, and everything -----------------------------------------------------------


def test_empty_parts_are_mentioned_below():
    picture = draw((3,), mesh_of(5), "x")
    assert captions(picture) == [["NUMPY 0 0:1", "NUMPY 1 1:2", "NUMPY 2 2:3"]]
    assert picture.splitlines()[-1] == "empty on numpy:3, numpy:4"


def test_empty_parts_between_others():
    picture = draw((5,), mesh_of(2, 4), ("x", "y"))
    assert captions(picture) == [["NUMPY 0 0:1", "NUMPY 1 1:2", "NUMPY 2 2:3", "NUMPY 4 3:4", "NUMPY 5 4:5"]]
    assert picture.splitlines()[-1] == "empty on numpy:3, numpy:6, numpy:7"


def test_an_empty_array_has_no_cells():
    assert draw((0, 3), mesh_of(2), "x") == "empty on numpy:0, numpy:1\n"
    assert draw((3, 0), mesh_of(2)) == "empty on numpy:0, numpy:1\n"
    (line,) = draw((0,), mesh_of(64), "x").splitlines()
    assert re.fullmatch(r"empty on (numpy:\d+, )+… \(64 devices\)", line)
    assert len(line) <= 80


@pytest.mark.parametrize("shape", [(), (1,), (3,), (9,), (5, 1), (3, 7), (8, 9), (2, 5, 3), (0, 3), (1, 1)])
def test_every_device_is_where_it_is(shape):
    """For all specs of a mesh, the cells and the last line together name each device once, next to its index."""
    mesh = mesh_of(2, 3)
    for spec in all_specs(mesh, len(shape)):
        sharding = st.NamedSharding(mesh, spec)
        wanted: dict[int, str] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            if all(s.stop > s.start for s in index):
                wanted[device.id] = ", ".join(f"{s.start}:{s.stop}" for s in index[-2:])
        seen: dict[int, str] = {}
        for cell in itertools.chain.from_iterable(itertools.chain.from_iterable(tables(text(shape, sharding)))):
            label, index = [*"  ".join(cell.caption).split("  "), ""][:2]
            for number in label.removeprefix("NUMPY ").split(","):
                assert int(number) not in seen
                seen[int(number)] = index
        assert seen == wanted
        last = text(shape, sharding).splitlines()[-1]
        empty = {int(i) for i in re.findall(r"numpy:(\d)", last)}
        assert empty == set(range(6)) - set(wanted)


# -- where it is printed ---------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def printed(file: io.StringIO, *args, **options) -> str:
    assert st.visualize_sharding(*args, file=file, **options) is None
    return file.getvalue()


def backgrounds(colored: str) -> list[tuple[str, str]]:
    """The background of each piece of text that has one."""
    return re.findall(r"\x1b\[[\d;]*48;(5;\d+|2;\d+;\d+;\d+)m([^\x1b]*)", colored)


def test_a_file_gets_plain_text(capsys):
    x = st.zeros((10, 3), device=st.make_mesh((4,), ("x",)))
    wanted = text(x.shape, x.sharding)
    assert "NUMPY 3" in wanted
    assert printed(io.StringIO(), x) == wanted
    assert printed(io.StringIO(), (10, 3), x.sharding) == wanted
    assert printed(io.StringIO(), [10, np.int64(3)], x.sharding, use_color=None) == wanted
    st.visualize_sharding(x)
    assert capsys.readouterr().out == wanted
    assert ESCAPE not in wanted


def test_use_color_false_is_plain_where_colors_are_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert ESCAPE not in draw((10,), mesh_of(4), "x")


@pytest.mark.parametrize(("file", "use_color"), [(Terminal, None), (Terminal, True), (io.StringIO, True)])
def test_colors_tell_the_parts_apart(file, use_color):
    shape, sharding = (5, 9), st.NamedSharding(mesh_of(2, 4), P("x", "y"))
    colored = printed(file(), shape, sharding, use_color=use_color)
    named = {caption.strip(): color for color, caption in backgrounds(colored) if "NUMPY" in caption}
    assert sorted(named) == [f"NUMPY {i}" for i in range(8)]
    assert len(set(named.values())) == 8
    bare = re.sub(r"\x1b\[[\d;]*m", "", colored)
    assert captions(bare) == captions(text(shape, sharding))
    inside = sum(cell.width * cell.height for row in tables(bare)[0] for cell in row)
    assert sum(len(piece) for _, piece in backgrounds(colored)) == inside  # the whole cell, not its caption only


@pytest.mark.parametrize("grid", [(1, 8), (8, 1), (4, 2), (3, 5), (2, 6), (2, 7), (5, 6), (3, 12), (2, 30)])
def test_neighbors_differ_where_a_terminal_has_16_colors(grid, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-16color")
    monkeypatch.setenv("COLUMNS", "120")
    mesh = st.AbstractMesh(grid, ("x", "y"))
    colored = printed(Terminal(), (2 * grid[0], 2 * grid[1]), st.NamedSharding(mesh, P("x", "y")))
    assert "48;" not in colored
    cells = re.findall(r"\x1b\[30;(10[1-7])m([^\x1b]*)", colored)
    looks, named = {}, {}
    for color, caption in cells:
        if found := re.search(r"SIMULATED (\d+)", caption):
            k = int(found[1])
            named[k] = color
            looks[k] = color, next((pattern for pattern in "/." if pattern in caption), " ")
    assert sorted(looks) == list(range(grid[0] * grid[1]))
    for k, look in looks.items():
        row, column = divmod(k, grid[1])
        assert column + 1 == grid[1] or looks[k + 1] != look
        assert row + 1 == grid[0] or looks[k + grid[1]] != look
        assert named[k] == named[k % 7]  # The color depends on the device only.


def test_a_pattern_fills_the_cell_around_the_caption(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-16color")
    monkeypatch.setenv("COLUMNS", "120")
    colored = printed(Terminal(), (2, 7), st.NamedSharding(mesh_of(2, 7), P("x", "y")))
    bare = re.sub(r"\x1b\[[\d;]*m", "", colored)
    cells = [line[1:-1].split("│") for line in bare.splitlines() if line.startswith("│")]
    below = [row[0] for row in cells[len(cells) // 2 :]]  # Device 7 is below device 0, which has the same color.
    assert {cell.strip("/ ") for cell in below} == {"", "NUMPY 7", "1:2, 0:1"}
    assert all(cell[0] == cell[-1] == "/" for cell in below)
    assert "/" not in "".join(cells[0])


def test_replicas_share_a_color_and_blocks_do_not():
    colored = printed(Terminal(), (4, 2, 6), st.NamedSharding(mesh_of(2, 2, 2), P("x", None, "y")))
    named = {caption.strip(): color for color, caption in backgrounds(colored) if "NUMPY" in caption}
    assert sorted(named) == ["NUMPY 0,1", "NUMPY 2,3", "NUMPY 4,5", "NUMPY 6,7"]
    assert len(set(named.values())) == 4


def test_a_device_keeps_its_color():
    """The color is the same in text and in HTML, whatever the shape and position of the part; replicas have the color
    of the first one.
    """
    of_device: dict[str, set[str]] = {}
    mesh = st.make_mesh((4, 2), ("x", "y"), devices=st.devices("numpy"))
    for shape, spec in itertools.product([(8, 8), (16, 2), (3, 9)], [P("x", "y"), P("y", "x"), P(("y", "x")), P("x")]):
        sharding = st.NamedSharding(mesh, spec)
        for color, caption in backgrounds(printed(Terminal(), shape, sharding)):
            if found := re.search(r"NUMPY (\d+)", caption):
                of_device.setdefault(found[1], set()).add(color)
        _, parts, _ = parsed(tensor_html(st.device_put(np.zeros(shape), sharding)))
        for part in parts:
            of_device.setdefault(f"html {part.label.split(',')[0]}", set()).add(part.fill)
    assert len(of_device) == 16
    assert {len(colors) for colors in of_device.values()} == {1}
    assert len(set.union(*of_device.values())) == 16


def test_a_terminal_without_colors_gets_none(monkeypatch):
    sharding = st.NamedSharding(mesh_of(4), P("x"))
    assert ESCAPE not in printed(Terminal(), (10,), sharding, use_color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "48;" not in printed(Terminal(), (10,), sharding)
    assert len(set(backgrounds(printed(Terminal(), (10,), sharding, use_color=True)))) > 4
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert ESCAPE not in printed(Terminal(), (10,), sharding)


@pytest.mark.parametrize(("columns", "wanted"), [("60", 60), ("100", 100), ("300", 120), ("5", 26)])
def test_a_picture_is_as_wide_as_the_terminal_within_bounds(monkeypatch, columns, wanted):
    monkeypatch.setenv("COLUMNS", columns)
    picture = printed(Terminal(), (1000,), st.NamedSharding(mesh_of(2), P("x")), use_color=False)
    assert wanted - 2 < max(map(len, picture.splitlines())) <= wanted


def test_a_file_whose_encoding_has_no_box_drawing():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    st.visualize_sharding((100,), st.NamedSharding(mesh_of(8, 8), P("x")), file=out)
    out.flush()
    written = out.buffer.getvalue().decode("ascii")
    assert re.search(r"\| *NUMPY 0,1,2,3,4,5,6,7 *\|", written)
    assert re.search(r"NUMPY 16,[\d,]*\+", written)


IN_A_NOTEBOOK = """
import contextlib, io
import shardtensor as st

x = st.zeros((4, 6), device=st.make_mesh((2,), ("x",), devices=st.devices("numpy")[:2]))
st.visualize_sharding(x)
st.visualize_sharding(x, use_color=False)
with contextlib.redirect_stdout(io.StringIO()) as out:
    st.visualize_sharding(x)
assert "NUMPY 0" in out.getvalue()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the kernel's own machinery
def test_a_notebook_shows_svg_and_keeps_the_text_for_programs_without_html():
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(IN_A_NOTEBOOK)])
    NotebookClient(book, timeout=60, kernel_name="python3").execute()
    shown, printed = book.cells[0].outputs
    wanted = text((4, 6), st.NamedSharding(mesh_of(2), P("x")))
    assert shown.output_type == "display_data"
    assert shown.data["text/plain"] == wanted.rstrip("\n")
    assert [part.label for part in parsed(shown.data["text/html"])[1]] == ["0", "1"]
    assert (printed.output_type, printed.text) == ("stream", wanted)


# -- HTML ------------------------------------------------------------------------------------------


class Rectangle(NamedTuple):
    """A part in the picture: its texts and its position."""

    label: str
    title: str
    fill: str
    x: float
    y: float
    width: float
    height: float


def parsed(fragment: str) -> tuple[dict[str, str], list[Rectangle], list[str]]:
    """Returns the table, the picture and the lines below it of the output of `html`, which must be well-formed."""
    root = ET.fromstring(fragment)
    assert root.tag == "div"
    facts = {row.findtext("th", ""): row.findtext("td", "") for row in root.iter("tr")}
    space = {"svg": "http://www.w3.org/2000/svg"}
    rectangles = []
    for group in root.iterfind(".//svg:svg/svg:g", space):
        box, label = group.find("svg:rect", space), group.find("svg:text", space)
        assert box is not None
        assert label is not None
        numbers = [float(box.attrib[name]) for name in ("x", "y", "width", "height")]
        assert float(label.attrib["x"]) == pytest.approx(numbers[0] + numbers[2] / 2, abs=ROUNDED)
        assert float(label.attrib["y"]) == pytest.approx(numbers[1] + numbers[3] / 2, abs=ROUNDED)
        title = group.findtext("svg:title", "", space)
        rectangles.append(Rectangle(label.text or "", title, box.attrib["fill"], *numbers))
    return facts, rectangles, [line.text for line in root.iter("div") if line.text]


ROUNDED = 0.11
"""Numbers in pictures have one decimal."""


def zeros(shape: tuple[int, ...], sizes: tuple[int, ...], *spec: str | tuple[str, ...] | None) -> st.ShardedTensor:
    return put(np.zeros(shape, "float32"), "numpy", sizes, P(*spec))


def test_html_says_what_a_tensor_is():
    facts, _, below = parsed(zeros((10, 300), (4, 2), "x")._repr_html_())
    assert facts == {
        "shape": "(10, 300)",
        "dtype": "float32",
        "sharding": "P('x') on Mesh(x=4, y=2; numpy:0..7)",
        "bytes in all": "11.7 KiB",
        "bytes per device": "3.52 KiB at most",
    }
    assert below == []


def test_html_draws_parts_in_proportion():
    _, parts, _ = parsed(tensor_html(zeros((5, 9), (2, 4), "x", "y")))
    assert [part.label for part in parts] == [str(i) for i in range(8)]
    assert parts[1].title == "NUMPY 1: 0:3, 3:5"
    unit = parts[0].width / 3
    for part, (rows, columns) in zip(
        parts, itertools.product(((0, 3), (3, 5)), ((0, 3), (3, 5), (5, 7), (7, 9))), strict=True
    ):
        wanted = (columns[0], rows[0], columns[1] - columns[0], rows[1] - rows[0])
        assert np.allclose([part.x, part.y, part.width, part.height], np.multiply(wanted, unit), atol=3 * ROUNDED)


def test_html_draws_one_dimension_as_a_row():
    _, parts, _ = parsed(tensor_html(zeros((10,), (4, 2), "x")))
    assert [part.label for part in parts] == ["0,1", "2,3", "4,5", "6,7"]
    assert len({(part.y, part.height) for part in parts}) == 1
    assert parts[0].width == pytest.approx(1.5 * parts[2].width, abs=ROUNDED)
    for left, right in itertools.pairwise(parts):
        assert right.x == pytest.approx(left.x + left.width, abs=ROUNDED)


def test_html_of_more_dimensions_shows_every_device():
    x = zeros((7, 4, 6), (2, 2, 2), "x", "z", "y")
    fragment = tensor_html(x)
    _, parts, below = parsed(fragment)
    assert [(part.label, part.title) for part in parts] == [
        ("0", "NUMPY 0: 0:2, 0:3"), ("2", "NUMPY 2: 0:2, 3:6"), ("1", "NUMPY 1: 2:4, 0:3"), ("3", "NUMPY 3: 2:4, 3:6"),
        ("4", "NUMPY 4: 0:2, 0:3"), ("6", "NUMPY 6: 0:2, 3:6"), ("5", "NUMPY 5: 2:4, 0:3"), ("7", "NUMPY 7: 2:4, 3:6"),
    ]  # fmt: skip
    assert below == ["[0:4, :, :]", "[4:7, :, :]"]
    drawings = list(ET.fromstring(fragment).iter("{http://www.w3.org/2000/svg}svg"))
    assert len(drawings) == 2
    for drawing in drawings:
        _, _, width, height = map(float, drawing.attrib["viewBox"].split())
        for polygon in drawing.iter("{http://www.w3.org/2000/svg}polygon"):  # the upper and the right faces
            points = [tuple(map(float, point.split(","))) for point in polygon.attrib["points"].split()]
            assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        assert len(list(drawing.iter("{http://www.w3.org/2000/svg}polygon"))) == 4


def test_html_of_a_cube_has_its_sizes():
    drawing = ET.fromstring(tensor_html(zeros((7, 4, 6), (2, 2), None, "x", "y")))
    labels = [
        text.text for text in drawing.iterfind(".//{http://www.w3.org/2000/svg}svg/{http://www.w3.org/2000/svg}text")
    ]
    assert labels == ["6", "4", "7"]
    assert "block" not in tensor_html(zeros((7, 4, 6), (2, 2), None, "x", "y"))


def test_html_of_many_blocks_draws_64_of_them():
    fragment = tensor_html(st.zeros((70, 2, 2), device=st.AbstractMesh((70,), ("x",))))
    _, parts, below = parsed(fragment)
    assert len(parts) == 64
    assert below[-1] == "6 more blocks"


def test_html_without_dimensions_or_elements():
    found = parsed(zeros((), (8,))._repr_html_())
    assert found == ({}, [], ["float32, P() on Mesh(x=8; numpy:0..7)"])
    facts, parts, below = parsed(tensor_html(zeros((0, 3), (2,), "x")))
    assert (facts["bytes in all"], facts["bytes per device"]) == ("0 B", "0 B at most")
    assert (parts, below) == ([], ["empty on numpy:0, numpy:1"])
    _, parts, below = parsed(tensor_html(zeros((1, 1), (2, 2), "x", "y")))
    assert ([part.label for part in parts], below) == (["0"], ["empty on numpy:1, numpy:2, numpy:3"])
    assert parsed(tensor_html(zeros((2, 0, 3), (2,), "x")))[1:] == ([], ["empty on numpy:0, numpy:1"])


def test_html_of_a_donated_tensor_reads_nothing():
    x = zeros((10, 4), (4,), "x")
    before = tensor_html(x)
    y = st.device_put(x, st.devices("numpy")[0], donate=True)
    with pytest.raises(st.DonatedError):
        np.asarray(x)
    facts, parts, _ = parsed(x._repr_html_())
    assert facts["shape"] == "(10, 4), donated"
    assert parts == parsed(before)[1]
    assert parsed(tensor_html(y))[0]["shape"] == "(10, 4)"
    assert printed(io.StringIO(), x) == text(x.shape, x.sharding)


def test_text_moves_nothing_and_html_reads_few_elements():
    x = zeros((1000, 400), (4,), "x")
    with st.transfer_guard("disallow"), st.transfers() as log:
        tensor_html(x)
        text(x.shape, x.sharding)
        assert len(log) == 0
        x._repr_html_()
    assert 0 < log.bytes <= 25 * x.itemsize
    assert log.copied == 0


def test_html_shows_a_few_elements():
    def elements(x: st.ShardedTensor) -> str | None:
        return ET.fromstring(x._repr_html_()).findtext(".//pre")

    mesh = st.make_mesh((4,), ("x",), devices=st.devices("numpy")[:4])
    assert elements(st.arange(5, device=mesh)) == "[0 1 2 3 4]"
    assert elements(st.arange(5, device=mesh).sum()) == "10"
    assert elements(st.arange(500, device=mesh)) == "[  0   1 ... 498 499]"
    cube = st.reshape(st.arange(1000, device=mesh), (10, 10, 10))
    assert elements(cube) == (
        "[[[  0 ...   9]\n  ...\n  [ 90 ...  99]]\n\n ...\n\n [[900 ... 909]\n  ...\n  [990 ... 999]]]"
    )
    assert elements(st.zeros((0, 3), device=mesh)) == "[]"
    assert elements(st.zeros((8,), device=st.AbstractMesh((4,), ("x",)))) is None
    x = st.arange(8, device=mesh)
    st.device_put(x, st.devices("numpy")[0], donate=True)
    assert elements(x) is None


def test_html_of_meshes_and_shardings():
    mesh = st.make_mesh((4, 2), ("data", "model"), devices=st.devices("numpy"))
    facts, parts, below = parsed(mesh._repr_html_())
    assert (facts, below) == ({"mesh": "Mesh(data=4, model=2; numpy:0..7)"}, [])
    assert [part.label for part in parts] == [str(i) for i in range(8)]
    assert len({part.x for part in parts}) == 2
    assert ">data=4</text>" in mesh._repr_html_()
    assert ">model=2</text>" in mesh._repr_html_()
    sharding = st.NamedSharding(mesh, P("model", None, "data"), memory_kind="pinned_host")
    facts, parts, below = parsed(sharding._repr_html_())
    assert facts == {
        "spec": "P('model', None, 'data')",
        "mesh": "Mesh(data=4, model=2; numpy:0..7)",
        "memory kind": "pinned_host",
    }
    assert [part.label for part in parts] == ["0", "2", "4", "6", "1", "3", "5", "7"]
    assert below == ["[0:1, :, :]", "[1:2, :, :]"]
    _, (part,), _ = parsed(st.NamedSharding(mesh, P())._repr_html_())
    assert part.title == "NUMPY 0,1,2,3,4,5,6,7"
    assert len(parsed(st.AbstractMesh((3, 4, 5), ("x", "y", "z"))._repr_html_())[1]) == 60


def test_html_escapes_names():
    mesh = st.make_mesh((2,), ("<b>&\"'",))
    fragment = tensor_html(st.zeros((4,), device=mesh))
    assert "<b>" not in fragment
    facts, parts, _ = parsed(fragment)
    assert facts["sharding"] == f"{P(mesh.axis_names[0])} on {mesh}"
    assert len(parts) == 2


def test_html_names_another_memory():
    x = zeros((4,), (2,), "x")
    pinned = st.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    assert parsed(tensor_html(pinned))[0]["sharding"].endswith(", pinned_host")


def _luminance(fill: str) -> float:
    channels = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_html_of_64_devices():
    code = """
import numpy as np, shardtensor as st, sys
from shardtensor.pictures.html import tensor_html
mesh = st.make_mesh((8, 8), ("x", "y"), devices=st.devices("numpy"))
for spec in st.P("x", "y"), st.P(None, ("x", "y")), st.P("x"), st.P():
    print(tensor_html(st.device_put(np.zeros((100, 100)), st.NamedSharding(mesh, spec))))
print("rich" in sys.modules)
"""
    out = output_of(new_process("-c", code, SHARDTENSOR_NUM_DEVICES="64"))
    grid, columns, rows, whole, rich_is_loaded = out.splitlines()
    assert rich_is_loaded == "False"
    for fragment in grid, columns:
        _, parts, _ = parsed(fragment)
        assert [part.label for part in parts] == [str(i) for i in range(64)]
        assert len({part.fill for part in parts}) == 64
        assert all((_luminance(part.fill) + 0.05) / 0.05 > 4.5 for part in parts)  # legible in black, in either theme
        assert all(7 * len(part.label) <= part.width for part in parts)
    _, parts, _ = parsed(rows)
    assert [part.label for part in parts] == [",".join(str(8 * i + j) for j in range(8)) for i in range(8)]
    assert parts[3].title == "NUMPY 24,25,26,27,28,29,30,31: 39:52, 0:100"
    _, (part,), _ = parsed(whole)
    assert re.fullmatch(r"0,1,2,3,4,.*,…", part.label)
    assert 7 * len(part.label) <= part.width
    assert part.title == f"NUMPY {','.join(map(str, range(64)))}: 0:100, 0:100"


# -- errors ----------------------------------------------------------------------------------------


def test_errors_name_the_argument_and_what_to_do():
    sharding = st.NamedSharding(mesh_of(2, 2), P("x", "y"))
    x = zeros((4, 4), (2,), "x")
    cases = [
        (st.ArgumentTypeError, ((4, 4),), "sharding is missing; wanted a NamedSharding"),
        (st.ArgumentTypeError, ((4, 4), "x"), "sharding is a str; wanted a NamedSharding"),
        (st.ArgumentTypeError, (np.zeros(3), sharding), "x is a ndarray; wanted a ShardedTensor, or a shape"),
        (st.ArgumentTypeError, (None,), "x is a NoneType"),
        (st.ArgumentTypeError, (4, sharding), "x is an int"),
        (st.ArgumentTypeError, ((4, 2.5), sharding), "shape is (4, 2.5); wanted an integer or a sequence of integers"),
        (st.ArgumentTypeError, ((x, x), sharding), "wanted an integer or a sequence of integers"),
        (st.ArgumentError, (x, sharding), "sharding is given, and x is a tensor, which has one"),
        (st.ShapeError, ((4, -1), sharding), "shape (4, -1) has a negative size"),
        (
            st.ShardingError,
            ((4,), sharding),
            "P('x', 'y') has 2 dimensions and the array has 1; give at most 1",
        ),
    ]
    for error, args, message in cases:
        out = io.StringIO()
        with pytest.raises(error, match="^visualize_sharding: .*" + re.escape(message)):
            st.visualize_sharding(*args, file=out)
        assert out.getvalue() == ""
