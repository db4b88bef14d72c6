"""How rows are written, and the texts that rows of several modules have."""

from __future__ import annotations

Hints = dict[str, str]


def each(names: str, text: str) -> Hints:
    """Returns a row for each of several names, which replaces ``{}`` in the text."""
    return {name: text.replace("{}", name) for name in names.split()}


def chosen(hints: Hints, names: str) -> Hints:
    """Returns some rows of a table."""
    return {name: hints[name] for name in names.split()}


KEY = "random numbers are functions of a key: `key = st.random.key(0)`"
GPU = 'the devices of GPUs are `st.devices("cupy")`'
GRADIENTS = "`st.grad` and `st.value_and_grad` differentiate functions; tensors themselves record nothing"

AXIS_TYPES = (
    "mesh axes have no types: outside of st.shard_map all are explicit, so leave axis_types out: "
    "`st.make_mesh((2, 2), ('x', 'y'))`"
)

VARYING = (
    "leave it out: outside of maps no array varies over mesh axes; `st.typeof(x)` has the shape, dtype and sharding"
)

WEAK = "leave it out: dtypes follow NumPy's rules, in which only Python's numbers are weak: `st.result_type(x, 1.5)`"
REFS = "leave it out: tensors are mutable, so that there are no references: `x[...] = y` writes to one"
RELU, SIGMOID = "`st.maximum(x, 0)`", "`1 / (1 + st.exp(-x))`"
SOFTMAX = "`st.exp(x - np.logaddexp.reduce(x, axis=-1, keepdims=True))`"
LOG_SOFTMAX = "`x - np.logaddexp.reduce(x, axis=-1, keepdims=True)`"
HOST = "`np.asarray(x)` is the array on the host"
TEXT = "`st.asarray(np.loadtxt(path))` reads text"
BATCHES = "`st.data.Batches(x, 2, key=key)` draws batches of the rows of arrays, files and map-style datasets"
LOSS_SCALE = "`st.optim.dynamic_loss_scaling(st.optim.adam(1e-3))` has the factor of the loss in its state"
ZERO = "`st.optim.zero(params, axis='x', level=1)` returns layouts of parameters, gradients and state"

CROSS_ENTROPY = (
    f"losses are functions of operators: y = {LOG_SOFTMAX}, and then "
    "`-st.take_along_axis(y, st.asarray([[0], [1], [2], [3]]), axis=-1).mean()`"
)

ACCUMULATE = "`st.accumulate(st.value_and_grad(f), 4)` calls a gradient for 4 parts of a batch"
