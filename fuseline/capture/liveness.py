"""Which locals a suspended frame will still look at: the others need not be carried over a graph break."""
from __future__ import annotations

from types import CodeType

from fuseline.capture.instructions import Code

_READS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_CLOSURE", "LOAD_DEREF", "LOAD_CLASSDEREF",
                    "LOAD_FROM_DICT_OR_DEREF", "STORE_DEREF", "DELETE_DEREF", "DELETE_FAST", "MAKE_CELL"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP"})
# A function that names one of these may look at its locals as a whole.
_LOOKS_AT_ALL = frozenset({"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"})
_cache: dict[CodeType, list[frozenset[str]] | None] = {}


def live_locals(code: Code, index: int) -> frozenset[str] | None:
    """Names that may be read from instruction `index` on; None: all of them."""
    if code.code not in _cache:
        _cache[code.code] = None if _LOOKS_AT_ALL & set(code.code.co_names) else _analyse(code)
    known = _cache[code.code]
    return None if known is None else known[index]


def _analyse(code: Code) -> list[frozenset[str]]:
    instructions = code.instructions
    live: list[frozenset[str]] = [frozenset()] * (len(instructions) + 1)
    kept = frozenset((*code.code.co_cellvars, *code.code.co_freevars))
    changed = True
    while changed:
        changed = False
        for i in range(len(instructions) - 1, -1, -1):
            ins = instructions[i]
            after = frozenset() if ins.op in _ENDS else live[i + 1]
            if ins.target >= 0:
                after |= live[min(ins.target, len(instructions))]
            if ins.op == "STORE_FAST":
                after -= {ins.arg}
            if ins.op in _READS:
                after |= {ins.arg}
            if ins.catch is not None:
                after |= live[ins.catch[0]]
            if after != live[i]:
                live[i] = after
                changed = True
    return [names | kept for names in live]
