"""Laws of layers in training under torch.func and forward-mode AD, which forbid changes in place:
positions count as the nearest ones inside of the window, as in eval mode, and stay as they are.
"""

import copy

import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from dcls_convert.layers.dcls_conv import DCLS_LAYERS

from .common import close, every_interpolation, randn

# torch warns about its own code at the first use of forward-mode AD.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
WINDOW = (5, 3, 4)  # the first axes of it
INPUT = (2, 2, 4, 3, 3)
SCALE = 2.5  # of positions from N(0, 1 cell); about half are then outside of some axis


def network(dims: int, interpolation: str) -> nn.Module:
    """Two tied layers whose positions, and sigmas, are partly outside of their limits."""
    make = {
        "kernel_count": 2,
        "dilated_kernel_size": WINDOW[:dims],
        "interpolation": interpolation,
        "padding": 2,
    }
    first, second = (DCLS_LAYERS[dims](2, 2, **make) for _ in range(2))
    second.tie_(first)
    model = nn.Sequential(first, nn.Tanh(), second).double()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            parameter.copy_(randn(*parameter.shape, seed=index))
            if name.endswith("positions"):
                parameter.mul_(SCALE)
    return model


def loss(model, parameters, x):
    return functional_call(model, parameters, (x,)).square().sum()


def directions(parameters):
    return {name: randn(*value.shape, seed=9) for name, value in parameters.items()}


def dual_numbers(model, parameters, x):
    """Forward-mode AD without torch.func."""
    with forward_ad.dual_level():
        duals = {}
        for name, direction in directions(parameters).items():
            duals[name] = forward_ad.make_dual(parameters[name].detach().clone(), direction)
        return forward_ad.unpack_dual(functional_call(model, duals, (x,)))[:]


def ensemble(model, parameters, x):
    models = [model, copy.deepcopy(model)]
    stacked, buffers = func.stack_module_state(models)
    run = func.vmap(lambda *state: functional_call(model, state, (x,)), randomness="different")
    return run(stacked, buffers)


TRANSFORMS = {
    "jvp": lambda model, _, x: func.jvp(model, (x,), (x.cos(),)),
    "jacrev": lambda model, _, x: func.jacrev(model)(x),
    "jacfwd": lambda model, _, x: func.jacfwd(model)(x),
    "jvp by parameters": lambda model, parameters, x: func.jvp(
        lambda values: loss(model, values, x), (parameters,), (directions(parameters),)
    ),
    "gradients of each image": lambda model, parameters, x: func.vmap(
        func.grad(lambda values, image: loss(model, values, image[None])), (None, 0)
    )(parameters, x),
    "dual numbers": dual_numbers,
    "ensemble": ensemble,
    "Hessian": lambda model, _, x: func.hessian(lambda image: model(image).square().sum())(x),
    "Hessian by parameters": lambda model, parameters, x: func.hessian(
        lambda values: loss(model, values, x)
    )(parameters),
}


@every_interpolation
@pytest.mark.parametrize("dims", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_in_training_are_those_of_eval_mode_and_change_no_position(
    transform, dims, interpolation
):
    model = network(dims, interpolation)
    x = randn(*INPUT[: dims + 2])
    parameters = dict(model.named_parameters())
    before = copy.deepcopy(parameters)
    transformed = TRANSFORMS[transform]
    close(
        transformed(model.train(), parameters, x),
        transformed(model.eval(), parameters, x),
    )
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name])
    model.train()(x)
    for name, parameter in parameters.items():
        # Some positions and sigmas exceeded their limits: an ordinary pass clamps them.
        is_limited = name.endswith(("positions", "sigma"))
        assert torch.equal(parameter, before[name]) != is_limited
