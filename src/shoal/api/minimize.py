"""minimize(): no PyTorch model, but two functions, for outputs and for gradients (Yang & Farrell 2016).

Arrays are NumPy's. Your functions may return any array that NumPy can read, such as those of JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.api.run import run
from shoal.core.catalogue import check_word
from shoal.core.errors import Diverged
from shoal.core.task import Data, Task
from shoal.launch.stop_signals import temporary_folder
from shoal.replicas.module import EnsembleModel
from shoal.runs.result import Result
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Strategy

Array: TypeAlias = NDArray[Any]
Tree: TypeAlias = Any
"""An array, or a list, tuple or dictionary of trees."""

Place: TypeAlias = "Array | Path"
"""An array, or the file from which worker processes map it."""

METHODS = {"sgd": "downpour", "lbfgs": "sandblaster"}
"""The strategy of each method where nobody names one."""

FLOATS = ("float32", "float64")
CPU = 1  # DLPack's number of the device
LARGE_BYTES = 1 << 20
"""Larger arrays are mapped into every process from one file; smaller ones are sent to each."""


@dataclass(frozen=True)
class Minimum:
    """The result of minimize(): the parameters in your own containers, and the figures of the run.

    For an ensemble, `parameters` is a list with one such set for every machine.
    """

    parameters: Tree
    result: Result


def minimize(
    outputs: Callable[[Tree, Array], Any],
    gradients: Callable[[Tree, Array, Array], Tree],
    parameters: Tree,
    data: tuple[Any, Any],
    *,
    machines: int = 1,
    method: str = "sgd",
    strategy: Strategy | str | None = None,
    test: tuple[Any, Any] | None = None,
    loss: Callable[[Array, Array], float] | None = None,
    lr: float = 0.1,
    batch: int = 64,
    transport: str = "processes",
    **settings: Any,
) -> Minimum:
    """Minimize the mean loss over `data` from `parameters` on, on `machines` workers.

    `method` is "sgd", gradient descent on batches whose workers `strategy` synchronises, by default
    "downpour"; or "lbfgs" on the whole data, by strategy "sandblaster". That one needs the `loss` whose
    gradients these are, and evaluates it once an epoch.

    `gradients(parameters, x, y)` returns the gradients of the mean loss over some rows of `data`, an (inputs,
    labels) pair, in the same containers as `parameters`: an array, or a list, tuple or dictionary of arrays,
    nested as you like. Its arguments are read-only. `outputs(parameters, x)` and `loss(outputs, y)`, the mean
    over the rows, are called on the rows of `test` for the report: the accuracy in percent if labels are
    integers, and the loss, by default the mean squared error for real labels. Without `test` neither is
    reported.

    Worker processes import your functions, so define them at the top level of a module; with
    `transport="sim"` they may be any callables. `settings` are those of `run`: codec, epochs, seed,
    checkpoint, network and so on. Raises ValueError for gradients whose shape differs from the parameters',
    and Diverged for gradients that are not finite. Both name the array; from a worker process they come as
    WorkerFailed.
    """
    named = list(pairs(parameters, parameters, "parameters"))
    start = start_of(named)
    algorithm = choose_strategy(method, strategy)
    if algorithm.deal.portions and loss is None:
        raise ValueError("a line search compares losses: give loss(outputs, y), whose gradients these are")
    functions = Functions(outputs, gradients, shaped(parameters, iter([name for name, _ in named])))
    if transport != "sim":
        check_importable(outputs=outputs, gradients=gradients, loss=loss)
    with ExitStack() as closing:
        folder = None
        if transport != "sim":
            folder = Path(closing.enter_context(temporary_folder()))
        task = Task(
            name="minimize",
            model=partial(Described, functions, placed(start, folder, "start")),
            data=partial(read_data, placed(columns(data, test), folder, "data")),
            loss=partial(score, loss, algorithm.deal.portions),
            lr=lr,
            batch=batch,
        )
        result = run(task, algorithm, workers=machines, transport=transport, **settings)
    model = result.model
    if isinstance(model, EnsembleModel):
        return Minimum([found(member, parameters) for member in model.members], result)
    return Minimum(found(model, parameters), result)


# -- checks of the arguments, before any process starts --------------------------------------------


def choose_strategy(method: str, strategy: Strategy | str | None) -> Strategy:
    """The strategy for a method, or the one that was named. Raises ValueError if they do not go together."""
    check_word("method", method, METHODS)
    chosen = METHODS[method] if strategy is None else strategy
    algorithm = STRATEGIES.read(chosen) if isinstance(chosen, str) else chosen
    if method == "lbfgs" and not algorithm.deal.portions:
        word = STRATEGIES.name_of(algorithm)
        raise ValueError(f"method 'lbfgs' is strategy 'sandblaster', not {word!r}; leave strategy out")
    return algorithm


def pairs(like: Tree, tree: Tree, name: str) -> Iterator[tuple[Any, Any]]:
    """Yield (name, leaf) for each leaf of `tree`, in the order of `like`.

    Names are paths such as "parameters['w'][0]". Raises ValueError if `tree` is nested differently.
    """
    if isinstance(like, dict):
        if not isinstance(tree, dict) or tree.keys() != like.keys():
            raise ValueError(f"gradients() returned {kind(tree)} for {name}, which is {kind(like)}")
        for key, part in like.items():
            yield from pairs(part, tree[key], f"{name}[{key!r}]")
    elif isinstance(like, list | tuple):
        if not isinstance(tree, list | tuple) or len(tree) != len(like):
            raise ValueError(f"gradients() returned {kind(tree)} for {name}, which is {kind(like)}")
        for number, part in enumerate(like):
            yield from pairs(part, tree[number], f"{name}[{number}]")
    else:
        yield name, tree


def kind(tree: Tree) -> str:
    """A short description of a container, for messages."""
    if isinstance(tree, dict):
        return f"a dictionary of {', '.join(map(repr, tree)) or 'nothing'}"
    if isinstance(tree, list | tuple):
        return f"a {type(tree).__name__} of {len(tree)}"
    return f"a single {type(tree).__name__}"


def shaped(like: Tree, leaves: Iterator[Any]) -> Tree:
    """Put the next leaves into containers like those of `like`."""
    if isinstance(like, dict):
        return {key: shaped(part, leaves) for key, part in like.items()}
    if isinstance(like, list | tuple):
        parts = [shaped(part, leaves) for part in like]
        if hasattr(like, "_fields"):  # a named tuple, whose constructor takes the parts as arguments
            return type(like)(*parts)
        return parts if isinstance(like, list) else tuple(parts)
    return next(leaves)


def array_of(value: Any) -> Array:
    """Convert any framework's array to NumPy, without a copy if possible.

    Raises TypeError for an array on another device that cannot be copied to the CPU.
    """
    exported = hasattr(value, "__dlpack__")
    if hasattr(value, "__array__") or not exported:
        try:
            return np.asarray(value)
        except TypeError:  # what CuPy and torch raise for an array on a GPU
            if not exported or value.__dlpack_device__()[0] == CPU:
                raise
    return brought(value)


def brought(value: Any) -> Array:
    """Convert an array by DLPack, with a copy to the CPU if NumPy and its library support that."""
    try:
        try:
            return np.from_dlpack(value, device="cpu")
        except TypeError:  # NumPy before 2.1, or a library whose __dlpack__ takes no device
            return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"NumPy cannot read this {type(value).__name__} ({error}): bring it to the CPU first"
        ) from error


def start_of(named: Sequence[tuple[str, Any]]) -> list[Array]:
    """The initial parameters as arrays. Raises ValueError unless all have the same floating dtype."""
    arrays = [array_of(value) for _, value in named]
    if not arrays:
        raise ValueError("parameters holds no array: there is nothing to train")
    for (name, _), array in zip(named, arrays, strict=True):
        if array.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {array.dtype}; take {' or '.join(FLOATS)}")
        if array.dtype != arrays[0].dtype:
            raise ValueError(
                f"{named[0][0]} has dtype {arrays[0].dtype} and {name} {array.dtype}; take one for all"
            )
    return arrays


def columns(data: Any, test: Any) -> list[Array]:
    """Inputs and labels for training and testing, as contiguous arrays. Raises ValueError if not numeric."""
    found: list[Array] = []
    for name, given in (("data", data), ("test", test)):
        if given is not None and not (isinstance(given, list | tuple) and len(given) == 2):
            raise ValueError(f"{name} is {kind(given)}; give a pair of arrays, inputs and labels")
        parts = [part[:0] for part in found] if given is None else [array_of(part) for part in given]
        for part, what in zip(parts, ("inputs", "labels"), strict=True):
            if part.dtype.kind not in "biuf" or not part.ndim:
                raise ValueError(f"the {what} of {name} are not a numeric array: {part.dtype}, {part.shape}")
        found += [np.ascontiguousarray(part) for part in parts]
    return found


def check_importable(**functions: Callable[..., Any] | None) -> None:
    """Raise ValueError for a function that worker processes cannot import."""
    for name, function in functions.items():
        if not is_importable(function):
            raise ValueError(
                f"{name}={function!r} cannot be imported by worker processes: define it at the top level of "
                "a module, or take transport='sim', which needs no processes"
            )


def is_importable(function: Callable[..., Any] | None) -> bool:
    """Whether another process can import the function. One that was typed in at a prompt is in no file."""
    typed_in = not hasattr(sys.modules["__main__"], "__file__")
    if typed_in and getattr(function, "__module__", None) == "__main__":
        return False
    try:
        ForkingPickler.dumps(function)
    except Exception:  # pickling user objects may raise anything
        return False
    return True


def placed(arrays: Sequence[Array], folder: Path | None, name: str) -> tuple[Place, ...]:
    """Save large arrays to `folder`, if given. Returns their files, and the other arrays themselves."""
    places: list[Place] = []
    for number, array in enumerate(arrays):
        if folder is None or array.nbytes < LARGE_BYTES:
            places.append(array)
        else:
            places.append(folder / f"{name}-{number}.npy")
            np.save(folder / f"{name}-{number}.npy", array)
    return tuple(places)


# -- the model at a worker -------------------------------------------------------------------------


def opened(place: Place) -> Tensor:
    """An array as a tensor. A file is mapped copy-on-write, so processes share its memory."""
    array = np.load(place, mmap_mode="c") if isinstance(place, Path) else place
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def read_only(tensor: Tensor) -> Array:
    """A tensor as a read-only array."""
    array: Array = tensor.detach().numpy()
    array.flags.writeable = False
    return array


def read_data(places: Sequence[Place]) -> Data:
    """Load the data in one process."""
    return Data(*map(opened, places))


@dataclass(frozen=True)
class Functions:
    """The user's functions. `names` is a tree like the parameters, with each array's name for messages."""

    outputs: Callable[[Tree, Array], Any]
    gradients: Callable[[Tree, Array, Array], Tree]
    names: Tree


class Described(nn.Module):
    """A module whose outputs and gradients come from the user's functions."""

    def __init__(self, functions: Functions, start: Sequence[Place]) -> None:
        super().__init__()
        self.functions = functions
        self.arrays = nn.ParameterList([nn.Parameter(opened(place).clone()) for place in start])

    def forward(self, x: Tensor) -> Tensor | Asked:
        """The outputs; in training a placeholder, because the gradients need the labels, too."""
        return Asked(self, x) if self.training else self.outputs(x)

    def outputs(self, x: Tensor) -> Tensor:
        """Call the user's function for outputs."""
        answer = array_of(self.functions.outputs(self.tree(), read_only(x)))
        if answer.shape[:1] != (len(x),):
            raise ValueError(f"outputs() returned shape {answer.shape} for {len(x)} inputs; give one each")
        return torch.from_numpy(np.array(answer))

    def tree(self) -> Tree:
        """The current parameters in the user's containers, read-only."""
        return shaped(self.functions.names, map(read_only, self.arrays))

    def gradients(self, x: Array, y: Array) -> list[Tensor]:
        """Call the user's gradient function. Returns its checked gradients in the order of `arrays`."""
        answer = self.functions.gradients(self.tree(), x, y)
        found = pairs(self.functions.names, answer, "parameters")
        return [gradient_for(name, value, p) for (name, value), p in zip(found, self.arrays, strict=True)]


@dataclass(frozen=True)
class Asked:
    """The placeholder for a training step's outputs: the inputs, until the labels are known."""

    model: Described
    x: Tensor

    def loss(self, y: Tensor, value: Tensor) -> Tensor:
        """The loss, or an empty tensor if it is unknown; its backward pass sets the gradients."""
        told: Tensor = Told.apply(  # type: ignore[no-untyped-call]
            self.model.gradients(read_only(self.x), read_only(y)), value, *self.model.arrays
        )
        return told


class Told(torch.autograd.Function):
    """An autograd function with given gradients with respect to the parameters."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], value: Tensor, *parameters: Tensor) -> Tensor:
        """Keep the gradients, and return the value."""
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that `forward` was given."""
        return None, None, *ctx.gradients


def gradient_for(name: str, value: Any, parameter: Tensor) -> Tensor:
    """Convert the gradient of one array to a tensor.

    Raises ValueError if it does not fit the parameter, and Diverged if it is not finite.
    """
    array = array_of(value)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"gradients() returned {type(value).__name__} of {array.dtype} for {name}")
    if array.shape != tuple(parameter.shape):
        raise ValueError(
            f"gradients() returned shape {array.shape} for {name}, which has shape {tuple(parameter.shape)}"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        suspicious = not np.isfinite(array.sum())  # one fast pass over memory
    if suspicious and len(bad := np.argwhere(~np.isfinite(array))):
        place = tuple(map(int, bad[0]))
        raise Diverged(
            f"gradients() returned {array[place]} at {place} of {name}; "
            "try a smaller lr, or look for inputs that are not finite"
        )
    return torch.from_numpy(np.array(array)).to(parameter.dtype)


def score(
    loss: Callable[[Array, Array], float] | None, evaluates: bool, out: Tensor | Asked, y: Tensor
) -> Tensor:
    """The loss of outputs for the report; in training the tensor whose backward pass sets the gradients.

    Its value is the loss only if training `evaluates` it.
    """
    if isinstance(out, Asked):
        value = score(loss, False, out.model.outputs(out.x), y) if evaluates else torch.empty(0)
        return out.loss(y, value)
    if loss is not None:
        return torch.tensor(float(loss(read_only(out), read_only(y))), dtype=torch.float64)
    if y.is_floating_point() and out.shape == y.shape:
        return F.mse_loss(out, y)
    return torch.tensor(float("nan"))


def found(model: nn.Module | None, parameters: Tree) -> Tree:
    """The parameters of a trained model, in the user's containers."""
    assert isinstance(model, Described)
    return shaped(parameters, iter([p.detach().numpy().copy() for p in model.arrays]))
