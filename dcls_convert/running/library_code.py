"""Tell networks that consist of unchanged library code from all others."""

from torch import nn

LIBRARIES = ("timm.", "torch.", "torchvision.", "dcls_convert.")


def is_library_code(model: nn.Module) -> bool:
    """True for an unchanged network of timm or torchvision; the tests of this package cover these.

    An unchanged network consists of library code alone, without hooks, and without methods that
    other code has set on its modules.
    """
    if not type(model).__module__.startswith(("timm.", "torchvision.")):
        return False
    for module in model.modules():
        own = type(module)
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        if not own.__module__.startswith(LIBRARIES) or has_hooks:
            return False
        for name in vars(module).keys() & set(dir(own)):
            method = vars(module)[name]
            is_of_library = str(getattr(method, "__module__", "")).startswith(LIBRARIES)
            if callable(getattr(own, name)) and not is_of_library:
                return False
    return True
