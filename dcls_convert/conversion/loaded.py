"""Load what a request names: the network's source, its structure, weights and images."""

from dataclasses import replace
from functools import cached_property

from torch import Tensor, nn

from ..conversion.authors import AuthorsWeights, split_authors_weights
from ..errors import CheckpointError
from ..fitting.calibration_images import Calibration, calibrate
from ..networks.building import build_model
from ..networks.find_convs import find_convs
from ..networks.identify_model import assumed_input_size, infer_source
from ..networks.pretrained_cfg import set_origin_
from ..networks.registries import REGISTRIES
from ..networks.sites import ModelConvs
from ..networks.source import LIBRARY_KINDS, OTHER_TIMM_KINDS, ModelSource, resolve_model
from ..networks.state_names import rename_to_model
from ..networks.trust import check_source
from ..networks.weights import build_and_load, check_weights, differing_num_classes
from ..networks.weights_files import read_weights
from ..planning.plan import ConversionPlan
from ..progress import Note, Notify, ignore_messages
from .request import ConversionRequest


class LoadedNetwork:
    """The network of a request. Each part is loaded once, when it is first used.

    The order in which parts are used does not change their values. Only carrying out a conversion
    changes `network`, and also `structure` if the request's model is in memory: they are then the
    same object.

    Args:
        request: The request. If it names the user's own code as the model, that code is run.
        notify: Called with what is being done.
        note: Called with what the user should know.
    """

    def __init__(
        self,
        request: ConversionRequest,
        *,
        notify: Notify = ignore_messages,
        note: Note = ignore_messages,
    ) -> None:
        self.request = request
        self.notify = notify
        self.note = note
        # Entries of the weights; dropped once the network has them, or memory would double.
        self._entries: dict[str, Tensor] | None = None
        self._images: dict[tuple[int, ...] | None, Calibration] = {}  # by their input size

    @cached_property
    def source(self) -> ModelSource | None:
        """How the network is built; None for a model in memory.

        If the request states no number of classes, the weights decide it.
        """
        stated = self._stated_source
        classes = self._classes_of_weights
        if stated is None or classes is None:
            return stated
        return replace(stated, args={**stated.args, "num_classes": classes})

    @cached_property
    def _stated_source(self) -> ModelSource | None:
        """The source with the arguments of the request."""
        request = self.request
        if not isinstance(request.model, str):
            return None
        source = resolve_model(
            request.model,
            num_classes=request.num_classes,
            in_chans=request.in_chans,
            model_kwargs=request.model_kwargs,
            pretrained=request.pretrained,
        )
        if source.kind in REGISTRIES:
            check_source(source)  # or the checkpoint could not be loaded
        return source

    @cached_property
    def structure(self) -> nn.Module:
        """The network to plan from: a model in memory itself, or a meta model without weights."""
        if self.source is None or self.source == self._stated_source:
            return self._stated_structure
        return self._build_structure(self.source)

    @cached_property
    def _stated_structure(self) -> nn.Module:
        """The network of the stated source."""
        if not isinstance(self.request.model, str):
            return self.request.model
        assert self._stated_source is not None
        return self._build_structure(self._stated_source)

    def _build_structure(self, source: ModelSource) -> nn.Module:
        return build_model(
            source,
            device="meta",
            seed=self.request.seed,
            offline=self.request.offline,
            trust_code=True,
        )

    @cached_property
    def _classes_of_weights(self) -> int | None:
        """The weights' number of classes, if it differs from the model's and the request has none.

        Raises:
            CheckpointError: The numbers differ, but the model is in memory or built by the user's
                own code, so it cannot be rebuilt with another number.
        """
        request = self.request
        if request.weights is None or request.num_classes is not None:
            return None
        classes = differing_num_classes(self._stated_structure, self._read_entries())
        if classes is None:
            return None
        source = self._stated_source
        if source is None or source.kind not in LIBRARY_KINDS:
            problem = "its classifier is for another number of classes than the model's"
            raise CheckpointError(
                f"{request.weights_name}: {problem}; build the model with {classes} classes"
            )
        self.note(
            f"{request.weights_name}: has {classes:,} classes, so the model is built with that "
            "many; if you state the number, the classifier is a new one"
        )
        return classes

    @cached_property
    def rebuildable_source(self) -> ModelSource | None:
        """The source to store in checkpoints; None if only the user's code can build the model."""
        if self.source is None or self.source.kind in OTHER_TIMM_KINDS:
            return infer_source(self.structure)
        return self.source

    @cached_property
    def convs(self) -> ModelConvs:
        """The network's convolutions, traced at the input size."""
        input_size = self.request.input_size
        if input_size is None and self.rebuildable_source is not None:
            input_size = assumed_input_size(self.rebuildable_source, self.structure)
        return find_convs(self.structure, input_size)

    @cached_property
    def authors_weights(self) -> AuthorsWeights | None:
        """The weights, if they have elements of the authors' layers; None for other weights."""
        if self.request.weights is None:
            return None
        return split_authors_weights(self._read_entries(), self.request.weights_name)

    def refuse_authors_weights(self) -> None:
        """Raise CheckpointError if the weights are for layers of the authors' package."""
        if self.authors_weights is not None:
            raise CheckpointError(
                f"{self.request.weights_name}: has elements of its own, so there is nothing to "
                "compare"
            )

    @cached_property
    def network(self) -> nn.Module:
        """The network with its weights before the conversion, on the request's device."""
        request = self.request
        if self.source is None:
            return self.structure
        if request.weights is not None and self.authors_weights is None:
            network = self._build_with_weights(self.source)
            set_origin_(network, {})
            return network.to(request.device)
        self.notify("building with pretrained weights" if request.pretrained else "building")
        network = build_model(
            self.source, pretrained=request.pretrained, seed=request.seed, trust_code=True
        )
        if not request.pretrained:
            set_origin_(network, {})
        return network.to(request.device)

    def check_weights(self) -> None:
        """Check that the weights fit the structure, without building the network.

        If the network has been built with them, they were checked then, and nothing is done.

        Raises:
            CheckpointError: The weights do not fit.
        """
        if self.authors_weights is None and self._entries is not None:
            check_weights(
                self.structure,
                self._entries,
                self.request.weights_name,
                new_classifier=self.new_classifier,
            )

    @property
    def new_classifier(self) -> bool:
        """Whether the classifier's shape may differ from that in the weights."""
        return self.request.num_classes is not None

    def calibration(self, plan: ConversionPlan) -> Calibration | None:
        """Return the request's images at the plan's input size, or None if it has no calibration.

        Raises:
            DclsConvertError: As raised by `calibrate`.
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
                most_images=request.most_images,
                mean=request.mean,
                std=request.std,
                note=self.note,
            )
        return self._images[plan.input_size]

    def note_not_loaded(self, names: list[str]) -> None:
        """Note which classifier tensors start at random because the weights' shapes differ."""
        for name in names:
            self.note(f"{name} has another shape in the checkpoint and starts from random values")

    def _read_entries(self) -> dict[str, Tensor]:
        """Return the entries of the weights, renamed to the network's names."""
        request = self.request
        if self._entries is None:
            assert request.weights is not None
            self.notify("reading weights")
            entries = read_weights(request.weights, note=self.note)
            self._entries = rename_to_model(
                self._stated_structure, entries, where=request.weights_name, note=self.note
            )
        return self._entries

    def _build_with_weights(self, source: ModelSource) -> nn.Module:
        entries = self._read_entries()
        self.notify("building")
        network, not_loaded = build_and_load(
            source,
            entries,
            self.request.weights_name,
            meta=self.structure,
            seed=self.request.seed,
            new_classifier=self.new_classifier,
        )
        self.note_not_loaded(not_loaded)
        self._entries = None
        return network
