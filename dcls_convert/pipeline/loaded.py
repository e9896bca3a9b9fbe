"""What a request names, loaded: how the network is built, its structure, weights and images."""

from functools import cached_property

from torch import Tensor, nn

from ..fitting.images import Calibration, calibrate
from ..networks.recognition import known_source, stated_input_size
from ..networks.sites import ModelConvs, find_convs
from ..networks.source import (
    FOREIGN_SOURCES,
    ModelSource,
    build_model,
    resolve_model,
)
from ..networks.weights import build_with_state, check_weights, read_weights, with_names_of
from ..planning.plan import ConversionPlan
from ..progress import Notify, silent
from ..surgery.authors import AuthorsWeights, sort_weights
from .request import ConversionRequest


class LoadedNetwork:
    """The network of a request. Each part is loaded once, when it is first used.

    No part depends on which other was used before. Only carrying out a conversion changes the
    network, and with it `structure` if the request's model is in memory.

    Args:
        request: What was asked. Its model may be code of the user's own, which is run.
        notify: Told about progress.
        note: Told what the user should know.
    """

    def __init__(
        self, request: ConversionRequest, *, notify: Notify = silent, note: Notify = silent
    ) -> None:
        self.request = request
        self.notify = notify
        self.note = note
        # Entries of the weights until the network has taken them; they would double its memory.
        self._entries: dict[str, Tensor] | None = None
        self._images: dict[tuple[int, ...] | None, Calibration] = {}  # by their input size

    @cached_property
    def source(self) -> ModelSource | None:
        """How the network is built; None for a model in memory."""
        request = self.request
        if not isinstance(request.model, str):
            return None
        return resolve_model(
            request.model,
            num_classes=request.num_classes,
            in_chans=request.in_chans,
            pretrained=request.pretrained,
        )

    @cached_property
    def structure(self) -> nn.Module:
        """The network to plan from: a meta model, without weights; a model in memory itself."""
        if not isinstance(self.request.model, str):
            return self.request.model
        assert self.source is not None
        return build_model(
            self.source,
            device="meta",
            seed=self.request.seed,
            offline=self.request.offline,
            trust_code=True,
        )

    @cached_property
    def rebuildable_source(self) -> ModelSource | None:
        """The source for checkpoints; None if only the user's code can build the model."""
        if self.source is None or self.source.kind in FOREIGN_SOURCES:
            return known_source(self.structure)
        return self.source

    @cached_property
    def convs(self) -> ModelConvs:
        """The network's convolutions, traced at the input size."""
        input_size = self.request.input_size
        if input_size is None and self.rebuildable_source is not None:
            input_size = stated_input_size(self.rebuildable_source, self.structure)
        return find_convs(self.structure, input_size)

    @cached_property
    def elements(self) -> AuthorsWeights | None:
        """The weights, if they are of the authors' layers: elements that are there already."""
        if self.request.weights is None:
            return None
        entries = self._read_entries()
        elements = sort_weights(entries, self.request.weights_name)
        if elements is None:
            self._entries = entries
        return elements

    @cached_property
    def network(self) -> nn.Module:
        """The network with the weights to start from, on the request's device."""
        request = self.request
        if self.source is None:
            return self.structure
        if request.weights is not None and self.elements is None:
            return self._build_with_weights(self.source).to(request.device)
        self.notify("building with pretrained weights" if request.pretrained else "building")
        network = build_model(
            self.source, pretrained=request.pretrained, seed=request.seed, trust_code=True
        )
        return network.to(request.device)

    def check_weights(self) -> None:
        """Check that the weights fit the structure, before or without building the network.

        Raises:
            CheckpointError: They do not.
        """
        if self.elements is None and self._entries is not None:
            check_weights(
                self.structure,
                self._entries,
                self.request.weights_name,
                new_classifier=self.new_classifier,
            )

    @property
    def new_classifier(self) -> bool:
        """Whether the classifier may have another shape than the weights."""
        return self.request.num_classes is not None

    def calibration(self, plan: ConversionPlan) -> Calibration | None:
        """The request's images, at the plan's input size; None if it has none.

        Raises:
            DclsConvertError: From `calibrate`.
        """
        request = self.request
        if request.calibration is None:
            return None
        if plan.input_size not in self._images:
            self._images[plan.input_size] = calibrate(
                self.network,
                plan,
                request.calibration,
                held_out=request.held_out,
                mean=request.mean,
                std=request.std,
                note=self.note,
            )
        return self._images[plan.input_size]

    def note_kept(self, names: list[str]) -> None:
        """Say that tensors of the classifier have no values in the weights."""
        for name in names:
            self.note(f"{name} has another shape in the checkpoint and starts from random values")

    def _read_entries(self) -> dict[str, Tensor]:
        """The entries of the weights, under the network's names."""
        assert self.request.weights is not None
        self.notify("reading weights")
        return with_names_of(self.structure, read_weights(self.request.weights))

    def _build_with_weights(self, source: ModelSource) -> nn.Module:
        self.notify("building")
        assert self._entries is not None
        network, kept = build_with_state(
            source,
            self._entries,
            self.request.weights_name,
            meta=self.structure,
            seed=self.request.seed,
            new_classifier=self.new_classifier,
        )
        self.note_kept(kept)
        self._entries = None
        return network
