"""A script written against plain horovod.torch: `hpctrain run -n 2 examples/horovod_digits.py`.

Nothing of hpctrain is in it. It runs under `horovodrun` as it does under `hpctrain run`.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Train for a few epochs, and print the accuracy on the training data."""
    hvd.init()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=7)
    loader = DataLoader(data, batch_size=64 // hvd.size(), sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), wanted).backward()
            optimizer.step()
    right = (model(x).argmax(1) == y).float().mean()
    mean = hvd.allreduce(right, name="accuracy")
    if hvd.rank() == 0:
        print(f"accuracy {mean.item():.3f} on {hvd.size()} ranks")


if __name__ == "__main__":
    main()
