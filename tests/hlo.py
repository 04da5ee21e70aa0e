"""What the tests ask of a compiled program: its copies, its temporary memory, its control edges."""

import jax

from jaxsched._hlo import _copies
from jaxsched._hlo._text import parse


def text(program):
    found = program.as_text()
    assert found is not None
    return found


def compiled(fun, *args, **options):
    """`fun` under `jit` with these options, compiled for `args`."""
    return jax.jit(fun, **options).lower(*args).compile()


def copied_bytes(program, buffer):
    """The bytes in copies of at least half of `buffer` (an array, or its size in bytes).

    Copies of counters and rows do not count.
    """
    size = buffer if isinstance(buffer, int) else buffer.nbytes
    return _copies.copied_bytes(text(program), size // 2)


def temp_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


def control_edges(program):
    """The control edges, as pairs of sets: the traced operations which are ordered.

    A fusion does several of them at once.
    """
    module = parse(text(program))
    edges = _copies.control_edges(module)
    return [(_operations(module, first), _operations(module, second)) for _, first, second in edges]


def _operations(module, instruction):
    done = [instruction]
    if instruction.opcode == "fusion":
        done += module.computations[instruction.called[0]].instructions
    return {each.op_name.rpartition("/")[2] for each in done if each.op_name}
