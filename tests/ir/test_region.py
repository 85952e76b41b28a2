"""Sources are compared and looked up by what they mean."""
from __future__ import annotations

from fuseline.ir.region import Attr, InDict, Item, Local, Pinned


def test_equal_sources_have_equal_hashes():
    first, second = (Item(Attr(InDict(Local("self"), "_modules"), "conv"), 3) for _ in range(2))
    assert first == second and hash(first) == hash(second) == hash(first)
    assert {first: 1}[second] == 1


def test_kinds_of_access_and_pinned_objects_differ():
    assert Attr(Local("x"), "y") != InDict(Local("x"), "y") and hash(Attr(Local("x"), "y")) != hash(InDict(Local("x"), "y"))
    one, other = [], []
    assert Pinned(one) == Pinned(one) and Pinned(one) != Pinned(other)
    assert {Pinned(one): 1, Pinned(other): 2}[Pinned(other)] == 2
