"""The facts about JAX and XLA that the design leans on, each with what to do once it is no more.

Nothing here tests jaxsched: a new jax or jaxlib turns the test of what has changed red. The message
says whether that is a loss, or a work-around which can go.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import xla
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxsched import before
from jaxsched._before import collecting, marker_p
from jaxsched._hlo._control import MARK_KEY, mark
from jaxsched._hlo._wire import encode
from jaxsched._jax import lower_barrier
from jaxsched._pin import pin_p
from tests.hlo import compiled, control_edges, copied_bytes, text

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:4])
X = jnp.zeros((512, 512))


def pop(x):
    y = x[0, 0]
    return x.at[0, 0].add(1), y


def pinned_pop(x):
    x, y = pin_p.bind(x, x[0, 0], buffers=1)
    return x.at[0, 0].add(1), y


class Hook:
    """The serialized modules that XLA shows to a pass before scheduling."""

    def __init__(self):
        self.modules: list[bytes] = []

    def __call__(self, module):
        self.modules.append(module)


@pytest.fixture
def hook():
    seen = Hook()
    stage = xla.PipelineStage.PRE_SCHEDULER
    xla.register_hlo_module_transformation(seen, name="canary", stage=stage, platforms="cpu")
    yield seen
    xla.clear_hlo_module_transformation("canary", platforms="cpu")


def opcode(name):
    """An opcode as an instruction has it on the wire."""
    return b"\x12" + bytes([len(name)]) + name.encode()


### The hook


def test_the_hook_sees_every_module_that_is_compiled(hook):
    compiled(lambda x: x * 3 - 1, X)
    assert hook.modules, (
        "The HLO hook is not called any more: control edges cannot be written. Look for its new"
        " registration; until then the barriers alone keep the order."
    )


def test_barriers_and_marks_live_until_the_hook(hook):
    compiled(pinned_pop, X, donate_argnums=0)
    module = b"".join(hook.modules)
    assert opcode("opt-barrier") in module, (
        "XLA expands optimization barriers before scheduling again (as up to jaxlib 0.11.0): pins"
        " keep no order. Raise or bound the supported versions in `_jax.check_version`."
    )
    assert mark(1, 2).encode() in module, (
        "XLA drops the frontend attribute of a barrier: the pass finds no pins. Carry the mark in"
        " something else that lives until the hook (see `_control.MARK_KEY`)."
    )


def test_the_hook_comes_after_copy_insertion(hook):
    compiled(pop, X, donate_argnums=0)
    assert any(opcode("copy") in module for module in hook.modules), (
        "At the hook no copies are to be seen yet: control edges may now be in the way of copy"
        " insertion, and a policy on copies cannot look there."
    )


def test_donation_lives_through_a_module_that_the_hook_returns():
    program = compiled(pinned_pop, X, donate_argnums=0)
    assert "input_output_alias" in text(program).splitlines()[0], (
        "A module that the hook returns loses donation (as on jaxlib 0.10.2): every pin costs a"
        " copy. Bound the supported versions in `_jax.check_version`."
    )
    given = jnp.zeros((512, 512))
    address = given.unsafe_buffer_pointer()
    assert program(given)[0].unsafe_buffer_pointer() == address


def test_control_edges_stay_in_the_final_module_and_barriers_do_not():
    program = compiled(pinned_pop, X, donate_argnums=0)
    assert control_edges(program), (
        "XLA drops control edges after the hook: nothing shows the order in the final module, and"
        " `explain` cannot tell that it is held."
    )
    assert "opt-barrier" not in text(program), (
        "Barriers stay in the final module: the control edges may be superfluous now."
    )


def test_the_mark_tells_pins_from_other_barriers(hook):
    compiled(lambda x: lax.optimization_barrier((x, x[0] * 2)), X)
    # As the key of an attribute: a folder of that name is in the source lines of a module, too.
    key = encode(1, MARK_KEY.encode())
    assert not any(key in module for module in hook.modules), (
        "A barrier that is no pin has the mark of one: the pass would add edges that nobody asked"
        " for. Choose another key (see `_control.MARK_KEY`)."
    )


def test_barriers_drop_what_nobody_uses(hook):
    def unused(x):
        x, _ = pin_p.bind(x, x[0, 0] * 3 + 1, buffers=1)
        return x.at[0, 0].add(1)

    program = compiled(unused, X, donate_argnums=0)
    assert not control_edges(program), (
        "XLA keeps values in a barrier that nobody uses: dead reads are computed and pinned now."
        " The pass need no longer tell dropped elements (`_control._pinned`)."
    )


def test_without_the_mark_a_barrier_of_our_own_keeps_the_order():
    """The fallback where there is no hook: a plain barrier removes the copies by itself."""
    plain_p = Primitive("plain_barrier")
    plain_p.multiple_results = True
    plain_p.def_abstract_eval(lambda *avals: list(avals))
    mlir.register_lowering(plain_p, lambda ctx, *args: lower_barrier(ctx, args, None))

    def barrier_pop(x):
        x, y = plain_p.bind(x, x[0, 0])
        return x.at[0, 0].add(1), y

    program = compiled(barrier_pop, X, donate_argnums=0)
    assert copied_bytes(program, X) == 0, (
        "A barrier alone no longer orders the read before the write on CPU: on platforms without"
        " the hook nothing keeps the order."
    )


### Copies that plain jit makes


def test_plain_jit_copies_the_buffer_for_a_read_before_a_write():
    program = compiled(pop, X, donate_argnums=0)
    assert copied_bytes(program, X) >= X.nbytes, (
        "XLA no longer copies for a read before a write (jax-ml/jax#25399, openxla/xla#20440):"
        " measure again what jaxsched is needed for, and say so in the README."
    )


def test_arithmetic_of_one_whole_operand_is_computed_again_for_each_user():
    def users(make):
        def fun(x, v):
            t = make(x, v)
            return t[::-1] + 1, jnp.sum(t * v), t.at[3].set(0)

        return text(compiled(fun, X, X + 1))

    assert users(lambda x, v: -x).count(" negate(") > 1, (
        "XLA no longer duplicates unary arithmetic (`InstructionFusion::EffectivelyAtMostUnary`):"
        " `_alone._lingering` may pin less."
    )
    assert users(lambda x, v: x - v).count(" subtract(") == 1, (
        "XLA duplicates binary arithmetic: `_fusion.is_duplicated` has to count it too, or reads"
        " of an overwritten buffer come late."
    )


def test_a_reshape_fused_into_an_update_costs_a_copy():
    def update(x, v):
        return lax.dynamic_update_slice(x, (v * 2)[None], (3, 0)).reshape(-1)[None]

    program = compiled(update, X, X[0], donate_argnums=0)
    assert copied_bytes(program, X) >= X.nbytes, (
        "XLA updates in place through a reshape: `_alone._is_viewed` and `_viewed_operands` pin"
        " views that need no pin any more."
    )


def test_a_gather_fused_into_an_update_costs_a_copy():
    def update(x, v):
        rows = x[np.arange(len(x) - 1)]
        return lax.dynamic_update_slice(rows, (v * 2)[None], (3, 0))

    program = compiled(update, X, X[0])
    assert copied_bytes(program, X) >= X.nbytes // 2, (
        "XLA updates in place what it gathers (`GatherSimplifier` ends it in a reshape):"
        " `_alone._viewed_operands` pins gathers that need no pin any more."
    )


def test_an_update_at_a_constant_zero_start_passes_over_the_whole_buffer():
    def fastest(place):
        add = jax.jit(lambda x: x.at[place, place].add(1), donate_argnums=0)
        x = jax.block_until_ready(add(jnp.zeros((2000, 2000))))
        times = []
        for _ in range(7):
            start = time.perf_counter()
            x = jax.block_until_ready(add(x))
            times.append(time.perf_counter() - start)
        return min(times)

    assert fastest(0) > 5 * fastest(1), (
        "XLA:CPU updates in place at a constant zero start: `_window.as_window_update` can go."
    )


### Wrong results of plain jit, which a schedule must not inherit


def test_plain_jit_is_wrong_for_an_update_by_a_shifted_slice_then_reshaped():
    def shift(x):
        base = x + 1
        new = lax.dynamic_update_slice(base, base[:-1], (1, 0))
        return new.reshape(1, *x.shape)

    x = np.arange(4096 * 64, dtype=np.int32).reshape(4096, 64)
    wanted = np.concatenate([x[:1], x[:-1]])[None] + 1
    wrong = not np.array_equal(jax.jit(shift, donate_argnums=0)(jnp.array(x)), wanted)
    assert wrong == (VERSION <= (0, 12, 0, 1)), (
        "openxla/xla#49176 is fixed: drop the programs marked `miscompiled` in the benchmarks, and"
        " compare them with plain jit again."
    )


def test_plain_jit_is_wrong_for_a_small_row_updated_by_its_neighbours():
    def smooth(x, j):
        m = x[j]
        return m.at[1:-1].set(m[:-2] + m[2:])

    x = np.arange(64, dtype=np.float32).reshape(4, 16)
    wanted = x[1].copy()
    wanted[1:-1] = x[1, :-2] + x[1, 2:]
    wrong = not np.array_equal(jax.jit(smooth)(x, 1), wanted)
    assert wrong == ((0, 12) <= VERSION <= (0, 12, 0, 1)), (
        "XLA:CPU's fused in-place kernels of small arrays changed: see whether arrays of up to one"
        " cache line need pins (they have none to gain in time)."
    )


### JAX


def test_closed_over_arrays_stay_constants_of_the_jaxpr():
    held = jnp.arange(1000.0)
    jaxpr = jax.make_jaxpr(lambda x: x + held)(1.0)
    assert any(constant is held for constant in jaxpr.consts), (
        "Closed-over device arrays are no longer constants of the traced jaxpr: see that planning"
        " does not bake them into the program."
    )


def test_an_equation_without_results_is_kept_for_its_effect():
    def fun(x):
        y = x.sum()
        before(y, x * y)
        return y

    with collecting():
        jaxpr = jax.make_jaxpr(fun)(jnp.ones(3))
    assert any(eqn.primitive is marker_p for eqn in jaxpr.eqns), (
        "JAX drops equations with an effect while tracing: declarations are lost. The marker needs"
        " results, or another kind of effect."
    )


def test_an_equation_without_results_and_effects_is_dropped_by_derivatives():
    silent_p = Primitive("silent")
    silent_p.multiple_results = True
    silent_p.def_abstract_eval(lambda *avals: [])
    ad.primitive_jvps[silent_p] = lambda primals, tangents: (silent_p.bind(*primals), [])

    def fun(x):
        silent_p.bind(x)
        return x * 2

    assert "silent" not in str(jax.make_jaxpr(jax.grad(jax.checkpoint(fun)))(1.0)), (
        "JAX keeps equations without results: the marker of `before` may need no effect any more."
    )


def test_loops_say_how_many_values_they_carry():
    (loop,) = jax.make_jaxpr(
        lambda x, c: lax.scan(lambda carry, i: (carry + c, i), x, jnp.arange(3))
    )(1.0, 2.0).eqns[-1:]
    constants, carry, _ = loop.params["ft_in"].unpack()
    assert (len(constants), len(carry)) == (1, 1), (
        "`scan` says otherwise how many constants and carried values it has: `_jax.scan_counts`."
    )


def test_a_plain_jitted_call_is_an_equation_named_jit_with_known_parameters():
    (call,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).eqns
    known = """compiler_options_kvs ctx_mesh donated_invars in_layouts in_shardings inline jaxpr
        keep_unused name out_layouts out_shardings""".split()
    assert (call.primitive.name, sorted(call.params)) == ("jit", known), (
        "The `jit` equation has other parameters: decide in `_jax.is_plain_jit` whether a call with"
        " the new ones may be inlined."
    )
