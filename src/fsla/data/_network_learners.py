"""Networks: a trunk that turns images into features, and learners that train a network on a belief.

A trunk of images is trained once a fold, on the labels of unchecked rows outside it. Its last layer takes the place of
the dense features, so that strategies and linear learners work on images as on tables: they train heads. What each
trunk says of the fold that it did not see is what label correction starts from.
`ImageNetwork` and `ModuleLearner` train a network for each belief and fold: by default for corrected labels alone.

A CPU trains on one thread: results do not depend on the number of threads. Everything random is drawn by generators on
the CPU, from the seed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad

from fsla._checks import pick_device
from fsla.data._data_fit import Predictor
from fsla.data._dataset import Array, Features, Task, TrainingData
from fsla.data._learners import Fold, Learner, Progress, row_weights
from fsla.data._predictors import ConstantPredictor, predictor_from_state, softmax
from fsla.data._strategies import vote_mass

MAX_SIDE = 48
"""Larger images are shrunk by a whole factor until their shorter side is no longer than this."""
MIN_SIDE = 8
"""Smaller images are padded."""
MIN_TRUNK_IMAGES = 100
"""Fewer labelled images train no trunk."""
NORMALISING_IMAGES = 2000
"""Mean and deviation of the inputs are those of about so many images."""
MAX_TRUNK_FEATURES = 64
"""Principal components of a trunk's last layer that heads are trained on."""
MIN_IMAGE_LIKE_COLUMNS = 32
_PREDICTION_BATCH = 512
MLP_INPUT_SCALE = 3.0
"""Dense rows have mean square norm 1; a network learns faster from larger inputs."""

Inputs = Callable[[Features], Array]
T = TypeVar("T")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one CPU thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fork_seed(seed: int) -> Iterator[None]:
    """Set the random state of PyTorch inside the block; restore it on exit."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


# --- Training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Attributes:
        steps: Least number of steps, unless `max_epochs` is reached before.
        min_epochs: Least number of passes over the rows.
        max_epochs: Largest number of passes over the rows.
        batch_size: Rows of a step.
        lr: Largest learning rate: it rises over the first 15 % of the steps, then falls along a cosine.
        weight_decay: Of the optimizer.
        optimizer: "sgd" (Nesterov, momentum 0.9) or "adamw".
    """

    steps: int = 800
    min_epochs: int = 20
    max_epochs: int = 60
    batch_size: int = 128
    lr: float = 0.1
    weight_decay: float = 5e-4
    optimizer: str = "sgd"

    def epochs(self, rows: int) -> int:
        """Return the number of passes over so many rows."""
        per_epoch = math.ceil(rows / self.batch_size)
        return min(self.max_epochs, max(self.min_epochs, math.ceil(self.steps / per_epoch)))

    def build(self, parameters: Sequence[nn.Parameter], steps: int) -> tuple[Any, Any]:
        """Return the optimizer and its schedule."""
        if self.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                parameters, lr=self.lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay
            )
        else:
            optimizer = torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)
        warm_up = max(1, round(0.15 * steps))

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def mass_loss(outputs: Tensor, mass: Tensor, task: Task) -> Tensor:
    """Return the sum over rows of the cross-entropy of a mass, or of the weighted squared error but for a constant."""
    if task == "classification":
        return -(mass * outputs.log_softmax(1)).sum()
    value = outputs[:, 0]
    return (mass[:, 0] * value.square() - 2 * mass[:, 1] * value).sum() / 2


def train_network(
    network: nn.Module,
    inputs: Tensor,
    mass: Array,
    task: Task,
    recipe: Recipe,
    *,
    seed: int,
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train a network on a mass, in place.

    Args:
        network: Of the device of the inputs.
        inputs: Rows in the first dimension.
        mass: Rows x classes, or rows x 2 in regression. Rows without mass are not seen.
        task: "classification" or "regression".
        recipe: How long and how fast.
        seed: Of the order of the rows and of `augment`.
        augment: Changes a batch, with a generator to draw from.
        progress: Called after each epoch with its number and their number.
    """
    device = inputs.device
    rows = torch.from_numpy(np.nonzero(row_weights(mass, task) > 0)[0])
    scale = float(row_weights(mass, task)[rows.numpy()].mean())
    target = torch.from_numpy(mass.astype(np.float32) / np.float32(scale)).to(device)
    batch_size = min(recipe.batch_size, len(rows))
    epochs = recipe.epochs(len(rows))
    per_epoch = max(1, len(rows) // batch_size)
    optimizer, schedule = recipe.build([p for p in network.parameters() if p.requires_grad], epochs * per_epoch)
    generator = torch.Generator().manual_seed(seed)
    network.train()
    with one_thread():
        for epoch in range(epochs):
            order = rows[torch.randperm(len(rows), generator=generator)].to(device)
            for step in range(per_epoch):
                # Every row of an epoch is seen; no batch is so small that batch statistics are lost.
                index = order[step * len(order) // per_epoch : (step + 1) * len(order) // per_epoch]
                batch = inputs[index]
                if augment is not None:
                    batch = augment(batch, generator)
                with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                    outputs = network(batch)
                loss = mass_loss(outputs.float(), target[index], task) / len(index)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            if progress is not None:
                progress(epoch + 1, epochs)
    network.eval()


@torch.no_grad()
def network_outputs(network: Callable[[Tensor], Tensor], inputs: Tensor, device: torch.device) -> Array:
    """Return the outputs of a network in evaluation mode, in batches."""
    with one_thread():
        parts = [network(part.to(device)).float().cpu() for part in torch.split(inputs, _PREDICTION_BATCH)]
    return torch.cat(parts).numpy().astype(np.float64)


def unit_targets(mass: Array, task: Task) -> tuple[Array, float, float]:
    """Return the mass for targets of mean 0 and deviation 1, with their mean and deviation."""
    if task == "classification":
        return mass, 0.0, 1.0
    weight = mass[:, 0]
    use = weight > 0
    value = mass[use, 1] / weight[use]
    offset = float(np.average(value, weights=weight[use]))
    scale = float(np.sqrt(np.average((value - offset) ** 2, weights=weight[use]))) or 1.0
    return np.stack([weight, (mass[:, 1] - weight * offset) / scale], 1), offset, scale


# --- Images ----------------------------------------------------------------------------------------------------------


class ImageModel(nn.Module):
    """Convolutional network whose last hidden layer is as wide for images of every size.

    Args:
        channels: Of the images.
        outputs: Number of outputs.
        width: Channels of the first layer.
        residual: Whether it is a ResNet of four stages; else three convolutions and a dense layer.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int, outputs: int, width: int, residual: bool) -> None:
        super().__init__()
        self.options = {"channels": channels, "outputs": outputs, "width": width, "residual": residual}
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("deviation", torch.ones(channels, 1, 1))
        # The features of the ResNet are large: at the usual learning rate unscaled outputs diverge.
        self.output_scale = 0.125 if residual else 1.0
        w = width
        if residual:
            layers: list[nn.Module] = [
                _Convolution(channels, w),
                _Convolution(w, 2 * w, pool=True), _Residual(2 * w),
                _Convolution(2 * w, 4 * w, pool=True),
                _Convolution(4 * w, 8 * w, pool=True), _Residual(8 * w),
                nn.AdaptiveMaxPool2d(1), nn.Flatten(),
            ]  # fmt: skip
            self.num_features = 8 * w
        else:
            self.num_features = 4 * w
            layers = [
                _Convolution(channels, w, pool=True),
                _Convolution(w, 2 * w, pool=True),
                _Convolution(2 * w, 2 * w), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                nn.Linear(32 * w, 4 * w, bias=False), nn.BatchNorm1d(4 * w), nn.ReLU(inplace=True),
            ]  # fmt: skip
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(self.num_features, outputs)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def embed(self, images: Tensor) -> Tensor:
        """Return the last hidden layer of images in uint8."""
        x = (images.float() / 255 - self.mean) / self.deviation
        embedding: Tensor = self.body(x.contiguous(memory_format=torch.channels_last))
        return embedding

    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs of images in uint8."""
        outputs: Tensor = self.output_scale * self.head(self.embed(images))
        return outputs

    def classify(self, embedding: Array) -> Array:
        """Return the outputs of the last hidden layer."""
        weight, bias = (p.detach().cpu().numpy().astype(np.float64) for p in self.head.parameters())
        return np.asarray(self.output_scale * (embedding @ weight.T + bias))


class _Convolution(nn.Sequential):
    """Convolution, pooling if asked for, normalisation and ReLU: normalising a quarter of the pixels is faster."""

    def __init__(self, channels: int, outputs: int, *, pool: bool = False) -> None:
        convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        layers = [nn.MaxPool2d(2, ceil_mode=True)] if pool else []
        super().__init__(convolution, *layers, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_Convolution(channels, channels), _Convolution(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and of two convolutions of it."""
        change: Tensor = self.body(x)
        return x + change


def image_tensor(images: Array) -> Tensor:
    """Return images as rows x channels x height x width, uint8, not much larger than `MAX_SIDE`."""
    height, width = images.shape[1:3]
    factor = math.ceil(min(height, width) / MAX_SIDE)
    # PyTorch warns of arrays that cannot be written to, so those are copied.
    tensor = torch.from_numpy(np.require(images, np.uint8, ["C", "W"])).permute(0, 3, 1, 2)
    if factor > 1:
        parts = [avg_pool2d(part.float(), factor).round().to(torch.uint8) for part in torch.split(tensor, 256)]
        tensor = torch.cat(parts)
    missing_height, missing_width = (max(0, MIN_SIDE - side) for side in tensor.shape[2:])
    if missing_height or missing_width:
        tensor = pad(tensor, (0, missing_width, 0, missing_height))
    return tensor.contiguous()


def augment_images(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return randomly shifted images; those in colour are flipped half of the time.

    A shift is at most an eighth of the side. Images in grey are often writing, which a mirror image is not.
    """
    count, channels, height, width = images.shape
    device = images.device
    shift = max(1, min(height, width) // 8)
    offset = torch.randint(0, 2 * shift + 1, (2, count, 1), generator=generator).to(device)
    rows = offset[0] + torch.arange(height, device=device)
    columns = offset[1] + torch.arange(width, device=device)
    if channels > 1:
        flip = (torch.rand(count, 1, generator=generator) < 0.5).to(device)
        columns = torch.where(flip, columns.flip(1), columns)
    padded = pad(images, (shift, shift, shift, shift)).permute(0, 2, 3, 1)
    image = torch.arange(count, device=device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def build_image_model(images: Tensor, outputs: int, seed: int, width: int | None, device: torch.device) -> ImageModel:
    """Return a new network for images: a small CNN for grey ones, a ResNet for colour."""
    channels = images.shape[1]
    residual = channels > 1
    if width is None:
        width = 32 if not residual else 64 if device.type == "cuda" else 16
    with fork_seed(seed):
        network = ImageModel(channels, outputs, width, residual)
    sample = images[:: max(1, len(images) // NORMALISING_IMAGES)].float() / 255
    with one_thread():
        network.mean.copy_(sample.mean((0, 2, 3))[:, None, None])
        network.deviation.copy_(sample.std((0, 2, 3))[:, None, None].clamp(min=1e-3))
    return network.to(device)


ADAMW = Recipe(lr=3e-3, weight_decay=1e-2, optimizer="adamw")
"""For squared errors, on which SGD of this pace diverges, and for modules of any kind."""


def _image_recipe(recipe: Recipe | None, images: Tensor, device: torch.device, task: Task) -> Recipe:
    if recipe is not None:
        return recipe
    colour = images.shape[1] > 1
    recipe = ADAMW if task == "regression" else Recipe(lr=0.2 if colour else 0.1)
    return replace(recipe, min_epochs=30, batch_size=256) if colour and device.type == "cuda" else recipe


def _trunk_recipe(recipe: Recipe | None, images: Tensor, device: torch.device, task: Task) -> Recipe:
    """Return how trunks are trained: on grey images for a shorter time, as right labels are learned before wrong ones.

    On 5000 images of Fashion-MNIST with 40 % wrong labels, label correction that starts from 8 passes is right on .877
    of the rows, from 27 passes on .865.
    """
    if recipe is not None or images.shape[1] > 1:
        return _image_recipe(recipe, images, device, task)
    full = _image_recipe(None, images, device, task)
    return replace(full, steps=round(0.3 * full.steps), min_epochs=round(0.3 * full.min_epochs))


@dataclass(frozen=True, eq=False)
class ImageTrunk:
    """A network that turns images into dense features.

    Attributes:
        network: Trained on the given labels of unchecked rows.
        offset: Mean of each feature.
        scale: Features are divided by it.
        basis: Features x components: principal ones, in which rows have mean square norm 1.
    """

    network: ImageModel
    offset: Array
    scale: Array
    basis: Array

    @classmethod
    def from_embedding(cls, network: ImageModel, embedding: Array) -> Self:
        """Return the trunk of a trained network and of its last hidden layer on all rows."""
        deviation = embedding.std(0)
        deviation = np.maximum(deviation, 0.1 * deviation.mean() + 1e-12)
        scale = deviation * math.sqrt(len(deviation))
        offset = embedding.mean(0)
        unit = (embedding - offset) / scale
        values, vectors = np.linalg.eigh(unit.T @ unit / len(unit))
        values, vectors = values[::-1][:MAX_TRUNK_FEATURES], vectors[:, ::-1][:, :MAX_TRUNK_FEATURES]
        return cls(network, offset, scale, vectors / np.sqrt(max(values.sum(), 1e-12)))

    def project(self, embedding: Array) -> Array:
        """Return dense features of the network's last hidden layer."""
        unit = np.clip((embedding - self.offset) / self.scale, -1.0, 1.0)
        return np.concatenate([unit @ self.basis, np.full((len(unit), 1), 0.5)], 1)

    def transform(self, features: Features) -> Features:
        """Return the same rows, with the network's features as the dense ones."""
        if features.images is None:
            raise ValueError("The model was trained on images, and these rows have none.")
        embedding = network_outputs(self.network.embed, image_tensor(features.images), self.network.mean.device)
        return replace(features, dense=self.project(embedding))


class TrunkFit(NamedTuple):
    """A trained trunk, and what it says of all rows.

    Attributes:
        trunk: The network.
        dense: Rows x components.
        scores: Rows x classes, log-probabilities but for a constant a row; in regression rows x 1.
    """

    trunk: ImageTrunk
    dense: Array
    scores: Array


def fit_trunks(
    parts: Sequence[TrainingData],
    *,
    seed: int = 0,
    recipe: Recipe | None = None,
    width: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[TrunkFit]:
    """Train a network for each of several choices of the votes. Return none if one has too few to learn from.

    Checked rows are not used: they judge what is trained on the features.

    A network that has learned a row's vote by heart would predict it: so each fold has a network that did not see its
    votes. On a CPU as many networks are trained at a time as PyTorch has threads, each on one thread.

    Args:
        parts: The same rows with images, each time with some of the votes.
        seed: Of everything random.
        recipe: How to train. Default: by the kind of image and the device.
        width: Channels of the first layer. Default: 32 for grey images; for colour 64 on a GPU, 16 on a CPU.
        device: "auto" (the GPU if there is one), "cpu" or "cuda".
        progress: Called with a text, the number of epochs that are done, and their number.
    """
    masses = [mass for mass in map(_mean_votes, parts) if mass is not None]
    if len(masses) < len(parts):
        return []
    first = parts[0]
    assert first.features.images is not None
    where = pick_device(device)
    images = image_tensor(first.features.images)
    recipe = _trunk_recipe(recipe, images, where, first.task)
    outputs = first.num_classes if first.task == "classification" else 1
    networks = [build_image_model(images, outputs, seed + index, width, where) for index in range(len(parts))]
    images = images.to(where)

    def train(index: int, report: Callable[[int, int], None]) -> TrunkFit:
        train_network(
            networks[index], images, masses[index], first.task, recipe,
            seed=seed + index, augment=augment_images, progress=report,
        )  # fmt: skip
        embedding = network_outputs(networks[index].embed, images, where)
        trunk = ImageTrunk.from_embedding(networks[index], embedding)
        return TrunkFit(trunk, trunk.project(embedding), networks[index].classify(embedding))

    text = "training networks on the images"
    return _run_in_threads(train, len(parts), 1 if where.type == "cuda" else torch.get_num_threads(), text, progress)


def _run_in_threads(
    task: Callable[[int, Callable[[int, int], None]], T],
    count: int,
    workers: int,
    text: str,
    progress: Progress | None,
) -> list[T]:
    """Return the results of a task for each index. An exception of `progress` ends all tasks."""
    done, total = [0] * count, [0] * count
    stopped = Event()

    def run(index: int) -> T:
        def report(epoch: int, epochs: int) -> None:
            if stopped.is_set():
                raise RuntimeError("Training was stopped.")
            done[index], total[index] = epoch, epochs

        return task(index, report)

    with one_thread(), ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(run, index) for index in range(count)]
        try:
            while wait(futures, timeout=0.5, return_when=FIRST_EXCEPTION).not_done:
                if any(future.done() and future.exception() for future in futures):
                    break
                if progress is not None and max(total):
                    progress(text, sum(done), max(total) * count)
            return [future.result() for future in futures]
        finally:
            stopped.set()
            for future in futures:
                future.cancel()


def has_enough_images(data: TrainingData) -> bool:
    """Return whether there are images, and enough labels to train a trunk."""
    return _mean_votes(data) is not None


def _mean_votes(data: TrainingData) -> Array | None:
    """Return the mass of unchecked rows, each once with the mean of its votes; None if it is too little."""
    if data.features.images is None:
        return None
    num_votes = np.bincount(data.votes.row, minlength=len(data.features))
    mass = vote_mass(data, 1 / num_votes[data.votes.row])
    enough = (row_weights(mass, data.task) > 0).sum() >= MIN_TRUNK_IMAGES
    if not enough or (data.task == "classification" and (mass.sum(0) > 0).sum() < 2):
        return None
    return unit_targets(mass, data.task)[0]


@dataclass(frozen=True, eq=False)
class TrunkPredictor:
    """A trunk of images, and a model on its features."""

    trunk: ImageTrunk
    inner: Predictor

    @property
    def members(self) -> tuple[Predictor, ...]:
        """Return the model on the features."""
        return (self.inner,)

    def predict(self, features: Features) -> Array:
        """Return what the model says of the features of images."""
        return self.inner.predict(self.trunk.transform(features))

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the states of both parts."""
        arrays, inner = self.inner.to_state()
        arrays = {f"inner.{name}": array for name, array in arrays.items()}
        arrays |= {f"network.{name}": array for name, array in module_arrays(self.trunk.network).items()}
        arrays |= {"offset": self.trunk.offset, "scale": self.trunk.scale, "basis": self.trunk.basis}
        return arrays, {"kind": "trunk", "network": self.trunk.network.options, "inner": inner}

    @classmethod
    def from_state(cls, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> Self:
        """Return the predictor of a state, on the GPU if there is one."""
        network = _load_image_model(state["network"], part_of(arrays, "network."))
        inner = predictor_from_state(part_of(arrays, "inner."), state["inner"])
        return cls(ImageTrunk(network, arrays["offset"], arrays["scale"], arrays["basis"]), inner)


def module_arrays(module: nn.Module) -> dict[str, Array]:
    """Return the state dict as arrays; bfloat16 as float32."""
    arrays = {}
    for name, tensor in module.state_dict().items():
        plain = tensor.detach().cpu()
        arrays[name] = (plain.float() if plain.dtype == torch.bfloat16 else plain).contiguous().numpy().copy()
    return arrays


def load_module_arrays(module: nn.Module, arrays: Mapping[str, Array]) -> None:
    """Set what `module_arrays` returned."""
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


def part_of(arrays: Mapping[str, Array], start: str) -> dict[str, Array]:
    """Return the arrays whose names begin with a text, by the rest of the name."""
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def _load_image_model(options: Mapping[str, Any], arrays: Mapping[str, Array]) -> ImageModel:
    with fork_seed(0):  # Loading a model leaves PyTorch's random state as it was.
        network = ImageModel(
            int(options["channels"]), int(options["outputs"]), int(options["width"]), bool(options["residual"])
        )
    load_module_arrays(network, arrays)
    return network.eval().to(pick_device("auto"))


# --- Learners --------------------------------------------------------------------------------------------------------


def constant_model(mass: Array, task: Task) -> Predictor | None:
    """Return a constant if the mass cannot train a network: it is empty, or of one class."""
    if task == "classification":
        total = mass.sum(0)
        if (total > 0).sum() > 1:
            return None
        return ConstantPredictor((total + 1e-2) / (total + 1e-2).sum(), task)
    return ConstantPredictor(np.zeros(1), task) if mass[:, 0].sum() <= 0 else None


def _finish(outputs: Array, task: Task, offset: float, scale: float) -> Array:
    return softmax(outputs) if task == "classification" else offset + scale * outputs[:, 0]


@dataclass(frozen=True, eq=False)
class MLPPredictor:
    """A network with one hidden layer, as arrays."""

    arrays: Mapping[str, Array]
    task: Task
    offset: float = 0.0
    scale: float = 1.0

    def predict(self, features: Features) -> Array:
        """Return probabilities, or numbers in regression."""
        a = self.arrays
        hidden = np.maximum(MLP_INPUT_SCALE * features.dense @ a["weight_1"] + a["bias_1"], 0)
        return _finish(hidden @ a["weight_2"] + a["bias_2"], self.task, self.offset, self.scale)

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the weights."""
        return dict(self.arrays), {"kind": "mlp", "task": self.task, "offset": self.offset, "scale": self.scale}

    @classmethod
    def from_state(cls, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> Self:
        """Return the predictor of a state."""
        return cls(dict(arrays), state["task"], float(state["offset"]), float(state["scale"]))


class MLP(Learner):
    """Network with one hidden layer, for rows that are like small images: many columns of one unit.

    It gains on pixels and loses on tables and text, where linear models and trees are better with few rows.

    Args:
        hidden: Width of the hidden layer.
        steps: Number of steps of AdamW.
        batch_size: Rows of a step; fewer rows are all in each step.
    """

    name = "mlp"

    def __init__(self, *, hidden: int = 64, steps: int = 150, batch_size: int = 4096) -> None:
        self.hidden, self.steps, self.batch_size = hidden, steps, batch_size

    def supports(self, data: TrainingData) -> bool:
        """Return whether the columns are like pixels."""
        return is_image_like(data.features)

    def path(self, features: Features, mass: Array, checked_mass: Array, task: Task, seed: int) -> list[Predictor]:
        """Return one model."""
        both = mass + checked_mass
        constant = constant_model(both, task)
        if constant is not None:
            return [constant]
        use = row_weights(both, task) > 0
        unit_mass, offset, scale = unit_targets(both[use], task)
        unit_mass = unit_mass / row_weights(unit_mass, task).mean()
        x = torch.from_numpy((MLP_INPUT_SCALE * features.dense[use]).astype(np.float32))
        target = torch.from_numpy(unit_mass.astype(np.float32))
        outputs = mass.shape[1] if task == "classification" else 1
        generator = torch.Generator().manual_seed(seed)
        parameters = {}
        for number, (inner, outer) in enumerate(((x.shape[1], self.hidden), (self.hidden, outputs)), 1):
            bound = inner**-0.5
            parameters[f"weight_{number}"] = (2 * torch.rand(inner, outer, generator=generator) - 1) * bound
            parameters[f"bias_{number}"] = (2 * torch.rand(outer, generator=generator) - 1) * bound
        parameters = {name: p.requires_grad_() for name, p in parameters.items()}
        optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=1e-2)
        with one_thread():
            for _ in range(self.steps):
                batch, batch_target = x, target
                if len(x) > self.batch_size:
                    index = torch.randint(len(x), (self.batch_size,), generator=generator)
                    batch, batch_target = x[index], target[index]
                hidden = (batch @ parameters["weight_1"] + parameters["bias_1"]).relu()
                use_unit = torch.rand(hidden.shape, generator=generator) >= 0.2
                hidden = hidden * use_unit / 0.8
                values = hidden @ parameters["weight_2"] + parameters["bias_2"]
                loss = mass_loss(values, batch_target, task) / len(batch)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        arrays = {name: p.detach().numpy().astype(np.float64) for name, p in parameters.items()}
        return [MLPPredictor(arrays, task, offset, scale)]


def is_image_like(features: Features) -> bool:
    """Return whether the columns are like pixels: at least 32 of several values, most with one common minimum.

    Text and images have no numeric columns; tables have columns of different units.
    """
    table = features.numeric
    if features.images is not None or table is None or table.shape[1] < MIN_IMAGE_LIKE_COLUMNS or len(table) == 0:
        return False
    if np.isnan(table).any():
        return False
    varied = table[:, np.array([len(np.unique(column)) > 2 for column in table.T])]
    if varied.shape[1] < MIN_IMAGE_LIKE_COLUMNS:
        return False
    least = varied.min(0)
    values, counts = np.unique(least, return_counts=True)
    common = float(values[counts.argmax()])
    return bool((least == common).mean() >= 0.8)


@dataclass(frozen=True, eq=False)
class NetworkPredictor:
    """A trained network on images."""

    network: ImageModel
    task: Task
    offset: float = 0.0
    scale: float = 1.0

    def predict(self, features: Features) -> Array:
        """Return probabilities, or numbers in regression."""
        if features.images is None:
            raise ValueError("The model was trained on images, and these rows have none.")
        outputs = network_outputs(self.network, image_tensor(features.images), self.network.mean.device)
        return _finish(outputs, self.task, self.offset, self.scale)

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the weights."""
        json = {"kind": "image_network", "task": self.task, "offset": self.offset, "scale": self.scale}
        return module_arrays(self.network), json | {"network": self.network.options}

    @classmethod
    def from_state(cls, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> Self:
        """Return the predictor of a state, on the GPU if there is one."""
        network = _load_image_model(state["network"], arrays)
        return cls(network, state["task"], float(state["offset"]), float(state["scale"]))


class ImageNetwork(Learner):
    """Convolutional network on images, trained anew on each belief, with random shifts and flips.

    A small CNN for grey images, a ResNet for colour. Cross-fitting trains one for each strategy and fold:
    heads on the features of one trunk (`fit_trunk`) cost a fraction of that.

    Args:
        recipe: How to train.
        width: Channels of the first layer.
        device: "auto" (the GPU if there is one), "cpu" or "cuda".
        corrected_only: Whether it is tried on corrected labels alone.
    """

    name = "image_network"
    reads_images = True

    def __init__(
        self,
        *,
        recipe: Recipe | None = None,
        width: int | None = None,
        device: str = "auto",
        corrected_only: bool = False,
    ) -> None:
        self.recipe, self.width, self.device, self.corrected_only = recipe, width, device, corrected_only
        self._threads = torch.get_num_threads()

    def supports(self, data: TrainingData) -> bool:
        """Return whether there are images."""
        return data.features.images is not None

    def path(self, features: Features, mass: Array, checked_mass: Array, task: Task, seed: int) -> list[Predictor]:
        """Return one model."""
        return self.paths([Fold(features, mass, checked_mass)], task, seed)[0]

    def paths(
        self, folds: Sequence[Fold], task: Task, seed: int, progress: Progress | None = None
    ) -> list[list[Predictor]]:
        """Return one model of each fold. On a CPU as many are trained at a time as PyTorch has threads.

        Each begins with weights of its own: the average of networks that differ is better.
        """
        assert folds[0].features.images is not None
        device = pick_device(self.device)
        images = image_tensor(folds[0].features.images)
        recipe = _image_recipe(self.recipe, images, device, task)
        masses = [fold.mass + fold.checked_mass for fold in folds]
        # Weights are drawn before threads begin: they share the random state of PyTorch.
        models = [
            constant_model(mass, task) or self._build(images, mass, task, seed + index, device)
            for index, mass in enumerate(masses)
        ]
        images = images.to(device)

        def train(index: int, report: Callable[[int, int], None]) -> list[Predictor]:
            network = models[index]
            if not isinstance(network, ImageModel):
                return [network]
            mass, offset, scale = unit_targets(masses[index], task)
            train_network(
                network, images, mass, task, recipe, seed=seed + index, augment=augment_images, progress=report
            )
            return [NetworkPredictor(network, task, offset, scale)]

        workers = 1 if device.type == "cuda" else self._threads
        return _run_in_threads(train, len(folds), workers, "training networks on corrected labels", progress)

    def _build(self, images: Tensor, mass: Array, task: Task, seed: int, device: torch.device) -> ImageModel:
        """Return a new network. Rows without mass do not enter the statistics of its inputs."""
        rows = torch.from_numpy(np.nonzero(row_weights(mass, task) > 0)[0])
        outputs = mass.shape[1] if task == "classification" else 1
        sample = images[rows[:: max(1, len(rows) // NORMALISING_IMAGES)]]
        return build_image_model(sample, outputs, seed, self.width, device)


# --- Modules of the user ---------------------------------------------------------------------------------------------


def module_inputs(features: Features) -> Array:
    """Return what a user's module is called with.

    Images become floats in [0, 1], rows x channels x height x width. Rows that came as an array of numbers stay as
    they are; all others are the dense features.
    """
    if features.images is not None:
        return np.asarray(features.images.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)
    if isinstance(features.raw, np.ndarray) and features.raw.dtype.kind in "fiub":
        return features.raw.astype(np.float32)
    return features.dense.astype(np.float32)


@dataclass(eq=False)
class ModulePredictor:
    """A trained copy of a user's module. A restored one needs `attach` before it predicts."""

    module: nn.Module | None
    arrays: Mapping[str, Array]
    task: Task
    offset: float = 0.0
    scale: float = 1.0
    inputs: Inputs = module_inputs

    def attach(self, module: nn.Module, inputs: Inputs = module_inputs) -> None:
        """Load the saved weights into a copy of a module.

        Args:
            module: Of the class and sizes that were trained.
            inputs: The function that was passed to `ModuleLearner`.
        """
        self.module = copy.deepcopy(module).eval()
        load_module_arrays(self.module, self.arrays)
        self.inputs = inputs

    def predict(self, features: Features) -> Array:
        """Return probabilities, or numbers in regression."""
        if self.module is None:
            raise ValueError(
                "The saved model holds the weights of a module, not the module. "
                "Call attach_module(predictor, module) before predict."
            )
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        outputs = network_outputs(self.module, torch.from_numpy(self.inputs(features)), device)
        return _finish(outputs.reshape(len(outputs), -1), self.task, self.offset, self.scale)

    def to_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the weights. The module itself is not saved."""
        arrays = dict(self.arrays) if self.module is None else module_arrays(self.module)
        return arrays, {"kind": "module", "task": self.task, "offset": self.offset, "scale": self.scale}

    @classmethod
    def from_state(cls, arrays: Mapping[str, Array], state: Mapping[str, Any]) -> Self:
        """Return the predictor of a state, which cannot predict before `attach`."""
        return cls(None, dict(arrays), state["task"], float(state["offset"]), float(state["scale"]))


def attach_module(predictor: Predictor, module: nn.Module, inputs: Inputs = module_inputs) -> int:
    """Give a restored model the user's module, wherever it needs it. Return how many members needed it.

    Args:
        predictor: From `predictor_from_state`.
        module: Of the class and sizes that were trained.
        inputs: The function that was passed to `ModuleLearner`.
    """
    if isinstance(predictor, ModulePredictor):
        predictor.attach(module, inputs)
        return 1
    return sum(attach_module(member, module, inputs) for member in getattr(predictor, "members", ()))


class ModuleLearner(Learner):
    """Any `nn.Module`: copies of it are trained on each belief.

    Each copy starts from the weights of the module, so a pretrained one is fine-tuned.

    Args:
        module: Called with a batch of inputs; returns one score a class, or one number in regression.
        inputs: Function of `Features` that returns an array of inputs, one a row. Default: images as floats, a numeric
            array as it was passed, else the dense features.
        name: As the report shows it.
        recipe: How to train.
        device: "auto" (the GPU if there is one), "cpu" or "cuda".
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        inputs: Inputs = module_inputs,
        name: str = "module",
        recipe: Recipe | None = None,
        device: str = "auto",
    ) -> None:
        self.module, self.inputs, self.device = module, inputs, device
        self.name = name
        self.recipe = ADAMW if recipe is None else recipe

    def path(self, features: Features, mass: Array, checked_mass: Array, task: Task, seed: int) -> list[Predictor]:
        """Return one model."""
        both = mass + checked_mass
        constant = constant_model(both, task)
        if constant is not None:
            return [constant]
        device = pick_device(self.device)
        module = copy.deepcopy(self.module).to(device)
        use = row_weights(both, task) > 0
        x = torch.from_numpy(self.inputs(features))[torch.from_numpy(use)].to(device)
        unit_mass, offset, scale = unit_targets(both[use], task)
        outputs = mass.shape[1] if task == "classification" else 1
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise ValueError("The rows have missing values, which a module cannot take. Fill them, or pass inputs=.")
        self._check_outputs(module, x, outputs)
        with fork_seed(seed):  # Random layers draw from PyTorch's own stream.
            train_network(module, x, unit_mass, task, self.recipe, seed=seed)
        return [ModulePredictor(module, {}, task, offset, scale, self.inputs)]

    def _check_outputs(self, module: nn.Module, x: Tensor, outputs: int) -> None:
        module.eval()
        with torch.no_grad():
            shape = tuple(module(x[:2]).shape)
        if shape != (len(x[:2]), outputs):
            raise ValueError(
                f"The module returned shape {shape} for {len(x[:2])} rows. "
                f"It must return {outputs} {'scores, one a class,' if outputs > 1 else 'number'} a row."
            )
