"""Convolutions with learnable element positions (DCLS) for any timm or torchvision model.

    import dcls_convert
    report = dcls_convert.convert_(model, dilated_size=17)

The public names are listed in `__init__.pyi` and imported on first use, so that the command line
answers without importing torch. Importing the package registers its architecture with timm, at once
or as soon as timm is imported.
"""

import lazy_loader

from .timm_plugin import register_when_timm_is_imported

__version__ = "0.4.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_when_timm_is_imported()
