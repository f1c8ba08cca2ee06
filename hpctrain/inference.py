"""Int8 weights for inference after training, by torch's own quantisation (torchao)."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

from hpctrain.errors import ConfigError

__all__ = ["quantize_int8"]


def quantize_int8(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    *,
    say: Callable[[str], None] = print,
) -> nn.Module:
    """Make a copy with int8 weights in its linear layers, and print what that does to accuracy.

    One scale for each output; activations keep their dtype. The copy is for inference on one rank.

    Args:
        model: Trained; it stays as it is.
        evaluate: The accuracy of a model, between 0 and 1.
        say: What is done with the line; give something else than `print` on ranks other than 0.

    Raises:
        ConfigError: torchao is not installed, or there is no linear layer.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ConfigError(
            f"int8 weights need torchao, torch's quantisation ({error}); pip install "
            "'hpctrain[int8]'"
        ) from error
    before = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not before:
        raise ConfigError(f"{type(model).__name__} has no Linear layer whose weights could be int8")
    small = copy.deepcopy(model).eval().requires_grad_(False)
    quantize_(small, Int8WeightOnlyConfig())
    training = model.training
    model.eval()
    try:
        exact, rounded = evaluate(model), evaluate(small)
    finally:
        model.train(training)
    weights = sum(layer.weight.numel() for layer in before)
    held = sum(layer.weight.numel() * layer.weight.element_size() for layer in before)
    say(
        f"int8 weights in {len(before)} linear layers, {held / 2**20:.2f} MiB -> "
        f"{weights / 2**20:.2f} MiB: accuracy {100 * exact:.2f}% -> {100 * rounded:.2f}% "
        f"({100 * (rounded - exact):+.2f} points)"
    )
    return small
