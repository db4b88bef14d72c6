"""Trains a decoder-only transformer on the docstrings of Python's standard library; a token is a byte.

The mesh decides how the program is divided, and nothing else changes:

    python gpt.py                                        # one device
    python gpt.py --mesh data=8                          # the batch over 8 logical devices of the CPU, or over GPUs
    python gpt.py --mesh data=8 --zero 3                 # parameters, gradients and optimizer state are split, too
    python gpt.py --mesh data=2,model=4                  # the columns and rows of the weights over 4 of 8 devices
    shardtensor launch -n 4 gpt.py --mesh data=8 --processes 4  # 2 of the 8 devices in each process

With --folder, the run is saved and goes on from its last checkpoint when the program is started again.
"""

import argparse
import ast
import contextlib
import math
import sysconfig
import time
from pathlib import Path

import numpy as np

import shardtensor as st
from shardtensor import P


def arguments(given=None):
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="data=1", help="its axes and sizes: data, model or both")
    parser.add_argument("--processes", type=int, default=1, help="the number of processes that the launcher starts")
    parser.add_argument("--zero", type=int, default=0, help="0 to 3: split the optimizer state, gradients, parameters")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=256, help="tokens of an example")
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32, help="examples of a step")
    parser.add_argument("--accumulate", type=int, default=1, help="parts in which a step computes its gradient")
    parser.add_argument("--dtype", default="float32", help="dtype of parameters")
    parser.add_argument("--compute", help="dtype of the computation, such as bfloat16; by default that of parameters")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1e-3, help="the greatest learning rate")
    parser.add_argument("--evaluate", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--sample", type=int, default=200, help="characters of text at the end")
    parser.add_argument("--folder", help="where checkpoints are written")
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--executor", default="numpy", help="of st.jit: c is faster than numpy, with bits of its own")
    return parser.parse_args(given)


# The model: functions of a tree of parameters.


def init(key, args):
    """Returns the parameters, with the initial values of GPT-2."""
    width, keys = args.width, iter(st.random.split(key, 4 + 6 * args.layers))

    def weight(*shape, scale=0.02):
        return scale * st.random.normal(next(keys), shape, dtype=args.dtype)

    def norm():
        return {"scale": st.ones(width, dtype=args.dtype), "shift": st.zeros(width, dtype=args.dtype)}

    def block():
        last = 0.02 / math.sqrt(2 * args.layers)  # The sum of the residuals keeps its variance.
        return {
            "norm1": norm(), "query": weight(width, width), "key": weight(width, width), "value": weight(width, width),
            "out": weight(width, width, scale=last), "norm2": norm(), "up": weight(width, 4 * width),
            "down": weight(4 * width, width, scale=last),
        }  # fmt: skip

    return {
        "tokens": weight(args.vocabulary, width), "positions": weight(args.context, width),
        "blocks": [block() for _ in range(args.layers)], "norm": norm(), "logits": weight(width, args.vocabulary),
    }  # fmt: skip


def specs(args):
    """Returns the layout of each parameter on the mesh axis "model".

    Weights whose columns are split are followed by weights whose rows are (Shoeybi et al., Megatron-LM, 2019): a block
    adds two partial sums, and transfers nothing else.
    """
    norm, columns, rows = {"scale": P(), "shift": P()}, P(None, "model"), P("model")
    block = {
        "norm1": norm, "query": columns, "key": columns, "value": columns, "out": rows,
        "norm2": norm, "up": columns, "down": rows,
    }  # fmt: skip
    return {"tokens": P(), "positions": P(), "blocks": [block] * args.layers, "norm": norm, "logits": columns}


def normalize(x, norm):
    """Returns x with mean 0 and variance 1 along the last dimension, scaled and shifted."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x / st.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * norm["scale"] + norm["shift"]


def attention(x, block, heads):
    """Returns, for each token, the mean of the values up to it, weighted by products of their keys and its query."""
    batch, length, width = x.shape
    shape = batch, length, heads, width // heads
    query, key, value = ((x @ block[name]).reshape(shape).transpose(0, 2, 1, 3) for name in ("query", "key", "value"))
    scores = query @ key.mT / math.sqrt(width // heads)
    scores = st.where(np.tri(length, dtype=bool), scores, -np.inf)  # A token sees those before it.
    weights = st.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return (weights @ value).transpose(0, 2, 1, 3).reshape(batch, length, width) @ block["out"]


def gelu(x):
    """Returns x times the normal distribution's probability up to x, in Hendrycks and Gimpel's approximation."""
    return 0.5 * x * (1 + st.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def model(params, tokens, heads, whole):
    """Returns the logits (batch, length, vocabulary) of the tokens that follow tokens (batch, length)."""
    x = st.take(st.reshard(params["tokens"], whole["tokens"]), tokens, axis=0)
    x = x + st.reshard(params["positions"], whole["positions"])[: tokens.shape[1]]
    for block, layouts in zip(params["blocks"], whole["blocks"], strict=True):
        block = st.reshard(block, layouts)  # At ZeRO 3, a block is whole only while it is used.
        x = x + attention(normalize(x, block["norm1"]), block, heads)
        x = x + gelu(normalize(x, block["norm2"]) @ block["up"]) @ block["down"]
    norm, logits = (st.reshard(params[name], whole[name]) for name in ("norm", "logits"))
    return normalize(x, norm) @ logits


def cross_entropy(logits, targets):
    """Returns the mean of the negative logarithms of the probabilities of targets."""
    logits = logits - st.stop_gradient(logits.max(axis=-1, keepdims=True))
    chosen = st.where(targets[..., None] == np.arange(logits.shape[-1]), logits, 0).sum(axis=-1)
    return (st.log(st.exp(logits).sum(axis=-1)) - chosen).mean()


def docstrings():
    """Returns the docstrings of Python's standard library as bytes, an array of uint8."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if not {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found.append(ast.get_docstring(node) or "")
    return np.frombuffer("\n\n".join(filter(None, found)).encode(), "uint8")


# Training.


class Trainer:
    """The layouts of a run, and its compiled functions."""

    def __init__(self, args, optimizer, mesh=None):
        self.args, self.optimizer = args, optimizer
        axes = axes_of(args)
        self.mesh = mesh or st.make_mesh(tuple(axes.values()), tuple(axes))
        self.rows = st.NamedSharding(self.mesh, P("data"))
        layout = specs(args) if "model" in axes else st.tree.map(lambda spec: P(), specs(args))
        self.whole = st.tree.map(lambda spec: st.NamedSharding(self.mesh, spec), layout)
        self.model = lambda params, tokens: model(params, tokens, args.heads, self.whole)
        self.loss = st.mixed_precision(args.compute or args.dtype, args.dtype, args.dtype)(self.loss)
        self.step = st.jit(self._step, donate_argnums=(0, 1), executor=args.executor)
        self.evaluate = st.jit(self.loss, executor=args.executor)
        self.logits = st.jit(self.model, executor=args.executor)

    def start(self, params):
        """Returns the parameters and the first state of the optimizer in their layouts."""
        params = st.reshard(params, self.whole)
        self.layouts = st.optim.zero(params, axis="data", level=self.args.zero) if self.args.zero else None
        if not self.layouts:
            return params, self.optimizer.init(params)
        return st.reshard(params, self.layouts.params), self.optimizer.init(st.reshard(params, self.layouts.state))

    def loss(self, params, rows):
        """Returns the mean cross entropy of each token of rows (batch, context + 1) after the first ones."""
        return cross_entropy(self.model(params, rows[:, :-1]).astype(self.args.dtype), rows[:, 1:])

    def _step(self, params, state, rows):
        loss, grads = st.accumulate(st.value_and_grad(self.loss), self.args.accumulate)(params, rows)
        if self.layouts:
            grads = st.reshard(grads, self.layouts.grads)
        updates, state = self.optimizer.update(grads, state, params)
        return st.optim.apply_updates(params, updates), state, loss

    def sample(self, params, key, text):
        """Returns the text, continued by bytes that the model draws."""
        tokens, length = [*text.encode()], self.args.context
        for n in range(self.args.sample):
            window = np.zeros((1, length), "int64")  # One shape is one program.
            window[0, : len(tokens)] = tokens[-length:]
            logits = self.logits(params, st.reshard(window, st.NamedSharding(self.mesh, P())))
            last = logits[0, min(len(tokens), length) - 1, :256]
            tokens.append(int(st.random.categorical(st.random.fold_in(key, n), last)))
        return bytes(tokens).decode(errors="replace")


def axes_of(args):
    """Returns the axes of the mesh and their sizes: data=2,model=4 is {"data": 2, "model": 4}."""
    return {"data": 1} | {name: int(size) for name, size in (axis.split("=") for axis in args.mesh.split(","))}


def report(text):
    """Prints a line in one of the processes."""
    if st.process_index() == 0:
        print(text, flush=True)


def train(args):
    """Trains a model, or goes on with the training in the folder."""
    schedule = st.optim.warmup_cosine_decay_schedule(0.0, args.rate, args.steps // 10, args.steps, args.rate / 10)
    optimizer = st.optim.chain(st.optim.clip_by_global_norm(1.0), st.optim.adamw(schedule, weight_decay=0.1))
    trainer = Trainer(args, optimizer)
    params, state = trainer.start(init(st.random.key(args.seed), args))
    text, done = docstrings(), 0
    windows = np.lib.stride_tricks.sliding_window_view(text, args.context + 1)  # All of them: a view.
    key, held_out = st.random.key(args.seed + 1), windows[len(text) * 9 // 10 :: args.context][: 4 * args.batch]
    batches = st.data.Batches(windows[: len(text) * 9 // 10 - args.context], args.batch, key=key, sharding=trainer.rows)
    report(f"{sum(x.size for x in st.tree.leaves(params)):,} parameters, {len(text):,} bytes of text, {trainer.mesh}")
    manager = st.checkpoint.Manager(args.folder, keep=2, every=args.every, on_sigterm=True) if args.folder else None
    with batches, manager or contextlib.nullcontext():
        if manager and manager.latest() is not None:
            run = manager.restore(like={"params": params, "state": state, "batches": batches.state, "step": done})
            params, state, done = run["params"], run["state"], run["step"]
            batches.restore(run["batches"])
            report(f"goes on after step {done}")
        begin = time.perf_counter()
        for step, rows in zip(range(done + 1, args.steps + 1), batches, strict=False):
            params, state, loss = trainer.step(params, state, rows)
            if manager:
                manager.save(step, {"params": params, "state": state, "batches": batches.state, "step": step})
            if step % args.evaluate == 0 or step == args.steps:
                value = float(trainer.evaluate(params, st.reshard(held_out, trainer.rows)))
                seconds = (time.perf_counter() - begin) / (step - done)
                report(f"step {step}: loss {float(loss):.4f}, held-out text {value:.4f}, {seconds:.3f} s per step")
    if args.sample:
        report(trainer.sample(st.reshard(params, trainer.whole), st.random.key(args.seed + 2), "Return the "))


def main(given=None):
    """Calls `train` with the arguments of the command line, on the devices of the mesh."""
    args = arguments(given)
    st.set_num_devices(math.prod(axes_of(args).values()) // args.processes)
    if args.processes > 1:
        st.distributed.initialize()
    train(args)


if __name__ == "__main__":
    main()
