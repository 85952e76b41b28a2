"""Blocks of large results are used again, and only once nobody can see them."""
from __future__ import annotations

import gc
import threading

import numpy
import pytest
import torch

from fuseline.runtime.memory import WORTH_RECYCLING, Recycler

N = WORTH_RECYCLING // 4                                        # elements of f32


def fresh(recycler: Recycler) -> torch.Tensor:
    return recycler.tensor((N,), (1,), torch.float32)


def test_memory_of_a_dead_result_is_used_again():
    recycler = Recycler(1 << 30)
    first = fresh(recycler)
    address = first.data_ptr()
    second = fresh(recycler)
    assert second.data_ptr() != address
    del first
    assert fresh(recycler).data_ptr() == address
    assert recycler.held == 2 * WORTH_RECYCLING


HOLDERS = {
    "tensor": lambda t: t, "view": lambda t: t[5:7], "detached": lambda t: t.detach(), "numpy": lambda t: t.numpy(),
    "numpy slice": lambda t: t.numpy()[3:5], "storage": lambda t: t.untyped_storage(), "memoryview": lambda t: memoryview(t.numpy()),
    "dlpack": lambda t: torch.utils.dlpack.to_dlpack(t), "numpy from dlpack": numpy.from_dlpack,
    "saved for backward": lambda t: torch.ones(N, requires_grad=True) * t,
    "alias by set_": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (3,), (1,)),
    "lazy clone": lambda t: torch._lazy_clone(t),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_anybody_holds_is_left_alone(holder):
    recycler = Recycler(1 << 30)
    tensor = fresh(recycler)
    address = tensor.data_ptr()
    held = HOLDERS[holder](tensor)
    del tensor
    gc.collect()
    later = [fresh(recycler) for _ in range(3)]
    assert address not in [t.data_ptr() for t in later]
    del held, later


def test_storages_that_the_user_changed_are_forgotten():
    recycler = Recycler(1 << 30)
    shared, resized = fresh(recycler), fresh(recycler)
    shared.share_memory_()
    resized.untyped_storage().resize_(8)
    del shared, resized
    again = [fresh(recycler) for _ in range(2)]
    assert all(t.untyped_storage().nbytes() == WORTH_RECYCLING and not t.is_shared() for t in again)
    assert recycler.held == 2 * WORTH_RECYCLING


def test_no_more_is_held_than_the_limit():
    recycler = Recycler(3 * WORTH_RECYCLING)
    alive = [fresh(recycler) for _ in range(5)]
    assert recycler.held == 3 * WORTH_RECYCLING
    assert len({t.data_ptr() for t in alive}) == 5
    del alive
    double = recycler.tensor((2, N), (N, 1), torch.float32)      # another size: the free blocks make room for it
    assert recycler.held == 2 * WORTH_RECYCLING and double.shape == (2, N)


def test_strides_and_types_are_as_asked():
    recycler = Recycler(1 << 30)
    t = recycler.tensor((4, 3, 512, 512), (3 * 512 * 512, 1, 3 * 512, 3), torch.bfloat16)
    assert t.is_contiguous(memory_format=torch.channels_last) and t.dtype == torch.bfloat16 and not t._is_view()
    gaps = recycler.tensor((2, N), (2 * N, 1), torch.float32)
    assert gaps.stride() == (2 * N, 1) and gaps.untyped_storage().nbytes() == 3 * N * 4
    assert recycler.tensor((0, N), (N, 1), torch.float32).numel() == 0


def test_threads_never_share_a_block():
    recycler = Recycler(1 << 30)
    clashes = []

    def work(mark: int) -> None:
        for _ in range(200):
            t = fresh(recycler)
            t[:16] = mark
            if not bool((t[:16] == mark).all()):
                clashes.append(mark)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not clashes
