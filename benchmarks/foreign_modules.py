"""What the HLO pass costs: `python -m benchmarks.foreign_modules [--rounds N]`.

JAX calls a registered pass for every module it compiles, also for those without a pin.  The first
table compiles such foreign modules with and without the pass, in one process and in turn.  The goal
is a ratio of at most 1.02.  The second table is the pass alone on generated modules.  All times are
CPU times of the whole process, so that other load on the machine does not count.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.extend import xla

from jaxsched._hlo._control import MARK_KEY, add_control_edges, mark
from jaxsched._hlo._wire import encode

### Foreign modules: compiled with the pass and without it

LAYERS, WIDTH = 12, 64


def _tiny(x: jax.Array) -> jax.Array:
    return x[0] @ x[1] + 1


def _layers(x: jax.Array) -> jax.Array:
    h = x[0]
    for layer in range(LAYERS):
        h = jax.nn.gelu(h @ x[layer]) + h
        h = (h - h.mean(-1, keepdims=True)) / (h.std(-1, keepdims=True) + 1e-5)
    return jax.nn.log_softmax(h).sum()


def _loop(x: jax.Array) -> jax.Array:
    def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = carry.at[0].set(jnp.tanh(carry @ row)[0])
        return carry, carry.sum()

    return jax.lax.scan(body, x[0], x)[1]


FOREIGN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "one product": _tiny,
    f"{LAYERS} layers": _layers,
    f"gradient of {LAYERS} layers": jax.grad(_layers),
    "scan with a row update": _loop,
}


def compile_seconds(fun: Callable[[jax.Array], jax.Array]) -> float:
    """What it costs XLA to compile `fun`; not counting tracing and lowering, and uncached."""
    lowered = jax.jit(lambda x: fun(x)).lower(jnp.zeros((LAYERS, WIDTH, WIDTH)))
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


def compile_seconds_with_pass(fun: Callable[[jax.Array], jax.Array]) -> float:
    name = f"{MARK_KEY}-benchmark"
    xla.register_hlo_module_transformation(add_control_edges, name=name, platforms="cpu")
    try:
        return compile_seconds(fun)
    finally:
        xla.clear_hlo_module_transformation(name, platforms="cpu")


def overhead(
    fun: Callable[[jax.Array], jax.Array], rounds: int
) -> tuple[float, tuple[float, float, float]]:
    """Median seconds without the pass, and the quartiles of the ratio with / without it."""
    compile_seconds(fun)
    plain, ratios = [], []
    for turn in range(rounds):
        order = [compile_seconds, compile_seconds_with_pass]
        seconds = {measure: measure(fun) for measure in (order if turn % 2 else order[::-1])}
        plain.append(seconds[compile_seconds])
        ratios.append(seconds[compile_seconds_with_pass] / seconds[compile_seconds])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return statistics.median(plain), (low, middle, high)


### Generated modules: the pass alone

FLOAT = 11  # PrimitiveType.F32
BUFFER, ROW = (1000, 1000), (1000,)

type Dimensions = tuple[int, ...]


def shape(*parts: Dimensions) -> bytes:
    """A ShapeProto: of one array, or of a tuple of several."""
    if len(parts) == 1:
        return encode(2, FLOAT) + b"".join(encode(3, size) for size in parts[0])
    return encode(2, 13) + b"".join(encode(4, shape(part)) for part in parts)


class Computation:
    """An HLO computation under construction, instruction by instruction."""

    def __init__(self) -> None:
        self.instructions: list[bytes] = []

    def add(
        self,
        opcode: str,
        of: bytes,
        operands: Iterable[int] = (),
        *,
        index: int | None = None,
        attribute: str | None = None,
        frame: int | None = None,
    ) -> int:
        """Appends an instruction with a result of shape `of`; returns its id."""
        number = len(self.instructions) + 1
        parts = [
            encode(1, f"{opcode}.{number}".encode()),
            encode(2, opcode.encode()),
            encode(3, of),
            *([] if frame is None else [encode(7, encode(15, frame))]),
            *([] if index is None else [encode(13, index)]),
            encode(35, number),
            *(encode(36, operand) for operand in operands),
        ]
        if attribute is not None:
            entry = encode(1, MARK_KEY.encode()) + encode(2, attribute.encode())
            parts.append(encode(68, encode(1, entry)))
        self.instructions.append(b"".join(parts))
        return number

    def pin(self, buffer: int, *reads: int) -> list[int]:
        """A marked barrier over a buffer and rows read from it; returns what comes out of it."""
        of = shape(BUFFER, *[ROW] * len(reads))
        value = mark(1, 1 + len(reads))
        operands = self.add("tuple", of, (buffer, *reads))
        barrier = self.add("opt-barrier", of, [operands], attribute=value)
        shapes = [BUFFER, *[ROW] * len(reads)]
        return [
            self.add("get-tuple-element", shape(part), [barrier], index=i)
            for i, part in enumerate(shapes)
        ]

    def module(self, frames: int = 0) -> bytes:
        """The serialized module, with a table of `frames` stack frames."""
        instructions = b"".join(encode(2, instruction) for instruction in self.instructions)
        computation = encode(1, b"main") + instructions + encode(5, 1)
        table = b"".join(encode(4, encode(1, 1)) for _ in range(frames))
        return encode(1, b"generated") + encode(3, computation) + encode(17, table)


def plain_module(size: int) -> bytes:
    """`size` instructions, none of them marked."""
    main = Computation()
    x = main.add("parameter", shape(BUFFER))
    while len(main.instructions) < size:
        x = main.add("fusion", shape(BUFFER), [x])
    return main.module()


def pinned_module(size: int) -> bytes:
    """`size` instructions: a row is read, pinned and overwritten, over and over."""
    main = Computation()
    x = main.add("parameter", shape(BUFFER))
    while len(main.instructions) < size:
        x, row = main.pin(x, main.add("fusion", shape(ROW), [x]))
        x = main.add("fusion", shape(BUFFER), [x, row])
    return main.module(frames=size // 10)


def unwritten_module(size: int) -> bytes:
    """`size` instructions: pins, each on what the last one returns, and one write at the end."""
    main = Computation()
    x = main.add("parameter", shape(BUFFER))
    while len(main.instructions) < size:
        x, _ = main.pin(x, main.add("fusion", shape(ROW), [x]))
    main.add("fusion", shape(BUFFER), [x])
    return main.module(frames=size // 10)


SIZES = 1_000, 10_000, 100_000
GENERATED = {"no pin": plain_module, "pin, write": pinned_module, "pins only": unwritten_module}


def pass_seconds(module: bytes, repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        add_control_edges(module)
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the HLO pass costs.")
    parser.add_argument("--rounds", type=int, default=21, help="compilations each way (21)")
    rounds = parser.parse_args().rounds
    print(f"{'foreign module':26}{'compile':>10}   with pass / without: quartiles")
    for name, fun in FOREIGN.items():
        seconds, (low, middle, high) = overhead(fun, rounds)
        print(f"{name:26}{seconds * 1e3:7.0f} ms   {low:.3f}  {middle:.3f}  {high:.3f}")
    print(f"\n{'pass alone':26}" + "".join(f"{size:>12,}" for size in SIZES) + "   instructions")
    for name, generate in GENERATED.items():
        times = [pass_seconds(generate(size)) for size in SIZES]
        print(f"{name:26}" + "".join(f"{seconds * 1e3:9.2f} ms" for seconds in times))


if __name__ == "__main__":
    main()
