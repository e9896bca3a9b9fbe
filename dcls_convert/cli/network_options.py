"""Options that describe a network and its conversion, for the commands that take them."""

import functools
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args

from ..conversion.request import ConversionRequest
from ..errors import DclsConvertError
from ..errors import refuse as refuse
from ..input_files import check_file, check_images
from ..options import (
    AUTO,
    CALIBRATION_IMAGES,
    MAX_COUNT,
    PLAN_PARAMETERS,
    WHAT_TO_CONVERT,
    PlanOptions,
    argument_of,
    option_name,
)
from .completion import complete_models, complete_rules
from .shared_options import MODEL_HELP, InputSize
from .typer_options import (
    WHERE,
    argument,
    choice,
    number,
    option,
    parse_numbers,
    parse_window_or_auto,
)

PRETRAINED_HELP = "Start from timm's or torchvision's trained weights."
WEIGHTS_HELP = "Start from a safetensors or torch file (including the DCLS authors' checkpoints)."
IMAGES_HELP = "Folder of images; match the network's outputs on them instead of its kernels."
MAX_IMAGES_HELP = "Images of --calibrate, evenly spread; some are held out to compare outputs on."
MEAN_HELP = (
    "Mean by which images are normalised, one for all channels or one for each "
    "(default: the model's own)."
)
STD_HELP = "Standard deviation by which images are normalised."


def typer_annotations(record: type[PlanOptions]) -> dict[str, Any]:
    """Return annotations that turn the fields of a record into typer options, by field name."""
    annotations = {}
    for option_field in fields(record):
        annotations[option_field.name] = _typer_annotation(option_field)
    return annotations


def _typer_annotation(option_field: Field[Any]) -> Any:
    declared = argument_of(option_field)
    panel = declared.group
    help = declared.help
    settings: dict[str, Any] = {}
    if declared.metavar is not None:
        settings["metavar"] = declared.metavar
    if declared.shown_default is not None:
        settings["show_default"] = declared.shown_default
    match declared.form:
        case "flag":
            return Annotated[bool, option(panel, help, option_name(option_field.name))]
        case "word":
            words = option_field.type
            if type(None) in get_args(words):  # Literal[...] | None
                words = get_args(words)[0]
            return Annotated[option_field.type, choice(words, panel, help, **settings)]
        case "size":
            return Annotated[Any, option(panel, help, parser=parse_window_or_auto, **settings)]
        case "rules":
            return Annotated[str, option(panel, help, autocompletion=complete_rules, **settings)]
    kind: type[Any] = int
    if declared.form == "number":
        kind = float
    return Annotated[
        Any,
        number(
            kind,
            declared.minimum,
            declared.maximum,
            panel,
            help,
            word=declared.word,
            unit=declared.unit,
            **settings,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The network to convert, and how: options that several commands share."""

    model: Annotated[str, argument("MODEL", MODEL_HELP, complete_models)]
    pretrained: Annotated[bool, option(WHAT_TO_CONVERT, PRETRAINED_HELP, "--pretrained")] = False
    checkpoint: Annotated[Path | None, option(WHAT_TO_CONVERT, WEIGHTS_HELP, metavar="FILE")] = None
    num_classes: Annotated[
        int | None,
        number(int, 0, MAX_COUNT, WHAT_TO_CONVERT, "Classes of the model's head.", metavar="N"),
    ] = None
    in_chans: Annotated[
        int | None, number(int, 1, MAX_COUNT, WHAT_TO_CONVERT, "Input channels.", metavar="N")
    ] = None
    options: PlanOptions = field(default_factory=PlanOptions)
    calibrate: Annotated[Path | None, option(WHERE, IMAGES_HELP, metavar="FOLDER")] = None
    images: Annotated[
        int | None,
        number(
            int,
            1,
            MAX_COUNT,
            WHERE,
            MAX_IMAGES_HELP,
            metavar="N",
            show_default=str(CALIBRATION_IMAGES),
        ),
    ] = None
    mean: Annotated[Any, option(WHERE, MEAN_HELP, metavar="M,M,M", parser=parse_numbers)] = None
    std: Annotated[Any, option(WHERE, STD_HELP, metavar="S,S,S", parser=parse_numbers)] = None
    input_size: InputSize = None

    @property
    def trained(self) -> bool:
        """True if the network has trained weights."""
        return self.pretrained or self.checkpoint is not None

    def request(self, **settings: Any) -> ConversionRequest:
        """Return the conversion request; refuse conflicting options and missing files."""
        request = ConversionRequest(
            model=self.model,
            num_classes=self.num_classes,
            in_chans=self.in_chans,
            pretrained=self.pretrained,
            weights=self.checkpoint,
            options=self.options,
            input_size=self.input_size,
            calibration=self.calibrate,
            most_images=self.images,
            mean=self.mean,
            std=self.std,
            **settings,
        )
        if self.checkpoint is not None:
            check_file(self.checkpoint)
        if self.calibrate is not None:
            check_images(self.calibrate)
        return request


def expand_options(
    command: Callable[..., None], *, omit: Container[str] = ()
) -> Callable[..., None]:
    """Give a command the fields of `NetworkOptions` and `PlanOptions` as its own arguments.

    `def models(options: PlanOptions, pattern=None)` becomes `def models(*, dilated_size="auto",
    kernel_count="auto", ..., pattern=None)`; `network_options: NetworkOptions` becomes its fields,
    with those of `PlanOptions` in place of its `options`. Fields in `omit` do not become
    arguments and keep their defaults.
    """
    plan_parameters = _typer_plan_parameters(omit)
    network_parameters = []
    for parameter in _network_parameters(plan_parameters):
        if parameter.name not in omit:
            network_parameters.append(parameter)
    plan_names = [parameter.name for parameter in plan_parameters]
    network_names = [
        parameter.name for parameter in network_parameters if parameter.name not in plan_names
    ]
    parameters = []
    takes_network = False
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        replacements = [parameter]
        if parameter.annotation is NetworkOptions:
            takes_network = True
            replacements = network_parameters
        elif parameter.annotation is PlanOptions:
            replacements = plan_parameters
        for replacement in replacements:
            parameters.append(replacement.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        plan_values = {name: values.pop(name) for name in plan_names}
        options = _plan_options(plan_values)
        if takes_network:
            network_values = {name: values.pop(name) for name in network_names}
            values["network_options"] = NetworkOptions(options=options, **network_values)
        else:
            values["options"] = options
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _typer_plan_parameters(omit: Container[str]) -> list[inspect.Parameter]:
    """Return the fields of `PlanOptions`, without those in `omit`, as parameters for typer."""
    annotations = typer_annotations(PlanOptions)
    parameters = []
    for parameter in PLAN_PARAMETERS:
        if parameter.name not in omit:
            parameters.append(parameter.replace(annotation=annotations[parameter.name]))
    return parameters


def _network_parameters(plan_parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the fields of `NetworkOptions` as parameters, with `plan_parameters` for `options`."""
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(NetworkOptions, eval_str=True).parameters.items():
        if name == "options":
            parameters += plan_parameters
        else:
            parameters.append(parameter)
    return parameters


def changed_options(record: NetworkOptions | PlanOptions) -> dict[str, Any]:
    """Return the options whose values differ from their defaults."""
    values = {}
    for record_field in fields(record):
        name = record_field.name
        value = getattr(record, name)
        if name not in ("model", "options") and value != record_field.default:
            values[name] = value
    return values


def _plan_options(values: Mapping[str, Any]) -> PlanOptions:
    """Make the options and load their rules; refuse an option that another one overrides."""
    options = PlanOptions(**values)
    conflict = options.override_message(option_name)
    if conflict is not None:
        raise DclsConvertError(conflict)
    if values["rules"] != AUTO:
        from ..planning.rule_files import load_rules

        options = replace(options, rules=load_rules(values["rules"]))
    return options
