"""The arguments of aten.convolution by name, and strides of the channels-last layout."""
from __future__ import annotations

from dataclasses import dataclass

from fuseline.ir.graph import Node, Size, TensorType


@dataclass(frozen=True, slots=True)
class Convolution:
    """The operands and settings of an `aten.convolution.default` node."""

    x: Node
    weight: Node
    bias: Node | None
    stride: tuple
    padding: tuple
    dilation: tuple
    transposed: bool
    output_padding: tuple
    groups: int

    @classmethod
    def of(cls, node: Node) -> Convolution | None:
        """Of a node, or None if it is no convolution."""
        if node.op != "aten.convolution.default":
            return None
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
        return cls(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), bool(transposed), tuple(output_padding), groups)

    def args(self) -> tuple:
        return (self.x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.transposed,
                self.output_padding, self.groups)


def channels_last_stride(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides of a 4-d (N, C, H, W) or 5-d tensor whose channels lie next to each other."""
    order = [0, *range(2, len(shape)), 1]
    strides: list[Size] = [0] * len(shape)
    step: Size = 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * shape[axis]
    return tuple(strides)


def is_channels_last(type_: TensorType) -> bool:
    """True if the strides are those of channels-last, axes of extent 1 aside."""
    if type_.rank not in (4, 5):
        return False
    wanted = channels_last_stride(type_.shape)
    return all(size == 1 or have == want for size, have, want in zip(type_.shape, type_.stride, wanted))
