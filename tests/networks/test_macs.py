"""MACs of all operators are counted, with values as on the meta device."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.ops import deform_conv2d

from dcls_convert import convert_, find_convs
from dcls_convert.networks.macs import FORMULAS, MacCounter

from ..rules import rules_of

BATCH = 2


class Net(nn.Module):
    """Submodules, and a function of them and the inputs."""

    def __init__(self, call, **children):
        super().__init__()
        self.call = call
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *inputs):
        return self.call(self, *inputs)


@dataclass
class Case:
    build: Callable[[], nn.Module]
    shapes: list[tuple[int, ...]]  # of the inputs, without the batch
    macs: int  # by hand, for one image


def counted(case, device):
    with torch.device(device):
        model = case.build()
        inputs = [torch.zeros(BATCH, *shape) for shape in case.shapes]
    with torch.no_grad(), MacCounter(model.eval()) as counter:
        model(*inputs)
    return counter


def conv_and_recurrent(recurrent):
    """A convolution over 10 steps, from 4 to 6 channels, then a recurrent layer."""

    def call(net, x):
        axes = (0, 2, 1) if net.recurrent.batch_first else (2, 0, 1)
        return net.recurrent(net.conv(x).permute(axes))

    return Net(call, conv=nn.Conv1d(4, 6, 3, padding=1), recurrent=recurrent)


def convnext_block():
    def call(net, x):
        x = net.depthwise(x).movedim(1, -1)
        return net.second(F.gelu(net.first(net.norm(x))))

    return Net(
        call,
        depthwise=nn.Conv2d(8, 8, 7, padding=3, groups=8),
        norm=nn.LayerNorm(8),
        first=nn.Linear(8, 32),
        second=nn.Linear(32, 8),
    )


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def deformable(net, x, offset, mask):
    return deform_conv2d(x, offset, net.conv.weight, stride=2, padding=(1, 0), mask=mask)


def attention_macs(queries, keys, features):
    """Projections of queries and outputs, keys and values; then scores, and sums of values."""
    projections = 2 * queries * features**2 + 2 * keys * features**2
    return projections + 2 * queries * keys * features


STEPS_OF_CONV = 10 * 4 * 6 * 3
LAYER_OF_ENCODER = attention_macs(10, 10, 8) + 10 * 2 * 8 * 16
LAYER_OF_DECODER = attention_macs(4, 4, 8) + attention_macs(4, 10, 8) + 4 * 2 * 8 * 16

CASES = {
    "LSTM": Case(
        lambda: conv_and_recurrent(nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)),
        [(4, 10)],
        STEPS_OF_CONV + 10 * 2 * 4 * 5 * ((6 + 5) + (2 * 5 + 5)),
    ),
    "LSTM without bias": Case(
        lambda: conv_and_recurrent(nn.LSTM(6, 5, bias=False)),
        [(4, 10)],
        STEPS_OF_CONV + 10 * 4 * 5 * (6 + 5),
    ),
    "LSTM with projection": Case(
        lambda: conv_and_recurrent(nn.LSTM(6, 5, proj_size=3)),
        [(4, 10)],
        STEPS_OF_CONV + 10 * (4 * 5 * (6 + 3) + 5 * 3),
    ),
    "GRU": Case(
        lambda: conv_and_recurrent(nn.GRU(6, 5, batch_first=True)),
        [(4, 10)],
        STEPS_OF_CONV + 10 * 3 * 5 * (6 + 5),
    ),
    "RNN": Case(
        lambda: conv_and_recurrent(nn.RNN(6, 5, 2)),
        [(4, 10)],
        STEPS_OF_CONV + 10 * 5 * ((6 + 5) + (5 + 5)),
    ),
    "transformer": Case(
        lambda: nn.Transformer(8, 2, 2, 3, 16, batch_first=True),
        [(10, 8), (4, 8)],
        2 * LAYER_OF_ENCODER + 3 * LAYER_OF_DECODER,
    ),
    "transformer encoder": Case(encoder, [(10, 8)], 2 * LAYER_OF_ENCODER),
    "multi-head attention": Case(
        lambda: Net(
            lambda net, x: net.attention(x, x, x),
            attention=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        [(10, 8)],
        attention_macs(10, 10, 8),
    ),
    "multi-head attention without scores": Case(
        lambda: Net(
            lambda net, x: net.attention(x, x, x, need_weights=False),
            attention=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        [(10, 8)],
        attention_macs(10, 10, 8),
    ),
    "multi-head attention to other features": Case(
        lambda: Net(
            lambda net, x, y: net.attention(x, y, y),
            attention=nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True),
        ),
        [(10, 8), (7, 6)],
        2 * 10 * 8 * 8 + 2 * 7 * 6 * 8 + 2 * 10 * 7 * 8,
    ),
    # Scores that the mask hides are counted: 12 for each query.
    "causal attention, grouped heads": Case(
        lambda: Net(
            lambda net, q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
        ),
        [(4, 10, 8), (2, 12, 8), (2, 12, 8)],
        4 * 10 * 12 * (8 + 8),
    ),
    "attention, values of other size": Case(
        lambda: Net(lambda net, q, k, v: F.scaled_dot_product_attention(q, k, v)),
        [(10, 8), (12, 8), (12, 6)],
        10 * 12 * (8 + 6),
    ),
    "deformable convolution": Case(
        lambda: Net(deformable, conv=nn.Conv2d(8, 6, (3, 5), groups=2)),
        [(8, 9, 13), (2 * 15, 5, 5), (15, 5, 5)],
        5 * 5 * 6 * (8 // 2) * 3 * 5,
    ),
    "ConvNeXt block": Case(convnext_block, [(8, 9, 14)], 9 * 14 * 8 * 7 * 7 + 9 * 14 * 2 * 8 * 32),
    "transposed convolution": Case(
        lambda: nn.ConvTranspose2d(8, 6, (3, 2), stride=2, groups=2),
        [(8, 9, 14)],
        9 * 14 * 8 * (6 // 2) * 3 * 2,
    ),
    "einsum": Case(
        lambda: Net(lambda net, x, y: torch.einsum("bhqc,bhkc->bhqk", x, y)),
        [(2, 10, 8), (2, 12, 8)],
        2 * 10 * 12 * 8,
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_macs_are_those_counted_by_hand(case, device):
    counter = counted(case, device)
    assert counter.macs == BATCH * case.macs
    assert counter.uncounted == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_padded_sequences_count_as_long_as_the_longest():
    def call(net, x):
        is_padding = torch.arange(13) >= torch.tensor([[10], [3]])
        return net.encoder(x, src_key_padding_mask=is_padding)

    counter = counted(Case(lambda: Net(call, encoder=encoder()), [(13, 8)], 0), "cpu")
    assert counter.macs == BATCH * 2 * LAYER_OF_ENCODER


def test_kernels_of_gpus_have_formulas():
    lstm = nn.LSTM(6, 5, 2, bidirectional=True, proj_size=3, device="meta")
    x = torch.zeros(10, BATCH, 6, device="meta")
    hidden = torch.zeros(4, BATCH, 3, device="meta")
    cell = torch.zeros(4, BATCH, 5, device="meta")
    with MacCounter(lstm) as counter:
        torch._cudnn_rnn(
            x,
            lstm._flat_weights,
            5,
            None,
            hidden,
            cell,
            2,
            5,
            3,
            2,
            False,
            0.0,
            False,
            True,
            [],
            None,
        )
    assert counter.macs == 10 * BATCH * 2 * 2 * (4 * 5 * (6 + 3) + 5 * 3)

    query = torch.zeros(BATCH, 4, 10, 8, device="meta")
    key = torch.zeros(BATCH, 2, 12, 8, device="meta")
    with MacCounter(lstm) as counter:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, key)
    assert counter.macs == BATCH * 4 * 10 * 12 * (8 + 8)


def test_operators_that_torch_lacks_need_no_formula(monkeypatch):
    monkeypatch.setitem(FORMULAS, "aten::operator_of_another_version", lambda: 0)
    case = CASES["GRU"]
    assert counted(case, "cpu").macs == BATCH * case.macs


def test_a_network_of_ones_own_is_counted_with_its_values():
    case = CASES["LSTM"]
    assert find_convs(case.build(), input_size=(4, 10)).macs == case.macs


class Hidden(torch.autograd.Function):
    """A product that torch does not see."""

    @staticmethod
    def forward(ctx, x, weight):
        return torch.from_numpy(np.matmul(x.numpy(), weight.detach().numpy().T))


class HiddenLinear(nn.Linear):
    def forward(self, x):
        return Hidden.apply(x, self.weight)


def test_modules_with_hidden_products_are_named():
    hidden = HiddenLinear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(hidden, nn.ReLU(), hidden))
    with torch.no_grad(), MacCounter(model) as counter:
        model(torch.zeros(2, 4))
    assert counter.uncounted == ("1.0",)
    assert counter.macs == 2 * 4 * 4


class ConvAndHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.hidden = HiddenLinear(10, 10, bias=False)

    def forward(self, x):
        return self.hidden(self.conv(x))


ANY_CONV = rules_of({"match": {"dims": 1}, "dilated_size": 5})


def test_macs_that_are_too_low_are_said_to_be():
    model = ConvAndHidden()
    with pytest.warns(UserWarning, match="the MACs are too low: nothing was counted in hidden"):
        report = convert_(model, rules=ANY_CONV, init="random", input_size=(4, 10))
    assert report.macs.before == 10 * 4 * 4 * 3
    assert "MACs are too low: nothing was counted in hidden." in " ".join(str(report).split())


class Scale(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return x * self.gamma


class Added(nn.Module):
    def __init__(self, parameter_name):
        super().__init__()
        self.register_parameter(parameter_name, nn.Parameter(torch.zeros(8, 9)))

    def forward(self, x):
        return x + next(self.parameters())


class RootWithEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(8, 9))
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(x + self.tokens)


# Of inputs (2, 4, 8, 9)
WITHOUT_HIDDEN_PRODUCTS = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "layer norm": lambda: nn.LayerNorm((4, 8, 9)),
    "RMS norm": lambda: nn.RMSNorm((8, 9)),
    "PReLU": lambda: nn.PReLU(4),
    "embedding": lambda: Net(lambda net, x: net.table(x.long()), table=nn.Embedding(7, 5)),
    "embedding bag": lambda: Net(
        lambda net, x: net.table(x.long().flatten(1)), table=nn.EmbeddingBag(7, 5)
    ),
    "layer scale": lambda: Scale(4, 1, 1),
    "position embedding": lambda: Scale(1, 4, 8, 9),
    "untied biases": lambda: Added("bias"),
    "embedding of pixels": lambda: Added("pos_embed"),
    "embedding of the whole network": RootWithEmbedding,
    "not called": lambda: Net(lambda net, x: F.conv2d(x, net.conv.weight), conv=nn.Conv2d(4, 4, 1)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(9, 9)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(9, 9)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
}


@pytest.mark.parametrize("build", WITHOUT_HIDDEN_PRODUCTS.values(), ids=WITHOUT_HIDDEN_PRODUCTS)
def test_modules_without_hidden_products_are_not_named(build):
    assert counted(Case(build, [(4, 8, 9)], 0), "cpu").uncounted == ()
