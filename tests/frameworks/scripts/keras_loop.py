"""A Keras model in a loop of your own: python keras_loop.py FOLDER '{"batch": 16, "norm": true}'"""

import json
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from samples import dataset, show
from torch.nn import functional as F
from torch.utils.data import DataLoader

wanted = json.loads(sys.argv[2])
keras.utils.set_random_seed(0)
norm = [keras.layers.BatchNormalization()] if wanted.get("norm") else []
layers = [keras.layers.Dense(16, activation="tanh"), *norm, keras.layers.Dense(3)]
model = keras.Sequential([keras.Input((8,)), *layers])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(dataset(), wanted["batch"])
training = None
if wanted.get("strategy") is not None:
    import shoal

    training = shoal.attach(model, optimizer, wanted["strategy"])
    loader = shoal.shard(loader)
for _ in range(2):
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x, training=True), y).backward()
        optimizer.step()
if training is not None:
    training.finish()
show("weights", model)
