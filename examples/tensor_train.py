"""An embedding 100 times smaller: `hpctrain run -n 2 examples/tensor_train.py`.

A text of 8 words has one of 20 subjects, to which 5 of them belong. Each of the 50,000 words of the
vocabulary belongs to one subject: most neighbours to the same one, as if it were sorted by meaning,
and 30 % of the words to any. A tensor train has no room for each of those. The same classifier is
trained twice, with a dense embedding and with a tensor train, and tested on new texts.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.log import table

VOCABULARY, SIZE, SUBJECTS, WORDS, OWN = 50_000, 64, 20, 8, 5


class Classifier(nn.Module):
    """The mean of a text's words, and two layers."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.head = nn.Sequential(nn.Linear(SIZE, 64), nn.ReLU(), nn.Linear(64, SUBJECTS))

    def forward(self, words: Tensor) -> Tensor:
        """One score for each subject."""
        mean: Tensor = self.embed(words).mean(1)
        return self.head(mean)


def make_texts(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Texts and their subjects: the first words are of the subject, the others any."""
    of_words = torch.Generator().manual_seed(1)
    subjects = torch.arange(VOCABULARY) // 250 % SUBJECTS
    stray = torch.rand(VOCABULARY, generator=of_words) < 0.3
    subjects[stray] = torch.randint(SUBJECTS, (int(stray.sum()),), generator=of_words)
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(SUBJECTS, (number,), generator=drawn)
    texts = torch.randint(VOCABULARY, (number, WORDS), generator=drawn)
    for subject in range(SUBJECTS):
        own = torch.nonzero(subjects == subject).flatten()
        mine = torch.nonzero(labels == subject).flatten()
        texts[mine, :OWN] = own[torch.randint(len(own), (len(mine), OWN), generator=drawn)]
    return texts, labels


def train(world: hpc.World, embed: nn.Module, args: argparse.Namespace) -> float:
    """The accuracy on the test texts after training."""
    model = Classifier(embed).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    loader = hpc.Loader(world, make_texts(args.texts, seed=2), global_batch=1500)
    test = hpc.Loader(world, make_texts(4_000, seed=3), global_batch=1000, shuffle=False)
    replica = hpc.distribute(world, model, optimizer)
    for _ in range(args.epochs):
        for words, labels in loader:
            replica.learn(cross_entropy, words, labels, num_samples=len(labels))
    replica.close()
    right = seen = 0
    model.eval()
    with torch.no_grad():
        for words, labels in test:
            right += int((model(words).argmax(1) == labels).sum())
            seen += len(labels)
    return world.mean(right / max(1, seen), weight=seen)


def main() -> None:
    """Train both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--ranks", type=int, default=13)
    args = parser.parse_args()

    with hpc.init(seed=7, config=vars(args), allow_shared_device=True) as world:
        dense = nn.Embedding(VOCABULARY, SIZE)
        nn.init.normal_(dense.weight, std=0.1)  # learns faster here than from torch's 1
        small = hpc.nn.TTEmbedding(VOCABULARY, SIZE, ranks=args.ranks)
        report = small.report()
        world.print(report)
        accuracy = {}
        for name, embed in (("dense", dense), ("tensor train", small)):
            accuracy[name] = 100 * train(world, embed, args)
        numbers = report.dense_parameters, report.num_parameters
        rows = [
            (name, f"{number:,}", f"{percent:.2f}%")
            for (name, percent), number in zip(accuracy.items(), numbers, strict=True)
        ]
        world.print(table(("embedding", "parameters", "test accuracy"), rows))
        lost = accuracy["dense"] - accuracy["tensor train"]
        world.print(
            f"{report.compression:.0f} times fewer parameters cost {lost:.2f} points of accuracy"
        )


if __name__ == "__main__":
    main()
