"""Models of other libraries, built from their configurations without weights and without a network."""

import json
import tempfile
from pathlib import Path

STAGES = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 2, 2, 1], "num_labels": 5}


def hf_convnext():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(**STAGES))


def hf_convnext_tiny():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig())


def hf_convnext_v2():
    from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

    return ConvNextV2ForImageClassification(ConvNextV2Config(**STAGES))


def hf_resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(embedding_size=8, layer_type="basic", **STAGES))


def hf_regnet():
    from transformers import RegNetConfig, RegNetForImageClassification

    return RegNetForImageClassification(RegNetConfig(embedding_size=8, groups_width=4, **STAGES))


def hf_efficientnet():
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    # With transformers' default of 0.02, outputs of an untrained model are about 1e-37.
    sizes = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "initializer_range": 0.5}
    return EfficientNetForImageClassification(EfficientNetConfig(image_size=64, num_labels=5, **sizes))


def smp_unet_convnext():
    from segmentation_models_pytorch import Unet

    channels = (32, 16, 16, 8)
    return Unet("tu-test_convnext", encoder_weights=None, encoder_depth=4, decoder_channels=channels, classes=2)


def smp_unet_resnet():
    from segmentation_models_pytorch import Unet

    return Unet("tu-test_resnet", encoder_weights=None, decoder_channels=(16, 16, 8, 8, 8), classes=2)


def monai_unet():
    from monai.networks.nets import UNet

    return UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 8, 16), strides=(2, 2, 2), num_res_units=1
    )


def monai_basic_unet():
    from monai.networks.nets import BasicUNet

    return BasicUNet(spatial_dims=3, in_channels=1, out_channels=2, features=(4, 4, 8, 8, 16, 4))


def open_clip_small():
    """A ConvNeXt of timm's with a small transformer for texts, by a configuration of the user's own."""
    import open_clip

    vision = {"timm_model_name": "test_convnext", "timm_model_pretrained": False, "timm_pool": "", "image_size": 64}
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


def yolov8n():
    return yolo("yolov8n.yaml")


def yolo26n():
    return yolo("yolo26n.yaml")
