"""Programs of test_concurrency.py that other processes import."""
import torch

import fuseline


@fuseline.compile
def normalise(x):
    return (x - x.mean()) * torch.rsqrt(x.var() + 1e-5) + torch.sin(x)


class Samples(torch.utils.data.Dataset):
    """A data set whose items a compiled function and a compiled module make."""

    def __init__(self, model=None):
        self.model = model

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = torch.arange(40_000.0) * (index + 1) / 40_000
        y = normalise(x)
        return y if self.model is None else self.model(y[:16])


def in_child(queue, model):
    x = torch.arange(16.0)
    queue.put((normalise(x).tolist(), model(x).tolist()))
