"""The reader of optimized HLO text: against a second, cruder reader, the compiler's own sizes, and
texts of four JAX versions."""

import itertools
import json
import math
import re
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jaxsched._hlo import _text
from jaxsched._hlo._shape import parse_shape

FIXTURES = Path(__file__).parent / "fixtures" / "hlo"
TEXTS = sorted(FIXTURES.glob("*.txt"))
USER = (FIXTURES.parent / "user.py").read_text().splitlines()


def f32(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def of(dtype, *dims):
    return jax.ShapeDtypeStruct(dims, dtype)


def scan_rows(x):
    def body(x, i):
        return x.at[i].set(x[i] * 2), x[i]

    return lax.scan(body, x, jnp.arange(8))


def newton(x):
    def step(carry):
        x, _ = carry
        return x - (x * x - 2) / (2 * x), jnp.abs(x * x - 2).max()

    return lax.while_loop(lambda carry: carry[1] > 1e-3, step, (x, jnp.float32(1)))


PROGRAMS = {
    "elementwise": (lambda x: jnp.sin(x) * 2, (f32(16, 8),)),
    "pytree": (lambda tree: {"b": tree["a"][0] + 1, "c": tree["a"][1]}, ({"a": [f32(3), f32(5)]},)),
    "scan": (scan_rows, (f32(16, 16),)),
    "while": (newton, (f32(32),)),
    "switch": (
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda x: x.at[0].set(0.0)], x),
        (of(jnp.int32), f32(64)),
    ),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x)), (f32(100),)),
    "scatter": (lambda x, i: x.at[i].add(1.0), (f32(100), of(jnp.int32, 7))),
    "matmul": (lambda x, y: jnp.tanh(x @ y).sum(1), (f32(40, 30), f32(30, 20))),
    "cholesky": (jnp.linalg.cholesky, (f32(12, 12),)),
    "fft": (jnp.fft.fft, (of(jnp.complex64, 16),)),
    "random": (lambda: jax.random.normal(jax.random.key(0), (33,)), ()),
    "callback": (
        lambda x: jax.pure_callback(np.sin, of(jnp.float32, 9), x, vmap_method="sequential"),
        (f32(9),),
    ),
    "grad": (jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (f32(6, 5), f32(4, 6))),
    "bool": (lambda x: x & ~x, (of(jnp.bool_, 21),)),
    "int4": (lambda x: x + x, (of(jnp.int4, 3, 7),)),
    "uint4": (lambda x: x ^ x, (of(jnp.uint4, 4, 8),)),
    "float8": (lambda x: x + x, (of(jnp.float8_e4m3fn, 5, 5),)),
    "bfloat16": (lambda x: x * x, (of(jnp.bfloat16, 5, 5),)),
    "int64 as float16": (lambda x: x.astype(jnp.float16), (of(jnp.int32, 11),)),
    "empty": (lambda x: x + 1, (f32(0, 4),)),
    "scalar": (lambda x: x + 1, (f32(),)),
    "many": (lambda *xs: tuple(x + 1 for x in xs), tuple(f32(n) for n in range(1, 13))),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request):
    function, arguments = PROGRAMS[request.param]
    return jax.jit(function).lower(*arguments).compile()


### A second reader, which only knows lines


def crude_lines(text):
    return [line for line in text.splitlines() if re.match(r"\s+\S.* = ", line)]


def crude_opcodes(text):
    """Opcode by line: the first lower-case word before a parenthesis, outside of shapes."""
    opcodes: list[str] = []
    for line in crude_lines(text):
        right = re.sub(r"/\*.*?\*/", "", line.split(" = ", 1)[1])
        while right[0] == "(":  # remove tuple shapes from the inside out
            right = re.sub(r"^(\(.*?)\(([^()]*)\)", r"\1", right) if _nested(right) else right
            right = re.sub(r"^\([^()]*\) ", "x ", right)
        opcodes += re.findall(r"^\S+ ([a-z\-]+)\(", right)
    return opcodes


def _nested(right):
    first = re.match(r"\(([^()]*)([()])", right)
    return first is not None and first[2] == "("


def read_again(text):
    """The facts that both readers can tell."""
    module = _text.parse(text)
    instructions = [i for c in module.computations.values() for i in c.instructions]
    return module, instructions


def check_against_the_crude_reader(text):
    module, instructions = read_again(text)
    assert [i.raw for i in instructions] == [line.rstrip() for line in crude_lines(text)]
    assert [i.opcode for i in instructions] == crude_opcodes(text)
    assert len(module.computations) == len(re.findall(r"^\S.*\{$", text, re.M))
    assert sum(i.is_root for i in instructions) == len(module.computations)
    entry = text[text.index("\nENTRY") :]
    assert len(module.entry.instructions) == len(crude_lines(entry))
    assert "ROOT" in module.entry.root.raw


def check_references(module):
    """Names resolve, and what is scheduled comes after what it needs."""
    for computation in module.computations.values():
        seen = set()
        for instruction in computation.instructions:
            assert {*instruction.operands, *instruction.control_predecessors} <= seen
            assert {*instruction.called} <= {*module.computations}
            seen.add(instruction.name)
        numbers = {i.parameter_number for i in computation.instructions} - {None}
        assert numbers == {*range(len(numbers))}
        assert {*computation.by_name} == seen


def check_tuple_shapes(module):
    """A `get-tuple-element` has the shape that its operand has at the index."""
    for computation in module.computations.values():
        for instruction in computation.instructions:
            whole = [computation.by_name[name].shape for name in instruction.operands]
            if instruction.opcode == "get-tuple-element":
                assert instruction.shape[0] == whole[0][instruction.tuple_index]
            if instruction.opcode == "tuple":
                assert [*instruction.shape] == [array for shape in whole for array in shape]


def result_bytes(shape):
    """What the compiler counts for the results: with a table of pointers if there are several."""
    return shape.nbytes + (8 * len(shape) if len(shape) != 1 else 0)


def test_a_compiled_program_agrees_with_the_crude_reader(program):
    check_against_the_crude_reader(program.as_text())


def test_names_of_a_compiled_program_resolve(program):
    module = _text.parse(program.as_text())
    check_references(module)
    check_tuple_shapes(module)
    assert module.is_scheduled


def test_argument_and_result_bytes_are_the_compilers(program):
    entry = _text.parse(program.as_text()).entry
    stats = program.memory_analysis()
    arguments = sum(i.shape.nbytes for i in entry.instructions if i.opcode == "parameter")
    assert arguments == stats.argument_size_in_bytes
    assert result_bytes(entry.root.shape) == stats.output_size_in_bytes


def test_text_without_percent_signs_reads_the_same(program):
    text = program.as_text()
    _, with_signs = read_again(text)
    _, without = read_again(text.replace("%", ""))
    for one, other in zip(with_signs, without, strict=True):
        assert (one.name, one.opcode, one.shape) == (other.name, other.opcode, other.shape)
        assert one.operands == other.operands
        assert one.called == other.called


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_fixture(path):
    text = path.read_text()
    check_against_the_crude_reader(text)
    module = _text.parse_file(path)
    check_references(module)
    check_tuple_shapes(module)
    stats = json.loads((FIXTURES / "memory.json").read_text())[path.name]
    parameters = module.entry.parameters
    assert sum(i.shape.nbytes for i in parameters.values()) == stats["arguments"]
    assert result_bytes(module.entry.root.shape) == stats["results"]
    aliased = [parameters[number].shape for number, _ in module.input_output_alias.values()]
    assert sum(shape.nbytes for shape in aliased) == stats["aliased"]


def test_the_fixtures_hold_three_versions_of_each_program():
    versions = {path.stem.rpartition("-")[0]: 0 for path in TEXTS}
    for path in TEXTS:
        versions[path.stem.rpartition("-")[0]] += 1
    assert len(versions) == 9
    assert {*versions.values()} == {3}


### Positions in the user's program


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_positions_name_lines_of_the_user(path):
    module, instructions = read_again(path.read_text())
    updates = [
        module.source(i)
        for i in instructions
        if i.opcode == "dynamic-update-slice" and (i.op_name or "").endswith("scatter-add")
    ]
    for source in filter(None, updates):
        assert Path(source.file).name == "user.py"
        assert ".at[" in USER[source.line - 1] or "embed" in USER[source.line - 1]
    known = [i for i in instructions if module.source(i)]
    assert len(known) > len(instructions) / 5


@pytest.mark.parametrize("version", ["0.11.1", "0.12.0.1"])
def test_the_stack_leads_from_the_innermost_frame_to_the_script(version):
    module, instructions = read_again((FIXTURES / f"nested_loops-{version}.txt").read_text())
    (update,) = [i for i in instructions if i.opcode == "dynamic-update-slice"]
    stack = module.stack(update)
    assert module.source(update) == stack[0]
    functions = [name for name, _ in itertools.groupby(frame.function for frame in stack)]
    assert functions[:3] == [
        "nested_loops.<locals>.inner",
        "nested_loops.<locals>.outer",
        "nested_loops",
    ]
    assert functions[-1] == "<module>"
    assert stack[0].line == next(n for n, line in enumerate(USER, 1) if "at[j, j].set" in line)


def test_the_running_jax_names_this_file():
    def update(x):
        return x.at[3].set(1.0)  # this line

    module, instructions = read_again(jax.jit(update).lower(f32(9)).compile().as_text() or "")
    updates = [i for i in instructions if i.opcode == "dynamic-update-slice"]
    (source,) = {module.source(i) for i in updates}
    assert source is not None
    assert Path(source.file) == Path(__file__)
    assert "# this line" in Path(__file__).read_text().splitlines()[source.line - 1]
    assert source.function is not None
    assert source.function.endswith("update")


### Snippets, written by hand

# After the print-outs of XLA's GPU compiler; no GPU was at hand to make one.
GPU = r"""HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) }, buffer_donor={ (1, {}) }, entry_computation_layout={(bf16[8,128]{1,0}, f32[], s32[4]{0})->(bf16[8,128]{1,0}, s32[4]{0})}, replica_count=1, num_partitions=2, frontend_attributes={fingerprint_before_lhs="3a, b=c"}

%fused_slice (param_0.3: bf16[8,128]) -> bf16[1,128] {
  %param_0.3 = bf16[8,128]{1,0} parameter(0)
  ROOT %slice.1 = bf16[1,128]{1,0} slice(%param_0.3), slice={[0:1], [0:128]}, metadata={op_name="jit(step)/slice" source_file="user.py" source_line=7}
}

%add.clone (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %add.9 = f32[] add(%x.1, %y.1)
}

%command_buffer (p: bf16[8,128]) -> (bf16[1,128], bf16[8,128]) {
  %p = bf16[8,128]{1,0} parameter(0)
  %loop_slice_fusion = bf16[1,128]{1,0} fusion(%p), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(step)/slice" source_file="user.py" source_line=7}, backend_config={"operation_queue_id":"0","wait_on_operation_queues":[],"force_earliest_schedule":false}
  %copy.7 = bf16[8,128]{1,0} copy(%p)
  ROOT %tuple.3 = (bf16[1,128]{1,0}, bf16[8,128]{1,0}) tuple(%loop_slice_fusion, %copy.7)
}, execution_thread="main"

ENTRY %main.42 (Arg_0.1: bf16[8,128], Arg_1.2: f32[], Arg_2.3: s32[4]) -> (bf16[8,128], s32[4]) {
  %Arg_0.1 = bf16[8,128]{1,0} parameter(0), sharding={devices=[2,1]<=[2]}, metadata={op_name="params[\'w, x\']"}
  %Arg_1.2 = f32[]{:T(128)} parameter(1), sharding={replicated}
  %Arg_2.3 = s32[4]{0} parameter(2)
  %copy-start = (bf16[8,128]{1,0:S(5)}, bf16[8,128]{1,0}, u32[]) copy-start(%Arg_0.1), control-predecessors={%Arg_1.2, %Arg_2.3}
  %all-reduce-start.1 = f32[] all-reduce-start(%Arg_1.2), channel_id=1, replica_groups=[1,2]<=[2], use_global_device_ids=true, to_apply=%add.clone, backend_config={"collective_backend_config":{"is_sync":false}}
  %custom-call.1 = (bf16[8,128]{1,0}, s8[4194304]{0}) custom-call(%Arg_0.1, %Arg_0.1), custom_call_target="__cublas$gemm", output_to_operand_aliasing={{0}: (1, {})}, backend_config={"gemm_backend_config":{"alpha_real":1,"epilogue":"DEFAULT, calls=%nowhere"}}
  %get-tuple-element.8 = bf16[8,128]{1,0} get-tuple-element(%custom-call.1), index=0
  %custom-call.2 = bf16[8,128]{1,0} custom-call(%get-tuple-element.8), custom_call_target="triton\"kernel", api_version=API_VERSION_TYPED_FFI, backend_config={grid_x = 4 : i32, name = "body=%nothing) }{"}
  %all-reduce-done.1 = f32[] all-reduce-done(%all-reduce-start.1)
  %copy-done = bf16[8,128]{1,0:S(5)} copy-done(%copy-start)
  %call = (bf16[1,128]{1,0}, bf16[8,128]{1,0}) call(%custom-call.2), to_apply=%command_buffer, frontend_attributes={a="1,2",b="{x=y}"}
  %get-tuple-element.9 = bf16[8,128]{1,0} get-tuple-element(%call), index=1
  ROOT %tuple.5 = (bf16[8,128]{1,0}, s32[4]{0}) tuple(%get-tuple-element.9, /*index=1*/%Arg_2.3)
}
"""  # noqa: E501 - HLO has one instruction on a line, however long


def test_gpu_text():
    module = _text.parse(GPU)
    check_references(module)
    assert module.input_output_alias == {(0,): (0, ()), (1,): (2, ())}
    assert module.buffer_donors == {(1, ())}
    assert [*module.computations] == ["fused_slice", "add.clone", "command_buffer", "main.42"]
    entry = module.entry.by_name
    assert entry["copy-start"].shape.nbytes == 2 * 8 * 128 * 2 + 4
    assert entry["copy-start"].control_predecessors == ["Arg_1.2", "Arg_2.3"]
    assert entry["copy-start"].shape[0].layout == "1,0:S(5)"
    assert entry["all-reduce-start.1"].called == ["add.clone"]
    assert entry["custom-call.1"].called == []
    assert entry["custom-call.1"].attribute("output_to_operand_aliasing") == "{{0}: (1, {})}"
    assert entry["custom-call.2"].called == []
    assert entry["custom-call.2"].backend_config == '{grid_x = 4 : i32, name = "body=%nothing) }{"}'
    assert entry["call"].called == ["command_buffer"]
    assert entry["call"].frontend_attributes == {"a": "1,2", "b": "{x=y}"}
    assert entry["Arg_0.1"].op_name == "params['w, x']"
    assert entry["tuple.5"].operands == ["get-tuple-element.9", "Arg_2.3"]
    fusion = module.computations["command_buffer"].by_name["loop_slice_fusion"]
    assert module.stack(fusion) == (_text.Source("user.py", 7),)


# In the style of XLA's short printer: no percent signs, no signatures, types in some operands.
SHORT = """
HloModule short

body {
  carry = (s32[], f32[4]{0}) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  x = f32[4]{0} get-tuple-element((s32[], f32[4]{0}) carry), index=1
  one = s32[] constant(1)
  next = s32[] add(s32[] i, s32[] one)
  ROOT out = (s32[], f32[4]{0}) tuple(next, x)
}

condition {
  carry.1 = (s32[], f32[4]{0}) parameter(0)
  ROOT stop = pred[] constant(false)
}

ENTRY main {
  token = token[] after-all()
  zero = s32[] constant(0)
  table = f32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })
  x.1 = f32[4]{0} parameter(0)
  start = (s32[], f32[4]{0}) tuple(zero, x.1)
  loop = (s32[], /*index=1*/f32[4]{0}) while(start), condition=condition, body=body, backend_config={"known_trip_count":{"n":"12"}}
  flag = pred[] constant(true)
  choice = f32[4]{0} conditional(flag, x.1, x.1), true_computation=yes, false_computation=no
  ROOT last = f32[4]{0} get-tuple-element(loop), index=1
}
"""  # noqa: E501 - HLO has one instruction on a line, however long


def test_short_text():
    module = _text.parse(SHORT)
    assert (module.name, module.is_scheduled, module.input_output_alias) == ("short", False, {})
    body, entry = module.computations["body"].by_name, module.entry.by_name
    assert body["x"].operands == ["carry"]
    assert body["next"].operands == ["i", "one"]
    assert body["next"].control_predecessors == []
    assert entry["loop"].called == ["condition", "body"]
    assert entry["loop"].known_trip_count == 12
    assert entry["choice"].called == ["yes", "no"]
    assert entry["choice"].known_trip_count is None
    assert entry["table"].operands == []
    assert entry["start"].operands == ["zero", "x.1"]
    assert module.entry.root.name == "last"
    assert module.source(entry["loop"]) is None


def test_header_tables_are_skipped_and_modules_follow_each_other():
    text = """HloModule one, entry_computation_layout={()->s32[]}, origin_recovery_table={
  {"c"} : {"c.1"},
  "
    HloModule inner

    ENTRY %inner () -> s32[] {
      ROOT %inner = s32[] constant(9)
    }
  "
}

ENTRY %e () -> s32[] {
  ROOT %c = s32[] constant(0), origin={{"c"}}
}

HloModule two,
debug_attributes={
  {"c"}:({log_mode=default})
}

ENTRY %f () -> s32[] {
  ROOT %d = s32[] constant(1)
}
"""
    first, second = _text.modules(text.splitlines())
    assert [*first.computations] == ["e"]
    assert (second.name, second.entry.name) == ("two", "f")
    with pytest.raises(_text.HloTextError, match="the text holds 2 modules"):
        _text.parse(text)


def test_file_names_are_unescaped():
    text = """HloModule m

FileNames
1 "a \\"b\\" \\303\\251.py"

FunctionNames

FileLocations
1 {file_name_id=1 function_name_id=0 line=5 end_line=5 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


ENTRY %e () -> s32[] {
  ROOT %c = s32[] constant(0), metadata={op_name="x" stack_frame_id=1}
}
"""
    module = _text.parse(text)
    assert module.stack(module.entry.root) == (_text.Source('a "b" é.py', 5, None),)


### Shapes

_WIDTHS = {"pred": 8, "s8": 8, "u16": 16, "bf16": 16, "f32": 32, "s64": 64, "c64": 64, "c128": 128}
_WIDTHS |= {"f8e5m2": 8, "f8e4m3fn": 8, "f8e8m0fnu": 8, "s4": 8, "u2": 8, "f4e2m1fn": 8}
_WIDTHS |= {"token": 0, "opaque": 0}


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*_WIDTHS]),
            st.lists(st.integers(0, 9), max_size=4),
            st.sampled_from(["", "T(8,128)", "T(8,128)(2,1)S(1)", "E(4)", "S(5)"]),
            st.booleans(),
        ),
        max_size=9,
    ),
)
def test_shapes(arrays):
    texts, sizes = [], []
    for dtype, dims, tiling, dynamic in arrays:
        layout = ",".join(str(n) for n in reversed(range(len(dims)))) + (tiling and f":{tiling}")
        extents = ",".join(f"<={n}" if dynamic else f"{n}" for n in dims)
        texts.append(f"{dtype}[{extents}]" + (f"{{{layout}}}" if layout else ""))
        bits = 4 if tiling == "E(4)" else _WIDTHS[dtype]
        sizes.append(math.ceil(math.prod(dims) * bits / 8))
    shape = parse_shape(
        "(" + ", ".join(f"/*index={n}*/{text}" for n, text in enumerate(texts)) + ")"
    )
    assert [(a.dtype, [*a.dims]) for a in shape] == [(dtype, dims) for dtype, dims, *_ in arrays]
    assert [array.nbytes for array in shape] == sizes
    assert shape.nbytes == sum(sizes)


### Text that is no module

WHOLE = (FIXTURES / "read_then_write-0.12.0.1.txt").read_text()


def test_every_text_that_is_cut_off_is_refused():
    end = WHOLE.rstrip().rindex("}")
    for length in range(1, end):
        with pytest.raises(_text.HloTextError) as caught:
            _text.parse(WHOLE[:length])
        lines = WHOLE[:length].count("\n") + 1
        assert caught.value.line in (lines, lines - 1)
        if length > len("HloModule jit"):
            assert "cut off" in caught.value.what


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("", "the text is empty", 1),
        ("\n\n", "the text is empty", 3),
        ("\x7fELF\x02\0\0\0", "binary data", 1),
        ("import jax\n", "not HLO text: it begins with 'import jax'", 1),
        ("module @jit_f attributes {} {\n", "StableHLO of a lowered program", 1),
        ("HloModule m\n", "the module 'm' has no ENTRY", 2),
        ("HloModule m\nnonsense here\n\n", "neither a computation nor a table: 'nonsense here'", 2),
        ("HloModule m\n\ne {\n  a = s32[]\n}\n", "not an HLO instruction: 'a = s32[]'", 4),
        ("HloModule m\n\ne {\n  a = s32[] while(b)\n}\n", "not an HLO instruction", 4),
        ("HloModule m\n\nFileNames\nx\n\n", "not a row of a stack-frame table: 'x'", 4),
    ],
)
def test_text_that_is_no_module(text, what, line):
    with pytest.raises(_text.HloTextError) as caught:
        _text.parse(text)
    assert what in caught.value.what
    assert caught.value.line == line
    assert str(caught.value).splitlines() == [
        caught.value.what,
        f"  where: line {line}",
        f"  legal: {caught.value.legal}",
    ]


def test_names_that_the_text_lacks():
    module = _text.parse("HloModule m\n\nENTRY e {\n  ROOT a = s32[] add(b, b)\n}\n")
    with pytest.raises(_text.HloTextError, match="computation e lacks the instruction b"):
        module.entry["b"]
    with pytest.raises(_text.HloTextError, match="computation body is called but not there"):
        module["body"]


def test_ten_megabytes_are_read_in_time(tmp_path):
    """A hundred must be read in 20 s; here a tenth of both, with slack for a busy machine."""
    block = WHOLE[WHOLE.index("%fused_computation ") : WHOLE.index("ENTRY")]
    entry = WHOLE[WHOLE.index("ENTRY") :]
    path = tmp_path / "large.txt"
    with open(path, "w") as file:
        file.write(WHOLE[: WHOLE.index("%fused_computation ")])
        for number in range(10_000_000 // len(block)):
            file.write(re.sub(r"%(fused\S+)", rf"%\1.{number}", block))
        file.write(entry.replace("calls=%fused_computation", "calls=%fused_computation.0"))
    assert path.stat().st_size > 10_000_000
    start = time.process_time()
    module = _text.parse_file(path)
    assert time.process_time() - start < 4
    assert sum(len(c.instructions) for c in module.computations.values()) > 50_000


def test_a_module_can_be_read_from_any_iterable_of_lines():
    read = partial(_text.modules, iter(WHOLE.splitlines(keepends=True)))
    (module,) = read()
    assert module.name == _text.parse(WHOLE).name == "jit_read_then_write"
