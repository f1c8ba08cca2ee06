"""Layers of three image classifiers, from their papers: weights and multiplications. Pure.

VGG-16: arXiv 1409.1556, table 1, column D. ResNet-101: arXiv 1512.03385, table 1. Inception V3:
arXiv 1512.00567 and the network of TF-slim that is named so; without the auxiliary head, which
tf_cnn_benchmarks leaves out too. Batch normalisation counts as two weights a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MODELS", "Part", "inception_v3", "resnet_101", "vgg_16"]


@dataclass(frozen=True, slots=True)
class Part:
    """A layer with weights, in the order of forward."""

    name: str
    num_weights: int
    multiplications: int
    """For one image."""


def _conv(
    name: str, come: int, go: int, kernel: tuple[int, int], size: int, *, norm: bool = True
) -> Part:
    """A convolution whose output is `size` x `size`, with BatchNorm or a bias."""
    weights = come * go * kernel[0] * kernel[1]
    return Part(name, weights + (2 * go if norm else go), weights * size * size)


def _dense(name: str, come: int, go: int) -> Part:
    return Part(name, come * go + go, come * go)


def vgg_16() -> list[Part]:
    """Thirteen convolutions 3 x 3 and three dense layers, which have nine tenths of the weights."""
    parts, come = [], 3
    for stage, (go, count, size) in enumerate(
        [(64, 2, 224), (128, 2, 112), (256, 3, 56), (512, 3, 28), (512, 3, 14)], start=1
    ):
        for number in range(1, count + 1):
            parts.append(_conv(f"conv{stage}_{number}", come, go, (3, 3), size, norm=False))
            come = go
    dense = [("fc6", 512 * 7 * 7, 4096), ("fc7", 4096, 4096), ("fc8", 4096, 1000)]
    return [*parts, *(_dense(*each) for each in dense)]


def resnet_101() -> list[Part]:
    """Bottlenecks in groups of 3, 4, 23 and 3."""
    parts, come = [_conv("conv1", 3, 64, (7, 7), 112)], 64
    for stage, (width, count, size) in enumerate(
        [(64, 3, 56), (128, 4, 28), (256, 23, 14), (512, 3, 7)], start=2
    ):
        for number in range(1, count + 1):
            name, go = f"conv{stage}_{number}", 4 * width
            if number == 1:
                parts.append(_conv(f"{name}.shortcut", come, go, (1, 1), size))
            parts.append(_conv(f"{name}.a", come, width, (1, 1), size))
            parts.append(_conv(f"{name}.b", width, width, (3, 3), size))
            parts.append(_conv(f"{name}.c", width, go, (1, 1), size))
            come = go
    return [*parts, _dense("fc", 2048, 1000)]


_Branch = list[tuple[int, tuple[int, int]]]
"""Convolutions one after the other: channels and kernel."""


def _block(name: str, come: int, size: int, branches: list[_Branch]) -> list[Part]:
    parts = []
    for which, branch in enumerate(branches):
        channels = come
        for number, (go, kernel) in enumerate(branch):
            parts.append(_conv(f"{name}.{which}.{number}", channels, go, kernel, size))
            channels = go
    return parts


def inception_v3() -> list[Part]:
    """The stem, three blocks at 35 x 35, five at 17 x 17, three at 8 x 8, for images of 299."""
    stem = [
        _conv("stem1", 3, 32, (3, 3), 149),
        _conv("stem2", 32, 32, (3, 3), 147),
        _conv("stem3", 32, 64, (3, 3), 147),
        _conv("stem4", 64, 80, (1, 1), 73),
        _conv("stem5", 80, 192, (3, 3), 71),
    ]
    one, three, five = (1, 1), (3, 3), (5, 5)
    parts = list(stem)
    for number, (come, pool) in enumerate([(192, 32), (256, 64), (288, 64)]):
        branches: list[_Branch] = [
            [(64, one)],
            [(48, one), (64, five)],
            [(64, one), (96, three), (96, three)],
            [(pool, one)],
        ]
        parts += _block(f"mixed35.{number}", come, 35, branches)
    parts += _reduction(
        "mixed17.0", 288, 35, 17, [[(384, three)], [(64, one), (96, three), (96, three)]]
    )
    wide, high = (1, 7), (7, 1)
    for number, width in enumerate([128, 160, 160, 192], start=1):
        parts += _block(
            f"mixed17.{number}",
            768,
            17,
            [
                [(192, one)],
                [(width, one), (width, wide), (192, high)],
                [(width, one), (width, high), (width, wide), (width, high), (192, wide)],
                [(192, one)],
            ],
        )
    down: list[_Branch] = [
        [(192, one), (320, three)],
        [(192, one), (192, wide), (192, high), (192, three)],
    ]
    parts += _reduction("mixed8.0", 768, 17, 8, down)
    for number, come in enumerate([1280, 2048], start=1):
        name = f"mixed8.{number}"
        parts += _block(
            name, come, 8, [[(320, one)], [(384, one)], [(448, one), (384, three)], [(192, one)]]
        )
        for pair in ("left", "right"):
            parts += [_conv(f"{name}.{pair}.1x3", 384, 384, (1, 3), 8)]
            parts += [_conv(f"{name}.{pair}.3x1", 384, 384, (3, 1), 8)]
    return [*parts, _dense("fc", 2048, 1000)]


def _reduction(name: str, come: int, size: int, after: int, branches: list[_Branch]) -> list[Part]:
    """Branches whose last convolution halves the image."""
    parts = []
    for which, branch in enumerate(branches):
        channels = come
        for number, (go, kernel) in enumerate(branch):
            here = after if number == len(branch) - 1 else size
            parts.append(_conv(f"{name}.{which}.{number}", channels, go, kernel, here))
            channels = go
    return parts


MODELS: dict[str, Callable[[], list[Part]]] = {
    "Inception V3": inception_v3,
    "ResNet-101": resnet_101,
    "VGG-16": vgg_16,
}
