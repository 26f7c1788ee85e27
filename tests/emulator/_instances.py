# SPDX-License-Identifier: Apache-2.0
"""A script for several instances: it makes the calls that PopDist's tutorial makes."""

import argparse
import sys

import popdist
import popdist.poptorch
import poptorch  # noqa: TID251 - a script for PopTorch imports it
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
        )
        self.loss = nn.NLLLoss(reduction="mean")

    def forward(self, images, labels=None):
        scores = self.layers(images)
        if labels is None:
            return scores
        loss = self.loss(torch.log_softmax(scores, dim=1), labels)
        return scores, poptorch.identity_loss(loss, reduction="none")


def load_data(options, *, shuffle):
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(3, (96,), generator=generator)
    images = torch.randn(96, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1)
    return poptorch.DataLoader(
        options,
        torch.utils.data.TensorDataset(images, labels),
        batch_size=4,
        num_workers=1,
        shuffle=shuffle,
        auto_distributed_partitioning=True,
    )


def save(path):
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(popdist.getInstanceIndex()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--fail", type=int)
    arguments = parser.parse_args()
    assert popdist.isPopdistEnvSet()
    popdist.init()
    instance, count = popdist.getInstanceIndex(), popdist.getNumInstances()
    total, local = popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()
    sys.stdout.write(f"instance {instance} of {count}, replicas {local} of {total}\n")
    options = popdist.poptorch.Options()
    options.randomSeed(0)
    model = Network()
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, use_combined_accum=True
    )
    training_model = poptorch.trainingModel(model, options, optimizer=optimizer)
    data = load_data(options, shuffle=True)
    for epoch in range(arguments.epochs):
        losses = [training_model(*batch)[1].mean().item() for batch in data]
        if instance == 0:
            sys.stdout.write(f"epoch {epoch}: loss {sum(losses) / len(losses)}\n")
        if instance == arguments.fail:
            raise KeyError("this instance fails")
    training_model.destroy()
    torch.save(model.state_dict(), f"instance-{instance}.pt")
    inference_model = poptorch.inferenceModel(model.eval(), options)
    for images, _ in load_data(options, shuffle=False):
        assert inference_model(images).shape == (4 * local, 3)
    popdist.execute_on_instances({0}, save, "saved-by.txt")


if __name__ == "__main__":
    main()
