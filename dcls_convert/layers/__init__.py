"""What a DCLS layer computes: sizes and padding, interpolations, kernel construction, ties and fast paths.

Knows tensors, single modules and the parameters of a model, never what a network is for. Sizes and counts come in as
arguments and are checked in the constructors. All layers work under autograd, `torch.compile`, `torch.export` and
torch.fx, and can be copied, moved and saved like those of torch.
"""
