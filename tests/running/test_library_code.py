"""Networks of timm and torchvision are not measured when users convert them, but here.

No layer that users get is used by other code, or lets outputs look to a new side.
"""

import pytest

from dcls_convert import plan_conversion
from dcls_convert.conversion.open_network import examine, open_network
from dcls_convert.conversion.request import NetworkRequest
from dcls_convert.errors import NothingMatchesError
from dcls_convert.networks.building import build_model
from dcls_convert.networks.measure import measure
from dcls_convert.networks.source import registry_names
from dcls_convert.progress import ignore_messages

from ..choosing.test_survey import module_of
from ..rules import rules_of

# Where the default rules match nothing, as in vision transformers, whose patches have no padding.
EVERY_KERNEL = rules_of({"match": {"kernel_size": {"min": 3}}, "padding": "any"})

LEFT_OUT = {
    "timm.models.deepseek_vit": "measuring its only convolution takes minutes",
    "timm.models.gemma4_vit": "has no convolution",
    "timm.models.naflexvit": "has no convolution",
    "torchvision.models.detection.fcos": "finds nothing in random images",
    "torchvision.models.detection.mask_rcnn": "finds nothing in random images",
}
SMALLER = {  # than the network of the shortest name, which takes minutes
    "timm.models.cait": "timm:cait_xxs24_224",
    "timm.models.eva": "timm:eva02_tiny_patch14_224",
}


def measured(name):
    """Measure exactly the layers that a user's plan replaces."""
    request = NetworkRequest(model=name)
    network, _ = open_network(request, offline=True, notify=ignore_messages, note=ignore_messages)
    found_convs = examine(network, request)
    try:
        plan = plan_conversion(found_convs)
    except NothingMatchesError:
        plan = plan_conversion(found_convs, EVERY_KERNEL)
    model = build_model(network.source)
    convs = {layer.name: model.get_submodule(layer.name) for layer in plan.layers}
    found = measure(model, convs, found_convs.inputs)  # in training mode, some need labels
    windows = {layer.name: layer.dilated_size for layer in plan.layers}
    broken = {} if found.dependence is None else found.dependence.broken_by(windows)
    return found.reasons, broken


SMALL = (
    "timm:cpubone_nano",  # even kernels
    "timm:inception_next_atto",  # some channels
    "timm:repghostnet_050",  # branches
    "timm:test_convnext",  # layer scale
    "timm:test_nfnet",  # standardised weights
    "timm:test_resnet",
    "timm:test_vit",  # patches
    pytest.param("torchvision:mc3_18", marks=pytest.mark.slow),  # 3-D
    "torchvision:shufflenet_v2_x0_5",
)


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_use_no_planned_layer_in_another_way(name):
    assert measured(name) == ({}, {})


def one_of_each_module():
    """Return a network of each module of timm and torchvision, mostly that of the shortest name."""
    names = sorted(registry_names(), key=len, reverse=True)
    networks = {module_of(name): name for name in names} | SMALLER
    return sorted(name for module, name in networks.items() if module not in LEFT_OUT)


@pytest.mark.zoo
@pytest.mark.parametrize("name", one_of_each_module())
def test_no_family_uses_a_planned_layer_in_another_way(name):
    assert measured(name) == ({}, {})
