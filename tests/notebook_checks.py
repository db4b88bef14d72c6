"""The checks of the notebooks on every backend, which readers do not see: Python code to run after a cell, by its id.

The code finds the names of the notebook, and in ``printed`` what the cell has printed.
"""

from __future__ import annotations

CHECKS: dict[str, dict[str, str]] = {
    "03_parallel_tutorial": {
        "cell-7": r"""
assert log.bytes == 256 * 7 // 8
assert np.array_equal(np.asarray(arr_sharded), np.arange(32.0).reshape(4, 8))
""",
        "cell-11": r"""
assert log.bytes == 2 * arr.nbytes
assert bool(st.all(arr_host + 1 == arr_dev + 1))
results = st.jit(lambda x: x, out_shardings=s_host)(arr_sharded)
assert results.sharding.memory_kind == "pinned_host"
""",
        "cell-13": r"""
assert printed == "shardings match: True\nbytes sent: 0\nequal to NumPy's result: True\n"
""",
        "cell-15": r"""
assert result.sharding.spec == P("y")
assert log.bytes == 8 * 16
assert np.array_equal(np.asarray(result), np.arange(32.0).reshape(4, 8).sum(axis=0))
""",
        "cell-17": r"""
assert answer.sharding.spec == P("x", "y")
assert log.bytes == 0
assert printed.count("while tracing") == 1
""",
        "cell-19": r"""
assert result.sharding.spec == P("x")
assert np.array_equal(np.asarray(result), np.arange(32.0).reshape(4, 8).sum(axis=0))
""",
        "cell-21": r"""
assert printed == "(32,) P('x')\nequal to NumPy's result: True\n"
""",
        "cell-23": r"""
assert np.array_equal(np.asarray(y), x * 2)
assert printed.count("the block is") == 1
whole = st.jit(lambda x: st.shard_map(lambda block: block * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x) + 1)
assert np.array_equal(np.asarray(whole(x)), x * 2 + 1)  # A map inside of jit is a part of the program.
""",
        "cell-25": r"""
assert np.array_equal(np.asarray(sums), x.reshape(8, 4).sum(axis=1))
""",
        "cell-27": r"""
assert int(total) == x.sum()
assert sum(r.bytes for r in log if r.operator == "psum") == 2 * 7 * 8
""",
        "cell-29": r"""
assert printed.startswith("shard_map: the result is declared to be equal along 'x'")
""",
        "cell-31": r"""
assert printed.startswith("psum over 'x': ")
""",
        "cell-35": r"""
assert np.allclose(np.asarray(by_data), expected)
""",
        "cell-37": r"""
assert np.allclose(np.asarray(by_constraint), expected)
""",
        "cell-39": r"""
assert sent == [2 * 7 * bias.nbytes] * 2
assert np.allclose(np.asarray(by_program), expected)
""",
        "cell-41": r"""
assert np.array_equal(np.asarray(by_data), np.asarray(by_constraint))
assert np.array_equal(np.asarray(by_data), np.asarray(by_program))
""",
        "cell-43": r"""
for result in (by_data, by_constraint, by_program):
    assert result.sharding == NamedSharding(grid, P("data"))
    assert np.allclose(np.asarray(result), expected)
""",
        "cell-45": r"""
assert (free + placed).device == st.devices()[2]
""",
        "cell-47": r"""
assert log.bytes == 3 * 8
assert "add: moves 24 bytes implicitly" in printed
""",
    },
    "04_training": {
        "cell-5": r"""
assert len(printed.splitlines()) == 4
for line in printed.splitlines():
    first, second = (float(part.split()[0]) for part in line.partition(":")[2].split(","))
    assert np.isclose(first, second, rtol=1e-3)
""",
        "cell-11": r"""
assert printed.count("True") == 3
""",
        "cell-13": r"""
assert log.bytes == 2 * (n - 1) * 8 * (total + 1)
""",
        "cell-15": r"""
assert np.isclose(right, of_all)
assert not np.isclose(wrong, right, rtol=1e-3)
""",
        "cell-21": r"""
assert printed.count("True") == 2
assert len(masks) == n
""",
        "cell-27": r"""
assert printed.count("True") == len(runs)
assert accuracy > 0.9
""",
        "cell-29": r"""
shapes = {"w1": (64, 32), "b1": (32, 1), "w2": (32, 10), "b2": (10, 1)}
for count, (params, state, _, log) in runs.items():
    kept = [sum((n // count + (k < n % count)) * m for n, m in shapes.values()) for k in range(count)]  # the split rule
    assert [held(k, params, state) for k in range(count)] == [3 * 8 * size for size in kept]
    assert sent(log, "reshard") == (count - 1) * 8 * total
    assert sent(log, "contract", "sum") == (count - 1) * 8 * (total + 2)  # the gradients, and the sum of the loss
    assert sent(log) + sent(log, "reshard", "contract", "sum", "grad") == log.bytes
    assert sent(log, "grad") == (count - 1) * 8 * 320
""",
        "cell-31": r"""
assert printed.count("True") == len(torch_devices)
""",
    },
    "05_patterns": {
        "cell-7": r"""
assert np.array_equal(np.asarray(u), expected)
assert log.bytes == 2 * (n - 1) * plate.shape[1] * 8
assert {r.operator for r in log if r.bytes} == {"ppermute"}
assert all(abs(r.source.id - r.destination.id) == 1 for r in log if r.bytes)
""",
        "cell-9": r"""
assert "True" in printed
""",
        "cell-11": r"""
assert np.array_equal(np.asarray(result), np.asarray(heat(u, 24)))
assert len(logs[0]) == 2 * len(logs[1]) == 24 * 2 * (n - 1)
assert sum(size for *_, size in logs[0]) == sum(size for *_, size in logs[1])
""",
        "cell-13": r"""
assert printed.count("True") == 2
assert sent == 4 * 30 * 2 * n * 30  # 2 rows of 30 bytes for each
""",
        "cell-15": r"""
assert np.allclose(np.asarray(centres), expected)
assert sent == steps * 2 * (n - 1) * (10 * 64 + 10) * 8
""",
        "cell-17": r"""
assert np.array_equal(labels, nearest(np, digits.rows, expected))
assert table.max(axis=1).sum() / len(digits.labels) > 0.75
""",
        "cell-19": r"""
assert "True" in printed
""",
    },
    "06_gpt": {
        "cell-9": r"""
assert "True" in printed
assert all(found[-1] < found[0] - 0.5 for found in losses.values())
""",
        "cell-11": r"""
assert printed.count("True") == 3
""",
        "cell-13": r"""
assert "goes on after step 20" in printed
assert "the same bits: True" in printed
assert float(printed.split()[-1]) < 1.8
""",
        "cell-15": r"""
assert printed.startswith("Beautiful is better ")
""",
    },
}
