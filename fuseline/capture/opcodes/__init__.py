"""Instruction handlers, one module a family; importing this package registers them all."""
from fuseline.capture.opcodes import build, call, exceptions, flow, generator, load_store, match, operate  # noqa: F401
