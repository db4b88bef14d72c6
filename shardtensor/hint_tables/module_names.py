"""Names that the package and its modules lack: `MODULES`, with the rows of the modules, such as names of optax."""

from __future__ import annotations

from shardtensor.hint_tables.jax_names import JAXS, LAXS
from shardtensor.hint_tables.numpy_names import CREATION, DATA_TYPES, NUMPYS
from shardtensor.hint_tables.nx_names import NXS
from shardtensor.hint_tables.rows import ACCUMULATE, BATCHES, CROSS_ENTROPY, KEY, LOSS_SCALE, ZERO, Hints, chosen, each
from shardtensor.hint_tables.torch_names import TORCHS

_CLIP = "`st.optim.chain(st.optim.clip_by_global_norm(1.0), st.optim.adam(1e-3))`"
_SCHEDULE = "a schedule is any function of the count of steps: `lambda count: st.where(count < 100, 0.1, 0.01)`"

_RANDOM = {
    **each("seed set_state get_state default_rng RandomState Generator PCG64 MT19937 Philox SeedSequence", KEY),
    "PRNGKey": "`st.random.key(0)`",
    **each("rand random random_sample ranf sample", "`st.random.uniform(key, (2, 3))`"),
    **each("randn standard_normal", "`st.random.normal(key, (2, 3))`"),
    **each("randint random_integers", "`st.random.integers(key, 0, 10, (2, 3))`"),
    "shuffle": "`x[st.random.permutation(key, len(x))]`",
    "permuted": "`x[st.random.permutation(key, len(x))]`",
    "standard_exponential": "`st.random.exponential(key, (2, 3))`",
    "standard_gamma": "`st.random.gamma(key, 2.0, (2, 3))`",
    "lognormal": "`st.exp(st.random.normal(key, (2, 3)))`",
    "gumbel": "`-st.log(st.random.exponential(key, (2, 3)))`",
    "chisquare": "`2 * st.random.gamma(key, 3 / 2, (2, 3))` has 3 degrees of freedom",
    "rademacher": "`2 * st.random.bernoulli(key, 0.5, (2, 3)) - 1`",
    "weibull": "`st.random.exponential(key, (2, 3)) ** (1 / 2.0)` has the shape 2",
    "multinomial": "`st.random.categorical(key, st.log(x))` draws indices",
    "multivariate_normal": "`st.random.normal(key, (10, 4)) @ st.linalg.cholesky(cov).T`",
    "beta": "a / (a + b) of gamma variables: `st.random.gamma(key, 2.0, (2, 3))`",
    "bits": "`st.random.integers(key, 0, 2**32, (2, 3))`",
    **each("normal_split uniform_split randint_split", "keys are split before: `key, k = st.random.split(key)`"),
    **each("clone key_data wrap_key_data", "keys are values, which are never used up: `st.random.fold_in(key, 1)`"),
}

_LINALG = {
    "inverse": "`st.linalg.inv(x)`",
    "pinverse": "`st.linalg.pinv(x)`",
    "invert": "`st.linalg.inv(x)`",
    "determinant": "`st.linalg.det(x)`",
    "adjoint": "`st.conj(x.T)`",
    "least_squares": "`st.linalg.lstsq(cov, x)`",
    **each("solve_triangular triangular_solve lu_solve cho_solve", "`st.linalg.solve(cov, x)`"),
    "cholesky_ex": "`st.linalg.cholesky(cov)`",
    "inv_ex": "`st.linalg.inv(cov)`",
    "vander": "`st.vander([1.0, 2.0])`",
    **each("einsum", "`st.einsum('ij,jk->ik', x, y)`"),
    **each("dot kron vdot inner", "`st.{}(x[0], y[0])`"),
}

_TREE = {
    **each("reduce", "`functools.reduce(f, st.tree.leaves(params))`"),
    **each("all", "`all(leaf is not None for leaf in st.tree.leaves(params))`"),
    "tree_map": "`st.tree.map(f, params)`",
    "tree_leaves": "`st.tree.leaves(params)`",
    "tree_flatten": "`st.tree.flatten(params)`",
    "tree_unflatten": "`st.tree.unflatten(st.tree.structure(params), st.tree.leaves(params))`",
    "tree_structure": "`st.tree.structure(params)`",
    "register_pytree_node": "`st.register_pytree_node`",
    **each("map_with_path leaves_with_path flatten_with_path", "leaves have no paths here: `st.tree.leaves(params)`"),
    "transpose": "`st.tree.map(lambda *leaves: leaves, params, params)` makes a tree of tuples of several trees",
}

_DATA = {
    **each("DataLoader Dataset TensorDataset DataSource IndexSampler DistributedSampler", BATCHES),
    **each("random_split Subset", "`st.data.Batches(x[:3], 2, key=key)` has these rows only"),
}

_CHECKPOINTS = {
    "CheckpointManager": "`st.checkpoint.Manager`",
    **each("Checkpointer StandardCheckpointer PyTreeCheckpointer AsyncCheckpointer", "`st.checkpoint.save`"),
    "checkpoint": "`st.remat(f)` keeps arguments only; the gradient calls the function again",
}

_OPTIMIZERS = {
    "SGD": "`st.optim.sgd(0.1, momentum=0.9)`",
    "Adam": "`st.optim.adam(1e-3)`",
    "AdamW": "`st.optim.adamw(1e-3, weight_decay=0.01)`",
    "Adafactor": "`st.optim.adafactor()`",
    "Muon": "`st.optim.muon(0.02)`",
    "NAdam": "`st.optim.adam(1e-3, nesterov=True)`",
    "nadam": "`st.optim.adam(1e-3, nesterov=True)`",
    "nadamw": "`st.optim.adamw(1e-3, nesterov=True)`",
    "partition": "`st.optim.multi_transform`",
    "lr_scheduler": "learning rates may be schedules, such as `st.optim.cosine_decay_schedule(0.1, 1000)`",
    "Optimizer": "optimizers are pairs of functions, `st.optim.GradientTransformation`",
    "CosineAnnealingLR": "`st.optim.cosine_decay_schedule(0.1, 1000)`",
    **each("OneCycleLR cosine_onecycle_schedule", "`st.optim.warmup_cosine_decay_schedule(0.0, 0.1, 100, 1000)`"),
    **each("LinearLR warmup_constant_schedule", "`st.optim.linear_schedule(0.0, 0.1, 100)`"),
    **each("StepLR ExponentialLR", "`st.optim.exponential_decay(0.1, 100, 0.5, staircase=True)`"),
    "MultiStepLR": "`st.optim.piecewise_constant_schedule(0.1, {100: 0.5})`",
    **each("LambdaLR join_schedules polynomial_schedule sgdr_schedule Schedule", _SCHEDULE),
    "inject_hyperparams": "a learning rate may be a tensor or a schedule: `st.optim.adamw(st.asarray(1e-3))`",
    **each("clip_grad_norm_ clip_grad_norm", _CLIP),
    **each("clip_grad_value_ clip_grad_value", "`st.optim.chain(st.optim.clip(1.0), st.optim.adam(1e-3))`"),
    "MultiSteps": ACCUMULATE,
    "accumulate": "`st.accumulate`",
    "mixed_precision": "`st.mixed_precision`",
    **each("GradScaler apply_if_finite", LOSS_SCALE + ", and skips steps whose gradients are not finite"),
    "ZeroRedundancyOptimizer": ZERO,
    "named_chain": "`st.optim.chain`",
    "freeze": "`st.optim.multi_transform` with `st.optim.set_to_zero()` for the parameters that stay",
    "incremental_update": "`st.tree.map(lambda new, old: 0.01 * new + 0.99 * old, params, params)`",
    **each("tree tree_utils", "`st.tree`, and `st.optim.global_norm(params)`"),
    **each("softmax_cross_entropy softmax_cross_entropy_with_integer_labels losses", CROSS_ENTROPY),
}

MODULES: dict[str, Hints] = {
    "": {**CREATION, **DATA_TYPES, **NUMPYS, **TORCHS, **JAXS, **LAXS, **NXS},
    "checkpoint": _CHECKPOINTS,
    "data": _DATA,
    "distributed": chosen(
        JAXS, "live_devices ProcessFailureError process_indices reached_preemption_sync_point thread_guard"
    ),
    "linalg": _LINALG,
    "optim": _OPTIMIZERS,
    "random": _RANDOM,
    "sharding": {
        **chosen(JAXS, "AxisType get_abstract_mesh use_abstract_mesh"),
        **chosen(JAXS, "PositionalSharding GSPMDSharding PmapSharding Sharding make_single_device_sharding"),
        **chosen(JAXS, "AbstractDevice ManualAxisType UnreducedKind no_collectives"),
    },
    "tree": _TREE,
}  # fmt: skip
"""What to write in place of names that modules lack; the empty name is that of the package."""
