"""Read kanji in typefaces that were never seen in training, with examples/compare.py.

    # Install the typefaces (Debian), and write the images.
    apt-get install $(python benchmarks/glyphs.py --packages)
    python benchmarks/glyphs.py FOLDER [--second]
    cd benchmarks && python ../examples/compare.py glyphs:separable --data FOLDER \\
        --input-size 1 48 48 --hflip 0 --lr 0.004 --batch-size 64 --epochs 8 --seeds 10 \\
        --sizes 5,5-kernel,5-uniform,9,9-kernel,9-uniform

FOLDER gets `train`, with 400 kanji as 23 typefaces draw them, and `val`, with the same kanji
as ten typefaces of other families draw them: 48 x 48 pixels, black on white. --second takes the
next 400 kanji. glyphs.md lists the runs, and was written before any converted network was trained.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import script_parser

if TYPE_CHECKING:
    from fontTools.ttLib import TTFont
    from PIL import Image
    from torch import nn

CLASSES = 400
SIDE = 48  # pixels of an image
DRAWN_SIDE = 96  # pixels of the drawing, which is reduced to the image
TYPE_SIZE = 80  # pixels of the drawing
MIN_INK = 20  # dark pixels of an image; a typeface may have an empty glyph for a character
FONTS = Path("/usr/share/fonts")
# Kanji of JIS X 0208, level 1, in the bytes of Shift JIS.
FIRST_KANJI = 0x889F
LAST_KANJI = 0x9872
# Font file below FONTS -> Debian's package that installs it.
TRAIN = {
    "opentype/ipaexfont-gothic/ipaexg.ttf": "fonts-ipaexfont-gothic",
    "opentype/ipaexfont-mincho/ipaexm.ttf": "fonts-ipaexfont-mincho",
    "opentype/mplus/Mplus1-Regular.otf": "fonts-mplus",
    "opentype/mplus/Mplus1-Black.otf": "fonts-mplus",
    "opentype/noto/NotoSansCJK-Regular.ttc": "fonts-noto-cjk",
    "opentype/noto/NotoSerifCJK-Bold.ttc": "fonts-noto-cjk",
    "truetype/aoyagi-soseki/aoyagi-soseki.ttf": "fonts-aoyagi-soseki",
    "truetype/arphic/ukai.ttc": "fonts-arphic-ukai",
    "truetype/arphic/uming.ttc": "fonts-arphic-uming",
    "truetype/bizud-gothic/BIZUDGothic-Bold.ttf": "fonts-morisawa-bizud-gothic",
    "truetype/cwtex/cwyen.ttf": "fonts-cwtex-yen",
    "truetype/cwtex/cwfs.ttf": "fonts-cwtex-fs",
    "truetype/dejima-mincho/dejima-mincho-r227.ttf": "fonts-dejima-mincho",
    "truetype/hanazono/HanaMinA.ttf": "fonts-hanazono",
    "truetype/kiloji/kiloji.ttf": "fonts-kiloji",
    "truetype/komatuna/komatuna.ttf": "fonts-komatuna",
    "truetype/kouzan-mouhitsu/kouzan-mouhitsu.ttf": "fonts-kouzan-mouhitsu",
    "truetype/lxgw-wenkai/LXGWWenKai-Light.ttf": "fonts-lxgw-wenkai",
    "truetype/oradano-mincho/OradanoGSRR.ttf": "fonts-oradano-mincho-gsrr",
    "truetype/reggae/ReggaeOne-Regular.ttf": "fonts-reggae",
    "truetype/sawarabi-mincho/sawarabi-mincho-medium.ttf": "fonts-sawarabi-mincho",
    "truetype/wqy/wqy-zenhei.ttc": "fonts-wqy-zenhei",
    "truetype/yozvox-yozfont/YOzRN_.ttf": "fonts-yozvox-yozfont-new-kana",
}
TEST = {
    "truetype/aoyagi-kouzan-t/AoyagiKouzanT.ttf": "fonts-aoyagi-kouzan-t",
    "truetype/seto/setofont.ttf": "fonts-seto",
    "truetype/motoya-l-maruberi/MTLmr3m.ttf": "fonts-motoya-l-maruberi",
    "truetype/cwtex/cwheib.ttf": "fonts-cwtex-heib",
    "truetype/dotgothic16/DotGothic16-Regular.ttf": "fonts-dotgothic16",
    "truetype/train/TrainOne-Regular.ttf": "fonts-train",
    "truetype/kouzan-mouhitsu/kouzan-mouhitsu-gyosho.ttf": "fonts-kouzan-mouhitsu",
    "truetype/cns11643/TW-Kai-98_1.ttf": "fonts-cns11643-kai",
    "truetype/baekmuk/batang.ttf": "fonts-baekmuk",
    "truetype/konatu/Konatu.ttf": "fonts-konatu",
}


def separable(num_classes: int = CLASSES, dilation: int = 1) -> "nn.Module":
    """A network of depthwise 3x3 and pointwise convolutions: maps of 24, 12 and 6 cells.

    It takes (N, 1, 48, 48) and has 0.17 million parameters.
    """
    from torch import nn

    class Block(nn.Module):
        """A depthwise and a pointwise convolution, with a residual connection."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(
                channels,
                channels,
                3,
                padding=dilation,
                dilation=dilation,
                groups=channels,
                bias=False,
            )
            self.norm = nn.BatchNorm2d(channels)
            self.pointwise = nn.Conv2d(channels, channels, 1, bias=False)
            self.norm_after = nn.BatchNorm2d(channels)

        def forward(self, maps):  # type: ignore[no-untyped-def]
            mixed = nn.functional.relu(self.norm(self.depthwise(maps)))
            return nn.functional.relu(maps + self.norm_after(self.pointwise(mixed)))

    def blocks(channels: int) -> nn.Module:
        return nn.Sequential(Block(channels), Block(channels), Block(channels))

    return nn.Sequential(
        _halving(1, 32, kernel_size=3, padding=1),
        blocks(32),
        _halving(32, 64, kernel_size=2, padding=0),
        blocks(64),
        _halving(64, 128, kernel_size=2, padding=0),
        blocks(128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )


def _halving(in_channels: int, out_channels: int, *, kernel_size: int, padding: int) -> "nn.Module":
    """Return a convolution that halves the map, with norm and ReLU."""
    from torch import nn

    convolution = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride=2, padding=padding, bias=False
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())


def dilated_separable(num_classes: int = CLASSES) -> "nn.Module":
    """The same network with dilated 3x3 kernels: taps three cells apart, as wide as 7x7."""
    return separable(num_classes, dilation=3)


def small_convnext(num_classes: int = CLASSES) -> "nn.Module":
    """The ConvNeXt of emoji.py, for one channel: maps of 24, 12, 6 and 3 cells."""
    import emoji

    return emoji.small_convnext(num_classes, in_chans=1)


def small_convnext_3x3(num_classes: int = CLASSES) -> "nn.Module":
    """The same with 3x3 kernels in place of 7x7."""
    import emoji

    return emoji.small_convnext(num_classes, in_chans=1, kernel_sizes=3)


def kanji() -> list[str]:
    """Return all kanji of JIS X 0208, level 1, in its order."""
    characters = []
    for code in range(FIRST_KANJI, LAST_KANJI + 1):
        try:
            character = code.to_bytes(2, "big").decode("shift_jis")
        except UnicodeDecodeError:
            continue
        if len(character) == 1:  # some bytes mean two characters of one byte
            characters.append(character)
    return characters


def shared_kanji() -> list[str]:
    """Return the kanji that every typeface has, in a random order with a fixed seed."""
    from fontTools.ttLib import TTFont

    shared = set(kanji())
    for file in (*TRAIN, *TEST):
        with TTFont(FONTS / file, fontNumber=0, lazy=True) as font:
            shared &= _characters_of(font)
    shuffled = sorted(shared)
    random.Random(0).shuffle(shuffled)
    return shuffled


def _characters_of(font: "TTFont") -> set[str]:
    return {chr(code) for code in font.getBestCmap()}


def draw(file: str, characters: Sequence[str], side: int = SIDE) -> list["Image.Image"]:
    """Draw each character in black in the middle of a white image of side x side pixels."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(FONTS / file), TYPE_SIZE)
    images = []
    for character in characters:
        image = Image.new("L", (DRAWN_SIDE, DRAWN_SIDE), 255)
        canvas = ImageDraw.Draw(image)
        left, top, right, bottom = canvas.textbbox((0, 0), character, font=font)
        corner = ((DRAWN_SIDE - left - right) / 2, (DRAWN_SIDE - top - bottom) / 2)
        canvas.text(corner, character, font=font, fill=0)
        images.append(image.resize((side, side), Image.Resampling.BICUBIC))
    return images


def has_ink(image: "Image.Image") -> bool:
    return sum(image.histogram()[:128]) >= MIN_INK


def prepare(folder: Path, *, second: bool) -> list[str]:
    """Write the images; return the characters."""
    candidates = shared_kanji()[: 3 * CLASSES]
    drawings = {file: draw(file, candidates) for file in (*TRAIN, *TEST)}
    usable = []
    for number, character in enumerate(candidates):
        if all(has_ink(images[number]) for images in drawings.values()):
            usable.append((number, character))
    chosen = usable[CLASSES : 2 * CLASSES] if second else usable[:CLASSES]
    for file, images in drawings.items():
        part = folder / ("train" if file in TRAIN else "val")
        for number, character in chosen:
            path = part / f"{ord(character):x}" / f"{Path(file).stem}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            images[number].save(path)
    return [character for _, character in chosen]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--second", action="store_true", help="the next 400 kanji")
    parser.add_argument("--packages", action="store_true", help="names of Debian's packages")
    options = parser.parse_args()
    if options.packages:
        print(*sorted(set(TRAIN.values()) | set(TEST.values())))
    if options.folder is not None:
        characters = prepare(options.folder, second=options.second)
        print(f"{len(characters)} kanji, {len(TRAIN)} typefaces to learn from, {len(TEST)} to test")


if __name__ == "__main__":
    main()
