"""Random programs, eager against compiled: see grammar.py for what they consist of, differential.py for what is compared."""
import logging

import pytest
import torch
from differential import check
from grammar import program

QUICK = {"eager": range(12), "fuseline": range(100, 104)}
MANY = {"eager": range(10_000, 10_800), "fuseline": range(20_000, 20_300)}


@pytest.fixture(autouse=True)
def quiet():
    """Programs that raise make torch and fuseline say much."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "fuseline")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)


@pytest.mark.parametrize("backend, seed", [(backend, seed) for backend, seeds in QUICK.items() for seed in seeds])
def test_a_random_program(backend, seed):
    difference = check(program(seed), seed, backend)
    assert difference is None, str(difference)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", MANY)
def test_many_random_programs(backend):
    different = {seed: str(found) for seed in MANY[backend] if (found := check(program(seed), seed, backend)) is not None}
    assert not different
