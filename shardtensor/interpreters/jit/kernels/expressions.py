"""The table of expressions: what each elementwise function of a kernel is in C.

An expression is valid C and CUDA C. It has NumPy's semantics, whose functions define the results:

- To the bit: arithmetic, square roots, extrema, comparisons, integer operations with wrapping and NumPy's values for
  zero divisors and for shifts beyond the width, and casts of values that the new dtype has.
- Within 4 ulp, with NumPy's NaN, infinities and signed zeros: exponentials, logarithms, powers, trigonometric and
  hyperbolic functions.

Functions and dtypes without an expression (float16, complex numbers, integer powers, which can raise errors) run on
blocked NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardtensor.interpreters.jit.kernels.kernel import Kernel, Node, Value

C_TYPES = {
    "b1": "bool", "i1": "signed char", "u1": "unsigned char", "i2": "short", "u2": "unsigned short", "i4": "int",
    "u4": "unsigned int", "i8": "long long", "u8": "unsigned long long", "f4": "float", "f8": "double",
}  # fmt: skip
"""The C type of each dtype that has expressions."""

# -- the table: by function and kind of dtype ------------------------------------------------------
#
# {a}, {b} and {c} are the operands, which are names of variables; {T} is the C type of the result, {U} the unsigned
# type in which integers wrap around, {W} the suffix of functions of integers, {bits} their width, {f} the suffix of
# functions of floats, and {p} that of constants. The kind is that of the first operand: bool, signed, unsigned or
# float.

_ANY = "biuf"


def _alike(kinds: str, text: str) -> dict[str, str]:
    return dict.fromkeys(kinds, text)


def _wrapping(sign: str) -> dict[str, str]:
    return {**_alike("iu", f"({{T}})(({{U}}){{a}} {sign} ({{U}}){{b}})"), "f": f"{{a}} {sign} {{b}}"}


_COMPARISONS = {
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_LOGICAL = {"logical_and": "&", "logical_or": "|", "logical_xor": "!="}
_ROUNDINGS = ("ceil", "floor", "trunc", "rint")

UNARY_FUNCTIONS = {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
    "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan", "sinh": "sinh",
    "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "cbrt": "cbrt",
}  # fmt: skip
"""The functions of one float that the mathematical library of C has, by the names of operators."""

BINARY_FUNCTIONS = {"pow": "pow", "power": "pow", "float_power": "pow", "atan2": "atan2", "hypot": "hypot"}
"""Likewise of two floats."""

_ALIASES = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh",
    "arctan2": "atan2", "absolute": "abs", "fabs": "abs", "invert": "bitwise_invert", "bitwise_not": "bitwise_invert",
    "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift", "true_divide": "divide",
    "mod": "remainder", "rad2deg": "degrees", "deg2rad": "radians",
}  # fmt: skip
"""Other names of functions in the table."""

_EXTREMUM = "{a} %s {b} ? {a} : {b}"
_NAN_EXTREMUM = "(({a} %s {b}) | ({a} != {a})) ? {a} : {b}"
_OTHER_EXTREMUM = "(({a} %s {b}) | ({b} != {b})) ? {a} : {b}"

EXPRESSIONS: dict[str, dict[str, str]] = {
    "add": {"b": "{a} | {b}", **_wrapping("+")},
    "subtract": _wrapping("-"),
    "multiply": {"b": "{a} & {b}", **_wrapping("*")},
    "divide": {"f": "{a} / {b}"},
    "floor_divide": {
        "i": "({T})st_floor_divide_{W}({a}, {b})",
        "u": "{b} ? ({T})({a} / {b}) : ({T})0",
        "f": "st_floor_divide{f}({a}, {b})",
    },
    "remainder": {
        "i": "({T})st_remainder_{W}({a}, {b})",
        "u": "{b} ? ({T})({a} % {b}) : ({T})0",
        "f": "st_remainder{f}({a}, {b})",
    },
    "fmod": {"f": "fmod{f}({a}, {b})"},
    "negative": {**_alike("iu", "({T})(0u - ({U}){a})"), "f": "-{a}"},
    "positive": _alike("iuf", "{a}"),
    "abs": {**_alike("bu", "{a}"), "i": "{a} < 0 ? ({T})(0u - ({U}){a}) : {a}", "f": "fabs{f}({a})"},
    "sign": {
        "i": "({T})(({a} > 0) - ({a} < 0))",
        "u": "({T})({a} > 0)",
        "f": "{a} > 0 ? 1{p} : {a} < 0 ? -1{p} : {a} == 0 ? 0{p} : {a}",
    },
    "square": {**_alike("iu", "({T})(({U}){a} * ({U}){a})"), "f": "{a} * {a}"},
    "reciprocal": {"f": "1{p} / {a}"},
    "sqrt": {"f": "sqrt{f}({a})"},
    "maximum": {**_alike("biu", _EXTREMUM % ">"), "f": _NAN_EXTREMUM % ">"},
    "minimum": {**_alike("biu", _EXTREMUM % "<"), "f": _NAN_EXTREMUM % "<"},
    "fmax": {**_alike("biu", _EXTREMUM % ">"), "f": _OTHER_EXTREMUM % ">"},
    "fmin": {**_alike("biu", _EXTREMUM % "<"), "f": _OTHER_EXTREMUM % "<"},
    "clip": {
        **_alike("biu", "st_min(st_max({a}, {b}), {c})"),
        "f": "st_min_nan(st_max_nan({a}, {b}), {c})",
    },
    "clip_to_scalars": {
        **_alike("biu", "st_min(st_max({a}, {b}), {c})"),
        "f": "(({b} != {b}) | ({c} != {c})) ? {b} + {c} : {a} < {b} ? ({b} > {c} ? {c} : {b}) : {a} > {c} ? {c} : {a}",
    },
    **{name: {"f": f"{name}{{f}}({{a}})", **_alike("biu", "{a}")} for name in _ROUNDINGS},
    **{name: _alike(_ANY, f"{{a}} {sign} {{b}}") for name, sign in _COMPARISONS.items()},
    **{name: _alike("biu", f"({{T}})({{a}} {sign} {{b}})") for name, sign in _BITS.items()},
    "bitwise_invert": {"b": "!{a}", **_alike("iu", "({T})~{a}")},
    "bitwise_left_shift": {
        "i": "({U}){b} < {bits} ? ({T})(({U}){a} << {b}) : ({T})0",
        "u": "{b} < {bits} ? ({T})(({U}){a} << {b}) : ({T})0",
    },
    "bitwise_right_shift": {
        "i": "({U}){b} < {bits} ? ({T})({a} >> {b}) : ({T})({a} < 0 ? -1 : 0)",
        "u": "{b} < {bits} ? ({T})({a} >> {b}) : ({T})0",
    },
    **{name: _alike(_ANY, f"({{a}} != 0) {sign} ({{b}} != 0)") for name, sign in _LOGICAL.items()},
    "logical_not": _alike(_ANY, "{a} == 0"),
    "isnan": {**_alike("biu", "false"), "f": "{a} != {a}"},
    "isinf": {**_alike("biu", "false"), "f": "fabs{f}({a}) == ST_INFINITY"},
    "isfinite": {**_alike("biu", "true"), "f": "fabs{f}({a}) < ST_INFINITY"},
    "signbit": {"f": "copysign{f}(1{p}, {a}) < 0"},
    "copysign": {"f": "copysign{f}({a}, {b})"},
    "nextafter": {"f": "nextafter{f}({a}, {b})"},
    "degrees": {"f": "{a} * (180{p} / 3.141592653589793{f})"},
    "radians": {"f": "{a} * (3.141592653589793{f} / 180{p})"},
    "heaviside": {"f": "{a} != {a} ? {a} : {a} == 0 ? {b} : {a} < 0 ? 0{p} : 1{p}"},
    "logaddexp": {"f": "st_logaddexp{f}({a}, {b})"},
    "where": _alike("b", "{a} ? {b} : {c}"),
    "astype": _alike(_ANY, "({T}){a}"),
    **{name: {"f": f"{function}{{f}}({{a}})"} for name, function in UNARY_FUNCTIONS.items()},
    **{name: {"f": f"{function}{{f}}({{a}}, {{b}})"} for name, function in BINARY_FUNCTIONS.items()},
}
"""The expression of each function by the kind of its first operand. Those of ``where`` select values of any dtype."""

EXPENSIVE = {*UNARY_FUNCTIONS, *BINARY_FUNCTIONS, "logaddexp", "floor_divide", "remainder", "fmod", "nextafter"}
"""The functions that take several times as long as reading an operand from a cache."""


def c_expression(node: Node, operands: Sequence[str], dtypes: Sequence[str], *, scalar_bounds: bool = False) -> str:
    """Returns the expression of a node that does not reduce; an empty string if there is none.

    Args:
        node: the node.
        operands: the names of the variables of its operands.
        dtypes: the dtypes of its operands.
        scalar_bounds: whether the bounds of a ``clip`` are scalars, for which NumPy treats zeros of both signs in
            another way.
    """
    name = _ALIASES.get(node.name, node.name)
    if name == "clip" and scalar_bounds:
        name = "clip_to_scalars"
    text = EXPRESSIONS.get(name, {}).get(dtypes[0][0], "")
    alike = dtypes[1:] if name == "where" else dtypes
    if not text or any(d not in C_TYPES for d in (node.dtype, *dtypes)) or len(set(alike)) > 1:
        return ""
    if name == "astype" and node.dtype == "b1":
        return f"{operands[0]} != 0"
    size = int(dtypes[0][1])
    is_float4 = "f4" in (dtypes[0], node.dtype)
    return text.format(
        **dict(zip("abc", operands, strict=False)),
        T=C_TYPES[node.dtype],
        U="unsigned int" if size <= 4 else "unsigned long long",
        W="int" if size <= 4 else "long",
        bits=8 * size,
        f="f" if is_float4 else "",
        p=".0f" if is_float4 else ".0",
    )


def definition(kernel: Kernel, value: Value, moves: Callable[[Value], bool]) -> str:
    """Returns the definition of the variable of a node that does not reduce.

    Args:
        kernel: the kernel.
        value: the node.
        moves: returns whether a value is not a scalar where its elements are computed (see `c_expression`).
    """
    node = kernel.nodes[value - len(kernel.inputs)]
    scalar = node.name == "clip" and not any(moves(v) for v in node.operands[1:])
    dtypes = [kernel.dtype(v) for v in node.operands]
    text = c_expression(node, [f"v{v}" for v in node.operands], dtypes, scalar_bounds=scalar)
    return f"const {C_TYPES[node.dtype]} v{value} = {text};"


STEPS = {
    "sum": "add", "mean": "add", "sum_of_squares": "add", "prod": "multiply", "max": "maximum", "min": "minimum",
    "any": "logical_or", "all": "logical_and",
}  # fmt: skip
"""The function that combines two partial results of each reduction."""


def step(node: Node, a: str, b: str) -> str:
    """Returns the expression that combines two partial results of a reduction."""
    return c_expression(Node(STEPS[node.name], (0, 1), node.dtype), [a, b], [node.dtype] * 2)


def plain_extremum(node: Node, a: str, b: str) -> str:
    """Returns the expression that combines two partial results of a maximum or minimum of floats as `step` does if none
    is NaN; an empty string for other reductions.
    """
    if node.dtype[0] != "f" or STEPS[node.name] not in ("maximum", "minimum"):
        return ""
    return (_EXTREMUM % (">" if STEPS[node.name] == "maximum" else "<")).format(a=a, b=b)


def mask_type(kind: str) -> str:
    """Returns the C type of integers that are as wide as floats of a type."""
    return "long long" if kind == "double" else "int"


def step_name(node: Node) -> str:
    """Returns the end of the names of the functions that combine partial results of a reduction."""
    return f"{STEPS[node.name]}_{node.dtype}"


def term(node: Node, x: str) -> str:
    """Returns the expression that a reduction combines, of the name of a variable of its operand."""
    if node.name in ("any", "all"):
        return f"({x} != 0)"
    return f"({x} * {x})" if node.name == "sum_of_squares" else x


def neutral(node: Node) -> str:
    """Returns the value from which a reduction starts. Sums of floats start from -0.0, which changes no zero."""
    if node.name in ("any", "all"):
        return "false" if node.name == "any" else "true"
    if node.name == "prod":
        return "1"
    kind, bits = node.dtype[0], 8 * int(node.dtype[1])
    if node.name not in ("max", "min"):
        return "-0.0" if kind == "f" else "0"
    if kind == "f":
        return "-ST_INFINITY" if node.name == "max" else "ST_INFINITY"
    if kind == "b":
        return "false" if node.name == "max" else "true"
    if kind == "u":
        return "0" if node.name == "max" else f"({C_TYPES[node.dtype]})~0ull"
    least = f"({C_TYPES[node.dtype]})(-{(1 << (bits - 1)) - 1}ll - 1)"
    return least if node.name == "max" else f"({C_TYPES[node.dtype]}){(1 << (bits - 1)) - 1}ll"


def has_c(kernel: Kernel) -> bool:
    """Returns whether every value of a kernel has a C type, and every node an expression."""
    if any(operand.dtype not in C_TYPES for operand in kernel.inputs):
        return False
    for node in kernel.nodes:
        dtypes = [kernel.dtype(v) for v in node.operands]
        if node.reduces:
            step = Node(STEPS[node.name], (0, 1), node.dtype)
            alike = node.name in ("any", "all") or dtypes[0] == node.dtype
            if not alike or node.dtype not in C_TYPES or not c_expression(step, "ab", [node.dtype] * 2):
                return False
        elif not c_expression(node, "abc", dtypes):
            return False
    return True


def library_functions(kernel: Kernel) -> set[str]:
    """Returns the names of the functions of the mathematical library that a kernel calls and that take one or two
    floats.
    """
    names = set()
    for node in kernel.nodes:
        suffix = "f" if kernel.dtype(node.operands[0]) == "f4" else ""
        name = _ALIASES.get(node.name, node.name)
        called = ["exp", "log1p"] if name == "logaddexp" else [UNARY_FUNCTIONS.get(name) or BINARY_FUNCTIONS.get(name)]
        names.update([f"{function}{suffix}" for function in called if function])
    return names


def indented(lines: Iterable[str], times: int = 1) -> list[str]:
    """Returns the lines of a block within others."""
    return [" " * 4 * times + line for line in lines]


PRELUDE = """
#define ST_INFINITY (1.0f / 0.0f)
#define st_max(a, b) ((a) > (b) ? (a) : (b))
#define st_min(a, b) ((a) < (b) ? (a) : (b))
#define st_max_nan(a, b) ((((a) > (b)) | ((a) != (a))) ? (a) : (b))
#define st_min_nan(a, b) ((((a) < (b)) | ((a) != (a))) ? (a) : (b))

#define ST_INTEGER_DIVISION(NAME, T, U) \\
ST_FUNCTION T st_floor_divide_##NAME(T a, T b) { \\
    if (b == 0) return 0; \\
    if (b == -1) return (T)(0u - (U)a); \\
    T q = a / b; \\
    return q - ((a % b != 0) & ((a < 0) != (b < 0))); \\
} \\
ST_FUNCTION T st_remainder_##NAME(T a, T b) { \\
    if (b == 0 || b == -1) return 0; \\
    T r = a % b; \\
    return (r != 0) & ((r < 0) != (b < 0)) ? r + b : r; \\
}
ST_INTEGER_DIVISION(int, int, unsigned int)
ST_INTEGER_DIVISION(long, long long, unsigned long long)

#define ST_FLOAT_FUNCTIONS(T, F) \\
ST_FUNCTION T st_remainder##F(T a, T b) { \\
    T r = fmod##F(a, b); \\
    if (b == 0) return r; \\
    if (r == 0) return copysign##F((T)0, b); \\
    return (b < 0) != (r < 0) ? r + b : r; \\
} \\
ST_FUNCTION T st_floor_divide##F(T a, T b) { \\
    if (b == 0) return a / b; \\
    T r = fmod##F(a, b), q = (a - r) / b; \\
    if (r != 0 && (b < 0) != (r < 0)) q -= 1; \\
    if (q == 0) return copysign##F((T)0, a / b); \\
    T whole = floor##F(q); \\
    return q - whole > (T)0.5 ? whole + 1 : whole; \\
} \\
ST_FUNCTION T st_logaddexp##F(T a, T b) { \\
    T d = a - b, more = a > b ? a : b; \\
    T sum = more + log1p##F(exp##F(-fabs##F(d))); \\
    return a == b ? a + (T)0.693147180559945309417232121458176568 : d != d ? d : sum; \\
}
ST_FLOAT_FUNCTIONS(float, f)
ST_FLOAT_FUNCTIONS(double, )
"""
"""The functions that expressions call. ``ST_FUNCTION`` is defined before: ``static inline`` in C."""
