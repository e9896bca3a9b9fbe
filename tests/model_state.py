"""The state of a model, for tests that compare it before and after a call."""


def state_of(model):
    """Return all that could change in a model: its modules, their attributes and hooks, and its
    tensors.
    """
    state = {}
    for name, module in model.named_modules(remove_duplicate=False):
        state[name] = (id(module), module.training, set(vars(module)))
        state |= {
            (name, key): list(value)
            for key, value in vars(module).items()
            if "hooks" in key and value
        }
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                facts = (
                    type(tensor),
                    tensor.device,
                    tensor.dtype,
                    tensor.requires_grad,
                    id(tensor.grad),
                )
                state[name, key] = (id(tensor), *facts, None if tensor.is_meta else tensor.tolist())
    return state
