"""Names of NumPy and pandas that the package lacks: how arrays are made, data types, functions."""

from __future__ import annotations

from shardtensor.hint_tables.rows import HOST, KEY, TEXT, each

_DTYPES = "dtypes are NumPy's: `st.{}`"
_INT, _FLOAT = _DTYPES.replace("{}", "int64"), _DTYPES.replace("{}", "float64")
_LAYOUT = "the layout in memory is not visible here; `st.asarray(x)` makes a tensor"
_CSV = "`st.asarray(np.loadtxt(path, delimiter=','))` reads text with commas"

CREATION = {
    "array": "`st.asarray([1, 2])` makes a tensor; `st.asarray(x, copy=True)` always copies, as numpy.array does",
    **each("as_tensor from_numpy asanyarray", "`st.asarray([1, 2])` makes a tensor of lists and of arrays"),
    **each("ascontiguousarray asfortranarray require", _LAYOUT),
    "asnumpy": HOST,
    **each("ndarray Array Tensor", "the class of tensors is `st.ShardedTensor`; `st.asarray([1, 2])` makes one"),
    "copy": "`x.copy()`",
    "clone": "`x.copy()`",
    "copyto": "`x[...] = y`",
    **each(
        "frombuffer fromfile fromiter fromstring memmap", "`np.{}` makes a host array, and `st.asarray` a tensor of it"
    ),
    **each("loadtxt genfromtxt", TEXT),
    **each("read_csv load_csv", _CSV),
    "read_parquet": "`st.asarray(pandas.read_parquet(path))` reads a table of numbers",
    "savetxt": "`np.savetxt(path, x)` writes a tensor, too",
    **each("matrix asmatrix mat", "tensors of two dimensions are matrices: `st.asarray([[1, 2], [3, 4]])`"),
    "bmat": "`st.block([[x, y], [y, x]])`",
    **each("rand", "`st.random.uniform(st.random.key(0), (2, 3))`"),
    **each("randn", "`st.random.normal(st.random.key(0), (2, 3))`"),
    **each("randint", "`st.random.integers(st.random.key(0), 0, 10, (2, 3))`"),
    **each("randperm", "`st.random.permutation(st.random.key(0), 10)`"),
    "multinomial": "`st.random.categorical(st.random.key(0), st.log(x))`",
    **each("manual_seed seed Generator default_rng", KEY),
    "to_csv": "`np.savetxt(path, x, delimiter=',')`",
    "one_hot": "`st.eye(5)[[0, 3]]`",
    "corr": "`st.corrcoef(x)`",
    "zscore": "`(x - st.mean(x, axis=0)) / st.std(x, axis=0)`",
    "rolling": "`st.lib.stride_tricks.sliding_window_view(x[0], 2).mean(axis=1)`",
    "iota": "`st.arange(3)`",
    "range": "`st.arange(3)`",
}

DATA_TYPES = {
    **each("float float_ double", _FLOAT),
    **each("int int_ long", _INT),
    "single": _DTYPES.replace("{}", "float32"),
    "half": _DTYPES.replace("{}", "float16"),
    "short": _DTYPES.replace("{}", "int16"),
    "bool_": _DTYPES.replace("{}", "bool"),
    **each("complex cfloat cdouble complex_", _DTYPES.replace("{}", "complex128")),
    "dtype": "dtypes are NumPy's: `np.dtype('float32')`",
    **each("datetime64 timedelta64", "dtypes are NumPy's: `np.{}`"),
    **each("issubdtype", "`st.isdtype(x.dtype, 'real floating')`, or `np.issubdtype(x.dtype, np.floating)`"),
    **each("floating integer inexact number", "`st.isdtype(x.dtype, 'numeric')`, or `np.issubdtype(x.dtype, np.{})`"),
    **each("is_floating_point", "`st.isdtype(x.dtype, 'real floating')`"),
    **each("is_tensor", "`isinstance(x, st.ShardedTensor)`"),
    **each("isscalar iterable", "`np.{}(x)`"),
    **each(
        "set_default_dtype get_default_dtype", "the default is float64, as in NumPy: `st.zeros(3, dtype='float32')`"
    ),
    "convert_element_type": "`x.astype('float32')`",
    "bitcast_convert_type": "`x.view('int64')`",
    "euler_gamma": "`np.euler_gamma`",
}

NUMPYS = {
    **each("shape ndim size", "`x.{}`"),
    "rank": "`x.ndim`",
    "numel": "`x.size`",
    "row_stack": "`st.vstack([x, y])`",
    **each("r_ c_", "`st.concat([x, y])` and `st.column_stack([x, y])` join arrays"),
    "s_": "`np.s_[1:]`",
    "index_exp": "`np.index_exp[1:]`",
    "trapz": "`st.trapezoid(x)`",
    "in1d": "`st.isin(x.ravel(), y.ravel())`",
    "msort": "`st.sort(x, axis=0)`",
    "product": "`st.prod(x)`",
    "cumproduct": "`st.cumprod(x, axis=0)`",
    "alltrue": "`st.all(x)`",
    "sometrue": "`st.any(x)`",
    "asscalar": "`x[0, 0].item()`",
    "put": "`x.put([0], [1.0])`",
    **each("may_share_memory shares_memory", "`np.{}(x, y)`"),
    **each("errstate", "`np.errstate(all='ignore')`"),
    **each("seterr", "NumPy's settings apply: `np.seterr()`"),
    **each("set_printoptions get_printoptions", "NumPy's settings apply: `np.get_printoptions()`"),
    **each("array_repr array2string array_str", "`np.{}(x)`"),
    **each("ndindex", "`np.ndindex(x.shape)`"),
    **each("ndenumerate nditer", "elements one by one are slow; on the host: `np.{}(np.asarray(x))`"),
    **each("vectorize frompyfunc", "`st.smap(f, x)` calls a function of arrays on the shards"),
    **each("poly1d polynomial", "`st.polyval([1.0, 2.0], x)`, and `st.polyfit(x[0], y[0], 1)`"),
    "ma": "there are no masked arrays: `x.sum(where=x > 0)`, `st.where(x > 0, x, 0)` or `st.nansum(x)`",
}
