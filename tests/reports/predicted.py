"""Predicted reports of timm models."""

import functools

import timm

from dcls_convert import find_convs, plan_conversion, predict_report

from ..planning.nets import on_meta


@functools.cache
def predicted_report(name, **options):
    convs = find_convs(on_meta(timm.create_model, name))
    return predict_report(plan_conversion(convs, model=f"timm:{name}", **options))
