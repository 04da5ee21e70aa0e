"""Runs a planned jaxpr as hostile as XLA may be, in place wherever `Facts` claims it.

Nothing protects a buffer: an update that is claimed overwrites the memory that every other
reader of that version sees. Within what data and pins allow, each update runs as early as it can,
and all else as late. What XLA may fuse has no value of its own: it is computed again for each use,
at the time of the use, even between the elements of one update that it is fused into.
"""

import random
from typing import Any, cast

import numpy as np

from jaxsched._jax import Jaxpr, JaxprEqn, Literal, scan_counts, scopes_of
from jaxsched._pin import pin_p
from jaxsched._updates import updates
from tests.fuzz._claims import Facts, repeated, strict
from tests.fuzz._primitives import VIEWS, apply

__all__ = ["Machine"]


class Machine:
    """Evaluates planned jaxprs; `contested` counts the updates that other reads had to precede."""

    def __init__(self, orders: dict[Any, Any], rng: random.Random, *, fused: bool = True):
        self._orders = orders
        self._rng = rng
        self._fused = fused
        self._facts: dict[tuple[int, int], Facts] = {}
        self.contested = 0

    def run(self, jaxpr: Jaxpr, arguments: list[np.ndarray], fixed: int = 0) -> list[np.ndarray]:
        """The results; `arguments` are memory that may be overwritten, but for `fixed` of them."""
        key = id(jaxpr), fixed
        if key not in self._facts:
            pairs = [
                (a, b) for eqn in jaxpr.eqns for b in eqn.outvars for a in self._orders.get(b, ())
            ]
            self._facts[key] = Facts(jaxpr, fixed, pairs)
        frame = _Frame(self, self._facts[key], arguments)
        return frame.run(self._rng)

    def call(self, eqn: JaxprEqn, operands: list[np.ndarray]) -> list[np.ndarray]:
        """An equation with jaxprs in it; the operands are memory of its own, or claimed."""
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, operands)
        if name == "while":
            skipped, constants = params["cond_nconsts"], params["body_nconsts"]
            carry = operands[skipped + constants :]
            conditions, constant = operands[:skipped], operands[skipped : skipped + constants]
            while self.run(
                params["cond_jaxpr"], [*conditions, *carry], len(params["cond_jaxpr"].invars)
            )[0]:
                _store(carry, self.run(params["body_jaxpr"], [*constant, *carry], constants))
            return carry
        if name == "cond":
            number = min(max(int(operands[0]), 0), len(params["branches"]) - 1)
            return self.run(params["branches"][number], operands[1:])
        (inner,) = (j for value in params.values() for j in scopes_of(value))
        # XLA inlines a jitted function; what is passed twice is one buffer then.
        values = [v for v in eqn.invars if not isinstance(v, Literal)]
        twice = len({*values}) < len(values)
        return self.run(inner, operands, len(operands) if twice else 0)

    def _scan(self, eqn: JaxprEqn, operands: list[np.ndarray]) -> list[np.ndarray]:
        params = eqn.params
        constants, carried = scan_counts(eqn)
        constant, carry = operands[:constants], operands[constants : constants + carried]
        sequences = operands[constants + carried :]
        kept = [
            np.empty((params["length"], *v.aval.shape), v.aval.dtype)
            for v in params["jaxpr"].outvars[carried:]
        ]
        for i in range(params["length"]):
            i = params["length"] - 1 - i if params["reverse"] else i
            inputs = [*constant, *carry, *(np.array(each[i]) for each in sequences)]
            results = self.run(params["jaxpr"], inputs, constants)
            for target, result in zip(kept, results[carried:], strict=True):
                target[i] = result
            _store(carry, results[:carried])
        return [*carry, *kept]


def _store(carry: list[np.ndarray], results: list[np.ndarray]) -> None:
    """Puts what an iteration returned into the memory of the carried values."""
    new = [
        result if result is memory else np.array(result)
        for result, memory in zip(results, carry, strict=True)
    ]
    for memory, value in zip(carry, new, strict=True):
        if value is not memory:
            memory[...] = value


def _apart(results: list[np.ndarray]) -> list[np.ndarray]:
    """The results, none in the memory of another one: what is returned twice is copied."""
    found: list[np.ndarray] = []
    for result in results:
        shared = any(np.shares_memory(result, other) for other in found)
        found.append(np.array(result) if shared else result)
    return found


class _Frame:
    """One run of one jaxpr. `memory` has the values that exist; others are computed when used."""

    def __init__(self, machine: Machine, facts: Facts, arguments: list[np.ndarray]):
        self._machine = machine
        self._facts = facts
        jaxpr = facts.jaxpr
        self._memory: dict[Any, np.ndarray] = dict(zip(jaxpr.invars, arguments, strict=True))
        self._memory |= zip(jaxpr.constvars, map(np.array, jaxpr.consts), strict=True)
        # Values that could be fused into their users and are in memory too, for users that need
        # them there.
        self._kept: dict[Any, np.ndarray] = {}
        self._done: set[int] = set()
        self._rng = machine._rng

    def run(self, rng: random.Random) -> list[np.ndarray]:
        claimed = list(dict.fromkeys(write for write, _ in self._facts.claims))
        rng.shuffle(claimed)
        rest = [i for i, eqn in enumerate(self._facts.eqns) if self._acts(eqn)]
        if rng.random() < 0.5:
            rng.shuffle(rest)
        for i in [*claimed, *rest]:
            self._act(i, rng)
        return [self._in_memory(value, {}) for value in self._facts.jaxpr.outvars]

    def _acts(self, eqn: JaxprEqn) -> bool:
        """Whether the equation runs at one time and keeps its results."""
        if eqn.primitive.name in VIEWS:
            return False
        return bool(updates(eqn)) or strict(eqn) or not self._machine._fused

    def _act(self, i: int, rng: random.Random) -> None:
        """Runs an equation, and before it what it needs, and nothing else."""
        todo = [i]
        while todo:
            i = todo[-1]
            missing = [] if i in self._done else self._missing(self._facts.eqns[i])
            todo += missing
            if not missing:
                todo.pop()
                if i not in self._done:
                    self._done.add(i)
                    self._execute(i, rng)

    def _missing(self, eqn: JaxprEqn) -> list[int]:
        needed: dict[int, None] = {}
        todo = [eqn]
        for each in todo:
            for value in each.invars:
                made = None if isinstance(value, Literal) else self._facts.producer.get(value)
                if made is None or made in self._done or made in needed:
                    continue
                producer = self._facts.eqns[made]
                if self._acts(producer):
                    needed[made] = None
                else:
                    todo.append(producer)
        return list(needed)

    def _value(self, value: Any, fused: dict[Any, np.ndarray]) -> np.ndarray:
        """What the memory says of a value now; `fused` are the values of the same kernel."""
        if isinstance(value, Literal):
            return np.asarray(value.val, cast(Any, value.aval).dtype)
        if value in self._memory:
            return self._memory[value]
        if value not in fused and value in self._kept and self._rng.random() < self._again(value):
            fused[value] = self._kept[value]
        if value not in fused:
            eqn = self._facts.eqns[self._facts.producer[value]]
            arrays = [self._value(each, fused) for each in eqn.invars]
            fused[value] = apply(eqn.primitive.name, eqn.params, arrays)
            if not repeated(eqn):
                self._kept[value] = fused[value]
        return fused[value]

    def _again(self, value: Any) -> float:
        """The chance that what is in memory is taken from there, and not computed once more."""
        return 0.5 if repeated(self._facts.eqns[self._facts.producer[value]]) else 1.0

    def _in_memory(self, value: Any, fused: dict[Any, np.ndarray]) -> np.ndarray:
        """The memory of a value, which is computed only once for all who need it there."""
        if isinstance(value, Literal) or value in self._memory:
            return self._value(value, fused)
        eqn = self._facts.eqns[self._facts.producer[value]]
        if eqn.primitive.name in VIEWS:
            memory = self._in_memory(eqn.invars[0], fused)
            return apply(eqn.primitive.name, eqn.params, [memory])
        if value not in self._kept:
            self._kept[value] = self._value(value, fused)
        return self._kept[value]

    def _execute(self, i: int, rng: random.Random) -> None:
        eqn = self._facts.eqns[i]
        pairs = updates(eqn)
        if eqn.primitive is pin_p or (not pairs and not scopes_in(eqn)):
            fused: dict[Any, np.ndarray] = {}
            values = [self._in_memory(each, fused) for each in eqn.invars]
            if eqn.primitive is not pin_p:
                values = [apply(eqn.primitive.name, eqn.params, values)]
            self._memory |= zip(eqn.outvars, values, strict=True)
        elif scopes_in(eqn):
            self._call(i, eqn)
        else:
            self._update(i, eqn, rng)

    def _claims(self, i: int, operand: int) -> bool:
        claim = self._facts.claims.get((i, operand))
        if claim is not None and claim.readers:
            self._machine.contested += 1
        return claim is not None

    def _call(self, i: int, eqn: JaxprEqn) -> None:
        fused: dict[Any, np.ndarray] = {}
        operands = [
            value if self._claims(i, number) else np.array(value)
            for number, value in enumerate(self._in_memory(each, fused) for each in eqn.invars)
        ]
        results = self._machine.call(eqn, operands)
        self._memory |= zip(eqn.outvars, _apart(results), strict=True)

    def _update(self, i: int, eqn: JaxprEqn, rng: random.Random) -> None:
        target, *others = eqn.invars
        buffer = self._in_memory(target, {})
        if not self._claims(i, 0):
            buffer = np.array(buffer)
        # Half of the elements are written before what is fused into the update is read for the
        # other half.
        new = apply(eqn.primitive.name, eqn.params, [buffer, *self._values(others)])
        first = np.random.default_rng(rng.getrandbits(32)).random(buffer.shape) < 0.5
        first |= rng.random() < 0.2
        buffer[first] = new[first]
        new = apply(eqn.primitive.name, eqn.params, [buffer, *self._values(others)])
        buffer[~first] = new[~first]
        self._memory[eqn.outvars[0]] = buffer

    def _values(self, values: list[Any]) -> list[np.ndarray]:
        fused: dict[Any, np.ndarray] = {}
        return [self._value(value, fused) for value in values]


def scopes_in(eqn: JaxprEqn) -> bool:
    return any(scopes_of(value) for value in eqn.params.values()) and eqn.primitive.name in (
        "scan",
        "while",
        "cond",
        "jit",
        "closed_call",
    )
