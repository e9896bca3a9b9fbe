"""Models of other libraries, built from their configurations, without weights or a network."""

import json
import tempfile
from functools import partial
from pathlib import Path

STAGES = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 2, 2, 1], "num_labels": 5}


def hf(family, **sizes):
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, f"{family}ForImageClassification")(config)


hf_convnext = partial(hf, "ConvNext", **STAGES)
hf_convnext_tiny = partial(hf, "ConvNext")
hf_convnext_v2 = partial(hf, "ConvNextV2", **STAGES)
hf_resnet = partial(hf, "ResNet", embedding_size=8, layer_type="basic", **STAGES)
hf_regnet = partial(hf, "RegNet", embedding_size=8, groups_width=4, **STAGES)
# With transformers' default of 0.02, outputs of an untrained model are about 1e-37.
hf_efficientnet = partial(
    *(hf, "EfficientNet"),
    **{
        "width_coefficient": 0.25,
        "depth_coefficient": 0.3,
        "hidden_dim": 320,
        "initializer_range": 0.5,
    },
    **{"image_size": 64, "num_labels": 5},
)


def smp_unet(encoder, **sizes):
    from segmentation_models_pytorch import Unet

    return Unet(encoder, encoder_weights=None, classes=2, **sizes)


smp_unet_convnext = partial(
    smp_unet, "tu-test_convnext", encoder_depth=4, decoder_channels=(32, 16, 16, 8)
)
smp_unet_resnet = partial(smp_unet, "tu-test_resnet", decoder_channels=(16, 16, 8, 8, 8))


def monai(name, **sizes):
    from monai.networks import nets

    return getattr(nets, name)(spatial_dims=3, in_channels=1, out_channels=2, **sizes)


monai_unet = partial(monai, "UNet", channels=(4, 8, 8, 16), strides=(2, 2, 2), num_res_units=1)
monai_basic_unet = partial(monai, "BasicUNet", features=(4, 4, 8, 8, 16, 4))


def open_clip_small():
    """A ConvNeXt of timm's with a small transformer for texts, by a configuration of the user's
    own.
    """
    import open_clip

    vision = {
        "timm_model_name": "test_convnext",
        "timm_model_pretrained": False,
        "timm_pool": "",
        "image_size": 64,
    }
    text = {"context_length": 8, "vocab_size": 100, "width": 16, "heads": 2, "layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "small-convnext.json")
        config.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
        open_clip.add_model_config(config)
        return open_clip.create_model("small-convnext")


def open_clip_convnext_tiny():
    import open_clip

    return open_clip.create_model("convnext_tiny")


def yolo(name):
    from ultralytics import YOLO

    return YOLO(name, verbose=False).model


yolov8n = partial(yolo, "yolov8n.yaml")
yolo26n = partial(yolo, "yolo26n.yaml")
