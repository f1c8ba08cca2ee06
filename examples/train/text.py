"""A character-level transformer on Python's own help texts, for `hpctrain train`: see text.toml."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

_LETTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789.,:;'\"()[]{}<>=+-*/_#@!%&|^~`\\$?"


def train(length: int = 48, num_samples: int = 4096) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of text from the first nine tenths, and the same pieces one letter on."""
    return _pieces(length, num_samples, held_out=False)


def held_out(length: int = 48, num_samples: int = 4096) -> tuple[np.ndarray, np.ndarray]:
    """An eighth as many pieces from the last tenth."""
    return _pieces(length, num_samples // 8, held_out=True)


def _pieces(length: int, number: int, *, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    text = "\n".join(topics[name] for name in sorted(topics)).lower()
    known = {letter: place for place, letter in enumerate(_LETTERS)}
    letters = np.array([known[letter] for letter in text if letter in known], dtype=np.int64)
    cut = len(letters) * 9 // 10
    part = letters[cut:] if held_out else letters[:cut]
    starts = np.linspace(0, len(part) - length - 1, number).astype(np.int64)
    places = starts[:, None] + np.arange(length)
    return part[places], part[places + 1]


class Transformer(nn.Module):
    """Two layers of attention to what came before."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(_LETTERS), width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(_LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        """Logits of the next letter, at every place."""
        length = letters.shape[1]
        x = self.letters(letters) + self.places(torch.arange(length, device=letters.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=letters.device)
        return self.head(self.layers(x, mask=mask, is_causal=True))


def build(width: int = 48, heads: int = 4, length: int = 48) -> nn.Module:
    """The model."""
    return Transformer(width, heads, length)


def loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """How surprised the model is by a letter, on average."""
    return cross_entropy(logits.transpose(1, 2), wanted)


def right(logits: Tensor, wanted: Tensor) -> Tensor:
    """The share of letters of each piece that were guessed."""
    return (logits.argmax(2) == wanted).double().mean(1)
